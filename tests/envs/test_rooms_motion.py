from __future__ import annotations

import math

import pytest

from envs.rooms_layout import Thing
from envs.rooms_motion import Route, Walker
from envs.rooms_options import CONTACT_M
from tests.envs.worlds import DIVIDER, HALL, world

FAR = (7.0, 3.5)
GOAL = Thing("box", "red", *FAR)


def test_free_step_goes_straight() -> None:
    step = Walker(world([GOAL])).forward((1.0, 1.0), math.pi / 6, 0.4, FAR)
    assert step[:2] == pytest.approx((1 + 0.4 * math.cos(math.pi / 6), 1.2))
    assert not step.touched_wrong


def test_walls_stop_what_goes_into_them_and_let_the_rest_slide() -> None:
    walker = Walker(world([GOAL], walls=HALL + DIVIDER))
    assert walker.forward((3.7, 3.0), 0.0, 0.4, FAR)[:2] == pytest.approx((3.8, 3.0))
    slid = walker.forward((3.7, 3.0), math.pi / 4, 0.4, FAR)
    assert slid[:2] == pytest.approx((3.8, 3.0 + 0.4 * math.sin(math.pi / 4)))
    assert walker.forward((3.7, 1.5), 0.0, 0.9, FAR)[:2] == pytest.approx((4.6, 1.5))  # through the doorway
    assert walker.forward((3.5, 3.0), 0.0, 0.99, FAR)[0] == pytest.approx(3.8)  # no tunnelling


def test_objects_stop_the_agent_at_contact() -> None:
    walker = Walker(world([GOAL, Thing("cone", "blue", 2.0, 1.0)]))
    step = walker.forward((1.2, 1.0), 0.0, 0.9, FAR)
    assert step.touched_wrong
    assert step.x == pytest.approx(2.0 - CONTACT_M, abs=2e-3)
    onto_goal = walker.forward((1.2, 3.0), 0.0, 0.9, (2.0, 3.0))
    assert not onto_goal.touched_wrong
    assert onto_goal.x == pytest.approx(2.0 - CONTACT_M, abs=2e-3)
    assert walker.forward((1.2, 1.0), math.pi, 0.4, FAR)[:2] == pytest.approx((0.8, 1.0))  # away from it


def test_agent_can_leave_a_ball_that_rolled_onto_it() -> None:
    walker = Walker(world([GOAL]))
    assert walker.forward((1.2, 1.0), 0.0, 0.4, (1.1, 1.0))[:2] == pytest.approx((1.6, 1.0))
    assert walker.forward((1.2, 1.0), math.pi, 0.4, (1.1, 1.0))[:2] == pytest.approx((1.2, 1.0))


def test_route_goes_to_and_fro_at_one_speed() -> None:
    route = Route([(0.0, 0.0), (3.0, 0.0), (3.0, 1.0)])
    assert route.at(0.0) == (0.0, 0.0)
    assert route.at(2.0) == pytest.approx((2.0, 0.0))
    assert route.at(3.5) == pytest.approx((3.0, 0.5))
    assert route.at(4.5) == pytest.approx((3.0, 0.5))  # 0.5 m back from the end
    assert route.at(8.0) == pytest.approx((0.0, 0.0))
    assert route.at(-1.0) == pytest.approx((1.0, 0.0))
    assert Route([(1.0, 2.0)]).at(7.0) == (1.0, 2.0)


def test_a_step_does_not_cut_the_corner_of_a_wall() -> None:
    # The divider's lower part ends at y = 1, its corner grown to (3.8, 1.2): the straight way would pass inside.
    walker = Walker(world([GOAL], walls=HALL + DIVIDER))
    step = walker.forward((3.7, 1.05), math.atan2(0.2, 0.3), 0.99, FAR)
    assert step.x == pytest.approx(3.8)  # hits the upright face and slides up
    assert step.length_m == pytest.approx(math.hypot(0.1, 0.2 / 3) + step.y - 1.05 - 0.2 / 3)
