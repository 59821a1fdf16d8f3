"""Shortest ways through a flat world of axis-aligned walls and round obstacles: a visibility graph.

The agent is a point here: walls are grown by its half width to boxes, obstacles to circles. Knows nothing about rooms,
tasks or headings.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float

Point = tuple[float, float]

_EPS = 1e-6
_CORNERS = 8
"""Corners of the polygon that stands for a circle; ways around it are at most 6 % longer than the arc."""


class Planner:
    """Shortest ways that stay outside of all boxes and circles, between places connected with `inside`."""

    def __init__(
        self,
        walls: Float[np.ndarray, "wall 4"],
        circles: Float[np.ndarray, "circle 2"],
        clearance_m: float,
        radius_m: float,
        inside: Point,
    ) -> None:
        """Args: wall segments (x0, y0, x1, y1) with x0 <= x1 and y0 <= y1, and the distance to keep from them (m);
        centres, and the distance to keep from them (m); any free place of the part of the world that matters.
        """
        self._walls, self._circles = walls, circles
        self._clearance, self._radius, self._inside = clearance_m, radius_m, inside
        grown = walls + np.array([-1, -1, 1, 1]) * (clearance_m - _EPS)
        self._low_x, self._low_y, self._high_x, self._high_y = grown.T.copy()
        self._circle_x, self._circle_y = circles.reshape(-1, 2).T.copy()
        self._last_end: Point | None = None

    def is_clear(self, start: Point, end: Point) -> bool:
        """True where the straight way from `start` to `end` is free."""
        return bool(self._clear(np.array([start]), np.array([end]))[0])

    def distance(self, start: Point, end: Point) -> float:
        """Length of the shortest way (m); `inf` where there is none."""
        return float(self.distances(np.array([start]), end)[0])

    def distances(self, starts: Float[np.ndarray, "start 2"], end: Point) -> Float[np.ndarray, " start"]:
        """Length of the shortest way to `end` from each of many places (m); `inf` where there is none."""
        goal = np.array([end])
        found = np.hypot(starts[:, 0] - end[0], starts[:, 1] - end[1])
        hidden = np.flatnonzero(~self._clear(starts, goal))
        if len(hidden):
            through = self._legs(starts[hidden]) + self._from_nodes(end)
            found[hidden] = through.min(axis=1, initial=math.inf)
        return found

    def path(self, start: Point, end: Point) -> list[Point]:
        """Corners of the shortest way, `start` and `end` included; empty where there is none."""
        points, visited = [start], np.zeros(len(self.nodes), bool)
        while not self.is_clear(points[-1], end):
            through = self._legs(np.array(points[-1:]))[0] + self._from_nodes(end)
            through[visited] = math.inf
            if through.min(initial=math.inf) == math.inf:
                return []
            corner = int(through.argmin())
            visited[corner] = True
            points.append((float(self.nodes[corner, 0]), float(self.nodes[corner, 1])))
        return [*points, end]

    @cached_property
    def nodes(self) -> Float[np.ndarray, "node 2"]:
        """Corners at which shortest ways may bend: of grown walls and around circles, where free and connected."""
        outer = self._walls + np.array([-1, -1, 1, 1]) * (self._clearance + _EPS)
        corners = outer[:, [[0, 1], [0, 3], [2, 1], [2, 3]]].reshape(-1, 2)
        angles = (np.arange(_CORNERS) + 0.5) * 2 * math.pi / _CORNERS
        ring = (
            np.stack([np.cos(angles), np.sin(angles)], axis=-1) * (self._radius + _EPS) / math.cos(math.pi / _CORNERS)
        )
        nodes = np.concatenate([corners, (self._circles.reshape(-1, 1, 2) + ring).reshape(-1, 2)])
        nodes = nodes[self._clear(nodes, nodes)]
        found = self._pairs_clear(np.array([self._inside]), nodes)[0]
        newest = np.flatnonzero(found)
        while len(newest):  # breadth first over what sees each other
            left = np.flatnonzero(~found)
            newest = left[self._pairs_clear(nodes[newest], nodes[left]).any(axis=0)]
            found[newest] = True
        return nodes[found]

    @cached_property
    def _between(self) -> Float[np.ndarray, "node node"]:
        """Shortest way between any two nodes (m)."""
        between = self._legs(self.nodes)
        for via in range(len(between)):  # Floyd-Warshall
            np.minimum(between, between[:, via, None] + between[None, via], out=between)
        return between

    def _from_nodes(self, end: Point) -> Float[np.ndarray, " node"]:
        """Shortest way from each node to `end`; the last answer is kept, for goals that lie still."""
        if end != self._last_end:
            legs = self._legs(np.array([end]))[0]
            self._last_end, self._last_field = end, (self._between + legs).min(axis=1, initial=math.inf)
        return self._last_field

    def _legs(self, starts: Float[np.ndarray, "start 2"]) -> Float[np.ndarray, "start node"]:
        """Straight way from each place to each node; inf where it is blocked."""
        away = np.hypot(starts[:, None, 0] - self.nodes[:, 0], starts[:, None, 1] - self.nodes[:, 1])
        return np.where(self._pairs_clear(starts, self.nodes), away, math.inf)

    def _pairs_clear(
        self, starts: Float[np.ndarray, "start 2"], ends: Float[np.ndarray, "end 2"]
    ) -> Bool[np.ndarray, "start end"]:
        each = self._clear(np.repeat(starts, len(ends), axis=0), np.tile(ends, (len(starts), 1)))
        return each.reshape(len(starts), len(ends))

    def _clear(self, starts: Float[np.ndarray, "way 2"], ends: Float[np.ndarray, "#way 2"]) -> Bool[np.ndarray, " way"]:
        """Which straight ways touch no box and no circle."""
        x, y = starts[:, 0, None], starts[:, 1, None]
        dx, dy = ends[:, 0, None] - x, ends[:, 1, None] - y  # (way, 1)
        # Slabs: the way is inside a box's x range for t in [enter, leave], the same for y; (way, box).
        per_x, per_y = 1 / np.where(np.abs(dx) < 1e-12, 1e-12, dx), 1 / np.where(np.abs(dy) < 1e-12, 1e-12, dy)
        x0, x1, y0, y1 = (
            (self._low_x - x) * per_x,
            (self._high_x - x) * per_x,
            (self._low_y - y) * per_y,
            (self._high_y - y) * per_y,
        )
        enter = np.maximum(np.minimum(x0, x1), np.minimum(y0, y1))
        leave = np.minimum(np.maximum(x0, x1), np.maximum(y0, y1))
        blocked = (np.maximum(enter, 0) < np.minimum(leave, 1)).any(axis=1)
        if len(self._circle_x):
            to_x, to_y = self._circle_x - x, self._circle_y - y  # (way, circle)
            along = np.clip((to_x * dx + to_y * dy) / np.maximum(dx * dx + dy * dy, 1e-12), 0, 1)
            miss_x, miss_y = to_x - along * dx, to_y - along * dy
            blocked |= (miss_x * miss_x + miss_y * miss_y < (self._radius - _EPS) ** 2).any(axis=1)
        return ~blocked
