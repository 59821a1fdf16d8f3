"""Where a step's time went: seconds by name, and a timeline that Perfetto opens.

One timeline a process, as with logging: `tracing.span("decode")` from anywhere. Knows nothing of what it times.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class _Event:
    lane: str
    name: str
    start_s: float
    end_s: float


@dataclass
class Timeline:
    """Spans since the last reset. Events are kept only while `recording`."""

    recording: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    _events: list[_Event] = field(default_factory=list)
    _opened: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def span(self, name: str, lane: str | None = None) -> Iterator[None]:
        """Add the block's wall time to `name`, and draw it in `lane` (the name's own by default)."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, start, time.perf_counter(), lane)

    def add(self, name: str, start_s: float, end_s: float, lane: str | None = None) -> None:
        """A span that was timed elsewhere, by `time.perf_counter`."""
        self.seconds[name] = self.seconds.get(name, 0.0) + end_s - start_s
        self.draw(lane or name, name, start_s, end_s)

    def draw(self, lane: str, name: str, start_s: float, end_s: float) -> None:
        """A span for the picture alone: its time is counted elsewhere."""
        if self.recording:
            self._events.append(_Event(lane, name, start_s, end_s))

    def set_busy(self, name: str, busy: bool) -> None:
        """Tell whether something is going on; its span lasts from the first True to the next False."""
        if busy:
            self._opened.setdefault(name, time.perf_counter())
        elif name in self._opened:
            self.add(name, self._opened.pop(name), time.perf_counter())

    def reset(self) -> dict[str, float]:
        """Begin anew; returns the seconds by name."""
        last, self.seconds = self.seconds, {}
        return last

    def clear(self) -> None:
        """Forget the seconds and spans so far: they are no part of what is measured."""
        self.seconds.clear()
        self._events.clear()

    def write(self, path: Path) -> None:
        """Write the events so far as a Chrome trace (one row a lane), and forget them."""
        lanes = {lane: row for row, lane in enumerate(dict.fromkeys(event.lane for event in self._events))}
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": lane}}
            for lane, row in lanes.items()
        ]
        spans = [
            {
                "ph": "X", "name": event.name, "cat": event.lane, "pid": 0, "tid": lanes[event.lane],
                "ts": event.start_s * 1e6, "dur": (event.end_s - event.start_s) * 1e6,
            }
            for event in self._events
        ]  # fmt: skip
        path.write_text(json.dumps({"traceEvents": names + spans, "displayTimeUnit": "ms"}))
        self._events.clear()


TIMELINE = Timeline()
"""This process's timeline."""

span = TIMELINE.span
