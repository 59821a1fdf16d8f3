"""Video files: frames with a caption strip become an mp4.

Knows nothing about where frames come from or what a model makes of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

CAPTION_WIDTH = 320
"""Frames are enlarged by a whole factor to at least this width, so that a caption can be read (pixels)."""
_LINE_HEIGHT = 16
_MARGIN = 4


def caption_frames(
    frames: UInt8[np.ndarray, "frame height width 3"], lines: Sequence[str]
) -> UInt8[np.ndarray, "frame tall wide 3"]:
    """Enlarge frames and put lines of text on a dark strip below them; text that is too long is cut with dots."""
    import cv2  # where it is used: simulators' interpreters may lack it

    factor = -(-CAPTION_WIDTH // frames.shape[2])
    large = frames.repeat(factor, axis=1).repeat(factor, axis=2)
    strip = np.full((_even(len(lines) * _LINE_HEIGHT + 2 * _MARGIN), large.shape[2], 3), 24, dtype=np.uint8)
    for row, line in enumerate(lines):
        origin = (_MARGIN, _MARGIN + (row + 1) * _LINE_HEIGHT - 4)
        text = _fit(_plain(line), large.shape[2] - 2 * _MARGIN)
        cv2.putText(strip, text, origin, cv2.FONT_HERSHEY_SIMPLEX, 0.4, (235, 235, 235), 1, cv2.LINE_AA)
    return np.concatenate([large, np.broadcast_to(strip, (len(large), *strip.shape))], axis=1)


def write_filmstrips(path: Path, episodes: Sequence[UInt8[np.ndarray, "_ height width 3"]], columns: int = 5) -> None:
    """Write a PNG with one row an episode: `columns` of its frames, evenly chosen, first and last included."""
    import cv2

    rows = []
    for frames in episodes:
        chosen = frames[np.linspace(0, len(frames) - 1, columns).round().astype(int)]
        rows.append(np.concatenate(list(chosen), axis=1))
    if not cv2.imwrite(str(path), np.concatenate(rows)[:, :, ::-1]):
        raise OSError(f"{path} could not be written")


def write_mp4(path: Path, frames: UInt8[np.ndarray, "frame height width 3"], fps: float) -> None:
    """Write RGB frames as an mp4: H.264 where PyAV is installed, so that browsers play it, else MPEG-4.

    An odd last row or column is dropped, since both formats store colours at half the size.

    Raises:
        ValueError: there is no frame.
        OSError: the file cannot be written.
    """
    if not len(frames):
        raise ValueError(f"{path}: a video needs at least one frame, got none")
    frames = np.ascontiguousarray(frames[:, : frames.shape[1] // 2 * 2, : frames.shape[2] // 2 * 2])
    try:
        import av  # noqa: F401
    except ImportError:
        _write_mpeg4(path, frames, fps)
    else:
        _write_h264(path, frames, fps)


def _write_h264(path: Path, frames: UInt8[np.ndarray, "frame height width 3"], fps: float) -> None:
    import av

    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.thread_count = 1
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def _write_mpeg4(path: Path, frames: UInt8[np.ndarray, "frame height width 3"], fps: float) -> None:
    import cv2

    height, width = frames.shape[1:3]
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), fps, (width, height))
    if not writer.isOpened():
        raise OSError(f"{path}: OpenCV cannot write this mp4")
    for frame in frames:
        writer.write(frame[..., ::-1])
    writer.release()


def _fit(text: str, width: int) -> str:
    """Text, cut from its end until it fits the width (pixels)."""
    import cv2

    def is_wide(candidate: str) -> bool:
        return bool(cv2.getTextSize(candidate, cv2.FONT_HERSHEY_SIMPLEX, 0.4, 1)[0][0] > width)

    if not is_wide(text):
        return text
    while text and is_wide(f"{text}..."):
        text = text[:-1]
    return f"{text}..."


def _plain(text: str) -> str:
    """OpenCV's fonts draw ASCII alone."""
    return text.encode("ascii", "replace").decode()


def _even(number: int) -> int:
    return number + number % 2
