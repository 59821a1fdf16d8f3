"""First-person pictures of a rooms world, in plain numpy.

Walls are cast column by column (one ray each) and drawn by looking up whole columns in a table of wall strips, one for
each apparent height; objects are scaled sprites tested against the depth of each pixel. Knows nothing about tasks,
actions or time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8, UInt32

from envs.rooms_layout import Layout, Thing
from envs.rooms_options import THING_RADIUS_M
from envs.rooms_sprites import SPRITES, shaded, sprite_colors

EYE_M = 1.0
WALL_M = 2.2
_NEAR_M = 0.15
_TILE_M = 1.0
_TEXELS = 16
"""Columns of the wall texture per metre (count)."""
_SHADES = 16
WALL_RGB = {
    "stone": (150, 150, 158),
    "sand": (196, 174, 132),
    "teal": (98, 148, 148),
    "rose": (176, 128, 132),
    "slate": (104, 116, 142),
    "olive": (136, 142, 100),
}
_WALL_INDEX = {name: index for index, name in enumerate(WALL_RGB)}
_FLOOR_RGB, _CEILING_RGB = (128, 104, 84), (196, 204, 214)

# A pixel's code says what is there: 2 * texture level on a wall, _FLOOR + 2 * band or _CEILING + 2 * band off it.
# Odd codes are the dark tiles of the floor; elsewhere they look like the even ones.
_FLOOR, _CEILING, _BANDS = 64, 128, 32


class Moment(NamedTuple):
    """What one frame depends on: the agent's pose and where the goal has rolled to (m, radians)."""

    x: float
    y: float
    heading: float
    goal_x: float
    goal_y: float


class _Tables(NamedTuple):
    """What depends on the camera alone."""

    strips: UInt8[np.ndarray, "inverse_depth texel height"]
    palette: UInt32[np.ndarray, "paint_shade code"]
    slopes: Float[np.ndarray, " width"]
    """Sideways metres per metre of depth of each column's ray, positive to the right."""
    floor_depth: Float[np.ndarray, "half_height 1"]


class Renderer:
    """Draws one layout at a time. `load` it first."""

    def __init__(self, size: int, fov_deg: float, textures: bool) -> None:
        self._size = size
        self._focal = size / 2 / math.tan(math.radians(fov_deg) / 2)
        self._textures = textures
        self._tables = _camera_tables(size, self._focal, textures)
        self._steps_per_inverse_m = _bins_per_inverse_m(self._focal)
        self._floor_side = self._tables.floor_depth * self._tables.slopes  # (half_height, width)

    def load(self, layout: Layout) -> None:
        """Take over a layout's walls and objects."""
        walls, paints = layout.walls, layout.wall_colors
        upright = walls[:, 0] == walls[:, 2]
        self._upright, self._level = walls[upright], walls[~upright]
        order = [*np.flatnonzero(upright), *np.flatnonzero(~upright)]
        self._paints = np.array([[_WALL_INDEX[side] for side in paints[i]] for i in order])
        self._goal, self._still = layout.things[0], layout.things[1:]

    def render(self, moments: Sequence[Moment]) -> UInt8[np.ndarray, "time height width 3"]:
        """One frame per moment. Consecutive moments with one pose share everything but the goal."""
        unique = list(dict.fromkeys(moments))
        images = np.empty((len(unique), self._size, self._size), np.uint32)  # RGBA in 32 bits
        pose: tuple[float, ...] = ()
        for image, moment in zip(images, unique, strict=True):
            if moment[:3] != pose:
                pose = moment[:3]
                room, depth = self._draw_rooms(moment)
                for thing in self._still:
                    self._draw_thing(room, depth, moment, thing, (thing.x, thing.y), keep_depth=True)
            image[:] = room
            self._draw_thing(image, depth, moment, self._goal, moment[3:])
        rgba = images.view(np.uint8).reshape(*images.shape, 4)
        frames = np.empty((*images.shape, 3), np.uint8)
        for channel in range(3):
            frames[..., channel] = rgba[..., channel]
        return frames if len(unique) == len(moments) else frames[[unique.index(moment) for moment in moments]]

    def _draw_rooms(self, pose: Moment) -> tuple[UInt32[np.ndarray, "height width"], Float[np.ndarray, "height width"]]:
        """Walls, floor and ceiling, and the depth of each pixel's wall (m)."""
        ahead = math.cos(pose.heading), math.sin(pose.heading)
        right = ahead[1], -ahead[0]
        depth, along, paint = self._cast(pose, ahead, right)
        inverse = 1 / np.maximum(depth, _NEAR_M)
        texel = (along * _TEXELS).astype(np.intp) % _TEXELS
        strips = self._tables.strips[(inverse * self._steps_per_inverse_m).astype(np.intp), texel]  # (width, height)
        codes = np.ascontiguousarray(strips.T)  # (height, width)
        if self._textures:
            half = self._size // 2
            x = pose.x + ahead[0] * self._tables.floor_depth + right[0] * self._floor_side
            y = pose.y + ahead[1] * self._tables.floor_depth + right[1] * self._floor_side
            codes[half:] ^= ((x / _TILE_M).astype(np.int32) + (y / _TILE_M).astype(np.int32) & 1).astype(np.uint8)
        shade = np.minimum(depth * 1.5, _SHADES - 1).astype(np.intp)
        image = self._tables.palette.take((paint * _SHADES + shade) * 256 + codes)
        return image, np.tile(depth, (self._size, 1))

    def _cast(
        self, pose: Moment, ahead: tuple[float, float], right: tuple[float, float]
    ) -> tuple[Float[np.ndarray, " width"], Float[np.ndarray, " width"], Int[np.ndarray, " width"]]:
        """Nearest wall of each column: its depth (m), where along the wall (m), and the paint of the side seen."""
        slopes = self._tables.slopes[:, None]
        toward_x, toward_y = ahead[0] + right[0] * slopes, ahead[1] + right[1] * slopes  # (width, 1)
        toward_x[toward_x == 0] = 1e-12
        toward_y[toward_y == 0] = 1e-12
        upright, level = self._upright, self._level
        depth_x = (upright[:, 0] - pose.x) / toward_x  # (width, upright wall)
        depth_y = (level[:, 1] - pose.y) / toward_y
        along_x = pose.y + depth_x * toward_y
        along_y = pose.x + depth_y * toward_x
        hit_x = (depth_x > 0) & (along_x >= upright[:, 1]) & (along_x <= upright[:, 3])
        hit_y = (depth_y > 0) & (along_y >= level[:, 0]) & (along_y <= level[:, 2])
        depths = np.concatenate([np.where(hit_x, depth_x, 1e3), np.where(hit_y, depth_y, 1e3)], axis=1)
        nearest = depths.argmin(axis=1)
        columns = np.arange(self._size)
        along = np.concatenate([along_x, along_y], axis=1)[columns, nearest]
        # The lower side is seen by rays that go up the axis. Level walls are darker, so that corners show.
        is_level = nearest >= len(upright)
        rises = np.where(is_level, toward_y[:, 0], toward_x[:, 0]) > 0
        paint = self._paints[nearest, np.where(rises, 0, 1)] * 2 + is_level
        return depths[columns, nearest], np.clip(along, 0, None), paint

    def _draw_thing(
        self,
        image: UInt32[np.ndarray, "height width"],
        depth: Float[np.ndarray, "height width"],
        pose: Moment,
        thing: Thing,
        place: tuple[float, ...],
        keep_depth: bool = False,
    ) -> None:
        """Draw an upright picture of `thing` at `place` wherever it is nearer than what is there."""
        size, half, focal = self._size, self._size / 2, self._focal
        dx, dy = place[0] - pose.x, place[1] - pose.y
        cos, sin = math.cos(pose.heading), math.sin(pose.heading)
        distance = dx * cos + dy * sin
        if distance < _NEAR_M:
            return
        sprite, height_m = SPRITES[thing.shape]
        scale = focal / distance  # pixels per metre there
        left = half + (dx * sin - dy * cos - THING_RADIUS_M) * scale
        top = half + (EYE_M - height_m) * scale
        width, height = 2 * THING_RADIUS_M * scale, height_m * scale
        x0, x1 = max(0, math.ceil(left - 0.5)), min(size, math.ceil(left + width - 0.5))
        y0, y1 = max(0, math.ceil(top - 0.5)), min(size, math.ceil(top + height - 0.5))
        if x0 >= x1 or y0 >= y1:
            return
        u = ((np.arange(x0, x1) + 0.5 - left) * (sprite.shape[0] / width)).astype(np.intp)
        v = ((np.arange(y0, y1) + 0.5 - top) * (sprite.shape[1] / height)).astype(np.intp)
        levels = sprite[u, v[:, None]]  # (height, width) of the part on screen
        spot = slice(y0, y1), slice(x0, x1)
        visible = (levels > 0) & (depth[spot] > distance)
        np.copyto(image[spot], sprite_colors(thing.color).take(levels), where=visible)
        if keep_depth:
            np.copyto(depth[spot], distance, where=visible)


def _bins_per_inverse_m(focal: float) -> float:
    """So fine that a wall's end moves by half a pixel from bin to bin."""
    return 2 * focal * max(EYE_M, WALL_M - EYE_M)


@lru_cache(maxsize=8)
def _camera_tables(size: int, focal: float, textures: bool) -> _Tables:
    rows = np.arange(size) + 0.5 - size / 2
    per_m = _bins_per_inverse_m(focal)
    depth = per_m / (np.arange(int(per_m / _NEAR_M) + 1) + 0.5)
    height = EYE_M - rows[None, :] * depth[:, None] / focal  # (inverse_depth, height): metres above the floor
    band = np.minimum(np.abs(rows) * 2 * _BANDS / size, _BANDS - 1).astype(np.uint8)
    strips = np.empty((len(depth), _TEXELS, size), np.uint8)
    for texel in range(_TEXELS):
        wall = 2 * _wall_level(height, texel) if textures else np.full(height.shape, 2, np.uint8)
        strips[:, texel] = np.where(height < 0, _FLOOR + 2 * band, np.where(height > WALL_M, _CEILING + 2 * band, wall))
    slopes = (np.arange(size) + 0.5 - size / 2) / focal
    return _Tables(strips, _palette(), slopes, EYE_M * focal / rows[size // 2 :, None])


def _wall_level(height: Float[np.ndarray, "inverse_depth height"], texel: int) -> UInt8[np.ndarray, "depth height"]:
    """Texture of a wall: 0 mortar, 1 brick, 2 a lighter brick, 3 skirting board. Bricks are 0.5 m by 0.275 m."""
    course = np.clip(height / 0.275, 0, 63).astype(np.intp)
    shifted = (texel + 4 * (course % 2)) % 8
    light = (texel + 4 * (course % 2)) // 8 % 2 == course // 2 % 2
    level = np.where((shifted == 0) | (height / 0.275 % 1 < 0.14), 0, np.where(light, 2, 1))
    return np.where(height < 0.16, 3, level).astype(np.uint8)


def _palette() -> UInt32[np.ndarray, "paint_shade code"]:
    """Colour of each code on each wall paint, its two lights, and its shades by distance."""
    table = np.zeros((len(WALL_RGB), 2, _SHADES, 256), np.uint32)
    for paint, rgb in enumerate(WALL_RGB.values()):
        for turned in range(2):
            for shade in range(_SHADES):
                light = (0.82 if turned else 1.0) * (1.05 - 0.6 * shade / _SHADES)
                for level, factor in enumerate((0.74, 1.0, 1.1, 0.5)):
                    table[paint, turned, shade, 2 * level : 2 * level + 2] = shaded(rgb, light * factor)
    for band in range(_BANDS):
        near = band / _BANDS
        table[..., _FLOOR + 2 * band] = shaded(_FLOOR_RGB, 0.75 + 0.5 * near)
        table[..., _FLOOR + 2 * band + 1] = shaded(_FLOOR_RGB, 0.75 + 0.5 * near - 0.3 * min(1.0, 3 * near))
        table[..., _CEILING + 2 * band : _CEILING + 2 * band + 2] = shaded(_CEILING_RGB, 0.8 + 0.25 * near)
    return table.reshape(-1, 256)
