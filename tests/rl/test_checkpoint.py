"""Checkpoints: whole or not there, and exact."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.errors import UserError
from configs.schema import RLConfig, RunConfig
from data.task_sampler import TaskSampler
from rl.checkpoint import (
    Progress,
    incomplete_reason,
    latest_complete,
    load_checkpoint,
    prepare_run_folder,
    restore_rng,
    rng_state,
    save_checkpoint,
)


class FakeRuntime:
    """One number for weights; `save` can stop half way for as long as a test likes."""

    rank = 0
    world_size = 1

    def __init__(self, weights: int = 0, hang_s: float = 0.0) -> None:
        self.weights = weights
        self.hang_s = hang_s

    def save(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "optimizer.bin").write_bytes(b"half")
        if self.hang_s:
            (folder.parent.parent / "saving").touch()
            time.sleep(self.hang_s)
        (folder / "weights.json").write_text(json.dumps(self.weights))

    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        self.weights = json.loads((folder / "weights.json").read_text())

    def all_reduce(self, values: dict[str, float]) -> dict[str, float]:
        return values


def config_for(folder: Path, resume: str = "auto", keep: int = 2) -> RunConfig:
    return RunConfig(run_dir=str(folder), resume="auto" if resume == "auto" else "never", keep_checkpoints=keep)


def save(folder: Path, step: int, *, keep: int = 2, weights: int = 0) -> Path:
    return save_checkpoint(config_for(folder, keep=keep), FakeRuntime(weights), Progress(phase="rl", step=step))


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def draw() -> tuple[float, float, float]:
    """A number of each generator."""
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_load_gives_back_what_was_saved(tmp_path: Path) -> None:
    tasks = TaskSampler(5)
    tasks.next(3)
    seed_all(1)
    moment = rng_state()
    progress = Progress("rl", 4, {"seed": 1, "next_index": 9}, tasks.state(), {"success": 0.5}, None, {"wall_s": 1.5})
    folder = save_checkpoint(config_for(tmp_path), FakeRuntime(17), progress, moment)
    restore_rng(moment)
    drawn, expected = draw(), tasks.next(2)

    seed_all(2)
    runtime, fresh = FakeRuntime(), TaskSampler(5)
    restored = load_checkpoint(folder, runtime)
    assert draw() == drawn
    assert restored == progress
    assert runtime.weights == 17
    fresh.load_state(restored.sampler)
    assert fresh.next(2) == expected


def test_the_newest_is_found_and_rl_comes_after_imitation(tmp_path: Path) -> None:
    save_checkpoint(config_for(tmp_path, keep=9), FakeRuntime(), Progress("imitation", 200))
    save(tmp_path, 5, keep=9)
    save(tmp_path, 10, keep=9)
    newest = latest_complete(tmp_path)
    assert newest is not None
    assert newest.name == "rl_000010"


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["rl_000003", "rl_000004"]


def test_a_complete_checkpoint_is_not_written_twice(tmp_path: Path) -> None:
    save(tmp_path, 1, weights=1)
    folder = save(tmp_path, 1, weights=2)
    assert json.loads((folder / "runtime" / "weights.json").read_text()) == 1


EMPTY_MANIFEST = "manifest.json lists no files, or no config"


def edit_manifest(folder: Path, **entries: object) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | entries))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "no manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json is damaged"),
        *[
            (lambda folder, text=text: (folder / "manifest.json").write_text(text), EMPTY_MANIFEST)
            for text in ("[]", "3", "{}", '{"files": null, "config": {}}', '{"files": {}, "config": {}}')
        ],
        (lambda folder: edit_manifest(folder, config=None), EMPTY_MANIFEST),
        (lambda folder: (folder / "runtime" / "weights.json").unlink(), "runtime/weights.json is missing"),
        (lambda folder: (folder / "runtime" / "optimizer.bin").write_bytes(b"hal"), "runtime/optimizer.bin is damaged"),
        (
            lambda folder: (folder / "runtime" / "optimizer.bin").write_bytes(b"hulf"),
            "runtime/optimizer.bin is damaged",
        ),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_named(
    damage: object, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older = save(tmp_path, 2)
    newer = save(tmp_path, 4)
    assert callable(damage)
    damage(newer)
    assert incomplete_reason(newer) == reason
    with caplog.at_level(logging.WARNING):
        assert latest_complete(tmp_path) == older
    assert f"rl_000004 is incomplete ({reason})" in caplog.text
    assert latest_complete(tmp_path / "nothing here") is None


def test_kill_in_the_middle_of_a_save_leaves_the_earlier_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # D17: step 2 is complete, the process dies by SIGKILL while step 4 is half written.
    script = (
        "from pathlib import Path; from tests.rl.test_checkpoint import *\n"
        "folder, tasks = Path(sys.argv[1]), TaskSampler(0)\n"
        "for step in range(1, 5):\n"
        "    print(step, [task.seed for task in tasks.next(3)], flush=True)\n"
        "    if step % 2 == 0:\n"
        "        progress = Progress('rl', step, {}, tasks.state())\n"
        "        save_checkpoint(config_for(folder), FakeRuntime(step, hang_s=60 if step == 4 else 0), progress)\n"
    )
    repository = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], cwd=repository, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "checkpoints" / "saving").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=30)
    (tmp_path / "checkpoints" / "saving").unlink()

    with caplog.at_level(logging.WARNING):
        found = prepare_run_folder(config_for(tmp_path))
    assert found is not None
    assert found.name == "rl_000002"
    assert "rl_000004 is incomplete (its save was interrupted)" in caplog.text

    runtime, tasks = FakeRuntime(), TaskSampler(0)
    tasks.load_state(load_checkpoint(found, runtime).sampler)
    assert runtime.weights == 2
    assert f"3 {[task.seed for task in tasks.next(3)]}" in output.splitlines()
    again = save(tmp_path, 4, weights=4)  # the same save, made again, succeeds and clears what was left
    assert latest_complete(tmp_path) == again
    assert not [path for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith(".")]


def test_a_fresh_folder_is_created_and_holds_nothing_to_continue(tmp_path: Path) -> None:
    assert prepare_run_folder(config_for(tmp_path / "a" / "b", resume="never")) is None
    assert list((tmp_path / "a" / "b").rglob("*")) == [tmp_path / "a" / "b" / "checkpoints"]


def test_never_refuses_a_folder_with_a_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 3)
    with pytest.raises(UserError, match=r"rl_000003.*resume=auto"):
        prepare_run_folder(config_for(tmp_path, resume="never"))


def test_auto_refuses_another_config_and_names_the_keys(tmp_path: Path) -> None:
    save(tmp_path, 3)
    other = replace(config_for(tmp_path), seed=7, rl=RLConfig(group_size=4))
    with pytest.raises(UserError, match=r"rl.group_size \(was 8, is 4\), seed \(was 0, is 7\)"):
        prepare_run_folder(other)


def test_auto_allows_a_longer_run_with_another_rhythm(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    longer = replace(config_for(tmp_path), steps=999, save_every=1, eval_every=2, keep_checkpoints=5)
    assert prepare_run_folder(longer) == folder


def test_an_unwritable_run_folder_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run_dir .*file/run cannot be written: .* Choose another run_dir"):
        prepare_run_folder(config_for(tmp_path / "file" / "run"))


def test_a_full_disk_is_a_clear_error(tmp_path: Path) -> None:
    class FullDisk(FakeRuntime):
        def save(self, folder: Path) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"rl_000001 could not be written: No space left on device"):
        save_checkpoint(config_for(tmp_path), FullDisk(), Progress("rl", 1))
    assert latest_complete(tmp_path) is None
