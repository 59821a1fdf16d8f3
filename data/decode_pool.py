"""Decoding ahead in worker processes: tasks go out early, clips come back when asked for.

A worker that dies or takes too long is replaced, its clip is tried once more with PyAV alone, then it counts as bad.
Knows nothing about rows or their order.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType

from configs.errors import UserError
from data.budget import ClipSpec
from data.child_process import Child, ChildDied
from data.decode import DecodedClip
from data.decode_worker import DecodeAnswer, DecodeSetup, DecodeTask, load_clip
from data.frame_cache import FrameCache, make_spool
from data.video_index import BadMedia

logger = logging.getLogger(__name__)

WORKER = "data.decode_worker:make_handler"
"""What a worker process runs."""
START_TIMEOUT_S = 120.0
"""A worker that has not imported its libraries by then is given up (s)."""


@dataclass
class _Worker:
    child: Child
    started_at: float
    tasks: deque[DecodeTask] = field(default_factory=deque)
    """Asked and not answered, the running one first."""
    is_ready: bool = False
    busy_since: float = 0.0
    """When the running task began (`time.monotonic`, s)."""


class DecodePool:
    """Worker processes that decode clips by `spec`.

    Args:
        workers: processes (count).
        timeout_s: a clip that takes longer is tried anew with PyAV, and then is bad (s).
        cache_dir: folder of decoded frames; None decodes every time.
        cache_bytes: size of that folder (bytes); 0 decodes every time.
    """

    def __init__(
        self, spec: ClipSpec, *, workers: int, timeout_s: float, cache_dir: Path | None, cache_bytes: int
    ) -> None:
        self._timeout_s = timeout_s
        keeps = cache_dir is not None and cache_bytes > 0
        self._cache = FrameCache(cache_dir, cache_bytes) if keeps and cache_dir is not None else None
        self._spool = make_spool(cache_dir if keeps and cache_dir is not None else Path(tempfile.gettempdir()))
        self._setup = DecodeSetup(spec, cache_dir if keeps else None)
        self._answers: dict[int, DecodeAnswer] = {}
        self._open: dict[int, DecodeTask] = {}
        self._next_ticket = 0
        self.wait_s = 0.0
        """Time that `result` has waited in all (s)."""
        self.num_cached = 0
        """Clips that the cache had (count)."""
        self.num_decoded = 0
        """Clips that were decoded (count)."""
        self._workers = [self._start() for _ in range(workers)]

    def submit(self, path: Path, max_tokens: int = 0) -> int:
        """Ask for a clip; its ticket claims it later. Every ticket must be claimed or dropped."""
        ticket = self._next_ticket
        self._next_ticket += 1
        task = DecodeTask(ticket, path, self._spool / f"{ticket}.npz", max_tokens=max_tokens)
        self._open[ticket] = task
        self._give(task)
        return ticket

    def result(self, ticket: int) -> DecodedClip:
        """The clip of a ticket, once; waits until it is there.

        Raises:
            BadMedia: the file cannot be shown; its reason.
            UserError: decoded frames cannot be written.
        """
        started = time.monotonic()
        while ticket not in self._answers:
            self.poll(wait_s=1.0)
        self.wait_s += time.monotonic() - started
        answer, task = self._answers.pop(ticket), self._open.pop(ticket)
        if answer.outcome == "user_error":
            raise UserError(f"{task.path}: {answer.detail}")
        if answer.outcome == "bad":
            raise BadMedia(answer.detail)
        return self._load(answer, task)

    def poll(self, wait_s: float = 0.0) -> None:
        """Take in what workers have finished and replace those that are overdue or dead; wait at most `wait_s`."""
        now = time.monotonic()
        due = [self._due_at(worker) for worker in self._workers if worker.tasks or not worker.is_ready]
        ready = wait([worker.child.pipe for worker in self._workers], max(0.0, min([*due, now + wait_s]) - now))
        for place, worker in enumerate(self._workers):
            try:
                if worker.child.pipe in ready:
                    self._take(worker)
                elif time.monotonic() >= self._due_at(worker):
                    limit = self._timeout_s if worker.is_ready else START_TIMEOUT_S
                    self._replace(place, f"decoding took longer than {limit:g} s")
            except ChildDied as error:
                self._replace(place, f"decoding crashed: {error}")

    def close(self) -> None:
        """End the workers and remove what nobody claimed."""
        for worker in self._workers:
            worker.child.kill()
        self._workers = []
        shutil.rmtree(self._spool, ignore_errors=True)

    def __enter__(self) -> DecodePool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _load(self, answer: DecodeAnswer, task: DecodeTask) -> DecodedClip:
        try:
            clip = load_clip(task.target)
        except (OSError, ValueError) as error:
            if answer.outcome != "cached" or self._cache is None:
                raise UserError(f"{task.target}: decoded frames are gone ({error}). Is the disk full?") from error
            self._cache.drop(answer.detail)
            return self.result(self.submit(task.path, task.max_tokens))
        if answer.outcome == "cached":
            self.num_cached += 1
        else:
            self.num_decoded += 1
            if self._cache is not None:
                self._cache.put(answer.detail, task.target)
        task.target.unlink(missing_ok=True)
        return clip

    def _start(self) -> _Worker:
        worker = _Worker(Child(WORKER, self._setup), time.monotonic())
        worker.child.ask(None)
        return worker

    def _give(self, task: DecodeTask) -> None:
        """Queue a task at the worker with the fewest."""
        for place in sorted(range(len(self._workers)), key=lambda place: len(self._workers[place].tasks)):
            worker = self._workers[place]
            try:
                worker.child.ask(task)
            except ChildDied as error:
                self._replace(place, f"decoding crashed: {error}")
                continue
            if not worker.tasks:
                worker.busy_since = time.monotonic()
            worker.tasks.append(task)
            return
        self._give(task)

    def _due_at(self, worker: _Worker) -> float:
        if not worker.is_ready:
            return worker.started_at + START_TIMEOUT_S
        return worker.busy_since + self._timeout_s if worker.tasks else float("inf")

    def _take(self, worker: _Worker) -> None:
        worked, answer = worker.child.answer(timeout_s=None)
        if not worked:
            raise RuntimeError(f"a decode worker cannot work:\n{answer}")
        if answer is None:
            worker.is_ready = True
            worker.busy_since = time.monotonic()
            return
        worker.tasks.popleft()
        worker.busy_since = answer.finished_at
        self._answers[answer.ticket] = answer

    def _replace(self, place: int, reason: str) -> None:
        """Start a new worker; the clip that the old one was at gets a second chance, the others go on."""
        worker = self._workers[place]
        worker.child.kill()
        if not worker.is_ready:
            raise RuntimeError(f"a decode worker did not start: {reason}; see its output above, and its memory")
        tasks = list(worker.tasks)
        for task in tasks:  # some may be finished, their answers lost with the pipe
            task.target.unlink(missing_ok=True)
        self._workers[place] = self._start()
        if tasks:
            failed = tasks.pop(0)
            logger.warning("%s: %s", failed.path, reason)
            if failed.decoder == "auto":
                tasks.insert(0, replace(failed, decoder="pyav"))
            else:
                self._answers[failed.ticket] = DecodeAnswer(failed.ticket, "bad", reason, time.monotonic())
        for task in tasks:
            self._give(task)
