from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from rl.doctor import Diagnosis, ParityError, require_parity
from runtime.doctor import Examined

SOUND = Examined(
    num_tokens=34,
    num_placeholders=16,
    grids=((4, 4, 4),),
    ids_equal=True,
    placeholders_equal=True,
    grids_equal=True,
    positions_equal=True,
    pixels_max_diff=0.0,
    logprob_max_diff=4e-6,
    trainer_effect=0.1,
    vllm_effect=math.inf,
)


def diagnosis(*rows: Examined, dtype: str = "float32") -> Diagnosis:
    return Diagnosis(tuple((f"q{place}", row) for place, row in enumerate(rows)), dtype)


def test_agreement_is_said_in_numbers() -> None:
    found = diagnosis(SOUND, replace(SOUND, logprob_max_diff=9e-6, vllm_effect=0.2))
    require_parity(found)
    values = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert values["logprob_max_diff"] == 9e-6
    assert (values["ids_equal"], values["positions_equal"], values["blind"], values["ok"]) == (True, True, False, True)
    assert [row["vllm_effect"] for row in values["rows"]] == [None, 0.2]
    lines = found.table().splitlines()
    assert lines[0].split()[:4] == ["row", "tokens", "video", "grids"]
    assert lines[1].split() == [
        "q0",
        "34",
        "16",
        "4x4x4",
        "equal",
        "equal",
        "equal",
        "0.0e+00",
        "4.0e-06",
        "1.0e-01",
        "inf",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids_equal": False}, "q1: vLLM holds other token ids"),
        ({"placeholders_equal": False}, "q1: vLLM's video placeholders"),
        ({"grids_equal": False}, "q1: vLLM holds other video grids"),
        ({"positions_equal": False, "logprob_max_diff": 0.6}, "q1: vLLM's M-RoPE positions"),
        ({"pixels_max_diff": 1e-3}, "q1: pixel values differ by 0.001, over 0"),
        ({"logprob_max_diff": 0.6}, "q1: log-probabilities differ by 0.6, over 0.001"),
        ({"logprob_max_diff": math.nan}, "q1: log-probabilities differ by nan"),
    ],
)
def test_the_first_difference_stops(change: dict[str, Any], message: str) -> None:
    found = diagnosis(SOUND, replace(SOUND, **change), replace(SOUND, ids_equal=False))
    with pytest.raises(ParityError, match=f"parity doctor: {message}"):
        require_parity(found)
    assert not found.to_dict()["ok"]


def test_rounding_in_bfloat16_is_no_difference() -> None:
    row = replace(SOUND, logprob_max_diff=0.05, pixels_max_diff=0.007)
    require_parity(diagnosis(row, dtype="bfloat16"))
    with pytest.raises(ParityError):
        require_parity(diagnosis(row))


def test_a_side_that_no_video_changes_is_blind() -> None:
    """One row whose answer does not hang on the video is none."""
    require_parity(diagnosis(replace(SOUND, trainer_effect=0.0), SOUND))
    blind = diagnosis(*[replace(SOUND, vllm_effect=1e-7)] * 2)
    assert blind.to_dict()["blind"]
    with pytest.raises(ParityError, match="no effect on the log-probabilities of vLLM"):
        require_parity(blind)


def test_one_row_does_not_hide_that_the_others_are_blind() -> None:
    blind, text = replace(SOUND, trainer_effect=0.0, vllm_effect=0.0), replace(SOUND, num_placeholders=0, grids=())
    for other in (SOUND, replace(text, trainer_effect=math.inf)):
        assert diagnosis(*[blind] * 7, other).blind
    assert diagnosis(blind, text, text).blind
    with pytest.raises(ParityError, match=r"in 7 of 8 prompts the video has no effect .* of the trainer and in 7"):
        require_parity(diagnosis(*[blind] * 7, SOUND))


def test_rows_that_tell_nothing_are_left_out() -> None:
    """No video, or a response that is certain whatever is shown."""
    text = replace(SOUND, num_placeholders=0, trainer_effect=math.inf)
    certain = replace(SOUND, trainer_effect=math.nan, vllm_effect=math.nan)
    found = diagnosis(text, certain, certain, replace(SOUND, trainer_effect=0.0), SOUND)
    require_parity(found)
    assert [row["trainer_effect"] for row in found.to_dict()["rows"]] == [None, None, None, 0.0, 0.1]
    json.dumps(found.to_dict(), allow_nan=False)
    require_parity(diagnosis(text))
