"""Numbers of a run: what a step's groups say, summed over ranks, and the files they go to.

`metrics.jsonl` holds one line a step and one an evaluation. Knows nothing about how the numbers came to be.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.types import Group
from rl.advantage import is_zero_variance

logger = logging.getLogger(__name__)


def rollout_sums(groups: Sequence[Group], num_lost: int = 0) -> dict[str, float]:
    """Sums over this rank's groups, and the episodes lost beside them (count), ready to be added over ranks."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    return {
        "groups": float(len(groups)),
        "lost": float(num_lost),
        "rollouts": float(len(rollouts)),
        "turns": float(len(turns)),
        "reward": math.fsum(rollout.reward for rollout in rollouts),
        "reward_squared": math.fsum(rollout.reward**2 for rollout in rollouts),
        "success": float(sum(rollout.success for rollout in rollouts)),
        "truncated": float(sum(rollout.truncated for rollout in rollouts)),
        "zero_variance_groups": float(sum(is_zero_variance(group.rewards) for group in groups)),
        "invalid_actions": float(sum(turn.invalid for turn in turns)),
        "cut_responses": float(sum(turn.response.finish_reason == "length" for turn in turns)),
        "response_tokens": float(sum(group.num_tokens for group in groups)),
    }


def rollout_metrics(sums: dict[str, float]) -> dict[str, float]:
    """`rollout/*` of a step from sums over all ranks: means and shares, and counts of groups and tokens."""
    rollouts, turns = max(sums["rollouts"], 1.0), max(sums["turns"], 1.0)
    mean = sums["reward"] / rollouts
    return {
        "rollout/reward_mean": mean,
        "rollout/reward_std": math.sqrt(max(sums["reward_squared"] / rollouts - mean**2, 0.0)),
        "rollout/success": sums["success"] / rollouts,
        "rollout/truncated": sums["truncated"] / rollouts,
        "rollout/invalid_actions": sums["invalid_actions"] / turns,
        "rollout/cut_responses": sums["cut_responses"] / turns,
        "rollout/turns_mean": sums["turns"] / rollouts,
        "rollout/response_tokens": sums["response_tokens"],
        "rollout/groups": sums["groups"],
        "rollout/lost": sums["lost"],
        "rollout/zero_variance_groups": sums["zero_variance_groups"],
    }


def per_token(stats: dict[str, float]) -> dict[str, float]:
    """Turn a loss function's `train/*_sum` into means over its `train/tokens`; everything else stays as it is."""
    tokens = max(stats.get("train/tokens", 0.0), 1.0)
    return {
        key.removesuffix("_sum"): value / tokens if key.startswith("train/") and key.endswith("_sum") else value
        for key, value in stats.items()
        if key != "train/tokens"
    }


def add_stats(total: dict[str, float], new: dict[str, float]) -> dict[str, float]:
    """Stats of several updates as one: seconds, tokens and sums add up, `*_max` and `hbm/*` take the larger."""

    def merge(key: str, old: float, value: float) -> float:
        if key.endswith("_max") or key.startswith("hbm/"):
            return max(old, value)
        adds_up = key.endswith(("_s", "_sum")) or key.startswith("tokens/") or key == "train/tokens"
        return old + value if adds_up else value

    shared = {key: merge(key, total[key], new[key]) for key in total.keys() & new.keys()}
    return total | new | shared


def warn_if_cut(metrics: dict[str, float], max_tokens: int) -> bool:
    """Warn where most responses hit `max_tokens`, so that the policy cannot finish what it says."""
    cut = metrics["rollout/cut_responses"] > 0.5
    if cut:
        logger.warning(
            "%.0f %% of the responses were cut at rollout.max_tokens=%d before their end: try rollout.max_tokens=%d",
            100 * metrics["rollout/cut_responses"],
            max_tokens,
            2 * max_tokens,
        )
    return cut


class MetricsLog:
    """Appends lines to `metrics.jsonl`; a rank other than 0 writes nothing."""

    def __init__(self, path: Path, *, enabled: bool) -> None:
        self._path = path
        self._enabled = enabled

    def start(self, phase: str, step: int) -> None:
        """Keep the lines up to the checkpoint the run continues from; a fresh run (imitation, 0) keeps none.

        An evaluation at the checkpoint's own step is made again, so its line goes too.
        """
        if not self._enabled:
            return
        lines = self._path.read_text().splitlines() if self._path.is_file() else []
        kept = [line for line in lines if _is_before(line, phase, step)]
        replacement = self._path.with_suffix(".tmp")
        replacement.write_text("".join(f"{line}\n" for line in kept))
        replacement.rename(self._path)

    def write(self, phase: str, step: int, values: dict[str, Any]) -> None:
        """Append one line; numbers that JSON has no word for become null."""
        if not self._enabled:
            return
        line = {"phase": phase, "step": step} | {key: _json_number(value) for key, value in sorted(values.items())}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a small file whole: readers see the old one or the new one."""
    replacement = path.with_name(f".{path.name}.tmp")
    replacement.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n")
    replacement.rename(path)


def _is_before(line: str, phase: str, step: int) -> bool:
    try:
        record = json.loads(line)
    except ValueError:  # the last line of a run that was killed while it wrote
        return False
    if record["phase"] != phase:
        return bool(record["phase"] == "imitation")
    is_evaluation = any(key.startswith("eval/") for key in record)
    return bool(record["step"] < step or (record["step"] == step and step > 0 and not is_evaluation))


def _json_number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
