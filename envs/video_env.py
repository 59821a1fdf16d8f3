"""The contract between a simulator and everything that trains on it: clips in, chunks of primitive actions out.

A *decision* is a chunk of primitive actions; the observation after it is a clip of the frames since that decision.
Knows nothing about models, rewards of a particular world, or the processes that run environments.
"""

from __future__ import annotations

import string
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args

import numpy as np

from envs.server import INFO_KEYS

try:
    import gymnasium
    from gymnasium import spaces
    from jaxtyping import UInt8

    _Base: Any = gymnasium.Env
except ImportError:  # in an interpreter of the simulator's own (`env.python`), which needs numpy and msgpack alone

    class _Base:  # type: ignore[no-redef]
        """What is used of gymnasium.Env."""

        np_random: np.random.Generator

        def reset(self, *, seed: int | None = None) -> None:
            if seed is not None or not hasattr(self, "np_random"):
                self.np_random = np.random.default_rng(seed)

        def close(self) -> None:
            pass


__all__ = ["INFO_KEYS", "FrameBuffer", "Observation", "Split", "StepResult", "VideoEnv"]

Split = Literal["train", "heldout"]
"""Which side of a world's layouts an episode is drawn from; the two sides share none."""

Observation = dict[str, Any]
StepResult = tuple[Observation, float, bool, bool, dict[str, Any]]

_CHARSET = string.ascii_letters + string.digits + string.punctuation + " \n"
_MAX_INSTRUCTION = 512

Moment = TypeVar("Moment")


class FrameBuffer(Generic[Moment]):
    """What was seen since the last decision, and the choice of `num_frames` of it.

    Holds frames, or whatever a simulator can render a frame from later (so that only chosen ones are rendered).
    """

    def __init__(self, num_frames: int) -> None:
        self.num_frames = num_frames
        self._moments: list[Moment] = []

    def __len__(self) -> int:
        return len(self._moments)

    def clear(self) -> None:
        """Forget everything: a new decision was made."""
        self._moments.clear()

    def push(self, moment: Moment) -> None:
        """Append the newest moment."""
        self._moments.append(moment)

    def select(self) -> list[Moment]:
        """Exactly `num_frames` moments, oldest first and the newest last.

        More than that are thinned at equal distances; fewer are padded by repeating the earliest in front.

        Raises:
            RuntimeError: nothing was pushed since `clear`.
        """
        count = len(self._moments)
        if count == 0:
            raise RuntimeError("the frame buffer is empty: push at least one frame per reset and per primitive action")
        if count < self.num_frames:
            return [self._moments[0]] * (self.num_frames - count) + self._moments
        return [self._moments[-(-(i + 1) * count // self.num_frames) - 1] for i in range(self.num_frames)]


class VideoEnv(_Base, ABC, Generic[Moment]):
    """Base of all environments: `reset` and `step` of gymnasium, and `step_chunk` for one decision of several actions.

    A simulator fills in five methods: `_begin`, `_advance`, `_info`, `expert_actions`, `geodesic_distance`; and
    `_render` where its moments are not frames yet. It draws every random number from `self.np_random`.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    one_per_process: ClassVar[bool] = False
    """The simulator allows no second one in its process."""
    has_expert: ClassVar[bool] = True
    """`expert_actions` knows what to do."""

    def __init__(self, action_names: Sequence[str], clip_shape: tuple[int, int, int]) -> None:
        """Args: names of the primitive actions, in the order of their numbers; (frames, height, width) of a clip."""
        self.action_names = tuple(action_names)
        self.clip_shape = (*clip_shape, 3)
        self.frames: FrameBuffer[Moment] = FrameBuffer(clip_shape[0])
        if _Base.__module__ != __name__:
            self.action_space = spaces.Discrete(len(self.action_names))
            self.observation_space = spaces.Dict(
                clip=spaces.Box(0, 255, self.clip_shape, np.uint8),
                instruction=spaces.Text(_MAX_INSTRUCTION, charset=_CHARSET),
            )
        self._instruction = ""
        self._over = True

    # What a simulator fills in.

    @abstractmethod
    def _begin(self, split: Split) -> str:
        """Start an episode from `self.np_random`, push what is seen, and return the instruction.

        A world in motion should run for a clip's length here, so that its motion is visible in the first observation.
        """

    @abstractmethod
    def _advance(self, action: str | None) -> tuple[float, bool, bool]:
        """Simulate one primitive action (None: the agent does nothing, the world goes on) and push what is seen.

        Returns: reward, terminated, truncated.
        """

    @abstractmethod
    def _info(self) -> dict[str, Any]:
        """The state of the episode; at least `INFO_KEYS`."""

    @abstractmethod
    def expert_actions(self, max_actions: int) -> tuple[str, ...]:
        """The next 1 to `max_actions` primitive actions on the shortest path; changes nothing, draws nothing random."""

    @abstractmethod
    def geodesic_distance(self) -> float:
        """Metres to walk until the goal counts as reached; finite."""

    def _render(self, moments: Sequence[Moment]) -> UInt8[np.ndarray, "time height width 3"]:
        """Frames of the chosen moments. Here moments are frames already."""
        return np.stack([np.asarray(moment) for moment in moments])

    def episodes(self, split: Split) -> list[tuple[str, str]]:
        """Scene and id of each episode, where the world has a list of them; then a seed is a place in it.

        Empty: the seed generates the episode.
        """
        return []

    # What users call.

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start an episode. It depends on `seed` and `options["split"]` ("train" or "heldout") alone.

        Raises:
            ValueError: an unknown option or split.
        """
        given = dict(options or {})
        split: Split = given.pop("split", "train")
        if given or split not in get_args(Split):
            raise ValueError(
                f'reset options {dict(options or {})}: the one option is split, "train" or "heldout"; drop the others'
            )
        super().reset(seed=seed)
        self.frames.clear()
        self._instruction = self._begin(split)
        self._over = False
        return self._observe(), self._info()

    def step(self, action: np.int64 | int) -> StepResult:
        """One decision of one primitive action, given by its number."""
        return self.step_chunk((self.action_names[int(action)],))

    def step_chunk(self, actions: Sequence[str]) -> StepResult:
        """One decision: carry out `actions` in order, ending early with the episode. Empty: do nothing for one step.

        Returns gymnasium's five: rewards are summed, and info has `env_steps`, the primitive steps simulated (count).

        Raises:
            ValueError: an action that is not in `action_names`.
            RuntimeError: the episode is over.
        """
        for name in actions:
            if name not in self.action_names:
                raise ValueError(f"unknown action {name!r}: choose from {', '.join(self.action_names)}")
        if self._over:
            raise RuntimeError("the episode is over (or never began): call reset before the next step")
        self.frames.clear()
        total, env_steps, terminated, truncated = 0.0, 0, False, False
        chunk: Sequence[str | None] = actions or (None,)
        for action in chunk:
            reward, terminated, truncated = self._advance(action)
            total += reward
            env_steps += 1
            if terminated or truncated:
                self._over = True
                break
        return self._observe(), total, terminated, truncated, {**self._info(), "env_steps": env_steps}

    def _observe(self) -> Observation:
        return {"clip": self._render(self.frames.select()), "instruction": self._instruction}
