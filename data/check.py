"""What is wrong with the sets of a config, found before a model is loaded or a video decoded.

Every finding names its row and the reason; the config decides which of them stop a run. Knows nothing about models: the
length of a text comes from a function that the caller gives.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from configs.errors import UserError
from configs.schema import DataConfig, RunConfig
from data.answers import parse_number, parse_spans, plain_words
from data.budget import ClipSpec, least_tokens
from data.readers import LoadedSet, load_set
from data.video_qa import VideoQARow

Split = Literal["train", "eval"]
FindingKind = Literal["bad_row", "missing", "leakage", "too_long", "duplicate", "conflict"]
CountTokens = Callable[[Sequence[str]], Sequence[int]]
"""Tokens of each text (count)."""

TEMPLATE_TOKENS = 24
"""Room for what a chat template adds around a question (tokens)."""
_EDGE_BYTES = 1 << 16
_SHOWN = 20


class DataError(UserError, ValueError):
    """The sets hold what the config does not allow."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with one row."""

    kind: FindingKind
    split: Split
    id: str
    source: str
    reason: str

    def __str__(self) -> str:
        return f"{self.split} {self.kind}: {self.source}: row {self.id!r}: {self.reason}"


@dataclass(frozen=True)
class Report:
    """What a check found."""

    rows: dict[Split, list[VideoQARow]]
    findings: list[Finding]
    counts: dict[str, int] = field(default_factory=dict)
    """`train/rows`, `train/videos`, `train/kind/choice`, ... (count)."""
    text_tokens: dict[str, float] = field(default_factory=dict)
    """`min`, `median`, `p95`, `max` of question and options (tokens); empty without a tokenizer."""

    def stopping(self, config: DataConfig) -> list[Finding]:
        """The findings that stop a run of this config."""
        allowed: set[FindingKind] = {"duplicate", "conflict"}
        allowed |= {"bad_row", "too_long"} if config.on_bad_row == "skip" else set()
        allowed |= {"missing"} if config.on_missing == "skip" else set()
        allowed |= {"leakage"} if config.on_leakage == "warn" else set()
        return [finding for finding in self.findings if finding.kind not in allowed]

    def usable(self, split: Split) -> list[VideoQARow]:
        """The rows without a finding that rules them out."""
        out = {(f.id, f.source) for f in self.findings if f.split == split and f.kind in ("missing", "too_long")}
        return [row for row in self.rows[split] if row.key not in out]

    def useless(self, config: DataConfig) -> list[str]:
        """Sections that name files, none of whose rows can be used."""
        files: dict[Split, Mapping[str, str]] = {"train": config.train, "eval": config.eval}
        return [f"data.{split}" for split, named in files.items() if named and not self.usable(split)]

    def to_dict(self, config: DataConfig) -> dict[str, Any]:
        """Everything but the rows, as plain JSON values."""
        return {
            "counts": self.counts,
            "text_tokens": self.text_tokens,
            "findings": [asdict(finding) for finding in self.findings],
            "num_findings": dict(Counter(finding.kind for finding in self.findings)),
            "ok": not self.stopping(config) and not self.useless(config),
        }

    def text(self) -> str:
        """Counts first, then every finding on a line of its own."""
        lines = [f"{name:<28}{count:>10}" for name, count in self.counts.items()]
        lines += [f"{f'text tokens, {name}':<28}{value:>10g}" for name, value in self.text_tokens.items()]
        kinds = Counter(finding.kind for finding in self.findings)
        lines += [f"{f'found: {kind}':<28}{count:>10}" for kind, count in sorted(kinds.items())]
        return "\n".join([*lines, *map(str, self.findings)])


def check_sets(config: RunConfig, count_tokens: CountTokens | None = None) -> Report:
    """Read the sets of a config and look for everything that can be seen without decoding.

    Raises:
        SetError: a file cannot be read at all.
        DataError: the config names no file.
    """
    data = config.data
    if not data.train and not data.eval:
        raise DataError("data.train and data.eval name no file. Write them as `path: format`, format one of own, ...")
    loaded: dict[Split, LoadedSet] = {
        "train": load_set(data.train, data.media_root),
        "eval": load_set(data.eval, data.media_root),
    }
    report = Report({split: content.rows for split, content in loaded.items()}, [])
    absent = {video: _absence(video) for rows in report.rows.values() for row in rows for video in row.videos}
    for split, content in loaded.items():
        bad = (Finding("bad_row", split, row.id, row.source, row.reason) for row in content.bad_rows)
        report.findings.extend(bad)
        report.findings.extend(_missing(split, content.rows, absent))
        report.findings.extend(_repeated(split, content.rows))
        report.counts.update(_counts(split, content))
    report.findings.extend(_leaks(loaded["train"].rows, loaded["eval"].rows, absent))
    if count_tokens is not None:
        _check_lengths(report, config, count_tokens)
    return report


def usable_rows(config: RunConfig, split: Split, count_tokens: CountTokens | None = None) -> list[VideoQARow]:
    """The rows a run may use, after the whole check.

    Raises:
        DataError: something was found that the config does not allow; names the first of all of them.
    """
    report = check_sets(config, count_tokens)
    require_allowed(report, config.data)
    return report.usable(split)


def require_allowed(report: Report, config: DataConfig) -> None:
    """Stop where something was found that the config does not allow.

    Raises:
        DataError: lists what was found; past 20 of a kind only their number, except for missing files: all of those.
            Or no row of a set can be used.
    """
    by_kind: dict[FindingKind, list[Finding]] = defaultdict(list)
    for finding in report.stopping(config):
        by_kind[finding.kind].append(finding)
    if not by_kind:
        if useless := report.useless(config):
            names = " and ".join(useless)
            raise DataError(
                f"no row of {names} can be used: all are left out, or there are none. Mend it or leave it out."
            )
        return
    lines: list[str] = []
    for kind, findings in by_kind.items():
        shown = findings if kind == "missing" else findings[:_SHOWN]
        lines += [f"{len(findings)} {kind}:", *(f"  {finding}" for finding in shown)]
        lines += [f"  and {len(findings) - len(shown)} more: run.py data check"] if len(shown) < len(findings) else []
    knobs = "data.on_missing=skip, data.on_bad_row=skip, data.on_leakage=warn"
    raise DataError("\n".join([*lines, f"Mend the sets, or leave such rows out: {knobs}."]))


def clip_spec(config: RunConfig, *, factor: int, temporal_patch: int, max_tokens: int = 0) -> ClipSpec:
    """What a config lets a model with such patches see of one video; `max_tokens` as in `ClipSpec`."""
    data, agent = config.data, config.agent
    return ClipSpec(
        fps=data.fps,
        num_frames=data.num_frames,
        max_frames=data.max_frames,
        min_pixels=agent.min_pixels,
        max_pixels=agent.max_pixels,
        max_tokens=min(filter(None, (data.max_video_tokens, max_tokens)), default=0),
        gives_way=data.over_budget,
        factor=factor,
        temporal_patch=temporal_patch,
    )


def question_texts(config: RunConfig, rows: Sequence[VideoQARow]) -> list[str]:
    """What is written in the prompt of each row, but for the chat template."""
    return ["\n".join(filter(None, (config.agent.system_prompt, row.question, row.options_text))) for row in rows]


# --- what is looked for ------------------------------------------------------------------------------------------


def _counts(split: Split, content: LoadedSet) -> dict[str, int]:
    videos = {video for row in content.rows for video in row.videos}
    kinds = Counter(row.kind for row in content.rows)
    return {
        f"{split}/rows": len(content.rows),
        f"{split}/bad_rows": len(content.bad_rows),
        f"{split}/videos": len(videos),
        **{f"{split}/kind/{kind}": count for kind, count in sorted(kinds.items())},
    }


def _missing(split: Split, rows: Sequence[VideoQARow], absent: Mapping[Path, str]) -> Iterator[Finding]:
    for row in rows:
        if video := next((video for video in row.videos if absent[video]), None):
            yield Finding("missing", split, row.id, row.source, f"{video}: {absent[video]}")


def _absence(video: Path) -> str:
    try:
        if not video.is_file():
            return "is a folder" if video.is_dir() else "is no file" if video.exists() else "no such file"
        if not os.access(video, os.R_OK):
            return "may not be read"
        return "" if video.stat().st_size else "is empty (0 bytes)"
    except OSError as error:  # a name that is too long, a folder that may not be read
        return str(error.strerror or error)


def _repeated(split: Split, rows: Sequence[VideoQARow]) -> Iterator[Finding]:
    """Rows that ask the same of the same videos, and rows with one id."""
    first: dict[tuple[object, ...], VideoQARow] = {}
    ids: dict[str, VideoQARow] = {}
    for row in rows:
        key = (row.videos, tuple(plain_words(row.question)), tuple(sorted(map(str.lower, row.options))))
        same = first.setdefault(key, row)
        if same is not row:
            agrees = _meant(same) == _meant(row)
            kind: FindingKind = "duplicate" if agrees else "conflict"
            extra = "" if agrees else f", with another answer: {_said(same)!r} there, {_said(row)!r} here"
            yield Finding(kind, split, row.id, row.source, f"asks the same as row {same.id!r} ({same.source}){extra}")
        elif ids.setdefault(row.id, row) is not row:
            yield Finding("duplicate", split, row.id, row.source, f"has the id of the row at {ids[row.id].source}")


def _said(row: VideoQARow) -> str:
    return row.options[ord(row.answer) - ord("A")].lower() if row.kind == "choice" else row.answer.lower()


def _meant(row: VideoQARow) -> object:
    """The answer as it is compared: 3 and 3.0 are one."""
    if row.kind in ("numeric", "mra"):
        return parse_number(row.answer)
    return parse_spans(row.answer) if row.kind == "span" else plain_words(_said(row)) or _said(row)


def _leaks(
    train: Sequence[VideoQARow], held_out: Sequence[VideoQARow], absent: Mapping[Path, str]
) -> Iterator[Finding]:
    """Rows to evaluate on whose video is also trained on, under the same name or another."""
    places = {video: os.path.realpath(video) for video, reason in absent.items() if not reason}
    owners = {places[video]: row for row in train for video in row.videos if video in places}
    copies = _copies(owners, {places[video] for row in held_out for video in row.videos if video in places})
    for row in held_out:
        for video in row.videos:
            place = places.get(video, "")
            if (twin := place if place in owners else copies.get(place)) is not None:
                name = f"{video}" if twin == place else f"{video} has the bytes of {twin}, which"
                reason = f"{name} is in train too, row {owners[twin].id!r}"
                yield Finding("leakage", "eval", row.id, row.source, reason)
                break


def _copies(owners: Mapping[str, VideoQARow], places: set[str]) -> dict[str, str]:
    """From an evaluation video to a training one with the same bytes, by size first, then first and last bytes."""
    by_size: dict[int, list[str]] = defaultdict(list)
    for place in owners:
        by_size[os.path.getsize(place)].append(place)
    found: dict[str, str] = {}
    prints: dict[str, bytes] = {}
    for place in places - owners.keys():
        size = os.path.getsize(place)
        for other in by_size.get(size, ()):
            for path in (place, other):
                prints[path] = prints.get(path) or _edges(path, size)
            if prints[place] == prints[other]:
                found[place] = other
    return found


def _edges(place: str, size: int) -> bytes:
    with open(place, "rb") as file:
        head = file.read(_EDGE_BYTES)
        file.seek(max(0, size - _EDGE_BYTES))
        return hashlib.blake2b(head + file.read(_EDGE_BYTES)).digest()


def _check_lengths(report: Report, config: RunConfig, count_tokens: CountTokens) -> None:
    """Texts that leave no room for the smallest clips and a response."""
    spec = clip_spec(config, factor=28, temporal_patch=2)
    lengths: list[int] = []
    room = config.runtime.max_model_len - config.rollout.max_tokens - TEMPLATE_TOKENS
    for split, rows in report.rows.items():
        for row, tokens in zip(rows, count_tokens(question_texts(config, rows)) if rows else (), strict=True):
            lengths.append(int(tokens))
            least = least_tokens(spec) * len(row.videos)
            if tokens + least > room:
                reason = (
                    f"{tokens} tokens of text and at least {least} of video are over {room}, which "
                    f"runtime.max_model_len={config.runtime.max_model_len} leaves beside the response. Raise it."
                )
                report.findings.append(Finding("too_long", split, row.id, row.source, reason))
    if lengths:
        lengths.sort()
        places = {"min": 0, "median": len(lengths) // 2, "p95": int(len(lengths) * 0.95), "max": len(lengths) - 1}
        report.text_tokens.update({name: float(lengths[place]) for name, place in places.items()})
