"""What episodes came to, in numbers: success with its interval, path efficiency, tables, and two evaluations compared.

Plain arithmetic on finished episodes; knows nothing about how they were played.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from configs.errors import UserError
from envs.registration import Episode

Z_95 = 1.959963984540054
"""97.5 % quantile of the normal distribution."""
ZERO_LENGTH_SPL = 1.0
"""SPL of a success that started at its goal and stood still, where the formula says 0 / 0."""
LENGTH_EDGES_M = (0.0, 2.0, 5.0, 10.0, 20.0)
"""Where the classes of the table by length of the shortest path begin (m)."""


@dataclass(frozen=True)
class EpisodeResult:
    """What one held-out episode came to."""

    success: float
    reward: float
    truncated: float
    turns: float
    env_steps: float
    invalid_actions: float
    path_length_m: float
    """Metres walked; NaN where the environment does not say."""
    geodesic_m: float
    """Shortest path from the start (m); NaN where the environment does not say, infinite where there is none."""
    distance_m: float = math.nan
    """Left to the goal at the end (m); NaN where the environment does not say, infinite where no path leads there."""
    lost: float = 0.0
    """1 where faults of the simulator ended it: it counts in no mean."""
    scene: str = ""
    task: str = ""


LOST = EpisodeResult(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, math.nan, math.nan, math.nan, lost=1.0)
"""Of an episode of which nothing is known."""


@dataclass(frozen=True)
class Evaluation:
    """Means over the manifest, lost episodes left out."""

    success: float
    success_ci95: tuple[float, float]
    """Wilson's 95 % interval of `success`."""
    spl: float | None
    """None where no episode has a path length to compare with."""
    spl_excluded: int
    """Episodes left out of `spl` and `soft_spl`: no path leads to their goal, or none is measured (count)."""
    soft_spl: float | None
    """As `spl`, with the share of the way that was covered in the place of success."""
    distance_m: float | None
    """Mean distance left to the goal, over the episodes from whose end a path leads there (m); None: none does."""
    reward_mean: float
    truncated: float
    turns_mean: float
    env_steps_mean: float
    invalid_actions: float
    """Share of turns whose response did not parse."""
    lost: int
    """Episodes that faults of the simulator ended (count)."""
    episodes: tuple[dict[str, Any], ...]
    tables: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """`by_scene`, `by_task`, `by_length`: class -> the same means over its episodes."""

    def metrics(self) -> dict[str, float | None]:
        """`eval/*` for the metrics file."""
        named = asdict(self)
        low, high = named.pop("success_ci95")
        del named["episodes"], named["tables"]
        return {f"eval/{key}": value for key, value in named.items()} | {
            "eval/success_low": low,
            "eval/success_high": high,
        }


def summarize(manifest: Sequence[Episode], results: Sequence[EpisodeResult]) -> Evaluation:
    """Means, intervals, tables, and one record an episode; never NaN and never infinite.

    Raises:
        ValueError: every episode is lost.
    """
    played = [result for result in results if not result.lost]
    if not played:
        raise ValueError(f"nothing to summarize: all {len(results)} episodes are lost")
    count, turns = len(played), sum(result.turns for result in played)

    def mean(values: Sequence[float]) -> float:
        return math.fsum(values) / count

    means = means_of(played)
    return Evaluation(
        success=means["success"],
        success_ci95=means["success_ci95"],
        spl=means["spl"],
        spl_excluded=sum(spl_of(result) is None for result in played),
        soft_spl=means["soft_spl"],
        distance_m=means["distance_m"],
        reward_mean=mean([result.reward for result in played]),
        truncated=mean([result.truncated for result in played]),
        turns_mean=turns / count,
        env_steps_mean=mean([result.env_steps for result in played]),
        invalid_actions=sum(result.invalid_actions for result in played) / max(turns, 1),
        lost=len(results) - count,
        episodes=tuple(_record(episode, result) for episode, result in zip(manifest, results, strict=True)),
        tables={
            "by_scene": _table(played, lambda result: result.scene),
            "by_task": _table(played, lambda result: result.task),
            "by_length": _table(played, lambda result: length_class(result.geodesic_m)),
        },
    )


def means_of(results: Sequence[EpisodeResult]) -> dict[str, Any]:
    """The means that tables show, of one class of episodes, none of them lost."""
    successes = sum(result.success > 0 for result in results)
    return {
        "count": len(results),
        "success": successes / len(results),
        "success_ci95": wilson_interval(successes, len(results)),
        "spl": _mean_of_known([spl_of(result) for result in results]),
        "soft_spl": _mean_of_known([soft_spl_of(result) for result in results]),
        "distance_m": _mean_of_known([_finite(result.distance_m) for result in results]),
    }


def spl_of(result: EpisodeResult) -> float | None:
    """SPL of one episode."""
    return spl(result.success > 0, result.geodesic_m, result.path_length_m)


def soft_spl_of(result: EpisodeResult) -> float | None:
    """SoftSPL of one episode."""
    return soft_spl(result.geodesic_m, result.path_length_m, result.distance_m)


def spl(success: bool, geodesic_m: float, path_length_m: float) -> float | None:
    """Success weighted by path length, success * l / max(l, p) (Anderson et al. 2018, arXiv:1807.06757).

    Returns:
        `ZERO_LENGTH_SPL` for a success with l = p = 0; 0 for l = 0 and p > 0, as the formula says; None where a length
        is infinite or unknown: such an episode is left out of the mean and counted.
    """
    if not (math.isfinite(geodesic_m) and math.isfinite(path_length_m)):
        return None
    return _efficiency(geodesic_m, path_length_m) if success else 0.0


def soft_spl(geodesic_m: float, path_length_m: float, distance_m: float) -> float | None:
    """SPL with max(0, 1 - d / l) in the place of success, d the way left at the end (Datta et al. 2020).

    Returns:
        What `spl` gives where l = 0, with d = 0 as the success; 0 where no path leads from the end to the goal; None
        where l is infinite, or a length is unknown.
    """
    if not (math.isfinite(geodesic_m) and math.isfinite(path_length_m)) or math.isnan(distance_m):
        return None
    progress = max(0.0, 1 - distance_m / geodesic_m) if geodesic_m > 0 else float(distance_m == 0)
    return progress * _efficiency(geodesic_m, path_length_m)


def _efficiency(geodesic_m: float, path_length_m: float) -> float:
    longest = max(geodesic_m, path_length_m)
    return geodesic_m / longest if longest > 0 else ZERO_LENGTH_SPL


def wilson_interval(successes: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a share (E. B. Wilson 1927); never leaves [0, 1]."""
    share, z2 = successes / count, Z_95**2
    center = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z_95 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return max(center - half, 0.0), 1.0 if successes == count else center + half


def length_class(geodesic_m: float) -> str:
    """The class of a shortest path's length, as the table names it."""
    if math.isnan(geodesic_m):
        return "unknown"
    if math.isinf(geodesic_m):
        return "no path"
    begin = max(edge for edge in LENGTH_EDGES_M if edge <= max(geodesic_m, 0.0))
    later = [edge for edge in LENGTH_EDGES_M if edge > begin]
    return f"{begin:g}-{later[0]:g} m" if later else f"{begin:g} m and more"


def _table(results: Sequence[EpisodeResult], class_of: Callable[[EpisodeResult], str]) -> dict[str, dict[str, Any]]:
    """Means by class; empty where the environment names none."""
    classes: dict[str, list[EpisodeResult]] = {}
    for result in sorted(results, key=lambda result: (math.isnan(result.geodesic_m), result.geodesic_m)):
        classes.setdefault(class_of(result), []).append(result)
    return {name: means_of(members) for name, members in classes.items() if name}


def _record(episode: Episode, result: EpisodeResult) -> dict[str, Any]:
    """JSON's values: flags as booleans, what is unknown or infinite as null, no outcome where it is lost."""
    values: dict[str, Any] = {
        name: _finite(value) if isinstance(value, float) else value for name, value in asdict(result).items()
    }
    values |= {"success": bool(result.success), "truncated": bool(result.truncated), "lost": bool(result.lost)}
    if result.lost:
        values |= dict.fromkeys(("success", "reward", "truncated"))
    values |= {"spl": spl_of(result), "soft_spl": soft_spl_of(result)}
    return {"id": episode.id, "seed": episode.seed} | values | {"scene": episode.scene or result.scene}


def _mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# --- two evaluations of the same episodes --------------------------------------------------------------------------


def compare(before: Path, after: Path) -> dict[str, Any]:
    """Two evaluations of the same manifest, paired by scene and id: McNemar's test in its exact form.

    Under "neither is better", an episode that only one of them solves is either's with probability 1/2; `p_value` is
    the two-sided probability of a split at least as uneven as the one seen.

    Args:
        before, after: `results.json`, or folders that hold one.

    Raises:
        UserError: a file cannot be read, the two share no episode, or an episode of theirs is of different worlds.
    """
    rows, other_rows = _episodes(before), _episodes(after)
    shared = sorted(rows.keys() & other_rows.keys())
    if not shared:
        raise UserError(
            f"{before} and {after} share no episode: evaluate both with the same env, eval.episodes and "
            "eval.manifest_seed"
        )
    for key in shared:
        here, there = rows[key].get("geodesic_m"), other_rows[key].get("geodesic_m")
        if here is not None and there is not None and not math.isclose(here, there, rel_tol=1e-6):
            raise UserError(
                f"episode {' '.join(key).strip()} begins {here:.3f} m from its goal in {before} and {there:.3f} m in "
                f"{after}: evaluate both with the same env.options"
            )
    outcomes = [(rows[key]["success"], other_rows[key]["success"]) for key in shared]
    pairs = [(bool(first), bool(second)) for first, second in outcomes if None not in (first, second)]
    only_first, only_second = pairs.count((True, False)), pairs.count((False, True))
    return {
        "episodes": len(pairs),
        "success_a": sum(a for a, _ in pairs) / max(len(pairs), 1),
        "success_b": sum(b for _, b in pairs) / max(len(pairs), 1),
        "difference": (only_second - only_first) / max(len(pairs), 1),
        "difference_ci95": paired_interval(only_first, only_second, len(pairs)),
        "only_a": only_first,
        "only_b": only_second,
        "p_value": sign_test(only_first, only_second),
        "unpaired": len(rows.keys() ^ other_rows.keys()),
        "lost": len(shared) - len(pairs),
    }


def sign_test(wins: int, losses: int) -> float:
    """Two-sided exact sign test: probability, under a fair coin, of a split at least this uneven; 1 for no throws."""
    count, fewer = wins + losses, min(wins, losses)
    tail = sum(math.comb(count, k) for k in range(fewer + 1)) / 2**count
    return min(1.0, 2 * tail)


def paired_interval(only_first: int, only_second: int, count: int) -> tuple[float, float]:
    """95 % interval of the difference of two paired shares, within [-1, 1].

    Agresti and Min's (2005): Wald's with half a pair added to each of the four outcomes, so that pairs that all agree,
    or all differ one way, still leave a width.
    """
    pairs = count + 2
    difference = (only_second - only_first) / pairs
    variance = (only_first + only_second + 1) / pairs - difference**2
    half = Z_95 * math.sqrt(variance / pairs)
    return max(difference - half, -1.0), min(difference + half, 1.0)


def _episodes(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Record of each episode by scene and id; its `success` is None where it was lost."""
    file = path / "results.json" if path.is_dir() else path
    try:
        rows = json.loads(file.read_text())["episodes"]
        return {(row.get("scene") or "", row["id"]): {**row, "success": row["success"]} for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is no results.json of `run.py eval`: {error!r}. Name one, or its folder") from error
