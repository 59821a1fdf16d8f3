"""Whether overlap pays: decode and window work done together, against what each would have taken alone.

Decode steps beside which nothing ran say what a step of so many sequences takes alone; quanta that ran while nothing
decoded say the same of a kind of job. Decides with plain Python.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class DecodeStep(NamedTuple):
    """One decode step, as the host saw it."""

    seconds: float
    running: int
    """Sequences decoded (count)."""
    prefill: bool
    """Prompts were computed too, so that its time says nothing of other steps."""
    clean: bool
    """No window work was under way when it began, and none was handed out during it."""


class Load(NamedTuple):
    """Responses of the rollout engine (counts)."""

    running: int
    waiting: int
    """Their prompts have yet to be computed."""


def admitted(before: Load, now: Load) -> bool:
    """Whether prompts are computed by the decode step that began at load `before`."""
    return now.waiting < before.waiting


def prefills(before: Load, after: Load, num_ended: int) -> tuple[bool, bool]:
    """Whether a decode step computed prompts too, and whether the next one will: if there is room for another response.

    Args:
        before, after: the engine's load around the step.
        num_ended: responses that ended in it, and made room (count).
    """
    prefilled = admitted(before, after)
    return prefilled, after.waiting > 0 and (prefilled or num_ended > 0)


@dataclass
class OverlapMeter:
    """Sums one optimizer step's decode steps; what a step or a quantum costs alone is remembered."""

    _alone_s: dict[int, float] = field(default_factory=dict)
    """Seconds of the last clean decode step, by sequences."""
    _quantum_s: dict[str, float] = field(default_factory=dict)
    """Mean seconds of a quantum alone, by kind."""
    _decode_s: float = 0.0
    _together_s: float = 0.0
    since_clean: int = 0
    """Decode steps since the last clean one (count)."""

    def add(self, step: DecodeStep, handed_out: int, pump_s: float) -> None:
        """Record a decode step and the quanta handed out during it and after it.

        Args:
            pump_s: the host's time to hand out those after it (s); that for those during it is part of the step's.
        """
        if step.prefill:
            return
        if step.clean:
            self._alone_s[step.running] = step.seconds
            self.since_clean = 0
        else:
            self.since_clean += 1
        if step.clean and not handed_out:
            return  # nothing was overlapped
        self._decode_s += step.seconds if step.clean else self._alone(step)
        self._together_s += step.seconds + pump_s

    def _alone(self, step: DecodeStep) -> float:
        """What the step would have taken alone: as long as the clean step with the nearest number of sequences."""
        if not self._alone_s:
            return step.seconds
        return self._alone_s[min(self._alone_s, key=lambda running: abs(running - step.running))]

    def efficiency(self, seconds: Mapping[str, float], counts: Mapping[str, int], *, contend: bool) -> float:
        """(Decode alone + jobs alone) / together since the last call: above 1 where overlap gains.

        Jobs that ran idle took no longer than the wait for simulators that they filled.

        Args:
            seconds: time of quanta by `place/kind` (s).
            counts: quanta by `place/kind`.
            contend: quanta ran at the same time as decode, so that those `beside` it were slowed; otherwise they ran
                between its steps.
        """
        if contend:
            self._learn(seconds, counts)
        jobs_s = idle_s = 0.0
        for name, count in counts.items():
            place, _, kind = name.partition("/")
            if place == "beside":
                known = self._quantum_s.get(kind) if contend else None
                jobs_s += seconds.get(name, 0.0) if known is None else count * known
            elif place == "idle":
                idle_s += seconds.get(name, 0.0)
        together_s, alone_s = self._together_s + idle_s, self._decode_s + jobs_s + 2 * idle_s
        self._together_s = self._decode_s = 0.0
        return alone_s / together_s if together_s else 1.0

    def _learn(self, seconds: Mapping[str, float], counts: Mapping[str, int]) -> None:
        totals: dict[str, float] = defaultdict(float)
        numbers: dict[str, int] = defaultdict(int)
        for name, count in counts.items():
            place, _, kind = name.partition("/")
            if place in ("alone", "idle", "after"):
                totals[kind] += seconds.get(name, 0.0)
                numbers[kind] += count
        self._quantum_s |= {kind: totals[kind] / number for kind, number in numbers.items() if number}
