from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from bench.env_rate import measure
from envs.rooms import RoomsEnv
from envs.rooms_layout import Layout, Thing
from tests.envs.worlds import DIVIDER, HALL, world

BALL = Thing("ball", "red", 5.0, 2.0)


def started(layout: Layout, **options: Any) -> RoomsEnv:
    """An environment in a given world, just after its reset."""
    env = RoomsEnv(**options)
    env.reset(seed=0)
    env.frames.clear()
    env.start_in(layout)
    return env


def run_expert(env: RoomsEnv, seed: int, max_actions: int = 3) -> tuple[dict[str, Any], float, int]:
    """Last info, sum of rewards, decisions."""
    env.reset(seed=seed, options={"split": "heldout"})
    total, turns = 0.0, 0
    while True:
        _, reward, terminated, truncated, info = env.step_chunk(env.expert_actions(max_actions))
        total, turns = total + reward, turns + 1
        if terminated or truncated:
            return info, total, turns


@pytest.mark.filterwarnings("ignore:.*alternative render modes.*")
def test_gymnasium_accepts_the_environment() -> None:
    check_env(RoomsEnv())


@pytest.mark.parametrize("task", ["goto", "moving", "follow"])
@pytest.mark.parametrize("num_rooms", [1, 3])
def test_expert_solves_nearly_all_episodes_by_short_ways(task: str, num_rooms: int) -> None:
    env = RoomsEnv(tasks=[task], num_rooms=num_rooms, max_steps=80, image_size=16)
    solved, ratios = 0, []
    for seed in range(100 * (1 + (num_rooms == 1))):
        info, total, _ = run_expert(env, seed)
        assert info["task"] == task
        assert 0 < info["geodesic_m"] < math.inf
        assert 0 <= info["distance_m"] < math.inf
        if info["success"]:
            solved += 1
            ratios.append(info["geodesic_m"] / max(info["geodesic_m"], info["path_length_m"]))
            assert total == pytest.approx(1 + 0.2 * (1 - info["distance_m"] / info["geodesic_m"]))
    assert solved >= 0.99 * (seed + 1)
    assert np.mean(ratios) > 0.75


def test_results_depend_on_seed_and_actions_alone() -> None:
    def play(env: RoomsEnv) -> list[bytes]:
        observation, _ = env.reset(seed=5)
        clips = [observation["clip"].tobytes(), observation["instruction"].encode()]
        for action in (0, 2, 2, 1, 2):
            observation, *_ = env.step(action)
            clips.append(observation["clip"].tobytes())
        return clips

    used = RoomsEnv()
    for seed in range(3):
        run_expert(used, seed)
    assert play(used) == play(RoomsEnv())


def test_seeds_and_splits_give_different_worlds() -> None:
    env = RoomsEnv()
    prints = {
        env.reset(seed=s, options={"split": split})[1]["layout"] for s in range(20) for split in ("train", "heldout")
    }
    assert len(prints) == 40


def test_reaching_the_goal_succeeds_with_the_way_as_told() -> None:
    # 3.9 m ahead, reached at 0.8: 3.1 m to go, 8 steps of 0.4 m.
    env = started(world([BALL], start=(1.1, 2.0)), tasks=["goto"], shaping=0.5)
    assert env.geodesic_distance() == pytest.approx(3.1)
    *_, reward, terminated, _, info = env.step_chunk(("forward",) * 7)
    assert not terminated
    assert info["distance_m"] == pytest.approx(0.3)
    assert reward == pytest.approx(0.5 * 2.8 / 3.1)
    *_, reward, terminated, _, info = env.step_chunk(("forward", "forward"))
    assert (terminated, info["success"], info["env_steps"]) == (True, True, 1)
    assert reward == pytest.approx(1 + 0.5 * 0.3 / 3.1)
    assert info["path_length_m"] == pytest.approx(3.2)
    assert info["geodesic_m"] == pytest.approx(3.1)


def test_a_goal_behind_a_thin_wall_is_not_reached() -> None:
    walls = (*HALL, *DIVIDER)
    env = started(world([Thing("ball", "red", 4.35, 3.0)], walls=walls, start=(3.75, 3.0)), tasks=["goto"])
    *_, terminated, _, info = env.step_chunk(())
    assert (terminated, info["success"]) == (False, False)
    assert info["distance_m"] > 1.5


def test_touching_a_wrong_object_fails_or_only_blocks() -> None:
    layout = world([BALL, Thing("box", "blue", 2.0, 2.0)], start=(1.2, 2.0))
    _, reward, terminated, _, info = started(layout, tasks=["goto"]).step_chunk(("forward",) * 3)
    assert (terminated, info["success"], info["env_steps"]) == (True, False, 1)
    assert reward < 0.2
    env = started(layout, tasks=["goto"], wrong_touch_ends=False)
    *_, terminated, _, info = env.step_chunk(("forward",) * 3)
    assert (terminated, info["env_steps"]) == (False, 3)
    assert env.position[0] == pytest.approx(1.5, abs=0.01)


def test_following_takes_steps_in_a_row() -> None:
    # 1.5 m from the ball; within 1.3 m after one step forward, without again after a step back.
    layout = world([BALL], task="follow", start=(3.5, 2.0))
    there, back = ("forward",), ("left",) * 6 + ("forward",)
    env = started(layout, tasks=["follow"], follow_steps=4, follow_distance_m=1.3)
    *_, terminated, _, info = env.step_chunk(there + ("wait",) * 2)
    assert not terminated  # three near
    *_, terminated, _, info = env.step_chunk(("wait",) * 2)
    assert (terminated, info["success"], info["env_steps"]) == (True, True, 1)
    env = started(layout, tasks=["follow"], follow_steps=8, follow_distance_m=1.3)
    *_, terminated, _, info = env.step_chunk(there + back)
    assert not terminated  # seven near, then away: the count starts again
    *_, terminated, _, info = env.step_chunk(("right",) * 6 + there + ("wait",) * 12)
    assert (terminated, info["success"], info["env_steps"]) == (True, True, 14)


def test_episodes_are_truncated() -> None:
    env = started(world([BALL]), tasks=["goto"], max_steps=5)
    *_, terminated, truncated, info = env.step_chunk(("left",) * 9)
    assert (terminated, truncated, info["env_steps"], info["success"]) == (False, True, 5, False)


def test_only_motion_tells_the_moving_ball() -> None:
    goal, still = Thing("ball", "red", 5.0, 3.0), Thing("ball", "red", 5.0, 1.0)
    route = [(5.0, 3.0), (6.0, 3.0)]
    env = started(world([goal, still], task="moving", route=route, start=(2.0, 2.0)), tasks=["moving"], image_size=64)
    first = env._observe()["clip"]
    standing = env.step_chunk(())[0]["clip"]
    for clip in (first, standing):
        changed = (clip[1:] != clip[:-1]).any(axis=(0, 1, 3))  # by column
        assert changed[:32].any()  # +y is left
        assert not changed[32:].any()
    alone = standing[0]
    mirrored = alone[:, ::-1]
    red = (alone[..., 0] > 90) & (alone[..., 1] < 60)
    assert red[:, :32].any()
    assert red[:, 32:].any()
    assert not np.array_equal(alone, mirrored)


def test_standing_still_never_reaches_a_moving_ball() -> None:
    env = RoomsEnv(tasks=["moving"], num_rooms=1, num_objects=3, ball_speed_m=0.5, max_steps=40, image_size=16)
    for seed in range(40):
        env.reset(seed=seed)
        *_, terminated, truncated, info = env.step_chunk(("left",) * 40)
        assert (terminated, truncated, info["path_length_m"]) == (False, True, 0.0)


def test_agent_moves_in_the_first_ticks_and_then_stands() -> None:
    env = started(world([BALL], start=(1.0, 2.0)), tasks=["goto"], motion_ticks=2, ticks_per_action=4)
    clip = env.step_chunk(("forward",))[0]["clip"]
    assert not np.array_equal(clip[0], clip[1])
    assert np.array_equal(clip[1], clip[2])
    assert np.array_equal(clip[2], clip[3])


def test_waiting_is_an_action_where_something_is_to_be_followed() -> None:
    assert RoomsEnv(tasks=["goto"]).action_names == ("left", "right", "forward")
    assert RoomsEnv(tasks=["goto", "follow"]).action_names == ("left", "right", "forward", "wait")


@pytest.mark.parametrize("wrong_touch_ends", [True, False])
def test_distances_stay_finite_on_random_walks(wrong_touch_ends: bool) -> None:
    env = RoomsEnv(num_rooms=4, num_objects=6, wrong_touch_ends=wrong_touch_ends, image_size=16)
    rng = np.random.default_rng(0)
    for seed in range(25):
        env.reset(seed=seed)
        over = False
        while not over:
            chunk = [env.action_names[int(i)] for i in rng.choice([0, 1, 2, 2, 2, 2], size=4)]
            _, reward, terminated, truncated, info = env.step_chunk(chunk)
            over = terminated or truncated
            assert math.isfinite(info["distance_m"])
            assert math.isfinite(reward)


def test_the_rate_is_measured() -> None:
    rate = measure("rooms", 0.2, num_rooms=1, num_objects=3)
    assert rate["frames_per_s"] == pytest.approx(4 * rate["steps_per_s"])
    assert rate["steps_per_s"] > 100
