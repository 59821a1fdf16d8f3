"""What the loop needs of the environments, the sets, the agent and the runtime, in one place.

The real ones are `envs.pool.EnvPool`, `agent.policy.VLMPolicy`, `agent.video_qa.VideoQAPolicy` and
`runtime.rollplex.Rollplex`; tests bring small ones that decide in plain Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from agent.action_parser import ParsedAction
from agent.policy import Observation
from data.decode import DecodedClip
from data.types import Group, GroupLoss, Prompt, Response, Sampling, TurnKey
from data.video_qa import VideoQARow
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
class QuestionPolicy(Protocol):
    """Prompts from rows and clips, texts from responses, and the tokens of a row's answer."""

    def render(self, rows: Sequence[VideoQARow], clips: Sequence[Sequence[DecodedClip]]) -> list[Prompt]: ...
    def text(self, token_ids: Sequence[int]) -> str: ...
    def label(self, row: VideoQARow) -> tuple[int, ...]: ...
    def token_budget(self, row: VideoQARow) -> int: ...


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
    def load(self, folder: Path, *, weights_only: bool = False) -> None: ...


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
    def forget_times(self) -> None: ...
    def start_rl(self) -> None: ...


class Cursors(NamedTuple):
    """Where a run is in what it learns from, as plain JSON values."""

    imitation: dict[str, int]
    rl: dict[str, int]


@runtime_checkable
class Missing(Protocol):
    """An episode or a response of which nothing can be learned, and why."""

    @property
    def reason(self) -> str: ...


@runtime_checkable
class Measured(Protocol):
    """A held-out evaluation."""

    @property
    def success(self) -> float: ...
    @property
    def success_ci95(self) -> tuple[float, float]: ...
    def metrics(self) -> dict[str, float | None]: ...


@runtime_checkable
class Source(Protocol):
    """What a run learns from and is measured by; the loop knows no more of environments and sets of questions.

    `lost` is of the last call of `demonstrations` or `groups`. `teacher` surrounds all calls of `demonstrations`.
    """

    @property
    def lost(self) -> Sequence[Missing]: ...
    @property
    def runtime(self) -> Runtime: ...
    @property
    def max_turns(self) -> int: ...
    def teacher(self) -> AbstractContextManager[None]: ...
    def demonstrations(self, step: int) -> list[Group]: ...
    def groups(self, step: int) -> Iterator[Group]: ...
    def evaluate(self, folder: Path, videos: int | None = None) -> Measured | None: ...
    def prompts(self, count: int) -> list[tuple[str, Prompt]]: ...
    def metrics(self) -> dict[str, float]: ...
    def cursors(self) -> Cursors: ...
    def load_cursors(self, cursors: Cursors) -> None: ...
