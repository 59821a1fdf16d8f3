"""The rooms world under MuJoCo: the same layouts, tasks, rewards and expert, with simulated contacts and GL pictures.

Needs `pip install 'rollplex[sim]'` and EGL (`MUJOCO_GL=egl`, the default) or OSMesa (`MUJOCO_GL=osmesa`). Knows nothing
about models or processes.
"""

from __future__ import annotations

import math
from typing import Any

from envs.mujoco_scene import Scene
from envs.rooms import RoomsEnv
from envs.rooms_layout import Layout
from envs.rooms_options import AGENT_RADIUS_M, CONTACT_M
from envs.rooms_plan import Point

_FREE_M = 1e-4
"""Left between the agent and what it was pushed out of (m)."""


class MujocoRoomsEnv(RoomsEnv):
    """`RoomsEnv` and its options (`RoomsOptions`), with MuJoCo's contacts and camera in the place of its own.

    Raises:
        ValueError: an unknown option or a value out of range; MuJoCo is missing or cannot render.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._scene = Scene(self.options.image_size, self.options.fov_deg, self.options.textures)
        self._renderer = self._scene  # type: ignore[assignment]

    def start_in(self, layout: Layout) -> None:
        super().start_in(layout)
        grow = AGENT_RADIUS_M
        self._boxes = [(x0 - grow, y0 - grow, x1 + grow, y1 + grow) for x0, y0, x1, y1 in layout.walls.tolist()]

    def _act(self, action: str | None) -> bool:
        heading, touched_wrong = self._heading, False
        turn = {"left": self._turn, "right": -self._turn}.get(action or "", 0.0)
        step_m = self.options.forward_m / self.options.motion_ticks if action == "forward" else 0.0
        for tick in range(1, self.options.ticks_per_action + 1):
            moves = tick <= self.options.motion_ticks
            length = step_m if moves else 0.0
            delta = length * math.cos(heading), length * math.sin(heading)
            before = self._at
            end, touched = self._scene.walk(before, delta, self.goal_position)
            self._at = self._pushed_out(end)
            self._path_length += math.dist(before, self._at)
            touched_wrong = touched_wrong or touched
            share = min(1.0, tick / self.options.motion_ticks)
            self._push_tick(self._at, heading + share * turn)
        self._heading = math.remainder(heading + turn, 2 * math.pi)
        return touched_wrong

    def _pushed_out(self, at: Point) -> Point:
        """The nearest place that is not in a wall or a wrong object: contacts are soft, and give way by millimetres."""
        x, y = at
        for x0, y0, x1, y1 in self._boxes:
            if x0 < x < x1 and y0 < y < y1:
                left, right, below, above = x - x0, x1 - x, y - y0, y1 - y
                least = min(left, right, below, above)
                x = x0 - _FREE_M if least == left else x1 + _FREE_M if least == right else x
                y = y0 - _FREE_M if least == below else y1 + _FREE_M if least == above else y
        for thing in self.layout.things[1:]:
            away = math.dist((x, y), (thing.x, thing.y))
            if away < CONTACT_M:
                stretch = (CONTACT_M + _FREE_M) / max(away, 1e-9)
                x, y = thing.x + (x - thing.x) * stretch, thing.y + (y - thing.y) * stretch
        return x, y

    def close(self) -> None:
        self._scene.close()
        super().close()
