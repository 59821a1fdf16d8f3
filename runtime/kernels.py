"""Kernels of the trainer's language layers: attention of packed rows, and fused layers on CUDA.

`plain` is what Hugging Face runs: its own modules, SDPA, a dense mask where a row is packed. `fused` takes PyTorch's
norm, liger-kernel's rotary embedding and SwiGLU, cuDNN's attention where a row is plain causal and FlexAttention where
it is not. Both compute the same function. Knows nothing of trees: a mask is two lists of segments and who sees whom.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import MethodType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from data.transfer import on_device

Kernels = Literal["plain", "fused"]

BLOCK = 128
"""Tokens in a block of FlexAttention."""

ATTENTION = "rollplex"
"""Name of our attention among those of Hugging Face."""


@dataclass(frozen=True, eq=False)
class BranchMask:
    """Who attends to whom in a packed row: a token sees the keys of its own branch that are not later."""

    branch: Bool[Tensor, "segment key_segment"]
    """True where a segment sees another: its ancestors and itself."""
    query_segment: Int[Tensor, " token"]
    key_segment: Int[Tensor, " key"]
    key_order: Int[Tensor, " key"]
    """A key's place in the row; -1 in its context, which is never later."""

    def dense(self) -> Bool[Tensor, "1 1 token key"]:
        """The mask as SDPA takes it."""
        order = torch.arange(len(self.query_segment), device=self.branch.device)
        seen = self.branch[self.query_segment][:, self.key_segment] & (order[:, None] >= self.key_order[None, :])
        return seen[None, None]

    def blocks(self) -> Any:
        """The mask as FlexAttention takes it: blocks that hold nothing are never computed.

        Padded as `pad_tokens` pads queries and keys; a padding query sees the first key, so that it has one to see.
        """
        from torch.nn.attention.flex_attention import create_block_mask

        queries, keys = padded_length(len(self.query_segment)), padded_length(len(self.key_segment))
        segments, key_segments = self.branch.shape
        branch = F.pad(self.branch, (0, 1, 0, 1))  # the last segment is padding
        branch[segments].index_fill_(0, self.key_segment[:1], value=True)  # the index stays on the device
        query_segment = F.pad(self.query_segment, (0, queries - len(self.query_segment)), value=segments)
        key_segment = F.pad(self.key_segment, (0, keys - len(self.key_segment)), value=key_segments)
        key_order = F.pad(self.key_order, (0, keys - len(self.key_order)), value=-1)

        def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return branch[query_segment[query], key_segment[key]] & (key_order[key] <= query)

        return create_block_mask(seen, None, None, queries, keys, device=branch.device)

    def to(self, device: torch.device) -> BranchMask:
        return BranchMask(*(on_device(tensor, device) for tensor in vars(self).values()))


def padded_length(tokens: int) -> int:
    """Length that FlexAttention is given: whole blocks, and more than one, so that it is compiled once for all."""
    return max(2, -(-tokens // BLOCK)) * BLOCK


def pad_tokens(tensor: Tensor) -> Tensor:
    """Zeros up to the padded length of a (1, head, token, head_dim) tensor."""
    tokens = tensor.shape[2]
    return F.pad(tensor, (0, 0, 0, padded_length(tokens) - tokens))


def best_kernels() -> Kernels:
    """What this device runs fastest."""
    return "fused" if torch.cuda.is_available() else "plain"


def use_kernels(model: Any, kernels: Kernels) -> Kernels:
    """Run a Hugging Face model's language layers with these kernels from now on; returns those in force.

    CUDA alone has fused ones. The rotary embedding is one function for all models of the process.
    """
    if best_kernels() == "plain":
        return "plain"
    text = model.model.language_model
    if kernels == "plain":
        text.config._attn_implementation = "sdpa"
        for module in text.modules():
            for name in ("forward", "extra_repr", "_get_name"):
                module.__dict__.pop(name, None)
        _set_rotary(_stock_rotary())
        return kernels
    from liger_kernel.transformers import apply_liger_kernel_to_qwen2_5_vl, liger_rotary_pos_emb
    from transformers import AttentionInterface

    _stock_rotary()
    AttentionInterface.register(ATTENTION, _attention)
    text.config._attn_implementation = ATTENTION
    apply_liger_kernel_to_qwen2_5_vl(rope=False, rms_norm=False, fused_linear_cross_entropy=False, model=text)
    for module in text.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(_rms_norm, module)
    _set_rotary(liger_rotary_pos_emb)
    return kernels


def _rms_norm(self: Any, hidden: Tensor) -> Tensor:
    """PyTorch's own fused norm, which takes the host a sixth of the time that one written in Triton does."""
    return F.rms_norm(hidden, self.weight.shape, self.weight, self.variance_epsilon)


@cache
def _stock_rotary() -> Callable[..., Any]:
    """Hugging Face's own rotary embedding; first called before it is replaced."""
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

    rotary: Callable[..., Any] = modeling_qwen2_5_vl.apply_rotary_pos_emb
    return rotary


def _set_rotary(rotary: Callable[..., Any]) -> None:
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

    modeling_qwen2_5_vl.apply_rotary_pos_emb = rotary


@cache
def _flex_attention() -> Callable[..., Any]:
    """FlexAttention compiled once for rows of every length."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
    return compiled


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_kwargs: Any
) -> tuple[Tensor, None]:
    """Attention as Hugging Face calls it: (1, head, token, head_dim) in, (1, token, head, head_dim) out.

    Args:
        mask: a FlexAttention block mask; None is plain causal.
    """
    if mask is None:
        from torch.nn.attention import sdpa_kernel

        with sdpa_kernel(_backends(), set_priority=True):
            output = F.scaled_dot_product_attention(
                query, key, value, is_causal=query.shape[2] > 1, scale=scaling, enable_gqa=True
            )
    else:
        padded = (pad_tokens(tensor) for tensor in (query, key, value))
        output = _flex_attention()(*padded, block_mask=mask, scale=scaling, enable_gqa=True)[:, :, : query.shape[2]]
    return output.transpose(1, 2).contiguous(), None


def _backends() -> list[Any]:
    """Attention kernels, best first; cuDNN's backward is not deterministic."""
    from torch.nn.attention import SDPBackend

    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return order if torch.are_deterministic_algorithms_enabled() else [SDPBackend.CUDNN_ATTENTION, *order]
