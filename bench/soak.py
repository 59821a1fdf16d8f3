"""Thousands of episodes of the rooms world whose processes crash, hang and dawdle by chance: what is lost, what grows.

python -m bench.soak 10000
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema import EnvConfig
from envs.pool import EnvPool, EnvResult
from envs.registration import Episode
from envs.rooms import RoomsEnv

HANG_S = 3600.0
STEP_TIMEOUT_S = 2.0


class FaultyRoomsEnv(RoomsEnv):
    """`RoomsEnv` with faults drawn anew at each primitive step, from the machine's randomness: no replay repeats them.

    Args:
        crash, hang, slow: share of primitive steps at which the process dies, sleeps for ever, or for 20 ms.
        options: those of `RoomsEnv`.
    """

    def __init__(self, crash: float, hang: float, slow: float, **options: Any) -> None:
        super().__init__(**options)
        self._crash, self._hang, self._slow = crash, hang, slow

    def _act(self, action: str | None) -> bool:
        coin = int.from_bytes(os.urandom(6), "big") / (1 << 48)
        if coin < self._crash:
            os._exit(11)
        elif coin < self._crash + self._hang:
            time.sleep(HANG_S)
        elif coin < self._crash + self._hang + self._slow:
            time.sleep(0.02)
        return super()._act(action)


def soak(
    episodes: int, *, num_envs: int = 8, workers: int = 2, crash: float = 3e-4, hang: float = 2e-5
) -> dict[str, Any]:
    """Play `episodes` with actions that the seed decides; a lost one is noted and the slot goes on.

    Returns: episodes (count), finished, lost, restarts, steps; rss_mib (of this process, every tenth of the way),
    worker_rss_mib (largest at the end), open_files (at the first tenth and at the end), wrong_starts (episodes whose
    first frames differ from those of an undisturbed environment, of every hundredth), seconds.
    """
    options = {"num_rooms": 1, "num_objects": 3, "image_size": 32, "clip_frames": 2, "max_steps": 20}
    faults = {"crash": crash, "hang": hang, "slow": 1e-3}
    config = EnvConfig(
        id="bench.soak:FaultyRoomsEnv",
        num_envs=num_envs,
        workers=workers,
        max_turns=20,
        step_timeout_s=STEP_TIMEOUT_S,
        options=faults | options,
    )
    begun = time.monotonic()
    with EnvPool(config) as pool:
        tally = _Tally(pool, episodes)
        for slot in range(num_envs):
            tally.begin(slot)
        while tally.playing:
            for result in pool.poll(1.0):
                tally.take(result)
        report = tally.report()
        report["worker_rss_mib"] = max(_rss_mib(worker.process.pid) for worker in pool._workers if worker.process)
        report["restarts"] = pool.num_restarts
    report["wrong_starts"] = tally.wrong_starts(RoomsEnv(**options))
    return report | {"seconds": time.monotonic() - begun}


class _Tally:
    """Which episodes have begun and what became of each; every seed is played once."""

    def __init__(self, pool: EnvPool, episodes: int) -> None:
        self.pool, self.episodes = pool, episodes
        self.playing: dict[int, int] = {}
        self.outcome: dict[int, str] = {}
        self.starts: dict[int, bytes] = {}
        self.steps = 0
        self.rss: list[float] = []
        self.files: list[int] = []
        self._next = 0
        self._rng: dict[int, np.random.Generator] = {}

    def begin(self, slot: int) -> None:
        if self._next >= self.episodes:
            return
        seed = self._next
        self._next += 1
        self.playing[slot], self._rng[slot] = seed, np.random.default_rng(seed)
        self.pool.reset(slot, Episode(f"soak-{seed}", seed))

    def take(self, result: EnvResult) -> None:
        slot, seed = result.slot, self.playing[result.slot]
        self.steps += result.env_steps
        if result.env_steps == 0 and not result.lost and seed % 100 == 0:
            self.starts[seed] = result.clip.tobytes()
        if not (result.lost or result.terminated or result.truncated):
            action = self.pool.action_names[int(self._rng[slot].integers(len(self.pool.action_names)))]
            self.pool.step(slot, [action])
            return
        assert seed not in self.outcome, f"episode {seed} ended twice"
        self.outcome[seed] = "lost" if result.lost else "finished"
        del self.playing[slot], self._rng[slot]
        if len(self.outcome) % max(1, self.episodes // 10) == 0:
            self.rss.append(_rss_mib(os.getpid()))
            self.files.append(len(os.listdir("/proc/self/fd")))
        self.begin(slot)

    def wrong_starts(self, undisturbed: RoomsEnv) -> int:
        """Of the starts kept, those that are not what the seed says (count)."""
        return sum(undisturbed.reset(seed=seed)[0]["clip"].tobytes() != clip for seed, clip in self.starts.items())

    def report(self) -> dict[str, Any]:
        outcomes = list(self.outcome.values())
        return {
            "episodes": len(outcomes),
            "finished": outcomes.count("finished"),
            "lost": outcomes.count("lost"),
            "steps": self.steps,
            "rss_mib": self.rss,
            "open_files": [self.files[0], self.files[-1]],
        }


def _rss_mib(pid: int) -> float:
    """Memory of a process that is in RAM (MiB)."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def main() -> None:
    logging.disable(logging.WARNING)  # one for each fault
    sys.stdout.write(json.dumps(soak(int(sys.argv[1]))) + "\n")


if __name__ == "__main__":
    main()
