"""HBM residency: every large buffer has an owner, a size, and the phases in which it must be in HBM.

`plan` computes the table and each phase's peak from the config and the model's shape alone. `Ledger` accounts the same
buffers while a run lives: what a lease takes it gives back. Decides with plain Python.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from configs.errors import UserError
from configs.schema import RunConfig

Phase = Literal["rollout", "score", "train", "update"]
PHASES: tuple[Phase, ...] = ("rollout", "score", "train", "update")
Residency = Literal["HBM", "HOST", "DISCARDED"]

ACTIVATION_HIDDENS = 8
"""Hidden-sized tensors of a layer's graph per token, with fused kernels: norms, query, attention, residuals."""
ACTIVATION_MLPS = 3
"""Intermediate-sized tensors of a layer's graph per token, with fused kernels: gate, up, their product."""
TOWER_HIDDENS = 17
"""Hidden-sized tensors of a tower block's graph per patch, with plain kernels: norms and rotary keep float32."""
LOGITS_COPIES = 4
"""Float32 logits of a chunk at once: the product, the mask's sum, the softmax and its gradient."""
TOWER_BATCH_PATCHES = 4096
"""Patches of clips that run through a trained tower with a graph at once; a longer clip runs by itself (count)."""
LOGITS_CHUNK = 512
"""Targets whose logits are held at once (count)."""


class HBMExhausted(UserError):
    """A phase needs more memory than there is."""


class LedgerError(AssertionError):
    """A buffer was leased or released twice, or leaked."""


@dataclass(frozen=True)
class ModelShape:
    """What the plan needs to know of a model (counts)."""

    parameters: int
    trainable: int
    layers: int
    hidden: int
    intermediate: int
    key_value: int
    """Elements of one token's keys and values in one layer."""
    vocabulary: int
    item_bytes: int
    tower_graph: int = 0
    """Elements of a trained tower's autograd graph per patch; 0 for a frozen one."""
    merge: int = 2
    """Patches along each side of a placeholder's area."""

    def boundary_bytes(self, tokens: int) -> int:
        """Keys, values and layer inputs of a row (bytes)."""
        return self.keys_bytes(tokens) + tokens * self.layers * self.hidden * self.item_bytes

    def keys_bytes(self, tokens: int) -> int:
        """Keys and values of a row (bytes)."""
        return tokens * self.layers * self.key_value * self.item_bytes

    def context_copies_bytes(self, tokens: int) -> int:
        """What a row's graph keeps of keys and values attended to: as its leaves, and joined to its own (bytes)."""
        return 2 * self.keys_bytes(tokens)

    def context_gradient_bytes(self, tokens: int) -> int:
        """Gradients of keys and values that come back to the rows attended to, in float32 (bytes)."""
        return tokens * self.layers * self.key_value * 4

    def logits_bytes(self, targets: int) -> int:
        """Float32 logits that are held at once for a row of so many targets (bytes)."""
        return LOGITS_COPIES * 4 * min(targets, LOGITS_CHUNK) * self.vocabulary

    def layer_graph_bytes(self, tokens: int) -> int:
        """Autograd graph of one layer of a row (bytes)."""
        per_token = ACTIVATION_HIDDENS * self.hidden + ACTIVATION_MLPS * self.intermediate + self.key_value
        return tokens * per_token * self.item_bytes

    def tower_graph_bytes(self, patches: int) -> int:
        """Autograd graph of clips in a trained tower (bytes)."""
        return patches * self.tower_graph * self.item_bytes

    def graph_bytes(self, tokens: int, layers: int | None = None) -> int:
        """Boundary of a row, and the autograd graph of some of its layers, by default all (bytes)."""
        kept = self.layers if layers is None else layers
        return self.boundary_bytes(tokens) + kept * self.layer_graph_bytes(tokens)


def model_shape(model_dir: Path, dtype: str, *, train_tower: bool) -> ModelShape:
    """Read a Hugging Face folder's config; no weights are loaded."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(model_dir)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    text = config.text_config
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    vision = config.vision_config
    block = TOWER_HIDDENS * vision.hidden_size + ACTIVATION_MLPS * vision.intermediate_size
    total = sum(parameter.numel() for parameter in model.parameters())
    tower = sum(parameter.numel() for parameter in model.model.visual.parameters())
    return ModelShape(
        parameters=total,
        trainable=total if train_tower else total - tower,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=text.intermediate_size,
        key_value=2 * text.num_key_value_heads * head_dim,
        vocabulary=text.vocab_size,
        item_bytes=4 if dtype == "float32" else 2,
        tower_graph=vision.depth * block if train_tower else 0,
        merge=vision.spatial_merge_size,
    )


@dataclass(frozen=True)
class Buffer:
    """A named region, and where it is in each phase."""

    name: str
    num_bytes: int
    residency: Mapping[Phase, Residency]
    knob: str
    """What a user turns to make it smaller."""
    tensors: int = 1
    """Equal tensors that it consists of (count)."""

    @property
    def pinned_bytes(self) -> int:
        """What it takes of the host's memory, each tensor rounded up to a power of two."""
        return self.tensors * (1 << (self.num_bytes // self.tensors - 1).bit_length()) if self.num_bytes else 0


@dataclass(frozen=True)
class Plan:
    """The residency table of one rank."""

    buffers: tuple[Buffer, ...]

    def peak(self, phase: Phase) -> int:
        """HBM that a phase needs at most (bytes)."""
        return sum(buffer.num_bytes for buffer in self.buffers if buffer.residency[phase] == "HBM")

    def host_bytes(self) -> int:
        """Pinned memory of the host that buffers have while they are out of HBM (bytes); PyTorch pins powers of two."""
        return sum(buffer.pinned_bytes for buffer in self.buffers if "HOST" in buffer.residency.values())

    def check(self, capacity: int) -> None:
        """Every phase fits.

        Raises:
            HBMExhausted: one does not; says which, what is in it, and which knob to turn.
        """
        for phase in PHASES:
            if self.peak(phase) > capacity:
                inside = sorted((b for b in self.buffers if b.residency[phase] == "HBM"), key=lambda b: -b.num_bytes)
                parts = ", ".join(f"{buffer.name} {format_bytes(buffer.num_bytes)}" for buffer in inside)
                raise HBMExhausted(
                    f'phase "{phase}" needs {format_bytes(self.peak(phase))} of {format_bytes(capacity)} ({parts}). '
                    f"Largest first, lower: {'; '.join(buffer.knob for buffer in inside[:3])}."
                )

    def table(self) -> str:
        """The table as text, a row a buffer, a column a phase."""
        rows: list[tuple[str, ...]] = [("buffer", "size", *PHASES)]
        rows += [(b.name, format_bytes(b.num_bytes), *(b.residency[phase] for phase in PHASES)) for b in self.buffers]
        rows.append(("peak HBM", "", *(format_bytes(self.peak(phase)) for phase in PHASES)))
        rows.append(("pinned on the host", format_bytes(self.host_bytes()), *("" for _ in PHASES)))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)

    def to_json(self) -> str:
        return json.dumps(
            {
                "buffers": {
                    buffer.name: {"bytes": buffer.num_bytes, "residency": dict(buffer.residency)}
                    for buffer in self.buffers
                },
                "peak_bytes": {phase: self.peak(phase) for phase in PHASES},
                "host_bytes": self.host_bytes(),
            }
        )


def plan(config: RunConfig, shape: ModelShape, world_size: int = 1) -> Plan:
    """The residency table that a run of this config will have, on each rank."""
    everywhere: dict[Phase, Residency] = dict.fromkeys(PHASES, "HBM")
    rollout: dict[Phase, Residency] = {
        "rollout": "HBM", "score": "DISCARDED", "train": "DISCARDED", "update": "DISCARDED"
    }  # fmt: skip
    work: dict[Phase, Residency] = {**everywhere, "update": "DISCARDED"}
    if config.runtime.schedule in ("serial", "unshared"):
        work["rollout"] = "DISCARDED"
    step: dict[Phase, Residency] = everywhere
    reference_at: dict[Phase, Residency] = everywhere
    if config.runtime.offload_optimizer:
        step = {"rollout": "HOST", "score": "HOST", "train": "HOST", "update": "HBM"}
        reference_at = {**everywhere, "update": "HOST"}
    shards = world_size if config.runtime.zero_stage else 1
    reference = shape.trainable * shape.item_bytes if config.rl.kl_coef else 0  # a frozen tower is the actor's
    boundaries, activations = _working_set(config, shape, world_size)
    held: dict[Phase, Residency] = {**work, "rollout": "HBM"} if config.runtime.reuse_prefill else work
    buffers = (
        Buffer("weights", shape.parameters * shape.item_bytes, everywhere, "model.path (a smaller model)"),
        Buffer("kv_cache", config.runtime.kv_cache_bytes, rollout, "runtime.kv_cache_bytes"),
        Buffer("reference", reference, reference_at, "rl.kl_coef=0"),
        Buffer("gradients", 4 * shape.trainable, everywhere, "train.vision_tower=frozen"),
        Buffer(
            "optimizer",
            12 * shape.trainable // shards,
            step,
            "runtime.offload_optimizer=true, or more ranks",
            tensors=3,
        ),
        Buffer("boundaries", boundaries, held, "runtime.boundary_budget_bytes"),
        Buffer("vision_features", config.runtime.vision_cache_bytes, everywhere, "runtime.vision_cache_bytes"),
        Buffer("activations", activations, work, "runtime.microbatch_tokens"),
        Buffer("logits", shape.logits_bytes(config.runtime.microbatch_tokens), work, "runtime.microbatch_tokens"),
    )
    return Plan(buffers)


def max_videos(config: RunConfig) -> int:
    """Most videos that a prompt can hold (count)."""
    return config.env.max_turns + 1 if config.agent.context == "history" else config.agent.context_clips


def _working_set(config: RunConfig, shape: ModelShape, world_size: int) -> tuple[int, int]:
    """Most bytes of encodings that wait for their use, and of those that are in use."""
    row, group = config.runtime.microbatch_tokens, config.rl.group_size
    prompt = config.runtime.max_model_len - config.rollout.max_tokens
    prompts = -(-config.rl.groups_per_step // world_size) * group * config.env.max_turns
    boundaries = min(config.runtime.boundary_budget_bytes, shape.graph_bytes(prompts * prompt))
    context, copies = prompt, shape.context_copies_bytes(prompt)
    if config.agent.context == "history":  # all turns of a group wait for their backward; graphs are kept in the budget
        context = group * config.runtime.max_model_len
        copies = shape.context_copies_bytes(context) // shape.layers
        reference = shape.keys_bytes(context) if config.rl.kl_coef else 0
        boundaries = max(boundaries, shape.boundary_bytes(context) + reference)
    activations = shape.graph_bytes(row) + shape.layer_graph_bytes(prompt)
    activations += shape.tower_graph_bytes(max(TOWER_BATCH_PATCHES, prompt // max_videos(config) * shape.merge**2))
    return boundaries, activations + copies + shape.context_gradient_bytes(context)


@dataclass
class Ledger:
    """Bytes in use by buffer, and each phase's measured peak."""

    phase: Phase = "rollout"
    used: dict[str, int] = field(default_factory=dict)
    peaks: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    buffer_peaks: dict[str, int] = field(default_factory=dict)
    _leases: dict[int, tuple[str, int]] = field(default_factory=dict)
    _next: int = 0

    def lease(self, name: str, num_bytes: int) -> int:
        """Account bytes to a buffer; returns the token that gives them back."""
        self._next += 1
        self._leases[self._next] = (name, num_bytes)
        self.used[name] = self.used.get(name, 0) + num_bytes
        self._measure()
        return self._next

    def release(self, token: int) -> None:
        """Give a lease back.

        Raises:
            LedgerError: it was given back before.
        """
        if token not in self._leases:
            raise LedgerError(f"lease {token} was released twice")
        name, num_bytes = self._leases.pop(token)
        self.used[name] -= num_bytes

    def room(self, name: str, budget: int) -> int:
        """What is left of a buffer's budget (bytes)."""
        return budget - self.used.get(name, 0)

    @contextmanager
    def hold(self, name: str, num_bytes: int) -> Iterator[None]:
        """A lease for as long as the block runs."""
        token = self.lease(name, num_bytes)
        try:
            yield
        finally:
            self.release(token)

    def enter(self, phase: Phase) -> None:
        self.phase = phase
        self._measure()

    def _measure(self) -> None:
        self.peaks[self.phase] = max(self.peaks[self.phase], sum(self.used.values()))
        for name, num_bytes in self.used.items():
            self.buffer_peaks[name] = max(self.buffer_peaks.get(name, 0), num_bytes)

    def check_integrity(self, empty: Iterable[str] = ()) -> None:
        """Bytes in equal bytes out, and these buffers hold nothing.

        Raises:
            LedgerError: the sums differ, or a buffer that must be empty is not.
        """
        sums: dict[str, int] = dict.fromkeys(self.used, 0)
        for name, num_bytes in self._leases.values():
            sums[name] += num_bytes
        if sums != self.used:
            raise LedgerError(f"leases add up to {sums}, the ledger says {self.used}")
        for name in empty:
            if self.used.get(name, 0):
                raise LedgerError(f"{self.used[name]} bytes of {name} were never released")


def format_bytes(num_bytes: int) -> str:
    """`18.2 GiB`."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
