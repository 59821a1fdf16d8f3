"""Seconds by phase: where a step's time went. Knows nothing of what it times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Timers:
    """Wall time added up by name (s)."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the block's wall time to `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def reset(self) -> dict[str, float]:
        """Begin anew; returns what was added up."""
        last, self.seconds = self.seconds, {}
        return last
