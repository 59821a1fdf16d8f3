"""The expert of the rooms world: the next primitive actions on the shortest way.

Knows nothing about rewards or pictures.
"""

from __future__ import annotations

import math

import numpy as np

from envs.rooms_layout import Layout, goal_radius
from envs.rooms_motion import Walker
from envs.rooms_options import RoomsOptions
from envs.rooms_plan import Point

_TURN_COST = 0.05
"""A turn is worth this share of a step forward: below about 20 degrees off, walking on is better than turning."""


class Expert:
    """Plans for one layout. Sees the true positions, and takes the goal to stay where it is during a chunk."""

    def __init__(self, options: RoomsOptions, layout: Layout, walker: Walker) -> None:
        self._options, self._layout, self._walker = options, layout, walker
        self._turn = math.radians(options.turn_deg)

    def actions(self, start: Point, heading: float, goal: Point, max_actions: int) -> tuple[str, ...]:
        """Up to `max_actions` actions; fewer where the goal is reached before."""
        chosen: list[str] = []
        follows = self._layout.task == "follow"
        # A follower goes nearer than it must, so that the ball does not get away at once, and keeps an eye on it.
        near = goal_radius(self._layout.task, self._options) * (0.7 if follows else 1.0)
        while len(chosen) < max_actions:
            if self._layout.planner.distance(start, goal) > near:
                action = self._next(start, heading, goal)
            elif follows:
                action = self._watch(start, heading, goal)
            else:
                break
            chosen.append(action)
            if action == "forward":
                step = self._walker.forward(start, heading, self._options.forward_m, goal)
                start = step.x, step.y
            elif action != "wait":
                heading += self._turn if action == "left" else -self._turn
        return tuple(chosen) or ("forward",)

    def _watch(self, start: Point, heading: float, goal: Point) -> str:
        aside = math.remainder(math.atan2(goal[1] - start[1], goal[0] - start[0]) - heading, 2 * math.pi)
        if abs(aside) <= max(self._turn / 2, math.radians(self._options.fov_deg) / 4):
            return "wait"
        return "left" if aside > 0 else "right"

    def _next(self, start: Point, heading: float, goal: Point) -> str:
        """Of the headings that turns lead to, the one from which a step forward gains most."""
        half_turn = int(math.pi / self._turn)
        options: list[int] = []
        ends: list[Point] = []
        for turns in sorted(range(-half_turn, half_turn + 1), key=abs):
            step = self._walker.forward(start, heading + turns * self._turn, self._options.forward_m, goal)
            if not step.touched_wrong and math.dist(start, step[:2]) > self._options.forward_m / 4:
                options.append(turns)
                ends.append(step[:2])
        if not options:
            return "left"
        left_m = self._layout.planner.distances(np.array(ends), goal)
        cost = left_m / self._options.forward_m + _TURN_COST * np.abs(options)
        best = options[int((cost - 1e-9 * np.arange(len(cost), 0, -1)).argmin())]  # of equals, the fewest turns
        return "forward" if best == 0 else "left" if best > 0 else "right"
