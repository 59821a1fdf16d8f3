"""How fast an environment steps on one core. Knows nothing about pools or policies.

python -m bench.env_rate rooms 3 num_rooms=1 num_objects=3
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from configs.schema import EnvConfig
from envs.registration import make_env


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


def main() -> None:
    env_id, seconds, *pairs = sys.argv[1:]
    options = {name: json.loads(value) for name, _, value in (pair.partition("=") for pair in pairs)}
    sys.stdout.write(json.dumps(measure(env_id, float(seconds), **options)) + "\n")


if __name__ == "__main__":
    main()
