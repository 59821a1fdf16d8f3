"""What answers say, against readings anyone would agree with."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.answers import answer_text, parse_choice, parse_number, parse_spans, plain_words, unlabelled_options

COLORS = ("Blue", "Red", "Green", "A person walks")


@pytest.mark.parametrize(
    "text",
    [
        "(B)",
        "b.",
        "B. Red",
        "**B**",
        "The answer is B",
        "B",
        "b",
        "[B]",
        "B)",
        "B: Red",
        "Answer: (b)",
        "\\boxed{B}",
        "The correct option is **B**.",
        "B Red",
        "Red",
        "red.",
        "(b) red",
        "Option B",
        "I choose B",
        "Final answer: B. Red",
        "B. Red, because C is too dark",
        "The answer is (B) Red.",
        "$\\text{B}$",
        "`B`",
        "\uff22",
    ],
)
def test_one_option_is_read_however_it_is_written(text: str) -> None:
    assert parse_choice(text, COLORS) == "B"


@pytest.mark.parametrize(
    "text",
    [
        "B or C",
        "B and C",
        "B, C",
        "B/C",
        "The answer is A or B",
        "answer: B, C",
        "A. Blue B. Red",
        "B. Green",
        "",
        "   ",
        "Z",
        "E",
        "I do not know",
        "The answer is a person",
        "A dog barks",
        "an apple",
        "Because of it",
        "?",
    ],
)
def test_no_option_or_several_are_none(text: str) -> None:
    assert parse_choice(text, COLORS) is None


def test_what_is_said_about_other_options_does_not_count() -> None:
    assert parse_choice("The answer is B because option C is wrong.", COLORS) == "B"
    assert parse_choice("Option B is right, option C is wrong.", COLORS) is None
    assert parse_choice("The correct answer is option B.", COLORS) == "B"
    assert parse_choice("The answer is A. No, the answer is B.", COLORS) == "B"


def test_an_article_is_no_option() -> None:
    assert parse_choice("A person walks", ("Red", "Blue")) is None
    assert parse_choice("A person walks", COLORS) == "D"  # that is the text of D
    assert parse_choice("The answer is A.", COLORS) == "A"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("3.0", 3),
        ("1,000", 1000),
        ("three", 3),
        ("3 m", 3),
        ("3m", 3),
        ("0", 0),
        ("-2.5", -2.5),
        ("\u22123", -3),
        ("There are 3.", 3),
        ("twenty-one", 21),
        ("two hundred and five", 205),
        ("1e3", 1000),
        (".5", 0.5),
        ("50%", 50),
        ("The answer is 3", 3),
        ("I saw 2 dogs, so the answer is 5", 5),
        ("**3**", 3),
        ("1,234,567.5", 1234567.5),
    ],
)
def test_one_number_is_read_however_it_is_written(text: str, value: float) -> None:
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text",
    ["-", "", "none", "3 or 4", "3,5", "1,00", "3 chairs in 2 rooms", "nan", "inf", "1e999", "3.0.1", "x3", "1/2"],
)
def test_no_number_or_several_are_none(text: str) -> None:
    assert parse_number(text) is None


# By hand: what a careful reader takes each text to say.
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("+3", 3),
        ("3.0", 3),
        ("3.", 3),
        ("3,", 3),
        ("3!", 3),
        ("3, I think", 3),
        ("It's 3, not 4", 3),
        ("not 3 but 4", 4),
        ("There are 3, maybe", 3),
        ("about 3", 3),
        ("~3", 3),
        ("minus three", -3),
        ("negative three", -3),
        ("minus 3", -3),
        ("-three", -3),
        ("\u20133", -3),
        ("\u22123", -3),
        ("The answer is -3", -3),
        ("Answer: -2.5", -2.5),
        ("one thousand two hundred", 1200),
        ("two thousand five hundred", 2500),
        ("twelve hundred", 1200),
        ("one hundred and five thousand", 105000),
        ("two hundred thousand", 200000),
        ("one million", 1000000.0),
        ("3 million", 3000000.0),
        ("2.5 million", 2500000.0),
        ("3k", 3000),
        ("3km", 3),
        ("a hundred", 100),
        ("a dozen", 12),
        ("two and a half", 2.5),
        ("2 and a half meters", 2.5),
        ("ninety-nine", 99),
        ("zero", 0),
        ("one", 1),
        ("3 (three)", 3),
        ("50%", 50),
        ("50 percent", 50),
        ("1e3", 1000),
        ("1E3", 1000),
        ("1,000.5", 1000.5),
        ("3 m\xb2", 3),
        ("3m2", 3),
        ("3 m^2", 3),
        ("3m", 3),
        ("3cm", 3),
        ("3.5m", 3.5),
        ("$3", 3),
        ("\u20ac3.50", 3.5),
        ("3rd", 3),
        ("3\u4e2a", 3),
        ("\u67093\u4e2a", 3),
        ("\uff13", 3),
        ("#3", 3),
        ("(3)", 3),
        ("[3]", 3),
        ("\\boxed{3}", 3),
        ("$3$", 3),
        ("The answer is three", 3),
        ("x = 3", 3),
        ("3\n", 3),
        ("twenty one", 21),
        ("one hundred", 100),
        ("1,000,000", 1000000),
        ("1000000", 1000000),
        ("3 is the answer", 3),
        ("five hundred", 500),
        ("-0", 0),
    ],
)
def test_numbers_with_signs_scales_units_and_words(text: str, value: float) -> None:
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "1, 2",
        "3, 4",
        "1,2",
        "2, 3",
        "1,234,56",
        "It is not 3",
        "not 3 or 4",
        "I don't think it is 3",
        "3 is not right",
        "about 3 , or 4",
        "- 3",
        "\u2013 3",
        "five minus two",
        "5 - 3",
        "half a dozen",
        "half",
        "one half",
        "one third",
        "three quarters",
        "two point two",
        "zero point five",
        "nineteen eighty",
        "no one",
        "No one is there",
        "this one",
        "none",
        "3 apples and four pears",
        "1.000,5",
        "1/2",
        "2/2",
        "\xbd",
        "3\xbd",
        "3 1/2",
        "10^3",
        "10\xb2",
        "10^2",
        "3-4",
        "3-3",
        "3\u20134",
        "3 to 4",
        "between 3 and 4",
        "3 x 4",
        "3x4",
        "12:30",
        "2020-01-02",
        "5/5/2020",
        "May 3, 2020",
        "1m80",
        "third",
        "at least 3",
        "more than 3",
        "fewer than three",
        "up to 3",
        "9" * 400,
        "1e999",
        "x3",
        "D10",
        "room2",
        "The answer is 3 or 4",
        "one, two, three",
        "00:12",
        "The answer is not 3",
        "one two",
        "- three",
        "nan",
        "infinity",
        "There isn't a 3",
    ],
)
def test_lists_ranges_fractions_bounds_and_denials_are_no_number(text: str) -> None:
    assert parse_number(text) is None


@given(st.floats(-1e12, 1e12, allow_nan=False), st.text(max_size=20))
def test_reading_never_fails_and_gives_back_what_was_written(value: float, noise: str) -> None:
    assert math.isclose(parse_number(f"{value:.6f}") or 0.0, float(f"{value:.6f}"))
    for text in (noise, f"{noise}B", f"answer {noise}"):
        number = parse_number(text)
        assert number is None or math.isfinite(number)
        assert parse_choice(text, COLORS) in (None, "A", "B", "C", "D")
        parse_spans(text)


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("[1.2, 5.8]", ((1.2, 5.8),)),
        ("from 12 to 17.5 s", ((12.0, 17.5),)),
        ("00:12 - 01:17", ((12.0, 77.0),)),
        ("5-8", ((5.0, 8.0),)),
        ("[[1, 2], [3, 4]]", ((1.0, 2.0), (3.0, 4.0))),
        ("7", None),
        ("8 to 5", None),
        ("1 to " + "9" * 400, None),
        ("nowhere", None),
    ],
)
def test_time_spans(text: str, spans: tuple[tuple[float, float], ...] | None) -> None:
    assert parse_spans(text) == spans


def test_the_last_answer_element_counts_even_if_it_was_cut() -> None:
    assert answer_text("<think>A</think><answer>B</answer> or <answer> C </answer>") == "C"
    assert answer_text("<think>x</think><answer>B") == "B"
    assert answer_text(" plain ") == "plain"


@pytest.mark.parametrize(
    "piece",
    [
        "1",
        "1,",
        "answer ",
        "<answer>",
        "</answer>",
        "A or ",
        "(",
        "1:",
        "five ",
        "-.",
        "B. ",
        "not ",
        "3 is ",
        "minus ",
        "one hundred and ",
        "- ",
        "3-",
        "a ",
        "don't ",
    ],
)
def test_long_nonsense_is_read_in_no_time(piece: str) -> None:
    nonsense = piece * 20_000 + "!"
    started = time.monotonic()
    for read in (answer_text, parse_number, parse_spans, lambda text: parse_choice(text, COLORS)):
        read(nonsense)
    assert time.monotonic() - started < 5


def test_labels_of_options_are_dropped_only_where_all_are_in_order() -> None:
    assert unlabelled_options(["A. red", "(B) blue", "C: green"]) == ("red", "blue", "green")
    assert unlabelled_options(["A. red", "blue"]) == ("A. red", "blue")
    assert unlabelled_options(["B. red", "A. blue"]) == ("B. red", "A. blue")


def test_words_have_no_case_and_no_punctuation() -> None:
    assert plain_words("The Cat's  hat!") == ["the", "cat", "s", "hat"]
    assert plain_words("红色 box") == ["红", "色", "box"]
