"""Foreign gymnasium environments as clips and words, and those of MiniWorld with their ways."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from configs.errors import ConfigError
from configs.schema import EnvConfig
from envs.frames import resized
from envs.registration import make_env
from tests.envs.simulators import need


class Corridor(gymnasium.Env[Any, Any]):
    """Walk to the seventh place; the picture's brightness tells the place."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    action_space: Any = spaces.Discrete(2)
    observation_space = spaces.Discrete(8)

    def __init__(self, render_mode: str = "", box: bool = False) -> None:
        self.render_mode = render_mode
        if box:
            self.action_space = spaces.Box(-2, 2, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at = int(self.np_random.integers(3))
        self.seeds = seed
        return self.at, {}

    def step(self, action: Any) -> Any:
        self.at = min(max(self.at + int(np.sign(np.ravel(action)[0] - (0.5 if np.isscalar(action) else 0))), 0), 7)
        return self.at, float(self.at == 7), self.at == 7, False, {}

    def render(self) -> Any:
        return np.full((20, 30, 3), self.at * 30, np.uint8)


gymnasium.register("RollplexCorridor-v0", entry_point=Corridor)


gymnasium.register("RollplexSolvedCorridor-v0", entry_point=Corridor, reward_threshold=1.0)


def made(**options: Any) -> Any:
    return make_env(
        EnvConfig(id="gym:RollplexCorridor-v0", options={"image_size": 8, "success_return": 1.0, **options})
    )


def test_a_discrete_world_becomes_clips_and_words() -> None:
    env = made(actions={"back": 0, "on": 1}, instruction="walk {mission}", frame_stride=2, clip_frames=2)
    observation, info = env.reset(seed=1)
    start = env.world.unwrapped.at
    assert observation["clip"].shape == (2, 8, 8, 3)
    assert observation["instruction"] == "walk solve RollplexCorridor-v0"
    assert all(math.isnan(info[key]) for key in ("path_length_m", "geodesic_m", "distance_m"))
    observation, reward, terminated, _, info = env.step_chunk(("on",))
    # one word is two steps of the world, each a frame; two of the frames are shown
    assert observation["clip"][:, 0, 0, 0].tolist() == [(start + 1) * 30, (start + 2) * 30]
    assert (reward, terminated, info["success"]) == (0.0, False, False)
    while not terminated:
        observation, reward, terminated, _, info = env.step_chunk(("on",))
    assert (reward, info["success"]) == (1.0, True)


def test_success_is_what_the_environment_was_registered_with() -> None:
    env = make_env(EnvConfig(id="gym:RollplexSolvedCorridor-v0", options={"image_size": 8}))
    _, info = env.reset(seed=1)
    terminated = False
    while not terminated:
        assert not info["success"]
        *_, terminated, _, info = env.step_chunk(("action1",))
    assert info["success"]
    env = made(success_return=1.5)
    env.reset(seed=1)
    while not env.step_chunk(("action1",))[2]:
        pass
    assert not env._info()["success"]  # it came to its end, which is not enough


def test_an_environment_that_tells_nothing_of_success_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"RollplexCorridor-v0 does not say what a success is.*set success_return"):
        make_env(EnvConfig(id="gym:RollplexCorridor-v0"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_frames": 0}, "clip_frames 0: give 1 or more"),
        ({"frame_stride": -1}, "frame_stride -1: give 1 or more"),
        ({"actions": {"on": 2}}, r"action 'on' is 2, which is not in Discrete\(2\)"),
        ({"noop": 7}, "action 'noop' is 7"),
        ({"instruction": "go {there}"}, "its one field is {mission}"),
        ({"instruction": "go {"}, "its one field is {mission}"),
        ({"id": "CartPole-v1"}, "names the environment already"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(**options)


def test_splits_share_no_seed_and_equal_seeds_are_equal() -> None:
    env = made()
    seeds = {split: set() for split in ("train", "heldout")}  # type: ignore[var-annotated]
    for split, found in seeds.items():
        for seed in range(20):
            env.reset(seed=seed, options={"split": split})
            found.add(env.world.unwrapped.seeds)
    assert len(seeds["train"]) == len(seeds["heldout"]) == 20
    assert all(seed % 2 == 0 for seed in seeds["train"])
    assert all(seed % 2 == 1 for seed in seeds["heldout"])
    env.reset(seed=3)
    first = env.world.unwrapped.seeds
    env.reset(seed=3)
    assert env.world.unwrapped.seeds == first


def test_boxes_get_two_words_a_dimension_and_idle_with_zeros() -> None:
    env = made(kwargs={"box": True}, max_steps=3)
    assert env.action_names == ("x0-up", "x0-down")
    env.reset(seed=1)
    start = env.world.unwrapped.at
    env.step_chunk(("x0-up",))
    assert env.world.unwrapped.at == start + 1
    env.step_chunk(())
    assert env.world.unwrapped.at == start + 1
    assert env.step_chunk(("x0-down",))[3]  # the third of max_steps


def test_what_cannot_be_made_is_named() -> None:
    with pytest.raises(ConfigError, match=r"gymnasium cannot make 'Nowhere-v0'.*rollplex\[sim\]"):
        make_env(EnvConfig(id="gym:Nowhere-v0"))


def test_resized_takes_the_middle_and_means_of_areas() -> None:
    picture = np.zeros((4, 8, 3), np.uint8)
    picture[:, 2:4] = 100  # left half of the middle square
    picture[:, :2] = 255  # cut away
    assert resized(picture, 2)[..., 0].tolist() == [[100, 0], [100, 0]]
    assert resized(picture, 1)[0, 0].tolist() == [50, 50, 50]
    assert resized(picture, 4)[..., 0].tolist() == [[100, 100, 0, 0]] * 4
    # 3 pixels from 4: the middle one covers a third of the second and of the third, each with 2/3 of its area
    assert resized(picture, 3)[0, :, 0].tolist() == [100, 50, 0]


def test_minigrid_speaks_its_mission() -> None:
    need("minigrid")
    env = make_env(EnvConfig(id="gym:MiniGrid-Empty-5x5-v0", options={"image_size": 32}))
    observation, _ = env.reset(seed=0)
    assert observation["instruction"] == "get to the green goal square"
    assert env.action_names[:3] == ("left", "right", "forward")
    for action in ("forward", "forward", "right", "forward", "forward"):  # from one corner of 3 x 3 to the other
        *_, terminated, _, info = env.step_chunk((action,))
    assert terminated
    assert info["success"]


def test_a_robot_with_a_camera() -> None:
    need("gymnasium_robotics")
    env = make_env(EnvConfig(id="gym:FetchReach-v4", options={"image_size": 48, "clip_frames": 2, "frame_stride": 4}))
    observation, info = env.reset(seed=0)
    assert observation["clip"].std() > 5
    assert not info["success"]
    moved, *_ = env.step_chunk(("x2-down", "x2-down"))
    assert (moved["clip"][0] != moved["clip"][1]).any()
    env.close()


def test_miniworld_knows_its_ways_and_has_an_expert() -> None:
    need("miniworld")
    env = make_env(EnvConfig(id="miniworld", options={"image_size": 32, "frame_stride": 2}))
    for seed in range(5):
        _, info = env.reset(seed=seed)
        start_m, over = info["geodesic_m"], False
        while not over:
            before = env.geodesic_distance()
            *_, terminated, truncated, info = env.step_chunk(env.expert_actions(3))
            over = terminated or truncated
            assert env.geodesic_distance() <= before + 1e-6
        assert info["success"]
        assert start_m <= info["path_length_m"] + 0.2 < 1.5 * start_m + 1
    env.close()


def test_a_miniworld_with_walls_in_the_way_has_no_expert() -> None:
    need("miniworld")
    env = make_env(EnvConfig(id="miniworld", options={"id": "MiniWorld-FourRooms-v0"}))
    _, info = env.reset(seed=0)
    assert not env.has_expert
    assert math.isnan(info["geodesic_m"])
    env.close()
