"""Random trees against the plain computation: depths, widths, lengths, loss masks, row limits, budgets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from data.types import Group, GroupLoss, TokenBatch, Turn
from runtime.memory import Ledger
from runtime.prefix_tree import GradientBuffer
from runtime.update import Updater
from runtime.vlm import SplitVLM
from runtime.work import GroupWork, Packing
from tests.runtime.support import (
    load_tiny,
    naive_gradients,
    random_chain_group,
    random_group,
    relative_error,
    vocabulary_of,
)
from tests.runtime.test_update import SHAPE

LENGTHS = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def model(model_cache: Path) -> Any:
    return load_tiny(model_cache, torch.float64, exact=True, name="tiny:qwen2_5_vl?layers=2&hidden_size=64")


def weight_of(mask: int, rollout: int, turn: int) -> float:
    """A response's weight: one bit of the mask says whether it counts."""
    return (rollout + 1.5 * turn + 0.5) * (mask >> (3 * rollout + turn) & 1)


@pytest.mark.usefixtures("exact_tower")
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(
    lengths=LENGTHS,
    mask=st.integers(0, 511),
    chain=st.booleans(),
    share=st.booleans(),
    ahead=st.booleans(),
    microbatch_tokens=st.sampled_from([4, 24, 60, 4096]),
    budget=st.sampled_from([0, 200_000, 1 << 40]),
    seed=st.integers(0, 99),
)
def test_gradients_of_random_trees_equal_the_naive_ones(
    model: Any,
    lengths: list[list[int]],
    mask: int,
    chain: bool,
    share: bool,
    ahead: bool,
    microbatch_tokens: int,
    budget: int,
    seed: int,
) -> None:
    vocabulary = vocabulary_of(model)
    make = random_chain_group if chain else random_group
    group = make(model, torch.Generator().manual_seed(seed), 0, lengths, [0.0] * len(lengths))

    def naive_loss(group: Group, index: int, turn: Turn, logprobs: Tensor) -> Tensor:
        return logprobs.sum() * weight_of(mask, index, group.rollouts[index].turns.index(turn))

    def loss(batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        pairs = zip(batch.rollout.tolist(), batch.turn.tolist(), strict=True)
        weights = torch.tensor([weight_of(mask, rollout, turn) for rollout, turn in pairs], dtype=batch.actor.dtype)
        return (batch.actor * weights).sum(), {}

    expected = naive_gradients(model, vocabulary, [group], naive_loss)
    parameters = dict(model.named_parameters())
    buffer = GradientBuffer(list(parameters.values()))
    updater = Updater(SplitVLM(model, vocabulary), buffer, SHAPE, Ledger(), budget)
    work = GroupWork.of(group, Packing(share, microbatch_tokens, chain))
    if ahead:
        for unit in work.units:
            list(updater.encode_early(unit.rows if chain else [unit.prompts]))
    list(updater.train(work, GroupLoss(loss, 1.0)))
    updater.release()
    updater.ledger.check_integrity(empty=("boundaries", "logits"))
    scale = max(float(gradient.norm()) for gradient in expected.values())
    for name, gradient in expected.items():
        if float(gradient.norm()) > 1e-12 * scale:
            assert relative_error(buffer.views[parameters[name]], gradient) <= 1e-9, name
        else:
            assert float(buffer.views[parameters[name]].norm()) <= 1e-12 * scale, name
