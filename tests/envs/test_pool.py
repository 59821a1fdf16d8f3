from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.schema import EnvConfig
from envs.pool import EnvError, EnvPool
from envs.registration import Episode, make_env

COUNTING = "tests.envs.fake_envs:CountingEnv"


def counting(num_envs: int = 2, workers: int = 1, step_timeout_s: float = 30.0, **options: Any) -> EnvConfig:
    return EnvConfig(
        id=COUNTING, num_envs=num_envs, workers=workers, step_timeout_s=step_timeout_s, max_turns=9, options=options
    )


def go_thrice(pool: EnvPool, slot: int) -> None:
    for _ in range(3):
        pool.step(slot, ["go"])
        pool.wait([slot])


def test_a_class_is_found_in_the_folder_that_one_starts_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_worlds.py").write_text("from tests.envs.fake_envs import CountingEnv as MyEnv\n")
    monkeypatch.chdir(tmp_path)
    with EnvPool(EnvConfig(id="my_worlds:MyEnv")) as pool:
        assert pool.action_names == ("go", "rest")


def test_slots_give_what_the_environment_alone_gives() -> None:
    config = EnvConfig(num_envs=3, workers=2, options={"num_rooms": 1})
    alone = make_env(config)
    with EnvPool(config, with_expert=True) as pool:
        assert pool.action_names == alone.action_names
        for slot in range(3):
            pool.reset(slot, Episode(f"e{slot}", seed=slot, split="heldout"))
        for slot, result in enumerate(pool.wait(range(3))):
            observation, info = alone.reset(seed=slot, options={"split": "heldout"})
            assert np.array_equal(result.clip, observation["clip"])
            assert (result.instruction, result.info) == (observation["instruction"], info)
            assert result.expert == alone.expert_actions(3)
            pool.step(slot, result.expert)
            (after,) = pool.wait([slot])
            observation, reward, terminated, truncated, info = alone.step_chunk(result.expert)
            assert np.array_equal(after.clip, observation["clip"])
            assert (after.reward, after.terminated, after.truncated) == (reward, terminated, truncated)
            assert (after.info, after.env_steps) == (info, len(result.expert))


def test_a_group_starts_equal_in_all_slots_and_processes() -> None:
    with EnvPool(EnvConfig(num_envs=6, workers=2)) as pool:
        for slot in range(6):
            pool.reset(slot, Episode("same", seed=11))
        results = pool.wait([5, 0, 1, 2, 3, 4])
        assert [result.slot for result in results] == [5, 0, 1, 2, 3, 4]
        assert len({result.frame_hash for result in results}) == 1
        pool.reset(0, Episode("other", seed=12))
        assert pool.wait([0])[0].frame_hash != results[0].frame_hash


def test_clips_are_copies_and_rewards_sums() -> None:
    with EnvPool(counting()) as pool:
        pool.reset(0, Episode("a", seed=1))
        (first,) = pool.wait([0])
        kept = first.clip.copy()
        pool.step(0, ["go", "go", "rest"])
        (second,) = pool.wait([0])
        assert np.array_equal(first.clip, kept)
        assert not np.array_equal(second.clip, kept)
        assert (second.reward, second.env_steps) == (2.0, 3)
        pool.step(0, [])
        (idle,) = pool.wait([0])
        assert (idle.reward, idle.env_steps, idle.expert) == (0.0, 1, ())


def test_poll_hands_out_each_result_once() -> None:
    with EnvPool(counting(num_envs=4, workers=2)) as pool:
        assert pool.poll(5.0) == []  # nothing asked: no waiting
        for slot in range(4):
            pool.reset(slot, Episode("a", seed=slot))
        pool.wait([2])
        seen: list[int] = []
        while len(seen) < 3:
            seen += [result.slot for result in pool.poll(1.0)]
        assert sorted(seen) == [0, 1, 3]
        assert pool.poll(0.0) == []


def test_max_turns_truncates_an_environment_that_never_ends() -> None:
    with EnvPool(counting(length=1000), with_expert=True) as pool:
        pool.reset(0, Episode("a", seed=1))
        pool.wait([0])
        ends = []
        for _ in range(9):
            pool.step(0, ["rest"])
            (result,) = pool.wait([0])
            ends.append(result.truncated)
        assert ends == [False] * 8 + [True]
        assert result.expert == ()


def test_workers_import_no_torch() -> None:
    with EnvPool(counting(workers=2)) as pool:
        for slot in range(2):
            pool.reset(slot, Episode("a", seed=1))
        results = pool.wait([0, 1])
        assert [result.info["has_torch"] for result in results] == [False, False]
        assert len({result.info["pid"] for result in results}) == 2


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("float", r"dtype float64; expected uint8.*\* 255"),
        ("shape", r"shape \(3, 6, 8, 3\); expected \(4, 6, 8, 3\)"),
        ("list", r"type list; expected a numpy array"),
        ("nan", r"reward nan; expected a finite number"),
    ],
)
def test_an_environment_that_breaks_its_contract_is_named(fault: str, message: str) -> None:
    with EnvPool(counting(fault=fault)) as pool:
        pool.reset(1, Episode("rooms-17", seed=17, split="heldout"))
        pool.wait([1])
        with pytest.raises(EnvError, match=f"(?s)CountingEnv.*slot 1, episode 'rooms-17'.*seed 17, heldout.*{message}"):
            go_thrice(pool, 1)


def test_faults_before_the_first_step_are_named() -> None:
    with pytest.raises(EnvError, match=r"(?s)could not be built.*no display"):
        EnvPool(counting(fault="build-raise"))
    with pytest.raises(EnvError, match="unexpected keyword argument 'colour'"):
        EnvPool(counting(colour="red"))
    with pytest.raises(EnvError, match="NoExpertEnv' has no expert"):
        EnvPool(EnvConfig(id="tests.envs.fake_envs:NoExpertEnv"), with_expert=True)
    with pytest.raises(EnvError, match=r"one simulator a process: set env\.workers to env\.num_envs"):
        EnvPool(EnvConfig(id="tests.envs.fake_envs:AloneEnv", num_envs=2))
    with EnvPool(counting(fault="info")) as pool:
        pool.reset(0, Episode("a", seed=3))
        with pytest.raises(EnvError, match="info without task"):
            pool.wait([0])


def test_a_world_with_a_list_of_episodes_says_so() -> None:
    with EnvPool(EnvConfig(id="tests.envs.fake_envs:ListedEnv", num_envs=1)) as pool:
        assert pool.heldout == [(scene, str(number)) for scene in ("attic", "barn") for number in range(3)]


def test_a_long_pause_of_the_owner_is_no_hang() -> None:
    with EnvPool(counting(step_timeout_s=2.0)) as pool:
        for slot in (0, 1):
            pool.reset(slot, Episode("a", seed=slot))
        time.sleep(3.0)
        assert len(pool.wait([0, 1])) == 2


def test_wrong_use_is_refused() -> None:
    pool = EnvPool(counting())
    try:
        with pytest.raises(ValueError, match="slot 7 does not exist"):
            pool.reset(7, Episode("a", seed=1))
        with pytest.raises(ValueError, match="reset it before the first step"):
            pool.step(0, ["go"])
        with pytest.raises(ValueError, match="no command to wait for"):
            pool.wait([0])
        pool.reset(0, Episode("a", seed=1))
        with pytest.raises(ValueError, match="still works"):
            pool.step(0, ["go"])
    finally:
        pool.close()
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.reset(0, Episode("a", seed=1))
