"""What responses are worth, against values worked out by hand; functions of users that misbehave."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from agent.reward_function import plain_values
from agent.rewards import COMPARISONS, Answered, RewardError, Rewards, Scored, reward_metrics, reward_sums
from configs.errors import ConfigError
from configs.load import load_config
from configs.schema import REWARD_PARTS, RewardConfig
from data.video_qa import VideoQARow, make_row

OPTIONS = ["Blue", "Red", "Green", "A person walks"]


def row(answer: object, kind: str | None = None, options: Sequence[str] = ()) -> VideoQARow:
    fields = {"video": "a.mp4", "question": "What?", "answer": answer, "kind": kind, "options": list(options)}
    return make_row(fields, row_id="q7", source="set.jsonl, line 7", media_root=Path("/media"))


def score(asked: VideoQARow, *texts: str, **config: Any) -> list[Scored]:
    with Rewards(RewardConfig(**config), max_tokens=100) as rewards:
        return rewards.score(asked, [Answered(text) for text in texts])


def value(asked: VideoQARow, text: str, **config: Any) -> float | None:
    return score(asked, text, **config)[0].reward


def test_every_part_of_the_config_exists() -> None:
    assert set(REWARD_PARTS) == {"answer", "format", "length", *COMPARISONS}


# --- multiple choice


@pytest.mark.parametrize("text", ["(B)", "b.", "B. Red", "**B**", "The answer is B", "<answer>B</answer>", "Red"])
def test_the_right_option_is_worth_1_however_it_is_written(text: str) -> None:
    """Development case D10."""
    assert score(row("B", options=OPTIONS), text) == [Scored(1.0, {"answer": 1.0})]


@pytest.mark.parametrize(("text", "unparsed"), [("A person walks", False), ("B or C", True), ("", True), ("C", False)])
def test_other_options_several_and_none_are_worth_0(text: str, unparsed: bool) -> None:
    """Development case D10; an article is not option A."""
    assert score(row("B", options=OPTIONS), text) == [Scored(0.0, {"answer": 0.0}, is_unparsed=unparsed)]
    assert value(row("A", options=["Blue", "Red"]), "A person walks") == 0.0


def test_only_the_answer_element_counts() -> None:
    assert value(row("B", options=OPTIONS), "<think>The answer is C</think><answer>B</answer>") == 1.0
    assert value(row("C", options=OPTIONS), "<think>The answer is C</think><answer>B</answer>") == 0.0


@pytest.mark.parametrize("text", ["The answer is B. It could also be C.", "B: green", "Option B is wrong", "not B"])
def test_two_letters_or_a_denied_one_are_unparsed(text: str) -> None:
    asked = row("B", options=("red", "blue", "green"))
    assert score(asked, text) == [Scored(0.0, {"answer": 0.0}, is_unparsed=True)]


@pytest.mark.parametrize("text", ["The answer is blue", "<think>A or C</think> B", "B is correct", "B, not A"])
def test_a_settled_letter_is_worth_1(text: str) -> None:
    assert value(row("B", options=("red", "blue", "green")), text) == 1


# --- numbers


@pytest.mark.parametrize(
    ("wanted", "text", "expected"),
    [
        ("3", "3.0", 1),
        ("3", "three", 1),
        ("3", "3 m", 1),
        ("1000", "1,000", 1),
        ("3", "3.1", 0),
        ("3", "-", 0),
        ("0", "0", 1),
        ("0", "0.1", 0),
        ("-2", "\u22122", 1),
        ("0.3", "0.30000000000000004", 1),
    ],
)
def test_numbers_are_equal_by_value(wanted: str, text: str, expected: float) -> None:
    """Development case D11."""
    assert value(row(wanted, "numeric"), text) == expected


def test_a_tolerance_is_relative_to_the_wanted_number() -> None:
    asked = row("200", "numeric")
    for text, expected in {"190": 1, "210": 1, "189.9": 0, "210.1": 0}.items():
        assert value(asked, text, numeric_tolerance=0.05) == expected


@pytest.mark.parametrize(
    ("wanted", "text", "expected"),
    [
        ("100", "100", 1.0),
        ("100", "104", 1.0),  # off by 4 %: below all ten thresholds
        ("100", "105", 0.9),  # 5 % is not below 5 %
        ("100", "90", 0.8),  # below 15, 20, ... 50 %
        ("100", "151", 0.0),
        ("100", "149", 0.1),
        ("-100", "-90", 0.8),
        ("0.3", "0.27", 0.8),
        ("0", "0", 1.0),
        ("0", "0.001", 0.0),
        ("3", "-", 0.0),
        ("3", "three", 1.0),
    ],
)
def test_mean_relative_accuracy(wanted: str, text: str, expected: float) -> None:
    """Development case D11: a wanted 0 divides nothing."""
    assert value(row(wanted, "mra"), text) == pytest.approx(expected)


def test_an_unreadable_number_is_unparsed() -> None:
    assert score(row("3", "mra"), "many", "3")[0].is_unparsed
    assert not score(row("3", "mra"), "3")[0].is_unparsed


@pytest.mark.parametrize(("wanted", "text"), [("4", "It's 3 or 4"), ("2", "1, 2"), ("3", "minus three"), ("3", "3-4")])
def test_hedges_lists_and_signs_earn_nothing(wanted: str, text: str) -> None:
    assert value(row(wanted, "numeric"), text) == value(row(wanted, "mra"), text) == 0


def test_a_time_span_without_end_is_unparsed_not_nan() -> None:
    assert score(row("[1, 5]", "span"), "1 to " + "9" * 400) == [Scored(0.0, {"answer": 0.0}, is_unparsed=True)]


# --- spans and texts


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2 to 6", 1.0), ("[4, 8]", 2 / 6), ("00:06 - 00:09", 0.0), ("0-8", 0.5), ("soon", 0.0), ("6 to 2", 0.0)],
)
def test_spans_by_intersection_over_union(text: str, expected: float) -> None:
    assert value(row([2, 6], "span"), text) == pytest.approx(expected)


def test_several_spans_are_joined() -> None:
    # 0-2 and 4-6 against 1-5: 2 s shared of 6 s; overlapping spans of one side count once
    assert value(row([[0, 2], [4, 6]], "span"), "1 to 5") == pytest.approx(2 / 6)
    assert value(row([0, 4], "span"), "0-3, 1-4, 0-4") == pytest.approx(1.0)
    assert value(row([3, 3], "span"), "3 - 3") == 1.0


def test_rouge_l_is_the_f1_of_the_longest_common_subsequence() -> None:
    # "a man _ cooks soup": 4 of 5 given and 4 of 4 wanted words
    assert value(row("A man cooks soup.", "text"), "a man slowly cooks soup") == pytest.approx(2 * 4 / (5 + 4))
    assert value(row("A man cooks soup.", "text"), "soup cooks man a") == pytest.approx(2 * 1 / 8)
    assert value(row("A man cooks soup.", "text"), "") == 0.0


def test_text_in_a_picture_is_held_against_its_words() -> None:
    # one word changed, one added, of four wanted
    assert value(row("no entry after dark", "ocr"), "no entry before dark today") == pytest.approx(1 - 2 / 4)
    assert value(row("EXIT", "ocr"), "a b c d e") == 0.0
    assert value(row("EXIT 4", "ocr"), "exit 4") == 1.0


def test_exact_words() -> None:
    assert value(row("the Red box"), "The red  box.") == 1.0
    assert value(row("the red box"), "red box") == 0.0


# --- format, length, weights


def test_parts_are_weighted_and_kept_apart() -> None:
    asked = row("B", options=OPTIONS)
    texts = "<think>hm</think><answer>B</answer>", "B"
    both = score(asked, *texts, weights={"answer": 1.0, "format": 0.5})
    assert [item.reward for item in both] == [1.5, 1.0]
    assert both[1].parts == {"answer": 1.0, "format": 0.0}
    assert value(asked, "[B]", weights={"format": 2.0}, format_pattern=r"\[[A-Z]\]") == 2.0


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0.0), (60, 0.0), (80, -0.5), (90, -0.75), (100, -1.0), (999, -1.0)]
)
def test_length_falls_evenly_from_free_to_limit(num_tokens: int, expected: float) -> None:
    config = RewardConfig(weights={"length": 1.0}, length_free_tokens=60)
    with Rewards(config, max_tokens=100) as rewards:
        assert rewards.score(row("x"), [Answered("x", num_tokens)])[0].reward == pytest.approx(expected)


def test_a_part_that_cannot_compare_the_rows_answer_is_named() -> None:
    assert value(row("3", "numeric"), "3", weights={"mra": 1.0}) == 1.0
    with pytest.raises(RewardError, match=r"row 'q7' .*part 'mra' cannot compare the answer 'red'"):
        score(row("red"), "red", weights={"mra": 1.0})


@pytest.mark.parametrize(
    ("overrides", "explanation"),
    [
        (["reward.weights={anwser: 1}"], "reward.weights: unknown part 'anwser'. Did you mean answer?"),
        (["reward.weights={answer: .inf}"], "reward.weights.answer: inf: Input should be a finite number."),
        (["reward.weights={}"], "reward.weights: {}, expected a part with a weight other than 0"),
        (["reward.weights={answer: 0, format: 0.0}"], "expected a part with a weight other than 0"),
        (
            ["reward.functions={mine: my_rewards}"],
            "reward.functions: mine: 'my_rewards', expected a new name and module:f",
        ),
        (["reward.functions={mine: 'm:f'}"], "reward.functions: mine has no weight; add it to reward.weights."),
        (["reward.format_pattern=("], "reward.format_pattern: '(', which does not parse"),
        (["reward.weights={length: 1}", "reward.length_free_tokens=8"], "expected less than the limit (8)"),
    ],
)
def test_mistakes_in_the_config_are_explained(tmp_path: Path, overrides: list[str], explanation: str) -> None:
    (tmp_path / "a.yaml").write_text("")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "a.yaml", overrides)
    assert explanation in str(caught.value)


def test_metrics_hold_each_part_and_what_was_unparsed_or_lost() -> None:
    scored = [Scored(1.5, {"answer": 1.0, "mine": 0.5}), Scored(None, {"answer": 0.0}, True, "mine failed")]
    sums = reward_sums(scored, ["answer", "mine"])
    doubled = {key: 2 * number for key, number in sums.items()}
    assert reward_metrics(doubled) == {
        "reward/unparsed": 2.0,
        "reward/lost": 2.0,
        "reward/answer_mean": 0.5,
        "reward/mine_mean": 0.5,
    }
    assert reward_sums([], ["answer", "mine"]).keys() == sums.keys()
    assert reward_metrics(reward_sums([], ["answer"]))["reward/answer_mean"] == 0.0


# --- functions of users

FUNCTIONS = "tests.agent.reward_functions"


def with_function(name: str, **fields: Any) -> dict[str, Any]:
    return {"weights": {"mine": 2.0}, "functions": {"mine": f"{FUNCTIONS}:{name}"}, **fields}


def test_a_function_gets_all_responses_and_the_row() -> None:
    assert [item.reward for item in score(row("x"), "abc", "", **with_function("length"))] == [0.6, 0.0]
    assert [item.reward for item in score(row("x"), "x", "y", **with_function("knows_the_row"))] == [2.0, 0.0]


def test_what_a_function_returns_is_taken_refused_or_lost() -> None:
    """Development case D13."""
    config = RewardConfig(**with_function("by_name"))
    losing = dataclasses.replace(config, on_error="lost")
    good = {"bools": [2, 0], "numpy": [1, 2], "array": [1, 2], "mixed": [2, 0.5]}
    good |= {"column": [1, 2], "nested": [2, 4]}
    with Rewards(config, 100) as strict, Rewards(losing, 100) as lenient:

        def returned(rewards: Rewards, name: str) -> list[Scored]:
            return rewards.score(row("x"), [Answered(name), Answered("second")])

        for name, expected in good.items():
            assert [item.reward for item in returned(strict, name)] == expected
        for name, message in {
            "none": "None for response 0",
            "nan": "nan for response 0",
            "inf": "inf for response 1",
        }.items():
            with pytest.raises(RewardError, match=rf"row 'q7' \(set.jsonl, line 7\).*by_name returned {message}"):
                returned(strict, name)
            lost = [item.reward is None for item in returned(lenient, name)]
            assert lost == ([False, True] if name == "inf" else [True, False])
        for name, message in {
            "short": "1 rewards for 2 responses",
            "number": "1 rewards for 2 responses",
            "nothing": "None for response 0",
        }.items():
            with pytest.raises(RewardError, match=rf"by_name returned {message}.*reward.on_error=lost"):
                returned(strict, name)
            first, second = returned(lenient, name)
            assert (first.reward, second.reward) == (None, None)
            assert f"by_name returned {message.partition(' for')[0]}" in first.lost_because
        for name in ("texts", "text", "pairs", "set", "names", "complex"):
            for rewards in (strict, lenient):
                with pytest.raises(RewardError, match=r"by_name returned .*expected .*on_error does not cover this"):
                    returned(rewards, name)


def test_a_function_that_raises_hangs_or_dies_stops_the_run_or_loses_the_responses() -> None:
    config = RewardConfig(**with_function("badly", function_timeout_s=1.0))
    with Rewards(config, 100) as strict, Rewards(dataclasses.replace(config, on_error="lost"), 100) as lenient:
        for name, message in {"raise": "KeyError: 'a typo'", "hang": "longer than 1 s", "crash": "exit code 3"}.items():
            with pytest.raises(RewardError, match=rf"(?s)row 'q7'.*part 'mine'.*badly.*{message}"):
                strict.score(row("x"), [Answered(name)])
            lost = lenient.score(row("x"), [Answered(name), Answered("x")])
            assert [item.reward for item in lost] == [None, None]
            assert message in lost[0].lost_because
            assert [item.reward for item in strict.score(row("x"), [Answered("fine")])] == [2.0]


@pytest.mark.parametrize("place", ["no_such_module:f", f"{FUNCTIONS}:no_such_function"])
def test_a_function_that_is_not_there_is_found_before_the_first_response(place: str) -> None:
    with pytest.raises(RewardError, match=f"{place} cannot be imported: .*no_such"):
        Rewards(RewardConfig(weights={"mine": 1.0}, functions={"mine": place}), 100)


def test_tensors_of_one_element_are_numbers() -> None:
    assert plain_values([torch.tensor([0.5]), torch.tensor(1), True]) == [0.5, 1.0, 1.0]
    assert plain_values(torch.tensor([[0.5], [1.0]])) == [0.5, 1.0]
    assert plain_values([torch.tensor([0.5, 1.0])]) == (
        "returned tensor([0.5000, 1.0000]) (Tensor) among its rewards, expected numbers"
    )


def test_a_function_may_lie_in_the_folder_the_run_was_started_in(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text("def fixed(responses, row):\n    return [0.5] * len(responses)\n")
    (tmp_path / "data").mkdir()  # a usual name of a folder, and of one of our packages
    (tmp_path / "data" / "__init__.py").write_text("raise RuntimeError('not ours')\n")
    start = "from agent.reward_function import RewardFunction; RewardFunction('my_rewards:fixed', 1.0).close()"
    repository = Path(__file__).parents[2]
    command = [sys.executable, "-P", "-c", start]  # -P: as `python /elsewhere/run.py`, which does not look here
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(repository)}, check=True)
