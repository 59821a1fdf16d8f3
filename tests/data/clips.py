"""Small videos made by script: frames whose colour tells their time, in the containers and codecs people have."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

CLOCK = Fraction(1, 90000)
QUARTER_TURN = {0: (1, 0, 0, 1), 90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}
"""Display matrices that ask a player to turn clockwise (degrees)."""
MIRROR = (-1, 0, 0, 1)
NUMBERED_SIZE = (224, 168)
"""Width and height of frames that show their number (pixels): 8 x 6 cells of 28."""


def grey_at(time_s: float) -> int:
    """Grey value of a frame that appears at a time up to 5.8 s."""
    return round(20 + 40 * time_s)


def make_video(
    path: Path,
    times_s: Sequence[float],
    *,
    width: int = 64,
    height: int = 48,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    clock: Fraction = CLOCK,
    options: dict[str, str] | None = None,
    frames: np.ndarray | None = None,
    sound: str = "",
    sound_s: float = 0.0,
    container_options: dict[str, str] | None = None,
) -> Path:
    """One frame for each time: grey by `grey_at`, or those given; silence by the codec `sound`."""
    with av.open(str(path), "w", options=container_options or {}) as container:
        stream: Any = container.add_stream(codec, rate=30)
        stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt
        stream.time_base = stream.codec_context.time_base = clock
        stream.codec_context.thread_count = 1
        stream.options = {"preset": "ultrafast", **(options or {})} if codec == "libx264" else options or {}
        silence: Any = container.add_stream(sound, rate=48000, layout="mono") if sound else None
        for place, time_s in enumerate(times_s):
            picture = np.full((height, width, 3), grey_at(time_s), np.uint8) if frames is None else frames[place]
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            frame.pts, frame.time_base = round(time_s / clock), clock
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if silence:
            _encode_silence(container, silence, sound_s)
    return path


def _encode_silence(container: Any, stream: Any, duration_s: float) -> None:
    samples = stream.codec_context.frame_size
    for start in range(0, round(duration_s * 48000), samples):
        frame = av.AudioFrame(format=stream.codec_context.format, layout="mono", samples=samples)
        for plane in frame.planes:
            plane.update(bytes(plane.buffer_size))
        frame.sample_rate, frame.pts, frame.time_base = 48000, start, Fraction(1, 48000)
        container.mux(stream.encode(frame))
    container.mux(stream.encode())


def steady(count: int, fps: float = 10.0) -> list[float]:
    return [place / fps for place in range(count)]


def red_on_top(height: int, width: int) -> np.ndarray:
    """One upright frame: blue, the top third red."""
    frame = np.zeros((height, width, 3), np.uint8)
    frame[...] = (20, 20, 230)
    frame[: height // 3] = (230, 20, 20)
    return frame


def numbered_frames(count: int) -> np.ndarray:
    """Frames that show their number, up to 255: eight stripes, white where its bit is 1."""
    width, height = NUMBERED_SIZE
    bits = np.arange(count)[:, None] >> np.arange(8) & 1
    stripes = (20 + 210 * bits).astype(np.uint8).repeat(width // 8, axis=1)
    return np.broadcast_to(stripes[:, None, :, None], (count, height, width, 3))


def numbers_of(frames: np.ndarray) -> list[int]:
    """The numbers that `numbered_frames` show."""
    stripes = frames.mean((1, 3)).reshape(len(frames), 8, -1).mean(-1) > 125
    return [int(number) for number in stripes @ (1 << np.arange(8))]


def set_display_matrix(path: Path, matrix: tuple[int, int, int, int]) -> None:
    """Write a, b, c, d of the display matrix into an mp4's track header."""
    content = bytearray(path.read_bytes())
    header = content.index(b"tkhd")
    offset = header + 8 + (32 if content[header + 4] else 20) + 16
    a, b, c, d = (value << 16 for value in matrix)
    content[offset : offset + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(content)


def set_edit_list(path: Path, start_s: float, duration_s: float) -> None:
    """Make an mp4's one edit show `duration_s` from `start_s` of its media."""
    content = bytearray(path.read_bytes())
    entry = content.index(b"elst") + 12
    movie_clock = struct.unpack(">I", content[content.index(b"mvhd") + 16 :][:4])[0]
    media_clock = struct.unpack(">I", content[content.index(b"mdhd") + 16 :][:4])[0]
    _, media_time = struct.unpack(">Ii", content[entry : entry + 8])
    shown = struct.pack(">Ii", round(duration_s * movie_clock), media_time + round(start_s * media_clock))
    content[entry : entry + 8] = shown
    path.write_bytes(content)
