"""Episode files and the environment; the simulator itself where it is installed, else a hall in plain Python."""

from __future__ import annotations

import gzip
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.schema import EnvConfig
from envs.habitat import HabitatEnv, share_covered, split_lists
from envs.habitat_episodes import read_episodes, scene_file
from envs.pool import EnvError, EnvPool
from envs.registration import Episode, heldout_manifest
from tests.envs.simulators import missing, need

FAKE = Path(__file__).parent / "fake_habitat"


def point_episode(id_: str, start: list[float], goal: list[float], scene: str = "hall.glb") -> dict[str, Any]:
    return {
        "episode_id": id_,
        "scene_id": scene,
        "start_position": start,
        "start_rotation": [0, 0, 0, 1],
        "goals": [{"position": goal, "radius": 0.2}],
        "info": {"geodesic_distance": 1.0},
    }


def object_file() -> dict[str, Any]:
    def goal(place: list[float], views: list[list[float]]) -> dict[str, Any]:
        return {"position": place, "object_id": 7, "view_points": [{"agent_state": {"position": v}} for v in views]}

    common = {"start_position": [1, 0, -1], "start_rotation": [0, 0, 0, 1], "goals": []}
    return {
        "goals_by_category": {
            "hall.glb_tv_monitor": [goal([6, 1, -2], [[5, 0, -2], [6, 0, -1]]), goal([0, 1, -4], [[1, 0, -3]])],
            "barn.glb_bed": [goal([3, 0, -2], [])],
        },
        "episodes": [
            common | {"episode_id": 0, "scene_id": "mp3d/hall.glb", "object_category": "tv_monitor"},
            common | {"episode_id": 0, "scene_id": "mp3d/barn.glb", "object_category": "bed"},
        ],
    }


def written(path: Path, content: dict[str, Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    return str(path)


def test_pointnav_files_are_read_with_their_content_folder(tmp_path: Path) -> None:
    path = written(tmp_path / "train.json.gz", {"episodes": []})
    written(tmp_path / "content" / "b.json.gz", {"episodes": [point_episode("0", [1, 0, -1], [2, 0, -2], "b.glb")]})
    written(tmp_path / "content" / "a.json.gz", {"episodes": [point_episode("0", [3, 0, -1], [2, 0, -2], "a.glb")]})
    first, second = read_episodes(path)
    assert [(e.scene, e.id) for e in (first, second)] == [("a.glb", "0"), ("b.glb", "0")]
    assert (first.start, first.goals, first.radius_m) == ((3.0, 0.0, -1.0), ((2.0, 0.0, -2.0),), 0.2)


def test_objectnav_goals_are_view_points_shared_by_scene_and_category(tmp_path: Path) -> None:
    tv, bed = read_episodes(written(tmp_path / "val.json.gz", object_file()))
    assert tv.goals == ((5.0, 0.0, -2.0), (6.0, 0.0, -1.0), (1.0, 0.0, -3.0))
    assert (tv.radius_m, tv.instruction) == (0.1, "find the tv monitor and stop")
    assert (bed.goals, bed.radius_m) == (((3.0, 0.0, -2.0),), 1.0)  # no view points: near the object itself


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"rows": []}, "no episode file of habitat's"),
        ({"episodes": []}, "hold no episodes"),
        ({"episodes": [point_episode("0", [1, 0], [1, 0, 0])]}, "should be 3 numbers"),
        ({"episodes": [point_episode("0", [1, 0, 0], [1, 0, 0])] * 2}, "1 episodes repeat a scene and id"),
    ],
)
def test_wrong_episode_files_are_named(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_episodes(written(tmp_path / "x.json.gz", content))


def test_missing_files_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"python -m envs\.scene_writer FOLDER"):
        read_episodes(str(tmp_path / "none.json.gz"))
    with pytest.raises(ValueError, match=r"env\.options\.scenes_dir"):
        scene_file("mp3d/x.glb", str(tmp_path))


def test_a_stage_config_goes_before_its_mesh(tmp_path: Path) -> None:
    folder = tmp_path / "hm3d"
    folder.mkdir()
    (folder / "a.basis.glb").touch()
    assert scene_file("data/scene_datasets/hm3d/a.basis.glb", str(tmp_path)) == folder / "a.basis.glb"
    (folder / "a.stage_config.json").touch()
    assert scene_file("hm3d/a.basis.glb", str(tmp_path)) == folder / "a.stage_config.json"


def test_every_fifth_episode_is_held_out_where_one_file_is_given(tmp_path: Path) -> None:
    rows = [point_episode(str(i), [1 + i / 10, 0, -1], [2, 0, -2]) for i in range(10)]
    path = written(tmp_path / "all.json.gz", {"episodes": rows})
    lists = split_lists(path, "")
    assert [episode.id for episode in lists["heldout"]] == ["0", "5"]
    assert len(lists["train"]) == 8
    with pytest.raises(ValueError, match="share episodes"):
        split_lists(path, path)


def test_one_episode_cannot_be_in_both_splits(tmp_path: Path) -> None:
    path = written(tmp_path / "all.json.gz", {"episodes": [point_episode("0", [1, 0, -1], [2, 0, -2])]})
    with pytest.raises(ValueError, match="set heldout"):
        split_lists(path, "")


def test_share_covered_is_never_infinite() -> None:
    assert share_covered(4.0, 3.0, 8.0) == 0.125
    assert share_covered(math.inf, 3.0, 8.0) == share_covered(3.0, 2.0, math.inf) == share_covered(0.0, 1.0, 0.0) == 0.0


def test_without_habitat_the_error_names_the_conda_line(tmp_path: Path) -> None:
    if not missing("habitat_sim"):
        pytest.skip("habitat-sim is installed here")
    path = written(tmp_path / "train.json.gz", {"episodes": []})
    with pytest.raises(EnvError, match=r"conda install habitat-sim headless -c conda-forge -c aihabitat.*env\.python"):
        EnvPool(EnvConfig(id="habitat", num_envs=1, options={"train": path}))


# --- the environment in the fake hall ------------------------------------------------------------------------------


@pytest.fixture
def hall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(FAKE))
    monkeypatch.chdir(tmp_path)
    for scene in ("hall", "barn"):
        (tmp_path / f"{scene}.stage_config.json").touch()
    yield tmp_path
    sys.modules.pop("habitat_sim", None)


def point_env(folder: Path, *episodes: dict[str, Any], **options: Any) -> HabitatEnv:
    path = written(folder / "train.json.gz", {"episodes": list(episodes)})
    heldout = written(folder / "heldout.json.gz", {"episodes": [point_episode("held", [1, 0, -1], [2, 0, -1])]})
    return HabitatEnv(train=path, heldout=heldout, image_size=8, **options)


def run_expert(env: HabitatEnv, seed: int) -> tuple[list[str], float, dict[str, Any]]:
    _, info = env.reset(seed=seed)
    done, total, over = list[str](), 0.0, False
    while not over:
        actions = env.expert_actions(3)
        _, reward, terminated, truncated, info = env.step_chunk(actions)
        done, total, over = [*done, *actions], total + reward, terminated or truncated
    return done, total, info


def test_pointnav_by_hand(hall: Path) -> None:
    env = point_env(hall, point_episode("0", [1, 0, -3], [2, 0, -3]))
    observation, info = env.reset(seed=0)
    assert observation["instruction"] == "go to the point 1.0 m away, 90 degrees to the right, and stop"
    assert (info["geodesic_m"], info["distance_m"], info["task"]) == (1.0, 1.0, "pointnav")
    done, total, info = run_expert(env, 0)
    # three turns of 30 degrees, four steps of 0.25 m; within 0.18 m after the fourth
    assert done == ["right"] * 3 + ["forward"] * 4 + ["stop"]
    assert info["success"]
    assert info["path_length_m"] == pytest.approx(1.0, abs=1e-5)
    assert total == pytest.approx(1.2, abs=1e-5)
    env.close()


def test_stopping_elsewhere_fails_and_walking_on_is_truncated(hall: Path) -> None:
    env = point_env(hall, point_episode("0", [1, 0, -3], [2, 0, -3]), max_steps=2)
    env.reset(seed=0)
    *_, terminated, truncated, info = env.step_chunk(("stop",))
    assert (terminated, truncated, info["success"]) == (True, False, False)
    env.reset(seed=0)
    *_, terminated, truncated, info = env.step_chunk(("left", "right", "left"))
    assert (terminated, truncated, info["env_steps"]) == (False, True, 2)
    env.close()


def test_an_unreachable_goal_costs_nothing_infinite(hall: Path) -> None:
    env = point_env(hall, point_episode("0", [1, 0, -3], [90, 0, -3]))
    _, info = env.reset(seed=0)
    assert info["geodesic_m"] == math.inf
    *_, info = env.step_chunk(("forward",))
    assert run_expert(env, 0)[:2] == (["stop"], 0.0)
    env.close()


def test_the_expert_finds_view_points_that_are_smaller_than_its_step(hall: Path) -> None:
    views = [(4 + 0.9 * math.cos(angle), 0.0, -2 + 0.9 * math.sin(angle)) for angle in np.arange(8) * math.pi / 4]
    content = object_file()
    rng = np.random.default_rng(0)
    content["episodes"] = [
        {**content["episodes"][0], "episode_id": str(i), "scene_id": "hall.glb",
         "start_position": [rng.uniform(0.3, 7.7), 0.0, -rng.uniform(0.3, 3.7)]}
        for i in range(40)
    ]  # fmt: skip
    shared = {"position": [4, 0, -2], "view_points": [{"agent_state": {"position": list(view)}} for view in views]}
    content["goals_by_category"] = {f"hall.glb_{content['episodes'][0]['object_category']}": [shared]}
    env = HabitatEnv(train=written(hall / "train.json.gz", content), image_size=8, max_steps=100)
    assert all(run_expert(env, seed)[2]["success"] for seed in range(32))
    env.close()


def test_a_scene_that_is_not_there_is_named_before_the_first_episode(hall: Path) -> None:
    with pytest.raises(ValueError, match=r"scene 'tower.glb' is not there.*scenes_dir"):
        point_env(hall, point_episode("0", [1, 0, -3], [2, 0, -3], "tower.glb"))


def test_a_mesh_older_than_its_scene_is_computed_anew(hall: Path) -> None:
    scene, mesh = hall / "hall.stage_config.json", hall / "hall.0.1m-1.5m.navmesh"
    computed = []
    for age_s in (0, 0, -1):
        if mesh.is_file():
            os.utime(mesh, (scene.stat().st_mtime + age_s,) * 2)
        env = point_env(hall, point_episode("0", [1, 0, -3], [2, 0, -3]))
        env.reset(seed=0)
        computed.append(sys.modules["habitat_sim"].made[-1].num_recomputed)
        env.close()
    assert computed == [1, 0, 1]


def test_objectnav_goes_to_the_nearest_view_point_and_scenes_change(hall: Path) -> None:
    content = object_file()
    for row in content["episodes"]:
        row["scene_id"] = Path(row["scene_id"]).name
    env = HabitatEnv(train=written(hall / "train.json.gz", content), image_size=8)
    assert env.episodes("heldout") == [("hall.glb", "0")]
    observation, info = env.reset(seed=0, options={"split": "heldout"})
    assert observation["instruction"] == "find the tv monitor and stop"
    assert info["geodesic_m"] == 2.0  # from (1, -1) to (1, -3); the others are 4.1 and 5 m away
    env.reset(seed=0)
    env.reset(seed=5, options={"split": "heldout"})
    scenes = [Path(scene).name for scene in sys.modules["habitat_sim"].made[0].scenes]
    assert scenes == ["hall.stage_config.json", "barn.stage_config.json", "hall.stage_config.json"]
    env.close()


def test_the_server_runs_one_simulator_a_process_and_evaluates_by_list(hall: Path, monkeypatch: Any) -> None:
    rows = [point_episode(str(i), [1, 0, -1 - i / 4], [4, 0, -2]) for i in range(10)]
    path = written(hall / "train.json.gz", {"episodes": rows})
    config = EnvConfig(id="habitat", num_envs=2, options={"train": path, "image_size": 8})
    with EnvPool(config, with_expert=True) as pool:
        assert len(pool._workers) == 2
        manifest = heldout_manifest(config, 5, 0, pool.heldout)
        assert sorted((episode.scene, episode.id) for episode in manifest) == [("hall.glb", "0"), ("hall.glb", "5")]
        for slot, episode in enumerate(manifest):
            pool.reset(slot, episode)
        results = pool.wait([0, 1])
        assert [result.info["geodesic_m"] for result in results] == [
            pytest.approx(math.hypot(3, 1 - int(episode.id) / 4), abs=1e-5) for episode in manifest
        ]
        assert all(result.expert for result in results)


def test_habitat_itself_on_a_written_scene(tmp_path: Path) -> None:
    need("habitat_sim")
    need("trimesh")
    from envs.scene_writer import write_set

    write_set(tmp_path, 2, 2, seed=0)
    for task in ("pointnav", "objectnav"):
        options = {split: str(tmp_path / f"{task}_{split}.json.gz") for split in ("train", "heldout")}
        with EnvPool(EnvConfig(id="habitat", num_envs=1, max_turns=300, options=options), with_expert=True) as pool:
            pool.reset(0, Episode("0", 0))
            (result,) = pool.wait([0])
            assert result.clip.std() > 5
            while not (result.terminated or result.truncated):
                pool.step(0, result.expert)
                (result,) = pool.wait([0])
            assert result.info["success"]
