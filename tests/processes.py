"""What a subprocess of a test must not inherit."""

from __future__ import annotations

import os

DISTRIBUTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def fresh_environment() -> dict[str, str]:
    """This process's environment without the process group that a test in it may have joined."""
    return {name: value for name, value in os.environ.items() if name not in DISTRIBUTED}
