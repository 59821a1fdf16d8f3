"""What the loop needs of the environments, the agent and the runtime, in one place.

The real ones are `envs.pool.EnvPool`, `agent.policy.VLMPolicy` and `runtime.rollplex.Rollplex`; tests bring small ones
that decide in plain Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from agent.action_parser import ParsedAction
from agent.policy import Observation
from data.types import Group, GroupLoss, Prompt, Response, Sampling, TurnKey
from envs.pool import EnvResult
from envs.registration import Episode


@runtime_checkable
class Pool(Protocol):
    """Environments in numbered slots. `reset` and `step` return at once; results come from `poll` and `wait`."""

    @property
    def num_envs(self) -> int: ...
    @property
    def action_names(self) -> tuple[str, ...]: ...
    @property
    def heldout(self) -> Sequence[tuple[str, str]]: ...
    def reset(self, slot: int, episode: Episode) -> None: ...
    def step(self, slot: int, actions: Sequence[str]) -> None: ...
    def poll(self, timeout_s: float) -> list[EnvResult]: ...
    def wait(self, slots: Sequence[int]) -> list[EnvResult]: ...


@runtime_checkable
class Policy(Protocol):
    """Prompts from observations, actions from responses, and back."""

    def render(
        self,
        histories: Sequence[Sequence[Observation]],
        earlier: Sequence[tuple[Prompt, Sequence[int]] | None] | None = None,
    ) -> list[Prompt]: ...
    def parse(self, token_ids: Sequence[int]) -> ParsedAction: ...
    def encode_actions(self, actions: Sequence[str]) -> tuple[int, ...]: ...


@runtime_checkable
class Decoder(Protocol):
    """Prompts in, responses out."""

    def submit(self, key: TurnKey, prompt: Prompt, sampling: Sampling, *, train: bool = True) -> None: ...
    def poll(self) -> list[tuple[TurnKey, Response]]: ...
    def has_unfinished(self) -> bool: ...
    def end_rollout(self, group: int, rollout: int) -> None: ...


@runtime_checkable
class Ranks(Protocol):
    """The processes of a run. `all_reduce` adds; keys that end in `_max` take the maximum."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def all_reduce(self, values: dict[str, float]) -> dict[str, float]: ...


@runtime_checkable
class Persistent(Ranks, Protocol):
    """What a checkpoint keeps; every rank calls both."""

    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...


@runtime_checkable
class Runtime(Decoder, Persistent, Protocol):
    """All of it: decoding, training, and the ranks it is spread over."""

    @property
    def weights_shared_fraction(self) -> float: ...
    @property
    def train_order(self) -> tuple[int, ...]: ...
    def train_on(self, group: Group, loss: GroupLoss) -> None: ...
    def update(self, lr: float) -> None: ...
    def stats(self) -> dict[str, float]: ...
    def start_rl(self) -> None: ...
