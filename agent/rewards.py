"""What a response to a question is worth: named parts, each from 0 to 1 unless said otherwise, and their weighted sum.

A part is added here: write a function of an answer and a row and name it in `COMPARISONS`, or give your own by
`module:function` in the config. Knows nothing about where responses come from or what training does with a reward.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from agent.reward_function import RewardFunction, RewardFunctionError
from configs.errors import UserError
from configs.schema import RewardConfig
from data.answers import answer_text, parse_choice, parse_number, parse_spans, plain_words
from data.video_qa import VideoQARow

MRA_STEPS = 10
"""Thresholds of mean relative accuracy: relative errors below 5 %, 10 %, ... 50 % (VSI-Bench, arXiv:2412.14171)."""
EQUAL_TOLERANCE = 1e-9
"""Relative difference of numbers that are written differently and mean the same."""


class RewardError(UserError, ValueError):
    """A reward could not be given, and the config says to stop."""


@dataclass(frozen=True)
class Answered:
    """A response with what a reward may need of it."""

    text: str
    num_tokens: int = 0
    """Response tokens (count); for the part `length`."""


@dataclass(frozen=True)
class Scored:
    """What one response is worth."""

    reward: float | None
    """Weighted sum of the parts; None where a part was lost, so that the response must not be trained on."""
    parts: dict[str, float] = field(default_factory=dict)
    """Each part before its weight; lost ones are absent."""
    is_unparsed: bool = False
    """True where no answer of the row's kind could be read from the response."""
    lost_because: str = ""


Comparison = Callable[[str, VideoQARow, RewardConfig], float | None]
"""From an answer and the row to a value in [0, 1]; None where the answer cannot be read, which is worth 0."""


def choice(answer: str, row: VideoQARow, config: RewardConfig) -> float | None:
    """1 for the right option by letter or by words; several letters are no answer."""
    letter = parse_choice(answer, row.options)
    return None if letter is None else float(letter == row.answer)


def exact(answer: str, row: VideoQARow, config: RewardConfig) -> float | None:
    """1 for the same words; case, punctuation and spaces aside."""
    words = plain_words(answer)
    return float(words == plain_words(row.answer)) if words else None


def numeric(answer: str, row: VideoQARow, config: RewardConfig) -> float | None:
    """1 for the same number, within `numeric_tolerance` of its size."""
    given, wanted = parse_number(answer), _wanted_number(row)
    if given is None:
        return None
    return float(abs(given - wanted) <= max(config.numeric_tolerance, EQUAL_TOLERANCE) * abs(wanted))


def mra(answer: str, row: VideoQARow, config: RewardConfig) -> float | None:
    """Mean relative accuracy: the share of thresholds t in 0.05, 0.1, ..., 0.5 with |given - wanted| / |wanted| < t.

    A wanted 0 has no relative error: 1 if it is given exactly, else 0.
    """
    given, wanted = parse_number(answer), _wanted_number(row)
    if given is None:
        return None
    if wanted == 0:
        return float(given == 0)
    # Compared as multiples, so that 0.1 is not below 0.1 by rounding.
    error = abs(given - wanted) * 2 * MRA_STEPS
    return sum(error < step * abs(wanted) * (1 - EQUAL_TOLERANCE) for step in range(1, MRA_STEPS + 1)) / MRA_STEPS


def span(answer: str, row: VideoQARow, config: RewardConfig) -> float | None:
    """Intersection over union of time spans; several spans of a side are joined."""
    given, wanted = parse_spans(answer), parse_spans(row.answer)
    assert wanted is not None, "the loader checks it"
    if given is None:
        return None
    together = _length([*given, *wanted])
    both = _length(given) + _length(wanted) - together
    return both / together if together > 0 else float(given == wanted)


def rouge_l(answer: str, row: VideoQARow, config: RewardConfig) -> float | None:
    """F1 of the longest common subsequence of words (ROUGE-L)."""
    given, wanted = plain_words(answer), plain_words(row.answer)
    if not given:
        return None
    common = _common_subsequence(given, wanted)
    return 2 * common / (len(given) + len(wanted))


def word_accuracy(answer: str, row: VideoQARow, config: RewardConfig) -> float | None:
    """1 - word error rate, at least 0: the edits that turn the answer into the wanted words, over their number."""
    given, wanted = plain_words(answer), plain_words(row.answer)
    return max(0.0, 1 - _edits(given, wanted) / max(1, len(wanted))) if given else None


COMPARISONS: dict[str, Comparison] = {
    "choice": choice,
    "exact": exact,
    "numeric": numeric,
    "mra": mra,
    "span": span,
    "text": rouge_l,
    "ocr": word_accuracy,
}
"""Kind of a row, and part of a reward -> how an answer is compared."""


class Rewards:
    """Scores responses as `config` says; owns the processes of users' functions.

    Args:
        max_tokens: longest response (tokens), where `length` ends if the config does not say.

    Raises:
        RewardError: a function of the config cannot be imported.
    """

    def __init__(self, config: RewardConfig, max_tokens: int) -> None:
        self._config = config
        self._length_limit = config.length_limit_tokens or max_tokens
        self._format = re.compile(config.format_pattern)
        self._functions: dict[str, RewardFunction] = {}
        try:
            for name, place in config.functions.items():
                self._functions[name] = RewardFunction(place, config.function_timeout_s)
        except RewardFunctionError as error:
            self.close()
            raise RewardError(f"reward.functions: {error}") from error

    def score(self, row: VideoQARow, answers: Sequence[Answered]) -> list[Scored]:
        """The worth of each response to one row, in their order.

        Raises:
            RewardError: a part failed and `reward.on_error` is stop, or a function returned what is no number; names
                the row and the part.
        """
        columns: dict[str, list[float | None]] = {}
        lost: list[str] = [""] * len(answers)
        unparsed = [False] * len(answers)
        for name in self._config.weights:
            if name in self._functions:
                columns[name] = self._ask(name, row, answers, lost)
                continue
            values = [self._part(name, row, answer) for answer in answers]
            if name not in ("format", "length"):
                unparsed = [was or value is None for was, value in zip(unparsed, values, strict=True)]
            columns[name] = [0.0 if value is None else value for value in values]
        return [
            self._combine({name: column[place] for name, column in columns.items()}, unparsed[place], lost[place])
            for place in range(len(answers))
        ]

    def close(self) -> None:
        """End the functions' processes."""
        for function in self._functions.values():
            function.close()

    def __enter__(self) -> Rewards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _part(self, name: str, row: VideoQARow, answer: Answered) -> float | None:
        if name == "format":
            return float(self._format.fullmatch(answer.text) is not None)
        if name == "length":
            return self._length_part(answer.num_tokens)
        kind = row.kind if name == "answer" else name
        if kind != row.kind and not _suits(kind, row):
            raise RewardError(
                f"row {row.id!r} ({row.source}): part {kind!r} cannot compare the answer {row.answer!r} of kind "
                f"{row.kind!r}. Use the part answer in reward.weights, which goes by the row's kind."
            )
        return COMPARISONS[kind](answer_text(answer.text), row, self._config)

    def _length_part(self, num_tokens: int) -> float:
        """0 up to the free length, then evenly down to -1 at the limit (DAPO's soft overlong punishment)."""
        free = self._config.length_free_tokens
        return -min(1.0, max(0.0, (num_tokens - free) / max(1, self._length_limit - free)))

    def _ask(self, name: str, row: VideoQARow, answers: Sequence[Answered], lost: list[str]) -> list[float | None]:
        """A user's function on all responses of a row; what fails goes into `lost` or stops the run."""
        function = self._functions[name]
        try:
            values = function([answer.text for answer in answers], row)
        except RewardFunctionError as error:
            message = f"row {row.id!r} ({row.source}): reward part {name!r}: {error}"
            if error.is_wrong_type:
                raise RewardError(f"{message}. Mend it: reward.on_error does not cover this.") from error
            if self._config.on_error == "stop":
                raise RewardError(f"{message}. Mend it, or set reward.on_error=lost to go on without.") from error
            lost[:] = [message] * len(answers)
            return [None] * len(answers)
        for place, value in enumerate(values):
            if value is None or not math.isfinite(value):
                message = f"row {row.id!r} ({row.source}): reward part {name!r}: {function.place} returned {value}"
                if self._config.on_error == "stop":
                    raise RewardError(f"{message} for response {place}. Return a number, or set reward.on_error=lost.")
                lost[place] = message
        return [value if value is not None and math.isfinite(value) else None for value in values]

    def _combine(self, parts: dict[str, float | None], is_unparsed: bool, lost: str) -> Scored:
        known = {name: value for name, value in parts.items() if value is not None}
        if len(known) < len(parts):
            return Scored(None, known, is_unparsed, lost)
        return Scored(
            math.fsum(self._config.weights[name] * value for name, value in known.items()), known, is_unparsed
        )


def answer_score(text: str, row: VideoQARow, config: RewardConfig) -> float | None:
    """How right a response is by its row's kind, whatever `reward.weights` says; None where no answer can be read."""
    return COMPARISONS[row.kind](answer_text(text), row, config)


def reward_sums(scored: Sequence[Scored], weights: Sequence[str]) -> dict[str, float]:
    """Sums over this rank's responses, ready to be added over ranks; every rank has the same keys."""
    sums = {"responses": float(len(scored)), "unparsed": 0.0, "lost": 0.0}
    for item in scored:
        sums["unparsed"] += item.is_unparsed
        sums["lost"] += item.reward is None
    for name in weights:
        values = [item.parts[name] for item in scored if name in item.parts]
        sums |= {f"{name}_sum": math.fsum(values), f"{name}_count": float(len(values))}
    return sums


def reward_metrics(sums: dict[str, float]) -> dict[str, float]:
    """`reward/*` from sums over all ranks: each part's mean before its weight, and counts."""
    metrics = {"reward/unparsed": sums["unparsed"], "reward/lost": sums["lost"]}
    for name in (key.removesuffix("_sum") for key in sums if key.endswith("_sum")):
        metrics[f"reward/{name}_mean"] = sums[f"{name}_sum"] / max(1.0, sums[f"{name}_count"])
    return metrics


def _suits(kind: str, row: VideoQARow) -> bool:
    """True where a row's answer can be compared in another way than its own."""
    if kind == "choice":
        return bool(row.options)
    if kind in ("numeric", "mra"):
        return parse_number(row.answer) is not None
    return kind != "span" or parse_spans(row.answer) is not None


def _wanted_number(row: VideoQARow) -> float:
    wanted = parse_number(row.answer)
    assert wanted is not None, "the loader checks it"
    return wanted


def _length(spans: Sequence[tuple[float, float]]) -> float:
    """Time that spans cover together (s)."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    row = [0] * (len(second) + 1)
    for word in first:
        diagonal = 0
        for place, other in enumerate(second, start=1):
            above = row[place]
            row[place] = diagonal + 1 if word == other else max(above, row[place - 1])
            diagonal = above
    return row[-1]


def _edits(first: Sequence[str], second: Sequence[str]) -> int:
    row = list(range(len(second) + 1))
    for count, word in enumerate(first, start=1):
        diagonal, row[0] = row[0], count
        for place, other in enumerate(second, start=1):
            above = row[place]
            row[place] = min(above + 1, row[place - 1] + 1, diagonal + (word != other))
            diagonal = above
    return row[-1]
