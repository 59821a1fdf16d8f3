"""Losses and their gradients, against values worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from configs.schema import RLConfig
from data.types import Group, Response, Rollout, TokenBatch, Turn
from rl.losses import POLICY_LOSSES, Scale, batch_std, batch_sums, imitation_loss, k3, needs_batch, policy_loss
from rl.players import NO_PROMPT

LN2 = math.log(2)


def rollout(reward: float, lengths: Sequence[int], cut: Sequence[int] = ()) -> Rollout:
    """A rollout with responses of the given lengths; the turns in `cut` were ended by the length limit."""
    turns = tuple(
        Turn(NO_PROMPT, Response((7,) * length, (0.0,) * length, "length" if turn in cut else "stop", 0))
        for turn, length in enumerate(lengths)
    )
    return Rollout("episode", turns, float(reward), success=reward > 0, truncated=False)


def tokens(
    group: Group,
    actor: Sequence[float],
    old: Sequence[float] | None = None,
    reference: Sequence[float] | None = None,
) -> TokenBatch:
    """All response tokens of a group in order, with the given log-probabilities; `old` is `actor` unless given."""
    owners = [
        (row, column)
        for row, record in enumerate(group.rollouts)
        for column, turn in enumerate(record.turns)
        for _ in turn.response.token_ids
    ]
    now = torch.tensor(actor, dtype=torch.float64, requires_grad=True)
    return TokenBatch(
        actor=now,
        old=now.detach() if old is None else torch.tensor(old, dtype=torch.float64),
        behaviour=now.detach(),
        reference=None if reference is None else torch.tensor(reference, dtype=torch.float64),
        rollout=torch.tensor([row for row, _ in owners]),
        turn=torch.tensor([column for _, column in owners]),
    )


def gradient(loss: Tensor, batch: TokenBatch) -> list[float]:
    loss.backward()
    assert batch.actor.grad is not None
    return batch.actor.grad.tolist()


def test_grpo_on_policy_gradient_is_minus_advantage_over_length() -> None:
    group = Group(0, (rollout(1, [1, 1]), rollout(0, [3, 1])))  # advantages +1 and -1, lengths 2 and 4
    loss = policy_loss(RLConfig(), group, Scale(99))
    batch = tokens(group, [-0.5] * 6)
    value, metrics = loss.fn(batch)
    assert loss.denominator == 2
    assert not loss.needs_reference
    assert value.item() == pytest.approx(-1 + 1)  # ratio 1: each rollout gives -A
    assert gradient(value, batch) == pytest.approx([-0.5, -0.5, 0.25, 0.25, 0.25, 0.25])
    assert {name: metric.item() for name, metric in metrics.items()} == pytest.approx(
        {"tokens": 6, "entropy_sum": 3.0, "clip_fraction_sum": 0, "ratio_max": 1}
    )


@pytest.mark.parametrize(
    ("options", "rewards", "constant"),
    [
        ({}, (1, 1), True),
        ({"kl_coef": 0.1}, (1, 1), False),
        ({"kl_coef": 0.1, "skip_equal_groups": True}, (1, 1), True),
        ({"kl_coef": 0.1, "skip_equal_groups": True}, (1, 0), False),
    ],
)
def test_a_group_of_equal_rewards_is_trained_on_only_for_the_divergence(
    options: dict[str, float], rewards: tuple[float, float], constant: bool
) -> None:
    group = Group(0, tuple(rollout(reward, [2]) for reward in rewards))
    loss = policy_loss(RLConfig(**options), group, Scale(9))  # type: ignore[arg-type]
    assert (loss.constant, loss.denominator) == (constant, 2.0)
    assert loss.needs_reference == (not constant and "kl_coef" in options)


def test_dr_grpo_weighs_every_token_by_one_constant() -> None:
    group = Group(0, (rollout(1, [2]), rollout(0, [4])))  # advantages +0.5 and -0.5
    batch = tokens(group, [-1.0] * 6)
    loss = policy_loss(RLConfig(advantage="dr_grpo"), group, Scale(8))
    value, _ = loss.fn(batch)
    assert loss.denominator == 2
    assert gradient(value, batch) == pytest.approx([-0.5 / 8] * 2 + [0.5 / 8] * 4)


def test_clipping_is_asymmetric_and_stops_the_gradient_on_the_pessimistic_side_only() -> None:
    # Ratios 2, 2, 1/2, 1/2 with advantages +1, -1, +1, -1 and the interval [0.9, 1.5].
    config = RLConfig(clip_low=0.1, clip_high=0.5)
    group = Group(0, (rollout(1, [2]), rollout(0, [2])))
    batch = tokens(group, [-1.0] * 4, old=[-1.0 - LN2, -1.0 + LN2, -1.0 - LN2, -1.0 + LN2])
    value, metrics = policy_loss(config, group, Scale(2)).fn(batch)
    # A = +1: min(2, 1.5) = 1.5, clipped; min(0.5, 0.9) = 0.5, free.
    # A = -1: min(-2, -1.5) = -2, free; min(-0.5, -0.9) = -0.9, clipped.
    assert value.item() == pytest.approx(0.5 * (-1.5 - 0.5 + 2 + 0.9))
    assert gradient(value, batch) == pytest.approx([0, -0.5 * 0.5, 0.5 * 2, 0])
    assert metrics["clip_fraction_sum"].item() == 2
    assert metrics["ratio_max"].item() == pytest.approx(2)


def test_k3_is_zero_at_the_reference_and_its_gradient_is_one_minus_the_ratio() -> None:
    actor = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -1.0 + LN2, -1.0 - LN2], dtype=torch.float64)
    value = k3(actor, reference)
    assert value.tolist() == pytest.approx([0, 2 - LN2 - 1, 0.5 + LN2 - 1])
    value.sum().backward()
    assert actor.grad is not None
    assert actor.grad.tolist() == pytest.approx([0, 1 - 2, 1 - 0.5])


def test_kl_is_added_per_token_with_its_coefficient() -> None:
    group = Group(0, (rollout(1, [1]), rollout(1, [1])))  # equal rewards: KL alone is left
    batch = tokens(group, [-1.0, -1.0], reference=[-1.0 + LN2, -1.0])
    loss = policy_loss(RLConfig(kl_coef=0.1), group, Scale(1))
    value, metrics = loss.fn(batch)
    assert loss.needs_reference
    assert value.item() == pytest.approx(0.1 * (1 - LN2))
    assert metrics["kl_sum"].item() == pytest.approx(1 - LN2)
    assert gradient(value, batch) == pytest.approx([0.1 * -1, 0])


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_group_of_equal_rewards_gives_a_loss_of_zero(name: str) -> None:
    group = Group(0, tuple(rollout(reward, [2]) for reward in [0.1 + 0.2, 0.3] * 4))
    batch = tokens(group, [-0.7] * 16)
    value, _ = POLICY_LOSSES[name](RLConfig(), group, Scale(2)).fn(batch)
    assert value.item() == 0
    assert gradient(value, batch) == [0] * 16


def test_mask_truncated_drops_the_cut_response_and_keeps_its_rollout_in_the_denominator() -> None:
    group = Group(0, (rollout(1, [2, 3], cut=[1]), rollout(0, [1, 1])))
    batch = tokens(group, [-1.0] * 7)
    loss = policy_loss(RLConfig(mask_truncated=True), group, Scale(9))
    value, metrics = loss.fn(batch)
    assert loss.denominator == 2
    assert gradient(value, batch) == pytest.approx([-0.5, -0.5, 0, 0, 0, 0.5, 0.5])
    assert metrics["tokens"].item() == 4


@pytest.mark.parametrize(("num_cut", "num_trained"), [(8, 0), (7, 4)])
def test_mask_truncated_survives_groups_with_nothing_to_train_on(num_cut: int, num_trained: int) -> None:
    # D14: eight responses reach the limit; then one of them ended exactly there.
    group = Group(0, tuple(rollout(float(i % 2), [4], cut=[0] if i < num_cut else []) for i in range(8)))
    batch = tokens(group, [-1.0] * 32, old=[-99.0] * 32, reference=[-2.0] * 32)
    value, metrics = policy_loss(RLConfig(mask_truncated=True, kl_coef=0.1), group, Scale(4)).fn(batch)
    slopes = gradient(value, batch)
    assert math.isfinite(value.item())
    assert sum(slope != 0 for slope in slopes) <= num_trained
    assert all(map(math.isfinite, slopes))
    assert metrics["tokens"].item() == num_trained
    if not num_trained:
        assert value.item() == 0
        assert metrics["kl_sum"].item() == 0


def test_imitation_is_the_cross_entropy_summed_over_tokens() -> None:
    group = Group(0, (rollout(0, [2]), rollout(0, [1])))
    batch = tokens(group, [-LN2, -2 * LN2, -LN2])
    loss = imitation_loss(group)
    value, metrics = loss.fn(batch)
    assert loss.denominator == 3
    assert value.item() == pytest.approx(4 * LN2)
    assert gradient(value, batch) == [-1, -1, -1]
    assert metrics["probability_sum"].item() == pytest.approx(0.5 + 0.25 + 0.5)


def test_a_group_split_into_rows_adds_up_to_the_whole() -> None:
    group = Group(0, (rollout(1, [1, 2]), rollout(0, [3]), rollout(0, [1])))
    whole = tokens(group, [-0.1, -0.2, -0.3, -0.4, -0.5, -0.6, -0.7], old=[-0.5] * 7, reference=[-0.2] * 7)
    loss = policy_loss(RLConfig(kl_coef=0.3), group, Scale(9))
    assert whole.reference is not None
    parts = [
        TokenBatch(
            actor=whole.actor[rows],
            old=whole.old[rows],
            behaviour=whole.behaviour[rows],
            reference=whole.reference[rows],
            rollout=whole.rollout[rows],
            turn=whole.turn[rows],
        )
        for rows in ([0, 4, 6], [1, 2], [3, 5])
    ]
    total = sum((loss.fn(part)[0] for part in parts), torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(total, loss.fn(whole)[0], rtol=0, atol=1e-15)


def test_reinforce_pp_divides_by_the_whole_batch() -> None:
    config = RLConfig(advantage="reinforce_pp")
    # Group means 1 and 0.5: centered rewards -1, 1 and -0.5, 0.5; their mean square is 2.5 / 4.
    groups = [Group(i, (rollout(0, [1]), rollout(r, [1]))) for i, r in enumerate((2, 1))]
    assert batch_sums(groups) == {"rollouts": 4.0, "centered_squares": 2.5}
    std = batch_std(batch_sums(groups))
    assert std == pytest.approx(0.625**0.5)
    assert needs_batch(config)
    assert not needs_batch(RLConfig())
    assert batch_std({"rollouts": 4.0, "centered_squares": 0.0}) == 1.0
