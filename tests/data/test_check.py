"""What a check finds before anything is loaded or decoded: all of it, each with its row."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import run
from configs.load import load_config
from configs.schema import DataConfig, RunConfig, SetFormat
from data.check import DataError, check_sets, clip_spec, usable_rows

ROOT = Path(__file__).parents[2]


def write_set(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def question(place: int, **fields: Any) -> dict[str, Any]:
    row = {"id": f"q{place}", "video": f"{place}.mp4", "question": f"What is {place}?", "answer": f"thing {place}"}
    return row | fields


def make_config(
    folder: Path, train: Sequence[dict[str, Any]], held_out: Sequence[dict[str, Any]] = (), **data: Any
) -> RunConfig:
    files: dict[str, SetFormat] = {write_set(folder / "train.jsonl", train): "own"}
    held: dict[str, SetFormat] = {write_set(folder / "eval.jsonl", held_out): "own"} if held_out else {}
    return RunConfig(data=DataConfig(train=files, eval=held, **data))


def touch(folder: Path, *names: object) -> None:
    for name in names:
        (folder / f"{name}.mp4").write_bytes(b"video %d" % hash(str(name)))


def count_words(texts: Sequence[str]) -> list[int]:
    return [len(text.split()) for text in texts]


def test_a_clean_set_has_counts_and_nothing_else(tmp_path: Path) -> None:
    touch(tmp_path, *range(4))
    report = check_sets(make_config(tmp_path, [question(place) for place in range(3)], [question(3)]), count_words)
    assert report.findings == []
    assert report.counts["train/rows"] == 3
    assert report.counts["train/videos"] == 3
    assert report.counts["train/kind/exact"] == 3
    assert report.counts["eval/rows"] == 1
    assert report.text_tokens == {"min": 3.0, "median": 3.0, "p95": 3.0, "max": 3.0}


def test_all_missing_files_are_listed_and_stop_the_run_unless_skipped(tmp_path: Path) -> None:
    """Development case D07: 3 of 8 rows point nowhere."""
    touch(tmp_path, 0, 2, 3, 5, 7)
    config = make_config(tmp_path, [question(place) for place in range(8)])
    with pytest.raises(DataError) as caught:
        usable_rows(config, "train")
    for place in (1, 4, 6):
        assert f"row 'q{place}': {tmp_path}/{place}.mp4: no such file" in str(caught.value)
    assert "data.on_missing=skip" in str(caught.value)
    skipping = dataclasses.replace(config, data=dataclasses.replace(config.data, on_missing="skip"))
    assert [row.id for row in usable_rows(skipping, "train")] == ["q0", "q2", "q3", "q5", "q7"]


def test_hundreds_of_missing_files_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        usable_rows(make_config(tmp_path, [question(place) for place in range(300)]), "train")
    assert str(caught.value).count("no such file") == 300


def test_empty_files_and_folders_are_missing_too(tmp_path: Path) -> None:
    (tmp_path / "0.mp4").write_bytes(b"")
    (tmp_path / "1.mp4").mkdir()
    long_name = question(2, video="x" * 300 + ".mp4")
    findings = check_sets(make_config(tmp_path, [question(0), question(1), long_name])).findings
    assert [finding.kind for finding in findings] == ["missing"] * 3
    assert "is empty" in findings[0].reason
    assert "is a folder" in findings[1].reason


def test_bad_rows_stop_the_run_unless_skipped(tmp_path: Path) -> None:
    touch(tmp_path, 0, 1)
    config = make_config(tmp_path, [question(0), question(1, answer="")])
    with pytest.raises(DataError, match=r"1 bad_row:\n.*row 'q1': the answer is ''"):
        usable_rows(config, "train")
    skipping = dataclasses.replace(config, data=dataclasses.replace(config.data, on_bad_row="skip"))
    assert [row.id for row in usable_rows(skipping, "train")] == ["q0"]


def test_leaks_are_found_under_the_same_name_another_name_and_another_path(tmp_path: Path) -> None:
    touch(tmp_path, 0, 1, 2, 9)
    shutil.copy(tmp_path / "1.mp4", tmp_path / "copy.mp4")
    (tmp_path / "link.mp4").symlink_to(tmp_path / "2.mp4")
    held_out = [
        question(10, video="0.mp4"),
        question(11, video="copy.mp4"),
        question(12, video="./link.mp4"),
        question(9),
    ]
    config = make_config(tmp_path, [question(place) for place in range(3)], held_out)
    leaks = [finding for finding in check_sets(config).findings if finding.kind == "leakage"]
    assert [finding.id for finding in leaks] == ["q10", "q11", "q12"]
    assert "row 'q1'" in leaks[1].reason
    with pytest.raises(DataError, match="3 leakage"):
        usable_rows(config, "train")
    allowed = dataclasses.replace(config, data=dataclasses.replace(config.data, on_leakage="warn"))
    assert len(usable_rows(allowed, "eval")) == 4


def test_repeated_and_contradicting_rows_are_reported_and_kept(tmp_path: Path) -> None:
    touch(tmp_path, 0, 1)
    again = question(0, id="again", question="what is  0 ?")
    other = question(0, id="other", answer="something else")
    same_id = question(1, id="q0")
    report = check_sets(make_config(tmp_path, [question(0), again, other, same_id]))
    assert [(finding.kind, finding.id) for finding in report.findings] == [
        ("duplicate", "again"),
        ("conflict", "other"),
        ("duplicate", "q0"),
    ]
    assert "'thing 0' there, 'something else' here" in report.findings[1].reason
    assert report.stopping(DataConfig()) == []


def test_rows_with_one_id_are_judged_each_for_itself(tmp_path: Path) -> None:
    """Two files called train.jsonl give the same ids by default."""
    touch(tmp_path, 0)
    files: dict[str, SetFormat] = {}
    for name, missing in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        rows = [
            question(0, question=f"{name} {line}?", video="gone.mp4" if line == missing else "0.mp4") for line in (1, 2)
        ]
        files[write_set(tmp_path / name / "train.jsonl", [row | {"id": None} for row in rows])] = "own"
    config = RunConfig(data=DataConfig(train=files, media_root=str(tmp_path), on_missing="skip"))
    assert [row.question for row in usable_rows(config, "train")] == ["one 2?", "two 1?"]
    assert [row.id for row in usable_rows(config, "train")] == ["train:2", "train:1"]


def test_answers_of_one_value_do_not_contradict(tmp_path: Path) -> None:
    touch(tmp_path, 0)
    answers = ["3", "3.0", 3, "4"]
    rows = [question(0, id=f"n{place}", answer=answer) for place, answer in enumerate(answers)]
    rows += [
        question(0, id=f"s{place}", question="When?", answer=answer)
        for place, answer in enumerate(([1, 2], "[1.0, 2.0]"))
    ]
    rows += [
        question(0, id=f"w{place}", question="Who?", answer=answer) for place, answer in enumerate(("A man", "a man."))
    ]
    found = check_sets(make_config(tmp_path, rows)).findings
    assert [(finding.kind, finding.id) for finding in found] == [
        ("duplicate", "n1"), ("duplicate", "n2"), ("conflict", "n3"), ("duplicate", "s1"), ("duplicate", "w1"),
    ]  # fmt: skip


def test_what_cannot_be_read_is_missing_and_compared_with_nothing(tmp_path: Path) -> None:
    """Two folders have one size; a pipe would be waited for, and no file is called a NUL."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.mp4").mkdir()
        os.mkfifo(tmp_path / f"{name}_pipe.mp4")
    rows = {
        name: [question(place, video=f"{name}{end}") for place, end in enumerate((".mp4", "_pipe.mp4", "\x00.mp4"))]
        for name in ("a", "b")
    }
    findings = check_sets(make_config(tmp_path, rows["a"], rows["b"])).findings
    kinds = [(finding.kind, finding.reason.rpartition(": ")[2]) for finding in findings if finding.split == "eval"]
    assert kinds[1:] == [("missing", "is a folder"), ("missing", "is no file")]
    assert kinds[0][0] == "bad_row"


def test_a_set_without_a_usable_row_stops_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    touch(tmp_path, 1)
    gone = make_config(tmp_path, [question(0)], [question(1)], on_missing="skip")
    with pytest.raises(DataError, match=r"no row of data\.train can be used"):
        usable_rows(gone, "eval")
    assert not check_sets(gone).to_dict(gone.data)["ok"]
    write_set(tmp_path / "train.jsonl", [question(1)])
    config = tmp_path / "run.yaml"
    write_set(tmp_path / "eval.jsonl", [])
    config.write_text(f"data:\n  train: {{{tmp_path}/train.jsonl: own}}\n  eval: {{{tmp_path}/eval.jsonl: own}}\n")
    assert run.main(["data", "check", str(config)]) == 2
    assert "no row of data.eval can be used" in capsys.readouterr().err


def test_the_command_in_the_readme_names_a_config_with_sets() -> None:
    (name,) = re.findall(r"run\.py data check (configs/\S+)", (ROOT / "README.md").read_text())
    assert load_config(ROOT / name, []).data.train


def test_texts_without_room_for_a_clip_and_a_response_are_too_long(tmp_path: Path) -> None:
    touch(tmp_path, 0, 1)
    rows = [question(0), question(1, question="word " * 990)]
    report = check_sets(make_config(tmp_path, rows), count_words)
    # 1024 - 8 for the response - 24 for the template = 992; 990 words fit, with a token of video they are 991 ...
    assert report.findings == []
    report = check_sets(make_config(tmp_path, [question(0), question(1, question="word " * 992)]), count_words)
    assert [(finding.kind, finding.id) for finding in report.findings] == [("too_long", "q1")]
    assert "992 tokens of text and at least 1 of video are over 992" in report.findings[0].reason


def test_no_files_is_an_error() -> None:
    with pytest.raises(DataError, match=r"data\.train and data\.eval name no file"):
        check_sets(RunConfig())


def test_a_config_says_what_of_a_video_is_shown() -> None:
    config = RunConfig(data=DataConfig(fps=1.5, max_frames=12, max_video_tokens=300, over_budget="frames"))
    spec = clip_spec(config, factor=32, temporal_patch=2, max_tokens=200)
    assert (spec.fps, spec.max_frames, spec.max_tokens, spec.gives_way, spec.factor) == (1.5, 12, 200, "frames", 32)
    assert (spec.min_pixels, spec.max_pixels) == (config.agent.min_pixels, config.agent.max_pixels)
    assert clip_spec(RunConfig(), factor=28, temporal_patch=2).max_tokens == 0


def test_ten_thousand_rows_are_checked_in_well_under_a_minute(tmp_path: Path) -> None:
    touch(tmp_path, *range(2000))
    rows = [question(place, video=f"{place % 2000}.mp4") for place in range(10_000)]
    config = make_config(tmp_path, rows, [question(place, video=f"e{place}.mp4") for place in range(500)])
    started = time.monotonic()
    report = check_sets(config, count_words)
    assert time.monotonic() - started < 30
    assert report.counts["train/rows"] == 10_000
    assert {finding.kind for finding in report.findings} == {"missing"}
    assert len(report.findings) == 500


def test_the_command_prints_all_findings_and_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    touch(tmp_path, 0)
    path = write_set(tmp_path / "set.jsonl", [question(0), question(1), question(2, answer="")])
    config = tmp_path / "run.yaml"
    config.write_text(f"data:\n  train:\n    {path}: own\n")
    assert run.main(["data", "check", str(config)]) == 2
    output = capsys.readouterr()
    assert "train/rows" in output.out
    assert "train missing: " in output.out
    assert "row 'q2': the answer is ''" in output.out
    assert output.err.startswith("error: 1 bad_row:")
    assert run.main(["data", "check", str(config), "--json", "data.on_missing=skip", "data.on_bad_row=skip"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"]
    assert result["num_findings"] == {"bad_row": 1, "missing": 1}
    assert result["text_tokens"]["max"] > 0


def test_a_format_that_does_not_exist_is_a_config_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("data:\n  train:\n    a.jsonl: owm\n")
    assert run.main(["data", "check", str(config)]) == 2
    assert "data.train.a.jsonl" in capsys.readouterr().err
