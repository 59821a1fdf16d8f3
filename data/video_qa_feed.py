"""Rows with their clips, decoded ahead, in an order that the seed fixes and that resumes at the next unseen row.

A row whose video cannot be shown is written to `bad_media.jsonl` and leaves the epoch; the rows after it move up, each
with its own question and its own video. Knows nothing about prompts, models or rewards.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from configs.errors import UserError
from configs.schema import RunConfig
from data.budget import ClipSpec
from data.decode import DecodedClip
from data.decode_pool import DecodePool
from data.task_sampler import stable_seed
from data.video_index import BadMedia
from data.video_qa import VideoQARow

logger = logging.getLogger(__name__)

JUDGED_AFTER = 100
"""A share of bad rows is taken of at least this many, or of the whole set where it is smaller (rows)."""


@dataclass(frozen=True, eq=False)
class Sample:
    """One row, ready to be shown."""

    index: int
    """Position in the run's order, over all ranks, from 0; skipped rows leave gaps."""
    seed: int
    """Decides whatever else is drawn for this row, in [0, 2**31)."""
    row: VideoQARow
    clips: tuple[DecodedClip, ...]
    """One for each of `row.videos`."""


@runtime_checkable
class ClipPool(Protocol):
    """What the feed needs of `data.decode_pool.DecodePool`."""

    wait_s: float
    num_cached: int
    num_decoded: int

    def submit(self, path: Path, max_tokens: int = 0) -> int: ...

    def result(self, ticket: int) -> DecodedClip: ...


class TooManyBadMedia(UserError):
    """More videos than `data.max_bad_fraction` allows cannot be shown."""


class VideoQAFeed:
    """An endless stream of samples.

    Args:
        rows: the set, the same on every rank.
        pool: decodes.
        seed: fixes the order, a new one each epoch.
        prefetch: rows decoded ahead (count).
        bad_media: file that rows with unusable videos are listed in; those listed are not tried again unless the
            file has changed.
        max_bad_fraction: see `data.max_bad_fraction`.
        token_budget: placeholder tokens that each video of a row may have; None leaves it to the pool's spec.
        rank, world_size: this stream takes every `world_size`-th row of the order, from `rank`.
    """

    def __init__(
        self,
        rows: Sequence[VideoQARow],
        pool: ClipPool,
        *,
        seed: int,
        prefetch: int,
        bad_media: Path,
        max_bad_fraction: float,
        token_budget: Callable[[VideoQARow], int] | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if not rows:
            raise UserError("no rows to train on: name files in data.train, and see `run.py data check`")
        self._rows, self._pool, self._seed, self._prefetch = rows, pool, seed, prefetch
        self._rank, self._world_size, self._token_budget = rank, world_size, token_budget
        self._quarantine = Quarantine(bad_media)
        self._known_bad = len(self._quarantine.row_ids)
        self._max_bad_fraction = max_bad_fraction
        self._ahead: deque[tuple[int, VideoQARow, list[int]]] = deque()
        self._next_position = 0
        self._next_submit = 0
        self._epoch_order: tuple[int, list[int]] = (-1, [])
        self._noted: set[str] = set()
        self._reduced = 0
        self._waited_s = 0.0

    def next(self, count: int) -> list[Sample]:
        """The next `count` samples; waits for clips that are not decoded yet.

        Raises:
            TooManyBadMedia: more rows than allowed have videos that cannot be shown.
        """
        samples: list[Sample] = []
        skipped = 0
        while len(samples) < count:
            self._submit_ahead()
            position, row, tickets = self._ahead.popleft()
            sample = self._claim(position, row, tickets)
            self._next_position = position + 1
            skipped = 0 if sample else skipped + 1
            if sample:
                samples.append(sample)
            elif skipped > len(self._rows):
                raise TooManyBadMedia(
                    f"not one of {len(self._rows)} rows has a video that can be shown: {self._listed()}"
                )
        self._submit_ahead()
        return samples

    def state(self) -> dict[str, int]:
        """The cursor, as plain JSON values; rows decoded ahead are not past it."""
        return {"seed": self._seed, "next_position": self._next_position}

    def load_state(self, state: dict[str, int]) -> None:
        """Continue from a saved cursor.

        Raises:
            ValueError: the cursor belongs to another seed.
        """
        assert not self._ahead, "load_state comes before the first next"
        if state["seed"] != self._seed:
            raise ValueError(
                f"the saved order has seed {state['seed']}, this run {self._seed}: set seed={state['seed']}"
            )
        self._next_position = self._next_submit = state["next_position"]

    def metrics(self) -> dict[str, float]:
        """`data/*` since the last call, and counts of the whole run."""
        waited = self._pool.wait_s - self._waited_s
        self._waited_s = self._pool.wait_s
        return {
            "data/wait_s": waited,
            "data/bad_rows": float(len(self._quarantine.row_ids)),
            "data/reduced_clips": float(self._reduced),
            "data/cached_clips": float(self._pool.num_cached),
            "data/decoded_clips": float(self._pool.num_decoded),
            "data/epoch": self._index(self._next_position) / len(self._rows),
        }

    def _index(self, position: int) -> int:
        return position * self._world_size + self._rank

    def _row(self, position: int) -> VideoQARow:
        epoch, place = divmod(self._index(position), len(self._rows))
        if self._epoch_order[0] != epoch:
            order = sorted(range(len(self._rows)), key=lambda row: (stable_seed(self._seed, epoch, row), row))
            self._epoch_order = (epoch, order)
        return self._rows[self._epoch_order[1][place]]

    def _submit_ahead(self) -> None:
        while len(self._ahead) < self._prefetch:
            row = self._row(self._next_submit)
            budget = self._token_budget(row) if self._token_budget else 0
            usable = not self._quarantine.knows(row)
            tickets = [self._pool.submit(video, budget) for video in row.videos] if usable else []
            self._ahead.append((self._next_submit, row, tickets))
            self._next_submit += 1

    def _claim(self, position: int, row: VideoQARow, tickets: list[int]) -> Sample | None:
        """The sample of a row; None where a video of it is bad, which is then on record."""
        if self._quarantine.knows(row):
            self._drop(tickets)
            return None
        clips = []
        for place, ticket in enumerate(tickets):
            try:
                clips.append(self._pool.result(ticket))
            except BadMedia as error:
                self._drop(tickets[place + 1 :])
                self._quarantine.add(row, row.videos[place], str(error))
                self._judge(position)
                return None
        self._note(row, clips)
        index = self._index(position)
        return Sample(index, stable_seed(self._seed, index), row, tuple(clips))

    def _drop(self, tickets: Sequence[int]) -> None:
        for ticket in tickets:
            try:
                self._pool.result(ticket)
            except BadMedia:
                continue

    def _judge(self, position: int) -> None:
        # Other ranks fare alike; what was on record at the start is theirs too.
        bad = self._known_bad + (len(self._quarantine.row_ids) - self._known_bad) * self._world_size
        tried = min(len(self._rows), self._index(position) + 1)
        of = max(tried, min(len(self._rows), JUDGED_AFTER))
        if bad > self._max_bad_fraction * of:
            raise TooManyBadMedia(
                f"{bad} of {tried} rows tried have videos that cannot be shown, over data.max_bad_fraction="
                f"{self._max_bad_fraction:g}: {self._listed()} Mend or remove them, or raise it."
            )

    def _listed(self) -> str:
        return f"{self._quarantine.path} lists them, the last one being {self._quarantine.last}."

    def _note(self, row: VideoQARow, clips: Sequence[DecodedClip]) -> None:
        """Say once what kinds of changes were made to clips."""
        for video, clip in zip(row.videos, clips, strict=True):
            self._reduced += any("reduced" in note for note in clip.plan.notes)
            for note in clip.plan.notes:
                kind = "".join(character for character in note if not character.isdigit())
                if kind not in self._noted:
                    self._noted.add(kind)
                    logger.warning("row %s, %s: %s (said once)", row.id, video, note)


def open_pool(config: RunConfig, spec: ClipSpec) -> DecodePool:
    """The decode processes of a run; the caller closes them."""
    data = config.data
    return DecodePool(
        spec,
        workers=data.workers,
        timeout_s=data.decode_timeout_s,
        cache_dir=Path(data.cache_dir or Path(config.run_dir) / "frames").expanduser(),
        cache_bytes=data.cache_bytes,
    )


def open_feed(
    config: RunConfig,
    rows: Sequence[VideoQARow],
    pool: ClipPool,
    *,
    token_budget: Callable[[VideoQARow], int] | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> VideoQAFeed:
    """The training stream of a run, its quarantine in `run_dir`."""
    return VideoQAFeed(
        rows,
        pool,
        seed=config.seed,
        prefetch=config.data.prefetch,
        bad_media=Path(config.run_dir) / "bad_media.jsonl",
        max_bad_fraction=config.data.max_bad_fraction,
        token_budget=token_budget,
        rank=rank,
        world_size=world_size,
    )


class Quarantine:
    """Rows whose videos cannot be shown, one JSON line each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.row_ids: set[str] = set()
        """Rows on record whose files are as they were."""
        self.last = "none"
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            self._read(line)

    def knows(self, row: VideoQARow) -> bool:
        """True where the row is on record."""
        return row.id in self.row_ids

    def add(self, row: VideoQARow, video: Path, reason: str) -> None:
        """Put a row on record."""
        self.row_ids.add(row.id)
        self.last = f"{video} ({reason})"
        record = {"id": row.id, "video": str(video), "reason": reason, "source": row.source, "file": _file_facts(video)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
        logger.warning("row %s leaves the epoch: %s: %s", row.id, video, reason)

    def _read(self, line: str) -> None:
        try:
            record: dict[str, Any] = json.loads(line)
        except ValueError:  # the last line of a run that was killed while it wrote
            return
        if record["file"] == _file_facts(Path(record["video"])):
            self.row_ids.add(record["id"])
            self.last = f"{record['video']} ({record['reason']})"


def _file_facts(video: Path) -> list[int] | None:
    """Size and time of change; None where there is no file."""
    try:
        facts = video.stat()
    except OSError:
        return None
    return [facts.st_size, facts.st_mtime_ns]
