"""This side of a simulator's process: starts it or connects to it, sends commands, and ends it for certain.

The other side is `envs.server`. Knows nothing about episodes and never retries: what a fault means is the pool's
business.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from jaxtyping import UInt8

from configs.errors import ConfigError
from configs.schema import EnvConfig
from envs import server
from envs.registration import resolve

CONNECT_TIMEOUT_S = 10.0
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class ServerGone(Exception):
    """The other side has ended; the text says how."""


@dataclass
class Task:
    """A command that the server has not answered yet."""

    slot: int | None
    """None: its start."""
    what: str
    limit_s: float
    owner: Any = None
    """Whatever the sender wants to find again with the answer."""
    sent_at: float = field(default_factory=time.monotonic)


class EnvProcess:
    """One server process (or TCP connection) that serves some slots.

    Raises:
        ConfigError: the id is unknown, an option cannot be sent, `env.python` is no program, or nobody listens at
            `env.address`.
    """

    def __init__(self, config: EnvConfig, slots: Sequence[int]) -> None:
        self.config = config
        self.slots = tuple(slots)
        self.tasks: deque[Task] = deque()
        self.idle_since = time.monotonic()
        """When the last answer came (s)."""
        self.header: dict[str, Any] = {}
        """What the server said of itself; empty until it is ready."""
        self.process: subprocess.Popen[bytes] | None = None
        self._fds: list[int] = []
        self._memory_fd = -1
        self._unpacker = server.new_unpacker()
        target, options = resolve(config)
        ours = [path or os.getcwd() for path in sys.path]
        if config.python or config.address:  # its own packages come from its own places
            ours = [str(Path(__file__).resolve().parents[1])]
        paths = [*ours, os.getcwd()]  # run.py may lie elsewhere than the user's class
        setup = {"version": server.VERSION, "env": target, "options": options, "slots": self.slots, "paths": paths}
        try:
            msgpack.packb(setup)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"env.options {options}: {error}: use numbers of 64 bits, text, lists and maps"
            ) from error
        self.socket: socket.socket = self._connect() if config.address else self._spawn()
        self.send(Task(None, "start", config.start_timeout_s), ["init", setup])

    def _spawn(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        self._memory_fd = os.memfd_create("envs")
        alive_theirs, alive_ours = os.pipe()
        self._fds = [self._memory_fd, alive_ours]
        fds = (theirs.fileno(), self._memory_fd, alive_theirs)
        try:
            self.process = subprocess.Popen(
                [self.config.python or sys.executable, server.__file__, *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **_ONE_THREAD},
                start_new_session=True,  # so that Ctrl-C is the pool's to handle, and its children end with it
            )
        except OSError as error:
            ours.close()
            self._close_files()
            raise ConfigError(
                f"env.python {self.config.python!r} cannot be started: {error}. Name the interpreter in which the "
                "simulator is installed, with numpy and msgpack"
            ) from error
        finally:
            theirs.close()
            os.close(alive_theirs)
        return ours

    def _connect(self) -> socket.socket:
        host, _, port = self.config.address.rpartition(":")
        try:
            connection = socket.create_connection((host or "127.0.0.1", int(port)), CONNECT_TIMEOUT_S)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"env.address {self.config.address!r}: {error}. Start `python envs/server.py --listen "
                "127.0.0.1:PORT --env MODULE:CLASS` there, or leave env.address empty"
            ) from error
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        return connection

    def send(self, task: Task, message: Sequence[Any]) -> None:
        """Queue a command. That the server is gone shows when its answer is received."""
        self.tasks.append(task)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(msgpack.packb(message))

    def receive(self) -> list[list[Any]]:
        """Messages that have arrived; blocks where nothing has.

        Raises:
            ServerGone: there is no server any more.
            ConfigError: what answers at `env.address` is no environment server.
        """
        try:
            received = self.socket.recv(1 << 16)
        except ConnectionResetError:
            received = b""
        if not received:
            raise ServerGone(self._ending())
        self._unpacker.feed(received)
        try:
            messages = list(self._unpacker)
        except (ValueError, msgpack.UnpackException):
            messages = [None]
        if not all(isinstance(message, list) and message for message in messages):
            raise ConfigError(
                f"env.address {self.config.address!r}: what answers there is no environment server: start "
                "`python envs/server.py --listen ...` and give its address"
            )
        self.idle_since = time.monotonic()
        return messages

    def due_at(self) -> float:
        """When the first unanswered command is overdue (s); infinite where there is none."""
        if not self.tasks:
            return float("inf")
        return max(self.tasks[0].sent_at, self.idle_since) + self.tasks[0].limit_s

    def accept(self, header: dict[str, Any]) -> None:
        """Take the server's header, and map its ring of clips.

        Raises:
            ConfigError: the server speaks another version.
        """
        if header["version"] != server.VERSION or header["dtype"] != "uint8":
            raise ConfigError(
                f"the environment server sends version {header['version']}, {header['dtype']}, and this client reads "
                f"version {server.VERSION}, uint8: use the same Rollplex on both sides"
            )
        self.header = header
        self.shape = tuple(header["shape"])
        if self._memory_fd >= 0:
            size = int(np.prod(self.shape)) * len(self.slots)
            view = mmap.mmap(self._memory_fd, size, prot=mmap.PROT_READ)
            self._ring = np.frombuffer(view, np.uint8).reshape(len(self.slots), *self.shape)

    def clip(self, outcome: dict[str, Any]) -> UInt8[np.ndarray, "time height width 3"]:
        """A copy of an outcome's clip: the ring goes on."""
        if "clip" in outcome:
            return np.frombuffer(outcome["clip"], np.uint8).reshape(self.shape).copy()
        return self._ring[outcome["place"]].copy()

    def _ending(self) -> str:
        """How the process ended, in words."""
        if self.process is None:
            return "closed the connection"
        ended = self._wait_exit(1.0)
        if ended is None:
            return "closed its socket"
        if ended.si_code == os.CLD_EXITED:
            return f"exited with status {ended.si_status}"
        return f"was killed by {signal.Signals(ended.si_status).name}"

    def _wait_exit(self, timeout_s: float) -> Any:
        """How the process ended, or None where it did not in time. Its id stays its own until `end`."""
        assert self.process is not None
        pidfd = os.pidfd_open(self.process.pid)
        try:
            if not wait([pidfd], timeout_s):
                return None
        finally:
            os.close(pidfd)
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)

    @property
    def place(self) -> str:
        """Where it runs, in words."""
        return f"worker pid {self.process.pid}" if self.process else f"server {self.config.address}"

    def hang_up(self) -> None:
        """Let an idle server end by itself and close its environments."""
        self.socket.close()

    def end(self, grace_s: float = 0.0) -> None:
        """Wait for it to end, then kill it with all its children; afterwards nothing of it is left."""
        self.hang_up()
        if self.process is not None:  # ended or not, it is not reaped yet, so its id names no other
            self._wait_exit(max(0.0, grace_s))
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
        self._close_files()

    def _close_files(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []
