"""Decoded frames on disk under the digest of what they come from, up to a size; the least used go first.

Several processes may share one folder: files appear whole, and one that vanishes is decoded again. Knows nothing about
decoding.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

_SUFFIX = ".npz"
_COUNT_EVERY = 64
"""Files added before the folder is counted anew, since other processes add to it too."""
_KEEP = 0.9
"""Share of the limit that is left after old files went, so that not every new one makes room anew."""


def write_frames(path: Path, frames: UInt8[np.ndarray, "frame height width 3"], facts: Mapping[str, Any]) -> None:
    """Write frames and plain JSON facts about them as one file."""
    with path.open("wb") as file:
        np.savez(file, frames=frames, facts=np.frombuffer(json.dumps(dict(facts)).encode(), np.uint8))


def read_frames(path: Path) -> tuple[UInt8[np.ndarray, "frame height width 3"], dict[str, Any]]:
    """What `write_frames` wrote.

    Raises:
        OSError: the file is gone.
        ValueError: it is damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            return stored["frames"], json.loads(stored["facts"].tobytes())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ValueError(f"{path}: damaged ({error})") from error


class FrameCache:
    """Files of decoded frames in `folder`, at most `limit_bytes` in all; a limit of 0 keeps nothing."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes
        folder.mkdir(parents=True, exist_ok=True)
        self._added = 0
        self._total_bytes = self._count() if limit_bytes else 0

    def take(self, key: str, target: Path) -> bool:
        """Link the file of `key` to `target`, where it stays readable whatever goes; False where there is none."""
        source = self._folder / f"{key}{_SUFFIX}"
        try:
            os.link(source, target)
            os.utime(source)
        except FileNotFoundError:
            return False
        return True

    def put(self, key: str, source: Path) -> None:
        """Keep `source` under `key` too, and let the least used go where that is over the limit."""
        size = source.stat().st_size
        if size > self._limit_bytes:
            return
        with contextlib.suppress(FileExistsError):  # another process decoded the same
            os.link(source, self._folder / f"{key}{_SUFFIX}")
            self._total_bytes += size
            self._added += 1
        if self._added % _COUNT_EVERY == 0:
            self._total_bytes = self._count()
        if self._total_bytes > self._limit_bytes:
            self._make_room()

    def drop(self, key: str) -> None:
        """Forget a damaged file."""
        (self._folder / f"{key}{_SUFFIX}").unlink(missing_ok=True)

    def _make_room(self) -> None:
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total <= self._limit_bytes * _KEEP:
                break
            path.unlink(missing_ok=True)
            total -= size
        self._total_bytes = total

    def _count(self) -> int:
        return sum(size for _, size, _ in self._files())

    def _files(self) -> list[tuple[int, int, Path]]:
        """When each file was last used, its size, and its path."""
        found = []
        for entry in os.scandir(self._folder):
            with contextlib.suppress(FileNotFoundError):
                if entry.name.endswith(_SUFFIX):
                    facts = entry.stat()
                    found.append((facts.st_mtime_ns, facts.st_size, Path(entry.path)))
        return found


def make_spool(folder: Path) -> Path:
    """A folder of this process's own inside `folder`; those that killed processes left behind are removed."""
    for old in folder.glob("spool-*"):
        pid = old.name.split("-")[1]
        if pid.isdecimal() and not _is_alive(int(pid)):
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"spool-{os.getpid()}-", dir=folder))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
