"""Where window work runs: beside decode on a stream of its own, or in line where there is no such device.

A stream takes turns with decode at low priority, or has multiprocessors to itself (a CUDA green context).

All trainer work of a process runs in one lane, in the window and after it, so that its tensors never cross streams
unseen; the lane and the default stream wait for each other only where weights change hands. Knows nothing of jobs.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from runtime.tracing import TIMELINE

DEVICE = "device/"
"""Begins the names of the timeline's lanes whose times are the device's own."""


DECODE_PRIORITY = -5
"""Priority of decode's stream, the highest; work has 0, the lowest."""


class InlineLane:
    """No second queue: work is done when it has been handed out."""

    concurrent = False
    turns = False
    sms = 0

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def work(self, name: str, *, alone: bool = False) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    @contextmanager
    def decode(self) -> Iterator[None]:
        """Context in which a decode step runs."""
        yield

    def decoded(self) -> Callable[[], bool]:
        """All of a decode step has been launched; returns a function that says whether the device is done with it."""
        return lambda: True

    def outstanding(self) -> int:
        return 0

    def join(self) -> None:
        """Make what follows on either side see what the other has done."""

    def seconds(self) -> dict[str, float]:
        last, self._seconds = dict(self._seconds), defaultdict(float)
        return last


class StreamLane:
    """A CUDA stream for work beside a high-priority one for decode.

    What is handed out during a decode step waits on the device until the step is done: a product's blocks hold the
    multiprocessors as long as it runs, so that decode would wait for one before each of its many small kernels.

    Args:
        sms: multiprocessors that work is confined to while responses decode (decode may use all), at the same time as
            decode; 0 takes turns with it.
    """

    concurrent = True

    def __init__(self, sms: int = 0) -> None:
        self.sms = sms
        self.turns = not sms
        self._work = torch.cuda.Stream()  # of the lowest priority
        self._beside = _partition_stream(sms) if sms else self._work
        self._last = self._work
        """The stream of the two that was used last; the other waits for it."""
        self._decode = torch.cuda.Stream(priority=DECODE_PRIORITY)
        self._under_way: deque[Any] = deque()
        self._timed: list[tuple[str, Any, Any]] = []
        self._decoded: list[tuple[Any, Any]] = []
        self._base = torch.cuda.Event(enable_timing=True)
        """An event whose host time is known, so that those of other events are."""
        self._base.record()
        self._base.synchronize()
        self._base_s = time.perf_counter()

    @contextmanager
    def work(self, name: str, *, alone: bool = False) -> Iterator[None]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = self._beside if name.startswith(("beside/", "prefill/", "alone/")) else self._work
        if stream is not self._last:
            stream.wait_stream(self._last)
            self._last = stream
        with torch.cuda.stream(stream):
            start.record()
            try:
                yield
            finally:
                end.record()
                self._under_way.append(end)
                self._timed.append((name, start, end))
        if alone:
            self._decode.wait_event(end)

    @contextmanager
    def decode(self) -> Iterator[None]:
        with torch.cuda.stream(self._decode):
            if not TIMELINE.recording:
                yield
                return
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._decoded.append((start, end))

    def decoded(self) -> Callable[[], bool]:
        event = torch.cuda.Event()
        event.record()
        if self.turns:
            self._work.wait_event(event)
        return event.query

    def outstanding(self) -> int:
        while self._under_way and self._under_way[0].query():
            self._under_way.popleft()
        return len(self._under_way)

    def join(self) -> None:
        default = torch.cuda.current_stream()
        streams = {self._work, self._beside, self._decode}
        for stream in streams:
            default.wait_stream(stream)
        for stream in streams:
            stream.wait_stream(default)

    def seconds(self) -> dict[str, float]:
        torch.cuda.synchronize()
        totals: dict[str, float] = defaultdict(float)
        for name, start, end in self._timed:
            totals[name] += start.elapsed_time(end) / 1e3
            self._draw(name.rpartition("/")[2], start, end)
        for start, end in self._decoded:
            self._draw("decode", start, end)
        self._timed.clear()
        self._decoded.clear()
        self._under_way.clear()
        return dict(totals)

    def _draw(self, name: str, start: Any, end: Any) -> None:
        """Give the timeline a span as the device saw it.

        That of a decode step begins with what the host prepares for it, since its stream is idle then.
        """
        if TIMELINE.recording:
            start_s, end_s = (self._base_s + self._base.elapsed_time(event) / 1e3 for event in (start, end))
            TIMELINE.draw(DEVICE + name, name, start_s, end_s)


def _partition_stream(sms: int) -> Any:
    """A stream of a green context of its own; context and stream live as long as the process.

    By the driver's API: torch's own green contexts make the caller's stream wait, which ends all overlap.

    Raises:
        RuntimeError: the driver refused.
    """
    from cuda.bindings import driver

    def call(result: tuple[Any, ...]) -> Any:
        if result[0] != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"no partition of {sms} multiprocessors (runtime.window_sms): {result[0]}")
        return result[1] if len(result) == 2 else result[1:]

    device = call(driver.cuDeviceGet(torch.cuda.current_device()))
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    groups, _, _ = call(
        driver.cuDevSmResourceSplitByCount(1, call(driver.cuDeviceGetDevResource(device, kind)), 0, sms)
    )
    description = call(driver.cuDevResourceGenerateDesc(groups[:1], 1))
    flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    context = call(driver.cuGreenCtxCreate(description, device, flags))
    stream = call(driver.cuGreenCtxStreamCreate(context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0))
    return torch.cuda.ExternalStream(int(stream))


def make_lane(sms: int = 0) -> InlineLane | StreamLane:
    """The lane of this process's device."""
    return StreamLane(sms) if torch.cuda.is_available() else InlineLane()
