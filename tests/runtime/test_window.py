from __future__ import annotations

from collections.abc import Generator

import pytest

from runtime.window import SCHEDULES, Fallback, Job, JobKind, Window, WindowStats


class Clock:
    """Advances one second each time somebody works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def job(clock: Clock, log: list[str], name: str, quanta: int, kind: JobKind = "actor_prefix") -> Job:
    def steps() -> Generator[None, None, None]:
        for index in range(quanta):
            clock.now += 1.0
            log.append(f"{name}{index}")
            yield

    return Job(kind, steps())


def window(schedule: str = "overlapped", backlog: int = 2) -> tuple[Window, Clock, list[str]]:
    clock = Clock()
    return Window(SCHEDULES[schedule], backlog, clock), clock, []


def test_pump_hands_out_at_most_backlog_quanta_in_order() -> None:
    queue, clock, log = window(backlog=2)
    queue.add(job(clock, log, "a", 3))
    queue.add(job(clock, log, "b", 1))
    queue.pump()
    assert log == ["a0", "a1"]
    queue.pump()  # the third quantum, and the one in which the generator ends
    assert log == ["a0", "a1", "a2"]
    queue.pump()
    assert log == ["a0", "a1", "a2", "b0"]
    assert queue.stats.jobs == 2
    assert queue.stats.hidden_s == 4.0
    assert queue.stats.spill_s == 0.0


def test_finish_ends_the_started_job_and_drops_the_rest() -> None:
    queue, clock, log = window(backlog=1)
    for name in "abc":
        queue.add(job(clock, log, name, 2))
    queue.pump()
    queue.finish(drop_unstarted=True)
    assert log == ["a0", "a1"]
    assert (queue.stats.hidden_s, queue.stats.spill_s) == (1.0, 1.0)


def test_finish_keeps_registered_training() -> None:
    queue, clock, log = window("streamed")
    queue.add(job(clock, log, "p", 1))
    queue.add(job(clock, log, "t", 1, "train"))
    queue.finish(drop_unstarted=True)
    assert log == ["t0"]


def test_finish_runs_everything_where_nothing_is_dropped() -> None:
    queue, clock, log = window()
    queue.add(job(clock, log, "a", 2))
    queue.add(job(clock, log, "b", 1))
    queue.finish(drop_unstarted=False)
    assert log == ["a0", "a1", "b0"]


@pytest.mark.parametrize(
    ("schedule", "kinds"),
    [
        ("unshared", ""),
        ("serial", ""),
        ("overlapped", "actor_prefix actor_response reference_prefix reference_score"),
        ("streamed", "actor_prefix actor_response reference_prefix reference_score train"),
    ],
)
def test_schedules_admit_what_they_name(schedule: str, kinds: str) -> None:
    queue, _, _ = window(schedule)
    known: tuple[JobKind, ...] = ("actor_prefix", "actor_response", "reference_prefix", "reference_score", "train")
    assert [kind for kind in known if queue.admits(kind)] == kinds.split()
    assert queue.schedule.share == (schedule != "unshared")


def test_a_job_the_schedule_does_not_admit_is_our_bug() -> None:
    queue, clock, log = window("serial")
    with pytest.raises(AssertionError, match="actor_prefix"):
        queue.add(job(clock, log, "a", 1))


def test_overlap_efficiency_is_alone_over_together() -> None:
    # 3 s of decoding and 1 s of jobs, done in 2.5 s of wall time.
    assert WindowStats(decode_s=3.0, hidden_s=9.0, beside_decode_s=1.0, together_s=2.5).overlap_efficiency() == 1.6
    assert WindowStats().overlap_efficiency() == 1.0


def test_fallback_gives_up_after_three_losing_steps_in_a_row() -> None:
    fallback = Fallback(enabled=True)
    assert [fallback.loses(value) for value in (0.9, 0.9, 1.1, 0.9, 0.9, 0.9)] == [False] * 5 + [True]
    assert not any(Fallback(enabled=False).loses(0.5) for _ in range(9))
