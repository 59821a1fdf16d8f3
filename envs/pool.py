"""Many environments in a few processes, stepped while the policy does something else, whatever befalls the processes.

    with EnvPool(config, with_expert=True) as pool:
        pool.reset(0, Episode("a", seed=1))
        result, = pool.wait([0])
        pool.step(0, result.expert)             # returns at once
        for result in pool.poll(timeout_s=1.0): ...

Results depend on episodes and actions alone, never on slots, timing or faults: where a process dies, hangs or raises,
another takes its place and replays what its slots had done, frame hashes compared. An episode with which that happens
too often is lost, and its result says so. Knows nothing about policies.
"""

from __future__ import annotations

import logging
import math
import select
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import UInt8

from configs.errors import UserError
from configs.schema import EnvConfig
from envs.client import EnvProcess, ServerGone, Task
from envs.registration import Episode, num_processes

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 2.0


class EnvError(UserError):
    """An environment cannot be built or breaks its contract. The pool has to be closed."""


@dataclass(frozen=True, eq=False)
class EnvResult:
    """A finished reset or decision of one slot."""

    slot: int
    clip: UInt8[np.ndarray, "time height width 3"]
    """A copy: it stays as it is when the slot goes on."""
    instruction: str
    reward: float
    """Sum over the chunk; 0 after a reset, NaN where the episode is lost."""
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
    lost: str = ""
    """Why the episode is lost: it is over, and nothing is known of how it would have gone on."""


@dataclass
class _Play:
    """What a slot has been told since its last reset, so that it can be told again."""

    episode: Episode
    decisions: list[tuple[str, ...]] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    """Of the results handed out: the reset's, then each decision's."""
    num_done: int = 0
    """Commands that the present process has answered (count)."""
    faults: int = 0
    over: bool = False
    lost: str = ""
    """Why no process can get to where the episode was."""

    @property
    def is_busy(self) -> bool:
        """A result is owed."""
        return not self.over and len(self.hashes) <= len(self.decisions)


def _shut_down(workers: list[EnvProcess]) -> None:
    """Ask processes to end, then make them. One that owes an answer may hang; an idle one ends by itself."""
    for worker in workers:
        worker.hang_up()
    deadline = time.monotonic() + _CLOSE_TIMEOUT_S
    for worker in workers:
        worker.end(0.0 if worker.tasks else deadline - time.monotonic())
    workers.clear()


class EnvPool:
    """`config.num_envs` environments as slots, in `config.workers` processes.

    A slot has one command at a time. Slots of one process take turns; time limits count from when a command's turn
    comes. `max_actions` is the length of the expert's chunks (count).

    Raises:
        ValueError: a slot that does not exist or is busy; `wait` for an idle one.
        EnvError: from construction, `poll` and `wait`, naming the environment, the episode and its seed.
    """

    def __init__(self, config: EnvConfig, *, with_expert: bool = False, max_actions: int = 3) -> None:
        self.config = config
        self.num_envs = config.num_envs
        self.num_restarts = 0
        """Processes started in the place of others (count)."""
        self.num_lost = 0
        """Episodes lost (count)."""
        self._expert_actions = max_actions if with_expert else 0
        self._failed_starts = 0
        """Starts in a row after which no command was answered (count)."""
        self._is_running = False
        self._plays: dict[int, _Play] = {}
        self._finished: dict[int, EnvResult] = {}
        self._workers: list[EnvProcess] = []
        self._finalizer = weakref.finalize(self, _shut_down, self._workers)  # also at exit
        count = num_processes(config)
        try:
            for index in range(count):
                self._workers.append(EnvProcess(config, range(index, config.num_envs, count)))
            while not all(worker.header for worker in self._workers):
                self._receive(None)
            self._is_running = True
            if with_expert and not self._workers[0].header["expert"]:
                raise EnvError(
                    f"env {config.id!r} has no expert: set imitation.steps=0, and evaluate the model or --policy random"
                )
        except BaseException:
            self.close()
            raise
        header = self._workers[0].header
        self.action_names: tuple[str, ...] = tuple(header["actions"])
        """Names of the primitive actions."""
        self._clip_shape = tuple(header["shape"])
        self.heldout: list[tuple[str, str]] = [(scene, id_) for scene, id_ in header["episodes"]]
        """Scene and id of every held-out episode, where the environment has a list."""

    def __enter__(self) -> EnvPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes and free their memory; closing twice is fine."""
        self._finalizer()

    # --- what is asked -----------------------------------------------------------------------------------------------

    def reset(self, slot: int, episode: Episode) -> None:
        """Begin `episode` in a slot, whatever it did before. Returns at once."""
        self._check_free(slot)
        self._plays[slot] = _Play(episode)
        self._finished.pop(slot, None)
        self._pump(slot)

    def step(self, slot: int, actions: Sequence[str]) -> None:
        """Carry out a chunk of primitive actions; an empty one lets the world go on for one step. Returns at once."""
        self._check_free(slot)
        if slot not in self._plays:
            raise ValueError(f"slot {slot} has no episode: reset it before the first step")
        if self._plays[slot].over:
            raise ValueError(f"slot {slot}: its episode is over: reset it before the next step")
        self._plays[slot].decisions.append(tuple(actions))
        if self._plays[slot].lost:
            self._hand_over_lost(slot)
        else:
            self._pump(slot)

    def poll(self, timeout_s: float) -> list[EnvResult]:
        """Results not handed out yet, in the order of their slots; waits up to `timeout_s` for the first (s).

        Empty where nothing has finished in time, or nothing was asked.
        """
        deadline = time.monotonic() + timeout_s
        while self._is_any_busy():
            left = 0.0 if self._finished else max(0.0, deadline - time.monotonic())
            self._receive(left)
            if self._finished or left <= 0:
                break
        return [self._finished.pop(slot) for slot in sorted(self._finished)]

    def wait(self, slots: Sequence[int]) -> list[EnvResult]:
        """Results of these slots, in the order asked, once all have finished."""
        for slot in slots:
            if not self._is_busy(slot) and slot not in self._finished:
                raise ValueError(f"slot {slot} has no result and no command to wait for: reset or step it first")
        while any(slot not in self._finished for slot in slots):
            self._receive(None)
        return [self._finished.pop(slot) for slot in slots]

    def _is_busy(self, slot: int) -> bool:
        return slot in self._plays and self._plays[slot].is_busy

    def _is_any_busy(self) -> bool:
        return any(play.is_busy for play in self._plays.values())

    def _check_free(self, slot: int) -> None:
        if not self._workers:
            raise ValueError("the pool is closed: build a new one")
        if not 0 <= slot < self.num_envs:
            raise ValueError(f"slot {slot} does not exist: env.num_envs is {self.num_envs}")
        if self._is_busy(slot):
            raise ValueError(f"slot {slot} still works on its last command: poll or wait for its result first")

    # --- what the processes are told ---------------------------------------------------------------------------------

    def _pump(self, slot: int) -> None:
        """Send a slot's next command, replayed or new, where its process is ready and owes it no answer."""
        worker, play = self._worker(slot), self._plays[slot]
        place = play.num_done
        is_waiting = not worker.header or any(task.slot == slot for task in worker.tasks)
        if is_waiting or play.over or play.lost or place > len(play.decisions):
            return
        is_new = place == len(play.hashes)
        expert = self._expert_actions if is_new and place < self.config.max_turns else 0
        if place == 0:
            task = Task(slot, "reset", self.config.reset_timeout_s, play)
            worker.send(task, ["reset", slot, play.episode.seed, play.episode.split, expert])
        else:
            actions = play.decisions[place - 1]
            task = Task(slot, f"actions {list(actions)}", self.config.step_timeout_s, play)
            worker.send(task, ["step", slot, actions, expert])

    def _worker(self, slot: int) -> EnvProcess:
        return self._workers[slot % len(self._workers)]

    # --- what they answer --------------------------------------------------------------------------------------------

    def _receive(self, timeout_s: float | None) -> None:
        """Take in what has come; wait until something does, a time limit passes, or a command is overdue."""
        left = max(0.0, min(worker.due_at() for worker in self._workers) - time.monotonic())
        limit = left if timeout_s is None else min(left, timeout_s)
        poller = select.poll()
        for worker in self._workers:
            poller.register(worker.socket, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(None if math.isinf(limit) else math.ceil(1000 * limit))}
        now = time.monotonic()
        for index, worker in enumerate(list(self._workers)):
            if worker.socket.fileno() in ready:
                self._take(index, worker)
            elif now >= worker.due_at():
                limit_s = worker.tasks[0].limit_s
                self._fault(index, f"hung: no answer in {limit_s} s (env.start_, reset_ and step_timeout_s are limits)")

    def _take(self, index: int, worker: EnvProcess) -> None:
        """Handle the messages that a process has sent."""
        try:
            messages = worker.receive()
        except ServerGone as gone:
            self._fault(index, f"{gone}: see its output above, and its memory")
            return
        for kind, *body in messages:
            if kind == "error":
                _, cause, text = body
                if cause != "raised":
                    raise EnvError(f"{self._describe(worker)} {text}")
                self._fault(index, f"raised:\n{text}")
                return
            task = worker.tasks.popleft()
            if kind == "ready":
                worker.accept(body[0])
                for slot in worker.slots:
                    if slot in self._plays:
                        self._pump(slot)
            else:
                slot, outcome = body
                self._failed_starts = 0
                if task.owner is self._plays[slot]:  # else the slot was reset while its episode was replayed
                    self._done(worker, slot, outcome)
                self._pump(slot)

    def _done(self, worker: EnvProcess, slot: int, outcome: dict[str, Any]) -> None:
        """A command was carried out: hand its result over, or compare it with what it was before the fault."""
        play = self._plays[slot]
        place, play.num_done = play.num_done, play.num_done + 1
        if place == len(play.hashes):
            play.hashes.append(outcome["frame_hash"])
            self._finished[slot] = result = self._result(worker, slot, outcome)
            play.over = result.terminated or result.truncated
        elif outcome["frame_hash"] != play.hashes[place]:
            what = f"decision {place}" if place else "the reset"
            self._lose(slot, f"replayed, {what} showed other frames: the world depends on more than its seed")

    def _result(self, worker: EnvProcess, slot: int, outcome: dict[str, Any]) -> EnvResult:
        is_last_turn = len(self._plays[slot].decisions) >= self.config.max_turns
        return EnvResult(
            slot=slot,
            clip=worker.clip(outcome),
            instruction=outcome["instruction"],
            reward=outcome["reward"],
            terminated=outcome["terminated"],
            truncated=outcome["truncated"] or (is_last_turn and not outcome["terminated"]),
            info=outcome["info"],
            expert=tuple(outcome["expert"]),
            env_steps=outcome["env_steps"],
            frame_hash=outcome["frame_hash"],
        )

    # --- faults ------------------------------------------------------------------------------------------------------

    def _fault(self, index: int, reason: str) -> None:
        """A process died, hangs or raised: put another in its place, and give up an episode that did it too often.

        The fault is that of the command whose turn it was; the other slots of the process are only replayed.
        """
        worker = self._workers[index]
        where = self._describe(worker)
        task = worker.tasks[0] if worker.tasks else None
        if task is None or task.slot is None:
            self._failed_starts += 1
            if not self._is_running or self._failed_starts > self.config.max_restarts:
                raise EnvError(f"{where} {reason}")
        logger.warning("%s %s", where, reason)
        worker.end()
        self._workers[index] = EnvProcess(self.config, worker.slots)
        self.num_restarts += 1
        for slot in worker.slots:
            if slot in self._plays:
                self._plays[slot].num_done = 0
        if task is not None and task.slot is not None and task.owner is self._plays[task.slot]:
            play = self._plays[task.slot]
            play.faults += 1
            if play.faults > self.config.max_restarts:
                self._lose(task.slot, f"{where} {reason}")

    def _lose(self, slot: int, reason: str) -> None:
        """Give up a slot's episode; whoever waits for its next result learns it then."""
        play = self._plays[slot]
        play.lost = reason
        self.num_lost += 1
        logger.warning("lost episode %r (seed %d, %s)", play.episode.id, play.episode.seed, play.episode.split)
        if play.is_busy:
            self._hand_over_lost(slot)

    def _hand_over_lost(self, slot: int) -> None:
        play = self._plays[slot]
        play.over = True
        self._finished[slot] = EnvResult(
            slot=slot,
            clip=np.zeros(self._clip_shape, np.uint8),
            instruction="",
            reward=math.nan,
            terminated=False,
            truncated=False,
            info={},
            expert=(),
            env_steps=0,
            frame_hash="",
            lost=play.lost,
        )

    def _describe(self, worker: EnvProcess) -> str:
        """Which environment, process, slot, episode, seed and command."""
        where = f"env {self.config.id!r}, {worker.place}"
        if not worker.tasks:
            return f"{where} (slots {list(worker.slots)}, idle)"
        task = worker.tasks[0]
        if task.slot is None:
            return f"{where}, could not be built:"
        episode = task.owner.episode
        named = f"episode {episode.id!r} (seed {episode.seed}, {episode.split})"
        return f"{where}, slot {task.slot}, {named}, {task.what}:"
