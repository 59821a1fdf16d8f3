"""A small set of questions about generated videos, for a demo and for tests: real mp4 files, made in seconds.

Big shapes in pure colours on a dark ground; three kinds of question that one frame cannot answer, or not alone:

    motion   which way a bar moves: left, right, up or down
    count    how many boxes there are: 1, 2 or 3
    order    which of two colours is shown first, as a multiple choice

Everything is drawn from a seed and the place in the split, so that no clip of one split is in the other. Knows nothing
about decoding, prompts or models.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from configs.errors import UserError
from data.task_sampler import stable_seed
from data.video import write_mp4

SIDE = 56
"""Height and width of a frame (pixels)."""
FPS = 4.0
NUM_FRAMES = 8
SIZES = {"train": 600, "eval": 150}
"""Rows of each split (count)."""
SEED = 0
COLOURS = {"red": (235, 30, 30), "green": (30, 220, 40), "blue": (30, 60, 240), "yellow": (240, 220, 20)}
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
"""Answer -> change of row and column."""
_BOX = 26

Frames = UInt8[np.ndarray, "frame height width 3"]


def ensure_demo_set(file: Path) -> None:
    """Make the split that `file` names (`train.jsonl`, `eval.jsonl`) and its videos, unless it is there.

    The file is written last, so that an interrupted one is made again.

    Raises:
        UserError: the name is none of a split.
    """
    split = file.stem
    if split not in SIZES or file.suffix != ".jsonl":
        raise UserError(f"{file}: a demo set has the files {' and '.join(f'{name}.jsonl' for name in SIZES)}")
    if file.is_file():
        return
    videos = file.parent / split
    videos.mkdir(parents=True, exist_ok=True)
    lines = []
    for index in range(SIZES[split]):
        fields, frames = demo_row(split, index)
        name = f"{index:04d}.mp4"
        partial = videos / f".{os.getpid()}.{name}"  # ranks may make the same set at the same time
        write_mp4(partial, frames, FPS)
        partial.rename(videos / name)
        lines.append(json.dumps({"id": f"{split}-{index:04d}", "video": f"{split}/{name}"} | fields) + "\n")
    replacement = file.with_name(f".{file.name}.{os.getpid()}")
    replacement.write_text("".join(lines), encoding="utf-8")
    replacement.rename(file)


def demo_row(split: str, index: int) -> tuple[dict[str, Any], Frames]:
    """Question, answer and frames of one row; the kinds of question take turns."""
    draw = random.Random(stable_seed(SEED, list(SIZES).index(split), index))
    make = (_motion, _count, _order)[index % 3]
    fields, pictures = make(draw)
    return fields, np.stack(list(pictures))


def _motion(draw: random.Random) -> tuple[dict[str, Any], Iterator[np.ndarray]]:
    answer = draw.choice(list(DIRECTIONS))
    colour, start = _colour(draw), draw.randint(0, 4)
    (down, right), far = DIRECTIONS[answer], SIDE - _BOX

    def pictures() -> Iterator[np.ndarray]:
        for frame in range(NUM_FRAMES):
            along = start + (far - 4) * frame // (NUM_FRAMES - 1)
            place = along if down + right > 0 else far - along
            bar = (place, 0, _BOX, SIDE) if down else (0, place, SIDE, _BOX)
            yield _picture(draw, [bar], colour)

    return {"question": "which way does it move?", "answer": answer}, pictures()


def _count(draw: random.Random) -> tuple[dict[str, Any], Iterator[np.ndarray]]:
    number = draw.randint(1, 3)
    colour, half = _colour(draw), SIDE // 2
    corners = draw.sample([(top, left) for top in (0, half) for left in (0, half)], number)
    boxes = [
        _box(top + draw.randint(0, half - _BOX - 1), left + draw.randint(0, half - _BOX - 1)) for top, left in corners
    ]
    pictures = (_picture(draw, boxes, colour) for _ in range(NUM_FRAMES))
    return {"question": "how many are there?", "answer": str(number)}, pictures


def _order(draw: random.Random) -> tuple[dict[str, Any], Iterator[np.ndarray]]:
    first, second = draw.sample(["red", "blue"], 2)
    turn = NUM_FRAMES // 2
    places = [_box(draw.randint(2, SIDE - _BOX - 2), draw.randint(2, SIDE - _BOX - 2)) for _ in range(2)]

    def pictures() -> Iterator[np.ndarray]:
        for frame in range(NUM_FRAMES):
            late = frame >= turn
            yield _picture(draw, [places[late]], _shade(draw, second if late else first))

    return {"question": "which is first?", "options": ["red", "blue"], "answer": first}, pictures()


def _colour(draw: random.Random) -> tuple[int, int, int]:
    return _shade(draw, draw.choice(list(COLOURS)))


def _shade(draw: random.Random, name: str) -> tuple[int, int, int]:
    red, green, blue = (min(255, max(0, value + draw.randint(-15, 15))) for value in COLOURS[name])
    return red, green, blue


def _box(top: int, left: int) -> tuple[int, int, int, int]:
    return top, left, _BOX, _BOX


def _picture(draw: random.Random, shapes: list[tuple[int, int, int, int]], colour: tuple[int, int, int]) -> np.ndarray:
    """One frame: shapes by their upper left corner, height and width, on a ground that flickers a little."""
    frame = np.full((SIDE, SIDE, 3), 20 + draw.randint(0, 6), np.uint8)
    for top, left, height, width in shapes:
        frame[top : top + height, left : left + width] = colour
    return frame
