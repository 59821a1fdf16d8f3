"""MuJoCo's rooms keep the rules of the rooms world; contacts stop the agent, and pictures show what is there."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from configs.schema import EnvConfig
from envs.pool import EnvPool
from envs.registration import Episode
from envs.rooms_layout import Layout, Thing
from tests.envs.simulators import need
from tests.envs.worlds import world

FAR = Thing("box", "blue", 7.0, 3.0)
RED_AHEAD = Thing("pillar", "red", 3.0, 1.0)


@pytest.fixture(autouse=True)
def mujoco() -> None:
    need("mujoco")


def started(layout: Layout, **options: Any) -> Any:
    from envs.mujoco_rooms import MujocoRoomsEnv

    env = MujocoRoomsEnv(**{"image_size": 32, **options})
    env.reset(seed=0)
    env.frames.clear()
    env.start_in(layout)
    return env


def test_the_expert_solves_every_kind_of_task() -> None:
    from envs.mujoco_rooms import MujocoRoomsEnv

    env = MujocoRoomsEnv(image_size=16, clip_frames=1)
    for seed in range(15):
        env.reset(seed=seed, options={"split": "heldout"})
        total, over = 0.0, False
        while not over:
            _, reward, terminated, truncated, info = env.step_chunk(env.expert_actions(3))
            total, over = total + reward, terminated or truncated
        assert info["success"], f"seed {seed}: {info}"
        assert total == pytest.approx(1 + 0.2 * (1 - info["distance_m"] / info["geodesic_m"]))
        assert info["task"] == "follow" or info["path_length_m"] < 1.5 * info["geodesic_m"] + 1


def test_the_same_layout_as_in_the_rooms_world_and_the_same_pictures_twice() -> None:
    from envs.mujoco_rooms import MujocoRoomsEnv
    from envs.rooms import RoomsEnv

    def play(env: Any) -> list[bytes]:
        observation, info = env.reset(seed=4)
        assert info["layout"] == RoomsEnv().reset(seed=4)[1]["layout"]
        clips = [observation["clip"].tobytes()]
        actions = ("left", "forward", "forward", "right", "forward")
        return clips + [env.step_chunk((action,))[0]["clip"].tobytes() for action in actions]

    used = MujocoRoomsEnv()
    used.reset(seed=1)
    used.step_chunk(("forward",))
    assert play(used) == play(MujocoRoomsEnv())


def test_a_step_in_the_open_covers_forward_m() -> None:
    env = started(world([FAR], start=(2.0, 2.0), heading=0.5))
    env.step_chunk(("forward",))
    assert env.position == pytest.approx((2 + 0.4 * math.cos(0.5), 2 + 0.4 * math.sin(0.5)), abs=0.01)


def test_walls_stop_the_agent_and_it_slides_along_them() -> None:
    env = started(world([FAR], start=(1.0, 1.0), heading=math.pi))
    for _ in range(5):
        env.step_chunk(("forward",))
    assert env.position[0] == pytest.approx(0.2, abs=0.02)
    env = started(world([FAR], start=(0.3, 1.0), heading=3 * math.pi / 4))  # up and into the wall at x = 0
    env.step_chunk(("forward", "forward"))
    assert env.position[0] == pytest.approx(0.2, abs=0.02)
    assert env.position[1] > 1.4
    assert math.isfinite(env.geodesic_distance())


def test_no_step_is_so_long_that_it_ends_behind_a_wall() -> None:
    env = started(world([FAR], start=(1.0, 1.0), heading=math.pi), forward_m=1.0, ticks_per_action=1)
    for action in ("forward", "forward", "left", "forward", "forward"):
        env.step_chunk((action,))
    assert env.position[0] == pytest.approx(0.2, abs=0.02)
    assert math.isfinite(env.geodesic_distance())


def test_touching_a_wrong_object_ends_the_episode_without_success() -> None:
    env = started(world([FAR, RED_AHEAD], start=(1.0, 1.0), heading=0.0))
    ends = [env.step_chunk(("forward",))[2:4] for _ in range(4)]
    assert ends == [(False, False)] * 3 + [(True, False)]
    assert not env._info()["success"]
    assert env.position[0] == pytest.approx(2.5, abs=0.02)  # their radii are 0.2 and 0.3


def test_the_goal_is_seen_where_it_is_and_in_its_colour() -> None:
    env = started(world([Thing("pillar", "red", 4.0, 2.0)], start=(1.0, 2.0), heading=0.0), textures=False)
    frame = env._render(env.frames.select())[-1].astype(int)
    is_red = (frame[..., 0] > 120) & (frame[..., 1] < 80) & (frame[..., 2] < 80)
    columns = np.flatnonzero(is_red.any(axis=0))
    assert 14 <= columns.mean() <= 17  # in the middle of 32
    env = started(world([Thing("pillar", "red", 4.0, 3.5)], start=(1.0, 2.0), heading=0.0), textures=False)
    frame = env._render(env.frames.select())[-1].astype(int)
    is_red = (frame[..., 0] > 120) & (frame[..., 1] < 80) & (frame[..., 2] < 80)
    # 26.6 degrees to the left, half a view is 45: at half of the way from the middle to the left edge
    assert np.flatnonzero(is_red.any(axis=0)).mean() == pytest.approx(16 - 16 * 0.5, abs=1.5)


def test_several_share_a_process() -> None:
    config = EnvConfig(id="mujoco_rooms", num_envs=3, workers=1, options={"image_size": 32})
    with EnvPool(config) as pool:
        for slot in range(3):
            pool.reset(slot, Episode("same", seed=3))
        assert len({result.frame_hash for result in pool.wait(range(3))}) == 1
