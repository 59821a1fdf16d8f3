"""Tiny models, built once a session, and the policy and observations most tests here start from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from agent.models import resolve_model
from agent.policy import Observation, VLMPolicy
from configs.schema import AgentConfig

ACTIONS = ("forward", "left", "right", "stop", "wait")


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny_model_dir(model_cache: Path) -> Path:
    return resolve_model("tiny:qwen2_5_vl?hidden_size=32&layers=1&vision_depth=1&vision_hidden_size=32", model_cache)


@pytest.fixture(scope="session")
def tiny_qwen3_dir(model_cache: Path) -> Path:
    return resolve_model("tiny:qwen3_vl?hidden_size=32&layers=2&vision_depth=2&vision_hidden_size=32", model_cache)


@pytest.fixture(scope="session")
def make_policy(tiny_model_dir: Path) -> Callable[..., VLMPolicy]:
    """A policy for the tiny model, with these fields of `AgentConfig` changed."""

    def make(**changes: object) -> VLMPolicy:
        return VLMPolicy(AgentConfig(**changes), tiny_model_dir, ACTIONS)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def policy(make_policy: Callable[..., VLMPolicy]) -> VLMPolicy:
    return make_policy()


def random_clip(seed: int, num_frames: int = 4, height: int = 64, width: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8)


@pytest.fixture(scope="session")
def clip() -> Callable[..., np.ndarray]:
    """Noise frames: `clip(seed, num_frames, height, width)`."""
    return random_clip


@pytest.fixture(scope="session")
def observe() -> Callable[..., Observation]:
    """An observation of noise: `observe(seed, instruction, actions)`."""

    def make(seed: int, instruction: str = "go to the red box", actions: tuple[str, ...] = ()) -> Observation:
        return Observation(random_clip(seed), instruction, actions)

    return make
