"""How things move in the rooms world: the agent walks and slides along walls, a ball rolls to and fro.

Knows nothing about tasks, rewards or pictures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from envs.rooms_layout import Layout
from envs.rooms_options import AGENT_RADIUS_M, CONTACT_M
from envs.rooms_plan import Point

_GAP_M = 1e-3
"""Left between the agent and an object that stopped it (m)."""


class Walk(NamedTuple):
    """Where a step forward ends."""

    x: float
    y: float
    length_m: float
    touched_wrong: bool
    """True where an object other than the goal stopped it."""


class Walker:
    """Walls and objects of one layout, ready for collisions."""

    def __init__(self, layout: Layout) -> None:
        grow = AGENT_RADIUS_M
        self._boxes = [(x0 - grow, y0 - grow, x1 + grow, y1 + grow) for x0, y0, x1, y1 in layout.walls.tolist()]
        self._wrong = [(thing.x, thing.y) for thing in layout.things[1:]]

    def forward(self, start: Point, heading: float, length_m: float, goal: Point) -> Walk:
        """Step along `heading`: at a wall slide along it with what is left of the step, at an object stop."""
        x, y = start
        dx, dy = length_m * math.cos(heading), length_m * math.sin(heading)
        walked = 0.0
        for _ in range(2):  # up to a wall, and along it
            share, face_x, face_y = self._until_wall(x, y, dx, dy)
            free, is_wrong = self._until_object((x, y), dx, dy, goal)
            walked += min(free, share) * math.hypot(dx, dy)
            if free < share:
                return Walk(x + free * dx, y + free * dy, walked, is_wrong)
            x = x + share * dx if face_x is None else face_x
            y = y + share * dy if face_y is None else face_y
            dx, dy = (
                (0.0 if face_x is not None else (1 - share) * dx),
                (0.0 if face_y is not None else (1 - share) * dy),
            )
        return Walk(x, y, walked, False)

    def _until_wall(self, x: float, y: float, dx: float, dy: float) -> tuple[float, float | None, float | None]:
        """Share of the way (dx, dy) up to the first wall, and the x or the y of the face that is hit."""
        nearest: tuple[float, float | None, float | None] = (1.0, None, None)
        (low_x, high_x), (low_y, high_y) = sorted((x, x + dx)), sorted((y, y + dy))
        for x0, y0, x1, y1 in self._boxes:
            if high_x <= x0 or low_x >= x1 or high_y <= y0 or low_y >= y1:
                continue
            enter_x, leave_x = _crossing(x, dx, x0, x1)
            enter_y, leave_y = _crossing(y, dy, y0, y1)
            enter = max(enter_x, enter_y)
            if -1e-9 < enter < min(leave_x, leave_y, nearest[0]):
                if enter_x > enter_y:
                    nearest = max(0.0, enter), (x0 if dx > 0 else x1), None
                else:
                    nearest = max(0.0, enter), None, (y0 if dy > 0 else y1)
        return nearest

    def _until_object(self, start: Point, dx: float, dy: float, goal: Point) -> tuple[float, bool]:
        """Share of the way up to the first object, and whether that is a wrong one."""
        free = _free_share(start, dx, dy, goal)
        reach = CONTACT_M + abs(dx) + abs(dy)
        near = [c for c in self._wrong if abs(c[0] - start[0]) < reach and abs(c[1] - start[1]) < reach]
        wrong = min((_free_share(start, dx, dy, centre) for centre in near), default=1.0)
        return min(free, wrong), wrong < free


def _crossing(at: float, delta: float, low: float, high: float) -> tuple[float, float]:
    """Shares of the way at which it enters and leaves the open range (low, high)."""
    if delta == 0:
        return (-math.inf, math.inf) if low < at < high else (math.inf, -math.inf)
    first, last = (low - at) / delta, (high - at) / delta
    return (first, last) if delta > 0 else (last, first)


def _free_share(start: Point, dx: float, dy: float, centre: Point) -> float:
    """Share of the way (dx, dy) until the agent touches an object at `centre`; 1 where it does not."""
    to_x, to_y = centre[0] - start[0], centre[1] - start[1]
    toward = to_x * dx + to_y * dy
    length = math.hypot(dx, dy)
    if toward <= 0 or length == 0:
        return 1.0  # moves away, even where a ball has rolled onto the agent
    along = toward / length
    aside = to_x * to_x + to_y * to_y - along * along
    if aside >= CONTACT_M**2:
        return 1.0
    free = along - math.sqrt(CONTACT_M**2 - aside) - _GAP_M
    return min(1.0, max(0.0, free / length))


class Route:
    """A ball that rolls along corners to and fro."""

    def __init__(self, corners: Sequence[Point]) -> None:
        self._legs = [(a, b, math.dist(a, b)) for a, b in pairwise(corners)]
        self._length = sum(length for *_, length in self._legs)
        self._begin = corners[0]

    def at(self, rolled_m: float) -> Point:
        """Where the ball is when it has rolled this far; below 0 it is on its way to the first corner."""
        if not self._legs:
            return self._begin
        left = abs(rolled_m) % (2 * self._length)
        left = min(left, 2 * self._length - left)
        for (ax, ay), (bx, by), length in self._legs:
            if left <= length:
                return ax + (bx - ax) * left / length, ay + (by - ay) * left / length
            left -= length
        return self._legs[-1][1]
