"""A first-person world of rooms, doorways and coloured objects, with three kinds of tasks.

- `goto`: "go to the red box". Objects of other colours and shapes are in the way of a policy that ignores the words.
- `moving`: "go to the moving ball". All balls look the same and one rolls to and fro: only motion in the clip tells.
- `follow`: "follow the moving ball". Stay near it for some steps in a row.

Reward of a primitive step: 1 on success, plus `shaping` times the share of the way to the goal that the step covered,
`(d_before - d_after) / d_start` with d the geodesic distance. The shaping terms of an episode sum to
`shaping * (1 - d_end / d_start)`, so no detour earns any. Touching a wrong object ends the episode without a reward.

Knows nothing about models, prompts or processes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt8

from envs.rooms_expert import Expert
from envs.rooms_layout import Layout, generate_layout, goal_radius, sees
from envs.rooms_motion import Route, Walker
from envs.rooms_options import RoomsOptions, parse_options
from envs.rooms_plan import Point
from envs.rooms_render import Moment, Renderer
from envs.video_env import Split, VideoEnv


class RoomsEnv(VideoEnv[Moment]):
    """The rooms world. Options are the fields of `RoomsOptions`.

    Actions: `left` and `right` turn by `turn_deg`, `forward` walks `forward_m` and slides along walls; where `follow`
    is among the tasks, `wait` lets the world go on. Reaching the goal is judged after each primitive step.

    Raises:
        ValueError: an unknown option or a value out of range.
    """

    def __init__(self, **options: Any) -> None:
        self.options: RoomsOptions = parse_options(options)
        waits = ("wait",) if "follow" in self.options.tasks else ()
        size = self.options.image_size
        super().__init__(("left", "right", "forward", *waits), (self.options.clip_frames, size, size))
        self._renderer = Renderer(size, self.options.fov_deg, self.options.textures)
        self._turn = math.radians(self.options.turn_deg)

    def _begin(self, split: Split) -> str:
        layout = generate_layout(self.options, split, self.np_random)
        self.start_in(layout)
        if layout.task == "goto":
            return f"go to the {layout.goal.color} {layout.goal.shape}"
        return "go to the moving ball" if layout.task == "moving" else "follow the moving ball"

    def start_in(self, layout: Layout) -> None:
        """Begin an episode in a given layout. The ball has been rolling for a clip of whole actions already."""
        self.layout = layout
        self._walker, self._route = Walker(layout), Route(layout.route)
        self._renderer.load(layout)
        self._expert: Expert | None = None
        self._reach = goal_radius(layout.task, self.options)
        self._at, self._heading = layout.start, layout.heading
        self._steps, self._followed, self._path_length = 0, 0, 0.0
        self._success = False
        self._tick = -self.options.clip_frames * self.options.ticks_per_action
        while self._tick < 0:
            self._push_tick(self._at, self._heading)
        self._start_distance = self._distance = self.geodesic_distance()

    @property
    def position(self) -> Point:
        """Where the agent is (m)."""
        return self._at

    @property
    def goal_position(self) -> Point:
        """Where the goal is now (m)."""
        return self._route.at(self._tick * self.options.ball_speed_m / self.options.ticks_per_action)

    def geodesic_distance(self) -> float:
        return max(0.0, self.layout.planner.distance(self._at, self.goal_position) - self._reach)

    def expert_actions(self, max_actions: int) -> tuple[str, ...]:
        if self._expert is None:
            self._expert = Expert(self.options, self.layout, self._walker)
        return self._expert.actions(self._at, self._heading, self.goal_position, max_actions)

    def _push_tick(self, at: Point, heading: float) -> None:
        self._tick += 1
        self.frames.push(Moment(*at, heading, *self.goal_position))

    def _advance(self, action: str | None) -> tuple[float, bool, bool]:
        touched_wrong = self._act(action)
        self._steps += 1
        before, self._distance = self._distance, self.geodesic_distance()
        reward = self.options.shaping * (before - self._distance) / self._start_distance
        touched_wrong = touched_wrong and self.options.wrong_touch_ends
        self._success = self._judge() and not touched_wrong
        terminated = self._success or touched_wrong
        truncated = not terminated and self._steps >= self.options.max_steps
        return reward + float(self._success), terminated, truncated

    def _act(self, action: str | None) -> bool:
        """Move the agent and let the world's ticks pass. Returns whether the agent touched a wrong object."""
        begin, heading, touched_wrong = self._at, self._heading, False
        turn = {"left": self._turn, "right": -self._turn}.get(action or "", 0.0)
        if action == "forward":
            walk = self._walker.forward(begin, heading, self.options.forward_m, self.goal_position)
            self._at, touched_wrong = (walk.x, walk.y), walk.touched_wrong
            self._path_length += walk.length_m
        (x0, y0), (x1, y1) = begin, self._at
        for tick in range(1, self.options.ticks_per_action + 1):
            share = min(1.0, tick / self.options.motion_ticks)
            self._push_tick((x0 + share * (x1 - x0), y0 + share * (y1 - y0)), heading + share * turn)
        self._heading = math.remainder(heading + turn, 2 * math.pi)
        return touched_wrong

    def _judge(self) -> bool:
        """Whether the task is done after this step."""
        goal = self.goal_position
        near = math.dist(self._at, goal) <= self._reach and sees(self.layout.walls, self._at, goal)
        if self.layout.task != "follow":
            return near
        self._followed = self._followed + 1 if near else 0
        return self._followed >= self.options.follow_steps

    def _info(self) -> dict[str, Any]:
        return {
            "success": self._success,
            "path_length_m": self._path_length,
            "geodesic_m": self._start_distance,
            "distance_m": self._distance,
            "task": self.layout.task,
            "layout": self.layout.fingerprint,
        }

    def _render(self, moments: Sequence[Moment]) -> UInt8[np.ndarray, "time height width 3"]:
        return self._renderer.render(moments)
