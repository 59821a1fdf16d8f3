"""Advantages of the rollouts of one group from their rewards.

Knows nothing about tokens, models or losses.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

EQUAL_TOLERANCE = 5e-7
"""Rewards whose range is within this share of their size (at least 1) are equal: four roundings of float32, in which a
reward function may have added its parts."""


def is_zero_variance(rewards: Float[Tensor, " rollout"]) -> bool:
    """True where a group's rewards are equal up to rounding, so that it teaches nothing."""
    spread = rewards.max() - rewards.min()
    size = rewards.abs().max().clamp(min=1.0)
    return bool(spread <= EQUAL_TOLERANCE * size)


def group_advantage(rewards: Float[Tensor, " rollout"], *, normalize: bool) -> Float[Tensor, " rollout"]:
    """Center each rollout's reward on its group's mean, A_i = r_i - mean(r).

    With `normalize`, also divide by the group's standard deviation, the population's (GRPO, arXiv:2402.03300);
    without it this is Dr. GRPO's advantage (arXiv:2503.20783). Rewards that are equal up to rounding give exactly 0:
    the rounding of their mean must not be blown up to an advantage of 1.

    Raises:
        ValueError: the group holds one rollout, so every advantage would be 0; or a reward is not finite.
    """
    if len(rewards) < 2:
        raise ValueError(f"a group needs 2 rollouts or more to compare, got {len(rewards)}: set rl.group_size >= 2")
    if not bool(rewards.isfinite().all()):
        raise ValueError(f"a reward is not finite: {rewards.tolist()}; the environment must return plain numbers")
    if is_zero_variance(rewards):
        return rewards.new_zeros(rewards.shape)
    centered = rewards - rewards.mean()
    return centered / centered.square().mean().sqrt() if normalize else centered
