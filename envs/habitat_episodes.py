"""Habitat's episode files (`json.gz`): PointNav's and ObjectNav's, read without habitat.

An episode's key is its scene and its id, since ids repeat from scene to scene. Needs the standard library
alone, in the simulator's own interpreter. Knows nothing about the simulator.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Vector = tuple  # of 3 floats: x, y (up), z in metres
Quaternion = tuple  # of 4 floats: x, y, z, w, as the files have it

POINT_RADIUS_M = 0.2
"""PointNav: distance from the goal at which stopping is a success (m)."""
VIEW_RADIUS_M = 0.1
"""ObjectNav: distance from a view point of the object at which stopping is a success (m)."""
OBJECT_RADIUS_M = 1.0
"""ObjectNav without view points: distance from the object itself (m)."""


@dataclass(frozen=True)
class NavEpisode:
    """One episode of a file."""

    id: str
    scene: str
    """As the file has it, such as `mp3d/17DRP5sb8fy/17DRP5sb8fy.glb`."""
    start: Vector
    rotation: Quaternion
    goals: tuple
    """Places (x, y, z); the nearest counts."""
    radius_m: float
    """Stopping within this distance of a goal, along the way, is a success (m)."""
    category: str = ""
    """What ObjectNav looks for; empty: PointNav."""

    @property
    def instruction(self) -> str:
        """What the agent is told; PointNav's goal is told anew at each turn (`habitat.pointgoal`)."""
        return f"find the {self.category.replace('_', ' ')} and stop" if self.category else "go to the point and stop"


def read_episodes(path: str) -> list[NavEpisode]:
    """The episodes of a file, and, as habitat does, those of `content/*.json.gz` beside it; in a fixed order.

    Raises:
        ValueError: there is no such file, it is none of habitat's, or there are no episodes.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(
            f"no episode file {path!r}: name one of habitat's *.json.gz, or write scenes and episodes that need no "
            "download with: python -m envs.scene_writer FOLDER"
        )
    episodes = _read_file(file)
    for part in sorted((file.parent / "content").glob("*.json.gz")):
        episodes += _read_file(part)
    if not episodes:
        raise ValueError(f"episode file {path!r} and its content/*.json.gz hold no episodes: name another")
    keys = {(episode.scene, episode.id) for episode in episodes}
    if len(keys) < len(episodes):
        raise ValueError(f"episode file {path!r}: {len(episodes) - len(keys)} episodes repeat a scene and id")
    return episodes


def _read_file(file: Path) -> list[NavEpisode]:
    try:
        with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as stream:
            content = json.load(stream)
        shared = content.get("goals_by_category", {})
        return [_episode(record, shared) for record in content["episodes"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{file} is no episode file of habitat's PointNav or ObjectNav: {error!r}") from error


def _episode(record: dict[str, Any], shared: dict[str, Any]) -> NavEpisode:
    category = record.get("object_category") or ""
    goals = record.get("goals") or []
    if category and not goals:  # ObjectNav keeps the goals of a scene and a category once
        goals = shared[f"{Path(record['scene_id']).name}_{category}"]
    places, radius = _places(goals, is_object=bool(category))
    if not places:
        raise ValueError(f"episode {record['episode_id']!r} has no goal")
    return NavEpisode(
        id=str(record["episode_id"]),
        scene=str(record["scene_id"]),
        start=_floats(record["start_position"], 3),
        rotation=_floats(record["start_rotation"], 4),
        goals=places,
        radius_m=radius,
        category=category,
    )


def _places(goals: list[dict[str, Any]], is_object: bool) -> tuple[tuple, float]:
    """Where one may stop, and how near."""
    views = [view["agent_state"]["position"] for goal in goals for view in goal.get("view_points") or ()]
    if views:
        return tuple(_floats(view, 3) for view in views), VIEW_RADIUS_M
    radius = goals[0].get("radius") if goals else None
    usual = OBJECT_RADIUS_M if is_object else POINT_RADIUS_M
    return tuple(_floats(goal["position"], 3) for goal in goals), float(radius or usual)


def _floats(values: Any, count: int) -> tuple:
    if len(values) != count:
        raise ValueError(f"{values!r} should be {count} numbers")
    return tuple(float(value) for value in values)


def scene_file(scene: str, scenes_dir: str) -> Path:
    """The file to load for an episode's scene: its stage config where there is one, since a Y-up GLB needs it.

    Raises:
        ValueError: it is not below `scenes_dir`.
    """
    root = Path(scenes_dir).expanduser()
    names = (scene, scene.removeprefix("data/scene_datasets/"))
    tried = [root / name for name in dict.fromkeys(names)]
    for path in tried:
        stage = path.with_name(path.name.split(".")[0] + ".stage_config.json")
        if stage.is_file():
            return stage.resolve()
        if path.is_file():
            return path.resolve()
    raise ValueError(
        f"scene {scene!r} is not there (tried {', '.join(map(str, tried))}): set env.options.scenes_dir to the folder "
        "that scene ids start from"
    )
