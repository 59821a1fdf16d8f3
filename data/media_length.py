"""Whether a media file is all there, by what its own index and headers say; "" where nothing is missing.

Knows nothing about what is shown of it.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

MOV = "mov,mp4,m4a,3gp,3g2,mj2"
MATROSKA = "matroska,webm"
_PICTURES = ("image2", "jpeg_pipe", "gif")
"""FFmpeg's names of containers."""
_LENGTH_TAG = re.compile(r"(\d+):(\d+):(\d+(?:\.\d+)?)")
_MISSING_SHARE = 0.05
"""A file that ends earlier than its header says by more than this share is cut short."""


def missing_frames(stream: Any, file_bytes: int) -> str:
    """Frames that the index places past the file's end."""
    ends = [entry.pos + entry.size for entry in stream.index_entries]
    there = sum(end <= file_bytes for end in ends)
    return f"{there} of {len(ends)} frames are there" if there < len(ends) else ""


def missing_fragments(path: Path, container_name: str) -> str:
    """Fragments of an mp4 past a hole or past the file's end: each box says where the next one begins."""
    if container_name != MOV:
        return ""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        at, is_fragmented, kind = 0, False, b""
        while at < len(content):
            size, kind = int.from_bytes(content[at : at + 4], "big"), content[at + 4 : at + 8]
            if size == 1:
                size = int.from_bytes(content[at + 8 : at + 16], "big")
            if size < 8:
                is_lost = (size > 0 or not any(kind)) and content.find(b"moof", at) >= 0
                return f"the fragments past byte {at} cannot be found" if is_lost else ""
            is_fragmented |= kind == b"moof"
            at += size
        is_cut = is_fragmented and at > len(content) and kind in (b"moof", b"mdat")
        return f"{len(content)} of {at} bytes are there" if is_cut else ""


def missing_picture(path: Path, container_name: str) -> str:
    """What Pillow misses in a JPEG or a GIF: FFmpeg shows that part in grey, or not at all, without a word."""
    from PIL import Image

    if container_name not in _PICTURES:
        return ""
    try:
        with Image.open(path) as picture:
            if container_name == "gif":
                picture.seek(getattr(picture, "n_frames", 1) - 1)
            picture.load()
    except (OSError, EOFError, SyntaxError) as error:  # what Pillow cannot read otherwise, FFmpeg may
        return str(error) if "truncated" in str(error) else ""
    return ""


def missing_time(path: Path, container: Any, stream: Any, times_s: Sequence[float], end_s: float) -> str:
    """Time at the end that the header says is there; a single frame tells nothing, it may stay for long.

    Args:
        times_s: when each frame appears.
        end_s: when the last one disappears, by the file's own clock.
    """
    gaps = np.diff(times_s)
    said_s, is_of_video = _said_end_s(container, stream)
    least_s = said_s - max(_MISSING_SHARE * said_s, float(gaps.max(initial=0.0)))
    if not gaps.size or end_s >= least_s:
        return ""
    if not is_of_video:
        end_s = max(end_s, _last_end_s(path))
    return f"{end_s:.1f} of {said_s:.1f} s are there" if end_s < least_s else ""


def _said_end_s(container: Any, stream: Any) -> tuple[float, bool]:
    """When the header says that the file ends (s), and whether that is the video's end; 0 where it does not say.

    Other formats have no such header, an index (`missing_frames`), or a length that is read off the end of the file.
    """
    name = container.format.name
    if name == "avi":
        return float(stream.frames * stream.time_base), True
    if name == MATROSKA and (tag := _LENGTH_TAG.fullmatch(stream.metadata.get("DURATION", ""))):
        hours, minutes, seconds = tag.groups()
        return 3600 * int(hours) + 60 * int(minutes) + float(seconds), True
    if name in (MATROSKA, "flv"):
        return (container.duration or 0) / 1e6, False
    return 0.0, False


def _last_end_s(path: Path) -> float:
    """When the last packet of any stream ends (s): sound may go on after the video."""
    import av

    with av.open(str(path)) as container:
        ends = [
            float((packet.pts + (packet.duration or 0)) * packet.time_base)
            for packet in container.demux()
            if packet.pts is not None and packet.time_base is not None
        ]
    return max(ends, default=0.0)
