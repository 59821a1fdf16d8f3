"""One question about videos as everything after the readers sees it, and the rules that a row must keep.

A row that breaks a rule is never repaired by guessing: it becomes a `BadRow` with its place and the reason. Knows
nothing about file formats, decoding, prompts or rewards.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from data.answers import (
    LETTERS,
    parse_choice,
    parse_number,
    parse_spans,
    plain_words,
    spans_text,
    unlabelled_options,
)

Kind = Literal["choice", "exact", "numeric", "mra", "span", "text", "ocr"]
"""How an answer is compared: by letter, by words, as a number within a tolerance, by mean relative accuracy, as time
spans, by the longest common subsequence of words, by word error rate."""

PLACEHOLDER = "<video>"
ESCAPED = "\\<video>"
OWN_FIELDS = ("id", "video", "question", "answer", "options", "kind")
_HEAD = re.compile(r"(?:\s*<video>)*\s*")
_ALONE = re.compile(r"^[ \t]*((?:<video>[ \t]*)+)$\n?", re.MULTILINE)
_SPECIAL = re.compile(r"<\|\w+\|>")
_UNWRITABLE = re.compile("[\x00\ud800-\udfff]")
_BARE_NUMBER = re.compile(
    r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?", re.IGNORECASE | re.ASCII
)
_BARE_SPANS = re.compile(r'\[[\s\d.,:"\[\]]*\]', re.ASCII)
_ESCAPE_MARK = "\x00"
"""Stands for an escaped placeholder for a while; no row can hold it."""


@dataclass(frozen=True)
class VideoQARow:
    """One question with its videos and what counts as right."""

    id: str
    """Names the row in every message; sets may repeat it."""
    videos: tuple[Path, ...]
    parts: tuple[str | int, ...]
    """The question in the order it is shown: texts, and indexes into `videos` where those stand."""
    answer: str
    """Never empty, and readable as its kind: a letter where `kind` is `choice`."""
    kind: Kind
    options: tuple[str, ...] = ()
    """Texts without letters; empty unless `kind` is `choice`."""
    source: str = ""
    """The set's file and the place in it."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """What the set says besides (question type, ...): for metrics, never for training."""

    @property
    def key(self) -> tuple[str, str]:
        """Tells the row from every other, also where ids are equal."""
        return self.id, self.source

    @property
    def question(self) -> str:
        """The texts alone, without the options."""
        return "".join(part for part in self.parts if isinstance(part, str)).strip()

    @property
    def options_text(self) -> str:
        """One line an option, `A. Red`; empty without options."""
        return "\n".join(f"{LETTERS[index]}. {option}" for index, option in enumerate(self.options))


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used."""

    id: str
    source: str
    reason: str

    def __str__(self) -> str:
        return f"{self.source}: row {self.id!r}: {self.reason}"


class RowMistake(ValueError):
    """A row breaks a rule; the message is the reason and the remedy."""


def make_row(
    fields: Mapping[str, Any], *, row_id: str, source: str, media_root: Path, tags: Mapping[str, str] | None = None
) -> VideoQARow:
    """A checked row from the own fields `video`, `question`, `answer`, `options`, `kind`.

    `video` is a path, a list of them, or absent; relative paths start from `media_root`. Without `kind` a row with
    options is a choice, a row whose answer is a number is numeric, one with a list of seconds is a span, and any other
    is exact.

    Raises:
        RowMistake: a field is missing, empty, of a wrong type, or contradicts another.
    """
    videos = _videos(fields.get("video"), media_root)
    options = _options(fields.get("options"))
    answer = _answer(fields.get("answer"))
    kind = _kind(fields.get("kind"), answer, options)
    parts = place_videos(_text(fields, "question"), len(videos))
    answer = _readable(answer, kind, options)
    return VideoQARow(row_id, videos, parts, answer, kind, options, source, dict(tags or {}))


def place_videos(question: str, num_videos: int) -> tuple[str | int, ...]:
    """Split a question at its placeholders, `<video>` at its very start or alone on a line.

    Without placeholders the videos come first, in order. Without videos every `<video>` is text. `\\<video>` is
    always text.

    Raises:
        RowMistake: placeholders and videos differ in number, or a `<video>` inside a line could mean either.
    """
    text = question.replace(ESCAPED, _ESCAPE_MARK)
    if num_videos == 0:
        return (_unescaped(text),)
    head = _HEAD.match(text)
    assert head is not None
    pieces: list[str | int] = list(range(head.group().count(PLACEHOLDER)))
    count, start = len(pieces), head.end()
    for line in _ALONE.finditer(text, head.end()):
        here = line.group(1).count(PLACEHOLDER)
        pieces += [text[start : line.start()], *range(count, count + here)]
        count, start = count + here, line.end()
    pieces.append(text[start:])
    inside = sum(piece.count(PLACEHOLDER) for piece in pieces if isinstance(piece, str))
    if inside:
        raise RowMistake(
            f"{inside} {PLACEHOLDER} inside a line: put it at the start or on a line of its own if it stands for a "
            f"video, or write {ESCAPED} if it is text."
        )
    if count not in (0, num_videos):
        raise RowMistake(f"{num_videos} video(s) but {count} {PLACEHOLDER}. Give each video one, or write none.")
    texts = [_unescaped(piece) if isinstance(piece, str) else piece for piece in pieces]
    texts = [piece for piece in texts if piece != ""]
    return tuple(texts) if count else (*range(num_videos), *texts)


def _unescaped(text: str) -> str:
    return text.replace(_ESCAPE_MARK, PLACEHOLDER)


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value.replace(PLACEHOLDER, "").strip():
        raise RowMistake(f"{name} is {value!r}. Give it as text.")
    return _plain(value)


def _plain(text: str) -> str:
    """A text that can stand in a prompt as it is."""
    if special := _SPECIAL.search(text):
        raise RowMistake(f"the text holds the special token {special.group()}. Remove it or write it apart.")
    if _UNWRITABLE.search(text):
        raise RowMistake(f"the text {text[:80]!r} holds a NUL or half of a surrogate pair. Remove it.")
    return text


def _videos(value: Any, media_root: Path) -> tuple[Path, ...]:
    names = [] if value is None or value == "" else [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
        raise RowMistake(f"video is {value!r}. Give a path or a list of paths.")
    if any(_UNWRITABLE.search(name) for name in names):
        raise RowMistake(f"video is {value!r}, which no file can be called. Correct it.")
    return tuple(media_root / name for name in names)


def _options(value: Any) -> tuple[str, ...]:
    if value is None or value == [] or value == {}:
        return ()
    if isinstance(value, Mapping):
        value = [value[key] for key in sorted(value, key=lambda key: (len(str(key)), str(key)))]
    if not isinstance(value, list | tuple) or not all(_is_scalar(option) for option in value):
        raise RowMistake(f"options are {value!r}. Give a list of texts.")
    if not 2 <= len(value) <= len(LETTERS):
        raise RowMistake(f"{len(value)} option(s). A choice has 2 to {len(LETTERS)}.")
    options = unlabelled_options([_plain(str(option)) for option in value])
    if not all(options):
        raise RowMistake(f"options are {value!r}. None may be empty.")
    return options


def _is_scalar(value: Any) -> bool:
    """True for a text, a truth value or a finite number: NaN is how tables write nothing."""
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _answer(value: Any) -> str:
    if isinstance(value, list | tuple) and value:
        spans = spans_text(value)
        if not _BARE_SPANS.fullmatch(spans) or parse_spans(spans) is None:
            raise RowMistake(f"the answer is {value!r}. A list is for time spans in seconds, as [1.2, 5.8].")
        return spans
    if _is_scalar(value) and not isinstance(value, bool) and str(value).strip():
        return _plain(str(value).strip())
    raise RowMistake(f"the answer is {value!r}. Every row needs one: an empty one would reward anything or nothing.")


def _kind(value: Any, answer: str, options: Sequence[str]) -> Kind:
    kinds: tuple[Kind, ...] = get_args(Kind)
    if value is None or value == "":
        if options:
            return "choice"
        is_span = _BARE_SPANS.fullmatch(answer) and parse_spans(answer) is not None
        return "numeric" if _BARE_NUMBER.fullmatch(answer) else "span" if is_span else "exact"
    for kind in kinds:
        if value == kind:
            return kind
    raise RowMistake(f"kind is {value!r}. Use one of {', '.join(kinds)}, or leave it out.")


def _readable(answer: str, kind: Kind, options: tuple[str, ...]) -> str:
    """The answer, as a letter for a choice.

    Raises:
        RowMistake: no response could ever match it.
    """
    if kind == "choice":
        if not options:
            raise RowMistake("a choice without options. Give options, or another kind.")
        if len(set(options)) < len(options):
            raise RowMistake(f"two options are the same: {list(options)}.")
        letter = parse_choice(answer, options)
        if letter is None:
            raise RowMistake(
                f"the answer {answer!r} is none of the {len(options)} options. Give its letter or its text."
            )
        return letter
    if kind in ("numeric", "mra") and parse_number(answer) is None:
        raise RowMistake(f"the answer {answer!r} is not one number, which kind {kind} needs.")
    if kind == "span" and parse_spans(answer) is None:
        raise RowMistake(f"the answer {answer!r} is no time span. Write seconds, [1.2, 5.8], or 00:12 - 00:17.")
    if kind in ("exact", "text", "ocr") and not plain_words(answer):
        raise RowMistake(f"the answer {answer!r} has no words, and words are compared. Give some.")
    return answer
