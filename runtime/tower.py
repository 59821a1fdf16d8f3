"""Hugging Face's Qwen2.5-VL vision tower with less to do: the function that it computes is the same.

Windows of one length attend at once, patches are embedded by one product, and what depends on the clips' grids alone is
computed once for each. On CUDA norms, MLPs and the rotary embedding are compiled: a hidden size that no fast product
takes (3,420 at 3B) is padded, and elementwise work is fused. Knows nothing of caches, rows or schedules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from data.transfer import on_device
from data.types import Media
from runtime.memory import TOWER_BATCH_PATCHES

WINDOW_ATTENTION = "rollplex_flash_windows"
"""Name of our attention among Hugging Face's; one with `flash` in it is called once with all windows, not once each."""

GRIDS_KEPT = 16
"""Sets of clips' grids whose geometry is remembered (count)."""


def tune_tower(tower: Any) -> None:
    """Have a Hugging Face tower attend to windows of one length at once, and embed patches by a product."""
    from transformers import AttentionInterface

    AttentionInterface.register(WINDOW_ATTENTION, _window_attention)
    tower.config._attn_implementation = WINDOW_ATTENTION
    tower.patch_embed.forward = MethodType(_embed_patches, tower.patch_embed)
    if next(tower.parameters()).is_cuda:
        _compile_pieces(tower)


def _compile_pieces(tower: Any) -> None:
    """Compile the parts of the tower's blocks beside attention; the rotary embedding is one for all towers."""
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

    for block in tower.blocks:
        for module in (block.norm1, block.norm2, block.mlp):
            # Bound to the module by hand, so that a copy of the tower computes with the copy's weights.
            module.forward = MethodType(_compiled(type(module).forward), module)
    modeling_qwen2_5_vl.apply_rotary_pos_emb_vision = _compiled(_stock_rotary())


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function compiled once for clips of every length."""
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True)
    return compiled


@cache
def _stock_rotary() -> Callable[..., Any]:
    """Hugging Face's own rotary embedding of towers; first called before it is replaced."""
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

    rotary: Callable[..., Any] = modeling_qwen2_5_vl.apply_rotary_pos_emb_vision
    return rotary


def run_tower(tower: Any, media: Sequence[Media]) -> Float[Tensor, "placeholder hidden"]:
    """Features of clips, one row for each of their placeholder tokens, in order."""
    weight = next(tower.parameters())
    pixels = on_device(torch.cat([item.pixel_values for item in media]), weight.device).to(weight.dtype)
    grids = tuple(item.grid_thw for item in media)
    if hasattr(tower, "window_size"):  # Qwen2.5-VL's
        sizes = (tower.spatial_merge_size, tower.window_size, tower.patch_size)
        return _forward(tower, pixels, _geometry(grids, *sizes, tower.rotary_pos_emb, weight.device))
    features: Tensor = tower(pixels, grid_thw=torch.tensor(grids, device=weight.device)).pooler_output
    return features


def _forward(tower: Any, pixels: Tensor, geometry: _Geometry) -> Tensor:
    """What Hugging Face's forward does, but for working out the geometry."""
    hidden = tower.patch_embed(pixels)
    if geometry.order is not None:
        hidden = hidden[geometry.order]
    for number, block in enumerate(tower.blocks):
        boundaries, longest = geometry.frames if number in tower.fullatt_block_indexes else geometry.windows
        hidden = block(hidden, cu_seqlens=boundaries, max_seqlen=longest, position_embeddings=geometry.rotary)
    features: Tensor = tower.merger(hidden)
    return features if geometry.restore is None else features[geometry.restore]


def num_patches(media: Sequence[Media]) -> int:
    """Patches of clips (count)."""
    return sum(math.prod(item.grid_thw) for item in media)


def tower_batches(media: Sequence[Media]) -> list[list[Media]]:
    """Clips in order, as many together as may run with a graph at once."""
    batches: list[list[Media]] = []
    used = 0
    for item in media:
        patches = num_patches([item])
        if not batches or used + patches > TOWER_BATCH_PATCHES:
            batches.append([])
            used = 0
        batches[-1].append(item)
        used += patches
    return batches


class _Geometry(NamedTuple):
    """What depends on clips' grids alone."""

    order: Tensor | None
    """Patches window by window; None: they are."""
    restore: Tensor | None
    """Where each placeholder's features are after that."""
    windows: tuple[Tensor, int]
    """On the host, where each window begins and the last one ends, and the longest (patches)."""
    frames: tuple[Tensor, int]
    """The same of frames."""
    rotary: tuple[Tensor, Tensor]
    """Cosines and sines of the patches' positions, in order, each (patch, head_dim)."""


@lru_cache(maxsize=GRIDS_KEPT)
def _geometry(
    grids: tuple[tuple[int, int, int], ...], merge: int, window: int, patch: int, rotary: Any, device: torch.device
) -> _Geometry:
    """Geometry of clips.

    Args:
        merge, window, patch: the tower's sizes.
        rotary: its module for the rotary embedding.
    """
    from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

    grid = torch.tensor(grids)
    index, windows = get_vision_window_index(grid, merge, window, patch)
    frames = get_vision_cu_seqlens(grid)
    positions = get_vision_position_ids(grid, merge)
    order = restore = None
    if not torch.equal(index, torch.arange(len(index))):
        patches = (index[:, None] * merge**2 + torch.arange(merge**2)).flatten()
        positions = positions[patches]
        order, restore = on_device(patches, device), on_device(index.argsort(), device)
    positions = on_device(positions, device)
    return _Geometry(
        order,
        restore,
        (windows, int(windows.diff().max())),
        (frames, int(frames.diff().max())),
        rotary(positions, positions),
    )


def _embed_patches(self: Any, pixels: Tensor) -> Tensor:
    """The convolution over patches that do not overlap, as a product; (patch, pixel) in, (patch, hidden) out."""
    weight = self.proj.weight
    return F.linear(pixels.to(weight.dtype), weight.flatten(1), self.proj.bias)


class _Windows(NamedTuple):
    """Windows of one length."""

    length: int
    places: Tensor | None
    """Indices of their tokens, window by window; None: all tokens, in order."""


@lru_cache(maxsize=2 * GRIDS_KEPT)
def _windows(boundaries: Tensor, device: torch.device) -> tuple[list[_Windows], Tensor | None]:
    """Windows by length, and the place of each token in them, taken together; None where they are in order."""
    boundaries = boundaries.cpu()
    starts, lengths = boundaries[:-1], boundaries.diff()
    found = sorted(set(lengths.tolist()) - {0})
    if len(found) == 1:
        return [_Windows(found[0], None)], None
    places = [(starts[lengths == length][:, None] + torch.arange(length)).flatten() for length in found]
    order = torch.cat(places).argsort()
    windows = zip(found, (on_device(index, device) for index in places), strict=True)
    return [_Windows(*pair) for pair in windows], on_device(order, device)


def _window_attention(
    _module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float,
    cu_seq_lens_q: Tensor,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention within windows, (1, head, token, head_dim) in, (1, token, head, head_dim) out.

    Args:
        cu_seq_lens_q: where each window begins, and where the last one ends; best on the host.
    """
    groups, order = _windows(cu_seq_lens_q, query.device)
    outputs = []
    for length, places in groups:
        tokens = (tensor[0] if places is None else tensor[0][:, places] for tensor in (query, key, value))
        q, k, v = (tensor.unflatten(1, (-1, length)).transpose(0, 1) for tensor in tokens)
        outputs.append(F.scaled_dot_product_attention(q, k, v, scale=scaling).transpose(1, 2).flatten(0, 1))
    output = outputs[0] if order is None else torch.cat(outputs)[order]
    return output[None], None
