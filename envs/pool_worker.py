"""One process of the environment pool: serves commands for its slots until the pool closes or dies.

Started as a fresh interpreter that calls `main`, so it imports simulators and numpy, never the program with the pool.
Clips go through shared memory, everything else through a pipe of pickled tuples:

    pool -> worker   ("init", WorkerSetup)   ("run", slot, Episode or actions)   ("expert", slot, max_actions)
    worker -> pool   ("ready", clip_shape, action_names)   ("done", slot, Outcome)   ("expert", slot, actions)
                     ("error", slot, text)
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from configs.errors import ConfigError
from configs.schema import EnvConfig
from envs.registration import Episode, make_env
from envs.video_env import INFO_KEYS, VideoEnv


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker is told once."""

    config: EnvConfig
    slots: tuple[int, ...]
    expert_actions: int
    """Longest expert chunk sent with each result (count); 0 sends none."""


@dataclass(frozen=True)
class Outcome:
    """A finished reset or step, without its clip."""

    instruction: str
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    expert: tuple[str, ...]
    env_steps: int
    frame_hash: str
    finished_at: float
    """`time.monotonic` (s), which all processes of a machine share."""


class ContractError(Exception):
    """An environment returned something that it must not return."""


class Slot:
    """One environment, its episode, and its part of the shared memory."""

    def __init__(self, config: EnvConfig, env: VideoEnv, clip: np.ndarray, expert_actions: int) -> None:
        self._config, self.env, self._clip, self._expert_actions = config, env, clip, expert_actions
        self._turns = 0

    def run(self, command: Episode | tuple[str, ...]) -> Outcome:
        """Reset to an episode or carry out a chunk; the clip is in shared memory afterwards."""
        if isinstance(command, Episode):
            self._turns, env_steps = 0, 0
            observation, info = self.env.reset(seed=command.seed, options={"split": command.split})
            reward, terminated, truncated = 0.0, False, False
        else:
            self._turns += 1
            observation, reward, terminated, truncated, info = self.env.step_chunk(command)
            truncated = truncated or (not terminated and self._turns >= self._config.max_turns)
            env_steps = info.get("env_steps", max(1, len(command)))
        check_result(self._config.id, self._clip.shape, observation, reward, info)
        clip, instruction = observation["clip"], observation["instruction"]
        self._clip[...] = clip
        ask = self._expert_actions and not (terminated or truncated)
        return Outcome(
            instruction=instruction,
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
            info=info,
            expert=tuple(self.env.expert_actions(self._expert_actions)) if ask else (),
            env_steps=env_steps,
            frame_hash=hashlib.blake2b(self._clip.tobytes() + instruction.encode(), digest_size=16).hexdigest(),
            finished_at=time.monotonic(),
        )


def check_result(env_id: str, shape: tuple[int, ...], observation: Any, reward: Any, info: Any) -> None:
    """Hold an environment's answer against the contract of `VideoEnv`.

    Raises:
        ContractError: names the environment, what it returned, what was expected, and the remedy.
    """

    def fail(what: str, expected: str, remedy: str) -> ContractError:
        return ContractError(f"env {env_id!r} returned {what}; expected {expected}. {remedy}")

    if not isinstance(observation, dict) or not {"clip", "instruction"} <= observation.keys():
        got = f"keys {sorted(map(str, observation))}" if isinstance(observation, dict) else type(observation).__name__
        raise fail(f"an observation with {got}", "a dict with clip and instruction", "Return both from reset and step.")
    clip = observation["clip"]
    if not isinstance(clip, np.ndarray):
        raise fail(
            f"a clip of type {type(clip).__name__}", f"a numpy array uint8{list(shape)}", "Use numpy.stack(frames)."
        )
    if clip.dtype != np.uint8:
        remedy = "Convert it: floats in 0..1 with (frames * 255).round().astype(numpy.uint8), integers with astype."
        raise fail(f"a clip of dtype {clip.dtype}", "uint8 in 0..255", remedy)
    if clip.shape != shape:
        remedy = "Return frames, height, width, RGB as observation_space['clip'] says, or correct the space."
        raise fail(f"a clip of shape {clip.shape}", f"{shape}", remedy)
    if not isinstance(observation["instruction"], str):
        raise fail(f"an instruction of type {type(observation['instruction']).__name__}", "str", "Return the text.")
    if not isinstance(reward, int | float | np.number) or not math.isfinite(reward):
        raise fail(f"the reward {reward!r}", "a finite number", "Look for a division by 0 or a missing value.")
    missing = [key for key in INFO_KEYS if key not in info]
    if missing:
        raise fail(f"an info without {', '.join(missing)}", f"{', '.join(INFO_KEYS)}", "Add them in _info.")


def serve(pipe: Connection, memory_fd: int) -> None:
    """Build the environments, map their clips, and answer commands until the pipe closes."""
    setup: WorkerSetup = pipe.recv()[1]
    try:
        envs = [make_env(setup.config) for _ in setup.slots]
        shape = tuple(envs[0].observation_space["clip"].shape)
    except Exception as error:
        pipe.send(("error", None, describe(error)))
        return
    size = math.prod(shape)
    os.ftruncate(memory_fd, size * len(envs))
    memory = np.frombuffer(mmap.mmap(memory_fd, size * len(envs)), np.uint8).reshape(len(envs), *shape)
    slots = {
        index: Slot(setup.config, env, memory[place], setup.expert_actions)
        for place, (index, env) in enumerate(zip(setup.slots, envs, strict=True))
    }
    pipe.send(("ready", shape, envs[0].action_names))
    try:
        while True:
            kind, index, argument = pipe.recv()
            try:
                if kind == "expert":
                    pipe.send(("expert", index, tuple(slots[index].env.expert_actions(argument))))
                else:
                    pipe.send(("done", index, slots[index].run(argument)))
            except BrokenPipeError:
                return
            except Exception as error:
                pipe.send(("error", index, describe(error)))
    except (EOFError, ConnectionResetError):
        return
    finally:
        for env in envs:
            env.close()


def describe(error: Exception) -> str:
    """A contract error speaks for itself, and so does a refused setting; anything else comes with its traceback."""
    if isinstance(error, ContractError | ConfigError):
        return str(error)
    return "".join(traceback.format_exception(error)).rstrip()


def exit_with_parent(alive_fd: int) -> None:
    """End this process, whatever it is doing, once the other end of a pipe that only the parent holds is gone."""

    def watch() -> None:
        os.read(alive_fd, 1)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    pipe_fd, memory_fd, alive_fd = (int(argument) for argument in sys.argv[1:4])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the pool decides when to close
    exit_with_parent(alive_fd)
    serve(Connection(pipe_fd), memory_fd)
