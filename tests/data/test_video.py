"""Videos that are written can be read, and show what they were given."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from data.video import CAPTION_WIDTH, caption_frames, write_filmstrips, write_mp4


def read(path: Path) -> tuple[np.ndarray, float]:
    capture = cv2.VideoCapture(str(path))
    frames: list[np.ndarray] = []
    while True:
        found, frame = capture.read()
        if not found:
            return np.array(frames)[..., ::-1], float(capture.get(cv2.CAP_PROP_FPS))
        frames.append(frame)


def colored(*colors: tuple[int, int, int]) -> np.ndarray:
    frames = np.zeros((len(colors), 48, 64, 3), np.uint8)
    for frame, color in zip(frames, colors, strict=True):
        frame[:] = color
    return frames


@pytest.mark.parametrize("codec", ["h264", "mpeg4"])
def test_an_mp4_has_the_frames_it_was_given(codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if codec == "mpeg4":
        real_import = builtins.__import__

        def without_av(name: str, *args: Any, **kwargs: Any) -> Any:
            if name == "av":
                raise ImportError(name)
            return real_import(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", without_av)
    given = colored((220, 30, 30), (30, 200, 30), (30, 30, 220), (128, 128, 128), (0, 0, 0))
    write_mp4(tmp_path / "a.mp4", given, fps=4.0)
    frames, fps = read(tmp_path / "a.mp4")
    assert fps == pytest.approx(4)
    assert frames.shape == given.shape
    assert np.abs(frames[:, 24, 32].astype(int) - given[:, 24, 32]).max() < 25


def test_odd_sizes_lose_their_last_row_and_column(tmp_path: Path) -> None:
    write_mp4(tmp_path / "a.mp4", np.full((2, 33, 65, 3), 100, np.uint8), fps=2.0)
    assert read(tmp_path / "a.mp4")[0].shape == (2, 32, 64, 3)


def test_no_frames_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one frame"):
        write_mp4(tmp_path / "a.mp4", np.zeros((0, 32, 32, 3), np.uint8), fps=2.0)


def test_a_caption_lies_below_the_enlarged_frame() -> None:
    frames = colored((10, 20, 30), (40, 50, 60))
    shown = caption_frames(frames, ("go to the red box", "turn 1: forward"))
    assert shown.shape == (
        2,
        48 * 5 + 40,
        CAPTION_WIDTH,
        3,
    )  # 64 pixels five times; two lines of 16 and two margins of 4
    assert (shown[0, :240] == (10, 20, 30)).all()
    assert (shown[1, :240] == (40, 50, 60)).all()
    assert shown[0, 240:].max() > 200
    assert np.array_equal(shown[0, 240:], shown[1, 240:])


def test_long_text_is_cut_and_foreign_letters_do_no_harm() -> None:
    frames = colored((0, 0, 0))
    shown = caption_frames(frames, ("é" * 500,))
    assert shown[0, -24:, -4:].max() < 100  # nothing reaches the right margin


def test_filmstrips_show_the_first_and_the_last_frame_of_each_episode(tmp_path: Path) -> None:
    episodes = [np.full((7, 4, 6, 3), 10 * row, dtype=np.uint8) for row in (1, 2)]
    episodes[0][-1] = 250
    write_filmstrips(tmp_path / "episodes.png", episodes, columns=3)
    picture = cv2.imread(str(tmp_path / "episodes.png"))
    assert picture is not None
    assert picture.shape == (8, 18, 3)
    assert (picture[:4, :12] == 10).all()
    assert (picture[:4, 12:] == 250).all()
    assert (picture[4:] == 20).all()
