"""Sets in the layouts their authors publish, each with records as they stand in those files."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any, get_args

import pytest

from configs.schema import SetFormat
from data.readers import FORMATS, LoadedSet, load_set
from data.tables import SetError
from data.video_qa import VideoQARow


def load(folder: Path, format_name: str, content: object, name: str = "set.json") -> LoadedSet:
    path = folder / name
    if name.endswith(".jsonl"):
        assert isinstance(content, list)
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in content))
    else:
        path.write_text(json.dumps(content))
    return load_set({str(path): format_name}, "")


def only(loaded: LoadedSet) -> VideoQARow:
    assert not loaded.bad_rows
    assert len(loaded.rows) == 1
    return loaded.rows[0]


def test_every_format_of_the_config_has_a_reader() -> None:
    assert set(FORMATS) == set(get_args(SetFormat))


def test_own_lines(tmp_path: Path) -> None:
    lines: list[Any] = [
        {"id": "x", "video": "a.mp4", "question": "What colour?", "answer": "B", "options": ["red", "blue"]},
        "",
        {"video": ["a.mp4", "/m/b.mp4"], "question": "How many?", "answer": 3, "kind": "mra"},
    ]
    rows = load(tmp_path, "own", lines, "set.jsonl").rows
    assert [row.id for row in rows] == ["x", "set:3"]
    assert rows[0].videos == (tmp_path / "a.mp4",)
    assert rows[1].videos == (tmp_path / "a.mp4", Path("/m/b.mp4"))
    assert [(row.kind, row.answer) for row in rows] == [("choice", "B"), ("mra", "3")]
    assert rows[1].source == f"{tmp_path}/set.jsonl, line 3"


def test_own_parquet_equals_own_lines(tmp_path: Path) -> None:
    from arro3.io import infer_json_schema, read_json, write_parquet

    records: list[Any] = [
        {"video": "a.mp4", "question": "What colour?", "answer": "B", "options": ["red", "blue"], "kind": None},
        {"video": "b.mp4", "question": "How many?", "answer": "3", "options": None, "kind": "mra"},
    ]
    lines = load(tmp_path, "own", records, "set.jsonl")
    path = tmp_path / "set.jsonl"
    write_parquet(read_json(str(path), infer_json_schema(str(path))), str(tmp_path / "set.parquet"))
    table = load_set({str(tmp_path / "set.parquet"): "own"}, "")
    strip = [(row.videos, row.parts, row.answer, row.kind, row.options) for row in lines.rows]
    assert [(row.videos, row.parts, row.answer, row.kind, row.options) for row in table.rows] == strip
    assert table.rows[1].source.endswith("set.parquet, row 1")


def test_every_bad_row_is_listed_with_its_id_and_the_others_are_kept(tmp_path: Path) -> None:
    lines: list[Any] = [
        {"id": "a", "video": "a.mp4", "question": "What?", "answer": ""},
        "{broken",
        [1, 2],
        {"id": "d", "video": ["a.mp4", "b.mp4"], "question": "<video>\nWhat?", "answer": "x"},
        {"id": "e", "video": "a.mp4", "question": "<video><video> What?", "answer": "x"},
        {"id": "f", "video": "a.mp4", "question": "What does `<video>` do?", "answer": "x"},
        {"id": "g", "video": "a.mp4", "question": "What?", "answer": "x"},
    ]
    loaded = load(tmp_path, "own", lines, "set.jsonl")
    assert [row.id for row in loaded.rows] == ["g"]
    assert [row.id for row in loaded.bad_rows] == ["a", "set:2", "set:3", "d", "e", "f"]
    texts = [str(row) for row in loaded.bad_rows]
    assert texts[0].startswith(f"{tmp_path}/set.jsonl, line 1: row 'a': the answer is ''")
    assert "is not JSON" in texts[1]
    assert "is list" in texts[2]
    assert "2 video(s) but 1 <video>" in texts[3]
    assert "1 video(s) but 2 <video>" in texts[4]
    assert "write \\<video> if it is text" in texts[5]


@pytest.mark.parametrize(
    ("problem_type", "options", "solution", "kind", "answer"),
    [
        ("multiple choice", ["A. red", "B. blue"], "<answer>B</answer>", "choice", "B"),
        ("numerical", [], "<answer>3.5</answer>", "numeric", "3.5"),
        ("regression", None, "<answer>120</answer>", "mra", "120"),
        ("OCR", [], "<answer>EXIT 4</answer>", "ocr", "EXIT 4"),
        ("free-form", [], "<answer>A man cooks.</answer>", "text", "A man cooks."),
    ],
)
@pytest.mark.parametrize("format_name", ["video_r1", "spacer"])
def test_video_r1_and_spacer(
    tmp_path: Path, format_name: str, problem_type: str, options: Any, solution: str, kind: str, answer: str
) -> None:
    record = {
        "problem_id": 2,
        "problem": "What is seen?",
        "data_type": "video",
        "problem_type": problem_type,
        "options": options,
        "solution": solution,
        "path": "./LLaVA-Video-178K/academic_source/a.mp4",
        "data_source": "LLaVA-Video-178K",
    }
    row = only(load(tmp_path, format_name, [record]))
    assert (row.id, row.kind, row.answer) == ("2", kind, answer)
    assert row.videos == (tmp_path / "LLaVA-Video-178K/academic_source/a.mp4",)
    assert row.options == (("red", "blue") if kind == "choice" else ())
    assert row.tags["data_source"] == "LLaVA-Video-178K"


def test_video_r1_without_an_answer_or_of_another_type_is_bad(tmp_path: Path) -> None:
    record = {"problem_id": 1, "problem": "What?", "path": "a.mp4"}
    record |= {"problem_type": "free-form", "solution": "<answer></answer>"}
    loaded = load(tmp_path, "video_r1", [record, record | {"problem_type": "drawing"}])
    assert "the answer is ''" in loaded.bad_rows[0].reason
    assert "problem_type is 'drawing'. Known are multiple choice" in loaded.bad_rows[1].reason


def test_nextqa(tmp_path: Path) -> None:
    names = ["video", "frame_count", "width", "height", "question", "answer", "qid", "type"]
    names += [f"a{place}" for place in range(5)]
    values = "4010069381,369,640,480,how do the two man play the instrument,0,6,CH,roll the handle,tap their feet"
    path = tmp_path / "val.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, [*values.split(","), "strum, the string", "hit with sticks", "pat"]])
    (tmp_path / "map_vid_vidorID.json").write_text(json.dumps({"4010069381": "1164/4010069381"}))
    row = only(load_set({str(path): "nextqa"}, "/media"))
    assert row.id == "4010069381_6"
    assert row.videos == (Path("/media/1164/4010069381.mp4"),)
    assert row.question == "how do the two man play the instrument?"
    assert (row.kind, row.answer, row.options[2]) == ("choice", "A", "strum, the string")
    assert row.tags == {"type": "CH"}


def test_a_broken_map_of_nextqa_is_named(tmp_path: Path) -> None:
    (tmp_path / "map_vid_vidorID.json").write_text('{"401": "11')
    with pytest.raises(SetError, match=r"map_vid_vidorID\.json: is no JSON dictionary"):
        load(tmp_path, "nextqa", [NEXTQA | {"video": "401"}])


def test_llava_video_splits_turns_and_finds_options_in_the_text(tmp_path: Path) -> None:
    choices = "What does he hold?\nA. A cup.\nB. A phone.\nPlease respond with only the letter of the correct answer."
    record = {
        "id": "v_1",
        "conversations": [
            {"from": "human", "value": f"<image>\n{choices}"},
            {"from": "gpt", "value": "B."},
            {"from": "human", "value": "Why?"},
            {"from": "gpt", "value": "To call someone."},
        ],
        "data_source": "0_30_s_youtube_v0_1",
        "video": "liwei_youtube_videos/a.mp4",
    }
    rows = load(tmp_path, "llava_video", [record]).rows
    assert [row.id for row in rows] == ["v_1#0", "v_1#1"]
    assert rows[0].parts == (0, "What does he hold?")
    assert (rows[0].kind, rows[0].options, rows[0].answer) == ("choice", ("A cup.", "A phone."), "B")
    assert (rows[1].kind, rows[1].answer) == ("text", "To call someone.")
    bad = load(tmp_path, "llava_video", [record | {"conversations": record["conversations"][:3]}]).bad_rows
    assert "Expected pairs" in bad[0].reason


def test_vsi_bench(tmp_path: Path) -> None:
    record = {
        "id": 0,
        "dataset": "arkitscenes",
        "scene_name": "41069025",
        "question_type": "object_counting",
        "question": "How many table(s) are in this room?",
        "ground_truth": "4",
        "options": None,
    }
    choice = {
        "id": 1,
        "question_type": "object_rel_direction_easy",
        "ground_truth": "B",
        "options": ["A. left", "B. right"],
    }
    rows = load(tmp_path, "vsi_bench", [record, record | choice], "test.jsonl").rows
    assert rows[0].videos == (tmp_path / "arkitscenes/41069025.mp4",)
    assert [(row.kind, row.answer) for row in rows] == [("mra", "4"), ("choice", "B")]
    assert rows[0].tags == {"question_type": "object_counting"}


def test_perception_test(tmp_path: Path) -> None:
    question = {"id": 1, "question": "Where is it?", "options": ["left", "middle", "right"], "answer_id": 2}
    question |= {"area": "physics", "reasoning": "descriptive", "tag": ["motion"]}
    content = {"video_10": {"metadata": {"split": "valid", "video_id": "video_10"}, "mc_question": [question]}}
    row = only(load(tmp_path, "perception_test", content))
    assert (row.id, row.answer, row.options) == ("video_10_1", "C", ("left", "middle", "right"))
    assert row.videos == (tmp_path / "video_10.mp4",)
    assert row.tags == {"area": "physics", "reasoning": "descriptive"}
    question["answer_id"] = 3
    assert "option 3, but there are 3, counted from 0" in load(tmp_path, "perception_test", content).bad_rows[0].reason


def test_a_bad_question_takes_no_other_of_its_record_along(tmp_path: Path) -> None:
    good = {"question": "Where?", "options": ["left", "middle", "right"], "answer_id": 0}
    questions: list[Any] = [good | {"id": place} for place in range(6)]
    questions[1] = questions[1] | {"answer_id": 3}
    questions[2] = "Where?"
    questions[3] = questions[3] | {"options": "left, right"}
    del questions[4]["id"]
    content = {"v": {"metadata": {"video_id": "v"}, "mc_question": questions}}
    loaded = load(tmp_path, "perception_test", content)
    assert [row.id for row in loaded.rows] == ["v_0", "set:v#4", "v_5"]
    assert [(row.id, row.reason.split(".")[0]) for row in loaded.bad_rows] == [
        ("v_1", "the answer is option 3, but there are 3, counted from 0"),
        ("set:v#2", "is str"),
        ("v_3", "options are 'left, right'"),
    ]
    assert loaded.bad_rows[0].source == f"{tmp_path}/set.json, entry v, question 1"
    assert len({row.key for row in loaded.rows}) == 3


def test_a_bad_turn_takes_no_other_of_its_conversation_along(tmp_path: Path) -> None:
    human, model = {"from": "human", "value": "<video>\nWhy?"}, {"from": "gpt", "value": "To rest."}
    turns: list[Any] = [human, model, human, {"from": "gpt", "value": ""}, "Why?", model, model, human, human, model]
    loaded = load(tmp_path, "llava_video", [{"id": "v", "video": "a.mp4", "conversations": turns}])
    assert [row.id for row in loaded.rows] == ["v#0", "v#4"]
    assert [row.id for row in loaded.bad_rows] == ["v#1", "v#2", "v#3"]
    assert "the answer is ''" in loaded.bad_rows[0].reason
    assert "is str" in loaded.bad_rows[1].reason
    assert "from 'gpt', then 'human'" in loaded.bad_rows[2].reason


VIDEO_R1 = {"problem_id": 7, "problem": "What?", "problem_type": "free-form", "solution": "<answer>x</answer>"}
LLAVA = {"id": "v", "conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "To rest."}]}
NEXTQA = {"question": "why", "answer": "0", "qid": "1", **{f"a{place}": f"text {place}" for place in range(5)}}
VSI = {"id": 3, "dataset": "arkitscenes", "question": "How many?", "ground_truth": "4"}
PERCEPTION = {"metadata": {}, "mc_question": [{"id": 0, "question": "Where?", "options": ["a", "b"], "answer_id": 0}]}


@pytest.mark.parametrize("lost", ["", None, float("nan"), []])
@pytest.mark.parametrize(
    ("format_name", "record", "name"),
    [
        ("video_r1", VIDEO_R1, "path"),
        ("llava_video", LLAVA, "video"),
        ("nextqa", NEXTQA, "video"),
        ("vsi_bench", VSI, "scene_name"),
        ("perception_test", PERCEPTION, "video_id"),
    ],
)
def test_a_published_row_that_lost_its_video_is_bad(
    tmp_path: Path, format_name: str, record: dict[str, Any], name: str, lost: object
) -> None:
    changed = record | ({"metadata": {name: lost}} if name == "video_id" else {name: lost})
    loaded = load(tmp_path, format_name, [changed])
    assert loaded.rows == []
    assert f"{name} is {lost!r}. Every row of this set has a video" in loaded.bad_rows[0].reason


@pytest.mark.parametrize("problem", ["<video><video>\nWhat?", "<image> What? <image>", "<image>\nWhat is <image>?"])
def test_more_marks_than_videos_are_refused(tmp_path: Path, problem: str) -> None:
    """Development case D09 in a published set, whose rows have one video each."""
    loaded = load(tmp_path, "video_r1", [VIDEO_R1 | {"path": "a.mp4", "problem": problem}])
    assert loaded.bad_rows[0].id == "7"
    assert "1 video(s) but 2 marks" in loaded.bad_rows[0].reason
    escaped = VIDEO_R1 | {"path": "a.mp4", "problem": "<image>\nIs \\<image> or \\<video> a tag?"}
    assert only(load(tmp_path, "video_r1", [escaped])).parts == (0, "Is <image> or <video> a tag?")


def test_nothing_as_pandas_writes_it_is_no_answer(tmp_path: Path) -> None:
    nothing = VIDEO_R1 | {"path": "a.mp4", "solution": float("nan")}
    assert "the answer is ''" in load(tmp_path, "video_r1", [nothing]).bad_rows[0].reason


def test_csv_lines_that_would_lose_a_field_or_the_rows_after_them(tmp_path: Path) -> None:
    path = tmp_path / "set.csv"
    path.write_text("video,question,answer\na.mp4,Who, what?,x\na.mp4,Who?,x\n")
    loaded = load_set({str(path): "own"}, "")
    assert [row.id for row in loaded.rows] == ["set:3"]
    assert "more fields than the first line" in str(loaded.bad_rows[0])
    for broken in ('a.mp4,"Who?,x\na.mp4,Who?,x\n', f"a.mp4,{'x' * 200_000},x\n"):
        path.write_text(f"video,question,answer\na.mp4,Who?,x\n{broken}")
        with pytest.raises(SetError, match="is not CSV after line 2"):
            load_set({str(path): "own"}, "")


def test_a_line_nested_too_deeply_is_a_bad_row(tmp_path: Path) -> None:
    lines: list[Any] = ["[" * 200_000, {"video": "a.mp4", "question": "What?", "answer": "x"}]
    loaded = load(tmp_path, "own", lines, "set.jsonl")
    assert [row.id for row in loaded.rows] == ["set:2"]
    assert "is not JSON" in loaded.bad_rows[0].reason


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}\n{"a": 2}')
    (tmp_path / "b.json").write_text("3")
    (tmp_path / "c.parquet").write_bytes(b"PAR1")
    (tmp_path / "d.jsonl").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "e.xlsx").write_bytes(b"")
    cases = {"a.json": "Then call it .jsonl", "b.json": "holds int", "c.parquet": "cannot be read as Parquet"}
    cases |= {"d.jsonl": "not UTF-8", "e.xlsx": "unknown kind of file '.xlsx'", "f.json": "no such file"}
    for name, message in cases.items():
        with pytest.raises(SetError, match=message):
            load_set({str(tmp_path / name): "own"}, "")
