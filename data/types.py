"""Records that travel between folders: what a policy sees, what it answered, and what came of it.

Knows nothing about models, engines or simulators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Media:
    """One video as a Qwen-VL class model takes it."""

    pixel_values: Float[Tensor, "patch feature"]
    """Normalised patches, float32, in the processor's order."""
    grid_thw: tuple[int, int, int]
    """Patches in time, height and width, before the spatial merge (counts)."""
    seconds_per_grid: float
    """Video time between two steps of the temporal grid (s)."""
    offset: int
    """Index of the first of this video's placeholder tokens in the prompt."""
    num_tokens: int
    """Placeholder tokens of this video in the prompt (count)."""
    content_hash: str
    """Digest of pixels, grid and timing: equal videos have equal digests."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """Tokens and media known before decoding. vLLM and the trainer both read this, so it is rendered once."""

    token_ids: tuple[int, ...]
    """Token ids with every video placeholder expanded."""
    positions: Int[Tensor, "3 token"]
    """M-RoPE positions (time, height, width)."""
    media: tuple[Media, ...]
    key: str
    """Digest of tokens and media: prompts with equal keys share one prefix."""

    @property
    def next_position(self) -> int:
        """M-RoPE position of the first response token: one past the largest so far, on all three axes."""
        return int(self.positions.max()) + 1


@dataclass(frozen=True)
class Sampling:
    """How one response is sampled."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    seed: int | None = None
    """Seeds this request alone; None draws from the engine's own generator."""
    min_tokens: int = 0
    """The response does not end before it has so many: forces lengths in benchmarks."""


@dataclass(frozen=True)
class Response:
    """Sampled tokens, the end-of-turn token included where one was sampled."""

    token_ids: tuple[int, ...]
    behaviour_logprobs: tuple[float, ...]
    """Log-probability of each token under the engine that sampled it."""
    finish_reason: Literal["stop", "length"]
    """`length`: `max_tokens` ended it, so the turn is truncated."""
    policy_version: int
    """Version of the weights that sampled it."""


class Vocabulary(NamedTuple):
    """What may be sampled. The engine and the trainer apply the same mask."""

    end_of_turn: int
    """Token id that ends a response."""
    forbidden: tuple[int, ...]
    """Token ids that are never sampled: media, special and padding rows of the embedding."""


class TurnKey(NamedTuple):
    """Which response a request is for. `group` is unique within one optimizer step."""

    group: int
    rollout: int
    turn: int


@dataclass(frozen=True)
class Turn:
    """One prompt -> response -> environment transition."""

    prompt: Prompt
    response: Response
    actions: tuple[str, ...] = ()
    """Primitive actions carried out; empty where the response was invalid and the rule is to do nothing."""
    invalid: bool = False
    """True where the response did not parse as an action."""
    reward: float = 0.0


@dataclass(frozen=True)
class Rollout:
    """One episode's record."""

    episode_id: str
    turns: tuple[Turn, ...]
    reward: float
    success: bool
    truncated: bool
    """True where a limit ended the episode, not the environment."""
    info: dict[str, Any] = field(default_factory=dict)
    """The environment's last info (path_length_m, geodesic_m, ...)."""


@dataclass(frozen=True)
class Group:
    """Rollouts of one task from one start state, whose rewards are compared."""

    index: int
    """Position in the step's batch; `TurnKey.group` of its turns."""
    rollouts: tuple[Rollout, ...]

    @property
    def rewards(self) -> Float[Tensor, " rollout"]:
        return torch.tensor([rollout.reward for rollout in self.rollouts], dtype=torch.float64)

    @property
    def num_tokens(self) -> int:
        """Response tokens of all rollouts (count)."""
        return sum(len(turn.response.token_ids) for rollout in self.rollouts for turn in rollout.turns)


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """What a loss sees: the response tokens of one packed row, flat, in the row's order."""

    actor: Float[Tensor, " token"]
    """Log-probabilities under the trainer's weights now; the one field with a gradient."""
    old: Float[Tensor, " token"]
    """Trainer's log-probabilities at the rollout's version; `actor` detached in the first optimizer epoch."""
    behaviour: Float[Tensor, " token"]
    """vLLM's log-probabilities when sampling; NaN for tokens that were not sampled (imitation)."""
    reference: Float[Tensor, " token"] | None
    """Frozen reference's log-probabilities; None where the loss declares no need of them."""
    rollout: Int[Tensor, " token"]
    """Index of each token's rollout in its group: indexes per-rollout advantages and weights."""
    turn: Int[Tensor, " token"]
    """Index of each token's turn in its rollout: with `rollout` it names the response."""


LossFn = Callable[[TokenBatch], tuple[Tensor, dict[str, Tensor]]]
"""Sum of the loss over the row's tokens (scalar), and sums or `*_max` of metrics to be reduced over rows and ranks."""


@dataclass(frozen=True)
class GroupLoss:
    """A group's loss as the runtime runs it: rows add `fn`'s sums, the step divides once by all `denominator`s."""

    fn: LossFn
    denominator: float
    """This group's share of the step's common denominator (rollouts or tokens); summed over groups and ranks."""
    needs_reference: bool = False
    constant: bool = False
    """The loss does not depend on the actor (equal rewards, no reference), so that nothing is computed for it."""
