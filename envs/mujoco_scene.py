"""The rooms world as a MuJoCo model: its walls, objects and agent as bodies, and pictures from the agent's eyes.

The agent slides on the floor (two joints) and is pushed back by what it touches; it and the ball, which rolls on its
route whatever is in the way, are seen from a camera that goes where a moment says. Knows nothing of tasks and rewards.
"""

from __future__ import annotations

import atexit
import ctypes.util
import importlib
import importlib.util
import math
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from jaxtyping import UInt8

from envs.rooms_layout import Layout
from envs.rooms_options import AGENT_RADIUS_M, THING_RADIUS_M
from envs.rooms_plan import Point
from envs.rooms_render import EYE_M, WALL_M, WALL_RGB, Moment
from envs.rooms_sprites import OBJECT_RGB

TICK_S = 0.1
"""Simulated time of a tick (s)."""
_SUBSTEP_S = 0.01
_STRIDE_M = 0.02
"""Farthest that the agent goes in one substep (m): half of a wall, or it would come out behind it."""
_SKIN_M = 0.01
"""Half the thickness of one side of a wall; walls are a line in the layout (m)."""
_HEIGHTS_M = {"box": 0.7, "ball": 0.6, "cone": 0.9, "pillar": 1.2}


def require_mujoco() -> Any:
    """The module, told to render without a display where nobody told it otherwise.

    Raises:
        ValueError: MuJoCo is not installed, or cannot render here.
    """
    if importlib.util.find_spec("mujoco") is None:
        raise ValueError("MuJoCo is not installed: pip install 'rollplex[sim]', or in the interpreter of env.python")
    os.environ.setdefault("MUJOCO_GL", "egl" if ctypes.util.find_library("EGL") else "osmesa")
    try:
        import mujoco
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        raise ValueError(
            f"MuJoCo cannot render with MUJOCO_GL={os.environ['MUJOCO_GL']}: {error}. On Debian: apt-get install "
            "libegl1 libegl-mesa0 libopengl0 libgl1-mesa-dri; or libosmesa6, and MUJOCO_GL=osmesa"
        ) from error
    return mujoco


@cache
def gl_context(size: int) -> Any:
    """One off-screen GL context a process and size, which all environments share."""
    require_mujoco()
    # By its name: where others imported mujoco first, mujoco.GLContext is the one that wants a display.
    context = importlib.import_module(f"mujoco.{os.environ['MUJOCO_GL'].lower()}").GLContext(size, size)
    atexit.register(context.free)  # while the libraries that it needs are still there
    context.make_current()
    return context


class Scene:
    """One layout at a time, with its physics and its camera."""

    def __init__(self, size: int, fov_deg: float, textures: bool) -> None:
        """Args: side of a frame (pixels), horizontal field of view (degrees), whether floor and walls have patterns."""
        self._mujoco = require_mujoco()
        self._size, self._fov, self._textures = size, fov_deg, textures
        self._context: Any = None
        gl_context(size)

    def load(self, layout: Layout) -> None:
        """Build the model of a layout."""
        mujoco = self._mujoco
        self.model = mujoco.MjModel.from_xml_string(scene_xml(layout, self._fov, self._textures))
        self.model.vis.quality.shadowsize = 0  # software GL draws shadows at a tenth of the speed
        self.model.vis.quality.offsamples = 0
        self.model.vis.global_.offwidth = self.model.vis.global_.offheight = self._size
        self._body, self._seen = mujoco.MjData(self.model), mujoco.MjData(self.model)
        mujoco.mj_forward(self.model, self._body)
        self._height_m = float(self._body.mocap_pos[0, 2])
        self._agent = self.model.geom("agent").id
        self._wrong = [self.model.geom(f"wrong{index}").id for index in range(len(layout.things) - 1)]
        gl_context(self._size).make_current()
        if self._context is not None:
            self._context.free()
        self._context = mujoco.MjrContext(self.model, mujoco.mjtFontScale.mjFONTSCALE_50)
        self._drawn = mujoco.MjvScene(self.model, maxgeom=self.model.ngeom + 10)
        self._drawn.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
        self._drawn.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        self._camera = mujoco.MjvCamera()
        self._camera.type, self._camera.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, 0
        self._option = mujoco.MjvOption()
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)

    def walk(self, start: Point, delta: Point, ball: Point) -> tuple[Point, bool]:
        """Simulate one tick in which the agent wants to cover `delta`, for longer than `TICK_S` where that is far.

        Returns: where it ends, and whether it touched an object other than the goal.
        """
        body = self._body
        body.qpos[:] = start
        body.mocap_pos[0, :2] = ball
        touched = False
        substeps = max(round(TICK_S / _SUBSTEP_S), math.ceil(math.hypot(*delta) / _STRIDE_M))
        for _ in range(substeps):
            body.qvel[:] = delta[0] / (substeps * _SUBSTEP_S), delta[1] / (substeps * _SUBSTEP_S)
            self._mujoco.mj_step(self.model, body)
            touched = touched or self._touches_wrong()
        return (float(body.qpos[0]), float(body.qpos[1])), touched

    def _touches_wrong(self) -> bool:
        count = self._body.ncon
        if not count:
            return False
        pairs = self._body.contact.geom[:count]
        return bool((np.isin(pairs, self._agent).any(axis=1) & np.isin(pairs, self._wrong).any(axis=1)).any())

    def render(self, moments: Sequence[Moment]) -> UInt8[np.ndarray, "time height width 3"]:
        """Pictures from the agent's eyes; equal moments are drawn once."""
        gl_context(self._size).make_current()
        pictures = {moment: self._draw(moment) for moment in dict.fromkeys(moments)}
        return np.stack([pictures[moment] for moment in moments])

    def _draw(self, moment: Moment) -> UInt8[np.ndarray, "height width 3"]:
        mujoco, seen = self._mujoco, self._seen
        seen.mocap_pos[0] = moment.goal_x, moment.goal_y, self._height_m
        seen.mocap_pos[1] = moment.x, moment.y, EYE_M
        half = moment.heading / 2
        seen.mocap_quat[1] = math.cos(half), 0.0, 0.0, math.sin(half)
        mujoco.mj_kinematics(self.model, seen)
        mujoco.mj_camlight(self.model, seen)
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(self.model, seen, self._option, None, self._camera, everything, self._drawn)
        picture = np.empty((self._size, self._size, 3), np.uint8)
        where = mujoco.MjrRect(0, 0, self._size, self._size)
        mujoco.mjr_render(where, self._drawn, self._context)
        mujoco.mjr_readPixels(picture, None, where, self._context)
        return picture[::-1]  # GL's rows go upward

    def close(self) -> None:
        """Free what the GL context holds."""
        if self._context is not None:
            gl_context(self._size).make_current()
            self._context.free()
            self._context = None


def scene_xml(layout: Layout, fov_deg: float, textures: bool) -> str:
    """MuJoCo's description of a layout (MJCF). Mocap body 0 is the goal, 1 the camera; group 3 is not drawn."""
    low_x, low_y = layout.walls[:, :2].min(axis=0)
    high_x, high_y = layout.walls[:, 2:].max(axis=0)
    middle, half = ((low_x + high_x) / 2, (low_y + high_y) / 2), ((high_x - low_x) / 2, (high_y - low_y) / 2)
    others = [_thing(f"wrong{index}", thing.shape, thing.color) for index, thing in enumerate(layout.things[1:])]
    goal = layout.goal
    bodies = [
        f'<body name="goal" mocap="true" pos="{goal.x} {goal.y} {_HEIGHTS_M[goal.shape] / 2}">'
        f"{_thing('goal', goal.shape, goal.color)}</body>",
        f'<body name="eyes" mocap="true"><camera name="eyes" xyaxes="0 -1 0 0 0 1" fovy="{fov_deg}"/></body>',
    ]
    bodies += [
        f'<body pos="{thing.x} {thing.y} {_HEIGHTS_M[thing.shape] / 2}">{geom}</body>'
        for thing, geom in zip(layout.things[1:], others, strict=True)
    ]
    walls = [_wall(wall, paints) for wall, paints in zip(layout.walls.tolist(), layout.wall_colors, strict=True)]
    dark = "0.3 0.24 0.2" if textures else "0.5 0.41 0.33"
    area = f"{half[0]} {half[1]} 0.1"
    return f"""
<mujoco>
  <option timestep="{_SUBSTEP_S}" gravity="0 0 0"/>
  <visual><headlight ambient="0.85 0.85 0.85" diffuse="0.3 0.3 0.3" specular="0.1 0.1 0.1"/>
    <map znear="0.02" zfar="60"/></visual>
  <statistic extent="1"/>
  <asset>
    <texture name="tiles" type="2d" builtin="checker" rgb1="0.5 0.41 0.33" rgb2="{dark}" width="64" height="64"/>
    <material name="tiles" texture="tiles" texrepeat="{half[0] * 2} {half[1] * 2}"/>
    <mesh name="cone" vertex="{_cone_vertices()}"/>
  </asset>
  <worldbody>
    <geom type="plane" pos="{middle[0]} {middle[1]} 0" size="{area}" material="tiles" contype="0" conaffinity="0"/>
    <geom type="plane" pos="{middle[0]} {middle[1]} {WALL_M}" euler="180 0 0" size="{area}" rgba="0.77 0.8 0.84 1"
      contype="0" conaffinity="0"/>
    {"".join(walls)}
    {"".join(bodies)}
    <body name="body" pos="0 0 0.5">
      <joint type="slide" axis="1 0 0"/><joint type="slide" axis="0 1 0"/>
      <geom type="box" size="{AGENT_RADIUS_M - _SKIN_M * 2} {AGENT_RADIUS_M - _SKIN_M * 2} 0.45" mass="20" group="3"
        contype="1" conaffinity="1" friction="0 0 0"/>
      <geom name="agent" type="cylinder" size="{AGENT_RADIUS_M} 0.45" mass="20" group="3" contype="2" conaffinity="2"
        friction="0 0 0"/>
    </body>
  </worldbody>
</mujoco>"""


def _wall(wall: Sequence[float], paints: tuple[str, str]) -> str:
    """A wall as two thin plates, one on each side of its line, each in that side's paint."""
    x0, y0, x1, y1 = wall
    half = (x1 - x0) / 2 or _SKIN_M, (y1 - y0) / 2 or _SKIN_M
    across = (_SKIN_M, 0.0) if x0 == x1 else (0.0, _SKIN_M)
    plates = []
    for side, paint in zip((-1, 1), paints, strict=True):
        x, y = (x0 + x1) / 2 + side * across[0], (y0 + y1) / 2 + side * across[1]
        plates.append(
            f'<geom type="box" pos="{x} {y} {WALL_M / 2}" size="{half[0]} {half[1]} {WALL_M / 2}" '
            f'rgba="{_rgba(WALL_RGB[paint])}" contype="1" conaffinity="1" friction="0 0 0"/>'
        )
    return "".join(plates)


def _thing(name: str, shape: str, color: str) -> str:
    """What is seen of an object, and the upright cylinder around it that is touched."""
    height, radius = _HEIGHTS_M[shape], THING_RADIUS_M
    looks = {
        "box": f'type="box" size="{radius * 0.8} {radius * 0.8} {height / 2}"',
        "ball": f'type="sphere" size="{radius}"',
        "cone": 'type="mesh" mesh="cone"',
        "pillar": f'type="cylinder" size="{radius * 0.6} {height / 2}"',
    }[shape]
    return (
        f'<geom {looks} rgba="{_rgba(OBJECT_RGB[color])}" contype="0" conaffinity="0"/>'
        f'<geom name="{name}" type="cylinder" size="{radius} {height / 2}" contype="2" conaffinity="2" group="3"/>'
    )


def _cone_vertices() -> str:
    angles = np.arange(16) * 2 * math.pi / 16
    height = _HEIGHTS_M["cone"]
    ring = [(THING_RADIUS_M * math.cos(a), THING_RADIUS_M * math.sin(a), -height / 2) for a in angles]
    return "  ".join(f"{x} {y} {z}" for x, y, z in [*ring, (0.0, 0.0, height / 2)])


def _rgba(rgb: tuple[int, int, int]) -> str:
    return " ".join(f"{part / 255:.3f}" for part in rgb) + " 1"
