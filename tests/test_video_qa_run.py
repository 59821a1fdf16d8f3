"""Questions about videos through the command line: real mp4 files, decode processes and engines, and kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
STEPS, GROUPS = 6, 4


def command(folder: Path, *words: str) -> list[str]:
    """A short run of the demo on a set of its own."""
    sets = folder.parent / "set"
    overrides = [
        f"run_dir={folder}", f"data.train={{{sets}/train.jsonl: demo}}", f"data.eval={{{sets}/eval.jsonl: demo}}",
        f"steps={STEPS}", "save_every=2", f"rl.groups_per_step={GROUPS}", "rl.group_size=4", "eval.episodes=12",
        "imitation.steps=12", "imitation.episodes_per_step=24", "imitation.lr=3e-3", "rollout.deterministic=true",
    ]  # fmt: skip
    return [sys.executable, "run.py", *words[:1], "configs/demo_video_qa.yaml", *overrides, *words[1:]]


def start(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    return subprocess.Popen(
        command(folder, *words), cwd=ROOT, env=clean, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(process: subprocess.Popen[bytes], code: int = 0) -> str:
    output, errors = process.communicate(timeout=280)
    assert process.returncode == code, errors.decode()[-3000:]
    return output.decode()


def records(folder: Path) -> list[dict[str, Any]]:
    """Whole lines of the metrics file, without times; another process may be writing the last one."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    parsed = [json.loads(line) for line in lines if line.endswith("\n")]
    timed = ("time/", "window/", "hbm/", "data/wait_s", "data/cached", "data/decoded")
    return [{key: value for key, value in record.items() if not key.startswith(timed)} for record in parsed]


def rl_steps(folder: Path) -> list[dict[str, Any]]:
    return [record for record in records(folder) if record["phase"] == "rl" and "train/loss" in record]


def cursor(folder: Path, step: int) -> int:
    progress = json.loads((folder / "checkpoints" / f"rl_{step:06d}" / "progress.json").read_text())
    return int(progress["sampler"]["rank0"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kill_in_the_middle_of_an_epoch_resumes_at_the_next_unseen_row(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(start(whole, "train"))
    assert [record["step"] for record in rl_steps(whole)] == list(range(1, STEPS + 1))
    assert any(record["train/grad_norm"] > 1e-3 for record in rl_steps(whole)), "no gradient proves nothing"
    assert [cursor(whole, step) for step in (4, 6)] == [4 * GROUPS, 6 * GROUPS]

    process = start(killed, "train")
    deadline = time.monotonic() + 280
    while len(rl_steps(killed)) < 3:
        assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    finish(start(killed, "train", "resume=auto"))
    assert cursor(killed, STEPS) == STEPS * GROUPS
    # Rows, responses, rewards and weights are those of a run that was not killed: a row seen twice or left out shows.
    assert rl_steps(killed) == rl_steps(whole)
    assert (killed / "eval" / "step_000006" / "results.json").read_bytes() == (
        whole / "eval" / "step_000006" / "results.json"
    ).read_bytes()


@pytest.mark.slow
def test_the_doctor_finds_the_demo_sound_in_under_a_minute(tmp_path: Path) -> None:
    begun = time.monotonic()
    found = json.loads(finish(start(tmp_path / "run", "doctor", "--json")).splitlines()[-1])
    assert (found["ids_equal"], found["positions_equal"], found["blind"], found["ok"]) == (True, True, False, True)
    assert found["logprob_max_diff"] < 1e-4
    assert len(found["rows"]) == 8
    assert time.monotonic() - begun < 60
