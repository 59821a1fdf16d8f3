"""Scenes and episodes for habitat-sim that need no download: layouts of the rooms world as GLB files.

    python -m envs.scene_writer FOLDER --scenes 20 --episodes 20 --seed 0

writes, for each scene, `NAME.glb` (y up), its `NAME.stage_config.json`, and episode files `pointnav_SPLIT.json.gz` and
`objectnav_SPLIT.json.gz` for the splits train and heldout, which share no scene. The navigation mesh is left to
habitat-sim: `envs.habitat` has it computed at a scene's first episode and keeps it beside the scene. Runs in our own
interpreter with `trimesh` (pip install 'rollplex[sim]'). Knows nothing about the simulator.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from envs.navigation import rotation_of
from envs.rooms_layout import Layout, Thing, generate_layout
from envs.rooms_options import THING_RADIUS_M, RoomsOptions
from envs.rooms_plan import Point
from envs.rooms_render import WALL_M, WALL_RGB
from envs.rooms_sprites import OBJECT_RGB
from envs.video_env import Split

logger = logging.getLogger(__name__)

OPTIONS = RoomsOptions(tasks=("goto",), num_rooms=3, num_objects=4)
"""What the scenes are like."""
HEIGHTS_M = {"box": 0.8, "ball": 0.6, "cone": 0.9, "pillar": 1.5}
_WALL_THICKNESS_M = 0.1
_FLOOR_RGB, _CEILING_RGB = (128, 104, 84), (196, 204, 214)
STAGE_CONFIG = {"up": [0, 1, 0], "front": [0, 0, -1], "requires_lighting": False, "shader_type": "flat"}
"""Without it habitat-sim takes z as up and turns a GLB on its side."""
_VIEW_GAP_M = 0.6
"""Between an object's surface and the view points around it (m)."""


def write_set(folder: Path, num_scenes: int, episodes_per_scene: int, seed: int) -> list[Path]:
    """Scenes and episode files of both splits, the same for the same seed; one scene in five is held out.

    Returns: the episode files.

    Raises:
        ValueError: trimesh is missing, or a count is too small.
    """
    if num_scenes < 2 or episodes_per_scene < 1:
        raise ValueError("write 2 scenes or more, one of which is held out, with 1 episode or more each")
    if importlib.util.find_spec("trimesh") is None:
        raise ValueError("writing scenes needs trimesh: pip install 'rollplex[sim]'")
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    num_heldout = max(1, num_scenes // 5)
    for split in get_args(Split):
        count = num_heldout if split == "heldout" else num_scenes - num_heldout
        rng = np.random.default_rng([seed, split == "heldout"])
        layouts = [generate_layout(OPTIONS, split, rng) for _ in range(count)]
        for index, layout in enumerate(layouts):
            write_scene(folder, scene_name(split, index), layout)
        starts = [[start_pose(layout, rng) for _ in range(episodes_per_scene)] for layout in layouts]
        for task in ("pointnav", "objectnav"):
            files.append(folder / f"{task}_{split}.json.gz")
            _write_json_gz(files[-1], episode_file(task, split, layouts, starts))
    return files


def scene_name(split: Split, index: int) -> str:
    """Name of a scene's files."""
    return f"rooms_{split}_{index:03d}"


def write_scene(folder: Path, name: str, layout: Layout) -> None:
    """`NAME.glb` and the stage config without which it would lie on its side."""
    (folder / f"{name}.glb").write_bytes(scene_mesh(layout).export(file_type="glb"))
    stage = {"render_asset": f"{name}.glb", **STAGE_CONFIG}
    (folder / f"{name}.stage_config.json").write_text(json.dumps(stage, indent=2) + "\n")


def place(x: float, y: float, height: float = 0.0) -> tuple[float, float, float]:
    """A point of a layout in habitat's axes: y is up, and the layout's y goes into the depth, -z."""
    return x, height, -y


def scene_mesh(layout: Layout) -> Any:
    """Floor, ceiling, walls and objects as a trimesh scene, each part in one colour, y up."""
    import trimesh

    scene = trimesh.Scene()

    def add(name: str, mesh: Any, rgb: tuple[int, int, int]) -> None:
        material = trimesh.visual.material.PBRMaterial(
            baseColorFactor=[*rgb, 255], metallicFactor=0.0, roughnessFactor=1.0, doubleSided=True
        )
        mesh.visual = trimesh.visual.TextureVisuals(uv=np.zeros((len(mesh.vertices), 2)), material=material)
        scene.add_geometry(mesh, geom_name=name, node_name=name)

    def block(low: Sequence[float], high: Sequence[float]) -> Any:
        """A box between two corners of the layout (x, y, height)."""
        extents = np.subtract(high, low)
        middle = np.add(high, low) / 2
        mesh = trimesh.creation.box(extents=(extents[0], extents[2], extents[1]))
        mesh.apply_translation(place(middle[0], middle[1], middle[2]))
        return mesh

    (low_x, low_y), (high_x, high_y) = layout.walls[:, :2].min(axis=0), layout.walls[:, 2:].max(axis=0)
    add("floor", block((low_x, low_y, -0.1), (high_x, high_y, 0.0)), _FLOOR_RGB)
    add("ceiling", block((low_x, low_y, WALL_M), (high_x, high_y, WALL_M + 0.1)), _CEILING_RGB)
    half = _WALL_THICKNESS_M / 2
    for index, (wall, paints) in enumerate(zip(layout.walls.tolist(), layout.wall_colors, strict=True)):
        x0, y0, x1, y1 = wall
        across = (half, 0.0) if x0 == x1 else (0.0, half)
        for side, paint in zip((-1, 1), paints, strict=True):  # each side in its room's paint
            low = (x0 + min(0.0, side * across[0]), y0 + min(0.0, side * across[1]), 0.0)
            high = (x1 + max(0.0, side * across[0]), y1 + max(0.0, side * across[1]), WALL_M)
            add(f"wall{index}_{side}", block(low, high), WALL_RGB[paint])
    for index, thing in enumerate(layout.things):
        add(f"thing{index}", thing_mesh(thing), OBJECT_RGB[thing.color])
    return scene


def thing_mesh(thing: Thing) -> Any:
    """An object, standing on the floor."""
    import trimesh

    height, radius = HEIGHTS_M[thing.shape], THING_RADIUS_M
    upright = trimesh.transformations.rotation_matrix(-math.pi / 2, [1, 0, 0])  # trimesh's axis is z
    if thing.shape == "box":
        mesh = trimesh.creation.box(extents=(1.6 * radius, height, 1.6 * radius))
        mesh.apply_translation((0, height / 2, 0))
    elif thing.shape == "ball":
        mesh = trimesh.creation.icosphere(subdivisions=2, radius=radius)
        mesh.apply_translation((0, radius, 0))
    else:
        make = trimesh.creation.cone if thing.shape == "cone" else trimesh.creation.cylinder
        mesh = make(radius=radius if thing.shape == "cone" else 0.6 * radius, height=height, sections=24)
        if thing.shape == "pillar":
            mesh.apply_translation((0, 0, height / 2))
        mesh.apply_transform(upright)
    mesh.apply_translation(place(thing.x, thing.y))
    return mesh


def start_pose(layout: Layout, rng: np.random.Generator) -> tuple[Point, float]:
    """A free place from which a way leads to the goal, and a heading (radians, as in `navigation`)."""
    (low_x, low_y), (high_x, high_y) = layout.walls[:, :2].min(axis=0), layout.walls[:, 2:].max(axis=0)
    goal = view_points(layout, layout.goal)[0]
    for _ in range(1000):
        at = (float(rng.uniform(low_x, high_x)), float(rng.uniform(low_y, high_y)))
        clear_of_goal = math.dist(at, (layout.goal.x, layout.goal.y)) > 1.5
        if clear_of_goal and layout.planner.is_clear(at, at) and math.isfinite(layout.planner.distance(at, goal)):
            return at, float(rng.uniform(-math.pi, math.pi))
    return layout.start, 0.0


def view_points(layout: Layout, thing: Thing) -> list[Point]:
    """Places around an object where an agent can stand, the first of them first counter-clockwise from +x."""
    away = THING_RADIUS_M + _VIEW_GAP_M
    around = [
        (thing.x + away * math.cos(angle), thing.y + away * math.sin(angle))
        for angle in np.arange(8) * (2 * math.pi / 8)
    ]
    free = [(round(x, 4), round(y, 4)) for x, y in around if layout.planner.is_clear((x, y), (x, y))]
    return free or [layout.start]


def episode_file(
    task: str, split: Split, layouts: Sequence[Layout], starts: Sequence[Sequence[tuple[Point, float]]]
) -> dict[str, Any]:
    """What habitat's `json.gz` of one split holds. ObjectNav's ids count anew in each scene, as habitat's do."""
    episodes: list[dict[str, Any]] = []
    shared: dict[str, list[dict[str, Any]]] = {}
    for index, (layout, poses) in enumerate(zip(layouts, starts, strict=True)):
        scene, goal = f"{scene_name(split, index)}.glb", layout.goal
        views = view_points(layout, goal)
        for number, (at, yaw) in enumerate(poses):
            record: dict[str, Any] = {
                "episode_id": str(number if task == "objectnav" else len(episodes)),
                "scene_id": scene,
                "start_position": list(place(*at)),
                "start_rotation": list(rotation_of(yaw)),
            }
            if task == "objectnav":
                record["object_category"] = f"{goal.color}_{goal.shape}"
                record["goals"] = []
                length = min(layout.planner.distance(at, view) for view in views)
            else:
                record["goals"] = [{"position": list(place(*views[0])), "radius": 0.2}]
                length = layout.planner.distance(at, views[0])
            episodes.append(record | {"info": {"geodesic_distance": round(length, 4)}})
        shared[f"{scene}_{goal.color}_{goal.shape}"] = [
            {
                "position": list(place(goal.x, goal.y)),
                "object_id": 0,
                "view_points": [{"agent_state": {"position": list(place(*view))}} for view in views],
            }
        ]
    return {"episodes": episodes} | ({"goals_by_category": shared} if task == "objectnav" else {})


def _write_json_gz(path: Path, content: dict[str, Any]) -> None:
    """The same bytes for the same content."""
    path.write_bytes(gzip.compress(json.dumps(content).encode(), mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m envs.scene_writer", description="Write scenes for habitat-sim.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scenes", type=int, default=20)
    parser.add_argument("--episodes", type=int, default=20, help="in each scene")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        files = write_set(args.folder, args.scenes, args.episodes, args.seed)
    except ValueError as error:
        parser.error(str(error))
    for file in files:
        logger.info("%s", file)


if __name__ == "__main__":
    main()
