"""Layouts of the rooms world: walls with doorways, objects, a moving ball's route, the agent's start.

Draws them at random and splits them for good: a layout's fingerprint says whether it is a training or a held-out one.
Knows nothing about rendering, rewards or time.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np
from jaxtyping import Float

from envs.rooms_options import (
    AGENT_RADIUS_M,
    CONTACT_M,
    DOOR_WIDTH_M,
    THING_RADIUS_M,
    RoomsOptions,
    Task,
)
from envs.rooms_plan import Planner, Point
from envs.video_env import Split

HELDOUT_SHARE = 5
"""One layout in this many is held out."""
WALL_COLORS = ("stone", "sand", "teal", "rose", "slate", "olive")

_GRID_M = 0.05
_ATTEMPTS = 2000
_WALL_GAP_M = THING_RADIUS_M + 2 * AGENT_RADIUS_M + 0.05
"""Between an object's centre and a wall: the agent fits through."""
_THING_GAP_M = 2 * CONTACT_M + 0.2
"""Between the centres of two objects: the agent fits through."""


@dataclass(frozen=True)
class Thing:
    """An object on the floor."""

    shape: str
    color: str
    x: float
    y: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Layout:
    """One episode's world at its start. Metres; headings in radians, counter-clockwise from +x."""

    task: Task
    walls: Float[np.ndarray, "wall 4"]
    """Segments x0, y0, x1, y1 with x0 <= x1, y0 <= y1, each along an axis."""
    wall_colors: tuple[tuple[str, str], ...]
    """Colour of each wall seen from its lower (left) and from its upper (right) side."""
    things: tuple[Thing, ...]
    """The goal is the first."""
    route: tuple[Point, ...]
    """Corners between which the goal rolls to and fro; a single point where it lies still."""
    planner: Planner
    """Ways on which the agent touches no wall and no object but the goal."""
    start: Point
    heading: float

    @property
    def goal(self) -> Thing:
        return self.things[0]

    @cached_property
    def fingerprint(self) -> str:
        """Digest of walls, colours and objects: equal for equal worlds, wherever the agent starts."""
        return _fingerprint(self.walls, self.wall_colors, self.things)


def split_of(fingerprint: str) -> Split:
    """The side that a layout belongs to, by its fingerprint alone: no layout is on both."""
    return "heldout" if int(fingerprint, 16) % HELDOUT_SHARE == 0 else "train"


def generate_layout(options: RoomsOptions, split: Split, rng: np.random.Generator) -> Layout:
    """Draw layouts until one is on the wanted side and solvable.

    Raises:
        ValueError: none was found; the options leave too little space.
    """
    task: Task = options.tasks[int(rng.integers(len(options.tasks)))]
    for _ in range(_ATTEMPTS):
        layout = _draw(options, task, split, rng)
        if layout is not None:
            return layout
    raise ValueError(
        f"rooms: no {task!r} layout with num_objects {options.num_objects}, room_size {options.room_size} and "
        f"min_distance_m {options.min_distance_m} in {_ATTEMPTS} draws: enlarge the rooms, or lower the other two"
    )


def goal_radius(task: Task, options: RoomsOptions) -> float:
    """Distance from the goal's centre at which it counts as reached (m)."""
    return options.follow_distance_m if task == "follow" else options.reach_m


def _draw(options: RoomsOptions, task: Task, split: Split, rng: np.random.Generator) -> Layout | None:
    """One random layout; None where it is on the other side or its parts do not fit together."""
    rooms = _rooms(options, rng)
    walls, wall_colors = _build_walls(rooms, [str(rng.choice(WALL_COLORS)) for _ in rooms], rng)
    spots = _spots(rooms, options.num_objects, rng)
    if spots is None:
        return None
    things = _things(options, task, spots, rng)
    if split_of(_fingerprint(walls, wall_colors, things)) != split:
        return None
    planner = Planner(walls, np.array(spots[1:]), AGENT_RADIUS_M, CONTACT_M, spots[0])
    route = (spots[0],) if task == "goto" else _route(task, options, rooms, walls, spots, rng)
    pose = _start(task, options, rooms, walls, spots, planner, route, rng) if route else None
    if not route or not pose:
        return None
    start, heading = pose
    return Layout(
        task=task,
        walls=walls,
        wall_colors=wall_colors,
        things=things,
        route=route,
        planner=planner,
        start=start,
        heading=heading,
    )


def _fingerprint(
    walls: Float[np.ndarray, "wall 4"], wall_colors: tuple[tuple[str, str], ...], things: tuple[Thing, ...]
) -> str:
    parts = (np.round(walls, 3).tolist(), wall_colors, things)
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


Room = tuple[float, float, float, float]  # x0, y0, x1, y1


def _rooms(options: RoomsOptions, rng: np.random.Generator) -> list[Room]:
    """1 to 4 cells of a 2 x 2 grid that hang together, with random column widths and row heights."""
    cells = {
        1: [[(0, 0)]],
        2: [[(0, 0), (1, 0)], [(0, 0), (0, 1)]],
        3: [list(three) for three in combinations([(0, 0), (1, 0), (0, 1), (1, 1)], 3)],
        4: [[(0, 0), (1, 0), (0, 1), (1, 1)]],
    }[options.num_rooms]
    chosen = cells[int(rng.integers(len(cells)))]
    low, high = (round(side * 4) for side in options.room_size)
    sides = rng.integers(low, high + 1, size=(2, 2)) / 4
    x = [0.0, float(sides[0, 0]), float(sides[0].sum())]
    y = [0.0, float(sides[1, 0]), float(sides[1].sum())]
    return [(x[i], y[j], x[i + 1], y[j + 1]) for i, j in chosen]


def _build_walls(
    rooms: list[Room], paints: list[str], rng: np.random.Generator
) -> tuple[Float[np.ndarray, "wall 4"], tuple[tuple[str, str], ...]]:
    """Outer walls, and walls with a doorway between neighbours; each side in its room's paint."""
    sides: dict[tuple[float, float, float, float], list[str]] = {}
    for (x0, y0, x1, y1), paint in zip(rooms, paints, strict=True):
        edges = [((x0, y0, x0, y1), 1), ((x1, y0, x1, y1), 0), ((x0, y0, x1, y0), 1), ((x0, y1, x1, y1), 0)]
        for edge, side in edges:
            sides.setdefault(edge, ["", ""])[side] = paint
    walls: list[tuple[float, float, float, float]] = []
    colors: list[tuple[str, str]] = []
    for edge, (lower, upper) in sides.items():
        pieces = _with_doorway(edge, rng) if lower and upper else [edge]
        walls += pieces
        colors += [(lower or upper, upper or lower)] * len(pieces)
    return np.array(walls), tuple(colors)


def _with_doorway(wall: Room, rng: np.random.Generator) -> list[Room]:
    x0, y0, x1, y1 = wall
    length = (x1 - x0) + (y1 - y0)
    begin = _snap(rng.uniform(0.5, length - DOOR_WIDTH_M - 0.5))
    end = begin + DOOR_WIDTH_M
    if x0 == x1:
        return [(x0, y0, x0, y0 + begin), (x0, y0 + end, x0, y1)]
    return [(x0, y0, x0 + begin, y0), (x0 + end, y0, x1, y0)]


def _snap(value: float) -> float:
    return round(round(value / _GRID_M) * _GRID_M, 3)


def _spot(rooms: list[Room], gap: float, rng: np.random.Generator) -> Point:
    """A random point of a random room, at least `gap` from its walls."""
    x0, y0, x1, y1 = rooms[int(rng.integers(len(rooms)))]
    return _snap(rng.uniform(x0 + gap, x1 - gap)), _snap(rng.uniform(y0 + gap, y1 - gap))


def _spots(rooms: list[Room], count: int, rng: np.random.Generator) -> list[Point] | None:
    spots: list[Point] = []
    for _ in range(20 * count):
        spot = _spot(rooms, _WALL_GAP_M, rng)
        if all(math.dist(spot, other) >= _THING_GAP_M for other in spots):
            spots.append(spot)
        if len(spots) == count:
            return spots
    return None


def _things(options: RoomsOptions, task: Task, spots: list[Point], rng: np.random.Generator) -> tuple[Thing, ...]:
    """`goto`: all different. Otherwise balls of one colour: only motion tells the goal from the others."""
    if task == "goto":
        kinds = [(shape, color) for shape in options.shapes for color in options.colors]
        chosen = [kinds[int(i)] for i in rng.permutation(len(kinds))[: len(spots)]]
    else:
        chosen = [("ball", options.colors[int(rng.integers(len(options.colors)))])] * len(spots)
    return tuple(Thing(*kind, *spot) for kind, spot in zip(chosen, spots, strict=True))


def _route(
    task: Task,
    options: RoomsOptions,
    rooms: list[Room],
    walls: Float[np.ndarray, "wall 4"],
    spots: list[Point],
    rng: np.random.Generator,
) -> tuple[Point, ...] | None:
    """`moving`: a short straight way from the ball's place. `follow`: a way of 2 m or more, through doors too."""
    planner = Planner(walls, np.array(spots[1:]), THING_RADIUS_M + 0.05, 2 * THING_RADIUS_M + 0.05, spots[0])
    begin = spots[0]
    for _ in range(20):
        if task == "follow":
            end = _spot(rooms, THING_RADIUS_M + 0.1, rng)
            if 2.0 <= planner.distance(begin, end) < math.inf:
                return tuple(planner.path(begin, end))
        else:
            angle, length = rng.uniform(0, 2 * math.pi), rng.uniform(3, 5) * options.ball_speed_m
            end = begin[0] + length * math.cos(angle), begin[1] + length * math.sin(angle)
            if planner.is_clear(begin, end):
                return begin, end
    return None


def _start(
    task: Task,
    options: RoomsOptions,
    rooms: list[Room],
    walls: Float[np.ndarray, "wall 4"],
    spots: list[Point],
    planner: Planner,
    route: tuple[Point, ...],
    rng: np.random.Generator,
) -> tuple[Point, float] | None:
    """Where the agent stands and looks: clear of all objects, far enough from the goal, and with a way to it.

    In `moving` the ball never rolls within reach of the start, so an agent that stands still does not succeed.
    """
    goal = spots[0]
    least = options.min_distance_m + goal_radius(task, options)
    for _ in range(20):
        start = _spot(rooms, AGENT_RADIUS_M + 0.1, rng)
        if any(math.dist(start, spot) < CONTACT_M + 0.2 for spot in spots):
            continue
        if task == "moving" and _distance_to_leg(start, route[0], route[-1]) < options.reach_m + 0.3:
            continue
        if not least <= planner.distance(start, goal) < math.inf:
            continue
        if not options.goal_in_view:
            return start, rng.uniform(-math.pi, math.pi)
        if sees(walls, start, goal):
            spread = math.radians(options.fov_deg) * 0.4
            return start, math.atan2(goal[1] - start[1], goal[0] - start[0]) + rng.uniform(-spread, spread)
    return None


def _distance_to_leg(point: Point, begin: Point, end: Point) -> float:
    """Distance of a point from a straight line between two others (m)."""
    dx, dy = end[0] - begin[0], end[1] - begin[1]
    share = ((point[0] - begin[0]) * dx + (point[1] - begin[1]) * dy) / (dx * dx + dy * dy)
    share = min(1.0, max(0.0, share))
    return math.dist(point, (begin[0] + share * dx, begin[1] + share * dy))


def sees(walls: Float[np.ndarray, "wall 4"], start: Point, end: Point) -> bool:
    """True where no wall is between two points."""
    (ax, ay), (bx, by) = start, end
    for x0, y0, x1, y1 in walls.tolist():
        if x0 == x1 and (ax < x0) != (bx < x0):
            if y0 <= ay + (x0 - ax) * (by - ay) / (bx - ax) <= y1:
                return False
        elif y0 == y1 and (ay < y0) != (by < y0) and x0 <= ax + (y0 - ay) * (bx - ax) / (by - ay) <= x1:
            return False
    return True
