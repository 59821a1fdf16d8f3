"""Environments by name, and the fixed lists of episodes that evaluations run.

Simulators are imported when they are asked for, so that a missing one harms nobody else. Knows nothing about processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np

from configs.errors import ConfigError
from configs.schema import EnvConfig
from envs import server
from envs.video_env import Split, VideoEnv

ENVS: dict[str, str] = {
    "rooms": "envs.rooms:RoomsEnv",
    "mujoco_rooms": "envs.mujoco_rooms:MujocoRoomsEnv",
    "miniworld": "envs.miniworld:MiniWorldEnv",
    "habitat": "envs.habitat:HabitatEnv",
}
"""Class of each built-in environment. `EnvConfig.id` may also be such a `module.path:ClassName` itself."""
ONE_PER_PROCESS = frozenset({"habitat"})
"""Those that allow one simulator a process."""
GYM = "gym:"
"""Prefix of gymnasium's ids."""


@dataclass(frozen=True)
class Episode:
    """What a reset needs: with the environment's options, it determines the start state."""

    id: str
    """With `scene`, unique within a manifest or a run."""
    seed: int
    """Where the environment has a list of episodes: the place in it."""
    split: Split = "train"
    scene: str = ""
    """Empty where the seed generates the scene."""


def resolve(config: EnvConfig) -> tuple[str, dict[str, Any]]:
    """Class (`module:Class`) and constructor options of an environment.

    Raises:
        ConfigError: the id is unknown.
    """
    if config.id.startswith(GYM):
        if "id" in config.options:
            raise ConfigError(f"env.options.id: env.id {config.id!r} names the environment already: leave one out")
        return "envs.gym_env:GymEnv", {"id": config.id.removeprefix(GYM), **config.options}
    target = ENVS.get(config.id, config.id)
    if ":" not in target:
        near = get_close_matches(config.id, ENVS, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"unknown env.id {config.id!r}: {hint}known: {', '.join(sorted(ENVS))}; or give a gymnasium id as "
            "gym:ID, or a class as module.path:Class"
        )
    return target, config.options


def num_processes(config: EnvConfig) -> int:
    """Processes that an environment's slots are spread over (count)."""
    return config.num_envs if config.id in ONE_PER_PROCESS else min(config.workers, config.num_envs)


def make_env(config: EnvConfig) -> VideoEnv:
    """The environment `config.id` with `config.options`, in this process.

    Raises:
        ConfigError: the id is unknown, its class cannot be imported or is no `VideoEnv`, or it refuses an option.
    """
    target, options = resolve(config)
    try:
        env = server.build(target, options)
    except server.ConfigRefused as error:
        raise ConfigError(f"env.id {config.id!r}: {error}") from error
    assert isinstance(env, VideoEnv)
    return env


def heldout_manifest(config: EnvConfig, count: int, seed: int, listed: Sequence[tuple[str, str]] = ()) -> list[Episode]:
    """The same `count` held-out episodes for the same `seed`, with unique keys (scene and id) and seeds.

    Args:
        listed: scene and id of every held-out episode, where the environment has a list; then at most all of them.
    """
    rng = np.random.default_rng(seed)
    if listed:
        order = rng.permutation(len(listed))[:count]
        return [Episode(listed[place][1], int(place), "heldout", listed[place][0]) for place in order]
    seeds: dict[int, None] = {}  # a set that keeps its order, so that a longer manifest begins with a shorter one
    while len(seeds) < count:
        seeds[int(rng.integers(2**31))] = None
    return [Episode(id=f"{config.id}-heldout-{value:010d}", seed=value, split="heldout") for value in seeds]
