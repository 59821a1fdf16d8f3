"""The four schedules side by side on identical work: the same prompts, the same sampled tokens, forced lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bench.gradient import distance
from bench.steps import Step, Work, medians, opened, response_lengths, run_step
from configs.schema import RunConfig

ARMS = ("unshared", "serial", "overlapped", "streamed")
CLIP = (8, 112, 112)
"""Frames, height and width of a synthetic clip."""


def compare(
    config: RunConfig, repeats: int = 3, arms: Sequence[str] = ARMS, clip: Sequence[int] = CLIP
) -> dict[str, Any]:
    """Run schedules `repeats` times each after one warm-up; medians of seconds, and the gradient's distance.

    Returns:
        `arms.<schedule>`: `step_s` and each `<phase>_phase_s` of it; `train_s` (reference and actor, wherever they
        ran), `train_tokens`, `naive_tokens`, `peak_bytes`, `hidden_s`, `grad_rel_err` (to the first arm).
    """
    results: dict[str, dict[str, float]] = {}
    gradients: dict[str, torch.Tensor] = {}
    with opened(config, clip) as (runtime, prompts):
        work = Work(prompts, response_lengths(config, long_tail=False))
        for arm in arms:
            runtime.use_schedule(arm)

            def keep_gradient(arm: str = arm) -> None:
                gradients[arm] = runtime.trainer.gradients.flat.to("cpu", copy=True)

            run_step(runtime, work, inspect=keep_gradient)
            results[arm] = medians([_numbers(run_step(runtime, work)) for _ in range(repeats)])
            results[arm]["grad_rel_err"] = distance(gradients[arm], gradients[arms[0]])["grad_rel_err"]
    shape = {
        "groups": config.rl.groups_per_step,
        "group_size": config.rl.group_size,
        "prompt_tokens": len(prompts[0].token_ids),
        "response_tokens": config.rollout.max_tokens,
    }
    return {"shape": shape, "arms": results}


def table(result: dict[str, Any]) -> str:
    """The result as text, a row an arm."""
    columns = list(next(iter(result["arms"].values())))
    rows = [["schedule", *columns]]
    rows += [[arm, *(f"{values[name]:.4g}" for name in columns)] for arm, values in result["arms"].items()]
    return "\n".join([", ".join(f"{key} {value}" for key, value in result["shape"].items()), *aligned(rows)])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, columns flush right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _numbers(step: Step) -> dict[str, float]:
    stats = step.stats
    return {
        "step_s": sum(step.phase_s.values()),
        **{f"{phase}_phase_s": seconds for phase, seconds in step.phase_s.items()},
        "train_s": sum(value for name, value in stats.items() if name.startswith("time/job_")),
        "train_tokens": stats["tokens/trained"],
        "naive_tokens": stats["tokens/naive"],
        "peak_bytes": stats["hbm/peak_bytes"],
        "hidden_s": stats["window/hidden_s"],
    }
