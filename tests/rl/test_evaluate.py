"""Evaluation: intervals and path efficiency by hand, and the same results however it is spread."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from configs.errors import UserError
from data.types import Sampling, TurnKey
from envs.registration import Episode
from rl.evaluate import Alone, eval_sampling, evaluate, evaluate_command
from rl.players import ModelPlayer, ScriptedPlayer, expert_choice
from rl.scores import EpisodeResult, Evaluation, spl, summarize, wilson_interval
from tests.rl.fakes import GO, STAY, FakePolicy, FakePool, FakeRuntime, fake_config

HELD = [Episode(f"held-{index}", index, "heldout") for index in range(7)]


def result(success: bool, geodesic_m: float, path_length_m: float) -> EpisodeResult:
    return EpisodeResult(float(success), 0.0, 0.0, 2.0, 4.0, 0.0, path_length_m, geodesic_m)


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [
        # z^2 = 3.8414588. 5 of 10: center (0.5 + 0.19207) / 1.38415 = 0.5,
        # half 1.959964 / 1.38415 * sqrt(0.025 + 0.0096036) = 0.26341
        (5, 10, 0.23659, 0.76341),
        (0, 10, 0.0, 3.8414588 / 13.8414588),  # the lower end is 0, the upper z^2 / (n + z^2)
        (10, 10, 10 / 13.8414588, 1.0),
        # center (0.85 + 0.0096036) / 1.0192073 = 0.843404, half 1.923028 * sqrt(0.0006375 + 0.0000240) = 0.049460
        (170, 200, 0.793944, 0.892864),
    ],
)
def test_wilson_interval(successes: int, count: int, low: float, high: float) -> None:
    ends = wilson_interval(successes, count)
    assert ends == pytest.approx((low, high), abs=1e-5)
    for end in ends:  # where the share lies z standard errors away, the error taken at the end itself
        assert (successes / count - end) ** 2 == pytest.approx(3.841458820694124 * end * (1 - end) / count, abs=1e-12)


@pytest.mark.parametrize(
    ("success", "geodesic_m", "path_length_m", "expected"),
    [
        (True, 5, 10, 0.5),
        (True, 5, 4.9, 1),  # a path shorter than the shortest one, by rounding
        (False, 5, 5, 0),  # also who reached the goal and did not say so
        (True, 0, 0, 1),  # ZERO_LENGTH_SPL
        (True, 0, 2, 0),
        (False, 0, 0, 0),
        (True, math.inf, 3, None),
        (False, math.inf, 3, None),
        (True, math.nan, 3, None),
    ],
)
def test_spl_of_one_episode(success: bool, geodesic_m: float, path_length_m: float, expected: float | None) -> None:
    assert spl(success, float(geodesic_m), float(path_length_m)) == expected


def test_spl_leaves_out_and_counts_what_has_no_path() -> None:
    # D18's seven episodes: 0.5, 1, 0, 1, 0, left out, 0
    rows = [(1, 5, 10), (1, 5, 4.9), (0, 5, 5), (1, 0, 0), (1, 0, 2), (1, math.inf, 3), (0, 4, 4)]
    done = summarize(HELD, [result(bool(s), float(g), float(p)) for s, g, p in rows])
    assert done.spl == pytest.approx(2.5 / 6)
    assert done.spl_excluded == 1
    assert done.success == pytest.approx(5 / 7)
    assert [episode["spl"] for episode in done.episodes] == [0.5, 1, 0, 1, 0, None, 0]
    assert done.episodes[5]["geodesic_m"] is None
    json.dumps(done.episodes, allow_nan=False)


def test_spl_is_none_where_the_environment_measures_no_path() -> None:
    done = summarize(HELD[:2], [result(True, math.nan, math.nan)] * 2)
    assert done.spl is None
    assert done.spl_excluded == 2


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
    assert sorted(path.name for path in (tmp_path / "videos").iterdir()) == ["episode_000.mp4", "episode_001.mp4"]
    assert all(path.stat().st_size > 500 for path in (tmp_path / "videos").iterdir())


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
