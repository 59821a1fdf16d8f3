from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from envs.habitat_episodes import read_episodes, scene_file
from envs.rooms_layout import Thing
from tests.envs.simulators import need
from tests.envs.worlds import DIVIDER, HALL, world


@pytest.fixture(autouse=True)
def trimesh() -> None:
    need("trimesh")


def test_a_scene_stands_upright_where_the_layout_has_it() -> None:
    from envs.scene_writer import scene_mesh

    mesh = scene_mesh(
        world([Thing("pillar", "red", 6.0, 1.5), Thing("box", "blue", 2.0, 3.0)], walls=(*HALL, *DIVIDER))
    )
    low, high = mesh.bounds
    # 8 m by 4 m, walls 0.05 m beyond on each side; floor 0.1 m below and ceiling 0.1 m above 2.2 m
    assert low == pytest.approx([-0.05, -0.1, -4.05])
    assert high == pytest.approx([8.05, 2.3, 0.05])
    pillar = mesh.geometry["thing0"]
    assert pillar.bounds[0] == pytest.approx([6 - 0.18, 0.0, -1.5 - 0.18], abs=0.01)
    assert pillar.bounds[1] == pytest.approx([6 + 0.18, 1.5, -1.5 + 0.18], abs=0.01)
    assert list(pillar.visual.material.baseColorFactor[:3]) == [226, 32, 32]


def test_the_same_seed_writes_the_same_bytes_and_splits_share_no_scene(tmp_path: Path) -> None:
    from envs.scene_writer import write_set

    for name in ("a", "b"):
        write_set(tmp_path / name, 5, 3, seed=1)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert len(files) == 5 * 2 + 4
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file
    train, held = (read_episodes(str(tmp_path / "a" / f"pointnav_{split}.json.gz")) for split in ("train", "heldout"))
    assert (len(train), len(held)) == (12, 3)
    assert not {episode.scene for episode in train} & {episode.scene for episode in held}
    stage = json.loads(scene_file(train[0].scene, str(tmp_path / "a")).read_text())
    assert stage == {
        "render_asset": "rooms_train_000.glb",
        "up": [0, 1, 0],
        "front": [0, 0, -1],
        "requires_lighting": False,
        "shader_type": "flat",
    }


def test_episodes_start_free_and_end_at_view_points_of_the_goal(tmp_path: Path) -> None:
    import trimesh

    from envs.scene_writer import write_set

    write_set(tmp_path, 2, 4, seed=2)
    for episode in read_episodes(str(tmp_path / "objectnav_train.json.gz")):
        color, _, shape = episode.category.partition("_")
        assert episode.instruction == f"find the {color} {shape} and stop"
        scene = trimesh.load(tmp_path / episode.scene)
        centre = scene.geometry["thing0"].bounds.mean(axis=0)
        assert all(
            math.hypot(x - centre[0], z - centre[2]) == pytest.approx(0.9, abs=0.02) for x, _, z in episode.goals
        )
        for name, part in scene.geometry.items():  # 1 m above the floor, nothing is within the agent's radius
            if name not in ("floor", "ceiling"):
                gap = np.maximum(part.bounds[0] - episode.start, episode.start - part.bounds[1])[[0, 2]]
                assert np.linalg.norm(np.maximum(gap, 0)) > 0.1, name
