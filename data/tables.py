"""Records of JSON, JSON Lines, CSV and Parquet files, each with its place. Knows nothing about what a record means."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from configs.errors import UserError

Record = tuple[str, Any]
"""Place in the file (`line 3`, `entry v_001`) and what stands there; a `ValueError` where that cannot be read."""


class SetError(UserError, ValueError):
    """A file of a data set cannot be read."""


def read_records(path: Path) -> Iterator[Record]:
    """Every record of a file; how it is read follows from its suffix.

    A damaged line of JSON Lines is yielded as a `ValueError`, so that the others can still be checked.

    Raises:
        SetError: the file is missing, is no text or table of its kind, or has an unknown suffix.
    """
    readers = {".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".parquet": _parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise SetError(f"{path}: unknown kind of file {path.suffix!r}. Give one of {', '.join(readers)}.")
    if not path.is_file():
        raise SetError(f"{path}: no such file. Correct its path in data.train or data.eval.")
    try:
        yield from reader(path)
    except UnicodeDecodeError as error:
        raise SetError(
            f"{path}: is not UTF-8 text ({error}). Convert it, or give it the suffix of its kind."
        ) from error


def _json_lines(path: Path) -> Iterator[Record]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield f"line {number}", json.loads(line)
                except (ValueError, RecursionError) as error:
                    yield f"line {number}", ValueError(f"is not JSON ({error}). Correct or delete the line.")


def _json(path: Path) -> Iterator[Record]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise SetError(f"{path}: is not JSON ({error}). Is it JSON Lines? Then call it .jsonl.") from error
    if isinstance(content, list):
        yield from ((f"entry {number}", record) for number, record in enumerate(content))
    elif isinstance(content, dict):
        yield from ((f"entry {key}", record) for key, record in content.items())
    else:
        raise SetError(f"{path}: holds {type(content).__name__}. Expected a list or a dictionary of records.")


def _csv(path: Path) -> Iterator[Record]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, strict=True)  # else an open quote would swallow the rows after it
        line = 1
        try:
            for record in rows:
                line = rows.line_num
                wrong = ValueError("has more fields than the first line. Put quotes around those with commas.")
                yield f"line {line}", wrong if None in record else record
        except csv.Error as error:
            raise SetError(
                f"{path}: is not CSV after line {line} ({error}). Close its quotes, and double those inside."
            ) from error


def _parquet(path: Path) -> Iterator[Record]:
    from arro3.io import read_parquet

    try:
        batches = read_parquet(str(path))
        number = 0
        for batch in batches:
            for record in batch.to_struct_array().to_pylist():
                yield f"row {number}", record
                number += 1
    except BaseException as error:  # a damaged file makes the library's Rust panic, which is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise
        raise SetError(f"{path}: cannot be read as Parquet ({error}). Fetch it again.") from error


def text_of(record: Mapping[str, Any], name: str) -> str:
    """A field as text; empty where it is missing, null or no finite number (pandas writes NaN for nothing)."""
    value = record.get(name)
    lost = value is None or (isinstance(value, float) and not math.isfinite(value))
    return "" if lost else str(value).strip()
