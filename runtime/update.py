"""The work of one update, unit by unit: reference scores, actor forward, loss, backward.

Each piece is a generator over the quanta of `prefix_tree`, so that the window may run it beside decode steps or the
update may run it at once; the numbers are the same. Owns the encodings and the memory they lease.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence

import torch
from torch import Tensor

from data.transfer import on_device
from data.types import GroupLoss, Response, TokenBatch
from runtime.memory import Ledger, ModelShape
from runtime.prefill import Prefills, TakenPrefill
from runtime.prefix_tree import (
    Encoding,
    GradientBuffer,
    Keep,
    Row,
    backward,
    backward_scores,
    encode,
    reuse,
    score,
)  # fmt: skip
from runtime.tower import num_patches, tower_batches
from runtime.vlm import SplitVLM
from runtime.work import GroupWork, ResponseRow, Unit

Steps = Generator[None, None, None]

GRAPHS_AHEAD = 4
"""A row encoded ahead keeps its graph where the free budget holds so many of its size: later rows need room too."""


class Updater:
    """Runs units against the actor and the reference, and sums gradients and metrics.

    Args:
        budget: bytes that rows encoded ahead of their training may hold; past it they are encoded when needed.
    """

    def __init__(
        self,
        actor: SplitVLM,
        gradients: GradientBuffer,
        shape: ModelShape,
        ledger: Ledger,
        budget: int,
    ) -> None:
        self.actor = actor
        self.reference: SplitVLM | None = None
        self._encodings: dict[SplitVLM, dict[Row, Encoding]] = defaultdict(dict)
        self.gradients = gradients
        self.shape = shape
        self.ledger = ledger
        self.budget = budget
        self.sums: dict[str, float] = defaultdict(float)
        """Counts that the host knows; `take_sums` adds what the device has."""
        self._device_sums: dict[str, Tensor] = {}
        self._leases: dict[Encoding, int] = {}
        self.prefills = Prefills(actor, shape, ledger, budget, self.sums)

    # --- ahead of training -------------------------------------------------------------------------------------------

    def encode_early(self, rows: Sequence[Row]) -> Steps:
        """Encode rows for the actor before they are trained on, as far as the budget admits."""
        yield from self._encode_early(self.actor, rows)

    def encode_reference_early(self, rows: Sequence[Row]) -> Steps:
        """Encode rows for the reference before they are scored, as far as the budget admits."""
        yield from self._encode_early(self._reference(), rows)

    def _encode_early(self, model: SplitVLM, rows: Sequence[Row]) -> Steps:
        for row in rows:
            prefilled = model is self.actor and self.prefills.holds(row)
            keep: Keep | None = "inputs" if prefilled else self._affordable(model, row)
            if keep is None or any(other not in self._encodings[model] for other in row.context):
                self.sums["window/over_budget"] += 1
            else:
                yield from self._encoding(model, row, keep)

    def _affordable(self, model: SplitVLM, row: Row) -> Keep | None:
        """The most that an encoding may keep until it is used; None where not even its boundary fits the budget."""
        if model is not self.actor:
            return "nothing" if self.shape.keys_bytes(row.num_tokens) <= self._free() else None
        if self.shape.boundary_bytes(row.num_tokens) > self._free():
            return None
        return "graph" if self._kept_bytes(row, self.shape.layers) <= self._free() // GRAPHS_AHEAD else "inputs"

    def _kept_bytes(self, row: Row, graph_layers: int) -> int:
        """What an encoding keeps for its backward: its boundary, and the graphs of some layers with their context."""
        copies = self.shape.context_copies_bytes(_context_tokens(row)) * graph_layers // self.shape.layers
        return self.shape.graph_bytes(row.num_tokens, graph_layers) + copies

    def _free(self) -> int:
        return self.ledger.room("boundaries", self.budget)

    def _reference(self) -> SplitVLM:
        assert self.reference is not None, "a loss wants a reference, and rl.kl_coef loaded none"
        return self.reference

    def _encoding(self, model: SplitVLM, row: Row, keep: Keep, *, now: bool = False) -> Generator[None, None, Encoding]:
        """A row's encoding: the one that is kept, or a new one, which is kept until it is dropped.

        Args:
            now: its backward comes next, so that what is free of the budget may hold the graphs of its last layers.
        """
        kept = self._encodings[model]
        if row not in kept and model is self.actor and (prefill := self.prefills.take(row)):
            yield from self._reuse(row, prefill)
        if row not in kept:
            layers = self._graph_layers(row, keep, now=now)
            context = [kept[other] for other in row.context]
            encoding = yield from encode(model, row, context, keep=keep, graph_layers=layers)
            buffer = "activations" if now and keep == "graph" else "boundaries"
            size = self._kept_bytes(row, layers) if keep != "nothing" else self.shape.keys_bytes(row.num_tokens)
            self._leases[encoding] = self.ledger.lease(buffer, size)
            self.sums["tokens/computed"] += row.num_tokens
            kept[row] = encoding
        return kept[row]

    def _graph_layers(self, row: Row, keep: Keep, *, now: bool) -> int:
        """Layers of a row whose graph is kept: all or none, or where its backward comes next what there is room for."""
        if keep != "inputs" or not now:
            return self.shape.layers if keep == "graph" else 0
        boundary, whole = self._kept_bytes(row, 0), self._kept_bytes(row, self.shape.layers)
        layer = max(1, (whole - boundary) // self.shape.layers)
        return max(0, min((self._free() - boundary) // layer, self.shape.layers))

    def _reuse(self, row: Row, prefill: TakenPrefill) -> Steps:
        """Make an encoding for the actor of what the rollout engine computed of a row."""
        encoding = yield from reuse(self.actor, row, prefill.version, prefill.inputs, prefill.final)
        self._leases[encoding] = self.ledger.lease("boundaries", self.shape.boundary_bytes(row.num_tokens))
        self._encodings[self.actor][row] = encoding
        self.sums["tokens/reused"] += row.num_tokens

    def _drop(self, model: SplitVLM, rows: Iterable[Row]) -> None:
        for row in rows:
            if encoding := self._encodings[model].pop(row, None):
                self.ledger.release(self._leases.pop(encoding))

    # --- scoring and training ----------------------------------------------------------------------------------------

    def score_reference(self, work: GroupWork, unit: Unit) -> Steps:
        """Reference log-probabilities of a unit's responses; encodings that nothing more attends to are dropped."""
        reference = self._reference()
        yield from self._encoding(reference, unit.prompts, "nothing")
        for item in unit.responses:
            encoding = yield from self._encoding(reference, item.row, "nothing")
            item.reference = score(reference, encoding, self._context(reference, item.row)).logprobs
        done = [other for tree in work.trees() if all(u.scored for u in tree) for other in tree]
        if not work.packing.chain or (all(work.ended) and len(done) == len(work.units)):
            self._drop(reference, (row for other in done for row in other.rows))

    def _context(self, model: SplitVLM, row: Row) -> list[Encoding]:
        return [self._encodings[model][other] for other in row.context]

    def train(self, work: GroupWork, loss: GroupLoss) -> Steps:
        """Add the gradient of a group's loss, tree by tree."""
        for tree in work.trees():
            if loss.constant:
                self._drop(self.actor, (row for unit in tree for row in unit.rows))
                for unit in tree:
                    self.prefills.take(unit.prompts)
            else:
                yield from self._train_tree(work, tree, loss)
        self.sums["denominator"] += loss.denominator

    def _train_tree(self, work: GroupWork, tree: Sequence[Unit], loss: GroupLoss) -> Steps:
        """Forward and loss of every response, ancestors first; then backward, children first."""
        chain = work.packing.chain
        attended = sum(row.num_tokens for unit in tree for row in (unit.rows if chain else [unit.prompts]))
        with self.ledger.hold("activations", self.shape.context_gradient_bytes(attended)):
            for unit in tree:
                if loss.needs_reference and not unit.scored:
                    yield from self.score_reference(work, unit)
                yield from self._encoding(self.actor, unit.prompts, "inputs", now=True)
                for item in unit.responses:
                    # In a chain later turns attend to it, so it stays until all of them are differentiated.
                    yield from self._encoding(self.actor, item.row, "inputs" if chain else "graph", now=True)
                    self._differentiate_loss(item, loss)
                    if not chain:
                        yield from self._backward(item.row)
            for unit in reversed(tree):
                for row in reversed(unit.rows):
                    if row in self._encodings[self.actor]:
                        yield from self._backward(row)
                self._count_tokens(unit)

    def _backward(self, row: Row) -> Steps:
        encoding, context = self._encodings[self.actor][row], self._context(self.actor, row)
        patches = max(map(num_patches, tower_batches(row.media)), default=0)
        with self.ledger.hold("activations", self.shape.tower_graph_bytes(patches)):
            yield from backward(self.actor, encoding, context, self.gradients)
        self._drop(self.actor, [row])

    def _differentiate_loss(self, item: ResponseRow, loss: GroupLoss) -> None:
        """The loss of one row of responses, and its gradient on the hidden states that it was read from."""
        encoding, context = self._encodings[self.actor][item.row], self._context(self.actor, item.row)
        with self.ledger.hold("logits", self.shape.logits_bytes(len(item.row.targets()))):
            scores = score(self.actor, encoding, context)
            tokens = self._token_batch(item, scores.logprobs, loss)
            value, metrics = loss.fn(tokens)
            backward_scores(self.actor, encoding, context, scores, value, self.gradients)
        self._count(value, metrics, tokens)

    def _token_batch(self, item: ResponseRow, logprobs: Tensor, loss: GroupLoss) -> TokenBatch:
        if item.old is None:
            item.old = logprobs.detach()
        rollouts = [r for r, response in zip(item.rollouts, item.responses, strict=True) for _ in response.token_ids]
        return TokenBatch(
            actor=logprobs,
            old=item.old,
            behaviour=on_device(_behaviour(item.responses).to(logprobs.dtype), logprobs.device),
            reference=item.reference if loss.needs_reference else None,
            rollout=on_device(rollouts, logprobs.device),
            turn=torch.full((len(rollouts),), item.turn, device=logprobs.device),
        )

    def release(self) -> None:
        """Drop every encoding and prefill that is left."""
        self.prefills.drop()
        for model, kept in self._encodings.items():
            self._drop(model, list(kept))

    # --- metrics -----------------------------------------------------------------------------------------------------

    def _count(self, value: Tensor, metrics: dict[str, Tensor], tokens: TokenBatch) -> None:
        self._add("loss", value.detach())
        for name, metric in metrics.items():
            self._add(f"train/{name}", metric)
        sampled = ~tokens.behaviour.isnan()
        behaviour = torch.where(sampled, tokens.behaviour, 0.0)
        old = torch.where(sampled, tokens.old, 0.0)
        self._add("mismatch/tokens", sampled.sum())
        self._add("mismatch/prob", (behaviour.exp() - old.exp()).abs().sum())
        self._add("mismatch/logprob", (behaviour - old).abs().sum())
        self._add("train/mismatch_logprob_max", (behaviour - old).abs().max())

    def _add(self, name: str, value: Tensor) -> None:
        """Add to a sum (or take the maximum) on the device, without waiting for it."""
        value = value.to(torch.float64)
        if name not in self._device_sums:
            self._device_sums[name] = value
        elif name.endswith("_max"):
            self._device_sums[name] = torch.maximum(self._device_sums[name], value)
        else:
            self._device_sums[name] = self._device_sums[name] + value

    def take_sums(self) -> dict[str, float]:
        """Everything counted since the last call; waits for the device."""
        taken = dict(self.sums) | {name: float(value) for name, value in self._device_sums.items()}
        self.sums.clear()
        self._device_sums.clear()
        return taken

    def _count_tokens(self, unit: Unit) -> None:
        """Tokens that the actor's training computed, and those of a trainer that repeats every prompt."""
        fed = unit.prompts.num_tokens + sum(item.row.num_tokens for item in unit.responses)
        answers = sum(len(response.token_ids) for item in unit.responses for response in item.responses)
        self.sums["tokens/trained"] += fed
        self.sums["tokens/naive"] += sum(len(prompt.token_ids) for prompt in unit.prompt_of.values()) + answers


def _context_tokens(row: Row) -> int:
    return sum(other.num_tokens for other in row.context)


def _behaviour(responses: Sequence[Response]) -> Tensor:
    """Behaviour log-probabilities of a row's tokens; NaN for tokens that nobody sampled."""
    values = [
        value
        for response in responses
        for value in (response.behaviour_logprobs or (math.nan,) * len(response.token_ids))
    ]
    return torch.tensor(values, dtype=torch.float64)
