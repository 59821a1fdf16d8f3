"""A run that was killed continues as if it had not been: real processes, real engines, kill -9."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import fresh_environment

ROOT = Path(__file__).parents[1]
STEPS = 8
OVERRIDES = [
    f"steps={STEPS}", "save_every=2", "rollout.deterministic=true", "rl.groups_per_step=3", "rl.group_size=4",
    "imitation.steps=25", "imitation.episodes_per_step=8", "imitation.lr=3e-3", "env.num_envs=8", "eval.episodes=4",
    "train.vision_tower=trained", "eval.videos=0", "runtime.max_num_seqs=16", "rl.kl_coef=0.01",
]  # fmt: skip


def start(folder: Path, *extra: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "run.py", "train", "configs/demo.yaml", *OVERRIDES, f"run_dir={folder}", *extra]
    return subprocess.Popen(
        command, cwd=ROOT, env=fresh_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def finish(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors.decode()[-3000:]


def kill_when(process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def rl_lines(folder: Path) -> list[dict[str, Any]]:
    """Metrics of the RL steps; seconds and bytes are not results."""
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    steps = [r for r in records if r["phase"] == "rl" and "train/loss" in r]
    return [{k: v for k, v in r.items() if not k.startswith(("time/", "window/", "hbm/"))} for r in steps]


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    (state,) = (folder / "checkpoints" / f"rl_{STEPS:06d}").rglob("mp_rank_00_model_states.pt")
    module: dict[str, torch.Tensor] = torch.load(state, weights_only=False)["module"]
    return module


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    finish(start(folder))
    lines = rl_lines(folder)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert sum(line["train/grad_norm"] > 1e-3 for line in lines) >= STEPS // 2, "steps without a gradient prove nothing"
    return folder


def assert_same_run(folder: Path, uninterrupted: Path) -> None:
    assert rl_lines(folder) == rl_lines(uninterrupted)
    expected = final_weights(uninterrupted)
    for name, tensor in final_weights(folder).items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kill_in_a_step_and_resume_repeats_the_run_to_the_bit(uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    kill_when(start(folder), lambda: len(lines_so_far(folder)) >= 3)
    finish(start(folder, "resume=auto"))
    assert_same_run(folder, uninterrupted)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kill_in_a_save_and_resume_repeats_the_run_to_the_bit(uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    partial = folder / "checkpoints" / ".partial-rl_000004"
    kill_when(start(folder), partial.exists)
    finish(start(folder, "resume=auto"))
    assert_same_run(folder, uninterrupted)


def lines_so_far(folder: Path) -> list[dict[str, Any]]:
    """As `rl_lines`, while another process may be writing the last line."""
    try:
        return rl_lines(folder)
    except json.JSONDecodeError:
        return []
