from __future__ import annotations

import pytest

from envs.video_env import FrameBuffer
from tests.envs.fake_envs import CountingEnv


def filled(num_frames: int, count: int) -> FrameBuffer[int]:
    buffer: FrameBuffer[int] = FrameBuffer(num_frames)
    for index in range(count):
        buffer.push(index)
    return buffer


def test_frame_buffer_thins_evenly_and_keeps_the_newest() -> None:
    assert filled(4, 12).select() == [2, 5, 8, 11]
    assert filled(4, 4).select() == [0, 1, 2, 3]
    assert filled(4, 6).select() == [1, 2, 4, 5]
    assert filled(1, 7).select() == [6]


def test_frame_buffer_pads_in_front_with_the_earliest() -> None:
    assert filled(4, 1).select() == [0, 0, 0, 0]
    assert filled(4, 3).select() == [0, 0, 1, 2]


def test_frame_buffer_refuses_to_select_from_nothing() -> None:
    buffer = filled(4, 3)
    buffer.clear()
    with pytest.raises(RuntimeError, match="push at least one frame"):
        buffer.select()


def ticks_shown(clip: object) -> list[int]:
    return [int(frame[0, 0, 0]) for frame in clip]  # type: ignore[attr-defined]


def test_clip_holds_the_frames_since_the_last_decision() -> None:
    env = CountingEnv()
    observation, _ = env.reset(seed=3)
    begin = env._first
    assert ticks_shown(observation["clip"]) == [begin] * 4
    observation, *_ = env.step_chunk(("go", "rest", "go", "rest"))  # 12 ticks
    assert ticks_shown(observation["clip"]) == [begin + 3, begin + 6, begin + 9, begin + 12]
    observation, *_ = env.step(0)  # 3 ticks
    assert ticks_shown(observation["clip"]) == [begin + 13, begin + 13, begin + 14, begin + 15]


def test_chunk_sums_rewards_and_ends_with_the_episode() -> None:
    env = CountingEnv()
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step_chunk(("go", "rest", "go"))
    assert (reward, terminated, truncated, info["env_steps"]) == (2.0, False, False, 3)
    _, reward, terminated, _, info = env.step_chunk(("go",) * 7)
    assert (reward, terminated, info["env_steps"], info["success"]) == (3.0, True, 3, True)


def test_empty_chunk_lets_the_world_go_on_for_one_step() -> None:
    env = CountingEnv()
    env.reset(seed=0)
    observation, reward, *_, info = env.step_chunk(())
    assert (reward, info["env_steps"]) == (0.0, 1)
    assert ticks_shown(observation["clip"])[-1] == env._first + 3


def test_wrong_use_is_refused_with_a_remedy() -> None:
    env = CountingEnv()
    with pytest.raises(RuntimeError, match="call reset"):
        env.step(0)
    with pytest.raises(ValueError, match=r"split.*train.*heldout"):
        env.reset(options={"split": "test"})
    with pytest.raises(ValueError, match="drop the others"):
        env.reset(options={"level": 3})
    env.reset(seed=0)
    with pytest.raises(ValueError, match="unknown action 'fly': choose from go, rest"):
        env.step_chunk(("go", "fly"))
    env.step_chunk(("go",) * 5)
    with pytest.raises(RuntimeError, match="the episode is over"):
        env.step(0)
