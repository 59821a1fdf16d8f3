"""Gradients of the prefix tree against the plain per-sequence computation, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema import RLConfig
from data.types import Group, Turn, Vocabulary
from rl.losses import Scale, policy_loss
from runtime.memory import Ledger, ModelShape
from runtime.prefix_tree import GradientBuffer
from runtime.update import Updater
from runtime.vlm import SplitVLM
from runtime.work import GroupWork, Packing
from tests.runtime.support import (
    load_tiny,
    naive_gradients,
    naive_logprobs,
    random_chain_group,
    random_group,
    relative_error,
    vocabulary_of,
)

SHAPE = ModelShape(
    parameters=1, trainable=1, layers=4, hidden=128, intermediate=256, key_value=128, vocabulary=768, item_bytes=8
)
MAX_TOKENS = 8


def make_groups(model: Any, *, chain: bool = False) -> list[Group]:
    """Unequal lengths, one-token responses, rollouts that end at different turns, one group of equal rewards."""
    generator = torch.Generator().manual_seed(1)
    make = random_chain_group if chain else random_group
    return [
        make(model, generator, 0, [[3, 1], [6, 2, 4], [1]], [1.0, 0.0, 0.5]),
        make(model, generator, 1, [[2, 5], [4]], [0.0, 1.0]),
        make(model, generator, 2, [[2], [3]], [0.7, 0.7]),
    ]


def naive_policy_gradients(
    model: Any, reference: Any, vocabulary: Vocabulary, groups: list[Group], config: RLConfig
) -> dict[str, Tensor]:
    """GRPO written out for one response: the ratio is 1, so its gradient is the advantage's."""

    def loss(group: Group, index: int, turn: Turn, logprobs: Tensor) -> Tensor:
        rewards = group.rewards
        advantage = 0.0 if rewards.std() == 0 else float((rewards - rewards.mean())[index] / rewards.std(correction=0))
        tokens = sum(len(t.response.token_ids) for t in group.rollouts[index].turns)
        objective = advantage * (logprobs - logprobs.detach()).exp()
        with torch.no_grad():
            log_ratio = naive_logprobs(reference, vocabulary, turn.prompt, turn.response)
        log_ratio = log_ratio - logprobs
        return (config.kl_coef * (log_ratio.exp() - log_ratio - 1) - objective).sum() / tokens

    return naive_gradients(model, vocabulary, groups, loss)


def tree_gradients(
    model: Any,
    reference: Any,
    vocabulary: Vocabulary,
    groups: list[Group],
    config: RLConfig,
    *,
    share: bool = True,
    ahead: bool = False,
    budget: int = 1 << 40,
    microbatch_tokens: int = 64,
    chain: bool = False,
) -> tuple[dict[str, Tensor], dict[str, float], Ledger]:
    """The same by the runtime; `ahead` encodes every prefix and scores the reference before any training."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    buffer = GradientBuffer(list(parameters.values()))
    updater = Updater(SplitVLM(model, vocabulary), buffer, SHAPE, Ledger(), budget)
    updater.reference = SplitVLM(reference, vocabulary)
    packing = Packing(share, microbatch_tokens, chain)
    work = [GroupWork.of(group, packing) for group in groups]
    if ahead:
        for item in work:
            for unit in item.units:
                list(updater.encode_early(unit.rows if chain else [unit.prompts]))
                list(updater.encode_reference_early([unit.prompts]))
                if config.kl_coef:
                    list(updater.score_reference(item, unit))
    for group, item in zip(groups, work, strict=True):
        list(updater.train(item, policy_loss(config, group, Scale(24))))
    updater.release()
    updater.ledger.check_integrity(empty=("boundaries", "logits"))
    gradients = {name: buffer.views[parameter] for name, parameter in parameters.items()}
    return gradients, updater.take_sums(), updater.ledger


@pytest.mark.usefixtures("exact_tower")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ahead": True},
        {"ahead": True, "budget": 0},
        {"ahead": True, "budget": 900_000},
        {"microbatch_tokens": 8},
        {"microbatch_tokens": 4096},
        {"share": False},
        {"chain": True},
        {"chain": True, "ahead": True},
        {"chain": True, "ahead": True, "budget": 0},
        {"chain": True, "ahead": True, "budget": 900_000},
        {"chain": True, "ahead": True, "microbatch_tokens": 8},
        {"chain": True, "share": False, "microbatch_tokens": 4096},
    ],
    ids=str,
)
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_gradients_equal_the_naive_ones(model_cache: Path, options: dict[str, Any], kl_coef: float) -> None:
    model = load_tiny(model_cache, torch.float64, exact=True)
    reference = load_tiny(model_cache, torch.float64, exact=True)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)).mul(0.01))
    vocabulary, config = vocabulary_of(model), RLConfig(kl_coef=kl_coef)
    groups = make_groups(model, chain=options.get("chain", False))
    expected = naive_policy_gradients(model, reference, vocabulary, groups, config)
    actual, _, _ = tree_gradients(model, reference, vocabulary, groups, config, **options)
    scale = max(float(gradient.norm()) for gradient in expected.values())
    for name, gradient in expected.items():
        # Key biases have no effect under softmax: their gradient is 0 up to rounding.
        if float(gradient.norm()) > 1e-12 * scale:
            assert relative_error(actual[name], gradient) <= 1e-9, name
        else:
            assert float(actual[name].norm()) <= 1e-12 * scale, name


@pytest.mark.usefixtures("exact_tower")
@pytest.mark.parametrize("chain", [False, True])
def test_clipped_gradients_of_a_later_epoch_equal_the_naive_ones(model_cache: Path, chain: bool) -> None:
    """Old log-probabilities of other weights, so that ratios are far from 1 and some tokens are clipped."""
    model = load_tiny(model_cache, torch.float64, exact=True)
    before = load_tiny(model_cache, torch.float64, exact=True)
    with torch.no_grad():
        for parameter in before.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)).mul(0.02))
    vocabulary, config = vocabulary_of(model), RLConfig()
    groups = make_groups(model, chain=chain)
    clipped = 0

    def loss(group: Group, index: int, turn: Turn, logprobs: Tensor) -> Tensor:
        nonlocal clipped
        rewards = group.rewards
        advantage = 0.0 if rewards.std() == 0 else float((rewards - rewards.mean())[index] / rewards.std(correction=0))
        tokens = sum(len(t.response.token_ids) for t in group.rollouts[index].turns)
        with torch.no_grad():
            old = naive_logprobs(before, vocabulary, turn.prompt, turn.response)
        ratio = (logprobs - old).exp()
        bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        clipped += int((bounded * advantage < ratio * advantage).sum())
        return -torch.minimum(ratio * advantage, bounded * advantage).sum() / tokens

    expected = naive_gradients(model, vocabulary, groups, loss)
    assert clipped > 0
    parameters = dict(model.named_parameters())
    buffer = GradientBuffer(list(parameters.values()))
    updater = Updater(SplitVLM(model, vocabulary), buffer, SHAPE, Ledger(), 1 << 40)
    for group in groups:
        work = GroupWork.of(group, Packing(True, 64, chain))
        for unit in work.units:
            for item in unit.responses:
                prompts = [unit.prompt_of[rollout] for rollout in item.rollouts]
                pairs = zip(prompts, item.responses, strict=True)
                with torch.no_grad():
                    item.old = torch.cat([naive_logprobs(before, vocabulary, *pair) for pair in pairs])
        list(updater.train(work, policy_loss(config, group, Scale(24))))
    scale = max(float(gradient.norm()) for gradient in expected.values())
    for name, gradient in expected.items():
        assert float((buffer.views[parameters[name]] - gradient).norm()) <= 1e-9 * scale, name


def test_stock_modules_agree_to_their_own_rounding(model_cache: Path) -> None:
    model = load_tiny(model_cache, torch.float64)
    vocabulary, groups, config = vocabulary_of(model), make_groups(model), RLConfig(kl_coef=0.3)
    expected = naive_policy_gradients(model, model, vocabulary, groups, config)
    actual, _, _ = tree_gradients(model, model, vocabulary, groups, config)
    scale = max(float(gradient.norm()) for gradient in expected.values())
    worst = max(float((actual[name] - expected[name]).norm()) for name in expected)
    assert worst <= 1e-6 * scale


def test_frozen_tower_gets_no_gradient_and_the_rest_is_the_same(model_cache: Path) -> None:
    trained = load_tiny(model_cache, torch.float64)
    frozen = load_tiny(model_cache, torch.float64, train_tower=False)
    vocabulary, groups, config = vocabulary_of(trained), make_groups(trained), RLConfig()
    everything, _, _ = tree_gradients(trained, trained, vocabulary, groups, config)
    language, _, _ = tree_gradients(frozen, frozen, vocabulary, groups, config)
    assert not any("visual" in name for name in language)
    for name, gradient in language.items():
        assert torch.equal(gradient, everything[name]), name


def test_equal_reference_and_first_epoch_give_kl_0_and_ratio_1_exactly(model_cache: Path) -> None:
    model = load_tiny(model_cache, torch.float32)
    reference = load_tiny(model_cache, torch.float32)
    for ahead in (False, True):
        _, sums, _ = tree_gradients(
            model, reference, vocabulary_of(model), make_groups(model), RLConfig(kl_coef=0.3), ahead=ahead
        )
        assert sums["train/kl_sum"] == 0.0
        assert sums["train/ratio_max"] == 1.0


def test_shared_prompts_are_computed_once_a_group(model_cache: Path) -> None:
    model = load_tiny(model_cache, torch.float32)
    generator = torch.Generator().manual_seed(0)
    group = random_group(model, generator, 0, [[4], [4], [4], [4]], [1.0, 0.0, 0.0, 1.0])
    _, sums, _ = tree_gradients(model, model, vocabulary_of(model), [group], RLConfig(), microbatch_tokens=4096)
    prompt = len(group.rollouts[0].turns[0].prompt.token_ids)
    # Once the prompt, and of each response all but the last token; a naive trainer repeats everything.
    assert sums["tokens/trained"] == prompt + 4 * 3
    assert sums["tokens/naive"] == 4 * (prompt + 4)


def test_past_the_budget_nothing_is_kept_early_and_it_is_counted(model_cache: Path) -> None:
    model = load_tiny(model_cache, torch.float32)
    vocabulary, groups = vocabulary_of(model), make_groups(model)
    _, sums, roomy = tree_gradients(model, model, vocabulary, groups, RLConfig(), ahead=True)
    assert sums.get("window/over_budget", 0) == 0
    _, sums, tight = tree_gradients(model, model, vocabulary, groups, RLConfig(), ahead=True, budget=0)
    # The actor's and the reference's prefix of each turn's rows; 64 tokens hold all prompts of a turn.
    assert sums["window/over_budget"] == 2 * (3 + 2 + 1)
    assert tight.buffer_peaks["boundaries"] < roomy.buffer_peaks["boundaries"] / 2
