from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bench.picture import COLORS, Span, busiest_start, draw_phases, draw_trace, read_spans, round_step


def event(lane: str, start_ms: float, length_ms: float) -> dict[str, Any]:
    return {"ph": "X", "name": lane, "cat": lane, "pid": 0, "tid": 0, "ts": 1e3 * start_ms, "dur": 1e3 * length_ms}


def pixels_of(path: Path, color: str) -> int:
    image = Image.open(path).convert("RGB")
    wanted = tuple(bytes.fromhex(color.removeprefix("#")))
    return sum(count for count, found in image.getcolors(1 << 24) or [] if found == wanted)


def test_the_devices_own_times_are_read_where_there_are_any() -> None:
    host = [event("decode", 0, 2), event("train", 2, 1), event("optimizer", 4, 1)]
    assert read_spans({"traceEvents": host}) == [Span("decode", 0.0, 0.002), Span("train", 0.002, 0.003)]
    device = [event("device/train", 3, 2), event("device/decode", 1, 3), event("device/vision", 0, 1)]
    assert read_spans({"traceEvents": host + device}) == [Span("decode", 0.001, 0.004), Span("train", 0.003, 0.005)]


def test_the_stretch_is_where_most_decode_steps_have_work_beside_them() -> None:
    decode = [Span("decode", second, second + 0.5) for second in range(10)]
    job = [Span("train", 0.2, 0.3), Span("actor_prefix", 5.4, 6.1), Span("actor_prefix", 7.1, 7.2)]
    spans = sorted(decode + job, key=lambda span: span.start_s)
    assert busiest_start(spans, 3.0) == 5.0
    assert busiest_start(decode, 3.0) == 0.0
    gaps = [Span("train", second + 0.5, second + 1.0) for second in range(3)]  # between steps, never beside one
    assert busiest_start(sorted(decode + gaps, key=lambda span: span.start_s), 3.0) == 0.0


def test_a_trace_is_drawn_in_lanes(tmp_path: Path) -> None:
    trace = {"traceEvents": [event("decode", 0, 250), event("actor_prefix", 0, 125)]}
    draw_trace(trace, tmp_path / "trace.png", 0.5)
    decode, prefix = (pixels_of(tmp_path / "trace.png", color) for color in COLORS[:2])
    assert decode == pytest.approx(2 * prefix, rel=0.05)
    assert pixels_of(tmp_path / "trace.png", COLORS[2]) == 0


def test_bars_are_as_long_as_the_phases(tmp_path: Path) -> None:
    arms = {
        "serial": {"step_s": 3.0, "phase_s": {"rollout": 2.0, "train": 1.0}},
        "streamed": {"step_s": 2.0, "phase_s": {"rollout": 2.0, "train": 0.0}, "scaled_from_groups": 1},
    }
    shape = {
        "model": "m", "groups": 2, "group_size": 4, "prompt_tokens": 9, "response_tokens": 5.0, "long_tail": True
    }  # fmt: skip
    path = tmp_path / "bars.png"
    draw_phases({"device": "CPU, torch 2", "shape": shape, "arms": arms}, path)
    rollout, train = (pixels_of(path, color) for color in COLORS[:2])
    assert rollout == pytest.approx(4 * train, rel=0.05)


def test_ticks_are_at_round_values() -> None:
    assert [round_step(value) for value in (0.03, 0.2, 1.0, 1.2, 60.0)] == pytest.approx([0.05, 0.2, 1.0, 2.0, 100.0])
