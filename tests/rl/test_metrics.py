"""What a step's groups say, and which lines survive a resume."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest

from data.types import Group, Response, Rollout, Turn
from rl.metrics import MetricsLog, add_stats, per_token, rollout_metrics, rollout_sums, warn_if_cut
from rl.players import NO_PROMPT


def rollout(reward: float, *, turns: int = 1, invalid: int = 0, cut: int = 0, truncated: bool = False) -> Rollout:
    records = tuple(
        Turn(NO_PROMPT, Response((1, 2), (0.0, 0.0), "length" if i < cut else "stop", 0), invalid=i < invalid)
        for i in range(turns)
    )
    return Rollout("episode", records, reward, success=reward > 0, truncated=truncated)


def test_rollout_metrics_are_means_over_rollouts_and_turns() -> None:
    groups = [
        Group(0, (rollout(1.0, turns=3), rollout(0.0, turns=1, invalid=1, truncated=True))),
        Group(1, (rollout(0.1 + 0.2, turns=2, cut=1), rollout(0.3, turns=2, invalid=1))),
    ]
    metrics = rollout_metrics(rollout_sums(groups))
    assert metrics["rollout/reward_mean"] == pytest.approx(0.4)
    assert metrics["rollout/reward_std"] == pytest.approx(math.sqrt((0.36 + 0.16 + 0.01 + 0.01) / 4))
    assert metrics["rollout/success"] == 0.75
    assert metrics["rollout/truncated"] == 0.25
    assert metrics["rollout/invalid_actions"] == 2 / 8
    assert metrics["rollout/cut_responses"] == 1 / 8
    assert metrics["rollout/zero_variance_groups"] == 1
    assert metrics["rollout/response_tokens"] == 16


def test_a_rank_without_groups_adds_nothing() -> None:
    assert set(rollout_sums([]).values()) == {0.0}
    assert rollout_metrics(rollout_sums([], num_lost=3))["rollout/lost"] == 3.0
    assert all(map(math.isfinite, rollout_metrics(rollout_sums([])).values()))


def test_token_sums_become_means() -> None:
    stats = {"train/kl_sum": 6.0, "train/tokens": 4.0, "train/ratio_max": 2.0, "time/decode_s": 1.0}
    assert per_token(stats) == {"train/kl": 1.5, "train/ratio_max": 2.0, "time/decode_s": 1.0}
    assert per_token({"train/kl_sum": 0.0, "train/tokens": 0.0}) == {"train/kl": 0.0}


def test_stats_of_two_updates_become_one() -> None:
    first = {"train/loss": 1.0, "train/kl_sum": 2.0, "train/tokens": 4.0, "train/ratio_max": 3.0, "time/decode_s": 1.0}
    second = {"train/loss": 5.0, "train/kl_sum": 1.0, "train/tokens": 4.0, "train/ratio_max": 2.0, "hbm/kv_bytes": 7.0}
    assert add_stats(first, second) == {
        "train/loss": 5.0,
        "train/kl_sum": 3.0,
        "train/tokens": 8.0,
        "train/ratio_max": 3.0,
        "time/decode_s": 1.0,
        "hbm/kv_bytes": 7.0,
    }


def test_cut_responses_are_warned_about_with_a_remedy(caplog: pytest.LogCaptureFixture) -> None:
    # D14: eight of eight responses at the limit; seven of eight where one ended exactly there.
    for cut, percent in ((8, "100 %"), (7, "88 %")):
        caplog.clear()
        groups = [Group(0, tuple(rollout(0.0, cut=int(i < cut)) for i in range(8)))]
        metrics = rollout_metrics(rollout_sums(groups))
        assert metrics["rollout/cut_responses"] == cut / 8
        assert warn_if_cut(metrics, 8)
        assert f"{percent} of the responses were cut at rollout.max_tokens=8" in caplog.text
        assert "try rollout.max_tokens=16" in caplog.text
    with caplog.at_level(logging.WARNING):
        assert not warn_if_cut({"rollout/cut_responses": 0.5}, 8)


def test_a_resumed_log_keeps_the_lines_up_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, enabled=True)
    log.start("imitation", 0)
    lines: list[tuple[str, int, str]] = [
        ("imitation", 1, "train/loss"),
        ("imitation", 2, "train/loss"),
        ("rl", 0, "eval/success"),
        ("rl", 1, "train/loss"),
        ("rl", 2, "train/loss"),
        ("rl", 2, "eval/success"),
        ("rl", 3, "train/loss"),
    ]
    for phase, step, key in lines:
        log.write(phase, step, {key: 0.5})
    with path.open("a") as file:
        file.write('{"phase": "rl", "st')  # killed while writing

    def kept(phase: str, step: int) -> list[tuple[str, int]]:
        log.start(phase, step)
        return [(record["phase"], record["step"]) for record in map(json.loads, path.read_text().splitlines())]

    assert kept("rl", 2) == [("imitation", 1), ("imitation", 2), ("rl", 0), ("rl", 1), ("rl", 2)]
    assert kept("rl", 0) == [("imitation", 1), ("imitation", 2)]
    assert kept("imitation", 1) == [("imitation", 1)]
    assert kept("imitation", 0) == []


def test_numbers_json_has_no_word_for_become_null(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", enabled=True)
    log.write("rl", 1, {"a": float("nan"), "b": float("inf"), "c": 1.0})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "phase": "rl",
        "step": 1,
        "a": None,
        "b": None,
        "c": 1,
    }


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", enabled=False)
    log.start("rl", 0)
    log.write("rl", 1, {})
    assert list(tmp_path.iterdir()) == []
