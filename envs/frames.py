"""Pictures of simulators brought to a clip's size. Knows numpy alone, as simulators' own interpreters do."""

from __future__ import annotations

import numpy as np


def resized(picture: np.ndarray, size: int) -> np.ndarray:
    """A picture (height, width, 3) uint8 as a square of `size` pixels: each pixel the mean of the area it covers.

    Cut to the middle square first, so that nothing is stretched; of a much larger one, only every n-th row and column
    is looked at.
    """
    height, width = picture.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = np.ascontiguousarray(picture[top : top + side, left : left + side, :3])
    if side == size:
        return square
    every = max(1, side // (3 * size))
    square = square[::every, ::every]
    side = square.shape[0]
    weights = _area_weights(side, size)
    rows = np.tensordot(weights, square.astype(np.float32), axes=(1, 0))  # (size, side, 3)
    mean = np.tensordot(weights, rows, axes=(1, 1)).transpose(1, 0, 2)  # (size, size, 3)
    return (mean + 0.5).astype(np.uint8)


_WEIGHTS: dict[tuple[int, int], np.ndarray] = {}


def _area_weights(side: int, size: int) -> np.ndarray:
    """(size, side) float32: the share of each of `side` pixels in each of `size`; rows sum to 1."""
    if (side, size) not in _WEIGHTS:
        edges = np.arange(size + 1) * (side / size)
        low, high = edges[:-1, None], edges[1:, None]
        pixel = np.arange(side)[None, :]
        overlap = np.clip(np.minimum(high, pixel + 1) - np.maximum(low, pixel), 0, None)
        _WEIGHTS[side, size] = (overlap / overlap.sum(axis=1, keepdims=True)).astype(np.float32)
    return _WEIGHTS[side, size]
