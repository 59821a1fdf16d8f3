"""One storage for the trainer's weights and the rollout engine's.

The trainer's flat buffer holds q, k, v (and gate, up) of a layer next to one another, so that the engine's fused
tensors are views of it. This module decides the order, points the engine's parameters at the trainer's memory, and
checks that neither side has moved. It knows vLLM only by the names that a vLLM model states of itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Families of projections that rollout engines keep as one tensor, in the order of its rows."""


class StorageMoved(RuntimeError):
    """The rollout engine and the trainer no longer read the same memory."""


def fused_order(names: Sequence[str]) -> list[str]:
    """Parameter names, each fused family's weights next to one another, then its biases; otherwise unchanged."""
    known, placed, order = set(names), set(), []
    for name in names:
        for sibling in _family(name, known):
            if sibling not in placed:
                placed.add(sibling)
                order.append(sibling)
    return order


def _family(name: str, known: set[str]) -> list[str]:
    for members in FUSED:
        for member in members:
            base, found, leaf = name.partition(f".{member}.")
            if found:
                return [sibling for other in members if (sibling := f"{base}.{other}.{leaf}") in known]
    return [name]


def in_fused_order(model: nn.Module, *, trainable: bool) -> list[nn.Parameter]:
    """The model's trainable (or frozen) parameters in the order of the flat buffer."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad == trainable}
    return [named[name] for name in fused_order(list(named))]


def pack(parameters: Sequence[nn.Parameter]) -> Tensor | None:
    """Move parameters into one flat buffer, in order; returns it (None where there are none)."""
    if not parameters:
        return None
    flat = torch.cat([parameter.data.flatten() for parameter in parameters])
    offset = 0
    for parameter in parameters:
        parameter.data = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    return flat


@dataclass(frozen=True)
class _Part:
    """Rows of an engine tensor that one trainer parameter fills."""

    name: str
    row: int


class Binding:
    """The engine's parameters as views of the trainer's, or as copies where memory cannot be shared.

    Args:
        engine_model: vLLM's module, in this process.
        trainer: the trainer's parameters by Hugging Face name.
        share: False copies (ZeRO-3, whose parameters are shards outside the phases that gather them).

    Raises:
        StorageMoved: a fused family is not contiguous in the trainer's memory.
    """

    def __init__(self, engine_model: nn.Module, trainer: Mapping[str, nn.Parameter], *, share: bool = True) -> None:
        self.engine = dict(engine_model.named_parameters())
        self.trainer = trainer
        self.parts = _parts(engine_model, self.engine, trainer)
        self.share = share
        if share:
            for name, parts in self.parts.items():
                self.engine[name].data = self._view(name, parts)
        else:
            self.copy()

    def _view(self, name: str, parts: Sequence[_Part]) -> Tensor:
        """The trainer's memory in the shape of an engine tensor."""
        first = self.trainer[parts[0].name].data
        address, numel = first.data_ptr(), 0
        for part in parts:
            data = self.trainer[part.name].data
            if data.data_ptr() != address or not data.is_contiguous():
                raise StorageMoved(
                    f"{part.name} does not follow its neighbour in the trainer's buffer, {name} needs it to"
                )
            address += data.numel() * data.element_size()
            numel += data.numel()
        shape, like = self.engine[name].shape, self.engine[name]
        if shape.numel() != numel or like.dtype != first.dtype:
            raise StorageMoved(
                f"{name}: the engine wants {tuple(shape)} {like.dtype}, the trainer holds {numel} of {first.dtype}"
            )
        strides = torch.empty(shape, device="meta").stride()
        return torch.as_strided(first, shape, strides, first.storage_offset())

    @torch.no_grad()
    def copy(self) -> None:
        """Copy the trainer's weights (gathered) into the engine's own memory."""
        for name, parts in self.parts.items():
            target = self.engine[name].data
            for part in parts:
                source = self.trainer[part.name].data
                target[part.row : part.row + source.shape[0]].copy_(source.view(-1, *target.shape[1:]))

    def check(self) -> None:
        """Every engine tensor still lies where the trainer's parameters lie.

        Raises:
            StorageMoved: one does not; the rollout would sample from old weights.
        """
        for name, parts in self.parts.items() if self.share else ():
            for part in parts:
                rows = self.engine[name].data[part.row :] if part.row else self.engine[name].data
                if rows.data_ptr() != self.trainer[part.name].data.data_ptr():
                    raise StorageMoved(f"{name} of the rollout engine no longer shares memory with {part.name}")

    def shared_fraction(self) -> float:
        """Bytes of the engine's parameters that are views of the trainer's storage, over all its parameter bytes."""
        storages = {parameter.untyped_storage().data_ptr() for parameter in self.trainer.values()}
        total = shared = 0
        for tensor in self.engine.values():
            size = tensor.numel() * tensor.element_size()
            total += size
            shared += size * (tensor.untyped_storage().data_ptr() in storages)
        return shared / total


def _parts(
    engine_model: Any, engine: Mapping[str, Tensor], trainer: Mapping[str, nn.Parameter]
) -> dict[str, list[_Part]]:
    """For each engine tensor, the trainer's parameters that fill it, by row.

    Raises:
        ValueError: a name on either side has no counterpart.
    """
    members: dict[str, tuple[str, tuple[str, ...]]] = {}  # q_proj -> (qkv_proj, (q_proj, k_proj, v_proj))
    for module in engine_model.modules():
        for fused, names in (getattr(module, "packed_modules_mapping", None) or {}).items():
            members |= {name: (fused, tuple(names)) for name in names if fused not in names}
    parts: dict[str, list[_Part]] = {}
    for name in fused_order(list(trainer)):
        mapped = engine_model.hf_to_vllm_mapper.apply_list([name])[0]
        if mapped not in engine:
            pieces = mapped.split(".")
            place = max(i for i, piece in enumerate(pieces) if piece in members) if set(pieces) & set(members) else -1
            if place >= 0:
                pieces[place] = members[pieces[place]][0]
            mapped = ".".join(pieces)
        if mapped not in engine:
            raise ValueError(f"the rollout engine has no parameter for {name} (looked for {mapped})")
        filled = parts.setdefault(mapped, [])
        filled.append(_Part(name, sum(_rows(trainer[part.name]) for part in filled)))
    if missing := sorted(set(engine) - set(parts)):
        raise ValueError(f"the trainer has no parameter for {missing[0]} of the rollout engine ({len(missing)} in all)")
    return parts


def _rows(parameter: nn.Parameter) -> int:
    return parameter.ds_shape[0] if hasattr(parameter, "ds_shape") else parameter.shape[0]
