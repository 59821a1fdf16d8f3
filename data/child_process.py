"""A helper process that answers requests over a pipe: decoders and users' functions crash and hang there, not here.

A fresh interpreter, so it imports only what its handler needs and shares no thread or lock with the program. Knows
nothing about what is asked.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

Handler = Callable[[Any], Any]


class ChildDied(Exception):
    """The process ended without an answer; the message says how."""


class Child:
    """One helper process.

    Args:
        factory: `module:function` that is given `setup` and returns the handler of requests.
        setup: picklable.
        search_path: folders the process imports from; this one's by default.
    """

    def __init__(self, factory: str, setup: Any, search_path: Iterable[str] | None = None) -> None:
        ours, theirs = socket.socketpair()
        alive_theirs, self._alive = os.pipe()
        self.pipe = Connection(ours.detach())
        paths = os.pathsep.join(path or os.getcwd() for path in (sys.path if search_path is None else search_path))
        fds = (theirs.fileno(), alive_theirs)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", "from data.child_process import main; main()", *map(str, fds)],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        theirs.close()
        os.close(alive_theirs)
        self._send((factory, setup))

    def ask(self, request: Any) -> None:
        """Send a request; answers come in order.

        Raises:
            ChildDied: there is nobody to ask.
        """
        self._send(request)

    def answer(self, timeout_s: float | None) -> tuple[bool, Any]:
        """The next answer: (True, the handler's result) or (False, its traceback as text).

        Raises:
            TimeoutError: nothing came in time.
            ChildDied: nothing can come any more.
        """
        try:
            if not self.pipe.poll(timeout_s):
                raise TimeoutError
            worked, result = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            raise ChildDied(self._ending()) from None
        return bool(worked), result

    def kill(self) -> None:
        """End the process at once, whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.pipe.close()
        if self._alive >= 0:
            os.close(self._alive)
            self._alive = -1

    def _send(self, message: Any) -> None:
        try:
            self.pipe.send(message)
        except (BrokenPipeError, ConnectionResetError):
            raise ChildDied(self._ending()) from None

    def _ending(self) -> str:
        code = self.process.wait()
        name = signal.Signals(-code).name if code < 0 else str(code)
        return f"its process ended with {'signal ' if code < 0 else 'exit code '}{name}"


def serve(pipe: Connection) -> None:
    """Build the handler and answer requests until the pipe closes; runs in the helper process.

    A handler that cannot be built answers every request with the reason.
    """
    factory, setup = pipe.recv()
    handler: Handler
    try:
        module, _, name = factory.partition(":")
        handler = getattr(importlib.import_module(module), name)(setup)
    except Exception:
        reason = traceback.format_exc()
        while True:
            pipe.recv()
            pipe.send((False, reason))
    while True:
        request = pipe.recv()
        try:
            answer = (True, handler(request))
        except Exception:
            answer = (False, traceback.format_exc())
        pipe.send(answer)


def main() -> None:
    pipe_fd, alive_fd = (int(argument) for argument in sys.argv[1:3])
    for signum in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; the program decides what ends when
        signal.signal(signum, signal.SIG_IGN)

    def end_with_parent() -> None:
        os.read(alive_fd, 1)
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
        serve(Connection(pipe_fd))
