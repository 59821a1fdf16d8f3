from __future__ import annotations

import heapq
import math

import numpy as np
import pytest

from envs.rooms_layout import Thing, generate_layout
from envs.rooms_options import AGENT_RADIUS_M, CONTACT_M, RoomsOptions
from envs.rooms_plan import Planner, Point
from tests.envs.worlds import DIVIDER, HALL, world

GOAL = Thing("box", "red", 7.0, 3.0)


def test_straight_way_is_the_euclidean_distance() -> None:
    assert world([GOAL]).planner.distance((3.0, 0.5), (6.0, 3.5)) == pytest.approx(math.hypot(3, 3))


def test_way_through_a_doorway_bends_at_its_grown_corners() -> None:
    # The divider's upper part starts at y = 2; grown by 0.2 it leaves the doorway below y = 1.8, for x in 3.8 .. 4.2.
    planner = world([GOAL], walls=HALL + DIVIDER).planner
    by_hand = math.hypot(2.8, 1.2) + 0.4 + math.hypot(2.8, 1.2)  # (1, 3) -> (3.8, 1.8) -> (4.2, 1.8) -> (7, 3)
    assert planner.distance((1.0, 3.0), (7.0, 3.0)) == pytest.approx(by_hand, abs=1e-4)
    path = planner.path((1.0, 3.0), (7.0, 3.0))
    assert np.allclose(path, [(1, 3), (3.8, 1.8), (4.2, 1.8), (7, 3)], atol=1e-4)


def test_way_around_an_object_is_a_little_longer_than_tangents_and_arc() -> None:
    planner = world([GOAL, Thing("box", "blue", 4.0, 2.0)]).planner
    reach, away = CONTACT_M, 2.0  # from (2, 2) to (6, 2), past a circle around (4, 2)
    tangent, angle = math.sqrt(away**2 - reach**2), math.acos(reach / away)
    shortest = 2 * tangent + reach * (math.pi - 2 * angle)
    assert shortest <= planner.distance((2.0, 2.0), (6.0, 2.0)) <= shortest * 1.01


def test_no_way_is_infinite_and_has_no_path() -> None:
    closed = np.array([*HALL, (4, 0, 4, 4)], dtype=float)
    planner = Planner(closed, np.zeros((0, 2)), AGENT_RADIUS_M, CONTACT_M, (1.0, 1.0))
    assert planner.distance((1.0, 1.0), (7.0, 1.0)) == math.inf
    assert planner.path((1.0, 1.0), (7.0, 1.0)) == []


def grid_distance(walls: np.ndarray, circles: np.ndarray, start: Point, end: Point, step: float) -> float:
    """Dijkstra over a fine grid with eight directions: never shorter than the truth, at most 8.3 % longer."""

    def free(x: float, y: float) -> bool:
        boxed = any(
            x0 - AGENT_RADIUS_M < x < x1 + AGENT_RADIUS_M and y0 - AGENT_RADIUS_M < y < y1 + AGENT_RADIUS_M
            for x0, y0, x1, y1 in walls.tolist()
        )
        return not boxed and all(math.hypot(x - cx, y - cy) >= CONTACT_M for cx, cy in circles.tolist())

    first, last = (round(start[0] / step), round(start[1] / step)), (round(end[0] / step), round(end[1] / step))
    best, heap = {first: 0.0}, [(0.0, first)]
    while heap:
        length, cell = heapq.heappop(heap)
        if cell == last:
            return length
        if length > best[cell]:
            continue
        for dx in (-1, 0, 1):
            for dy in (-1, 0, 1):
                near = (cell[0] + dx, cell[1] + dy)
                total = length + step * math.hypot(dx, dy)
                if total < best.get(near, math.inf) and free(near[0] * step, near[1] * step):
                    best[near] = total
                    heapq.heappush(heap, (total, near))
    return math.inf


@pytest.mark.parametrize("seed", range(3))
def test_distances_agree_with_a_slow_grid_search(seed: int) -> None:
    options = RoomsOptions(tasks=("goto",), num_rooms=4, num_objects=6, room_size=(3.5, 4.5))
    layout = generate_layout(options, "train", np.random.default_rng(seed))
    circles = np.array([(thing.x, thing.y) for thing in layout.things[1:]])
    goal = (layout.goal.x, layout.goal.y)
    found = layout.planner.distance(layout.start, goal)
    on_grid = grid_distance(layout.walls, circles, layout.start, goal, step=0.05)
    assert found - 1e-6 <= on_grid + 0.05
    assert on_grid <= found * 1.083 + 0.1
    assert layout.planner.distance(goal, layout.start) == pytest.approx(found)
