from __future__ import annotations

import pytest

from bench.steps import LONG_TAIL, long_tail_lengths, medians, response_lengths
from configs.schema import RLConfig, RolloutConfig, RunConfig


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_long_tailed_lengths_keep_their_limits_and_their_mean(seed: int) -> None:
    lengths = long_tail_lengths(96, seed)
    assert len(lengths) == 96
    assert LONG_TAIL[0] <= min(lengths)
    assert max(lengths) <= LONG_TAIL[1]
    assert sum(lengths) / 96 == pytest.approx(256, abs=2)
    assert max(lengths) > 4 * sorted(lengths)[48], "no long tail"


def test_long_tailed_lengths_depend_on_the_seed_alone() -> None:
    assert long_tail_lengths(16, 3) == long_tail_lengths(16, 3)
    assert long_tail_lengths(16, 3) != long_tail_lengths(16, 4)


def test_every_response_of_every_group_has_a_length() -> None:
    config = RunConfig(rl=RLConfig(group_size=3, groups_per_step=2), rollout=RolloutConfig(max_tokens=12), seed=5)
    assert response_lengths(config, long_tail=False) == [[12, 12, 12], [12, 12, 12]]
    flat = long_tail_lengths(6, 5)
    assert response_lengths(config, long_tail=True) == [flat[:3], flat[3:]]


def test_medians_take_a_missing_number_for_0() -> None:
    steps = [{"a": 1.0, "b": 5.0}, {"a": 3.0}, {"a": 2.0}]
    assert medians(steps) == {"a": 2.0, "b": 0.0}
