"""Advantages, against values worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl.advantage import group_advantage, is_zero_variance


def rewards(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_grpo_divides_by_the_population_deviation() -> None:
    # mean 1, deviations (3, -1, -1, -1), variance (9 + 3) / 4 = 3
    expected = rewards(3, -1, -1, -1) / 3**0.5
    torch.testing.assert_close(group_advantage(rewards(4, 0, 0, 0), normalize=True), expected, rtol=0, atol=1e-15)


def test_dr_grpo_only_centers() -> None:
    assert group_advantage(rewards(4, 0, 0, 0), normalize=False).tolist() == [3, -1, -1, -1]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("values", [[0.35] * 7, [0.1 + 0.2, 0.3] * 4, [1.0] * 8, [0.0] * 8, [1e12 + 0.0001, 1e12]])
def test_equal_rewards_give_exactly_zero(values: list[float], normalize: bool) -> None:
    assert is_zero_variance(rewards(*values))
    assert group_advantage(rewards(*values), normalize=normalize).tolist() == [0.0] * len(values)


@pytest.mark.parametrize("size", [1.0, 100.0])
def test_what_float32_rounds_away_is_no_difference(size: float) -> None:
    part = torch.tensor([0.7, 0.4, 0.3], dtype=torch.float32) * size
    values = [(part[0] - part[1]).item(), part[2].item(), part[2].item(), 0.3 * size]
    assert len(set(values)) > 1
    assert is_zero_variance(rewards(*values))
    assert group_advantage(rewards(*values), normalize=True).tolist() == [0.0] * 4


def test_float32_neighbours_of_1_are_equal() -> None:
    assert is_zero_variance(rewards(1.0, 1 + 2**-23, 1 - 2**-24))
    assert is_zero_variance(torch.tensor([0.7 + 0.2 + 0.1, 1.0, 1 + 2**-23], dtype=torch.float32))


@pytest.mark.parametrize("values", [(0.0, 1e-4), (1.0, 1.0001), (100.0, 100.0001), (-5.0, -5.0001)])
def test_a_difference_of_1e_4_is_real(values: tuple[float, float]) -> None:
    assert not is_zero_variance(rewards(*values))


def test_small_but_real_differences_are_kept() -> None:
    assert not is_zero_variance(rewards(0.001, 0.002))
    torch.testing.assert_close(group_advantage(rewards(0.001, 0.002), normalize=True), rewards(-1, 1))


@pytest.mark.parametrize("values", [[1.0], []])
def test_group_advantage_rejects_a_group_of_one(values: list[float]) -> None:
    with pytest.raises(ValueError, match="2 rollouts or more"):
        group_advantage(rewards(*values), normalize=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        group_advantage(rewards(1.0, bad), normalize=False)
