"""What runs in the slack of the decode loop: a queue of jobs that advance a quantum at a time.

One thread and no locks. A job is a generator that yields after each quantum (a layer, a few milliseconds); the window
hands out a bounded number of quanta beside each decode step, while the host would only wait for the device, and never
waits for them. Knows nothing of models: it decides with plain Python.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

from runtime import tracing
from runtime.overlap import DecodeStep, OverlapMeter

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

    concurrent: bool
    """Whether work has a queue of its own on the device, and the host does not wait for it."""
    turns: bool
    """Whether the device begins what is handed out during a decode step when the step is done: while the host prepares
    the next one, it decodes nothing."""

    def work(self, name: str, *, alone: bool = False) -> AbstractContextManager[None]:
        """Context in which a quantum is handed out; its time is added to `name`.

        Args:
            alone: the device decodes nothing until it is done (the host does not wait).
        """
        ...

    def outstanding(self) -> int:
        """Quanta handed out and not yet done (count)."""
        ...

    def seconds(self) -> dict[str, float]:
        """Time by name since the last call (s); waits for what is under way."""
        ...


CLEAN_EVERY = 32
"""Decode steps after which none is handed out work until one ran alone, to know what it takes (count)."""


@dataclass(frozen=True)
class WindowStats:
    """What one optimizer step's window did."""

    jobs: int
    """Jobs that ended inside the window (count)."""
    seconds: dict[str, float]
    """Job time by `place/kind` (s); the places are `beside` decode steps, beside `prefill`, `idle` while nothing
    decodes, `alone` while decode was held back to time a quantum, and `after`."""
    overlap_efficiency: float
    """(Decode alone + jobs alone) / together: above 1 where overlap gains, at most 2."""

    def at(self, *places: str) -> float:
        """Job time in these places (s)."""
        return sum(value for name, value in self.seconds.items() if name.partition("/")[0] in places)

    @property
    def hidden_s(self) -> float:
        """Time of jobs that ran in the window; vision features, which decode waits for, are none (s)."""
        return self.at("beside", "prefill", "idle")

    def of(self, kind: JobKind) -> float:
        """Job time of a kind, wherever it ran (s)."""
        return sum(value for name, value in self.seconds.items() if name.partition("/")[2] == kind)


@dataclass
class Window:
    """The job queue of one process.

    Jobs run one after another in the order in which they were added, so that a job may rely on those before it.
    """

    schedule: Schedule
    backlog: int
    """Most quanta handed out from one decode step to the next, and most under way (count)."""
    lane: Lane
    meter: OverlapMeter = field(default_factory=OverlapMeter)
    _jobs: int = 0
    _queue: deque[Job] = field(default_factory=deque)
    _counts: Counter[str] = field(default_factory=Counter)
    """Quanta by `place/kind`."""
    _hold: bool = False
    """Nothing is handed out until the next decode step has ended."""
    _during: int | None = None
    """Quanta handed out during the decode step under way; None where it left no time for any (count)."""
    _before: int = 0
    """Quanta handed out during the step before (count)."""

    def admits(self, kind: JobKind) -> bool:
        """Whether jobs of this kind may run before decoding is over."""
        return kind in self.schedule.window

    def add(self, job: Job) -> None:
        assert self.admits(job.kind), f"{job.kind} may not run in this window"
        self._queue.append(job)

    def accompany(self, decoded: Callable[[], bool], *, prefill: bool) -> None:
        """Hand out quanta while the device decodes, and return when it is done or nothing more may be handed out.

        A quantum that is to be timed alone is left for after the step.

        Args:
            decoded: whether the device is done with the decode step.
            prefill: the step computes prompts too.
        """
        if decoded():
            return
        self._during = 0
        if not self._hold and self.meter.since_clean < CLEAN_EVERY:
            self._during = self._hand_out(
                "prefill" if prefill else "beside",
                self._room(),
                lambda job: not decoded() and not self._wants_sample(job),
            )

    def _room(self) -> int:
        """Quanta that may be handed out during a decode step.

        Where work and decode take turns, the device has the pause between two steps for them. They shall not last into
        the next step: one more than during the step before if those are over, and none if they are not.
        """
        if not self.lane.turns:
            return self.backlog
        return 0 if self.lane.outstanding() else min(self._before + 1, self.backlog)

    def pump(self, step: DecodeStep | None = None, *, hold: bool = False) -> None:
        """Hand out quanta after a decode step or while nothing decodes.

        The device decodes nothing meanwhile. So where a step left time to hand out quanta during it, only one that is
        to be timed alone is handed out after it; where it left none (decode runs in line, or ends before the host
        looks), all are.

        Args:
            step: the decode step that ended; `clean` is corrected here where quanta were handed out during it.
            hold: hand out nothing until the next step has ended, because it computes prompts: it leaves no
                multiprocessor idle.
        """
        start, during = time.perf_counter(), self._during
        self._during, self._hold, after = None, hold, 0
        if not hold and (step is None or self.meter.since_clean < CLEAN_EVERY):
            place = "idle" if step is None else "prefill" if step.prefill else "beside"
            wanted = (lambda _: True) if during is None else self._wants_sample
            after = self._hand_out(place, self.backlog - (during or 0), wanted)
        if step is not None:
            self._before = during or 0
            step = step._replace(clean=step.clean and not during)
            self.meter.add(step, (during or 0) + after, time.perf_counter() - start)

    def _hand_out(self, place: str, most: int, wanted: Callable[[Job], bool]) -> int:
        """Hand out at most so many quanta, as long as the job in front is wanted; returns how many (count)."""
        for number in range(most):
            if not self._queue or self.lane.outstanding() >= self.backlog or not wanted(self._queue[0]):
                return number
            self._jobs += self._advance(place)
        return most

    def _advance(self, place: str) -> bool:
        """Hand out one quantum of the job in front; True where that was its last."""
        job = self._queue[0]
        alone = place in ("beside", "prefill") and self._wants_sample(job)
        name = f"{'alone' if alone else place}/{job.kind}"
        self._counts[name] += 1
        job.started = True
        with tracing.span(f"job_{job.kind}", lane=job.kind), self.lane.work(name, alone=alone):
            try:
                next(job.steps)
            except StopIteration:
                self._queue.popleft()
                return True
        return False

    @property
    def _contends(self) -> bool:
        """Whether work slows decode and decode slows work, so that neither's time says what it takes alone."""
        return self.lane.concurrent and not self.lane.turns

    def _wants_sample(self, job: Job) -> bool:
        """Whether to time this quantum alone: the second of the first job of its kind (the first is an embedding)."""
        if not self._contends or not job.started:
            return False
        return not any(self._counts[f"{place}/{job.kind}"] for place in ("alone", "idle", "after"))

    def finish(self) -> None:
        """End the window: finish the job under way and registered training, and drop the rest.

        What is dropped the update does itself, when and where it needs it.
        """
        self._queue = deque(job for job in self._queue if job.started or job.kind == "train")
        while self._queue:
            self._advance("after")

    def run(self, job: Job) -> None:
        """Run work to its end, after the window."""
        self._queue.append(job)
        while self._queue:
            self._advance("after")

    def reset(self) -> WindowStats:
        """Begin a new step; returns the last one's statistics."""
        jobs, self._jobs = self._jobs, 0
        counts, self._counts = self._counts, Counter()
        seconds = self.lane.seconds()
        efficiency = self.meter.efficiency(seconds, counts, contend=self._contends)
        return WindowStats(jobs, seconds, efficiency)


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
