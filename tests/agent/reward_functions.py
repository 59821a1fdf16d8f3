"""Users' reward functions, good and bad, as `module:function` in the tests of `agent.rewards`."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np


def length(responses: list[str], row: dict[str, Any]) -> list[float]:
    return [len(response) / 10 for response in responses]


def knows_the_row(responses: list[str], row: dict[str, Any]) -> list[bool]:
    return [row["answer"] in response and row["id"] == "q7" for response in responses]


def by_name(responses: list[str], row: dict[str, Any]) -> Any:
    """What a function may return that is right, odd or wrong: the first response says which."""
    returned: dict[str, Any] = {
        "bools": [True, False],
        "numpy": [np.float32(0.5), np.int64(1)],
        "array": np.array([0.5, 1.0]),
        "mixed": (1, 0.25),
        "none": [None, 1.0],
        "nan": [float("nan"), 1.0],
        "inf": [1.0, float("inf")],
        "short": [1.0],
        "texts": ["1.0", "0.5"],
        "text": "1.0",
        "number": 1.0,
        "nothing": None,
        "column": np.array([[0.5], [1.0]]),
        "nested": [[1.0], (2.0,)],
        "pairs": [[1.0, 2.0], [3.0, 4.0]],
        "set": {1.0, 2.0},
        "names": {"first": 1.0, "second": 2.0},
        "complex": [1 + 0j, 1.0],
    }
    return returned[responses[0]]


def badly(responses: list[str], row: dict[str, Any]) -> list[float]:
    if responses[0] == "raise":
        raise KeyError("a typo")
    if responses[0] == "hang":
        time.sleep(1000)
    if responses[0] == "crash":
        os._exit(3)
    return [1.0] * len(responses)
