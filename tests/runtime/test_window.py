from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

import pytest

from runtime.overlap import DecodeStep
from runtime.window import CLEAN_EVERY, SCHEDULES, Fallback, Job, JobKind, Window, WindowStats

STEP = DecodeStep(seconds=0.1, running=4, prefill=False, clean=True)


class FakeLane:
    """A device on which every quantum takes a second, done when the test says so."""

    def __init__(self) -> None:
        self.concurrent = False
        self.turns = False
        self.held_decode = 0
        self.under_way = 0
        self.done_at_once = True
        self.times: dict[str, float] = {}

    @contextmanager
    def work(self, name: str, *, alone: bool = False) -> Iterator[None]:
        self.held_decode += alone
        yield
        self.times[name] = self.times.get(name, 0.0) + 1.0
        self.under_way += not self.done_at_once

    def outstanding(self) -> int:
        return self.under_way

    def seconds(self) -> dict[str, float]:
        last, self.times = self.times, {}
        return last


def job(log: list[str], name: str, quanta: int, kind: JobKind = "actor_prefix") -> Job:
    def steps() -> Generator[None, None, None]:
        for index in range(quanta):
            log.append(f"{name}{index}")
            yield

    return Job(kind, steps())


def window(schedule: str = "overlapped", backlog: int = 2) -> tuple[Window, FakeLane, list[str]]:
    lane = FakeLane()
    return Window(SCHEDULES[schedule], backlog, lane), lane, []


def after_polls(number: int) -> Callable[[], bool]:
    """A decode step that is done when it has been asked about so often."""
    left = iter(range(number))
    return lambda: next(left, None) is None


def still_decoding() -> bool:
    return False


def test_pump_hands_out_at_most_backlog_quanta_in_order() -> None:
    queue, _, log = window(backlog=2)
    queue.add(job(log, "a", 3))
    queue.add(job(log, "b", 1))
    queue.pump(STEP)
    assert log == ["a0", "a1"]
    queue.pump(STEP)  # the third quantum, and the one in which the generator ends
    assert log == ["a0", "a1", "a2"]
    queue.pump()
    assert log == ["a0", "a1", "a2", "b0"]
    stats = queue.reset()
    assert stats.jobs == 2
    assert stats.seconds == {"beside/actor_prefix": 4.0, "idle/actor_prefix": 2.0}
    assert (stats.at("beside", "idle"), stats.at("after"), stats.of("actor_prefix")) == (6.0, 0.0, 6.0)


def test_pump_hands_out_nothing_while_the_device_is_behind() -> None:
    queue, lane, log = window(backlog=2)
    lane.done_at_once = False
    queue.add(job(log, "a", 9))
    queue.pump(STEP)
    queue.pump(STEP)
    assert log == ["a0", "a1"]
    lane.under_way = 1
    queue.pump(STEP)
    assert log == ["a0", "a1", "a2"]


def test_finish_ends_the_started_job_and_drops_the_rest() -> None:
    queue, _, log = window(backlog=1)
    for name in "abc":
        queue.add(job(log, name, 2))
    queue.pump(STEP)
    queue.finish()
    assert log == ["a0", "a1"]
    stats = queue.reset()
    assert (stats.at("beside"), stats.at("after")) == (1.0, 2.0)
    assert stats.jobs == 0  # none ended inside the window


def test_finish_keeps_registered_training() -> None:
    queue, _, log = window("streamed")
    queue.add(job(log, "p", 1))
    queue.add(job(log, "t", 1, "train"))
    queue.finish()
    assert log == ["t0"]


def test_run_is_after_the_window() -> None:
    queue, _, log = window("serial")
    queue.run(job(log, "a", 3, "train"))
    assert log == ["a0", "a1", "a2"]
    assert queue.reset().seconds == {"after/train": 4.0}  # the generator ends in a quantum of its own


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
    queue, _, log = window("serial")
    with pytest.raises(AssertionError, match="actor_prefix"):
        queue.add(job(log, "a", 1))


def test_the_place_of_a_quantum_tells_decode_from_prefill() -> None:
    queue, _, log = window(backlog=1)
    queue.add(job(log, "a", 2))
    queue.pump(STEP._replace(prefill=True))
    queue.pump(STEP)
    stats = queue.reset()
    assert stats.seconds == {"prefill/actor_prefix": 1.0, "beside/actor_prefix": 1.0}


def test_a_concurrent_lane_times_one_quantum_of_each_kind_alone() -> None:
    queue, lane, log = window(backlog=9)
    lane.concurrent = True
    for name in "ab":
        queue.add(job(log, name, 3))
    queue.pump(STEP)
    assert lane.held_decode == 1
    # The second quantum of the first job; each job's generator ends in a quantum of its own.
    assert queue.reset().seconds == {"beside/actor_prefix": 7.0, "alone/actor_prefix": 1.0}


def test_a_lane_that_takes_turns_times_nothing_alone() -> None:
    queue, lane, log = window(backlog=9)
    lane.concurrent = lane.turns = True
    queue.add(job(log, "a", 3))
    queue.pump(STEP)
    assert lane.held_decode == 0
    assert queue.reset().seconds == {"beside/actor_prefix": 4.0}


def test_work_pauses_until_a_decode_step_ran_alone() -> None:
    queue, lane, log = window(backlog=1)
    lane.done_at_once = False
    queue.add(job(log, "a", 99))
    for _ in range(CLEAN_EVERY):
        queue.pump(STEP._replace(clean=False))
        lane.under_way = 0
    assert len(log) == CLEAN_EVERY
    queue.pump(STEP._replace(clean=False))
    assert len(log) == CLEAN_EVERY  # held back
    queue.pump(STEP)  # what was under way has ended, this step was alone
    queue.pump(STEP)
    assert len(log) == CLEAN_EVERY + 1


def test_quanta_are_handed_out_until_decode_is_done() -> None:
    queue, _, log = window(backlog=9)
    queue.add(job(log, "a", 9))
    queue.accompany(after_polls(3), prefill=False)  # one question to begin with, and one before each quantum
    assert log == ["a0", "a1"]
    queue.pump(STEP)
    assert log == ["a0", "a1"], "the device decodes nothing between two steps"
    queue.accompany(after_polls(2), prefill=True)
    assert queue.reset().seconds == {"beside/actor_prefix": 2.0, "prefill/actor_prefix": 1.0}


def test_a_step_that_leaves_no_time_is_followed_by_quanta() -> None:
    queue, _, log = window(backlog=2)
    queue.add(job(log, "a", 9))
    queue.accompany(after_polls(0), prefill=False)
    assert log == []
    queue.pump(STEP)
    assert log == ["a0", "a1"]
    queue.accompany(still_decoding, prefill=False)
    queue.pump(STEP)
    queue.pump(STEP)  # its host was never asked
    assert log == [f"a{index}" for index in range(6)]


def test_backlog_bounds_what_is_handed_out_during_a_step_and_under_way() -> None:
    queue, lane, log = window(backlog=2)
    lane.done_at_once = False
    queue.add(job(log, "a", 9))
    for under_way, handed_out in ((0, 2), (2, 2), (1, 3), (0, 5)):
        lane.under_way = under_way
        queue.accompany(still_decoding, prefill=False)
        queue.pump(STEP)
        assert len(log) == handed_out


def test_quanta_that_take_turns_with_decode_do_not_last_into_its_next_step() -> None:
    pumped, lane, log = window("streamed", backlog=3)
    lane.concurrent = lane.turns = True
    lane.done_at_once = False
    pumped.add(job(log, "a", 40, "train"))
    handed_out = []

    def step(done: bool) -> None:
        """A decode step; the quanta of the one before are done when it begins, or not."""
        lane.under_way = 0 if done else lane.under_way
        before = len(log)
        pumped.accompany(still_decoding, prefill=False)
        handed_out.append(len(log) - before)
        pumped.pump(STEP)

    for done in (True, True, True, True, False, True, False, True, True):
        step(done)
    assert handed_out == [1, 2, 3, 3, 0, 1, 0, 1, 2]


def test_nothing_is_asked_of_the_device_without_work() -> None:
    queue, _, _ = window()
    answers = iter([False])
    queue.accompany(lambda: next(answers), prefill=False)
    assert next(answers, None) is None, "one question, and the host goes on to wait"


def test_a_quantum_alone_waits_until_the_step_has_ended() -> None:
    queue, lane, log = window(backlog=3)
    lane.concurrent = True
    queue.add(job(log, "a", 9))
    queue.accompany(still_decoding, prefill=False)
    assert log == ["a0"], "the second quantum is the one to be timed"
    queue.pump(STEP)
    assert (log, lane.held_decode) == (["a0", "a1"], 1)
    queue.accompany(still_decoding, prefill=False)
    queue.pump(STEP)
    assert (len(log), lane.held_decode) == (5, 1)
    assert queue.reset().seconds == {"beside/actor_prefix": 4.0, "alone/actor_prefix": 1.0}


def test_hold_lasts_until_the_next_step_has_ended() -> None:
    queue, _, log = window(backlog=1)
    queue.add(job(log, "a", 9))
    queue.pump(STEP, hold=True)
    queue.accompany(still_decoding, prefill=True)
    queue.pump(STEP)
    assert log == []
    queue.accompany(still_decoding, prefill=False)
    assert log == ["a0"]


def test_a_step_during_which_quanta_were_handed_out_is_not_clean() -> None:
    queue, _, log = window(backlog=1)
    queue.add(job(log, "a", 99))
    for _ in range(CLEAN_EVERY):
        queue.accompany(still_decoding, prefill=False)
        queue.pump(STEP)  # nothing was under way when it began
    assert (len(log), queue.meter.since_clean) == (CLEAN_EVERY, CLEAN_EVERY)
    queue.accompany(still_decoding, prefill=False)
    queue.pump(STEP)
    assert (len(log), queue.meter.since_clean) == (CLEAN_EVERY, 0), "this one ran alone"
    queue.accompany(still_decoding, prefill=False)
    assert len(log) == CLEAN_EVERY + 1


def test_fallback_gives_up_after_three_losing_steps_in_a_row() -> None:
    fallback = Fallback(enabled=True)
    assert [fallback.loses(value) for value in (0.9, 0.9, 1.1, 0.9, 0.9, 0.9)] == [False] * 5 + [True]
    assert not any(Fallback(enabled=False).loses(0.5) for _ in range(9))


def test_what_is_hidden_is_jobs_in_the_window() -> None:
    job_s = {"beside/train": 1.0, "idle/train": 2.0, "after/train": 4.0, "alone/actor_prefix": 16.0}
    job_s["rollout/vision"] = 8.0
    assert WindowStats(0, job_s, 1.0).hidden_s == 3.0
