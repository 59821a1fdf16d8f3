"""Lanes, with a fake of the device: what a stream's events become."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from runtime.lane import InlineLane, StreamLane
from runtime.tracing import Timeline


class FakeDevice:
    """Events that are recorded at the time that the test sets (ms)."""

    now = 0.0


class FakeEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = FakeDevice.now

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at - self.at


class FakeStream:
    def __init__(self, priority: int = 0) -> None:
        self.priority = priority
        self.waited: list[FakeEvent] = []

    def wait_event(self, event: FakeEvent) -> None:
        self.waited.append(event)


@contextmanager
def no_stream(stream: Any) -> Iterator[None]:
    yield


@pytest.fixture
def timeline(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    """The lane's timeline, on a fake device."""
    timeline = Timeline()
    FakeDevice.now = 0.0
    monkeypatch.setattr("runtime.lane.TIMELINE", timeline)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", no_stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return timeline


def work(lane: StreamLane) -> dict[str, float]:
    """A decode step from 10 to 30 ms, and a quantum from 15 to 25 ms of the device's time."""
    FakeDevice.now = 10.0
    with lane.decode():
        FakeDevice.now = 30.0
    FakeDevice.now = 15.0
    with lane.work("beside/train"):
        FakeDevice.now = 25.0
    return lane.seconds()


def test_recorded_spans_have_the_devices_times(timeline: Timeline) -> None:
    lane = StreamLane()
    timeline.recording = True
    assert work(lane) == {"beside/train": pytest.approx(0.010)}
    spans = {event.lane: (event.start_s - lane._base_s, event.end_s - lane._base_s) for event in timeline._events}
    assert spans == {"device/train": pytest.approx((0.015, 0.025)), "device/decode": pytest.approx((0.010, 0.030))}
    assert timeline.seconds == {}, "their time is counted by the host's spans"


def test_decode_is_done_when_the_device_says_so(timeline: Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = StreamLane()
    FakeDevice.now = 10.0
    monkeypatch.setattr(FakeEvent, "query", lambda event: FakeDevice.now >= event.at + 5.0)
    with lane.decode():
        decoded = lane.decoded()
        # Work begins when the step is done.
        assert [event.at for event in lane._work.waited] == [10.0]  # type: ignore[attr-defined]
        assert not decoded()
        FakeDevice.now = 15.0
        assert decoded()
    assert InlineLane().decoded()()


def test_decode_goes_first(timeline: Timeline) -> None:
    lane = StreamLane()
    assert lane._decode.priority < lane._work.priority  # lower numbers go first


def test_nothing_is_kept_when_nothing_is_recorded(timeline: Timeline) -> None:
    lane = StreamLane()
    assert work(lane) == {"beside/train": pytest.approx(0.010)}
    assert timeline._events == []
