"""Accuracy on held-out questions: with its interval, by kind of question, and a record of every response.

Greedy by default, so that a second look sees the same. Knows nothing about training.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent.rewards import answer_score
from configs.schema import RunConfig
from data.task_sampler import stable_seed
from data.types import Response, TurnKey
from data.video_qa import VideoQARow
from data.video_qa_feed import BadVideo, ClipPool, Quarantine, TooManyBadMedia, claim
from rl.evaluate import eval_sampling
from rl.interfaces import QuestionPolicy, Ranks, Runtime
from rl.metrics import write_json
from rl.scores import wilson_interval

logger = logging.getLogger(__name__)

MOST_CLASSES = 50
"""A tag with more values than this gets no table."""


@dataclass(frozen=True)
class Answer:
    """What came of one held-out question."""

    score: float = 0.0
    """How right it is by the row's kind, in [0, 1]."""
    unparsed: float = 0.0
    cut: float = 0.0
    """1 where `rollout.max_tokens` ended it."""
    tokens: float = 0.0
    lost: float = 0.0
    """1 where the video could not be shown: it counts in no mean."""
    text: str = ""


@dataclass(frozen=True)
class QuestionEvaluation:
    """Means over the held-out questions, lost ones left out."""

    accuracy: float
    """Share of responses that are wholly right."""
    accuracy_ci95: tuple[float, float]
    """Wilson's 95 % interval of `accuracy`."""
    score_mean: float
    """Mean of how right they are: more than `accuracy` where a kind gives partial credit (mra, span, text, ocr)."""
    unparsed: float
    """Share of responses that no answer could be read from."""
    cut_responses: float
    response_tokens_mean: float
    count: int
    lost: int
    """Questions whose video could not be shown (count)."""
    tables: dict[str, dict[str, dict[str, Any]]]
    """`by_kind`, and `by_NAME` for each tag of the set: class -> the same means over its questions."""
    episodes: tuple[dict[str, Any], ...]
    """One record a question: id, what was wanted, what was answered, `success`."""

    @property
    def success(self) -> float:
        return self.accuracy

    @property
    def success_ci95(self) -> tuple[float, float]:
        return self.accuracy_ci95

    def metrics(self) -> dict[str, float | None]:
        """`eval/*` for the metrics file."""
        named = asdict(self)
        low, high = named.pop("accuracy_ci95")
        del named["episodes"], named["tables"]
        kinds = {f"eval/accuracy_{kind}": means["accuracy"] for kind, means in self.tables["by_kind"].items()}
        return {f"eval/{key}": value for key, value in named.items()} | kinds | {
            "eval/success": self.accuracy,
            "eval/accuracy_low": low,
            "eval/accuracy_high": high,
        }  # fmt: skip


def evaluate_questions(
    config: RunConfig,
    rows: Sequence[VideoQARow],
    pool: ClipPool,
    policy: QuestionPolicy,
    runtime: Runtime,
    folder: Path,
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> QuestionEvaluation | None:
    """Ask `eval.episodes` of the rows, chosen by `eval.manifest_seed`, every rank its share; rank 0 writes the results.

    Returns:
        The same numbers on every rank; None where a rank was asked to stop, and no results are written then.

    Raises:
        TooManyBadMedia: more videos than `data.max_bad_fraction` allows cannot be shown.
    """
    chosen = choose_rows(rows, config.eval.episodes, config.eval.manifest_seed)
    mine = list(enumerate(chosen))[runtime.rank :: runtime.world_size]
    quarantine = Quarantine(folder / "bad_media.jsonl")
    found = _ask(config, mine, pool, policy, runtime, quarantine, should_stop)
    answers = _gather(found, len(chosen), runtime, stopped=float(len(found) < len(mine)))
    if answers is None:
        return None
    lost = sum(answer.lost for answer in answers)
    if lost > config.data.max_bad_fraction * len(answers) or lost == len(answers):
        raise TooManyBadMedia(
            f"{lost:.0f} of {len(answers)} held-out videos cannot be shown, over data.max_bad_fraction="
            f"{config.data.max_bad_fraction:g}: {quarantine.path} lists them. Mend or remove them, or raise it."
        )
    evaluation = summarize_answers(chosen, answers)
    if runtime.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "results.json", asdict(evaluation) | {"manifest_seed": config.eval.manifest_seed})
    return evaluation


def choose_rows(rows: Sequence[VideoQARow], count: int, seed: int) -> list[VideoQARow]:
    """At most `count` rows, the same for the same seed, in the set's order."""
    order = sorted(range(len(rows)), key=lambda place: (stable_seed(seed, place), place))
    return [rows[place] for place in sorted(order[:count])]


def summarize_answers(rows: Sequence[VideoQARow], answers: Sequence[Answer]) -> QuestionEvaluation:
    """Means, intervals, tables, and one record a question."""
    shown = [(row, answer) for row, answer in zip(rows, answers, strict=True) if not answer.lost]
    tables = {"by_kind": _table(shown, lambda row: row.kind)}
    for tag in sorted({tag for row, _ in shown for tag in row.tags}):
        if len({row.tags.get(tag) for row, _ in shown}) <= MOST_CLASSES:
            tables[f"by_{tag}"] = _table(shown, lambda row, tag=tag: row.tags.get(tag, ""))  # type: ignore[misc]
    return QuestionEvaluation(
        **_means([answer for _, answer in shown]),
        lost=len(rows) - len(shown),
        tables=tables,
        episodes=tuple(_record(row, answer) for row, answer in zip(rows, answers, strict=True)),
    )


def _ask(
    config: RunConfig,
    rows: Sequence[tuple[int, VideoQARow]],
    pool: ClipPool,
    policy: QuestionPolicy,
    runtime: Runtime,
    quarantine: Quarantine,
    should_stop: Callable[[], bool],
) -> dict[int, Answer]:
    """Responses by place, clips decoded ahead of them; fewer than there are rows where it was asked to stop."""
    sampling, todo = eval_sampling(config), iter(rows)
    ahead: deque[tuple[int, VideoQARow, list[int]]] = deque()
    asked: dict[int, VideoQARow] = {}
    found: dict[int, Answer] = {}
    while len(found) < len(rows) and not should_stop():
        while len(asked) < config.runtime.max_num_seqs:
            while len(ahead) < config.data.prefetch and (item := next(todo, None)):
                budget = policy.token_budget(item[1])
                ahead.append((*item, [pool.submit(video, budget) for video in item[1].videos]))
            if not ahead:
                break
            place, row, tickets = ahead.popleft()
            try:
                (prompt,) = policy.render([row], [claim(pool, row, tickets)])
            except BadVideo as error:
                quarantine.add(row, error.video, str(error))
                found[place] = Answer(lost=1.0)
                continue
            key = TurnKey(place, 0, 0)
            runtime.submit(key, prompt, sampling(key), train=False)
            asked[place] = row
        for key, response in runtime.poll():
            found[key.group] = _answer(asked.pop(key.group), response, policy, config)
    return found


def _answer(row: VideoQARow, response: Response, policy: QuestionPolicy, config: RunConfig) -> Answer:
    text = policy.text(response.token_ids)
    score = answer_score(text, row, config.reward)
    cut = float(response.finish_reason == "length")
    return Answer(score or 0.0, float(score is None), cut, float(len(response.token_ids)), text=text)


def _gather(mine: dict[int, Answer], count: int, ranks: Ranks, stopped: float) -> list[Answer] | None:
    """Every rank's answers in order: each number is 0 on all ranks but one, and a text is the end of a key."""
    names = [name for name in Answer.__dataclass_fields__ if name != "text"]
    values = {f"{place}/{name}": getattr(answer, name) for place, answer in mine.items() for name in names}
    values |= {f"{place}/text={answer.text}": 0.0 for place, answer in mine.items()}
    total = ranks.all_reduce(values | {"stopped_max": stopped})
    if total.pop("stopped_max"):
        return None
    fields: dict[int, dict[str, Any]] = {place: {} for place in range(count)}
    for key, value in total.items():
        place, _, rest = key.partition("/")
        name, equals, text = rest.partition("=")
        fields[int(place)][name] = text if equals else value
    return [Answer(**fields[place]) for place in range(count)]


def _means(answers: Sequence[Answer]) -> dict[str, Any]:
    count = len(answers)
    right = sum(answer.score == 1.0 for answer in answers)
    return {
        "accuracy": right / count,
        "accuracy_ci95": wilson_interval(right, count),
        "score_mean": math.fsum(answer.score for answer in answers) / count,
        "unparsed": sum(answer.unparsed for answer in answers) / count,
        "cut_responses": sum(answer.cut for answer in answers) / count,
        "response_tokens_mean": sum(answer.tokens for answer in answers) / count,
        "count": count,
    }


def _table(shown: Sequence[tuple[VideoQARow, Answer]], class_of: Callable[[VideoQARow], str]) -> dict[str, Any]:
    classes: dict[str, list[Answer]] = {}
    for row, answer in shown:
        classes.setdefault(class_of(row), []).append(answer)
    return {name: _means(classes[name]) for name in sorted(classes) if name}


def _record(row: VideoQARow, answer: Answer) -> dict[str, Any]:
    outcome: dict[str, Any] = {"success": None} if answer.lost else {
        "success": answer.score == 1.0,
        "score": answer.score,
        "response": answer.text,
        "unparsed": bool(answer.unparsed),
        "cut": bool(answer.cut),
    }  # fmt: skip
    return {
        "id": row.id,
        "kind": row.kind,
        "videos": [str(video) for video in row.videos],
        "question": row.question,
        "options": list(row.options),
        "wanted": row.answer,
        "lost": bool(answer.lost),
    } | outcome
