"""How many frames of a clip are shown, how large, and what gives way where that is over the budget. Arithmetic alone.

Knows nothing about files, decoders or tokens' ids: a clip is a length, a number of frames and a size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from configs.errors import ConfigError

MAX_ASPECT_RATIO = 200
"""Frames that are longer and thinner are refused, as the processors do."""
_ROUNDING = 0.05
"""A last frame that would be on screen for less than this share of an interval is left out."""


@dataclass(frozen=True)
class ClipSpec:
    """What a model may be shown of one video."""

    fps: float = 2.0
    """Frames taken from a second of video, at most (1/s)."""
    num_frames: int = 0
    """Frames taken whatever the length; 0 goes by `fps` (count)."""
    max_frames: int = 64
    """Most frames (count)."""
    min_pixels: int = 28 * 28
    max_pixels: int = 28 * 28 * 64
    """Bounds on a frame's area after resizing (pixels)."""
    max_tokens: int = 0
    """Most placeholder tokens of the video; 0 sets no bound (tokens)."""
    gives_way: Literal["pixels", "frames"] = "pixels"
    """What is reduced first over `max_tokens`; the other follows where that is not enough."""
    factor: int = 28
    """Pixels of a merged patch's side: patch size times merge size."""
    temporal_patch: int = 2
    """Frames that share one step of the temporal grid (count)."""

    def __post_init__(self) -> None:
        if not self.factor**2 <= self.max_pixels or self.min_pixels > self.max_pixels:
            raise ConfigError(
                f"frames of {self.min_pixels} to {self.max_pixels} pixels: agent.max_pixels must be at least "
                f"{self.factor}x{self.factor}={self.factor**2} and at least agent.min_pixels. Raise it."
            )


@dataclass(frozen=True)
class ClipPlan:
    """What is shown of one clip."""

    num_frames: int
    """Frames taken (count)."""
    height: int
    width: int
    """Size after resizing (pixels), multiples of the spec's factor."""
    grid_thw: tuple[int, int, int]
    """Steps in time, merged patches in height and width: their product is `num_tokens`."""
    interval_s: float
    """Time between two frames (s)."""
    notes: tuple[str, ...] = ()
    """What was reduced or repeated, and why."""

    @property
    def times_s(self) -> list[float]:
        """Times from the clip's start at which frames are taken: at equal distances, whatever its frame rate (s)."""
        return [index * self.interval_s for index in range(self.num_frames)]

    @property
    def num_tokens(self) -> int:
        """Placeholder tokens (count)."""
        return math.prod(self.grid_thw)


class Unshowable(ValueError):
    """No frames of a clip can be shown: it is too thin, or its smallest form is over the tokens it may have."""


def plan_clip(duration_s: float, source_frames: int, height: int, width: int, spec: ClipSpec) -> ClipPlan:
    """Frames and size for a clip of `source_frames` frames that lasts `duration_s` and is `height` x `width` pixels.

    Over `spec.max_tokens`, whole frames or whole sizes are reduced, so that a media span is never cut.

    Raises:
        Unshowable: the sides differ by more than `MAX_ASPECT_RATIO`, or not even the smallest frame fits
            `spec.max_tokens`.
    """
    assert source_frames >= 1, source_frames
    notes: list[str] = []
    wanted = spec.num_frames or max(1, math.ceil(duration_s * spec.fps - _ROUNDING))
    frames = min(wanted, spec.max_frames, source_frames)
    is_repeated = frames == 1 and spec.temporal_patch > 1
    if frames < wanted and not (is_repeated and source_frames == 1):
        limit = "data.max_frames" if spec.max_frames < source_frames else "the video has no more"
        notes.append(f"{wanted} frames wanted, {frames} taken: {limit}")
    if is_repeated:
        notes.append(f"one frame, shown {spec.temporal_patch} times")
    size = smart_resize(height, width, spec)
    if spec.max_tokens and _tokens(frames, size, spec) > spec.max_tokens:
        before = (frames, size)
        frames, size = _reduce(frames, height, width, size, spec)
        notes.append(f"{_shape(*before)} reduced to {_shape(frames, size)}: at most {spec.max_tokens} tokens a video")
    grid = (-(-frames // spec.temporal_patch), size[0] // spec.factor, size[1] // spec.factor)
    by_rate = not spec.num_frames and frames == wanted
    interval_s = 1 / spec.fps if by_rate else max(duration_s, 1e-3) / frames
    return ClipPlan(frames, *size, grid, interval_s, tuple(notes))


def smart_resize(height: int, width: int, spec: ClipSpec, max_pixels: int = 0) -> tuple[int, int]:
    """Nearest size with sides that are multiples of the factor, at least one, and an area within the bounds.

    Where the processors' own rule would leave the bounds (a thin frame whose short side is rounded up), the long side
    gives way, so that a second resize by the processor changes nothing.

    Raises:
        Unshowable: the sides differ by more than `MAX_ASPECT_RATIO`.
    """
    if min(height, width) < 1 or max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise Unshowable(f"frames of {width}x{height} pixels are over {MAX_ASPECT_RATIO} times as long as wide")
    factor, most = spec.factor, max_pixels or spec.max_pixels
    least = min(spec.min_pixels, most)
    tall, wide = (max(factor, round(side / factor) * factor) for side in (height, width))
    if tall * wide > most:
        scale = math.sqrt(height * width / most)
        tall, wide = (max(factor, math.floor(side / scale / factor) * factor) for side in (height, width))
    elif tall * wide < least:
        scale = math.sqrt(least / (height * width))
        tall, wide = (math.ceil(side * scale / factor) * factor for side in (height, width))
    if tall * wide > most:
        cells = most // factor**2
        short, long = sorted((tall // factor, wide // factor))
        short = min(short, cells)
        long = max(1, min(long, cells // short))
        tall, wide = (short * factor, long * factor) if tall <= wide else (long * factor, short * factor)
    return tall, wide


def video_token_budget(max_model_len: int, response_tokens: int, text_tokens: int, num_videos: int) -> int:
    """Placeholder tokens that each of a row's videos may have, beside its text and its response (tokens)."""
    return max(0, max_model_len - response_tokens - text_tokens) // max(1, num_videos)


def least_tokens(spec: ClipSpec) -> int:
    """Placeholder tokens of the smallest square clip that can be shown: one step in time at `min_pixels` (tokens)."""
    return max(1, math.ceil(math.sqrt(spec.min_pixels) / spec.factor) ** 2)


def _reduce(frames: int, height: int, width: int, size: tuple[int, int], spec: ClipSpec) -> tuple[int, tuple[int, int]]:
    """Frames and size within `max_tokens`, by the rule of `gives_way`."""
    for reduced in (spec.gives_way, "pixels" if spec.gives_way == "frames" else "frames"):
        steps = -(-frames // spec.temporal_patch)
        if reduced == "pixels":
            cells = spec.max_tokens // steps
            most = max(cells, 1) * spec.factor**2
            size = smart_resize(height, width, spec, max_pixels=max(most, min(spec.min_pixels, spec.max_pixels)))
        else:
            frames = min(frames, max(1, spec.max_tokens // _tokens(1, size, spec)) * spec.temporal_patch)
        if _tokens(frames, size, spec) <= spec.max_tokens:
            return frames, size
    raise Unshowable(
        f"{_shape(frames, size)} need {_tokens(frames, size, spec)} tokens; a video may have {spec.max_tokens}. "
        "Raise data.max_video_tokens or runtime.max_model_len, or lower agent.min_pixels."
    )


def _tokens(frames: int, size: tuple[int, int], spec: ClipSpec) -> int:
    return -(-frames // spec.temporal_patch) * (size[0] // spec.factor) * (size[1] // spec.factor)


def _shape(frames: int, size: tuple[int, int]) -> str:
    return f"{frames} frames of {size[1]}x{size[0]}"
