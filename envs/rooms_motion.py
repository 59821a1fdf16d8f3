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
    touched_wrong: bool
    """True where an object other than the goal stopped it."""


class Walker:
    """Walls and objects of one layout, ready for collisions."""

    def __init__(self, layout: Layout) -> None:
        grow = AGENT_RADIUS_M
        self._boxes = [(x0 - grow, y0 - grow, x1 + grow, y1 + grow) for x0, y0, x1, y1 in layout.walls.tolist()]
        self._wrong = [(thing.x, thing.y) for thing in layout.things[1:]]

    def forward(self, start: Point, heading: float, length_m: float, goal: Point) -> Walk:
        """Step along `heading`: slide along walls, stop at the first object."""
        x, y = start
        end_x, end_y = x + length_m * math.cos(heading), y + length_m * math.sin(heading)
        for x0, y0, x1, y1 in self._boxes:
            if y0 < y < y1:
                if x <= x0 < end_x:
                    end_x = x0
                elif end_x < x1 <= x:
                    end_x = x1
        for x0, y0, x1, y1 in self._boxes:
            if x0 < end_x < x1:
                if y <= y0 < end_y:
                    end_y = y0
                elif end_y < y1 <= y:
                    end_y = y1
        dx, dy = end_x - x, end_y - y
        share, touched_wrong = _free_share(start, dx, dy, goal), False
        for centre in self._wrong:
            free = _free_share(start, dx, dy, centre)
            if free < share:
                share, touched_wrong = free, True
        return Walk(x + share * dx, y + share * dy, touched_wrong)


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
