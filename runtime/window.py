"""What runs in the slack of the decode loop: a queue of jobs that advance a quantum at a time.

One thread and no locks. A job is a generator that yields after each quantum (a layer, a few milliseconds); the window
hands out a bounded number of quanta between two decode steps and never waits for them. Knows nothing of models: it
decides with plain Python.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Literal

from runtime import tracing

JobKind = Literal["actor_prefix", "actor_response", "reference_prefix", "reference_score", "train"]


@dataclass(frozen=True)
class Schedule:
    """When the update's work may run. What is computed is the same under every schedule with the same `share`."""

    share: bool
    """Encode each distinct prompt of a group once; False repeats it for every response."""
    window: frozenset[JobKind]
    """Kinds of jobs that may run while responses are still being decoded."""


_FORWARD: frozenset[JobKind] = frozenset({"actor_prefix", "actor_response", "reference_prefix", "reference_score"})

SCHEDULES: dict[str, Schedule] = {
    "unshared": Schedule(share=False, window=frozenset()),
    "serial": Schedule(share=True, window=frozenset()),
    "overlapped": Schedule(share=True, window=_FORWARD),
    "streamed": Schedule(share=True, window=_FORWARD | {"train"}),
}


@dataclass
class Job:
    """Work that may be interrupted after each of its quanta."""

    kind: JobKind
    steps: Generator[None, None, object]
    started: bool = False


@dataclass
class WindowStats:
    """What one optimizer step's window did."""

    jobs: int = 0
    """Jobs that ended inside the window (count)."""
    hidden_s: float = 0.0
    """Job time inside the window (s)."""
    spill_s: float = 0.0
    """Job time after it (s)."""
    decode_s: float = 0.0
    """Decode time (s)."""
    beside_decode_s: float = 0.0
    """Job time between decode steps, a part of `hidden_s`: the rest ran while nothing decoded (s)."""
    together_s: float = 0.0
    """Wall time of the decode steps and of the quanta between them (s)."""

    def overlap_efficiency(self) -> float:
        """(Decode alone + jobs alone) / together: above 1 where overlap gains, at most 2."""
        return (self.decode_s + self.beside_decode_s) / self.together_s if self.together_s else 1.0


@dataclass
class Window:
    """The job queue of one process.

    Jobs run one after another in the order in which they were added, so that a job may rely on those before it.
    """

    schedule: Schedule
    backlog: int
    """Most quanta handed out between two decode steps (count)."""
    clock: Callable[[], float] = time.perf_counter
    stats: WindowStats = field(default_factory=WindowStats)
    _queue: deque[Job] = field(default_factory=deque)

    def admits(self, kind: JobKind) -> bool:
        """Whether jobs of this kind may run before decoding is over."""
        return kind in self.schedule.window

    def add(self, job: Job) -> None:
        assert self.admits(job.kind), f"{job.kind} may not run in this window"
        self._queue.append(job)

    def pump(self, *, decoding: bool = True) -> None:
        """Advance the queue by at most `backlog` quanta, between decode steps or while nothing decodes."""
        start = self.clock()
        for _ in range(self.backlog):
            if not self._queue:
                break
            self._advance()
        seconds = self.clock() - start
        self.stats.hidden_s += seconds
        self.stats.beside_decode_s += seconds if decoding else 0.0

    def _advance(self) -> None:
        job = self._queue[0]
        job.started = True
        with tracing.span(f"job_{job.kind}", lane=job.kind):
            try:
                next(job.steps)
            except StopIteration:
                self._queue.popleft()
                self.stats.jobs += 1

    def finish(self, *, drop_unstarted: bool) -> None:
        """End the window: finish the job under way, and the queue behind it unless it is to be dropped.

        Dropped jobs are those whose work the update will do itself, when and where it needs it.
        """
        start = self.clock()
        if drop_unstarted:
            self._queue = deque(job for job in self._queue if job.started or job.kind == "train")
        while self._queue:
            self._advance()
        self.stats.spill_s += self.clock() - start

    def run(self, job: Job) -> None:
        """Run work to its end, after the window."""
        start = self.clock()
        with tracing.span(f"job_{job.kind}", lane=job.kind):
            for _ in job.steps:
                pass
        self.stats.spill_s += self.clock() - start

    def reset(self) -> WindowStats:
        """Begin a new step; returns the last one's statistics."""
        last, self.stats = self.stats, WindowStats()
        return last


@dataclass
class Fallback:
    """Gives up overlap where the runtime's own measurement says that it loses."""

    enabled: bool
    patience: int = 3
    """Consecutive losing steps after which overlap is given up (count)."""
    _losing: int = 0

    def loses(self, efficiency: float) -> bool:
        """Record a step's overlap efficiency; True once overlap has lost `patience` times in a row."""
        self._losing = self._losing + 1 if efficiency < 1.0 else 0
        return self.enabled and self._losing >= self.patience
