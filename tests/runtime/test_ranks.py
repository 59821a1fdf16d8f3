"""Two processes make the update that one makes of the same global batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from agent.models import resolve_model
from configs.errors import UserError
from configs.schema import RLConfig, RolloutConfig, RunConfig, TrainConfig
from runtime.rollplex import Rollplex
from tests.processes import fresh_environment
from tests.runtime.support import load_tiny, vocabulary_of

SCRIPT = Path(__file__).with_name("train_recorded.py")
BIN = Path(sys.executable).parent
LAUNCHERS = {
    "one": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29761"],
    "deepspeed": [sys.executable, str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", "29762"],
}


def train_recorded(launcher: str, cache: Path, out: Path, groups: int, stage: int = 2, *more: str) -> dict[str, Any]:
    command = [*LAUNCHERS[launcher], str(SCRIPT), "--cache", str(cache), "--out", str(out), "--groups", str(groups)]
    environment = fresh_environment() | {"PATH": f"{BIN}:{os.environ['PATH']}", "MASTER_ADDR": "127.0.0.1"}
    result = subprocess.run(
        [*command, "--stage", str(stage), *more], env=environment, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return torch.load(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "groups", "stage"),
    [("torchrun", 2, 2), ("torchrun", 1, 2), ("torchrun", 3, 3), ("deepspeed", 2, 2)],
    ids=["even", "a rank without a group", "zero 3", "deepspeed"],
)
def test_two_ranks_make_the_update_of_one(
    model_cache: Path, tmp_path: Path, launcher: str, groups: int, stage: int
) -> None:
    one = train_recorded("one", model_cache, tmp_path / "one.pt", groups)
    two = train_recorded(launcher, model_cache, tmp_path / "two.pt", groups, stage)
    for name, tensor in one["weights"].items():
        assert float((two["weights"][name] - tensor).abs().max()) <= 1e-6, name
    for name in ("train/grad_norm", "tokens/trained", "tokens/naive"):
        assert two["stats"][name] == pytest.approx(one["stats"][name], rel=1e-5, abs=1e-8), name
    # Of terms of order 1, advantages that add up to 0, float32 leaves this much.
    assert two["stats"]["train/loss"] == pytest.approx(one["stats"]["train/loss"], rel=1e-5, abs=1e-7)
    # k3 of a small difference is what cancellation leaves of it.
    assert two["stats"]["train/kl_sum"] == pytest.approx(one["stats"]["train/kl_sum"], rel=1e-3)


@pytest.mark.slow
def test_one_rank_takes_over_the_weights_of_two_but_not_their_run(model_cache: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    # In passing: one rank has nothing to decode, which vLLM's start on the other must not wait for.
    two = train_recorded("torchrun", model_cache, tmp_path / "two.pt", 2, 2, "--save", str(saved), "--decode")
    config = RunConfig(
        rl=RLConfig(kl_coef=0.1), train=TrainConfig(vision_tower="trained"), rollout=RolloutConfig(max_tokens=8)
    )
    folder = resolve_model("tiny:qwen2_5_vl", model_cache)
    with Rollplex(config, folder, vocabulary_of(load_tiny(model_cache, torch.float32))) as runtime:
        runtime.load(saved, weights_only=True)
        for name, parameter in runtime.actor.model.named_parameters():
            assert torch.equal(parameter, two["weights"][name]), name
        with pytest.raises(UserError, match="was saved by 2 ranks and this run has 1: start it with torchrun"):
            runtime.load(saved)


@pytest.mark.slow
def test_the_group_is_left_before_the_interpreter_ends() -> None:
    """Gloo's threads may hold tensors; to drop one while Python is torn down aborts the process, now and then."""
    program = """
import atexit, torch
atexit.register(lambda: print("still a member:", torch.distributed.is_initialized()))  # runs last
from runtime.deepspeed_engine import init_distributed
init_distributed()
"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=SCRIPT.parents[2], env=fresh_environment(), capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "still a member: False"
