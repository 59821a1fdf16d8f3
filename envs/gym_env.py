"""Any gymnasium environment with `render_mode="rgb_array"` (`env.id=gym:ID`): pictures become clips, actions words.

Discrete actions go by their own names; a box of numbers gets two words a dimension, or what `actions` says. Success is
what the environment's info says, else a sum of rewards that reaches `success_return`. It measures no ways, so path
lengths are unknown. Knows nothing about particular environments, but for the packages that register them. Needs Python
3.9, gymnasium and numpy.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from collections.abc import Mapping
from enum import EnumMeta
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from envs.frames import resized
from envs.video_env import Split, VideoEnv

PACKAGES = ("minigrid", "gymnasium_robotics", "miniworld")
"""Imported one by one, where they are installed, until an id is known: importing registers their ids."""
_REWARD_IS_SUCCESS = ("minigrid", "miniworld")
"""Packages whose environments give a positive reward for success and for nothing else."""
_SUCCESS_KEYS = ("is_success", "success")


class GymEnv(VideoEnv[np.ndarray]):
    """A gymnasium environment as a `VideoEnv`.

    Args:
        id: gymnasium's id; `module:ID` imports the module first.
        kwargs: arguments of `gymnasium.make`.
        instruction: what the agent is told; `{mission}` is the environment's own words, where it has some.
        actions: word -> action; without it, names of discrete actions or `x0-up`, `x0-down`, ... of a box.
        noop: what is done where the agent does nothing; without it, zeros of a box, and for discrete actions the world
            stands still.
        frame_stride: environment steps of a primitive action; a frame is kept after each (count).
        clip_frames: frames of an observation (count).
        image_size: side of a frame (pixels).
        max_steps: primitive actions after which an episode is truncated (count).
        success_return: sum of an episode's rewards from which it is a success, where info has neither `is_success` nor
            `success`; without it, the `reward_threshold` that the id was registered with.

    Raises:
        ValueError: the id is unknown, renders nothing, has actions of another kind or no success, or an option is out
            of range.
    """

    has_expert = False

    def __init__(
        self,
        id: str,
        kwargs: Mapping[str, Any] | None = None,
        instruction: str = "{mission}",
        actions: Mapping[str, Any] | None = None,
        noop: Any = None,
        frame_stride: int = 1,
        clip_frames: int = 4,
        image_size: int = 64,
        max_steps: int = 100,
        success_return: float | None = None,
    ) -> None:
        counts = {"frame_stride": frame_stride, "clip_frames": clip_frames, "image_size": image_size}
        for name, value in {**counts, "max_steps": max_steps}.items():
            if value < 1:
                raise ValueError(f"{name} {value}: give 1 or more")
        self._id, self._template, self._noop = id, instruction, noop
        self._stride, self._max_steps, self._size = frame_stride, max_steps, image_size
        self._told("")
        self.world = self._make(dict(kwargs or {}))
        self._actions = dict(actions) if actions is not None else self._words()
        self._check_actions()
        self._success_return = self._threshold() if success_return is None else success_return
        super().__init__(tuple(self._actions), (clip_frames, image_size, image_size))

    def _make(self, kwargs: dict[str, Any]) -> Any:
        os.environ.setdefault("PYGLET_HEADLESS", "1")
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        try:
            source = str(registered_spec(self._id).entry_point)
            if "mujoco" in source or "gymnasium_robotics" in source:
                prepare_mujoco()
                kwargs = {"width": self._size, "height": self._size, **kwargs}
            return gymnasium.make(self._id, render_mode="rgb_array", **kwargs)
        except gymnasium.error.Error as error:
            raise ValueError(
                f"gymnasium cannot make {self._id!r}: {error}. Install what registers it (pip install 'rollplex[sim]' "
                f"brings {', '.join(PACKAGES)}), or name its module as module:ID"
            ) from error

    def _check_actions(self) -> None:
        space = self.world.action_space
        for word, action in {**self._actions, "noop": self._noop}.items():
            if action is not None and not space.contains(_as_action(action, space)):
                raise ValueError(f"action {word!r} is {action!r}, which is not in {space}")

    def _threshold(self) -> float:
        """The return that is a success, as far as the environment was registered with one; NaN where info tells."""
        spec = self.world.spec
        if spec.reward_threshold is not None:
            return float(spec.reward_threshold)
        if str(spec.entry_point).split(".")[0] in _REWARD_IS_SUCCESS:
            return math.ulp(0.0)
        _, before = self.world.reset(seed=0)
        *_, after = self.world.step(_as_action(next(iter(self._actions.values())), self.world.action_space))
        if not any(key in info for info in (before, after) for key in _SUCCESS_KEYS):
            raise ValueError(
                f"{self._id} does not say what a success is, neither in its info ({' or '.join(_SUCCESS_KEYS)}) nor as "
                "a reward_threshold: set success_return to the sum of rewards from which an episode is one"
            )
        return math.nan

    def _words(self) -> dict[str, Any]:
        return default_actions(self.world)

    def _picture(self) -> Any:
        return self.world.render()

    def _begin(self, split: Split) -> str:
        seed = 2 * int(self.np_random.integers(1 << 30)) + (split == "heldout")  # the two splits share no seed
        self._observation, info = self.world.reset(seed=seed)
        plain_shadows(self.world)
        self._steps, self._return, self._last_info = 0, 0.0, dict(info)
        self._show()
        return self._told(self._observation.get("mission", "") if isinstance(self._observation, dict) else "")

    def _told(self, mission: str) -> str:
        try:
            return self._template.format(mission=mission or f"solve {self._id}")
        except (LookupError, ValueError) as error:
            raise ValueError(
                f"instruction {self._template!r}: {error!r}: its one field is {{mission}}; write a brace as {{{{"
            ) from error

    def _show(self) -> None:
        picture = self._picture()
        if not isinstance(picture, np.ndarray) or picture.ndim != 3 or picture.dtype != np.uint8:
            raise ValueError(f"{self._id} renders {type(picture).__name__}, not a picture: it cannot be used")
        self.frames.push(resized(picture, self._size))

    def _advance(self, action: str | None) -> tuple[float, bool, bool]:
        given = self._noop if action is None else self._actions[action]
        if given is None and isinstance(self.world.action_space, spaces.Box):
            given = np.zeros(self.world.action_space.shape, self.world.action_space.dtype)
        self._steps += 1
        total, terminated, truncated = 0.0, False, False
        for _ in range(self._stride if given is not None else 1):
            if given is not None:
                action_value = _as_action(given, self.world.action_space)
                self._observation, reward, terminated, truncated, info = self.world.step(action_value)
                total += float(reward)
                self._last_info = dict(info)
            self._show()
            if terminated or truncated or self._succeeded():
                break
        self._return += total
        terminated = terminated or self._succeeded()
        return total, terminated, not terminated and (truncated or self._steps >= self._max_steps)

    def _succeeded(self) -> bool:
        """What the environment itself says of success."""
        return any(bool(self._last_info.get(key, False)) for key in _SUCCESS_KEYS)

    def _info(self) -> dict[str, Any]:
        says = any(key in self._last_info for key in _SUCCESS_KEYS)
        return {
            "success": self._succeeded() if says else self._return >= self._success_return,
            "path_length_m": math.nan,
            "geodesic_m": math.nan,
            "distance_m": math.nan,
            "task": self._id,
        }

    def expert_actions(self, max_actions: int) -> tuple[str, ...]:
        raise RuntimeError(f"{self._id} has no expert")

    def geodesic_distance(self) -> float:
        return math.nan

    def close(self) -> None:
        self.world.close()


def registered_spec(env_id: str) -> Any:
    """gymnasium's record of an id, for which packages that register ids are imported.

    Raises:
        gymnasium.error.Error: nobody registers it.
    """
    for package in PACKAGES:
        try:
            return gymnasium.spec(env_id)
        except gymnasium.error.Error:
            if importlib.util.find_spec(package):
                if package == "gymnasium_robotics":
                    prepare_mujoco()
                gymnasium.register_envs(importlib.import_module(package))
    return gymnasium.spec(env_id)


def prepare_mujoco() -> None:
    """Choose MuJoCo's renderer before others import it."""
    if importlib.util.find_spec("mujoco"):
        from envs.mujoco_scene import require_mujoco

        require_mujoco()


def default_actions(world: Any) -> dict[str, Any]:
    """Words for the actions of a gymnasium environment.

    Raises:
        ValueError: they are neither discrete nor a flat box.
    """
    space = world.action_space
    if isinstance(space, spaces.Discrete):
        named = getattr(world.unwrapped, "actions", None)
        members: list[Any] = list(named) if isinstance(named, EnumMeta) else []
        first = int(space.start)
        if len(members) >= space.n:
            return {str(member.name): int(member) for member in members if first <= int(member) < first + space.n}
        return {f"action{number}": number for number in range(first, first + int(space.n))}
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        words = {}
        for place in range(space.shape[0]):
            for word, bound in (("up", space.high), ("down", space.low)):
                vector = np.zeros(space.shape, space.dtype)
                vector[place] = np.clip(bound[place], -1, 1)
                words[f"x{place}-{word}"] = vector
        return words
    raise ValueError(f"actions {space} have no words: only discrete ones and flat boxes can be used")


def plain_shadows(world: Any) -> None:
    """No shadows and no multisampling where the environment is MuJoCo's: on software GL they cost most of the time."""
    model = getattr(world.unwrapped, "model", None)
    if model is not None and hasattr(model, "vis"):
        model.vis.quality.shadowsize = 0
        model.vis.quality.offsamples = 0


def _as_action(given: Any, space: Any) -> Any:
    return np.asarray(given, space.dtype) if isinstance(space, spaces.Box) else given
