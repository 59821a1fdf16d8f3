"""Any gymnasium environment with `render_mode="rgb_array"` (`env.id=gym:ID`): pictures become clips, actions words.

Discrete actions go by their own names; a box of numbers gets two words a dimension, or what `actions` says. Success is
what the environment's info says, else reaching its end with a positive sum of rewards. It measures no ways, so path
lengths are unknown. Knows nothing about particular environments, but for the packages that register them.
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
from jaxtyping import UInt8

from envs.frames import resized
from envs.video_env import Split, VideoEnv

PACKAGES = ("gymnasium_robotics", "minigrid", "miniworld")
"""Imported where they are installed, because that registers their ids."""
_SUCCESS_KEYS = ("is_success", "success")


class GymEnv(VideoEnv[UInt8[np.ndarray, "height width 3"]]):
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

    Raises:
        ValueError: the id is unknown, renders nothing, or has actions of another kind.
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
    ) -> None:
        self._id, self._template, self._noop = id, instruction, noop
        self._stride, self._max_steps, self._size = frame_stride, max_steps, image_size
        self.world = self._make(dict(kwargs or {}))
        self._actions = dict(actions) if actions is not None else self._words()
        super().__init__(tuple(self._actions), (clip_frames, image_size, image_size))

    def _make(self, kwargs: dict[str, Any]) -> Any:
        os.environ.setdefault("PYGLET_HEADLESS", "1")
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        if importlib.util.find_spec("mujoco"):
            from envs.mujoco_scene import require_mujoco

            require_mujoco()  # before others import it
        for package in PACKAGES:
            if importlib.util.find_spec(package):
                gymnasium.register_envs(importlib.import_module(package))
        try:
            source = str(gymnasium.spec(self._id).entry_point)
            if any(package in source for package in ("mujoco", "gymnasium_robotics")):
                kwargs = {"width": self._size, "height": self._size} | kwargs
            return gymnasium.make(self._id, render_mode="rgb_array", **kwargs)
        except gymnasium.error.Error as error:
            raise ValueError(
                f"gymnasium cannot make {self._id!r}: {error}. Install what registers it (pip install 'rollplex[sim]' "
                f"brings {', '.join(PACKAGES)}), or name its module as module:ID"
            ) from error

    def _words(self) -> dict[str, Any]:
        return default_actions(self.world)

    def _picture(self) -> Any:
        return self.world.render()

    def _begin(self, split: Split) -> str:
        seed = 2 * int(self.np_random.integers(1 << 30)) + (split == "heldout")  # the two splits share no seed
        self._observation, info = self.world.reset(seed=seed)
        plain_shadows(self.world)
        self._steps, self._return, self._last_info = 0, 0.0, dict(info)
        self._over_in_world = False
        self._show()
        mission = self._observation.get("mission", "") if isinstance(self._observation, dict) else ""
        return self._template.format(mission=mission or f"solve {self._id}")

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
        self._over_in_world = terminated
        terminated = terminated or self._succeeded()
        return total, terminated, not terminated and (truncated or self._steps >= self._max_steps)

    def _succeeded(self) -> bool:
        """What the environment itself says of success."""
        return any(bool(self._last_info.get(key, False)) for key in _SUCCESS_KEYS)

    def _info(self) -> dict[str, Any]:
        says = any(key in self._last_info for key in _SUCCESS_KEYS)
        success = self._succeeded() if says else self._over_in_world and self._return > 0
        return {
            "success": success,
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
