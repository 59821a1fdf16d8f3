"""One optimizer step on identical seeded work: the same prompts, the same seeds, forced lengths, a learning rate of 0.

What the benchmarks that compare ways of doing a step have in common. Knows nothing of what they compare.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from agent.models import resolve_model
from agent.policy import Observation, VLMPolicy
from configs.schema import RunConfig
from data.types import Group, Prompt, Rollout, Sampling, Turn, TurnKey
from rl.losses import Scale, policy_loss
from runtime.rollplex import Rollplex

INSTRUCTION = "say what moves in the video, then what it does next, and where it will be when the clip has ended"
PHASES = ("rollout", "score", "train", "optimizer", "publish")
LONG_TAIL = (64, 2048)
"""Shortest and longest of the long-tailed responses (tokens)."""
LONG_TAIL_MEAN = 256
LONG_TAIL_SPREAD = 1.0
"""Standard deviation of the logarithm of a length, before clipping."""


@dataclass(frozen=True)
class Work:
    """What every step does."""

    prompts: Sequence[Prompt]
    """One a group."""
    lengths: Sequence[Sequence[int]]
    """Tokens of each response: `lengths[group][rollout]`."""


def response_lengths(config: RunConfig, *, long_tail: bool) -> list[list[int]]:
    """Tokens of each response, by group."""
    groups, size = config.rl.groups_per_step, config.rl.group_size
    if not long_tail:
        return [[config.rollout.max_tokens] * size] * groups
    flat = long_tail_lengths(groups * size, config.seed)
    return [flat[start : start + size] for start in range(0, len(flat), size)]


def long_tail_lengths(count: int, seed: int) -> list[int]:
    """Lognormal lengths, clipped to `LONG_TAIL`; their median is what gives this sample a mean of `LONG_TAIL_MEAN`."""
    normals = np.random.default_rng(seed).standard_normal(count)

    def lengths(log_median: float) -> np.ndarray:
        return np.exp(log_median + LONG_TAIL_SPREAD * normals).round().clip(*LONG_TAIL).astype(int)

    low, high = 0.0, float(np.log(LONG_TAIL[1]))
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if lengths(middle).mean() < LONG_TAIL_MEAN else (low, middle)
    return [int(length) for length in lengths(high)]


@dataclass(frozen=True)
class Step:
    """Where the time of a step went, and what the runtime counted."""

    phase_s: dict[str, float]
    """Seconds by phase, in order; their sum is the step. What a schedule moves into the window leaves its phase."""
    group_ended_s: dict[int, float]
    """When each group's last response ended, since the step began (s)."""
    job_s: dict[str, float]
    """Job time by `place/kind`, as in `runtime.window.WindowStats.seconds` (s)."""
    stats: dict[str, float]
    """`Rollplex.stats()`."""


def medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Median of each number over steps; where a step lacks one it is 0."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}


@contextmanager
def opened(config: RunConfig, clip: Sequence[int]) -> Iterator[tuple[Rollplex, list[Prompt]]]:
    """A runtime that never falls back to another schedule, and a prompt for each group.

    Args:
        clip: frames, height and width of the synthetic clips.
    """
    config = replace(config, runtime=replace(config.runtime, fallback=False))
    with tempfile.TemporaryDirectory() as cache:
        model_dir = resolve_model(config.model.path, Path(cache))
        policy = VLMPolicy(config.agent, model_dir, ("left", "right", "forward"))
        prompts = _prompts(config, policy, clip)
        with Rollplex(config, model_dir, policy.vocabulary) as runtime:
            yield runtime, prompts


def _prompts(config: RunConfig, policy: VLMPolicy, clip: Sequence[int]) -> list[Prompt]:
    generator = np.random.default_rng(config.seed)
    clips = generator.integers(0, 255, (config.rl.groups_per_step, *clip, 3), dtype=np.uint8)
    return policy.render([[Observation(clip, INSTRUCTION)] for clip in clips])


def run_step(
    runtime: Rollplex,
    work: Work,
    *,
    register: Callable[[Group], Group | None] = lambda group: group,
    inspect: Callable[[], None] = lambda: None,
    after_phase: Callable[[], None] = lambda: None,
) -> Step:
    """Roll out and train, timed; the weights stay what they are.

    Args:
        register: given a group that has been sampled, the one to train on; None trains on none.
        inspect: called when all gradients are summed, before the optimizer has them; its time counts nowhere.
        after_phase: called after the rollout, the gradients and the update.
    """
    ended: dict[int, float] = {}

    def finish_group(group: Group) -> None:
        ended[group.index] = time.perf_counter() - start
        if chosen := register(group):
            runtime.train_on(chosen, policy_loss(runtime.config.rl, chosen, Scale(1)))

    start = time.perf_counter()
    roll_out(runtime, work, finish_group)
    rolled_out = time.perf_counter()  # the last tokens are on the host, so that decoding is over on the device too
    after_phase()
    runtime.finish_gradients()
    trained = _now()
    after_phase()
    inspect()
    resumed = _now()
    runtime.update(0.0)
    updated = _now()
    after_phase()
    stats = runtime.stats()
    score_s = sum(seconds for name, seconds in runtime.job_seconds.items() if name.startswith("after/reference"))
    phases = (
        rolled_out - start,
        score_s,
        trained - rolled_out - score_s,
        updated - resumed - stats["time/publish_s"],
        stats["time/publish_s"],
    )
    return Step(dict(zip(PHASES, phases, strict=True)), ended, dict(runtime.job_seconds), stats)


def _now() -> float:
    """Host time at which the device has done all it was given (s)."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def roll_out(runtime: Rollplex, work: Work, finished: Callable[[Group], None]) -> None:
    """Sample every group's responses, seeded; hand over each group as its last response ends."""
    turns: dict[int, dict[int, Turn]] = {index: {} for index in range(len(work.prompts))}
    for index, (prompt, lengths) in enumerate(zip(work.prompts, work.lengths, strict=True)):
        for rollout, length in enumerate(lengths):
            seed = index * len(lengths) + rollout
            sampling = Sampling(length, runtime.config.rollout.temperature, seed=seed, min_tokens=length)
            runtime.submit(TurnKey(index, rollout, 0), prompt, sampling)
            runtime.end_rollout(index, rollout)
    while runtime.has_unfinished():
        for key, response in runtime.poll():
            turns[key.group][key.rollout] = Turn(work.prompts[key.group], response)
            if len(turns[key.group]) == len(work.lengths[key.group]):
                finished(_group(key.group, turns[key.group]))


def _group(index: int, turns: dict[int, Turn]) -> Group:
    rollouts = [Rollout(str(index), (turns[i],), float(i % 3), success=False, truncated=False) for i in sorted(turns)]
    return Group(index, tuple(rollouts))
