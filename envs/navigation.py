"""Headings, points to go to, and the greedy follower, for agents that turn and walk on a floor (y is up).

Plain geometry without a simulator: ways and steps are asked of functions. Knows nothing about habitat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

Place = Sequence[float]
"""x, y (up), z in metres."""
Path = Callable[[Place], Sequence[Place]]
"""From a place, the corners of the shortest way to the goal, both ends included; empty where there is none."""
Move = Callable[[Place, Place], Place]
"""Where a straight step between two places ends: walls may stop it or make it slide."""

_ARRIVED_M = 1e-3
"""A corner this near counts as passed (m)."""


def yaw_of(rotation: Sequence[float]) -> float:
    """Heading of a rotation about the upward axis (x, y, z, w), radians; 0 looks along -z, counter-clockwise."""
    _, y, _, w = rotation
    return math.remainder(2 * math.atan2(y, w), 2 * math.pi)


def rotation_of(yaw: float) -> tuple:
    """The rotation (x, y, z, w) of a heading."""
    return 0.0, math.sin(yaw / 2), 0.0, math.cos(yaw / 2)


def ahead(at: Place, yaw: float, length_m: float) -> tuple:
    """The place straight ahead."""
    return at[0] - length_m * math.sin(yaw), at[1], at[2] - length_m * math.cos(yaw)


def point_goal(at: Place, yaw: float, goal: Place) -> tuple:
    """PointNav's goal as the agent has it: distance as the crow flies (m), degrees to the left (negative: right)."""
    dx, dz = goal[0] - at[0], goal[2] - at[2]
    aside = math.remainder(math.atan2(-dx, -dz) - yaw, 2 * math.pi)
    return math.hypot(dx, dz), math.degrees(aside)


def flat_distance(a: Place, b: Place) -> float:
    """Distance on the floor (m)."""
    return math.hypot(a[0] - b[0], a[2] - b[2])


def way_length(corners: Sequence[Place]) -> float:
    """Length of a way (m); infinite where there is none."""
    if not corners:
        return math.inf
    return math.fsum(math.dist(tuple(a), tuple(b)) for a, b in pairwise(corners))


def greedy_actions(
    at: Place, yaw: float, path: Path, move: Move, *, radius_m: float, forward_m: float, turn: float, max_actions: int
) -> list:
    """Follow the shortest way: turn towards its next corner until less than half a turn is missing, then walk.

    Its last one or two steps are searched for, because a step may be longer than the goal is wide: who walks straight
    at it then goes to and fro over it for ever.

    Args:
        radius_m: stop once the way left is not longer (m).
        turn: what one action turns (radians).

    Returns:
        1 to `max_actions` of "left", "right", "forward" and a last "stop"; "stop" where no way leads to the goal.
    """
    chosen: list = []
    while len(chosen) < max_actions:
        corners = path(at)
        if not corners or way_length(corners) <= radius_m:
            chosen.append("stop")
            break
        last = None
        if way_length(corners) <= 2 * forward_m + radius_m:
            last = _last_turns(at, yaw, path, move, radius_m=radius_m, forward_m=forward_m, turn=turn)
        target = next((corner for corner in corners[1:] if flat_distance(at, corner) > _ARRIVED_M), corners[-1])
        aside = math.radians(point_goal(at, yaw, target)[1]) if last is None else last * turn
        if abs(aside) > turn / 2 + 1e-9:
            chosen.append("left" if aside > 0 else "right")
            yaw += math.copysign(turn, aside)
            continue
        chosen.append("forward")
        at = move(at, ahead(at, yaw, forward_m))
    return chosen


def _last_turns(
    at: Place, yaw: float, path: Path, move: Move, *, radius_m: float, forward_m: float, turn: float
) -> int | None:
    """Turns to the left (negative: right) before a step that ends at the goal, or from which a second one does.

    The fewest turns altogether; None where neither one step nor two lead there.
    """
    half = round(math.pi / turn)
    turns = sorted(range(-half, half + 1), key=abs)

    def steps(start: Place, heading: float) -> Iterator[tuple]:
        for count in turns:
            yield count, move(start, ahead(start, heading + count * turn, forward_m))

    def arrives(end: Place) -> bool:
        return way_length(path(end)) <= radius_m

    first = list(steps(at, yaw))
    for count, end in first:
        if arrives(end):
            return count
    ways = [
        (abs(count) + abs(second), count)
        for count, middle in first
        for second, end in steps(middle, yaw + count * turn)
        if arrives(end)
    ]
    return min(ways)[1] if ways else None
