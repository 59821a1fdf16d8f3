"""Frames of a video file at chosen times: upright, in RGB, resized, the same whichever decoder reads them.

decord is fast and reads plain files; PyAV reads what decord gets wrong (measured with decord 0.6.0: edit lists are
ignored, colours of more than 8 bits are off by up to 51 of 255, it loses count after a jump where frames are stored
after a keyframe but shown before it) and what it cannot open. Both are asked for the frame that is on screen at a time,
never for an index. Knows nothing about data sets, prompts or processes.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import UInt8

from data.budget import ClipPlan, ClipSpec, Unshowable, plan_clip
from data.video_index import BadMedia, VideoIndex, file_reason, probe

logger = logging.getLogger(__name__)

Decoder = Literal["auto", "decord", "pyav"]
"""`auto` is decord where it is known to be right, and PyAV otherwise or where decord fails."""

DECODE_VERSION = 2
"""Part of every cache key: raise it when equal input gives other frames."""
_SAME_TIME_S = 2e-3


@dataclass(frozen=True, eq=False)
class DecodedClip:
    """Frames of one video as a model is shown them."""

    frames: UInt8[np.ndarray, "frame height width 3"]
    times_s: tuple[float, ...]
    """When each frame appears in the video (s)."""
    duration_s: float
    source_frames: int
    """Frames the video has (count)."""
    plan: ClipPlan
    decoder: str

    @property
    def fps(self) -> float:
        """Frames a second that the clip shows: the temporal patch over this is M-RoPE's seconds per grid step (1/s)."""
        return 1 / self.plan.interval_s


def decode(path: Path, spec: ClipSpec, decoder: Decoder = "auto", index: VideoIndex | None = None) -> DecodedClip:
    """The frames of `path` that `spec` asks for.

    Args:
        index: what `probe` said of the file, where it has been asked already.

    Raises:
        BadMedia: the file is missing, damaged, empty, cut short, or no frame of it can be shown within the spec.
    """
    index = index or probe(path)
    try:
        plan = plan_clip(index.duration_s, len(index.times_s), index.height, index.width, spec)
    except Unshowable as error:
        raise BadMedia(str(error)) from None
    chosen = [frame_at(index.times_s, time) for time in plan.times_s]
    frames, used = _read(path, index, chosen, decoder)
    resized = np.stack([_resize(frame, plan.height, plan.width) for frame in frames])
    times = tuple(index.times_s[place] for place in chosen)
    return DecodedClip(resized, times, index.duration_s, len(index.times_s), plan, used)


def frame_at(times_s: Sequence[float], time_s: float) -> int:
    """The frame on screen at a time: the last one that appeared by then."""
    return max(0, bisect.bisect_right(times_s, time_s + _SAME_TIME_S / 2) - 1)


def clip_key(content: str, index: VideoIndex, spec: ClipSpec) -> str:
    """Name under which decoded frames are kept: the bytes, how they are turned, what is asked, and this code."""
    facts = (DECODE_VERSION, content, index.turns, index.mirrored, index.height, index.width, spec)
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def _read(path: Path, index: VideoIndex, chosen: Sequence[int], decoder: Decoder) -> tuple[list[np.ndarray], str]:
    """The chosen frames, upright, and who read them."""
    if decoder == "decord" or (decoder == "auto" and index.is_plain):
        try:
            return _read_with_decord(path, index, chosen), "decord"
        except Exception as error:  # its own error class derives from Exception alone, as do ctypes' and numpy's
            if decoder == "decord":
                raise BadMedia(f"decord: {error}") from error
            logger.debug("%s: decord failed (%s), PyAV takes over", path, error)
    import av

    try:
        return _read_with_pyav(path, index, chosen), "pyav"
    except (av.FFmpegError, OSError, ValueError, MemoryError) as error:
        raise BadMedia(file_reason(error)) from None


def _read_with_decord(path: Path, index: VideoIndex, chosen: Sequence[int]) -> list[np.ndarray]:
    """decord turns frames itself.

    Raises:
        BadMedia: its frames are not the ones in the index.
    """
    import decord

    decord.logging.set_level(decord.logging.QUIET)
    reader = decord.VideoReader(str(path), num_threads=1)
    times = reader.get_frame_timestamp(range(len(reader)))[:, 0].astype(np.float64)
    times -= times[0]
    if len(times) != len(index.times_s) or np.abs(times - np.asarray(index.times_s)).max() > _SAME_TIME_S:
        raise BadMedia("it sees other frame times")
    frames = reader.get_batch(list(chosen)).asnumpy()
    if frames.shape[1:] != (index.height, index.width, 3):
        raise BadMedia("it sees another frame size")
    return list(frames)


def _read_with_pyav(path: Path, index: VideoIndex, chosen: Sequence[int]) -> list[np.ndarray]:
    """Jumps where that works: in .ts, .mpg and .avi files a jump may land past the keyframe it was meant for."""
    try:
        return list(_walk(path, index, chosen))
    except _LandedLate:
        return list(_walk(path, dataclasses.replace(index, keyframes=()), chosen))


class _LandedLate(Exception):
    """Decoding after a jump began past the keyframe that was asked for."""


def _walk(path: Path, index: VideoIndex, chosen: Sequence[int]) -> Iterator[np.ndarray]:
    """Decode forwards, jumping to a later keyframe where one lies before the next chosen frame."""
    import av

    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        frames = _timed(container.decode(stream), index)
        current_s, current = math.inf, None
        ahead_s, ahead = next(frames)
        for target in chosen:
            time_s = index.times_s[target] + _SAME_TIME_S / 2
            keyframe = _keyframe_before(index, target)
            if index.times_s[keyframe] > ahead_s:
                container.seek(_pts(index, keyframe), stream=stream)
                frames = _timed(container.decode(stream), index)
                ahead_s, ahead = next(frames)
                if ahead_s > index.times_s[keyframe] + _SAME_TIME_S / 2:
                    raise _LandedLate
            while ahead is not None and (current is None or ahead_s <= time_s):
                current_s, current = ahead_s, ahead
                ahead_s, ahead = next(frames)
            if current is None or current_s > time_s:
                raise BadMedia(f"the frame at {index.times_s[target]:.3f} s cannot be decoded")
            yield _upright(current.to_ndarray(format="rgb24"), index)


def _timed(frames: Iterator[Any], index: VideoIndex) -> Iterator[tuple[float, Any]]:
    """Each frame with the time at which it appears (s), then None, which never does."""
    for count, frame in enumerate(frames):
        if index.is_counted:
            yield index.times_s[min(count, len(index.times_s) - 1)], frame
        else:
            stamp = frame.pts if frame.pts is not None else frame.dts or 0
            yield float(stamp - index.first_pts) * index.time_base, frame
    yield math.inf, None


def _keyframe_before(index: VideoIndex, target: int) -> int:
    place = bisect.bisect_right(index.keyframes, target) - 1
    return index.keyframes[place] if place >= 0 else 0


def _pts(index: VideoIndex, place: int) -> int:
    return index.first_pts + round(index.times_s[place] / index.time_base)


def _upright(frame: UInt8[np.ndarray, "height width 3"], index: VideoIndex) -> UInt8[np.ndarray, "tall wide 3"]:
    return np.rot90(frame[:, ::-1] if index.mirrored else frame, index.turns)


def _resize(frame: UInt8[np.ndarray, "height width 3"], height: int, width: int) -> UInt8[np.ndarray, "tall wide 3"]:
    """Averages areas where the frame shrinks, interpolates where it grows."""
    import cv2

    if frame.shape[:2] == (height, width):
        return np.ascontiguousarray(frame)
    shrinks = frame.shape[0] * frame.shape[1] > height * width
    how = cv2.INTER_AREA if shrinks else cv2.INTER_CUBIC
    return np.asarray(cv2.resize(np.ascontiguousarray(frame), (width, height), interpolation=how), dtype=np.uint8)
