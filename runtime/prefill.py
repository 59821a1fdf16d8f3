"""Prefill once: what the rollout engine computes of a prompt is what the trainer would compute of it again.

Both sides read the same weights. While vLLM prefills a prompt that is wanted, hooks on its decoder layers copy each
layer's input and the last hidden state; the trainer makes keys and values of them (`prefix_tree.reuse`) and runs its
backward as if it had encoded the prompt itself. A prompt counts only if one prefill computed all of it: its first
request is therefore told not to read the prefix cache, and what comes otherwise is left to `prefix_tree.encode`.
Knows vLLM by what its model runner says of a batch, the same in 0.32 and 0.24, and nothing of groups or losses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from data.types import Prompt, TurnKey
from runtime.memory import Ledger, ModelShape
from runtime.prefix_tree import Row
from runtime.vlm import SplitVLM


@dataclass(eq=False)
class Prefill:
    """What a prefill computed of one prompt."""

    version: int
    """Version of the weights that computed it."""
    lease: int
    inputs: list[Tensor] = field(default_factory=list)
    """Input of each decoder layer so far, (1, token, hidden)."""
    final: Tensor | None = None
    """Hidden state of the last token after the last layer, before the norm, (1, 1, hidden)."""


@dataclass(eq=False)
class TakenPrefill:
    """Prefills of a row's prompts, side by side."""

    version: int
    inputs: deque[list[Tensor]]
    """Each layer's input, (1, token, hidden) for each prompt; who uses one takes it out."""
    final: Tensor
    """(prompt, hidden)."""


class Prefills:
    """Prompts whose prefill is wanted, and what came of them: at most once each, until a new version is published.

    Args:
        budget: bytes that `boundaries` may take; a prompt that does not fit is left to the trainer.
        sums: counts what did not fit.
    """

    def __init__(self, actor: SplitVLM, shape: ModelShape, ledger: Ledger, budget: int, sums: dict[str, float]) -> None:
        self._actor = actor
        self._shape = shape
        self._ledger = ledger
        self._budget = budget
        self._sums = sums
        self._wanted: dict[TurnKey, Prompt] = {}
        self._asked: set[str] = set()
        self._kept: dict[str, Prefill] = {}

    def want(self, key: TurnKey, prompt: Prompt) -> None:
        """Ask for a prompt, by the request that will be the first to compute it."""
        if prompt.key not in self._asked:
            self._asked.add(prompt.key)
            self._wanted[key] = prompt

    def wants(self, key: TurnKey) -> bool:
        """Whether this request's prefill is waited for."""
        return key in self._wanted

    def give_up(self, key: TurnKey) -> None:
        """Nothing more comes of this request."""
        self._wanted.pop(key, None)

    def awaits(self, row: Row) -> bool:
        """Whether a prompt of the row is still to be prefilled."""
        keys = {prompt.key for prompt in self._wanted.values()}
        return any(segment.key in keys for segment in row.segments)

    def holds(self, row: Row) -> bool:
        """Whether all prompts of the row were prefilled."""
        return all(segment.key in self._kept for segment in row.segments)

    def start(self, key: TurnKey, num_tokens: int) -> Prefill | None:
        """Room for what is about to be computed of a whole prompt; None where it does not fit the budget."""
        prompt = self._wanted.pop(key)
        assert num_tokens == len(prompt.token_ids), f"{key} has {len(prompt.token_ids)} tokens, vLLM says {num_tokens}"
        size = self._shape.boundary_bytes(num_tokens)
        if size > self._ledger.room("boundaries", self._budget):
            self._sums["window/over_budget"] += 1
            return None
        self._kept[prompt.key] = Prefill(self._actor.version, self._ledger.lease("boundaries", size))
        return self._kept[prompt.key]

    def take(self, row: Row) -> TakenPrefill | None:
        """What was prefilled of a row, the caller's from now on; None, and nothing is kept, where a part is missing."""
        whole = self.holds(row)
        keys = [segment.key for segment in row.segments]
        found = {key: self._kept.pop(key) for key in set(keys) if key in self._kept}
        for prefill in found.values():
            self._ledger.release(prefill.lease)
        if not whole:
            return None
        parts = [found[key] for key in keys]
        inputs = deque(
            [_used_here(tensor) for tensor in layer] for layer in zip(*(p.inputs for p in parts), strict=True)
        )
        finals = [_used_here(part.final) for part in parts if part.final is not None]
        return TakenPrefill(parts[0].version, inputs, torch.cat(finals, dim=1)[0])

    def drop(self) -> None:
        """Forget everything: the weights change, or the step is over."""
        for prefill in self._kept.values():
            self._ledger.release(prefill.lease)
        self._kept.clear()
        self._wanted.clear()
        self._asked.clear()


def _used_here(tensor: Tensor) -> Tensor:
    """Tell the allocator that a tensor of the decode stream is read on the present one."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream())
    return tensor


class PrefillHooks:
    """Copies what vLLM's decoder layers are given of the prompts that are wanted.

    Hooks run in eager forwards only. A CUDA graph replays decode steps alone, and of those nothing is wanted.

    Args:
        runner: vLLM's model runner.
        turn_key: reads the key of a request out of vLLM's id for it.
    """

    def __init__(self, runner: Any, prefills: Prefills, turn_key: Callable[[str], TurnKey]) -> None:
        self._runner = runner
        self._prefills = prefills
        self._turn_key = turn_key
        self._spans: list[tuple[int, int, Prefill]] = []
        """First row in the batch, one past the last, and whom they are for."""
        text = self._runner.get_model().language_model.model
        text.layers[0].register_forward_pre_hook(self._find)
        for layer in text.layers:
            layer.register_forward_pre_hook(self._copy_input)
        text.norm.register_forward_pre_hook(self._copy_final)

    def _find(self, _module: Any, _arguments: tuple[Any, ...]) -> None:
        """Find the rows of wanted prompts that this forward computes whole."""
        self._spans.clear()
        batch, starts = self._runner.input_batch, self._runner.query_start_loc.np
        for index, request in enumerate(batch.req_ids):
            start, num_tokens = int(starts[index]), int(batch.num_prompt_tokens[index])
            if batch.num_computed_tokens_cpu[index] or starts[index + 1] - start < num_tokens:
                continue
            key = self._turn_key(request)
            if self._prefills.wants(key) and (prefill := self._prefills.start(key, num_tokens)):
                self._spans.append((start, start + num_tokens, prefill))

    def _copy_input(self, _module: Any, arguments: tuple[Any, ...]) -> None:
        for start, stop, prefill in self._spans:
            prefill.inputs.append(_residual(arguments, start, stop))

    def _copy_final(self, _module: Any, arguments: tuple[Any, ...]) -> None:
        for _, stop, prefill in self._spans:
            prefill.final = _residual(arguments, stop - 1, stop)
        self._spans.clear()


def _residual(arguments: tuple[Any, ...], start: int, stop: int) -> Tensor:
    """Some rows of the residual stream, (1, row, hidden): vLLM's modules take (..., hidden, residual), yet to be added.

    A copy, since they add in place, and no inference tensor, since it will be part of a graph.
    """
    hidden, residual = arguments[-2:]
    with torch.inference_mode(False), torch.no_grad():
        rows: Tensor = hidden[start:stop].clone() if residual is None else hidden[start:stop] + residual[start:stop]
        return rows[None]
