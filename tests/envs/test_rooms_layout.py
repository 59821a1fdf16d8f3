from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from envs.rooms_layout import Layout, generate_layout, goal_radius, sees, split_of
from envs.rooms_options import CONTACT_M, RoomsOptions, parse_options
from envs.video_env import Split
from tests.envs.worlds import DIVIDER, HALL


def layouts(options: RoomsOptions, split: Split, count: int) -> list[Layout]:
    return [generate_layout(options, split, np.random.default_rng(seed)) for seed in range(count)]


def test_training_and_held_out_layouts_share_none() -> None:
    options = RoomsOptions(num_rooms=1, num_objects=3, room_size=(4, 4))
    train, heldout = layouts(options, "train", 150), layouts(options, "heldout", 150)
    assert {split_of(layout.fingerprint) for layout in train} == {"train"}
    assert {split_of(layout.fingerprint) for layout in heldout} == {"heldout"}
    assert not {layout.fingerprint for layout in train} & {layout.fingerprint for layout in heldout}
    assert len({layout.fingerprint for layout in train}) == 150


def test_fingerprint_is_of_the_world_and_not_of_the_agent() -> None:
    layout = layouts(RoomsOptions(), "train", 1)[0]
    assert replace(layout, start=(1.0, 1.0), heading=2.0).fingerprint == layout.fingerprint
    assert replace(layout, things=layout.things[::-1]).fingerprint != layout.fingerprint


def test_same_seed_draws_the_same_layout() -> None:
    first, second = (layouts(RoomsOptions(num_rooms=3), "train", 1)[0] for _ in range(2))
    assert (first.fingerprint, first.start, first.heading) == (second.fingerprint, second.start, second.heading)


@pytest.mark.parametrize("num_rooms", [1, 2, 3, 4])
def test_layouts_are_solvable_and_leave_space_between_objects(num_rooms: int) -> None:
    options = RoomsOptions(num_rooms=num_rooms, num_objects=4)
    for layout in layouts(options, "train", 25):
        spots = [(thing.x, thing.y) for thing in layout.things]
        away = layout.planner.distance(layout.start, spots[0])
        assert options.min_distance_m + goal_radius(layout.task, options) <= away < math.inf
        assert all(math.dist(layout.start, spot) > CONTACT_M for spot in spots)
        assert all(math.dist(a, b) > 2 * CONTACT_M for i, a in enumerate(spots) for b in spots[:i])


def test_goto_goal_is_named_by_colour_and_shape_alone() -> None:
    for layout in layouts(RoomsOptions(tasks=("goto",), num_objects=6), "train", 20):
        assert len({(thing.shape, thing.color) for thing in layout.things}) == 6


def test_moving_balls_look_alike() -> None:
    for layout in layouts(RoomsOptions(tasks=("moving",)), "train", 20):
        assert len({(thing.shape, thing.color) for thing in layout.things}) == 1
        assert len(layout.route) == 2


def test_goal_in_view_starts_towards_the_goal() -> None:
    options = RoomsOptions(goal_in_view=True, fov_deg=80)
    for layout in layouts(options, "train", 25):
        bearing = math.atan2(layout.goal.y - layout.start[1], layout.goal.x - layout.start[0])
        assert abs(math.remainder(bearing - layout.heading, 2 * math.pi)) < math.radians(40)
        assert sees(layout.walls, layout.start, (layout.goal.x, layout.goal.y))


def test_walls_hide_and_doorways_do_not() -> None:
    walls = np.array(HALL + DIVIDER, dtype=float)
    assert sees(walls, (3.0, 1.5), (5.0, 1.5))
    assert not sees(walls, (3.0, 3.0), (5.0, 3.0))
    assert not sees(walls, (3.0, 1.5), (3.0, 5.0))
    assert sees(walls, (1.0, 0.5), (3.0, 3.5))


def test_too_little_space_is_said_and_not_looped_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envs.rooms_layout._ATTEMPTS", 20)
    options = RoomsOptions(num_rooms=1, num_objects=12, room_size=(3, 3))
    with pytest.raises(ValueError, match=r"num_objects 12.*enlarge the rooms"):
        generate_layout(options, "train", np.random.default_rng(0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fov_degg": 90}, "did you mean fov_deg"),
        ({"num_rooms": 5}, r"num_rooms = 5.*less than or equal to 4"),
        ({"tasks": ["fly"]}, r"tasks.*fly"),
        ({"room_size": [6, 4]}, "shortest side first"),
        ({"motion_ticks": 9}, "motion_ticks 9"),
        ({"num_objects": 5, "colors": ["red"], "tasks": ["goto"]}, "4 different objects"),
    ],
)
def test_bad_options_are_named(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_options(given)


def test_lists_from_yaml_are_taken_for_tuples() -> None:
    assert parse_options({"tasks": ["goto"], "room_size": [4, 5]}).room_size == (4.0, 5.0)
