"""Intervals, path efficiency, tables and the comparison of two evaluations, by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from configs.errors import UserError
from envs.registration import Episode
from rl.scores import (
    LOST,
    EpisodeResult,
    compare,
    length_class,
    paired_interval,
    sign_test,
    soft_spl,
    spl,
    summarize,
    wilson_interval,
)

HELD = [Episode(f"held-{index}", index, "heldout") for index in range(7)]


def result(
    success: bool, geodesic_m: float, path_length_m: float, distance_m: float = 0.0, **other: Any
) -> EpisodeResult:
    return EpisodeResult(float(success), 0.0, 0.0, 2.0, 4.0, 0.0, path_length_m, geodesic_m, float(distance_m), **other)


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


@pytest.mark.parametrize(
    ("geodesic_m", "path_length_m", "distance_m", "expected"),
    [
        (5, 10, 0, 0.5),  # there, by twice the way
        (4, 4, 1, 0.75),  # three quarters of the way, straight
        (4, 8, 1, 0.375),
        (4, 2, 6, 0),  # further away than at the start
        (0, 0, 0, 1),  # started at the goal and stood still
        (0, 3, 0, 0),  # walked a round to where it had been
        (0, 3, 3, 0),
        (4, 4, math.inf, 0),  # ended where no way leads to the goal
        (math.inf, 3, 1, None),
        (math.nan, 3, 1, None),
        (4, 4, math.nan, None),
    ],
)
def test_soft_spl_of_one_episode(
    geodesic_m: float, path_length_m: float, distance_m: float, expected: float | None
) -> None:
    assert soft_spl(float(geodesic_m), float(path_length_m), float(distance_m)) == expected


def test_tables_split_the_episodes_and_leave_lost_ones_out() -> None:
    rows = [
        result(True, 1.0, 2.0, scene="a", task="goto"),
        result(False, 3.0, 3.0, 1.5, scene="b", task="goto"),
        result(True, 3.0, 6.0, scene="a", task="follow"),
        LOST,
        result(True, math.inf, 6.0, math.inf, scene="b", task="follow"),
    ]
    done = summarize(HELD[:5], rows)
    assert (done.success, done.lost, done.spl_excluded) == (0.75, 1, 1)
    assert done.spl == pytest.approx((0.5 + 0 + 0.5) / 3)
    assert done.soft_spl == pytest.approx((0.5 + 0.5 + 0.5) / 3)
    assert done.distance_m == 0.5  # of the three that are finite
    assert {name: row["count"] for name, row in done.tables["by_scene"].items()} == {"a": 2, "b": 2}
    assert done.tables["by_task"]["follow"]["success"] == 1.0
    assert list(done.tables["by_length"]) == ["0-2 m", "2-5 m", "no path"]
    assert done.tables["by_length"]["2-5 m"]["spl"] == 0.25
    json.dumps([done.episodes, done.tables, done.metrics()], allow_nan=False)


@pytest.mark.parametrize(
    ("length", "name"),
    [(0.0, "0-2 m"), (2.0, "2-5 m"), (19.99, "10-20 m"), (20.0, "20 m and more"), (math.nan, "unknown")],
)
def test_length_class(length: float, name: str) -> None:
    assert length_class(length) == name


@pytest.mark.parametrize(
    ("wins", "losses", "p"),
    [
        (0, 0, 1.0),
        (5, 0, 2 / 32),  # one of 32 throws is that, and one its mirror
        (1, 5, 2 * (1 + 6) / 64),
        (5, 1, 2 * (1 + 6) / 64),
        (3, 3, 1.0),
        (2, 8, 2 * (1 + 10 + 45) / 1024),
    ],
)
def test_sign_test(wins: int, losses: int, p: float) -> None:
    assert sign_test(wins, losses) == pytest.approx(p, abs=1e-12)


def test_paired_interval() -> None:
    # 10 pairs, 5 to 1, each outcome half a pair more: d = 4 / 12, variance 7 / 12 - 1 / 9 = 0.472222,
    # half 1.959964 * sqrt(0.472222 / 12) = 0.388804
    assert paired_interval(1, 5, 10) == pytest.approx((-0.055471, 0.722138), abs=1e-6)
    # d = 3 / 5, variance 4 / 5 - 9 / 25 = 0.44, half 1.959964 * sqrt(0.088) = 0.581419
    assert paired_interval(0, 3, 3) == pytest.approx((0.018581, 1.0), abs=1e-6)
    low, high = paired_interval(0, 0, 200)  # nothing differs: 1.959964 * sqrt(1 / 202 / 202)
    assert (-low, high) == pytest.approx((0.009703, 0.009703), abs=1e-6)
    assert paired_interval(0, 0, 0) == pytest.approx((-0.979982, 0.979982), abs=1e-6)


def results(folder: Path, name: str, outcomes: dict[tuple[str, str], bool | None]) -> Path:
    rows = [{"scene": scene, "id": id_, "success": success} for (scene, id_), success in outcomes.items()]
    file = folder / name / "results.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"episodes": rows}))
    return file.parent


def test_compare_pairs_by_scene_and_id(tmp_path: Path) -> None:
    keys = [(scene, str(number)) for scene in ("attic", "barn") for number in range(5)]
    first: dict[tuple[str, str], bool | None] = dict(zip(keys, [True] * 3 + [False] * 7, strict=True))
    second = dict(zip(keys, [True] * 2 + [False] + [True] * 5 + [False, None], strict=True))
    second[("cellar", "0")] = True
    found = compare(results(tmp_path, "a", first), results(tmp_path, "b", second) / "results.json")
    # pairs: 2 both, 1 only a, 5 only b, 1 none; one lost, one without a partner
    assert (found["episodes"], found["only_a"], found["only_b"]) == (9, 1, 5)
    assert (found["lost"], found["unpaired"]) == (1, 1)
    assert found["success_a"] == pytest.approx(3 / 9)
    assert found["success_b"] == pytest.approx(7 / 9)
    assert found["difference"] == pytest.approx(4 / 9)
    assert found["p_value"] == pytest.approx(14 / 64)


def test_compare_refuses_episodes_of_different_worlds(tmp_path: Path) -> None:
    folders = []
    for name, length in (("a", 2.5), ("b", 4.1)):
        folders.append(results(tmp_path, name, {("attic", "1"): True}))
        content = json.loads((folders[-1] / "results.json").read_text())
        content["episodes"][0]["geodesic_m"] = length
        (folders[-1] / "results.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"episode attic 1 begins 2\.500 m from its goal in .*a and 4\.100 m in .*b"):
        compare(*folders)
    assert compare(folders[0], folders[0])["episodes"] == 1


def test_compare_names_what_it_cannot_read(tmp_path: Path) -> None:
    a, b = results(tmp_path, "a", {("", "1"): True}), results(tmp_path, "b", {("", "2"): True})
    with pytest.raises(UserError, match="share no episode"):
        compare(a, b)
    with pytest.raises(UserError, match=r"nowhere.*is no results.json"):
        compare(a, tmp_path / "nowhere")
