"""The generated set: real files, right answers, nothing of one split in the other."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import data.demo_set
from configs.errors import UserError
from configs.schema import DataConfig, RunConfig
from data.budget import ClipSpec
from data.check import check_sets
from data.decode import decode
from data.demo_set import DIRECTIONS, SIZES, demo_row, ensure_demo_set


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.demo_set, "SIZES", {"train": 12, "eval": 9})


def bright(frame: np.ndarray) -> np.ndarray:
    return frame.max(axis=2) > 120


def read_answer(question: str, frames: np.ndarray) -> str:
    """The answer, from pixels alone."""
    if "way" in question:
        first, last = (np.argwhere(bright(frame)).mean(axis=0) for frame in (frames[0], frames[-1]))
        return max(DIRECTIONS, key=lambda name: float(np.dot(last - first, DIRECTIONS[name])))
    if "many" in question:
        mask = np.pad(bright(frames[0]), 1)
        # A box has four corners, and a pixel is a corner where an odd number of the 2x2 around it is bright.
        odd = (mask[1:, 1:].astype(int) + mask[:-1, 1:] + mask[1:, :-1] + mask[:-1, :-1]) % 2
        return str(int(odd.sum()) // 4)
    red, _, blue = frames[0][bright(frames[0])].mean(axis=0)
    return "red" if red > blue else "blue"


@pytest.mark.parametrize("split", SIZES)
def test_every_answer_is_what_the_frames_show(split: str) -> None:
    for index in range(SIZES[split]):
        fields, frames = demo_row(split, index)
        assert read_answer(fields["question"], frames) == fields["answer"], (split, index)


def test_answers_are_balanced() -> None:
    """No answer is so frequent that a guess would pass for knowledge."""
    answers = Counter(demo_row("train", index)[0]["answer"] for index in range(SIZES["train"]))
    for group in (("left", "right", "up", "down"), ("1", "2", "3"), ("red", "blue")):
        counts = [answers[name] for name in group]
        assert sum(counts) == SIZES["train"] / 3
        assert max(counts) < 1.35 * sum(counts) / len(counts)


def test_no_clip_of_one_split_is_in_the_other() -> None:
    frames = {split: {demo_row(split, i)[1].tobytes() for i in range(SIZES["eval"])} for split in SIZES}
    assert len(frames["train"]) == SIZES["eval"]
    assert not frames["train"] & frames["eval"]


def test_a_missing_set_is_made_and_passes_the_check(small: None, tmp_path: Path) -> None:
    sets = DataConfig(train={str(tmp_path / "train.jsonl"): "demo"}, eval={str(tmp_path / "eval.jsonl"): "demo"})
    report = check_sets(RunConfig(data=sets))
    assert report.findings == []
    assert {split: len(report.usable(split)) for split in ("train", "eval")} == {"train": 12, "eval": 9}
    assert {row.kind for row in report.rows["eval"]} == {"exact", "numeric", "choice"}
    row = report.rows["train"][4]
    clip = decode(row.videos[0], ClipSpec(fps=4.0))
    assert clip.frames.shape == (8, 56, 56, 3)
    assert read_answer(row.question, clip.frames) == row.answer == demo_row("train", 4)[0]["answer"]


def test_a_set_that_is_there_is_left_alone(small: None, tmp_path: Path) -> None:
    ensure_demo_set(tmp_path / "eval.jsonl")
    written = (tmp_path / "eval.jsonl").read_text()
    assert json.loads(written.splitlines()[0])["id"] == "eval-0000"
    (tmp_path / "eval.jsonl").write_text("mine")
    ensure_demo_set(tmp_path / "eval.jsonl")
    assert (tmp_path / "eval.jsonl").read_text() == "mine"
    assert sorted(path.name for path in (tmp_path / "eval").iterdir())[0] == "0000.mp4"


def test_another_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a demo set has the files train\.jsonl and eval\.jsonl"):
        ensure_demo_set(tmp_path / "test.jsonl")
