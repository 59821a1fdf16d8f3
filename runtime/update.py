"""The work of one update, unit by unit: reference scores, actor forward, loss, backward.

Each piece is a generator over the quanta of `prefix_tree`, so that the window may run it between decode steps or the
update may run it at once; the numbers are the same. Owns the encodings and the memory they lease.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from data.types import GroupLoss, Response, TokenBatch
from runtime.memory import Ledger, ModelShape
from runtime.prefix_tree import (
    Encoding,
    GradientBuffer,
    Keep,
    Row,
    backward,
    backward_scores,
    encode,
    score,
)  # fmt: skip
from runtime.vlm import SplitVLM
from runtime.work import ResponseRow, Unit

Steps = Generator[None, None, None]


class Updater:
    """Runs units against the actor and the reference, and sums gradients and metrics.

    Args:
        budget: bytes that prefixes encoded ahead of their training may hold; past it they are encoded when needed.
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
        self.gradients = gradients
        self.shape = shape
        self.ledger = ledger
        self.budget = budget
        self.sums: dict[str, float] = defaultdict(float)
        self._leases: dict[Encoding, int] = {}

    # --- ahead of training -------------------------------------------------------------------------------------------

    def encode_actor_prefix(self, unit: Unit) -> Steps:
        """Encode a unit's prompts for the actor, if the budget admits it."""
        keep = self._affordable(unit.prompts)
        if keep is None:
            self.sums["window/over_budget"] += 1
            return
        unit.actor_prefix = yield from self._encode(self.actor, unit.prompts, (), keep)

    def encode_reference_prefix(self, unit: Unit) -> Steps:
        """Encode a unit's prompts for the reference, if the budget admits it."""
        if self._free() < self.shape.boundary_bytes(unit.prompts.num_tokens):
            self.sums["window/over_budget"] += 1
            return
        unit.reference_prefix = yield from self._encode(self._reference(), unit.prompts, (), "nothing")

    def _free(self) -> int:
        return self.budget - self.ledger.used.get("boundaries", 0)

    def _affordable(self, row: Row) -> Keep | None:
        """The most that a prefix may keep until it is trained on; None where not even its boundary fits."""
        if self.shape.graph_bytes(row.num_tokens) <= self._free():
            return "graph"
        return "inputs" if self.shape.boundary_bytes(row.num_tokens) <= self._free() else None

    def _reference(self) -> SplitVLM:
        assert self.reference is not None, "a loss wants a reference, and rl.kl_coef loaded none"
        return self.reference

    def _encode(
        self, model: SplitVLM, row: Row, context: Sequence[Encoding], keep: Keep
    ) -> Generator[None, None, Encoding]:
        encoding = yield from encode(model, row, context, keep=keep)
        size = self.shape.graph_bytes if keep == "graph" else self.shape.boundary_bytes
        name = "activations" if context else "boundaries"
        self._leases[encoding] = self.ledger.lease(name, size(row.num_tokens))
        self.sums["tokens/computed"] += row.num_tokens
        return encoding

    def _drop(self, encoding: Encoding | None) -> None:
        if encoding is not None:
            self.ledger.release(self._leases.pop(encoding))

    # --- scoring and training ----------------------------------------------------------------------------------------

    def score_reference(self, unit: Unit) -> Steps:
        """Reference log-probabilities of a unit's responses; its reference prefix is no longer needed then."""
        reference = self._reference()
        if unit.reference_prefix is None:
            unit.reference_prefix = yield from self._encode(reference, unit.prompts, (), "nothing")
        prefix = unit.reference_prefix
        for item in unit.responses:
            encoding = yield from self._encode(reference, item.row, [prefix], "nothing")
            item.reference = score(reference, encoding, [prefix]).logprobs
            self._drop(encoding)
        self._drop(prefix)
        unit.reference_prefix = None

    def train(self, units: Sequence[Unit], loss: GroupLoss) -> Steps:
        """Add the gradient of a group's loss: forward and backward of its responses, then backward of its prefixes."""
        for unit in units:
            if loss.needs_reference and not unit.scored:
                yield from self.score_reference(unit)
            if unit.actor_prefix is None:
                unit.actor_prefix = yield from self._encode(self.actor, unit.prompts, (), "inputs")
            prefix = unit.actor_prefix
            for item in unit.responses:
                yield from self._train_row(item, prefix, loss)
            yield from backward(self.actor, prefix, (), self.gradients)
            self._drop(prefix)
            unit.actor_prefix = None
            self._count_tokens(unit)
        self.sums["denominator"] += loss.denominator

    def _train_row(self, item: ResponseRow, prefix: Encoding, loss: GroupLoss) -> Steps:
        encoding = yield from self._encode(self.actor, item.row, [prefix], "graph")
        scores = score(self.actor, encoding, [prefix])
        tokens = self._token_batch(item, scores.logprobs, loss)
        logits_bytes = 4 * self.shape.vocabulary * len(item.row.targets())
        with self.ledger.hold("logits", logits_bytes):
            value, metrics = loss.fn(tokens)
            backward_scores(self.actor, encoding, [prefix], scores, value, self.gradients)
        self._count(value, metrics, tokens)
        yield from backward(self.actor, encoding, [prefix], self.gradients)
        self._drop(encoding)

    def _token_batch(self, item: ResponseRow, logprobs: Tensor, loss: GroupLoss) -> TokenBatch:
        if item.old is None:
            item.old = logprobs.detach()
        rollouts = [r for r, response in zip(item.rollouts, item.responses, strict=True) for _ in response.token_ids]
        return TokenBatch(
            actor=logprobs,
            old=item.old,
            behaviour=_behaviour(item.responses).to(logprobs),
            reference=item.reference if loss.needs_reference else None,
            rollout=torch.tensor(rollouts, device=logprobs.device),
            turn=torch.full((len(rollouts),), item.turn, device=logprobs.device),
        )

    def release(self, units: Sequence[Unit]) -> None:
        """Drop what is left of units' encodings."""
        for unit in units:
            self._drop(unit.actor_prefix)
            self._drop(unit.reference_prefix)
            unit.actor_prefix = unit.reference_prefix = None

    # --- metrics -----------------------------------------------------------------------------------------------------

    def _count(self, value: Tensor, metrics: dict[str, Tensor], tokens: TokenBatch) -> None:
        self.sums["loss"] += float(value.detach())
        for name, metric in metrics.items():
            self._add(f"train/{name}", float(metric))
        sampled = ~tokens.behaviour.isnan()
        if bool(sampled.any()):
            behaviour, old = tokens.behaviour[sampled], tokens.old[sampled]
            self.sums["mismatch/tokens"] += float(sampled.sum())
            self.sums["mismatch/prob"] += float((behaviour.exp() - old.exp()).abs().sum())
            self.sums["mismatch/logprob"] += float((behaviour - old).abs().sum())
            self._add("train/mismatch_logprob_max", float((behaviour - old).abs().max()))

    def _add(self, name: str, value: float) -> None:
        known = name in self.sums
        if name.endswith("_max"):
            self.sums[name] = max(self.sums[name], value) if known else value
        else:
            self.sums[name] += value

    def _count_tokens(self, unit: Unit) -> None:
        """Tokens that the actor's training computed, and those of a trainer that repeats every prompt."""
        fed = unit.prompts.num_tokens + sum(item.row.num_tokens for item in unit.responses)
        answers = sum(len(response.token_ids) for item in unit.responses for response in item.responses)
        self.sums["tokens/trained"] += fed
        self.sums["tokens/naive"] += sum(len(prompt.token_ids) for prompt in unit.prompt_of.values()) + answers


def _behaviour(responses: Sequence[Response]) -> Tensor:
    """Behaviour log-probabilities of a row's tokens; NaN for tokens that nobody sampled."""
    values = [
        value
        for response in responses
        for value in (response.behaviour_logprobs or (math.nan,) * len(response.token_ids))
    ]
    return torch.tensor(values, dtype=torch.float64)
