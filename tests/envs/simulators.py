"""Which optional simulators this machine can run, asked of a process of its own: a GL that fails may take it along."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

import pytest

_TRIALS = {
    "mujoco": "from envs.mujoco_scene import gl_context; gl_context(16)",
    "miniworld": "from envs.miniworld import MiniWorldEnv; MiniWorldEnv().reset(seed=0)",
    "minigrid": "import minigrid",
    "gymnasium_robotics": "import gymnasium_robotics; from envs.mujoco_scene import gl_context; gl_context(16)",
    "trimesh": "import trimesh",
    "habitat_sim": "import habitat_sim",
}


@cache
def missing(simulator: str) -> str:
    """Why a simulator cannot be used here; empty where it can."""
    trial = subprocess.run([sys.executable, "-c", _TRIALS[simulator]], capture_output=True, text=True, timeout=120)
    last = (trial.stderr.strip().splitlines() or [f"status {trial.returncode}"])[-1]
    return "" if trial.returncode == 0 else f"{simulator} cannot be used here: {last}"


def need(simulator: str) -> None:
    """Skip the calling test where a simulator is missing."""
    if reason := missing(simulator):
        pytest.skip(reason)
