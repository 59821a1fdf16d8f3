"""How fast an environment steps: one alone, many in bare processes, many in the pool. Knows nothing about policies.

python -m bench.env_rate rooms 3 num_rooms=1 num_objects=3
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier
from typing import Any

import numpy as np

from configs.schema import EnvConfig
from envs.pool import EnvPool
from envs.registration import Episode, make_env, num_processes


def measure(env_id: str, seconds: float, **options: Any) -> dict[str, Any]:
    """Step with random actions for `seconds`; resets are timed apart. Frames are those that reach observations.

    Returns: steps_per_s, frames_per_s, steps_per_cpu_s (what a core of its own would give, where others use the machine
    too), reset_ms (mean), steps (count), options.
    """
    env = make_env(EnvConfig(id=env_id, options=options))
    rng = np.random.default_rng(0)
    env.reset(seed=0)
    steps, resets, stepping_s, cpu_s, reset_s = 0, 0, 0.0, 0.0, 0.0
    while stepping_s < seconds:
        begun, cpu_begun = time.perf_counter(), time.process_time()
        *_, terminated, truncated, _ = env.step(int(rng.integers(len(env.action_names))))
        stepping_s += time.perf_counter() - begun
        cpu_s += time.process_time() - cpu_begun
        steps += 1
        if terminated or truncated:
            begun = time.perf_counter()
            env.reset()
            reset_s += time.perf_counter() - begun
            resets += 1
    rate = steps / stepping_s
    return {
        "env": env_id,
        "options": options,
        "steps": steps,
        "steps_per_s": rate,
        "steps_per_cpu_s": steps / cpu_s,
        "frames_per_s": rate * env.frames.num_frames,
        "reset_ms": 1e3 * reset_s / max(1, resets),
    }


def measure_bare(config: EnvConfig, seconds: float) -> dict[str, Any]:
    """What the simulator gives without a pool: as many processes, each stepping its share of the environments in turn.

    The same episodes as `measure_pool` plays, with random actions, resets included. Runs in this interpreter.

    Returns: steps_per_s (over all processes).
    """
    spawn = multiprocessing.get_context("spawn")
    count = num_processes(config)
    barrier, rates = spawn.Barrier(count), spawn.SimpleQueue()
    processes = [
        spawn.Process(target=_step_bare, args=(config, range(first, config.num_envs, count), seconds, barrier, rates))
        for first in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError(f"a process that steps env {config.id!r} failed: see its output above")
    return {"steps_per_s": sum(rates.get() for _ in processes)}


def _step_bare(config: EnvConfig, slots: Sequence[int], seconds: float, barrier: Barrier, rates: Any) -> None:
    """Put the steps a second of this process's environments into `rates`."""
    envs = [make_env(config) for _ in slots]
    rng = np.random.default_rng(0)
    seeds, turns, steps = list(slots), [0] * len(envs), 0
    for env, seed in zip(envs, seeds, strict=True):
        env.reset(seed=seed)
    barrier.wait()
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds:
        for index, env in enumerate(envs):
            *_, terminated, truncated, info = env.step(int(rng.integers(len(env.action_names))))
            steps, turns[index] = steps + info["env_steps"], turns[index] + 1
            if terminated or truncated or turns[index] == config.max_turns:
                seeds[index], turns[index] = seeds[index] + config.num_envs, 0
                env.reset(seed=seeds[index])
    rates.put(steps / (time.perf_counter() - begun))


def measure_pool(config: EnvConfig, seconds: float) -> dict[str, Any]:
    """Step all slots of a pool with random actions for `seconds`, each again as soon as its result has come.

    Resets are included.

    Returns: steps_per_s (over all slots), steps (count), num_envs, workers, restarts.
    """
    rng = np.random.default_rng(0)
    seed, steps = 0, 0
    with EnvPool(config) as pool:
        for slot in range(pool.num_envs):
            pool.reset(slot, Episode("bench", seed + slot))
        pool.wait(range(pool.num_envs))
        begun = time.perf_counter()
        for slot in range(pool.num_envs):
            pool.step(slot, [pool.action_names[0]])
        while time.perf_counter() - begun < seconds:
            for result in pool.poll(1.0):
                steps += result.env_steps
                if result.terminated or result.truncated or result.lost:
                    seed += pool.num_envs
                    pool.reset(result.slot, Episode("bench", seed + result.slot))
                else:
                    pool.step(result.slot, [pool.action_names[int(rng.integers(len(pool.action_names)))]])
        rate = steps / (time.perf_counter() - begun)
        restarts = pool.num_restarts
    return {
        "env": config.id,
        "num_envs": config.num_envs,
        "workers": config.workers,
        "steps": steps,
        "steps_per_s": rate,
        "restarts": restarts,
    }


def main() -> None:
    env_id, seconds, *pairs = sys.argv[1:]
    options = {name: json.loads(value) for name, _, value in (pair.partition("=") for pair in pairs)}
    sys.stdout.write(json.dumps(measure(env_id, float(seconds), **options)) + "\n")


if __name__ == "__main__":
    main()
