"""Pictures of what the device benchmark wrote: seconds by phase, and a stretch of a timeline.

python -m bench.picture RESULT.json        draws RESULT.png
python -m bench.picture TRACE.json 0.5     draws the half second of it in which most decode steps have work beside them
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from runtime.lane import DEVICE
from runtime.window import JOB_KINDS

COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d", "#e45756")
WIDTH, LEFT, RIGHT, TOP, ROW = 1500, 230, 190, 100, 44
"""Pixels: the picture, its margins and a row."""
STRETCH_S = 0.5


class Span(NamedTuple):
    """An event of a timeline (s)."""

    lane: str
    start_s: float
    end_s: float


def draw_phases(result: Mapping[str, Any], path: Path) -> None:
    """One bar an arm, its phases one after another in seconds."""
    arms = result["arms"]
    phases = list(dict.fromkeys(phase for arm in arms.values() for phase in arm["phase_s"]))
    longest = max(arm["step_s"] for arm in arms.values())
    chart = _Chart(len(arms), longest, f"Seconds of a step by phase: {_caption(result)}")
    chart.legend(phases)
    for row, (name, arm) in enumerate(arms.items()):
        chart.label(row, name)
        end = 0.0
        for phase, seconds in arm["phase_s"].items():
            chart.bar(row, end, end + seconds, COLORS[phases.index(phase) % len(COLORS)])
            end += seconds
        scaled = f" (from {arm['scaled_from_groups']} groups)" if "scaled_from_groups" in arm else ""
        chart.note(row, end, f"{end:.3g} s{scaled}")
    chart.axis("s")
    chart.save(path)


def _caption(result: Mapping[str, Any]) -> str:
    shape = result["shape"]
    return (
        f"{result['device'].partition(',')[0]}, {shape['model']}, {shape['groups']} groups of {shape['group_size']}, "
        f"prompts of {shape['prompt_tokens']}, responses of {shape['response_tokens']:.0f} tokens"
        f"{' on average, long tail' if shape['long_tail'] else ''}"
    )


def draw_trace(trace: Mapping[str, Any], path: Path, length_s: float = STRETCH_S) -> None:
    """Decode steps and each kind of job in lanes, over the stretch in which most decode steps have work beside them."""
    spans = read_spans(trace)
    start = busiest_start(spans, length_s)
    lanes = ["decode", *(kind for kind in JOB_KINDS if any(span.lane == kind for span in spans))]
    whose = "the device" if has_device_times(trace) else "the host"
    begin = start - spans[0].start_s
    chart = _Chart(len(lanes), 1e3 * length_s, f"{length_s:g} s of a step as {whose} saw it, from {begin:.2f} s on")
    for row, lane in enumerate(lanes):
        chart.label(row, lane)
        for span in spans:
            if span.lane == lane and span.end_s > start and span.start_s < start + length_s:
                left, right = max(span.start_s - start, 0.0), min(span.end_s - start, length_s)
                chart.bar(row, 1e3 * left, 1e3 * right, COLORS[row % len(COLORS)], edge=True)
    chart.axis("ms")
    chart.save(path)


def read_spans(trace: Mapping[str, Any]) -> list[Span]:
    """Decode steps and jobs of a Chrome trace by time: as the device saw them, where the trace has that."""
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    prefix = DEVICE if has_device_times(trace) else ""
    wanted = {prefix + lane: lane for lane in ("decode", *JOB_KINDS)}
    return sorted(
        (
            Span(wanted[event["cat"]], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
            for event in events
            if event["cat"] in wanted
        ),
        key=lambda span: span.start_s,
    )


def has_device_times(trace: Mapping[str, Any]) -> bool:
    return any(event["ph"] == "X" and event["cat"].startswith(DEVICE) for event in trace["traceEvents"])


def busiest_start(spans: Sequence[Span], length_s: float) -> float:
    """Begin of the `length_s` in which most decode steps overlap a job; the first decode step's, if none do."""
    decode = np.array([(span.start_s, span.end_s) for span in spans if span.lane == "decode"])
    jobs = np.array([(span.start_s, span.end_s) for span in spans if span.lane != "decode"] or [(np.inf, np.inf)])
    following = np.searchsorted(jobs[:, 1], decode[:, 0], side="right")  # jobs run one after another
    begun = np.append(jobs[:, 0], np.inf)[following] < decode[:, 1]
    before = np.concatenate([[0], np.cumsum(begun)])
    last = np.searchsorted(decode[:, 0], decode[:, 0] + length_s)
    return float(decode[np.argmax(before[last] - before[:-1]), 0])


class _Chart:
    """Rows of bars over one axis."""

    def __init__(self, rows: int, longest: float, title: str) -> None:
        self.image = Image.new("RGB", (WIDTH, TOP + rows * ROW + 50), "white")
        self.draw = ImageDraw.Draw(self.image)
        self.font = ImageFont.load_default(17)
        self.rows = rows
        self.longest = longest
        self.draw.text((12, 12), title, "black", ImageFont.load_default(20))

    def _x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / self.longest

    def legend(self, names: Sequence[str]) -> None:
        x = float(LEFT)
        for name, color in zip(names, COLORS, strict=False):
            self.draw.rectangle((x, 58, x + 16, 74), color)
            self.draw.text((x + 24, 66), name, "black", self.font, anchor="lm")
            x += 60 + self.draw.textlength(name, self.font)

    def _middle(self, row: int) -> float:
        return TOP + (row + 0.5) * ROW

    def label(self, row: int, text: str) -> None:
        self.draw.text((LEFT - 14, self._middle(row)), text, "black", self.font, anchor="rm")

    def note(self, row: int, value: float, text: str) -> None:
        self.draw.text((self._x(value) + 10, self._middle(row)), text, "black", self.font, anchor="lm")

    def bar(self, row: int, start: float, end: float, color: str, *, edge: bool = False) -> None:
        left, right, middle = self._x(start), self._x(end), self._middle(row)
        box = (left, middle - 15, max(right, left + 1), middle + 15)
        self.draw.rectangle(box, color, "white" if edge and right - left > 4 else None)

    def axis(self, unit: str) -> None:
        """Ticks at round values below the rows."""
        bottom = TOP + self.rows * ROW + 6
        self.draw.line((LEFT, bottom, WIDTH - RIGHT, bottom), "black")
        step = round_step(self.longest / 8)
        for tick in range(int(self.longest / step + 1e-9) + 1):
            x = self._x(tick * step)
            self.draw.line((x, bottom, x, bottom + 6), "black")
            self.draw.text((x, bottom + 10), f"{tick * step:g}", "black", self.font, anchor="mt")
        self.draw.text((WIDTH - RIGHT + 14, bottom), unit, "black", self.font, anchor="lm")

    def save(self, path: Path) -> None:
        self.image.save(path)


def round_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is not below this."""
    power = 1.0
    while power > least:
        power /= 10
    while power * 10 <= least:
        power *= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def main() -> None:
    source = Path(sys.argv[1])
    data, target = json.loads(source.read_text()), source.with_suffix(".png")
    if "traceEvents" in data:
        draw_trace(data, target, *map(float, sys.argv[2:]))
    else:
        draw_phases(data, target)


if __name__ == "__main__":
    main()
