"""Questions as the loop sees them: groups of responses, demonstrations, evaluation, and where the order of rows is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agent.rewards import Rewards
from configs.errors import UserError
from configs.schema import DataConfig, RewardConfig, RunConfig
from data.budget import ClipPlan
from data.decode import DecodedClip
from data.types import Prompt, Sampling, TurnKey
from data.video_index import BadMedia
from data.video_qa import VideoQARow, make_row
from data.video_qa_feed import TooManyBadMedia
from rl.checkpoint import prepare_run_folder
from rl.interfaces import Cursors
from rl.question_scores import Answer, choose_rows, summarize_answers
from rl.questions import QuestionSource
from rl.signals import StopSignals
from rl.trainer import Trainer, train
from tests.rl.fakes import FakeRuntime, fake_config

RIGHT, WRONG, BABBLE = 0, 1, 2
DATA = DataConfig(max_bad_fraction=0.5, prefetch=3)


class Clips:
    """Every path is a clip, but for the bad ones."""

    wait_s, num_cached, num_decoded = 0.0, 0, 0

    def __init__(self, bad: Sequence[str] = ()) -> None:
        self.bad = bad
        self.open: dict[int, Path] = {}

    def submit(self, path: Path, max_tokens: int = 0) -> int:
        ticket = self.num_decoded
        self.num_decoded += 1
        self.open[ticket] = path
        return ticket

    def result(self, ticket: int) -> DecodedClip:
        path = self.open.pop(ticket)
        if path.name in self.bad:
            raise BadMedia("is damaged")
        frames = np.full((2, 28, 28, 3), int(path.stem), np.uint8)
        return DecodedClip(frames, (0.0, 0.5), 1.0, 2, ClipPlan(2, 28, 28, (1, 1, 1), 0.5), "fake")


class Speaker:
    """A prompt is the brightness of its row's clip; a response is one token: the row's answer, a wrong one, babble."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def render(self, rows: Sequence[VideoQARow], clips: Sequence[Sequence[DecodedClip]]) -> list[Prompt]:
        self.shown += [row.id for row in rows]
        for row, shown in zip(rows, clips, strict=True):
            assert [int(clip.frames[0, 0, 0, 0]) for clip in shown] == [int(row.videos[0].stem)]
        numbers = [int(row.videos[0].stem) for row in rows]
        return [Prompt((number,), torch.zeros(3, 1, dtype=torch.long), (), str(number)) for number in numbers]

    def text(self, token_ids: Sequence[int]) -> str:
        return {RIGHT: "7", WRONG: "8", BABBLE: "some"}[token_ids[0]]

    def label(self, row: VideoQARow) -> tuple[int, ...]:
        return (RIGHT,)

    def token_budget(self, row: VideoQARow) -> int:
        return 1


def rows_of(count: int, prefix: str = "q") -> list[VideoQARow]:
    return [
        make_row(
            {"video": f"{place}.mp4", "question": "how many?", "answer": 7},
            row_id=f"{prefix}{place}", source="", media_root=Path("/m"), tags={"half": "ab"[place % 2]},
        )
        for place in range(count)
    ]  # fmt: skip


def make_source(
    folder: Path, runtime: FakeRuntime, *, bad: Sequence[str] = (), rows: int = 12, **changes: Any
) -> QuestionSource:
    config = fake_config(folder, data=DATA, **changes)
    rewards = Rewards(config.reward, config.rollout.max_tokens)
    return QuestionSource(config, rows_of(rows), rows_of(6, "e"), Clips(bad), Speaker(), rewards, runtime)


def alternate(key: TurnKey, sampling: Sampling) -> int:
    """Rollouts of a group are right, wrong, babble, right."""
    return (RIGHT, WRONG, BABBLE)[key.rollout % 3]


def test_a_group_is_a_row_with_its_responses_scored(tmp_path: Path) -> None:
    runtime = FakeRuntime(alternate, timing=3)
    source = make_source(tmp_path, runtime)
    groups = sorted(source.groups(0), key=lambda group: group.index)
    assert [group.index for group in groups] == [0, 1, 2]
    assert groups[0].rewards.tolist() == [1.0, 0.0, 0.0, 1.0]
    assert [rollout.success for rollout in groups[0].rollouts] == [True, False, False, True]
    assert [rollout.turns[0].invalid for rollout in groups[0].rollouts] == [False, False, True, False]
    assert {len({rollout.episode_id for rollout in group.rollouts}) for group in groups} == {1}
    assert sorted(runtime.ended_rollouts) == [(group, rollout) for group in range(3) for rollout in range(4)]
    metrics = source.metrics()
    assert metrics["reward/answer_mean"] == 0.5
    assert metrics["reward/unparsed"] == 3
    assert {"data/wait_s", "data/bad_rows", "data/epoch"} <= metrics.keys()


def test_demonstrations_are_the_answers(tmp_path: Path) -> None:
    source = make_source(tmp_path, FakeRuntime(), imitation={"episodes_per_step": 5})
    (group,) = source.demonstrations(0)
    assert [rollout.turns[0].response.token_ids for rollout in group.rollouts] == [(RIGHT,)] * 5
    assert len({rollout.episode_id for rollout in group.rollouts}) == 5


def test_a_group_with_a_lost_reward_is_left_out_whole(tmp_path: Path) -> None:
    runtime = FakeRuntime(alternate)
    reward = RewardConfig(
        weights={"answer": 1.0, "nan_for_some": 1.0},
        functions={"nan_for_some": "tests.rl.reward_functions:nan_for_q0"},
        on_error="lost",
    )
    source = make_source(tmp_path, runtime, rows=3, reward=reward)
    with source.rewards:
        groups = list(source.groups(0))
    assert sorted(group.rollouts[0].episode_id for group in groups) == ["q1", "q2"]
    assert len(source.lost) == 4
    assert "row 'q0'" in source.lost[0].reason
    assert source.metrics()["reward/lost"] == 4


def test_rows_go_on_where_the_cursor_is(tmp_path: Path) -> None:
    whole = make_source(tmp_path / "a", FakeRuntime())
    order = [group_ids(whole, step) for step in range(4)]
    first = make_source(tmp_path / "b", FakeRuntime())
    assert [group_ids(first, step) for step in range(2)] == order[:2]
    cursors = Cursors(*json.loads(json.dumps(first.cursors())))
    second = make_source(tmp_path / "b", FakeRuntime())
    second.load_cursors(cursors)
    assert second.cursors() == cursors
    assert [group_ids(second, step) for step in (2, 3)] == order[2:]
    assert sorted(row for ids in order for row in ids) == sorted(row.id for row in rows_of(12))  # one epoch, each once


def group_ids(source: QuestionSource, step: int) -> list[str]:
    return [group.rollouts[0].episode_id for group in sorted(source.groups(step), key=lambda group: group.index)]


def test_a_cursor_of_another_set_is_refused(tmp_path: Path) -> None:
    first = make_source(tmp_path / "a", FakeRuntime())
    list(first.groups(0))
    with pytest.raises(UserError, match=r"the rows of data\.train are not those"):
        make_source(tmp_path / "b", FakeRuntime(), rows=13).load_cursors(first.cursors())


def test_a_bad_video_leaves_the_epoch_and_the_next_row_moves_up(tmp_path: Path) -> None:
    source = make_source(tmp_path, FakeRuntime(), bad=["4.mp4"])
    seen = [row for step in range(3) for row in group_ids(source, step)]
    assert "q4" not in seen
    assert len(set(seen)) == 9
    (line,) = (tmp_path / "bad_media.jsonl").read_text().splitlines()
    assert json.loads(line)["id"] == "q4"


def test_ranks_share_the_rows_of_a_step(tmp_path: Path) -> None:
    alone = make_source(tmp_path / "a", FakeRuntime(), rl={"group_size": 2, "groups_per_step": 4})
    expected = group_ids(alone, 0)
    shared: dict[int, str] = {}
    for rank in (0, 1):
        runtime = FakeRuntime()
        runtime.rank, runtime.world_size = rank, 2
        source = make_source(tmp_path / f"{rank}", runtime, rl={"group_size": 2, "groups_per_step": 4})
        shared |= {group.index: group.rollouts[0].episode_id for group in source.groups(0)}
        assert source.cursors().rl[f"rank{rank}"] == 2
    assert [shared[index] for index in range(4)] == expected


def test_evaluation_counts_right_answers_and_writes_them_down(tmp_path: Path) -> None:
    """Places 0 and 3 of 6 are right, 1 and 4 wrong, 2 and 5 babble."""
    runtime = FakeRuntime(lambda key, sampling: (RIGHT, WRONG, BABBLE)[key.group % 3], timing=5)
    done = make_source(tmp_path, runtime, eval={"episodes": 6, "videos": 0}).evaluate(tmp_path / "eval")
    assert done is not None
    assert done.accuracy == done.unparsed == pytest.approx(1 / 3)
    assert done.metrics()["eval/success"] == done.metrics()["eval/accuracy_numeric"] == done.accuracy
    results = json.loads((tmp_path / "eval" / "results.json").read_text())
    assert results["accuracy_ci95"][0] < results["accuracy"] < results["accuracy_ci95"][1]
    assert results["tables"]["by_kind"]["numeric"]["count"] == 6
    assert set(results["tables"]["by_half"]) == {"a", "b"}
    assert {record["response"] for record in results["episodes"]} == {"7", "8", "some"}
    assert results["episodes"][0]["wanted"] == "7"
    assert all(not train for _, _, train in runtime.submitted)
    assert all(sampling.temperature == 0 for _, sampling, _ in runtime.submitted)


def test_an_unshowable_held_out_video_counts_in_no_mean(tmp_path: Path) -> None:
    source = make_source(tmp_path, FakeRuntime(), bad=["1.mp4"], eval={"episodes": 6, "videos": 0})
    done = source.evaluate(tmp_path / "eval")
    assert done is not None
    assert (done.accuracy, done.count, done.lost) == (1.0, 5, 1)
    assert [record["success"] for record in done.episodes].count(None) == 1
    assert "1.mp4" in (tmp_path / "eval" / "bad_media.jsonl").read_text()
    bad = [f"{place}.mp4" for place in range(4)]
    with pytest.raises(TooManyBadMedia, match="4 of 6 held-out videos"):
        make_source(tmp_path, FakeRuntime(), bad=bad, eval={"episodes": 6, "videos": 0}).evaluate(tmp_path / "more")


def test_the_held_out_video_on_record_is_the_one_that_cannot_be_shown(tmp_path: Path) -> None:
    source = make_source(tmp_path, FakeRuntime(), bad=["77.mp4"], eval={"episodes": 6, "videos": 0})
    source.held_out = [replace(row, videos=(row.videos[0], Path("/m/77.mp4"))) for row in rows_of(1)] + rows_of(5, "e")
    source.evaluate(tmp_path / "eval")
    assert json.loads((tmp_path / "eval" / "bad_media.jsonl").read_text())["video"] == "/m/77.mp4"


def test_the_manifest_depends_on_its_seed_alone() -> None:
    rows = rows_of(50)
    chosen = choose_rows(rows, 10, 3)
    assert chosen == choose_rows(rows, 10, 3) != choose_rows(rows, 10, 4)
    assert chosen == sorted(chosen, key=rows.index)
    assert choose_rows(rows, 99, 3) == rows


def test_partial_credit_is_in_the_score_and_not_in_the_accuracy() -> None:
    done = summarize_answers(rows_of(3), [Answer(score=1.0), Answer(score=0.5), Answer(score=0.0, unparsed=1.0)])
    assert done.accuracy == pytest.approx(1 / 3)
    assert done.score_mean == 0.5
    assert done.unparsed == pytest.approx(1 / 3)


def test_the_whole_loop_runs_on_questions_and_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    def play(folder: Path, runtime: FakeRuntime, steps: int) -> dict[str, Any]:
        changes: dict[str, Any] = {"save_every": 2, "resume": "auto", "rollout": {"deterministic": True}}
        source = make_source(folder, runtime, imitation={"steps": 2, "episodes_per_step": 2}, steps=steps, **changes)
        checkpoint = prepare_run_folder(source.config)
        with StopSignals() as stop:
            trainer = Trainer(source.config, source, stop)
            trainer.resume(checkpoint)
            with source.teacher():
                trainer.imitate()
            trainer.reinforce()
            return trainer.summarize()

    whole, first, second = (FakeRuntime(alternate, timing=timing) for timing in range(3))
    summary = play(tmp_path / "whole", whole, 6)
    assert summary["success_after"] == 1.0
    assert summary["spl_after"] is None
    play(tmp_path / "cut", first, 4)
    play(tmp_path / "cut", second, 6)
    assert second.weights == whole.weights
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if line["phase"] == "rl" and line["step"] == 3]
    assert line["reward/answer_mean"] == line["rollout/reward_mean"] == 0.5
    assert line["data/epoch"] == pytest.approx(9 / 12)


def test_training_without_training_rows_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = RunConfig(run_dir=str(tmp_path / "run"), data=DataConfig(eval={"eval.jsonl": "own"}))
    with pytest.raises(UserError, match=r"no rows to train on: name files in data\.train"):
        train(config)
    assert not (tmp_path / "run").exists()
