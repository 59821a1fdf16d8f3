"""habitat-sim 0.3: PointNav and ObjectNav on any scene, from habitat's own episode files (`env.id=habitat`).

habitat-sim comes from conda, so it usually lives in an interpreter of its own: envs/habitat.yml makes one, and
`env.python` names it. It allows one simulator a process and no second thread; the environment server gives it both.
Needs Python 3.10, numpy and habitat_sim. What needs no simulator is in `habitat_episodes` and `navigation`.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from envs.habitat_episodes import NavEpisode, read_episodes, scene_file
from envs.navigation import greedy_actions, point_goal, rotation_of, way_length, yaw_of
from envs.video_env import Split, VideoEnv

CONDA_LINE = "conda install habitat-sim headless -c conda-forge -c aihabitat"
_NO_IBL = {"enable_ibl": False, "ibl_envmap_filename": "none", "ibl_blut_filename": "none"}
"""Without it habitat-sim prepares image-based lighting for 16 s at its start."""
_FLOOR_M = 0.5
"""Navigable places of a generated scene lie below this height; above are the tops of its ceilings (m)."""


class HabitatEnv(VideoEnv[np.ndarray]):
    """Navigation in one habitat simulator. Actions: `left`, `right`, `forward`, `stop`; `stop` ends the episode.

    Reward of a primitive step: 1 on success, plus `shaping` times the share of the way to the goal that it covered.

    Args:
        train, heldout: episode files (json.gz) of the two splits; without `heldout` every fifth of `train` is held out.
        scenes_dir: folder that the episodes' scene ids start from; empty: that of the episode file.
        scene_dataset: habitat's scene dataset config, where the scenes have one.
        image_size: side of a frame (pixels).
        clip_frames: frames of an observation (count).
        fov_deg: horizontal field of view (degrees).
        camera_m: height of the camera (m).
        forward_m, turn_deg: what an action moves (m, degrees).
        agent_radius_m, agent_height_m: the agent's body, for the navigation mesh (m).
        max_steps: primitive actions after which an episode is truncated (count).
        shaping: weight of the share of the way covered; 0: reward is success alone.
        gpu: CUDA device that renders; -1: Mesa or whatever EGL finds. Any other without a CUDA device ends the process.

    Raises:
        ValueError: habitat-sim is not installed here, or a file cannot be used.
    """

    one_per_process = True

    def __init__(
        self,
        train: str = "",
        heldout: str = "",
        scenes_dir: str = "",
        scene_dataset: str = "",
        image_size: int = 128,
        clip_frames: int = 4,
        fov_deg: float = 90.0,
        camera_m: float = 1.25,
        forward_m: float = 0.25,
        turn_deg: float = 30.0,
        agent_radius_m: float = 0.1,
        agent_height_m: float = 1.5,
        max_steps: int = 500,
        shaping: float = 0.2,
        gpu: int = -1,
    ) -> None:
        super().__init__(("left", "right", "forward", "stop"), (clip_frames, image_size, image_size))
        self._habitat = require_habitat()
        self._lists = split_lists(train, heldout)
        self._scenes_dir = str(Path(scenes_dir or Path(train).parent).expanduser().resolve())
        for scene in dict.fromkeys(episode.scene for episodes in self._lists.values() for episode in episodes):
            scene_file(scene, self._scenes_dir)
        self._dataset = str(Path(scene_dataset).resolve()) if scene_dataset else ""
        self._size, self._fov, self._camera_m, self._gpu = image_size, fov_deg, camera_m, gpu
        self._forward_m, self._turn = forward_m, math.radians(turn_deg)
        self._body = agent_radius_m, agent_height_m
        self._max_steps, self._shaping = max_steps, shaping
        enter_folder_without_ibl()
        self._simulator: Any = None
        self._scene = ""

    def episodes(self, split: Split) -> list[tuple[str, str]]:
        return [(episode.scene, episode.id) for episode in self._lists[split]]

    # --- the episode -------------------------------------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """A seed is a place in the split's list of episodes, counted round."""
        self._number = 0 if seed is None else seed
        return super().reset(seed=seed, options=options)

    def _begin(self, split: Split) -> str:
        episodes = self._lists[split]
        self.episode: NavEpisode = episodes[self._number % len(episodes)]
        self._load(self.episode.scene)
        self._steps, self._path_length, self._success, self._stopped = 0, 0.0, False, False
        self._simulator.pathfinder.seed(self._number % (1 << 31))
        self._simulator.seed(self._number % (1 << 31))
        self._place(self.episode.start, self.episode.rotation)
        self._start_distance = self._distance = self.geodesic_distance()
        self.frames.push(self._look(self._simulator.get_sensor_observations()))
        return self.episode.instruction

    def _advance(self, action: str | None) -> tuple[float, bool, bool]:
        self._steps += 1
        before = self._at()
        if action == "stop":
            self._stopped = True
            self._success = self._distance <= self.episode.radius_m
            seen = self._simulator.get_sensor_observations()
        else:
            seen = self._simulator.get_sensor_observations() if action is None else self._simulator.step(action)
        self.frames.push(self._look(seen))
        self._path_length += math.dist(before, self._at())
        last, self._distance = self._distance, self.geodesic_distance()
        reward = float(self._success) + self._shaping * share_covered(last, self._distance, self._start_distance)
        return reward, self._stopped, not self._stopped and self._steps >= self._max_steps

    def _observe(self) -> dict[str, Any]:
        if not self.episode.category:  # PointNav's agent is told where its goal is
            distance, aside = point_goal(self._at(), self._yaw(), self.episode.goals[0])
            side = "left" if aside >= 0 else "right"
            self._instruction = (
                f"go to the point {distance:.1f} m away, {abs(aside):.0f} degrees to the {side}, and stop"
            )
        return super()._observe()

    def _info(self) -> dict[str, Any]:
        return {
            "success": self._success,
            "path_length_m": self._path_length,
            "geodesic_m": self._start_distance,
            "distance_m": self._distance,
            "task": "objectnav" if self.episode.category else "pointnav",
            "scene": self.episode.scene,
            "category": self.episode.category,
        }

    def geodesic_distance(self) -> float:
        """Along the navigation mesh to the nearest goal (m); infinite where no way leads to one."""
        return way_length(self._way(self._at()))

    def expert_actions(self, max_actions: int) -> tuple[str, ...]:
        """The greedy follower on the way to the goal that is nearest."""
        chosen = greedy_actions(
            self._at(),
            self._yaw(),
            self._way,
            self._moved,
            radius_m=self.episode.radius_m * 0.9,
            forward_m=self._forward_m,
            turn=self._turn,
            max_actions=max_actions,
        )
        return tuple(chosen)

    # --- the simulator -----------------------------------------------------------------------------------------------

    def _load(self, scene: str) -> None:
        """Bring a scene in, with a navigation mesh."""
        if scene == self._scene:
            return
        habitat = self._habitat
        file = scene_file(scene, self._scenes_dir)
        world = habitat.SimulatorConfiguration()
        world.scene_id = str(file)
        world.gpu_device_id = self._gpu
        world.enable_physics = False
        if self._dataset:
            world.scene_dataset_config_file = self._dataset
        configuration = habitat.Configuration(world, [self._agent_configuration()])
        if self._simulator is None:
            self._simulator = habitat.Simulator(configuration)
        else:
            self._simulator.reconfigure(configuration)
        self._load_navmesh(file)
        self._simulator.initialize_agent(0)
        self._scene = scene

    def _agent_configuration(self) -> Any:
        habitat = self._habitat
        camera = habitat.CameraSensorSpec()
        camera.uuid = "rgb"
        camera.sensor_type = habitat.SensorType.COLOR
        camera.resolution = [self._size, self._size]
        camera.position = [0.0, self._camera_m, 0.0]
        camera.hfov = self._fov
        agent = habitat.agent.AgentConfiguration()
        agent.radius, agent.height = self._body
        agent.sensor_specifications = [camera]
        degrees = math.degrees(self._turn)
        amounts = {"forward": ("move_forward", self._forward_m), "left": ("turn_left", degrees)}
        amounts["right"] = ("turn_right", degrees)
        agent.action_space = {
            word: habitat.agent.ActionSpec(name, habitat.agent.ActuationSpec(amount=amount))
            for word, (name, amount) in amounts.items()
        }
        return agent

    def _load_navmesh(self, scene: Path) -> None:
        """A downloaded scene brings its mesh; for others it is computed, and kept beside the scene for this body."""
        pathfinder, generated = self._simulator.pathfinder, scene.name.endswith(".stage_config.json")
        if pathfinder.is_loaded and not generated:
            return
        radius, height = self._body
        name = scene.name.split(".")[0]
        saved = scene.with_name(f"{name}.{radius:g}m-{height:g}m.navmesh")
        sources = [file for file in scene.parent.glob(f"{name}.*") if file.suffix != ".navmesh"]
        is_new = saved.is_file() and saved.stat().st_mtime >= max(file.stat().st_mtime for file in sources)
        if is_new and pathfinder.load_nav_mesh(str(saved)):
            return
        settings = self._habitat.NavMeshSettings()
        settings.set_defaults()
        settings.agent_radius, settings.agent_height = radius, height
        if not self._simulator.recompute_navmesh(pathfinder, settings):
            raise RuntimeError(
                f"habitat-sim finds nothing to walk on in {scene}: is its up axis +y, or in a stage config?"
            )
        if os.access(scene.parent, os.W_OK):
            own = saved.with_name(f".{os.getpid()}.navmesh")
            if pathfinder.save_nav_mesh(str(own)):
                own.replace(saved)

    def _place(self, position: Sequence[float], rotation: Sequence[float]) -> None:
        """Set the agent on the mesh, where the episode starts and not where `initialize_agent` put it."""
        snapped = self._simulator.pathfinder.snap_point(_vector(position))
        here = np.asarray(snapped if np.all(np.isfinite(snapped)) else position, np.float32)
        if abs(float(here[1]) - position[1]) > _FLOOR_M:
            here = _vector(position)
        state = self._habitat.AgentState()
        state.position = here
        state.rotation = np.array(rotation_of(yaw_of(rotation)))
        self._simulator.get_agent(0).set_state(state, reset_sensors=True)

    def _at(self) -> tuple[float, ...]:
        return tuple(float(part) for part in self._simulator.get_agent(0).get_state().position)

    def _yaw(self) -> float:
        rotation = self._simulator.get_agent(0).get_state().rotation
        return yaw_of((rotation.x, rotation.y, rotation.z, rotation.w))

    def _way(self, start: Sequence[float]) -> list[tuple[float, ...]]:
        """Corners of the shortest way to the nearest goal; empty where there is none."""
        way = self._habitat.MultiGoalShortestPath()
        way.requested_start = _vector(start)
        way.requested_ends = [_vector(goal) for goal in self.episode.goals]
        if not self._simulator.pathfinder.find_path(way):
            return []
        return [tuple(float(part) for part in corner) for corner in way.points]

    def _moved(self, start: Sequence[float], end: Sequence[float]) -> tuple[float, ...]:
        """Where a step between two places ends."""
        return tuple(float(part) for part in self._simulator.pathfinder.try_step(_vector(start), _vector(end)))

    def _look(self, seen: dict[str, Any]) -> np.ndarray:
        return np.array(seen["rgb"][..., :3])

    def close(self) -> None:
        if self._simulator is not None:
            self._simulator.close()
            self._simulator = None


def require_habitat() -> Any:
    """The module.

    Raises:
        ValueError: it is not installed in this interpreter.
    """
    try:
        return importlib.import_module("habitat_sim")
    except ImportError as error:
        raise ValueError(
            f"habitat-sim is not installed in this interpreter ({error}), and pip has no working package of it. Make "
            f"one with `conda env create -f envs/habitat.yml` (or `{CONDA_LINE}`) and set env.python to its python"
        ) from error


def split_lists(train: str, heldout: str) -> dict[str, list[NavEpisode]]:
    """Episodes of both splits; with one file alone, every fifth of it is held out.

    Raises:
        ValueError: a file cannot be used, or the two share an episode.
    """
    if not train:
        raise ValueError(
            "habitat needs env.options.train, an episode file: one of habitat's *.json.gz, or what "
            "`python -m envs.scene_writer FOLDER` writes"
        )
    everything = read_episodes(train)
    if not heldout:
        if len(everything) == 1:
            raise ValueError(f"episode file {train!r} has one episode, of which none can be held out: set heldout")
        kept = [episode for place, episode in enumerate(everything) if place % 5]
        return {"train": kept, "heldout": everything[::5]}
    held = read_episodes(heldout)
    shared = {(episode.scene, episode.id, episode.start) for episode in everything}
    if any((episode.scene, episode.id, episode.start) in shared for episode in held):
        raise ValueError(f"episode files {train!r} and {heldout!r} share episodes: name two that do not")
    return {"train": everything, "heldout": held}


def share_covered(before: float, after: float, start: float) -> float:
    """Share of the way from the start that a step covered; 0 where a length is infinite or there was no way to go."""
    if not (math.isfinite(before) and math.isfinite(after) and math.isfinite(start)) or start <= 0:
        return 0.0
    return (before - after) / start


def enter_folder_without_ibl() -> None:
    """Work where habitat-sim finds a lighting config that asks for none. One folder for all processes of a user."""
    folder = Path(tempfile.gettempdir()) / f"rollplex-habitat-{os.getuid()}"
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    file = data / "default.pbr_config.json"
    if not file.is_file():
        own = file.with_suffix(f".{os.getpid()}")
        own.write_text(json.dumps(_NO_IBL))
        shutil.move(str(own), str(file))
    os.chdir(folder)


def _vector(place: Sequence[float]) -> np.ndarray:
    return np.asarray(place, np.float32)
