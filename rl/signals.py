"""Ctrl-C and SIGTERM ask a run to save and leave; a second one makes it leave at once.

Knows nothing about what is saved: whoever runs the loop looks at `requested` where it is safe to stop.
"""

from __future__ import annotations

import logging
import signal
from types import FrameType, TracebackType
from typing import Any

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Context in which the signals only leave a note."""

    def __init__(self) -> None:
        self.signum = 0
        """The signal that asked; 0 where none did."""
        self._previous: dict[signal.Signals, Any] = {}

    def requested(self) -> bool:
        """True once a signal has asked the run to stop."""
        return self.signum != 0

    def __enter__(self) -> StopSignals:
        self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.requested():
            raise KeyboardInterrupt
        self.signum = signum
        logger.warning("%s: saving, then leaving; once more leaves without saving", signal.Signals(signum).name)
