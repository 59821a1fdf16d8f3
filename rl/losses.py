"""Per-token losses of finished groups: the clipped policy gradient and imitation.

An algorithm is added here: write a function that returns a `GroupLoss` and name it in `POLICY_LOSSES`. It sees the
group's rewards and each response token's log-probabilities; when a row is computed, how its gradient gets back to the
weights and on which rank, it does not know.

Metrics a loss returns, beside its sum: `tokens` counts the trained tokens, `*_sum` are sums over them, `*_max` maxima.
`rl.metrics` divides each `*_sum` by `tokens` once rows and ranks are added up. `entropy` is estimated as the mean of
-log p of what was sampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from configs.schema import NEEDS_BATCH, RLConfig
from data.transfer import on_device
from data.types import Group, GroupLoss, TokenBatch
from rl.advantage import group_advantage


@dataclass(frozen=True)
class Scale:
    """What a group's loss must know beyond the group."""

    max_response_tokens: int
    """Most response tokens a rollout can hold, `env.max_turns * rollout.max_tokens` (count)."""
    batch_std: float = 1.0
    """Standard deviation of the step's rewards around their groups' means; known once all groups are."""


def grpo_loss(config: RLConfig, group: Group, scale: Scale) -> GroupLoss:
    """GRPO (arXiv:2402.03300): normalised advantages; a rollout's tokens are averaged, then rollouts are.

    A token's weight is 1 / (trained tokens of its rollout); the denominator is the number of rollouts.
    """
    mask = trained_responses(config, group)
    lengths = [
        sum(len(turn.response.token_ids) for turn, kept in zip(rollout.turns, keep, strict=False) if kept)
        for rollout, keep in zip(group.rollouts, mask.tolist(), strict=True)
    ]
    weights = torch.tensor([1.0 / max(length, 1) for length in lengths], dtype=torch.float64)
    return _clipped_loss(config, group_advantage(group.rewards, normalize=True), weights, mask)


def dr_grpo_loss(config: RLConfig, group: Group, scale: Scale) -> GroupLoss:
    """Dr. GRPO (arXiv:2503.20783): centered advantages; every token of every rollout weighs the same.

    The weight is 1 / `max_response_tokens`, a constant of the run, and the denominator the number of rollouts: nothing
    divides by a length that was sampled, so long wrong rollouts are not favoured and the gradient is unbiased.
    """
    weights = torch.full((len(group.rollouts),), 1.0 / scale.max_response_tokens, dtype=torch.float64)
    advantages = group_advantage(group.rewards, normalize=False)
    return _clipped_loss(config, advantages, weights, trained_responses(config, group))


def reinforce_pp_loss(config: RLConfig, group: Group, scale: Scale) -> GroupLoss:
    """REINFORCE++ with the group's mean as baseline (arXiv:2501.03262): advantages normalised over the whole batch.

    Weights and denominator are Dr. GRPO's.
    """
    weights = torch.full((len(group.rollouts),), 1.0 / scale.max_response_tokens, dtype=torch.float64)
    advantages = group_advantage(group.rewards, normalize=False) / scale.batch_std
    return _clipped_loss(config, advantages, weights, trained_responses(config, group))


PolicyLoss = Callable[[RLConfig, Group, Scale], GroupLoss]

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "grpo": grpo_loss,
    "dr_grpo": dr_grpo_loss,
    "reinforce_pp": reinforce_pp_loss,
}
"""Value of `rl.advantage` -> its loss."""


def needs_batch(config: RLConfig) -> bool:
    """Whether a group's loss depends on the step's other groups, so that it cannot be trained on before all exist."""
    return config.advantage in NEEDS_BATCH


def batch_sums(groups: Sequence[Group]) -> dict[str, float]:
    """This rank's part of `Scale.batch_std`, to be added over ranks."""
    centered = [group_advantage(group.rewards, normalize=False) for group in groups]
    return {
        "rollouts": float(sum(len(group.rollouts) for group in groups)),
        "centered_squares": float(sum(float(values.square().sum()) for values in centered)),
    }


def batch_std(sums: dict[str, float]) -> float:
    """Root mean square of the batch's centered rewards; 1 where all are 0, as there is nothing to scale then."""
    return math.sqrt(sums["centered_squares"] / max(sums["rollouts"], 1.0)) or 1.0


def policy_loss(config: RLConfig, group: Group, scale: Scale) -> GroupLoss:
    """The loss of one group by the configured algorithm.

    Raises:
        ValueError: the group holds one rollout, or a reward is not finite.
    """
    return POLICY_LOSSES[config.advantage](config, group, scale)


def imitation_loss(group: Group) -> GroupLoss:
    """Cross-entropy on the tokens of expert actions, averaged over all of them: the denominator is their number."""

    def fn(batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        loss = -batch.actor.sum()
        probability = batch.actor.detach().exp()
        return loss, {"tokens": probability.new_tensor(float(len(probability))), "probability_sum": probability.sum()}

    return GroupLoss(fn=fn, denominator=float(group.num_tokens))


def trained_responses(config: RLConfig, group: Group) -> Tensor:
    """True for each response that is trained on, bool[rollout, turn]; padding turns are False.

    With `rl.mask_truncated`, responses that `max_tokens` cut are left out; they keep their place in the denominator.
    """
    turns = max((len(rollout.turns) for rollout in group.rollouts), default=0)
    mask = torch.zeros(len(group.rollouts), turns, dtype=torch.bool)
    for row, rollout in enumerate(group.rollouts):
        for column, turn in enumerate(rollout.turns):
            mask[row, column] = not (config.mask_truncated and turn.response.finish_reason == "length")
    return mask


def k3(actor: Float[Tensor, " token"], reference: Float[Tensor, " token"]) -> Float[Tensor, " token"]:
    """Estimate of KL(actor || reference) at each sampled token: r - 1 - log r with r = reference / actor.

    Never negative, 0 where both agree, and unbiased under the actor (J. Schulman, "Approximating KL divergence", 2020).
    """
    log_ratio = reference - actor
    return log_ratio.exp() - log_ratio - 1


def _clipped_loss(
    config: RLConfig, advantages: Float[Tensor, " rollout"], weights: Float[Tensor, " rollout"], mask: Tensor
) -> GroupLoss:
    """weight * (kl_coef * k3 - min(ratio A, clip(ratio) A)), summed over the tokens that `mask` keeps."""

    def fn(batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        # Masked by where, not by indexing: a boolean index would make the host wait for the GPU while it decodes.
        device, dtype = batch.actor.device, batch.actor.dtype
        keep = on_device(mask, device)[batch.rollout, batch.turn]
        advantage = on_device(advantages.to(dtype), device)[batch.rollout]
        weight = on_device(weights.to(dtype), device)[batch.rollout] * keep

        ratio = torch.where(keep, batch.actor - batch.old.detach(), 0.0).exp()
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        token_loss = -torch.minimum(ratio * advantage, clipped * advantage)
        metrics = {
            "tokens": keep.sum().to(dtype),
            "entropy_sum": -(batch.actor.detach() * keep).sum(),
            "clip_fraction_sum": (clipped * advantage < ratio * advantage).sum().to(dtype),
            "ratio_max": torch.where(keep, ratio.detach(), 0.0).max(),
        }
        if batch.reference is not None:
            kl = k3(torch.where(keep, batch.actor, 0.0), torch.where(keep, batch.reference.detach(), 0.0))
            token_loss = token_loss + config.kl_coef * kl
            metrics["kl_sum"] = kl.detach().sum()
        return (weight * token_loss).sum(), metrics

    constant = not advantages.any() and (config.kl_coef == 0 or config.skip_equal_groups)
    return GroupLoss(
        fn=fn,
        denominator=float(len(advantages)),
        needs_reference=config.kl_coef > 0 and not constant,
        constant=constant,
    )
