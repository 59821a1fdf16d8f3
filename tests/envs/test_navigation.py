from __future__ import annotations

import math
import random

import pytest

from envs.navigation import Place, ahead, greedy_actions, point_goal, rotation_of, way_length, yaw_of

ORIGIN = (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("yaw", "place"),
    [(0.0, (0, 0, -1)), (math.pi / 2, (-1, 0, 0)), (-math.pi / 2, (1, 0, 0)), (math.pi, (0, 0, 1))],
)
def test_headings(yaw: float, place: tuple[float, float, float]) -> None:
    assert ahead(ORIGIN, yaw, 1.0) == pytest.approx(place, abs=1e-12)
    assert math.cos(yaw_of(rotation_of(yaw)) - yaw) == pytest.approx(1)


def test_a_rotation_and_its_negative_are_one_heading() -> None:
    # a quarter turn to the left about y: (0, sin 45, 0, cos 45)
    half = math.sqrt(0.5)
    assert yaw_of((0.0, half, 0.0, half)) == pytest.approx(math.pi / 2)
    assert yaw_of((0.0, -half, 0.0, -half)) == pytest.approx(math.pi / 2)


def test_point_goal_tells_distance_and_side() -> None:
    assert point_goal(ORIGIN, 0.0, (-3.0, 1.0, -4.0)) == pytest.approx((5.0, math.degrees(math.atan2(3, 4))))
    assert point_goal(ORIGIN, 0.0, (3.0, 0.0, -4.0))[1] == pytest.approx(-math.degrees(math.atan2(3, 4)))
    assert point_goal((1.0, 0.0, 1.0), math.pi / 2, (0.0, 0.0, 1.0)) == pytest.approx((1.0, 0.0))


def test_way_length() -> None:
    assert way_length([ORIGIN, (3.0, 0.0, 0.0), (3.0, 0.0, -4.0)]) == 7.0
    assert way_length([]) == math.inf
    assert way_length([ORIGIN]) == 0.0


def follow(
    yaw: float, corners: list[tuple[float, float, float]], max_actions: int = 50, radius_m: float = 0.2
) -> list[str]:
    """The follower on a way round corners: those behind are dropped as they are reached."""
    left = list(corners)

    def path(at: Place) -> list[Place]:
        while len(left) > 1 and math.dist(tuple(at), left[0]) < 0.3:
            left.pop(0)
        return [at, *left]

    return greedy_actions(
        ORIGIN, yaw, path, lambda start, end: end, radius_m=radius_m, forward_m=0.5, turn=math.radians(30),
        max_actions=max_actions,
    )  # fmt: skip


def test_the_follower_walks_turns_and_stops() -> None:
    assert follow(0.0, [(0.0, 0.0, -1.0)]) == ["forward", "forward", "stop"]
    # 90 degrees to the left are three turns; 2 x 0.5 m
    assert follow(0.0, [(-1.0, 0.0, 0.0)]) == ["left"] * 3 + ["forward"] * 2 + ["stop"]
    # round a corner: 1 m ahead, then 0.5 m to the right
    assert follow(0.0, [(0.0, 0.0, -1.0), (0.5, 0.0, -1.0)]) == ["forward"] * 2 + ["right"] * 3 + ["forward", "stop"]


def test_the_follower_leaves_small_angles_alone_and_keeps_to_its_chunk() -> None:
    for degrees, action in ((14, "forward"), (16, "left")):
        off = math.radians(degrees)
        assert follow(0.0, [(-2 * math.sin(off), 0.0, -2 * math.cos(off))], max_actions=1) == [action]
    assert len(follow(0.0, [(0.0, 0.0, -9.0)], max_actions=4)) == 4


def walk(start: Place, yaw: float, goals: list[Place], radius_m: float) -> bool:
    """Follow the expert in an open plane, in habitat's steps of 0.25 m and turns of 30 degrees; whether it stops there.

    What it does in chunks and one by one is the same, so it is asked for chunks of three.
    """

    def path(here: Place) -> list[Place]:
        return [here, min(goals, key=lambda goal: math.dist(here, goal))]

    at, turn = start, math.radians(30)
    for _ in range(60):
        chunk = greedy_actions(
            at, yaw, path, lambda _, end: end, radius_m=radius_m, forward_m=0.25, turn=turn, max_actions=3
        )
        for action in chunk:
            if action == "stop":
                return min(math.dist(at, goal) for goal in goals) <= radius_m
            yaw += {"left": turn, "right": -turn}.get(action, 0.0)
            at = ahead(at, yaw, 0.25) if action == "forward" else at
    return False


@pytest.mark.parametrize("radius_m", [0.09, 0.18])
@pytest.mark.parametrize("num_views", [1, 8])
def test_the_follower_stops_inside_a_goal_that_is_smaller_than_a_step(radius_m: float, num_views: int) -> None:
    rng = random.Random(num_views)
    angles = [2 * math.pi * view / num_views for view in range(num_views)]
    goals: list[Place] = [(0.9 * math.cos(angle), 0.0, 0.9 * math.sin(angle)) for angle in angles]
    for _ in range(100):
        start = (rng.uniform(-3, 3), 0.0, rng.uniform(-3, 3))
        assert walk(start, rng.uniform(-math.pi, math.pi), goals, radius_m), start


def test_the_follower_stops_where_it_is_or_where_no_way_leads_on() -> None:
    assert follow(0.0, [(0.0, 0.0, -0.1)]) == ["stop"]
    actions = greedy_actions(
        ORIGIN, 0.0, lambda at: [], lambda a, b: b, radius_m=0.2, forward_m=0.5, turn=0.5, max_actions=3
    )
    assert actions == ["stop"]
