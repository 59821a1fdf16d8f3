"""Many environments in a few processes, stepped while the policy does something else.

    with EnvPool(config, with_expert=True) as pool:
        pool.reset(0, Episode("a", seed=1))
        result, = pool.wait([0])
        pool.step(0, result.expert)             # returns at once
        for result in pool.poll(timeout_s=1.0): ...

Results depend on episodes and actions alone, never on slots or timing. Clips come through shared memory without a name
(nothing can be left behind); workers are fresh interpreters that import no torch and end when this process does.
Knows nothing about policies.
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Pipe, wait
from typing import Any

import numpy as np
from jaxtyping import UInt8

from configs.errors import UserError
from configs.schema import EnvConfig
from envs.pool_worker import Outcome, WorkerSetup
from envs.registration import Episode

_START_TIMEOUT_S = 120.0
_CLOSE_TIMEOUT_S = 2.0


class EnvError(UserError):
    """An environment raised, broke its contract, hung, or its process died. The pool has to be closed."""


@dataclass(frozen=True, eq=False)
class EnvResult:
    """A finished reset or decision of one slot."""

    slot: int
    clip: UInt8[np.ndarray, "time height width 3"]
    """A copy: it stays as it is when the slot goes on."""
    instruction: str
    reward: float
    """Sum over the chunk; 0 after a reset."""
    terminated: bool
    truncated: bool
    """A limit of the environment, or `max_turns`, ended the episode."""
    info: dict[str, Any]
    expert: tuple[str, ...]
    """The expert's next chunk, for pools built with `with_expert`; empty after the end."""
    env_steps: int
    """Primitive steps simulated (count)."""
    frame_hash: str
    """Digest of clip and instruction: equal for the rollouts of a group after their resets."""


@dataclass
class _Task:
    """A command that a worker has not answered yet."""

    slot: int
    what: str
    sent_at: float


class _Worker:
    """One process, from this side."""

    def __init__(self, setup: WorkerSetup) -> None:
        self.slots = setup.slots
        self.tasks: deque[_Task] = deque()
        self.idle_since = time.monotonic()
        memory_fd = os.memfd_create("envs")
        self.pipe, theirs = Pipe()
        alive_theirs, self.alive_fd = os.pipe()
        self.memory_fd = memory_fd
        fds = (theirs.fileno(), memory_fd, alive_theirs)
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", "from envs.pool_worker import main; main()", *map(str, fds)],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        theirs.close()
        os.close(alive_theirs)
        self.pipe.send(("init", setup))

    def map_clips(self, shape: tuple[int, ...]) -> None:
        """Map the clips that the worker has laid out."""
        size = int(np.prod(shape)) * len(self.slots)
        view = mmap.mmap(self.memory_fd, size, prot=mmap.PROT_READ)
        self.clips = np.frombuffer(view, np.uint8).reshape(len(self.slots), *shape)

    def ending(self) -> str:
        """How the process ended, in words."""
        try:
            code = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"


def _shut_down(workers: list[_Worker]) -> None:
    """Ask workers to end, then make them."""
    for worker in workers:
        worker.pipe.close()
    deadline = time.monotonic() + _CLOSE_TIMEOUT_S
    for worker in workers:
        try:
            # One that owes an answer may hang; an idle one ends by itself and closes its environments.
            worker.process.wait(timeout=0 if worker.tasks else max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
        os.close(worker.alive_fd)
        os.close(worker.memory_fd)
    workers.clear()


class EnvPool:
    """`config.num_envs` environments as slots, in `config.workers` processes.

    A slot has one command at a time. Slots of one worker take turns; `config.step_timeout_s` counts from when a
    command's turn comes. `max_actions` is the length of the expert's chunks (count).

    Raises:
        ValueError: a slot that does not exist or is busy; `wait` for an idle one.
        EnvError: from construction, `poll`, `wait` and `expert`, naming the environment, the episode and its seed.
    """

    def __init__(self, config: EnvConfig, *, with_expert: bool = False, max_actions: int = 3) -> None:
        self.config = config
        self.num_envs = config.num_envs
        count = min(config.workers, config.num_envs)
        self._workers: list[_Worker] = []
        self._finalizer = weakref.finalize(self, _shut_down, self._workers)  # also at exit
        self._episodes: dict[int, Episode] = {}
        self.action_names: tuple[str, ...] = ()
        """Names of the primitive actions."""
        self._finished: dict[int, EnvResult] = {}
        self._answers: dict[int, tuple[str, ...]] = {}
        self._busy: set[int] = set()
        try:
            for index in range(count):
                slots = tuple(range(index, config.num_envs, count))
                self._workers.append(_Worker(WorkerSetup(config, slots, max_actions if with_expert else 0)))
            for worker in self._workers:
                self._await_ready(worker)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> EnvPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers and free their memory; closing twice is fine."""
        self._finalizer()

    def reset(self, slot: int, episode: Episode) -> None:
        """Begin `episode` in a slot, whatever it did before. Returns at once."""
        self._check_free(slot)
        self._episodes[slot] = episode
        self._finished.pop(slot, None)
        self._send(slot, "run", episode, "reset")

    def step(self, slot: int, actions: Sequence[str]) -> None:
        """Carry out a chunk of primitive actions; an empty one lets the world go on for one step. Returns at once."""
        self._check_free(slot)
        if slot not in self._episodes:
            raise ValueError(f"slot {slot} has no episode: reset it before the first step")
        self._send(slot, "run", tuple(actions), f"actions {list(actions)}")

    def expert(self, slot: int, max_actions: int) -> tuple[str, ...]:
        """The expert's next chunk where a slot stands now. Waits for it."""
        self._check_free(slot)
        self._send(slot, "expert", max_actions, "expert_actions")
        while slot not in self._answers:
            self._receive(None)
        return self._answers.pop(slot)

    def poll(self, timeout_s: float) -> list[EnvResult]:
        """Results not handed out yet, in the order of their slots; waits up to `timeout_s` for the first (s).

        Empty where nothing has finished in time, or nothing was asked.
        """
        deadline = time.monotonic() + timeout_s
        self._receive(0.0)
        while not self._finished and self._busy:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._receive(left)
        return [self._finished.pop(slot) for slot in sorted(self._finished)]

    def wait(self, slots: Sequence[int]) -> list[EnvResult]:
        """Results of these slots, in the order asked, once all have finished."""
        for slot in slots:
            if slot not in self._busy and slot not in self._finished:
                raise ValueError(f"slot {slot} has no result and no command to wait for: reset or step it first")
        while any(slot not in self._finished for slot in slots):
            self._receive(None)
        return [self._finished.pop(slot) for slot in slots]

    def _check_free(self, slot: int) -> None:
        if not self._workers:
            raise ValueError("the pool is closed: build a new one")
        if not 0 <= slot < self.num_envs:
            raise ValueError(f"slot {slot} does not exist: env.num_envs is {self.num_envs}")
        if slot in self._busy:
            raise ValueError(f"slot {slot} still works on its last command: poll or wait for its result first")

    def _send(self, slot: int, kind: str, argument: Any, what: str) -> None:
        worker = self._workers[slot % len(self._workers)]
        worker.tasks.append(_Task(slot, what, time.monotonic()))
        self._busy.add(slot)
        try:
            worker.pipe.send((kind, slot, argument))
        except (BrokenPipeError, ConnectionResetError):
            raise EnvError(f"{self._place(worker)} {worker.ending()}") from None

    def _receive(self, timeout_s: float | None) -> None:
        """Take in what workers have sent; wait until something comes, a time limit passes, or a command is overdue."""
        overdue = min((self._due_at(worker) for worker in self._workers if worker.tasks), default=time.monotonic())
        left = max(0.0, overdue - time.monotonic())
        ready = wait([w.pipe for w in self._workers], left if timeout_s is None else min(left, timeout_s))
        for worker in self._workers:
            if worker.pipe in ready:
                self._take(worker)
            elif worker.tasks and time.monotonic() >= self._due_at(worker):
                worker.process.kill()
                raise EnvError(
                    f"{self._place(worker)} hung: no answer in {self.config.step_timeout_s} s. If it is only slow, "
                    "raise env.step_timeout_s; else look at what the environment does there"
                )

    def _due_at(self, worker: _Worker) -> float:
        begun = max(worker.tasks[0].sent_at, worker.idle_since)
        return begun + self.config.step_timeout_s

    def _take(self, worker: _Worker) -> None:
        """Read every message that a worker has sent."""
        while worker.pipe.poll():
            try:
                kind, slot, body = worker.pipe.recv()
            except (EOFError, ConnectionResetError):
                raise EnvError(
                    f"{self._place(worker)} {worker.ending()}: see its output above, and its memory"
                ) from None
            if kind == "error":
                raise EnvError(f"{self._place(worker)} failed:\n{body}")
            worker.tasks.popleft()
            self._busy.discard(slot)
            if kind == "expert":
                worker.idle_since = time.monotonic()
                self._answers[slot] = body
            else:
                worker.idle_since = body.finished_at
                self._finished[slot] = self._result(worker, slot, body)

    def _result(self, worker: _Worker, slot: int, outcome: Outcome) -> EnvResult:
        return EnvResult(
            slot=slot,
            clip=worker.clips[worker.slots.index(slot)].copy(),
            instruction=outcome.instruction,
            reward=outcome.reward,
            terminated=outcome.terminated,
            truncated=outcome.truncated,
            info=outcome.info,
            expert=outcome.expert,
            env_steps=outcome.env_steps,
            frame_hash=outcome.frame_hash,
        )

    def _await_ready(self, worker: _Worker) -> None:
        if not worker.pipe.poll(_START_TIMEOUT_S):
            raise EnvError(f"env {self.config.id!r} did not start in {_START_TIMEOUT_S:.0f} s: look at its constructor")
        try:
            message = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            raise EnvError(f"env {self.config.id!r}: its process {worker.ending()} while it started") from None
        if message[0] == "error":
            raise EnvError(f"env {self.config.id!r} could not be built:\n{message[2]}")
        _, shape, self.action_names = message
        worker.map_clips(shape)

    def _place(self, worker: _Worker) -> str:
        """Which environment, process, slot, episode, seed and command."""
        where = f"env {self.config.id!r}, worker pid {worker.process.pid}"
        if not worker.tasks:
            return f"{where} (slots {list(worker.slots)}, idle)"
        task = worker.tasks[0]
        episode = self._episodes.get(task.slot)
        named = f"episode {episode.id!r} (seed {episode.seed}, {episode.split})" if episode else "no episode"
        return f"{where}, slot {task.slot}, {named}, {task.what}:"
