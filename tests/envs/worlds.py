"""Small worlds drawn by hand, whose distances and pictures can be worked out on paper."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from envs.rooms_layout import Layout, Thing
from envs.rooms_options import AGENT_RADIUS_M, CONTACT_M, Task
from envs.rooms_plan import Planner, Point

Wall = tuple[float, float, float, float]

HALL: tuple[Wall, ...] = ((0, 0, 0, 4), (8, 0, 8, 4), (0, 0, 8, 0), (0, 4, 8, 4))
"""One room of 8 m by 4 m."""
DIVIDER: tuple[Wall, ...] = ((4, 0, 4, 1), (4, 2, 4, 4))
"""Divides the hall at x = 4; its doorway goes from y = 1 to y = 2."""


def world(
    things: Sequence[Thing],
    *,
    walls: Sequence[Wall] = HALL,
    task: Task = "goto",
    route: Sequence[Point] = (),
    start: Point = (1.0, 1.0),
    heading: float = 0.0,
) -> Layout:
    goal = (things[0].x, things[0].y)
    edges = np.array(walls, dtype=float)
    others = np.array([(thing.x, thing.y) for thing in things[1:]]).reshape(-1, 2)
    return Layout(
        task=task,
        walls=edges,
        wall_colors=(("stone", "stone"),) * len(edges),
        things=tuple(things),
        route=tuple(route) or (goal,),
        planner=Planner(edges, others, AGENT_RADIUS_M, CONTACT_M, goal),
        start=start,
        heading=heading,
    )
