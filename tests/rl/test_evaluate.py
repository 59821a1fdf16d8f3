"""Evaluation: every episode once, and the same results however it is spread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs.errors import UserError
from data.types import Sampling, TurnKey
from envs.registration import heldout_manifest
from rl.evaluate import Alone, eval_sampling, evaluate, evaluate_command, results_name
from rl.players import ModelPlayer, ScriptedPlayer, expert_choice
from rl.scores import Evaluation, wilson_interval
from tests.rl.fakes import GO, STAY, FakePolicy, FakePool, FakeRuntime, fake_config


def play(
    folder: Path, answer: int = GO, ranks: Any = None, runtime: FakeRuntime | None = None, **eval_: Any
) -> Evaluation | None:
    config = fake_config(folder, eval={"episodes": 5, "videos": 0} | eval_)
    runtime = runtime or FakeRuntime(lambda key, _: answer if key.group % 2 else GO)
    pool = FakePool(2, lambda episode: 2)
    player = ModelPlayer(FakePolicy(), runtime, eval_sampling(config), train=False)
    return evaluate(config, pool, player, ranks or runtime, folder)


def test_results_hold_every_episode_and_the_means(tmp_path: Path) -> None:
    done = play(tmp_path, answer=STAY)
    assert done is not None
    assert (done.success, done.truncated) == (0.6, 0.4)
    assert done.reward_mean == pytest.approx((3 * 0.875 - 2 * 0.75) / 5)
    assert done.turns_mean == (3 * 2 + 2 * 6) / 5
    assert done.spl == pytest.approx(0.6)  # two steps on a way of two metres
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["success_ci95"] == pytest.approx(wilson_interval(3, 5))
    assert [episode["success"] for episode in written["episodes"]] == [True, False, True, False, True]
    assert len({episode["id"] for episode in written["episodes"]}) == 5
    assert not (tmp_path / "videos").exists()
    assert done.metrics()["eval/success_low"] == pytest.approx(wilson_interval(3, 5)[0])


def test_lost_episodes_count_nowhere(tmp_path: Path) -> None:
    config = fake_config(tmp_path, eval={"episodes": 5, "videos": 0})
    pool, player = FakePool(2, lambda episode: 2), ScriptedPlayer(expert_choice(("go", "stay")), None)
    seeds = [episode.seed for episode in heldout_manifest(config.env, 5, 0)]
    pool.loses = lambda slot, episode, went: episode.seed in seeds[:2] and went == 1
    done = evaluate(config, pool, player, Alone(), tmp_path)
    assert done is not None
    assert (done.success, done.lost) == (1.0, 2)
    assert done.success_ci95 == wilson_interval(3, 3)
    written = json.loads((tmp_path / "results.json").read_text())["episodes"]
    assert [(row["lost"], row["success"]) for row in written] == [(True, None)] * 2 + [(False, True)] * 3
    pool.loses = lambda slot, episode, went: True
    with pytest.raises(UserError, match=r"all 5 episodes were lost.*the wheel came off"):
        evaluate(config, pool, player, Alone(), tmp_path)


def test_a_world_with_a_list_of_episodes_is_evaluated_on_that(tmp_path: Path) -> None:
    config = fake_config(tmp_path, eval={"episodes": 50, "videos": 0})
    pool, player = FakePool(2, lambda episode: 2), ScriptedPlayer(expert_choice(("go", "stay")), None)
    pool.heldout = tuple((scene, number) for scene in ("attic", "barn") for number in ("0", "1", "2"))
    assert evaluate(config, pool, player, Alone(), tmp_path) is not None
    rows = json.loads((tmp_path / "results.json").read_text())["episodes"]
    assert sorted((row["scene"], row["id"]) for row in rows) == sorted(pool.heldout)
    assert all(pool.heldout[row["seed"]] == (row["scene"], row["id"]) for row in rows)


def test_two_ranks_together_see_what_one_sees(tmp_path: Path) -> None:
    alone = play(tmp_path / "alone", answer=STAY)

    class Rank(Alone):
        world_size = 2

        def __init__(self, rank: int, others: dict[str, float]) -> None:
            self.rank = rank
            self.others = others
            self.mine: dict[str, float] = {}

        def all_reduce(self, values: dict[str, float]) -> dict[str, float]:
            self.mine = values
            return {key: value + self.others.get(key, 0.0) for key, value in values.items()}

    second = Rank(1, {})
    play(tmp_path / "second", answer=STAY, ranks=second)
    assert not (tmp_path / "second" / "results.json").exists()
    assert play(tmp_path / "first", answer=STAY, ranks=Rank(0, second.mine)) == alone
    assert (tmp_path / "first" / "results.json").read_text() == (tmp_path / "alone" / "results.json").read_text()


def test_the_first_episodes_become_videos(tmp_path: Path) -> None:
    play(tmp_path, videos=2)
    written = sorted(path.name for path in (tmp_path / "videos").iterdir())
    assert written == ["episode_000.mp4", "episode_001.mp4", "episodes.png"]
    assert all(path.stat().st_size > 500 for path in (tmp_path / "videos").iterdir())
    play(tmp_path, videos=1)  # a second evaluation leaves nothing of the first beside its numbers
    assert sorted(path.name for path in (tmp_path / "videos").iterdir()) == ["episode_000.mp4", "episodes.png"]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("runs/a/checkpoints/rl_000120", "rl_000120"),
        ("runs/b/checkpoints/rl_000120", "b-rl_000120"),
        ("models/small", "models-small"),
    ],
)
def test_results_of_another_run_bear_its_name(model: str, name: str, tmp_path: Path) -> None:
    assert results_name(tmp_path / model, str(tmp_path / "runs/a")) == name


def test_a_stopped_evaluation_writes_nothing(tmp_path: Path) -> None:
    config = fake_config(tmp_path)
    player = ScriptedPlayer(expert_choice(("go", "stay")), None)
    pool = FakePool(2, lambda episode: 2)
    assert evaluate(config, pool, player, Alone(), tmp_path, should_stop=lambda: True) is None
    assert list(tmp_path.iterdir()) == []


def test_evaluation_is_greedy_or_seeded_by_place() -> None:
    assert eval_sampling(fake_config())(TurnKey(0, 0, 0)) == Sampling(8, 0.0, None)
    warm = eval_sampling(fake_config(eval={"temperature": 0.7}))
    assert warm(TurnKey(0, 0, 1)) == warm(TurnKey(0, 0, 1))
    assert warm(TurnKey(0, 0, 1)).seed != warm(TurnKey(0, 0, 2)).seed


def test_a_checkpoint_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be used: no manifest.json"):
        evaluate_command(fake_config(tmp_path), str(tmp_path), "model")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        evaluate_command(fake_config(tmp_path), str(tmp_path), "model")
