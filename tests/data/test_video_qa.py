"""Rows keep their rules: placeholders and videos match, answers can be matched, nothing is guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data.video_qa import RowMistake, VideoQARow, make_row, place_videos

ROOT = Path("/media")


def row(**fields: Any) -> VideoQARow:
    given = {"video": "a.mp4", "question": "What colour?", "answer": "red", **fields}
    return make_row(given, row_id="7", source="set.jsonl, line 1", media_root=ROOT)


def reason(**fields: Any) -> str:
    with pytest.raises(RowMistake) as caught:
        row(**fields)
    return str(caught.value)


def test_a_row_without_placeholders_shows_its_videos_first() -> None:
    assert row().parts == (0, "What colour?")
    assert row(video=["a.mp4", "/b/c.mp4"]).videos == (ROOT / "a.mp4", Path("/b/c.mp4"))
    assert row(video=["a.mp4", "b.mp4"]).parts == (0, 1, "What colour?")
    assert row(video=None).parts == ("What colour?",)


def test_placeholders_say_where_videos_stand() -> None:
    assert row(question="<video>\nWhat colour?").parts == (0, "What colour?")
    assert row(question="<video> What colour?").parts == (0, "What colour?")
    two = row(video=["a.mp4", "b.mp4"], question="First:\n<video>\nThen:\n<video>\nWhich is longer?")
    assert two.parts == ("First:\n", 0, "Then:\n", 1, "Which is longer?")
    assert two.question == "First:\nThen:\nWhich is longer?"
    assert row(video=["a.mp4", "b.mp4"], question="<video><video>Compare.").parts == (0, 1, "Compare.")


def test_a_tag_in_a_text_without_videos_is_text() -> None:
    """Development case D08, no video."""
    question = "What does the HTML tag `<video>` do?"
    assert row(video=None, question=question).parts == (question,)
    assert row(video=[], question="<video>\nWhat is this tag?").parts == ("<video>\nWhat is this tag?",)


@pytest.mark.parametrize(
    "question",
    [
        "What does the HTML tag `<video>` do?",
        "What does <video> do?",
        "Explain the tag <video>",
        "<video>\nIs <video> new?",
    ],
)
def test_a_tag_inside_a_line_beside_a_video_is_refused_with_the_way_out(question: str) -> None:
    """Development case D08, one video: it could stand for the video or be text."""
    assert "write \\<video> if it is text" in reason(question=question)
    escaped = question.replace("<video> do", "\\<video> do").replace("`<", "`\\<").replace("tag <", "tag \\<")
    escaped = escaped.replace("Is <", "Is \\<")
    parts = row(question=escaped).parts
    assert parts[0] == 0
    assert len(parts) == 2
    assert "<video>" in str(parts[1])
    assert "\\" not in str(parts[1])


@pytest.mark.parametrize(
    ("num_videos", "question", "counts"),
    [(2, "<video>\nWhat?", r"2 video\(s\) but 1"), (1, "<video><video>\nWhat?", r"1 video\(s\) but 2")],
)
def test_placeholders_and_videos_must_match(num_videos: int, question: str, counts: str) -> None:
    """Development case D09; `data.readers` adds the row's id."""
    with pytest.raises(RowMistake, match=counts):
        place_videos(question, num_videos)


def test_the_kind_follows_from_the_fields() -> None:
    assert row(options=["red", "blue"], answer="A").kind == "choice"
    assert row(answer="3.0").kind == "numeric"
    assert row(answer=3).answer == "3"
    assert row(answer="a red box").kind == "exact"
    assert row(kind="span", answer=[1.2, 5.8]).answer == "[1.2, 5.8]"


@pytest.mark.parametrize("answer", [".5", "-.5", "5.", "3e5", "1,000.5", 1e20, 1e-7])
def test_every_way_to_write_a_number_is_a_number(answer: object) -> None:
    assert row(answer=answer).kind == "numeric"


@pytest.mark.parametrize("answer", [[1.2, 5.8], [[1, 2], [3, 4.5]], "[1.2, 5.8]", ["00:12", "00:17"]])
def test_a_list_of_seconds_is_a_span(answer: object) -> None:
    assert row(answer=answer).kind == "span"


@pytest.mark.parametrize("answer", [["red", "blue"], [3], [5.8, 1.2], [-1, 5], [float("nan"), 1, 2]])
def test_another_list_is_no_answer(answer: object) -> None:
    assert "A list is for time spans" in reason(answer=answer)
    assert "A list is for time spans" in reason(answer=answer, kind="exact")


@pytest.mark.parametrize("answer", ["B", "(b)", "B. blue", "blue", "Blue"])
def test_a_choice_keeps_the_letter_of_its_answer(answer: str) -> None:
    made = row(options=["A. red", "B. blue"], answer=answer)
    assert (made.answer, made.options) == ("B", ("red", "blue"))
    assert made.options_text == "A. red\nB. blue"


def test_answers_that_nothing_could_match_are_refused() -> None:
    """Development case D11: an empty answer never becomes a reward of 1."""
    empties: list[object] = ["", "  ", None, [], True, float("nan"), float("inf")]
    for empty in empties:
        assert "the answer is" in reason(answer=empty)
    assert "none of the 2 options" in reason(options=["red", "blue"], answer="C")
    assert "not one number" in reason(kind="mra", answer="many")
    assert "not one number" in reason(kind="numeric", answer="3 or 4")
    assert "no time span" in reason(kind="span", answer="soon")
    for kind in ("exact", "text", "ocr", None):
        for answer in ("-", "...", "?!"):
            assert "has no words" in reason(kind=kind, answer=answer)
    assert row(kind="text", answer="赤").answer == "赤"


def test_what_stands_for_a_video_inside_is_in_no_text() -> None:
    for changed in ({"question": "What\x00?"}, {"options": ["red\x00", "blue"]}, {"answer": "red\x00"}):
        assert "holds a NUL" in reason(**changed)
    assert "half of a surrogate pair" in reason(question="What \ud83d?")
    for name in ("a\x00.mp4", "a\ud83d.mp4"):
        assert "which no file can be called" in reason(video=["b.mp4", name])


def test_options_are_texts_in_the_order_of_their_keys() -> None:
    assert "None may be empty" in reason(options=["red", " "])
    assert "None may be empty" in reason(options=["A. red", "B. "])
    assert "Give a list of texts" in reason(options=["red", float("nan")])
    assert row(options={"10": "blue", "9": "red", "2": "green"}).options == ("green", "red", "blue")


def test_wrong_fields_are_refused_with_the_remedy() -> None:
    assert "question is ''" in reason(question="")
    assert "question is '<video>'" in reason(question="<video>")
    assert "video is 3" in reason(video=3)
    assert "Give a path or a list of paths" in reason(video=["a.mp4", ""])
    assert "without options" in reason(kind="choice", answer="A")
    assert "1 option(s)" in reason(options=["red"], answer="A")
    assert "two options are the same" in reason(options=["red", "red"], answer="A")
    assert "kind is 'chioce'. Use one of choice" in reason(kind="chioce")
    assert "special token <|video_pad|>" in reason(question="Is <|video_pad|> here?")
    assert "special token <|im_end|>" in reason(options=["red<|im_end|>", "blue"], answer="B")
