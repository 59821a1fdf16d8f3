"""Every knob of the rooms world, with its default, unit and range. Knows nothing about how the world works."""

from __future__ import annotations

from dataclasses import fields
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from pydantic.dataclasses import dataclass

from configs.schema import STRICT, Count, NonNegative

Task = Literal["goto", "moving", "follow"]
Shape = Literal["box", "ball", "cone", "pillar"]
Color = Literal["red", "green", "blue", "yellow", "purple", "orange"]

Metres = Annotated[float, Field(gt=0)]

AGENT_RADIUS_M = 0.2
"""Half the side of the square that the agent fills, for collisions with walls (m)."""
THING_RADIUS_M = 0.3
"""Radius of every object (m)."""
CONTACT_M = AGENT_RADIUS_M + THING_RADIUS_M
"""Distance of the centres at which the agent touches an object (m)."""
DOOR_WIDTH_M = 1.2


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RoomsOptions:
    """Constructor options of `RoomsEnv`."""

    tasks: Annotated[tuple[Task, ...], Field(min_length=1)] = ("goto", "moving", "follow")
    """Each episode is one of these, drawn evenly."""
    num_rooms: Annotated[int, Field(ge=1, le=4)] = 2
    room_size: tuple[Annotated[float, Field(ge=3)], Annotated[float, Field(le=12)]] = (4.0, 6.0)
    """Shortest and longest side of a room (m); sides are multiples of 0.25."""
    num_objects: Annotated[int, Field(ge=2, le=12)] = 4
    """Objects in the world, the goal among them (count)."""
    colors: Annotated[tuple[Color, ...], Field(min_length=1)] = ("red", "green", "blue", "yellow", "purple", "orange")
    shapes: Annotated[tuple[Shape, ...], Field(min_length=1)] = ("box", "ball", "cone", "pillar")
    """Of the objects in `goto`; the other tasks are about balls."""
    image_size: Annotated[int, Field(ge=16, le=512, multiple_of=2)] = 64
    """Side of a frame (pixels)."""
    fov_deg: Annotated[float, Field(ge=30, le=140)] = 90.0
    """Horizontal field of view (degrees)."""
    textures: bool = True
    """Bricks on the walls and tiles on the floor; without, plain shaded surfaces."""
    clip_frames: Count = 4
    """Frames of an observation (count)."""
    ticks_per_action: Count = 4
    """Frames that one primitive action lasts (count)."""
    motion_ticks: Count = 1
    """Of these, the first ones, in which the agent moves; in the others it stands and only the world moves (count)."""
    turn_deg: Annotated[float, Field(gt=0, le=90)] = 30.0
    forward_m: Annotated[float, Field(gt=0, le=1)] = 0.4
    ball_speed_m: Annotated[float, Field(gt=0, le=1)] = 0.3
    """How far a moving ball rolls in one primitive action (m)."""
    reach_m: Annotated[float, Field(ge=CONTACT_M + 0.05, le=2)] = 0.8
    """Distance of the centres at which an object counts as reached (m)."""
    wrong_touch_ends: bool = True
    """Touching a wrong object ends the episode as a failure; otherwise it only blocks the way."""
    goal_in_view: bool = False
    """Start facing so that the goal is inside the field of view and not behind a wall."""
    min_distance_m: Annotated[float, Field(ge=0.2)] = 1.0
    """Least way to walk from the start to within reach of the goal (m)."""
    max_steps: Count = 60
    """Primitive steps after which an episode is truncated (count)."""
    shaping: NonNegative = 0.2
    """Weight of the share of the way covered, added to the reward; 0: reward is success alone."""
    follow_distance_m: Metres = 1.5
    """`follow`: staying this near counts as following (m)."""
    follow_steps: Count = 6
    """`follow`: consecutive primitive steps of following that make a success (count)."""

    def __post_init__(self) -> None:
        if self.room_size[0] > self.room_size[1]:
            raise ValueError(f"room_size {self.room_size}: give the shortest side first")
        if self.motion_ticks > self.ticks_per_action:
            raise ValueError(
                f"motion_ticks {self.motion_ticks} is over ticks_per_action {self.ticks_per_action}: lower it"
            )
        if "goto" in self.tasks and len(self.colors) * len(self.shapes) < self.num_objects:
            kinds = len(self.colors) * len(self.shapes)
            raise ValueError(
                f"num_objects {self.num_objects} is over the {kinds} different objects that colors and shapes allow: "
                "lower it or allow more"
            )


def parse_options(given: dict[str, Any]) -> RoomsOptions:
    """Options from plain values, lists for tuples allowed.

    Raises:
        ValueError: an unknown name (the nearest one is suggested) or a value out of range.
    """
    known = [item.name for item in fields(RoomsOptions)]
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise ValueError(f"rooms has no option {name!r}: {hint}")
    try:
        return RoomsOptions(**given)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc'])) or 'options'} = {e['input']!r}: {e['msg']}" for e in error.errors()]
        raise ValueError("rooms options: " + "; ".join(lines)) from None
