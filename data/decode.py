"""Frames of a video file at chosen times: upright, in RGB, resized, the same whichever decoder reads them.

decord is fast and reads plain files; PyAV reads what decord gets wrong (measured with decord 0.6.0: edit lists are
ignored, colours of more than 8 bits are off by up to 51 of 255) and what it cannot open. Both are asked for the frame
that is on screen at a time, never for an index. Knows nothing about data sets, prompts or processes.
"""

from __future__ import annotations

import bisect
import hashlib
import logging
import math
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import UInt8

from data.budget import ClipPlan, ClipSpec, TooThin, plan_clip

logger = logging.getLogger(__name__)

Decoder = Literal["auto", "decord", "pyav"]
"""`auto` is decord where it is known to be right, and PyAV otherwise or where decord fails."""

DECODE_VERSION = 1
"""Part of every cache key: raise it when equal input gives other frames."""
MAX_SOURCE_PIXELS = 1 << 26
"""A larger frame is refused: it is a damaged header or would take the machine's memory (pixels)."""
_PLAIN_FORMATS = ("yuv420p", "yuvj420p")
_SAME_TIME_S = 2e-3
_DISPLAY_MATRIX = "DISPLAYMATRIX"


class BadMedia(Exception):
    """A file cannot be shown; the message is the reason."""


@dataclass(frozen=True)
class VideoIndex:
    """What a file holds, without decoding it."""

    times_s: tuple[float, ...]
    """When each frame appears, from the first one at 0 (s)."""
    keyframes: tuple[int, ...]
    """Frames from which decoding can start."""
    first_pts: int
    time_base: float
    """The stream's clock: frame time is (pts - first_pts) * time_base (s)."""
    duration_s: float
    """Until the last frame disappears (s)."""
    height: int
    width: int
    """Of an upright frame (pixels)."""
    turns: int
    """Quarter turns to the left that make a stored frame upright, 0 to 3."""
    mirrored: bool
    """True where a stored frame is flipped left to right before it is turned."""
    is_plain: bool
    """True where decord's frames are known to be these."""


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


def decode(path: Path, spec: ClipSpec, decoder: Decoder = "auto") -> DecodedClip:
    """The frames of `path` that `spec` asks for.

    Raises:
        BadMedia: the file is missing, damaged, empty, cut short, or of a shape that no model takes.
        ConfigError: not even one frame fits the spec's tokens.
    """
    index = probe(path)
    try:
        plan = plan_clip(index.duration_s, len(index.times_s), index.height, index.width, spec)
    except TooThin as error:
        raise BadMedia(str(error)) from None
    chosen = [frame_at(index.times_s, time) for time in plan.times_s]
    frames, used = _read(path, index, chosen, decoder)
    resized = np.stack([_resize(frame, plan.height, plan.width) for frame in frames])
    times = tuple(index.times_s[place] for place in chosen)
    return DecodedClip(resized, times, index.duration_s, len(index.times_s), plan, used)


def frame_at(times_s: Sequence[float], time_s: float) -> int:
    """The frame on screen at a time: the last one that appeared by then."""
    return max(0, bisect.bisect_right(times_s, time_s + _SAME_TIME_S / 2) - 1)


def content_hash(path: Path) -> str:
    """Digest of a file's bytes.

    Raises:
        BadMedia: it cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise BadMedia(_file_reason(error)) from None
    return digest.hexdigest()


def clip_key(content: str, index: VideoIndex, spec: ClipSpec) -> str:
    """Name under which decoded frames are kept: the bytes, how they are turned, what is asked, and this code."""
    facts = (DECODE_VERSION, content, index.turns, index.mirrored, index.height, index.width, spec)
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


# --- what a file holds -------------------------------------------------------------------------------------------


def probe(path: Path) -> VideoIndex:
    """Read a file's structure: packets and one frame's orientation, with PyAV.

    Raises:
        BadMedia: nothing in it can be shown.
    """
    import av

    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):
            raise BadMedia("is no file but a folder or a device")
        if facts.st_size == 0:
            raise BadMedia("the file is empty (0 bytes)")
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise BadMedia("the file has no video stream")
            stream = container.streams.video[0]
            _check_size(stream.codec_context.height, stream.codec_context.width)
            _check_complete(stream, facts.st_size)
            packets = [packet for packet in container.demux(stream) if packet.size]
            return _index(stream, packets, _first_frame(path))
    except (av.FFmpegError, OSError, ValueError, UnicodeError) as error:
        raise BadMedia(_file_reason(error)) from None


def _check_complete(stream: Any, file_bytes: int) -> None:
    """Refuse a file whose own index points past its end: it would silently show less than the question is about."""
    ends = [entry.pos + entry.size for entry in stream.index_entries]
    there = sum(end <= file_bytes for end in ends)
    if there < len(ends):
        raise BadMedia(f"the file is cut short: {there} of {len(ends)} frames are there")


def _index(stream: Any, packets: Sequence[Any], first: Any) -> VideoIndex:
    time_base = float(stream.time_base)
    shown = [packet for packet in packets if not packet.is_discard]
    stamps = [packet.pts if packet.pts is not None else packet.dts for packet in shown]
    if any(stamp is None for stamp in stamps):
        rate = float(stream.average_rate or stream.guessed_rate or 25)
        stamps = [round(place / rate / time_base) for place in range(len(shown))]
    order = sorted(range(len(stamps)), key=lambda place: stamps[place])
    if not order:
        raise BadMedia("the file has no frames")
    first_pts = stamps[order[0]]
    times = tuple((stamps[place] - first_pts) * time_base for place in order)
    turns, mirrored = _orientation(first)
    _check_size(first.height, first.width)
    height, width = (first.width, first.height) if turns % 2 else (first.height, first.width)
    has_discards = len(shown) < len(packets)
    return VideoIndex(
        times_s=times,
        keyframes=tuple(place for place, source in enumerate(order) if shown[source].is_keyframe),
        first_pts=first_pts,
        time_base=time_base,
        duration_s=times[-1] + _last_frame_s(times, shown[order[-1]], time_base),
        height=height,
        width=width,
        turns=turns,
        mirrored=mirrored,
        is_plain=first.format.name in _PLAIN_FORMATS and not has_discards and not turns and not mirrored,
    )


def _first_frame(path: Path) -> Any:
    """The first frame that decodes: its size and orientation hold for the file."""
    import av

    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        frame = next(iter(container.decode(stream)), None)
    if frame is None:
        raise BadMedia("no frame of the file can be decoded")
    return frame


def _last_frame_s(times: Sequence[float], packet: Any, time_base: float) -> float:
    """How long the last frame stays: as its packet says, unless the one before stayed longer or not half as long.

    Muxers that cannot know write the nominal rate's interval, too short where the rate varies.
    """
    gap = times[-1] - times[-2] if len(times) > 1 else 0.0
    said = (packet.duration or 0) * time_base
    if said > 0 and (gap <= 0 or gap < said <= 2 * gap):
        return float(said)
    return gap if gap > 0 else 1.0


def _orientation(frame: Any) -> tuple[int, bool]:
    """Quarter turns to the left and mirroring that a display matrix asks for."""
    matrix = next((data for data in frame.side_data if data.type.name == _DISPLAY_MATRIX), None)
    if matrix is None:
        return 0, False
    a, b, _, c, d = np.frombuffer(bytes(matrix), np.int32)[:5].tolist()
    mirrored = a * d - b * c < 0
    if mirrored:
        a, b = -a, -b
    return round(math.degrees(math.atan2(-b, a)) / 90) % 4, mirrored


def _check_size(height: int, width: int) -> None:
    if height < 1 or width < 1:
        raise BadMedia("the video stream has no size")
    if height * width > MAX_SOURCE_PIXELS:
        raise BadMedia(f"frames of {width}x{height} pixels are over {MAX_SOURCE_PIXELS} pixels")


def _file_reason(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file"
    text = str(getattr(error, "strerror", None) or error).strip()
    return f"cannot be read ({text or type(error).__name__})"


# --- frames ------------------------------------------------------------------------------------------------------


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
        return list(_read_with_pyav(path, index, chosen)), "pyav"
    except (av.FFmpegError, OSError, ValueError, MemoryError) as error:
        raise BadMedia(_file_reason(error)) from None


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


def _read_with_pyav(path: Path, index: VideoIndex, chosen: Sequence[int]) -> Iterator[np.ndarray]:
    """Decode forwards, jumping to a later keyframe where one lies before the next chosen frame."""
    import av

    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        frames = container.decode(stream)
        current, ahead = None, next(frames, None)
        for target in chosen:
            time_s = index.times_s[target] + _SAME_TIME_S / 2
            keyframe = _keyframe_before(index, target)
            if index.times_s[keyframe] > _time(ahead, index):
                container.seek(_pts(index, keyframe), stream=stream)
                frames = container.decode(stream)
                ahead = next(frames, None)
                if _time(ahead, index) > time_s:
                    raise BadMedia(f"the keyframe at {index.times_s[keyframe]:.3f} s cannot be reached")
            while ahead is not None and (current is None or _time(ahead, index) <= time_s):
                current, ahead = ahead, next(frames, None)
            if current is None or _time(current, index) > time_s:
                raise BadMedia(f"the frame at {index.times_s[target]:.3f} s cannot be decoded")
            yield _upright(current.to_ndarray(format="rgb24"), index)


def _keyframe_before(index: VideoIndex, target: int) -> int:
    place = bisect.bisect_right(index.keyframes, target) - 1
    return index.keyframes[place] if place >= 0 else 0


def _pts(index: VideoIndex, place: int) -> int:
    return index.first_pts + round(index.times_s[place] / index.time_base)


def _time(frame: Any, index: VideoIndex) -> float:
    """When a frame appears (s); infinite past the end."""
    if frame is None:
        return math.inf
    return float((frame.pts if frame.pts is not None else frame.dts or 0) - index.first_pts) * index.time_base


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
