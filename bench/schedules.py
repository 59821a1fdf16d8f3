"""The four schedules side by side on identical work: the same prompts, the same sampled tokens, forced lengths."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agent.models import resolve_model
from agent.policy import Observation, VLMPolicy
from configs.schema import RunConfig
from data.types import Group, Prompt, Rollout, Sampling, Turn, TurnKey
from rl.losses import Scale, policy_loss
from runtime.rollplex import Rollplex

ARMS = ("unshared", "serial", "overlapped", "streamed")
CLIP = (8, 112, 112)
"""Frames, height and width of a synthetic clip."""
INSTRUCTION = "say what moves in the video, then what it does next, and where it will be when the clip has ended"


def compare(
    config: RunConfig, repeats: int = 3, arms: Sequence[str] = ARMS, clip: Sequence[int] = CLIP
) -> dict[str, Any]:
    """Run schedules `repeats` times each after one warm-up; medians of seconds, and the gradient's distance.

    Returns:
        `arms.<schedule>`: `step_s`, `rollout_s`, `train_s` (reference and actor, wherever they ran), `train_tokens`,
        `naive_tokens`, `peak_bytes`, `hidden_s`, `grad_rel_err` (to the first arm).
    """
    with tempfile.TemporaryDirectory() as cache:
        model_dir = resolve_model(config.model.path, Path(cache))
        policy = VLMPolicy(config.agent, model_dir, ("left", "right", "forward"))
        prompts = _prompts(config, policy, clip)
        results: dict[str, dict[str, float]] = {}
        gradients: dict[str, torch.Tensor] = {}
        with Rollplex(
            replace(config, runtime=replace(config.runtime, fallback=False)), model_dir, policy.vocabulary
        ) as runtime:
            for arm in arms:
                runtime.use_schedule(arm)
                steps = [_step(runtime, prompts) for _ in range(repeats + 1)]
                gradients[arm] = steps[0][1]
                results[arm] = _medians([numbers for numbers, _ in steps[1:]])
                error = (gradients[arm] - gradients[arms[0]]).norm() / gradients[arms[0]].norm()
                results[arm]["grad_rel_err"] = float(error)
    return {"shape": _shape(config, prompts), "arms": results}


def table(result: dict[str, Any]) -> str:
    """The result as text, a row a schedule."""
    columns = list(next(iter(result["arms"].values())))
    rows = [["schedule", *columns]]
    rows += [[arm, *(f"{values[name]:.4g}" for name in columns)] for arm, values in result["arms"].items()]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([", ".join(f"{key} {value}" for key, value in result["shape"].items()), *lines])


def _shape(config: RunConfig, prompts: list[Prompt]) -> dict[str, int]:
    return {
        "groups": config.rl.groups_per_step,
        "group_size": config.rl.group_size,
        "prompt_tokens": len(prompts[0].token_ids),
        "response_tokens": config.rollout.max_tokens,
    }


def _prompts(config: RunConfig, policy: VLMPolicy, clip: Sequence[int]) -> list[Prompt]:
    generator = np.random.default_rng(config.seed)
    clips = generator.integers(0, 255, (config.rl.groups_per_step, *clip, 3), dtype=np.uint8)
    return policy.render([[Observation(clip, INSTRUCTION)] for clip in clips])


def _step(runtime: Rollplex, prompts: list[Prompt]) -> tuple[dict[str, float], torch.Tensor]:
    """One optimizer step at a learning rate of 0, so that all arms have the same weights; its numbers and gradient."""
    config = runtime.config
    start = time.perf_counter()
    _roll_out(runtime, prompts, lambda group: runtime.train_on(group, policy_loss(config.rl, group, Scale(1))))
    rollout_s = time.perf_counter() - start
    runtime.finish_gradients()
    gradient = runtime.trainer.gradients.flat.to("cpu", copy=True)
    runtime.update(0.0)
    stats = runtime.stats()
    numbers = {
        "step_s": time.perf_counter() - start,
        "rollout_s": rollout_s,
        "train_s": sum(value for name, value in stats.items() if name.startswith("time/job_")),
        "train_tokens": stats["tokens/trained"],
        "naive_tokens": stats["tokens/naive"],
        "peak_bytes": stats["hbm/peak_bytes"],
        "hidden_s": stats["window/hidden_s"],
    }
    return numbers, gradient


def _roll_out(runtime: Rollplex, prompts: list[Prompt], finished: Callable[[Group], None]) -> None:
    """Sample every group's responses, seeded; hand over each group as its last response ends."""
    size, length = runtime.config.rl.group_size, runtime.config.rollout.max_tokens
    turns: dict[int, dict[int, Turn]] = {index: {} for index in range(len(prompts))}
    for index, prompt in enumerate(prompts):
        for rollout in range(size):
            seed = index * size + rollout
            sampling = Sampling(length, runtime.config.rollout.temperature, seed=seed, min_tokens=length)
            runtime.submit(TurnKey(index, rollout, 0), prompt, sampling)
            runtime.end_rollout(index, rollout)
    while runtime.has_unfinished():
        for key, response in runtime.poll():
            turns[key.group][key.rollout] = Turn(prompts[key.group], response)
            if len(turns[key.group]) == size:
                finished(_group(key.group, turns[key.group]))


def _group(index: int, turns: dict[int, Turn]) -> Group:
    rollouts = [Rollout(str(index), (turns[i],), float(i % 3), success=False, truncated=False) for i in sorted(turns)]
    return Group(index, tuple(rollouts))


def _medians(steps: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(step[name] for step in steps) for name in steps[0]}
