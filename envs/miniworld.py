"""MiniWorld's indoor worlds (`env.id=miniworld`): first person, coloured objects, walls with pictures.

Adds to `GymEnv` what MiniWorld knows: where the agent is, how far it walked, and, where one room holds agent and goal,
the straight way there. Needs `pip install 'rollplex[sim]'` and EGL. Knows nothing about models or processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from envs.gym_env import GymEnv
from envs.video_env import Split

_WORDS = {"left": "turn_left", "right": "turn_right", "forward": "move_forward"}


class MiniWorldEnv(GymEnv):
    """A world of MiniWorld whose goal is its `box`.

    Args:
        id: MiniWorld's id.
        instruction: what the agent is told.
        kwargs: arguments of the world.
        image_size: side of a frame (pixels).
        options: the rest of `GymEnv`'s.

    Raises:
        ValueError: MiniWorld is missing, knows no such world, or it has no box.
    """

    has_expert = True

    def __init__(
        self,
        id: str = "MiniWorld-OneRoom-v0",
        instruction: str = "go to the red box",
        kwargs: Mapping[str, Any] | None = None,
        image_size: int = 64,
        **options: Any,
    ) -> None:
        size = {"obs_width": image_size, "obs_height": image_size}
        super().__init__(id, {**size, **(kwargs or {})}, instruction, image_size=image_size, **options)
        self._inner = self.world.unwrapped
        self.world.reset(seed=0)
        if not hasattr(self._inner, "box"):
            raise ValueError(f"{id} has no box to go to: use env.id=gym:{id}")
        self.has_expert = len(self._inner.rooms) == 1  # type: ignore[misc]

    def _words(self) -> dict[str, Any]:
        actions = self.world.unwrapped.actions
        return {word: int(actions[name]) for word, name in _WORDS.items()}

    def _picture(self) -> Any:
        return self._observation  # drawn by the step already

    def _begin(self, split: Split) -> str:
        text = super()._begin(split)
        self._at, self._path_length = self._position(), 0.0
        self._start_distance = self.geodesic_distance()
        return text

    def _advance(self, action: str | None) -> tuple[float, bool, bool]:
        result = super()._advance(action)
        before, self._at = self._at, self._position()
        self._path_length += math.dist(before, self._at)
        return result

    def _position(self) -> tuple[float, float]:
        x, _, z = self._inner.agent.pos
        return float(x), float(z)

    def _info(self) -> dict[str, Any]:
        return super()._info() | {
            "path_length_m": self._path_length,
            "geodesic_m": self._start_distance,
            "distance_m": self.geodesic_distance(),
        }

    def _reach(self) -> float:
        """Distance of the centres at which the box counts as reached (m)."""
        return float(self._inner.agent.radius + self._inner.box.radius + 1.1 * self._inner.max_forward_step)

    def geodesic_distance(self) -> float:
        """Straight to the box, where one room holds both; unknown (NaN) in other worlds."""
        if len(self._inner.rooms) > 1:
            return math.nan
        x, _, z = self._inner.box.pos
        return max(0.0, math.dist(self._position(), (float(x), float(z))) - self._reach())

    def expert_actions(self, max_actions: int) -> tuple[str, ...]:
        """Turn towards the box, then walk."""
        if not self.has_expert:
            raise RuntimeError(f"{self._id} has walls in the way: it has no expert")
        x, z = self._position()
        heading = float(self._inner.agent.dir)  # counter-clockwise from +x, with z to the right
        goal_x, goal_z = float(self._inner.box.pos[0]), float(self._inner.box.pos[2])
        turn = math.radians(float(self._inner.params.get_max("turn_step")))
        step = float(self._inner.params.get_max("forward_step")) * self._stride
        chosen: list[str] = []
        while len(chosen) < max_actions and math.dist((x, z), (goal_x, goal_z)) > self._reach():
            aside = math.remainder(math.atan2(z - goal_z, goal_x - x) - heading, 2 * math.pi)
            if abs(aside) > turn * self._stride / 2:
                chosen.append("left" if aside > 0 else "right")
                heading += math.copysign(turn * self._stride, aside)
            else:
                chosen.append("forward")
                x, z = x + step * math.cos(heading), z - step * math.sin(heading)
        return tuple(chosen) or ("forward",)
