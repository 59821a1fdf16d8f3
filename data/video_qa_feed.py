"""Rows with their clips, decoded ahead, in an order that the seed fixes and that resumes at the next unseen row.

A row whose video cannot be shown is written to `bad_media.jsonl` and leaves the epoch; the rows after it move up, each
with its own question and its own video. Knows nothing about prompts, models or rewards.
"""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

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


class BadVideo(BadMedia):
    """One of a row's videos cannot be shown."""

    def __init__(self, video: Path, reason: str) -> None:
        super().__init__(reason)
        self.video = video


def claim(pool: ClipPool, row: VideoQARow, tickets: Sequence[int]) -> list[DecodedClip]:
    """The clips of a row, from one ticket for each of its videos; every ticket is used up.

    Raises:
        BadVideo: the first that cannot be shown.
    """
    clips: list[DecodedClip] = []
    bad: BadVideo | None = None
    for video, ticket in zip(row.videos, tickets, strict=True):
        try:
            clips.append(pool.result(ticket))
        except BadMedia as error:
            bad = bad or BadVideo(video, str(error))
    if bad:
        raise bad
    return clips


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
        self._max_bad_fraction = max_bad_fraction
        self._tried: set[int] = set()
        self._bad: set[int] = set()  # of those tried; others may be on record, from another order or an earlier start
        self._ahead: deque[tuple[int, int, list[int]]] = deque()
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
            position, place, tickets = self._ahead.popleft()
            sample = self._claim(position, place, tickets)
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
        for position in range(min(self._next_position, -(-len(self._rows) // self._world_size))):
            self._note_tried(self._place(position))

    def metrics(self) -> dict[str, float]:
        """`data/*` since the last call, and counts of the whole run."""
        waited = self._pool.wait_s - self._waited_s
        self._waited_s = self._pool.wait_s
        return {
            "data/wait_s": waited,
            "data/bad_rows": float(len(self._quarantine.keys)),
            "data/reduced_clips": float(self._reduced),
            "data/cached_clips": float(self._pool.num_cached),
            "data/decoded_clips": float(self._pool.num_decoded),
            "data/epoch": self._index(self._next_position) / len(self._rows),
        }

    def _index(self, position: int) -> int:
        return position * self._world_size + self._rank

    def _place(self, position: int) -> int:
        """Which of the rows stands at a position of this stream."""
        epoch, place = divmod(self._index(position), len(self._rows))
        if self._epoch_order[0] != epoch:
            order = sorted(range(len(self._rows)), key=lambda row: (stable_seed(self._seed, epoch, row), row))
            self._epoch_order = (epoch, order)
        return self._epoch_order[1][place]

    def _submit_ahead(self) -> None:
        while len(self._ahead) < self._prefetch:
            place = self._place(self._next_submit)
            row = self._rows[place]
            budget = self._token_budget(row) if self._token_budget else 0
            videos = () if self._quarantine.knows(row) else row.videos
            self._ahead.append((self._next_submit, place, [self._pool.submit(video, budget) for video in videos]))
            self._next_submit += 1

    def _claim(self, position: int, place: int, tickets: list[int]) -> Sample | None:
        """The sample of a row; None where a video of it is bad, which is then on record."""
        row, clips = self._rows[place], self._clips(self._rows[place], tickets)
        self._note_tried(place)
        if clips is None:
            self._judge()
            return None
        self._note(row, clips)
        index = self._index(position)
        return Sample(index, stable_seed(self._seed, index), row, tuple(clips))

    def _clips(self, row: VideoQARow, tickets: list[int]) -> list[DecodedClip] | None:
        known = self._quarantine.knows(row)
        if known and not tickets:
            return None
        try:
            clips = claim(self._pool, row, tickets)
        except BadVideo as error:
            if not known:
                self._quarantine.add(row, error.video, str(error))
            return None
        return None if known else clips

    def _note_tried(self, place: int) -> None:
        self._tried.add(place)
        if self._quarantine.knows(self._rows[place]):
            self._bad.add(place)

    def _judge(self) -> None:
        """Stop where too many are bad of the rows that this stream tried; other ranks fare alike."""
        bad, tried = len(self._bad), len(self._tried)
        likely = self._max_bad_fraction * max(tried, min(len(self._rows), JUDGED_AFTER))
        by_chance = 3 * math.sqrt(likely)  # a set within the limit has stretches that are worse
        if bad > min(likely + by_chance, self._max_bad_fraction * len(self._rows)):
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
        self.keys: set[tuple[str, str]] = set()
        """`key` of the rows on record whose files are as they were."""
        self.last = "none"
        content = path.read_bytes() if path.is_file() else b""
        for line in content.splitlines():
            self._read(line)
        self._unfinished = not content.endswith(b"\n") and content != b""

    def knows(self, row: VideoQARow) -> bool:
        """True where the row is on record."""
        return row.key in self.keys

    def add(self, row: VideoQARow, video: Path, reason: str) -> None:
        """Put a row on record."""
        self.keys.add(row.key)
        self.last = f"{video} ({reason})"
        record = {"id": row.id, "video": str(video), "reason": reason, "source": row.source, "file": _file_facts(video)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * self._unfinished + json.dumps(record, ensure_ascii=False) + "\n")
        self._unfinished = False
        logger.warning("row %s leaves the epoch: %s: %s", row.id, video, reason)

    def _read(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            key, video, reason = (record["id"], record["source"]), Path(record["video"]), record["reason"]
            facts = record["file"]
        except (ValueError, TypeError, KeyError):  # what a killed run left of a line, perhaps cut inside a character
            return
        if facts == _file_facts(video):
            self.keys.add(key)
            self.last = f"{video} ({reason})"


def _file_facts(video: Path) -> list[int] | None:
    """Size and time of change; None where there is no file."""
    try:
        facts = video.stat()
    except OSError:
        return None
    return [facts.st_size, facts.st_mtime_ns]
