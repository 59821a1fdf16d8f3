"""What `envs.habitat` uses of habitat-sim, for one hall of 8 m by 4 m (x 0..8, z -4..0) with nothing in it.

Pictures show where the agent is: red is x, green is z, blue the heading. Places outside of the hall cannot be reached.
"""

from __future__ import annotations

import math
from types import SimpleNamespace as Record
from typing import Any

import numpy as np

made: list[Simulator] = []
SensorType = Record(COLOR="color")
SimulatorConfiguration = CameraSensorSpec = AgentState = MultiGoalShortestPath = Record


class NavMeshSettings(Record):
    def set_defaults(self) -> None:
        self.agent_radius, self.agent_height = 0.1, 1.5


agent = Record(
    AgentConfiguration=Record,
    ActionSpec=lambda name, actuation: (name, actuation.amount),
    ActuationSpec=lambda amount: Record(amount=amount),
)


def Configuration(world: Any, agents: Any) -> Any:
    return Record(world=world, agents=agents)


def _inside(place: Any) -> bool:
    return 0 <= place[0] <= 8 and -4 <= place[2] <= 0


class PathFinder:
    is_loaded = False

    def seed(self, seed: int) -> None: ...

    def snap_point(self, place: Any) -> Any:
        return place if _inside(place) else np.full(3, math.nan)

    def try_step(self, start: Any, end: Any) -> Any:
        return np.array([min(max(end[0], 0.0), 8.0), end[1], min(max(end[2], -4.0), 0.0)])

    def find_path(self, way: Any) -> bool:
        ends = [end for end in way.requested_ends if _inside(end)]
        if not ends:
            way.points = []
            return False
        way.points = [way.requested_start, min(ends, key=lambda end: float(np.linalg.norm(end - way.requested_start)))]
        return True

    def load_nav_mesh(self, path: str) -> bool:
        return True

    def save_nav_mesh(self, path: str) -> bool:
        with open(path, "w") as file:
            file.write("mesh")
        return True


class Simulator:
    def __init__(self, configuration: Any) -> None:
        assert not made, "habitat-sim allows one simulator a process"
        made.append(self)
        self.scenes: list[str] = []
        self.num_recomputed = 0
        self.pathfinder = PathFinder()
        self.reconfigure(configuration)

    def reconfigure(self, configuration: Any) -> None:
        self.configuration = configuration
        self.scenes.append(configuration.world.scene_id)

    def seed(self, seed: int) -> None: ...

    def recompute_navmesh(self, pathfinder: PathFinder, settings: NavMeshSettings) -> bool:
        self.num_recomputed += 1
        return True

    def initialize_agent(self, number: int) -> None:
        self.place, self.yaw = np.array([4.0, 2.3, -2.0]), 0.0  # on top of the ceiling

    def get_agent(self, number: int) -> Any:
        return self

    def set_state(self, state: Any, reset_sensors: bool) -> None:
        assert state.rotation.shape == (4,)
        self.place = np.asarray(state.position, float)
        self.yaw = 2 * math.atan2(state.rotation[1], state.rotation[3])

    def get_state(self) -> Any:
        rotation = Record(x=0.0, y=math.sin(self.yaw / 2), z=0.0, w=math.cos(self.yaw / 2))
        return Record(position=self.place.astype(np.float32), rotation=rotation)

    def step(self, action: str) -> dict[str, Any]:
        name, amount = self.configuration.agents[0].action_space[action]
        if name == "move_forward":
            ahead = self.place + amount * np.array([-math.sin(self.yaw), 0.0, -math.cos(self.yaw)])
            self.place = self.pathfinder.try_step(self.place, ahead)
        else:
            self.yaw += math.radians(amount) * (1 if name == "turn_left" else -1)
        return self.get_sensor_observations()

    def get_sensor_observations(self) -> dict[str, Any]:
        height, width = self.configuration.agents[0].sensor_specifications[0].resolution
        turn = round(math.degrees(self.yaw)) % 360 // 2
        color = (int(self.place[0] * 30), int(-self.place[2] * 60), turn, 255)
        return {"rgb": np.broadcast_to(np.array(color, np.uint8), (height, width, 4))}

    def close(self) -> None:
        made.remove(self)
