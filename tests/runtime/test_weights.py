from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runtime.weights import Binding, StorageMoved, fused_order, in_fused_order, pack


class TrainerModel(nn.Module):
    """Names as Hugging Face gives them, in an order that leaves gaps between q, k and v."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.k_proj, self.v_proj = nn.Linear(4, 2), nn.Linear(4, 2)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = TrainerModel()


class EngineModel(nn.Module):
    """Names as vLLM gives them, and what it says about its own fusing."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # noqa: RUF012
    hf_to_vllm_mapper = SimpleNamespace(apply_list=lambda names: [f"lm.{name}" for name in names])

    def __init__(self) -> None:
        super().__init__()
        self.lm = nn.Module()
        self.lm.attn = nn.Module()
        self.lm.attn.qkv_proj, self.lm.attn.o_proj = nn.Linear(4, 8), nn.Linear(4, 4, bias=False)


def test_fused_families_become_neighbours_weights_before_biases() -> None:
    names = [
        "a.q_proj.weight",
        "a.q_proj.bias",
        "a.o_proj.weight",
        "a.k_proj.weight",
        "a.k_proj.bias",
        "b.up_proj.weight",
    ]
    assert fused_order(names) == [
        "a.q_proj.weight", "a.k_proj.weight", "a.q_proj.bias", "a.k_proj.bias", "a.o_proj.weight", "b.up_proj.weight"
    ]  # fmt: skip


def untyped_engine() -> Any:
    """Attributes of modules have no types worth checking."""
    return EngineModel()


def bound() -> tuple[Any, Any, Binding, Tensor]:
    trainer, engine = Outer(), EngineModel()
    flat = pack(in_fused_order(trainer, trainable=True))
    assert flat is not None
    return trainer, engine, Binding(engine, dict(trainer.named_parameters())), flat


def test_engine_reads_the_trainers_memory() -> None:
    trainer, engine, binding, flat = bound()
    x = torch.randn(3, 4)
    attn = trainer.attn
    expected = torch.cat([attn.q_proj(x), attn.k_proj(x), attn.v_proj(x)], dim=1)
    torch.testing.assert_close(engine.lm.attn.qkv_proj(x), expected)
    flat.mul_(2.0)
    assert torch.allclose(engine.lm.attn.qkv_proj(x), 2 * expected)
    assert binding.shared_fraction() == 1.0
    binding.check()


def test_a_tensor_that_moved_is_noticed() -> None:
    trainer, _, binding, _ = bound()
    trainer.attn.k_proj.weight.data = trainer.attn.k_proj.weight.data.clone()
    with pytest.raises(StorageMoved, match=r"lm\.attn\.qkv_proj\.weight .* attn\.k_proj\.weight"):
        binding.check()
    assert binding.shared_fraction() == 1.0  # the engine's side did not move


def test_separate_tensors_cannot_be_one_view() -> None:
    trainer, engine = Outer(), EngineModel()
    with pytest.raises(StorageMoved, match="does not follow"):
        Binding(engine, dict(trainer.named_parameters()))


def test_copies_follow_only_when_told() -> None:
    trainer: Any = Outer()
    engine = untyped_engine()
    binding = Binding(engine, dict(trainer.named_parameters()), share=False)
    assert torch.equal(engine.lm.attn.qkv_proj.weight[4:6], trainer.attn.k_proj.weight)
    with torch.no_grad():
        trainer.attn.k_proj.weight.add_(1.0)
    assert not torch.equal(engine.lm.attn.qkv_proj.weight[4:6], trainer.attn.k_proj.weight)
    binding.copy()
    assert torch.equal(engine.lm.attn.qkv_proj.weight[4:6], trainer.attn.k_proj.weight)
    assert binding.shared_fraction() == 0.0


def test_a_parameter_without_counterpart_is_named() -> None:
    trainer, engine = Outer(), EngineModel()
    engine.extra = nn.Linear(2, 2, bias=False)
    with pytest.raises(ValueError, match=r"extra\.weight"):
        Binding(engine, dict(trainer.named_parameters()), share=False)
    trainer.extra = nn.Linear(2, 2, bias=False)
    with pytest.raises(ValueError, match=r"no parameter for extra\.weight"):
        Binding(EngineModel(), dict(trainer.named_parameters()), share=False)
