"""Environments by name, and the fixed lists of episodes that evaluations run.

Simulators are imported when they are asked for, so that a missing one harms nobody else. Knows nothing about processes.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np

from configs.errors import ConfigError
from configs.schema import EnvConfig
from envs.video_env import Split, VideoEnv

ENVS: dict[str, str] = {"rooms": "envs.rooms:RoomsEnv"}
"""Class of each built-in environment. `EnvConfig.id` may also be such a `module.path:ClassName` itself."""


@dataclass(frozen=True)
class Episode:
    """What a reset needs: with the environment's options, it determines the start state."""

    id: str
    """Unique within a manifest or a run."""
    seed: int
    split: Split = "train"


def make_env(config: EnvConfig) -> VideoEnv:
    """The environment `config.id` with `config.options`.

    Raises:
        ConfigError: the id is unknown, its class cannot be imported or is no `VideoEnv`, or it refuses an option.
    """
    env_class = _find_class(config.id)
    try:
        inspect.signature(env_class).bind(**config.options)
    except TypeError as error:
        raise ConfigError(f"env.options {config.options} of env.id {config.id!r}: its constructor: {error}") from error
    try:
        return env_class(**config.options)
    except ValueError as error:
        raise ConfigError(f"env.options {config.options} of env.id {config.id!r}: {error}") from error


def heldout_manifest(config: EnvConfig, count: int, seed: int) -> list[Episode]:
    """The same `count` held-out episodes for the same `seed`, with unique ids and seeds."""
    rng = np.random.default_rng(seed)
    seeds: dict[int, None] = {}  # a set that keeps its order, so that a longer manifest begins with a shorter one
    while len(seeds) < count:
        seeds[int(rng.integers(2**31))] = None
    return [Episode(id=f"{config.id}-heldout-{value:010d}", seed=value, split="heldout") for value in seeds]


def _find_class(env_id: str) -> type[VideoEnv]:
    target = ENVS.get(env_id, env_id)
    module_name, colon, class_name = target.partition(":")
    if not colon:
        near = get_close_matches(env_id, ENVS, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"unknown env.id {env_id!r}: {hint}known: {', '.join(sorted(ENVS))}; or give a class as module.path:Class"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"env.id {env_id!r}: cannot import {module_name!r} ({error}): install or correct it"
        ) from error
    found = getattr(module, class_name, None)
    if found is None:
        raise ConfigError(f"env.id {env_id!r}: {module_name!r} has no {class_name!r}: correct the name after the colon")
    if not (isinstance(found, type) and issubclass(found, VideoEnv)):
        raise ConfigError(f"env.id {env_id!r}: {class_name!r} is no envs.video_env.VideoEnv: derive it from that")
    return found
