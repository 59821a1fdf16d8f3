"""What runs in the slack of the decode loop: a queue of jobs that advance a quantum at a time.

One thread and no locks. A job is a generator that yields after each quantum (a layer, a few milliseconds); the window
hands out a bounded number of quanta between two decode steps and never waits for them. Knows nothing of models: it
decides with plain Python.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

from runtime import tracing

JobKind = Literal["actor_prefix", "actor_response", "reference_prefix", "reference_score", "train"]
JOB_KINDS: tuple[JobKind, ...] = get_args(JobKind)


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


class Lane(Protocol):
    """Where jobs run: it takes quanta, and says how many are under way and what they took."""

    def work(self, name: str) -> AbstractContextManager[None]:
        """Context in which a quantum is handed out; its time is added to `name`."""
        ...

    def outstanding(self) -> int:
        """Quanta handed out and not yet done (count)."""
        ...

    def seconds(self) -> dict[str, float]:
        """Time by name since the last call (s); waits for what is under way."""
        ...


@dataclass(frozen=True)
class WindowStats:
    """What one optimizer step's window did."""

    jobs: int
    """Jobs that ended inside the window (count)."""
    seconds: dict[str, float]
    """Job time by `place/kind` (s); the places are `beside` decode steps, `idle` while nothing decodes, `after`."""

    def at(self, *places: str) -> float:
        """Job time in these places (s)."""
        return sum(value for name, value in self.seconds.items() if name.partition("/")[0] in places)

    def of(self, kind: JobKind) -> float:
        """Job time of a kind, wherever it ran (s)."""
        return sum(value for name, value in self.seconds.items() if name.partition("/")[2] == kind)

    def overlap_efficiency(self, decode_s: float, together_s: float) -> float:
        """(Decode alone + jobs alone) / together: above 1 where overlap gains, at most 2.

        Args:
            decode_s: time of the decode steps (s).
            together_s: wall time of the decode steps and of the quanta between them (s).
        """
        return (decode_s + self.at("beside")) / together_s if together_s else 1.0


@dataclass
class Window:
    """The job queue of one process.

    Jobs run one after another in the order in which they were added, so that a job may rely on those before it.
    """

    schedule: Schedule
    backlog: int
    """Most quanta handed out between two decode steps, and most under way (count)."""
    lane: Lane
    _jobs: int = 0
    _queue: deque[Job] = field(default_factory=deque)

    def admits(self, kind: JobKind) -> bool:
        """Whether jobs of this kind may run before decoding is over."""
        return kind in self.schedule.window

    def add(self, job: Job) -> None:
        assert self.admits(job.kind), f"{job.kind} may not run in this window"
        self._queue.append(job)

    def pump(self, *, decoding: bool) -> None:
        """Advance the queue by at most `backlog` quanta, between decode steps or while nothing decodes; never waits."""
        for _ in range(self.backlog):
            if not self._queue or self.lane.outstanding() >= self.backlog:
                break
            self._jobs += self._advance("beside" if decoding else "idle")

    def _advance(self, place: str) -> bool:
        """Hand out one quantum of the job in front; True where that was its last."""
        job = self._queue[0]
        job.started = True
        with tracing.span(f"job_{job.kind}", lane=job.kind), self.lane.work(f"{place}/{job.kind}"):
            try:
                next(job.steps)
            except StopIteration:
                self._queue.popleft()
                return True
        return False

    def finish(self) -> None:
        """End the window: finish the job under way and registered training, and drop the rest.

        What is dropped the update does itself, when and where it needs it.
        """
        self._queue = deque(job for job in self._queue if job.started or job.kind == "train")
        while self._queue:
            self._advance("after")

    def run(self, job: Job) -> None:
        """Run work to its end, after the window."""
        with tracing.span(f"job_{job.kind}", lane=job.kind), self.lane.work(f"after/{job.kind}"):
            for _ in job.steps:
                pass

    def reset(self) -> WindowStats:
        """Begin a new step; returns the last one's statistics."""
        jobs, self._jobs = self._jobs, 0
        return WindowStats(jobs, self.lane.seconds())


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
