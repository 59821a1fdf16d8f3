from __future__ import annotations

import math

import numpy as np
import pytest

from envs.rooms_layout import Layout, Thing
from envs.rooms_render import Moment, Renderer
from tests.envs.worlds import DIVIDER, HALL, world

SIZE = 64
RED = Thing("box", "red", 6.0, 3.0)


def picture(layout: Layout, x: float, y: float, heading: float, textures: bool = False) -> np.ndarray:
    renderer = Renderer(SIZE, 90.0, textures)
    renderer.load(layout)
    return renderer.render([Moment(x, y, heading, *layout.route[0])])[0]


def reds(image: np.ndarray) -> np.ndarray:
    red, green, blue = (image[..., channel].astype(int) for channel in range(3))
    return (red > 90) & (green < red // 2) & (blue < red // 2)


def test_an_object_is_as_wide_and_stands_where_perspective_says() -> None:
    # 2 m ahead with 90 degrees of view, a metre is 32 / 2 = 16 pixels: the box is 9.6 wide, its foot 16 below centre.
    mask = reds(picture(world([RED]), 4.0, 3.0, 0.0))
    columns, rows = np.flatnonzero(mask.any(axis=0)), np.flatnonzero(mask.any(axis=1))
    assert (columns[0], columns[-1]) == (27, 36)  # 32 -/+ 4.8
    assert rows[-1] == 47
    assert rows[0] == 38  # 0.6 m high: top is 0.4 m below the eye, 6.4 pixels


def test_a_wall_is_as_high_as_perspective_says() -> None:
    # 4 m from the wall at x = 8: 8 pixels a metre; 1.2 m above the eye, 1.0 m below it.
    column = picture(world([Thing("box", "red", 1.0, 1.0)]), 4.0, 2.0, 0.0)[:, 32]
    wall = np.flatnonzero((column == column[32]).all(axis=1))
    assert (wall[0], wall[-1]) == (22, 39)


def test_left_is_left() -> None:
    # Looking along +x, +y is to the left.
    columns = np.flatnonzero(reds(picture(world([RED]), 4.0, 2.0, 0.0)).any(axis=0))
    assert columns[-1] < 32
    turned_left = np.flatnonzero(reds(picture(world([RED]), 4.0, 2.0, math.radians(30))).any(axis=0))
    assert turned_left.mean() > columns.mean()


def test_a_wall_hides_what_is_behind_it() -> None:
    assert reds(picture(world([RED]), 2.0, 3.0, 0.0)).any()
    assert not reds(picture(world([RED], walls=HALL + DIVIDER), 2.0, 3.0, 0.0)).any()


def test_the_edge_of_a_doorway_cuts_an_object_in_two() -> None:
    # From (2, 2) towards (6, 2), the divider's edge at (4, 2) is straight ahead: the left half is hidden.
    layout = world([Thing("box", "red", 6.0, 2.0)], walls=HALL + DIVIDER)
    whole = np.flatnonzero(reds(picture(world([layout.goal]), 2.0, 2.0, 0.0)).any(axis=0))
    half = np.flatnonzero(reds(picture(layout, 2.0, 2.0, 0.0)).any(axis=0))
    assert half.tolist() == [column for column in whole if column >= 32]
    assert 0 < len(half) < len(whole)


def test_the_nearer_object_is_in_front() -> None:
    near_blue = world([Thing("pillar", "red", 6.0, 2.0), Thing("box", "blue", 4.0, 2.0)])
    near_red = world([Thing("pillar", "red", 4.0, 2.0), Thing("box", "blue", 6.0, 2.0)])
    at_feet = (slice(42, 44), slice(31, 33))  # the near box or the near pillar covers these
    assert not reds(picture(near_blue, 2.0, 2.0, 0.0))[at_feet].any()
    assert reds(picture(near_red, 2.0, 2.0, 0.0))[at_feet].all()


def test_frames_of_a_clip_equal_frames_drawn_alone() -> None:
    layout = world([Thing("ball", "green", 5.0, 2.0), RED], walls=HALL + DIVIDER)
    moments = [
        Moment(1.0, 1.0, 0.1, 5.0, 2.0),
        Moment(1.0, 1.0, 0.1, 5.2, 1.8),
        Moment(1.4, 1.1, 0.1, 5.2, 1.8),
        Moment(1.4, 1.1, 0.1, 5.2, 1.8),
    ]
    renderer = Renderer(SIZE, 90.0, True)
    renderer.load(layout)
    clip = renderer.render(moments)
    alone = np.stack([renderer.render([moment])[0] for moment in moments])
    assert np.array_equal(clip, alone)


@pytest.mark.parametrize("heading", [0.0, math.pi / 2, math.pi, -math.pi / 2])
def test_looking_along_an_axis_is_fine(heading: float) -> None:
    image = picture(world([RED]), 3.0, 2.0, heading, textures=True)
    assert image.dtype == np.uint8
    assert len(np.unique(image.reshape(-1, 3), axis=0)) > 10
