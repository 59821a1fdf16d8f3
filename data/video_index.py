"""What a video file holds, without decoding it: when its frames appear, how large and which way up they are.

Knows nothing about which frames are wanted.
"""

from __future__ import annotations

import hashlib
import math
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.media_length import MATROSKA, MOV, missing_fragments, missing_frames, missing_picture, missing_time

MAX_SOURCE_PIXELS = 1 << 26
"""A larger frame is refused: it is a damaged header or would take the machine's memory (pixels)."""
_PLAIN_FORMATS = ("yuv420p", "yuvj420p")
_PLAIN_CODECS = ("h264", "hevc", "vp8", "vp9", "mpeg4")
_PLAIN_CONTAINERS = (MOV, MATROSKA)
_REORDERED_IN_AVI = ("h264", "hevc")
"""AVI has no times of frames, and FFmpeg gives those of the order in which these codecs store them."""
_EXIF_ORIENTATION_TAG = 0x0112
_EXIF_ORIENTATIONS = {
    1: (0, False),
    2: (0, True),
    3: (2, False),
    4: (2, True),
    5: (1, True),
    6: (3, False),
    7: (3, True),
    8: (1, False),
}
"""Quarter turns to the left, after mirroring left to right, that make a picture upright."""
_DISPLAY_MATRIX = "DISPLAYMATRIX"


class BadMedia(Exception):
    """A file cannot be shown; the message is the reason."""


@dataclass(frozen=True)
class VideoIndex:
    """What a file holds, without decoding it."""

    times_s: tuple[float, ...]
    """When each frame appears, from the first one at 0 (s)."""
    keyframes: tuple[int, ...]
    """Frames to which decoding can jump."""
    is_counted: bool
    """True where decoded frames do not tell their time but come in order: their place tells it."""
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
            name = container.format.name
            _raise_if_cut(
                missing_frames(stream, facts.st_size) or missing_fragments(path, name) or missing_picture(path, name)
            )
            packets = [packet for packet in container.demux(stream) if packet.size]
            first = _first_frame(path)
            index = _index(name, stream, packets, first, _orientation(path, first))
            end_s = index.first_pts * index.time_base + index.duration_s
            _raise_if_cut(missing_time(path, container, stream, index.times_s, end_s))
            return index
    except (av.FFmpegError, OSError, ValueError, UnicodeError) as error:
        raise BadMedia(file_reason(error)) from None


def _raise_if_cut(missing: str) -> None:
    """A file of which a part is missing would silently show less than the question is about."""
    if missing:
        raise BadMedia(f"the file is cut short: {missing}")


def _index(
    container_name: str, stream: Any, packets: Sequence[Any], first: Any, orientation: tuple[int, bool]
) -> VideoIndex:
    time_base = float(stream.time_base)
    shown = [packet for packet in packets if not packet.is_discard]
    stamps = [packet.pts if packet.pts is not None else packet.dts for packet in shown]
    is_counted = any(stamp is None for stamp in stamps)
    if is_counted:
        rate = float(stream.average_rate or stream.guessed_rate or 25)
        stamps = [round(place / rate / time_base) for place in range(len(shown))]
    order = sorted(range(len(stamps)), key=lambda place: stamps[place])
    if not order:
        raise BadMedia("the file has no frames")
    is_counted |= container_name == "avi" and stream.codec_context.name in _REORDERED_IN_AVI
    first_pts = stamps[order[0]]
    times = tuple((stamps[place] - first_pts) * time_base for place in order)
    turns, mirrored = orientation
    _check_size(first.height, first.width)
    height, width = (first.width, first.height) if turns % 2 else (first.height, first.width)
    keyframes = tuple(place for place, source in enumerate(order) if shown[source].is_keyframe)
    is_plain = (
        container_name in _PLAIN_CONTAINERS
        and first.format.name in _PLAIN_FORMATS
        and len(shown) == len(packets)
        and not (turns or mirrored or is_counted)
        and _seeks_land(stream.codec_context.name, stamps, [packet.is_keyframe for packet in shown])
    )
    return VideoIndex(
        times_s=times,
        keyframes=() if is_counted else keyframes,
        is_counted=is_counted,
        first_pts=first_pts,
        time_base=time_base,
        duration_s=times[-1] + _last_frame_s(times, shown[order[-1]], time_base),
        height=height,
        width=width,
        turns=turns,
        mirrored=mirrored,
        is_plain=is_plain,
    )


def _seeks_land(codec: str, stamps: Sequence[int], are_keys: Sequence[bool]) -> bool:
    """True where decord finds its place after a jump: it miscounts frames stored after a keyframe but shown before it.

    Measured with decord 0.6.0: open GOPs of H.264 and HEVC (x265's default), any B-frames of MPEG-4 and MPEG-2, WMV.
    """
    if codec not in _PLAIN_CODECS or (codec == "mpeg4" and list(stamps) != sorted(stamps)):
        return False
    key_stamp = stamps[0]
    for stamp, is_key in zip(stamps, are_keys, strict=True):
        if is_key:
            key_stamp = stamp
        if stamp < key_stamp:
            return False
    return True


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


def _orientation(path: Path, frame: Any) -> tuple[int, bool]:
    """Quarter turns to the left and mirroring that a display matrix or EXIF asks for."""
    try:
        matrix = next((data for data in frame.side_data if data.type.name == _DISPLAY_MATRIX), None)
    except ValueError:  # PyAV 18 lists no side data of a frame that has some it does not know, as EXIF
        return _exif_orientation(path, frame)
    if matrix is None:
        return 0, False
    a, b, _, c, d = np.frombuffer(bytes(matrix), np.int32)[:5].tolist()
    mirrored = a * d - b * c < 0
    if mirrored:
        a, b = -a, -b
    return round(math.degrees(math.atan2(-b, a)) / 90) % 4, mirrored


def _exif_orientation(path: Path, frame: Any) -> tuple[int, bool]:
    """The same by a picture's EXIF; by its angle alone, which tells no mirroring, where Pillow cannot open it."""
    from PIL import Image

    try:
        with Image.open(path) as picture:
            return _EXIF_ORIENTATIONS.get(picture.getexif().get(_EXIF_ORIENTATION_TAG, 1), (0, False))
    except (OSError, SyntaxError):  # as Pillow says of what it does not know and of EXIF that is damaged
        return round(frame.rotation / 90) % 4, False


def _check_size(height: int, width: int) -> None:
    if height < 1 or width < 1:
        raise BadMedia("the video stream has no size")
    if height * width > MAX_SOURCE_PIXELS:
        raise BadMedia(f"frames of {width}x{height} pixels are over {MAX_SOURCE_PIXELS} pixels")


def file_reason(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file"
    text = str(getattr(error, "strerror", None) or error).strip()
    return f"cannot be read ({text or type(error).__name__})"


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
        raise BadMedia(file_reason(error)) from None
    return digest.hexdigest()
