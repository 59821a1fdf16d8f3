"""After every test of environments: no process, no shared memory and no file of theirs is left."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


def children() -> set[int]:
    """Process ids of this process's children."""
    task = Path(f"/proc/{os.getpid()}/task")
    return {int(pid) for thread in task.iterdir() for pid in (thread / "children").read_text().split()}


def open_files() -> int:
    """File descriptors of this process (count)."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(autouse=True)
def leave_nothing_behind() -> Iterator[None]:
    before, shared, files = children(), set(os.listdir("/dev/shm")), open_files()
    yield
    assert children() <= before
    assert set(os.listdir("/dev/shm")) <= shared
    assert open_files() <= files + 2  # mappings of results still referenced by a failed test's frames


@pytest.fixture(autouse=True, scope="module")
def forget_trimesh() -> Iterator[None]:
    """Unload trimesh: it leaves stand-ins for missing packages that raise when vLLM looks through all modules."""
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "trimesh"]:
        del sys.modules[name]
