"""Rewards of a user's."""

from __future__ import annotations

import math
from typing import Any


def nan_for_q0(responses: list[str], row: dict[str, Any]) -> list[float]:
    """No number for one row."""
    return [math.nan if row["id"] == "q0" else 0.0 for _ in responses]
