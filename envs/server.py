"""Simulators in a process of their own, perhaps under another Python: built and stepped until the client is gone.

This one file is the server side of `envs.client`. It runs on Python 3.9 to 3.13 and needs numpy and msgpack only; what
a simulator imports is that simulator's business. It starts in one of two ways:

    python server.py SOCKET MEMORY ALIVE                         numbers of inherited files; how a pool starts it
    python server.py --listen 127.0.0.1:5005 --env module:Class  one process for each client that connects; modules are
                                                                 looked for in this repository, here and PYTHONPATH

Messages are msgpack lists over a stream, in the order of the commands:

    client -> server   ["init", {version, env, options, slots, paths}]
                       ["reset", slot, seed, split, expert]   ["step", slot, actions, expert]
    server -> client   ["ready", {version, shape, dtype, actions, episodes, expert}]
                       ["done", slot, outcome]   ["error", slot or None, kind, text]

`expert` is the length of the expert's chunk to be sent along (0: none). A clip goes into a ring of clips in the mapped
file MEMORY, and `outcome["place"]` says where; it stays until the ring comes round, which holds as many clips as there
are slots. Without such a file (a client on TCP) the clip is in `outcome["clip"]`. Knows nothing of pools and policies.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib
import inspect
import math
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgpack
import numpy as np

VERSION = 1
"""Of the messages; both sides must have the same."""
INFO_KEYS = ("success", "path_length_m", "geodesic_m", "distance_m", "task")
"""What every info holds: reached the goal (bool), metres walked, shortest path from the start, metres left (numbers,
NaN where there is none), task's name (text)."""
_MAX_MESSAGE_BYTES = 1 << 30


class ConfigRefused(Exception):
    """The environment cannot be built as asked; the text is for the user."""


class ContractBroken(Exception):
    """An environment returned something that it must not return."""


def build(target: str, options: dict[str, Any]) -> Any:
    """The environment `module:Class` with its options: an `envs.video_env.VideoEnv`, or what has its methods.

    Raises:
        ConfigRefused: it cannot be imported, is no environment, or refuses an option.
    """
    env_class = find_class(target)
    try:
        inspect.signature(env_class).bind(**options)
    except TypeError as error:
        raise ConfigRefused(f"env.options {options} of {target!r}: its constructor: {error}") from error
    try:
        return env_class(**options)
    except ValueError as error:
        raise ConfigRefused(f"env.options {options} of {target!r}: {error}") from error


def find_class(target: str) -> type:
    """The class `module:Class`, checked to have what an environment has."""
    module_name, _, class_name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigRefused(
            f"env.id: cannot import {module_name!r} in {sys.executable} ({error}): install it there, or correct the id"
        ) from error
    found = getattr(module, class_name, None)
    if found is None:
        raise ConfigRefused(f"env.id: {module_name!r} has no {class_name!r}: correct the name after the colon")
    if not (isinstance(found, type) and callable(getattr(found, "step_chunk", None))):
        raise ConfigRefused(f"env.id: {class_name!r} is no envs.video_env.VideoEnv: derive it from that")
    return found


class Host:
    """The environments of one process, by slot, and the ring that their clips go into."""

    def __init__(self, setup: dict[str, Any], memory_fd: int | None) -> None:
        sys.path[:] = setup["paths"] + [path for path in sys.path if path not in setup["paths"]]
        slots = setup["slots"]
        if len(slots) > 1 and getattr(find_class(setup["env"]), "one_per_process", False):
            raise ConfigRefused(f"{setup['env']} allows one simulator a process: set env.workers to env.num_envs")
        self.name = setup["env"]
        self.envs = {slot: build(setup["env"], setup["options"]) for slot in slots}
        first = next(iter(self.envs.values()))
        self.shape = tuple(int(side) for side in first.clip_shape)
        self.ring: np.ndarray | None = None
        self.place = 0
        if memory_fd is not None:
            size = math.prod(self.shape) * len(slots)
            os.ftruncate(memory_fd, size)
            self.ring = np.frombuffer(mmap.mmap(memory_fd, size), np.uint8).reshape(len(slots), *self.shape)

    def header(self) -> dict[str, Any]:
        """What the client has to know before the first command."""
        first = next(iter(self.envs.values()))
        episodes = first.episodes("heldout") if hasattr(first, "episodes") else []
        return {
            "version": VERSION,
            "shape": list(self.shape),
            "dtype": "uint8",
            "actions": list(first.action_names),
            "episodes": list(episodes),
            "expert": bool(getattr(first, "has_expert", False)),
        }

    def run(self, command: str, slot: int, *arguments: Any) -> dict[str, Any]:
        """Reset an environment or carry out a chunk in it; its outcome, with the clip or the clip's place."""
        env = self.envs[slot]
        if command == "reset":
            seed, split, expert = arguments
            observation, info = env.reset(seed=seed, options={"split": split})
            reward, terminated, truncated, env_steps = 0.0, False, False, 0
        else:
            actions, expert = arguments
            observation, reward, terminated, truncated, info = env.step_chunk(tuple(actions))
            env_steps = info.get("env_steps", max(1, len(actions)))
        check_result(self.name, self.shape, observation, reward, info)
        clip = np.ascontiguousarray(observation["clip"])
        ask = expert and not (terminated or truncated)
        outcome = {
            "instruction": observation["instruction"],
            "reward": float(reward),
            "terminated": bool(terminated),
            "truncated": bool(truncated),
            "info": info,
            "expert": list(env.expert_actions(expert)) if ask else [],
            "env_steps": int(env_steps),
            "frame_hash": frame_hash(clip, observation["instruction"], is_start=command == "reset"),
        }
        if self.ring is None:
            outcome["clip"] = clip.tobytes()
        else:
            self.ring[self.place] = clip
            outcome["place"] = self.place
            self.place = (self.place + 1) % len(self.ring)
        return outcome

    def close(self) -> None:
        """Close every environment."""
        for env in self.envs.values():
            env.close()


def check_result(env_id: str, shape: tuple[int, ...], observation: Any, reward: Any, info: Any) -> None:
    """Hold an environment's answer against the contract of `VideoEnv`.

    Raises:
        ContractBroken: names the environment, what it returned, what was expected, and the remedy.
    """

    def fail(what: str, expected: str, remedy: str) -> ContractBroken:
        return ContractBroken(f"env {env_id!r} returned {what}; expected {expected}. {remedy}")

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
        remedy = "Return frames, height, width, RGB as clip_shape says, or correct clip_shape."
        raise fail(f"a clip of shape {clip.shape}", f"{shape}", remedy)
    if not isinstance(observation["instruction"], str):
        raise fail(f"an instruction of type {type(observation['instruction']).__name__}", "str", "Return the text.")
    if not isinstance(reward, (int, float, np.number)) or not math.isfinite(reward):
        raise fail(f"the reward {reward!r}", "a finite number", "Look for a division by 0 or a missing value.")
    missing = [key for key in INFO_KEYS if key not in info]
    if missing:
        raise fail(f"an info without {', '.join(missing)}", f"{', '.join(INFO_KEYS)}", "Add them in _info.")
    success = info["success"]
    if not isinstance(success, (bool, np.bool_, int, float, np.number)) or not math.isfinite(success):
        raise fail(f"an info with success {success!r}", "True or False", "Text is true whatever it says; convert it.")
    for key in INFO_KEYS[1:4]:
        if not isinstance(info[key], (int, float, np.number)):
            raise fail(
                f"an info with {key} {info[key]!r}", "a number", "Return math.nan where nothing can be measured."
            )
    if not isinstance(info["task"], str):
        raise fail(f"an info with task {info['task']!r}", "a name", "Return text; results are listed by it.")


def serve(connection: socket.socket, memory_fd: int | None = None, target: str = "") -> None:
    """Build what the client asks for and answer its commands until it is gone.

    Args:
        target: the only environment that may be built; empty: the client names it.
    """
    messages = read_messages(connection)
    setup = next(messages, None)
    if setup is None:
        return
    try:
        host = Host(_checked_setup(setup, target), memory_fd)
        header = host.header()
    except Exception as error:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            _send(connection, ["error", None, *describe(error)])
        return
    with contextlib.suppress(BrokenPipeError, ConnectionResetError), contextlib.closing(host):
        _send(connection, ["ready", header])
        for command, slot, *arguments in messages:
            try:
                answer = ["done", slot, host.run(command, slot, *arguments)]
            except Exception as error:
                answer = ["error", slot, *describe(error)]
            _send(connection, answer)


def _checked_setup(message: Any, target: str) -> dict[str, Any]:
    setup: dict[str, Any] = message[1]
    if setup["version"] != VERSION:
        raise ConfigRefused(
            f"the client speaks version {setup['version']} of the environment protocol and this server {VERSION}: "
            "use the same Rollplex on both sides"
        )
    if not target:
        return setup
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return {**setup, "env": target, "paths": [root, os.getcwd()]}  # the client's may lead anywhere


def describe(error: Exception) -> tuple[str, str]:
    """Kind and text: what a user can mend speaks for itself, anything else comes with its traceback."""
    if isinstance(error, ConfigRefused):
        return "config", str(error)
    if isinstance(error, ContractBroken):
        return "contract", str(error)
    return "raised", "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()


def read_messages(connection: socket.socket) -> Iterator[Any]:
    """Each message as it arrives, until the other side is gone."""
    unpacker = new_unpacker()
    while True:
        try:
            received = connection.recv(1 << 13)
        except ConnectionResetError:
            return
        if not received:
            return
        unpacker.feed(received)
        yield from unpacker


def new_unpacker() -> Any:
    """Of a stream of messages."""
    return msgpack.Unpacker(strict_map_key=False, max_buffer_size=_MAX_MESSAGE_BYTES)


def _send(connection: socket.socket, message: Sequence[Any]) -> None:
    connection.sendall(msgpack.packb(message, default=_plain))


def _plain(value: Any) -> Any:
    """msgpack refuses numpy's numbers and arrays, and sets; anything else becomes its text."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)


def frame_hash(clip: np.ndarray, instruction: str, *, is_start: bool) -> str:
    """Digest of clip and instruction: a strong one of a start, by which groups are compared, else a quick one."""
    if is_start:
        digest = hashlib.blake2b(clip.data, digest_size=16)
        digest.update(instruction.encode())
        return digest.hexdigest()
    return f"{zlib.crc32(instruction.encode(), zlib.crc32(clip.data)):08x}"


def die_with(alive_fd: int) -> None:
    """Let the kernel end this process and its group once a pipe's other end, which only the client holds, is closed.

    A signal whose default is to terminate does it, so it works in a simulator that hangs in C with the lock held, and
    reaches what the simulator has started.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(alive_fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(alive_fd, fcntl.F_SETFL, fcntl.fcntl(alive_fd, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([alive_fd], [], [], 0)[0]:  # the client was gone before
        os._exit(0)


def listen(address: tuple[str, int], target: str) -> None:
    """Start a process for each client that connects, and end it with its client. Runs until it is stopped."""
    served: dict[int, tuple[socket.socket, subprocess.Popen[bytes], int, int]] = {}
    poll = select.poll()
    with socket.create_server(address, backlog=64) as server:
        sys.stderr.write(f"environment server for {target} on {address[0]}:{server.getsockname()[1]}\n")
        poll.register(server, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == server.fileno():
                    connection, _ = server.accept()
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    alive_theirs, alive_ours = os.pipe()  # one each: a pipe signals one group only
                    fds = (connection.fileno(), -1, alive_theirs)
                    child = subprocess.Popen(
                        [sys.executable, __file__, *map(str, fds), "--env", target],
                        pass_fds=(connection.fileno(), alive_theirs),
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                    )
                    os.close(alive_theirs)
                    pidfd = os.pidfd_open(child.pid)
                    poll.register(connection, select.POLLRDHUP)  # commands are the child's to read
                    poll.register(pidfd, select.POLLIN)  # readable once the child has ended
                    served[connection.fileno()] = served[pidfd] = connection, child, pidfd, alive_ours
                elif fd in served:  # either end of it is gone
                    connection, child, pidfd, alive_ours = served[fd]
                    for known in (connection.fileno(), pidfd):
                        poll.unregister(known)
                        del served[known]
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
                    connection.close()
                    os.close(pidfd)
                    os.close(alive_ours)


def _address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, :PORT or PORT; this machine alone where no host is named."""
    host, _, port = text.rpartition(":")
    if not (port.isdecimal() and int(port) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text!r} names no port: give HOST:PORT, as in 127.0.0.1:5005")
    return host.strip("[]") or "127.0.0.1", int(port)


def main(argv: Sequence[str]) -> None:
    sys.path.pop(0)  # this file's folder, whose modules bear simulators' names
    parser = argparse.ArgumentParser(description="Serve one simulator to Rollplex.")
    parser.add_argument("fds", nargs="*", type=int, help="SOCKET MEMORY ALIVE, inherited from a pool; -1: none")
    parser.add_argument(
        "--listen", metavar="HOST:PORT", type=_address, help="wait for clients on TCP (whoever can connect may step)"
    )
    parser.add_argument("--env", metavar="MODULE:CLASS", default="", help="the environment that --listen offers")
    args = parser.parse_args(argv)
    if args.listen:
        if not args.env:
            parser.error("--listen needs --env: a client on TCP may not choose what is imported")
        listen(args.listen, args.env)
        return
    os.dup2(2, 1)  # what simulators print is no output of the program that uses them
    socket_fd, memory_fd, alive_fd = args.fds
    if alive_fd >= 0:
        die_with(alive_fd)
    with socket.socket(fileno=socket_fd) as connection:
        serve(connection, memory_fd if memory_fd >= 0 else None, args.env)


if __name__ == "__main__":
    main(sys.argv[1:])
