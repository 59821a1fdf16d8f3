from __future__ import annotations

import pytest

from runtime.overlap import DecodeStep, Load, OverlapMeter, prefills


def step(seconds: float, running: int = 8, *, clean: bool = False, prefill: bool = False) -> DecodeStep:
    return DecodeStep(seconds, running, prefill, clean)


def test_without_overlap_the_efficiency_is_one() -> None:
    meter = OverlapMeter()
    meter.add(step(1.0, clean=True), 0, 0.0)
    assert meter.efficiency({}, {}, contend=True) == 1.0


def test_alone_over_together_by_hand() -> None:
    meter = OverlapMeter()
    meter.add(step(1.0, clean=True), 0, 0.0)  # what a step of 8 sequences takes alone
    meter.add(step(0.4, running=2, clean=True), 0, 0.0)
    meter.add(step(1.5), 4, 0.1)
    meter.add(step(0.7, running=3), 4, 0.1)  # nearest clean step: 2 sequences
    seconds = {"beside/train": 9.0, "after/train": 3.0, "alone/train": 1.0}
    counts = {"beside/train": 8, "after/train": 15, "alone/train": 5}
    # Decode alone 1.0 + 0.4; a quantum alone (3 + 1) / 20 = 0.2, eight of them 1.6; together 1.6 + 0.8.
    assert meter.efficiency(seconds, counts, contend=True) == pytest.approx((1.4 + 1.6) / 2.4)
    assert meter.efficiency({}, {}, contend=True) == 1.0  # a new step


def test_a_clean_step_after_which_work_was_handed_out_counts_as_it_was() -> None:
    meter = OverlapMeter()
    meter.add(step(1.0, clean=True), 2, 0.5)
    assert meter.efficiency({"beside/train": 0.25}, {"beside/train": 2}, contend=False) == pytest.approx(1.25 / 1.5)


def test_quanta_between_decode_steps_are_taken_as_they_were_timed() -> None:
    meter = OverlapMeter()
    meter.add(step(1.0, clean=True), 2, 0.5)
    seconds, counts = {"beside/train": 0.5, "after/train": 9.0}, {"beside/train": 2, "after/train": 3}
    assert meter.efficiency(seconds, counts, contend=False) == 1.0


def test_prefill_steps_say_nothing() -> None:
    meter = OverlapMeter()
    meter.add(step(9.0, clean=True, prefill=True), 3, 1.0)
    meter.add(step(9.0, prefill=True), 3, 1.0)
    assert meter.efficiency({}, {}, contend=True) == 1.0
    assert meter.since_clean == 0


def test_what_a_kind_costs_alone_is_remembered() -> None:
    meter = OverlapMeter()
    meter.efficiency({"after/train": 1.0}, {"after/train": 2}, contend=True)
    meter.add(step(1.0, clean=True), 0, 0.0)
    meter.add(step(1.0), 1, 0.0)
    assert meter.efficiency({"beside/train": 3.0}, {"beside/train": 1}, contend=True) == pytest.approx(1.5)


def test_work_that_simulators_hid_is_a_gain() -> None:
    meter = OverlapMeter()
    meter.add(step(1.0, clean=True), 2, 0.5)  # between decode steps: a loss of 0.1 s
    seconds = {"beside/train": 0.4, "idle/train": 3.0}
    counts = {"beside/train": 2, "idle/train": 15}
    # Alone: decode 1.0, jobs 0.4 and 3.0, simulators 3.0; together 1.5 and 3.0.
    assert meter.efficiency(seconds, counts, contend=False) == pytest.approx(7.4 / 4.5)


@pytest.mark.parametrize(
    ("before", "after", "num_ended", "expected"),
    [
        (Load(0, 6), Load(4, 2), 0, (True, True)),  # four admitted, and there may be room for more
        (Load(4, 2), Load(4, 2), 0, (False, False)),  # two wait, and there is no room for them
        (Load(4, 2), Load(3, 2), 1, (False, True)),  # one has made room
        (Load(3, 2), Load(4, 1), 0, (True, True)),
        (Load(3, 1), Load(4, 0), 0, (True, False)),
        (Load(4, 0), Load(4, 0), 0, (False, False)),
    ],
)
def test_prompts_are_computed_where_something_waits_and_has_room(
    before: Load, after: Load, num_ended: int, expected: tuple[bool, bool]
) -> None:
    assert prefills(before, after, num_ended) == expected
