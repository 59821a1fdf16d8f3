"""What an environment's answer must hold before it is sent."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from envs.server import ContractBroken, check_result

SHAPE = (2, 4, 4, 3)
OBSERVATION = {"clip": np.zeros(SHAPE, np.uint8), "instruction": "go"}
INFO = {"success": False, "path_length_m": 1.5, "geodesic_m": 1, "distance_m": 0.0, "task": "walk"}


def check(**info: Any) -> None:
    check_result("here", SHAPE, OBSERVATION, 0.0, {**INFO, **info})


@pytest.mark.parametrize(
    "info",
    [
        {"success": True},
        {"success": np.bool_(False)},
        {"success": 1},
        {"success": np.float32(0.0)},
        {"path_length_m": math.nan, "geodesic_m": math.inf, "distance_m": np.float32("nan")},
        {"path_length_m": np.int64(3)},
    ],
)
def test_bools_and_numbers_of_every_make_are_taken(info: dict[str, Any]) -> None:
    check(**info)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"success": "False"}, "an info with success 'False'; expected True or False"),
        ({"success": None}, "an info with success None; expected True or False"),
        ({"success": math.nan}, "an info with success nan; expected True or False"),
        ({"path_length_m": None}, "an info with path_length_m None; expected a number. Return math.nan"),
        ({"geodesic_m": "5.0"}, "an info with geodesic_m '5.0'; expected a number"),
        ({"distance_m": [1.0]}, r"an info with distance_m \[1.0\]; expected a number"),
        ({"task": 3}, "an info with task 3; expected a name"),
    ],
)
def test_an_info_that_would_be_misread_is_refused(info: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractBroken, match=f"env 'here' returned {message}"):
        check(**info)
