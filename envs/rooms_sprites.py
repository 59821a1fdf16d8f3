"""Pictures of the objects of the rooms world: shapes as levels of light, colours as tables of shades.

Knows nothing about cameras or worlds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from jaxtyping import Bool, Float, UInt8, UInt32

LEVELS = 12
"""Levels of light of a sprite; 0 is see-through (count)."""
_TEXELS = 64
OBJECT_RGB = {
    "red": (226, 32, 32),
    "green": (24, 176, 48),
    "blue": (36, 72, 232),
    "yellow": (246, 216, 20),
    "purple": (168, 40, 200),
    "orange": (250, 130, 16),
}

Grid = Float[np.ndarray, "texel texel"]


def shaded(rgb: tuple[int, int, int], light: float) -> int:
    """RGBA in 32 bits, as a little-endian machine stores it, of a colour under a light (1: as it is)."""
    red, green, blue = (min(255, int(part * light)) for part in rgb)
    return red | green << 8 | blue << 16 | 255 << 24


@cache
def sprite_colors(color: str) -> UInt32[np.ndarray, " level"]:
    """RGBA of each level: from half the light over the plain colour to a mix with white."""
    rgb = OBJECT_RGB[color]
    table = np.zeros(LEVELS, np.uint32)
    for level in range(1, LEVELS):
        light = level / (LEVELS - 3)  # the two highest are highlights
        if light <= 1:
            table[level] = shaded(rgb, 0.45 + 0.55 * light)
        else:
            red, green, blue = (int(part + (255 - part) * (light - 1) * 1.6) for part in rgb)
            table[level] = shaded((red, green, blue), 1.0)
    return table


def _levels(inside: Bool[np.ndarray, "texel texel"], light: Grid) -> UInt8[np.ndarray, "texel texel"]:
    """Quantised light in 1 .. LEVELS - 1 where `inside`, 0 elsewhere."""
    return np.where(inside, 1 + np.clip(light, 0, 1) * (LEVELS - 1.001), 0).astype(np.uint8)


def _ball(u: Grid, v: Grid) -> UInt8[np.ndarray, "texel texel"]:
    square = u * u + v * v
    toward_us = np.sqrt(np.clip(1 - square, 0, 1))
    return _levels(square <= 1, 0.15 + 0.85 * (-0.45 * u - 0.6 * v + 0.65 * toward_us))


def _box(u: Grid, v: Grid) -> UInt8[np.ndarray, "texel texel"]:
    top = v < -0.6
    inside = ~top | (np.abs(u) < 1 - 0.35 * (-0.6 - v) / 0.4)
    edge = (np.abs(u) > 0.9) | (v > 0.9) | (np.abs(v + 0.6) < 0.05)
    return _levels(inside, np.where(top, 0.85, np.where(edge, 0.2, 0.5 - 0.12 * u)))


def _cone(u: Grid, v: Grid) -> UInt8[np.ndarray, "texel texel"]:
    radius = np.clip((v + 1) / 2, 1e-6, 1)
    across = u / radius
    return _levels(np.abs(across) <= 1, 0.75 - 0.3 * across - 0.4 * across * across)


def _pillar(u: Grid, v: Grid) -> UInt8[np.ndarray, "texel texel"]:
    across = u / 0.6
    ring = (np.abs(v) > 0.88).astype(np.float64)
    return _levels(np.abs(u) <= 0.6 + 0.25 * ring, 0.6 + 0.2 * ring - 0.25 * across - 0.3 * across * across)


def _draw(shape: Callable[[Grid, Grid], UInt8[np.ndarray, "texel texel"]]) -> UInt8[np.ndarray, "texel texel"]:
    """Indexed (column, row); u grows to the right and v downwards, both from -1 to 1."""
    axis = (np.arange(_TEXELS) + 0.5) * 2 / _TEXELS - 1
    u, v = np.meshgrid(axis, axis, indexing="ij")
    return shape(u, v)


SPRITES: dict[str, tuple[UInt8[np.ndarray, "texel texel"], float]] = {
    "ball": (_draw(_ball), 0.6),
    "box": (_draw(_box), 0.6),
    "cone": (_draw(_cone), 0.9),
    "pillar": (_draw(_pillar), 1.3),
}
"""Picture and height (m) of each shape; all are 0.6 m wide."""
