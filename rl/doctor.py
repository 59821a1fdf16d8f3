"""The parity doctor: do vLLM and the trainer see the same, and do they see the video at all?

Takes the first prompts of a run, lets `runtime.doctor` put them through both sides, and says where they differ first.
Runs by itself (`run.py doctor`) and before the first step of a run.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent.models import resolve_model
from configs.errors import UserError
from configs.schema import RunConfig
from rl.interfaces import Source
from rl.signals import StopSignals
from rl.sources import open_source
from runtime.doctor import Examined, examine
from runtime.rollplex import Rollplex

logger = logging.getLogger(__name__)

NUM_PROMPTS = 8
LOGPROB_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3}
"""Largest difference of log-probabilities that is only rounding; wrong positions make it 0.5 and more."""
LEAST_EFFECT = {"float32": 1e-5, "bfloat16": 1e-2}
"""A video that changes no log-probability by more is not seen."""
PIXEL_TOLERANCE = {"float32": 0.0, "bfloat16": 0.02}
"""vLLM may hold pixels in the model's dtype."""


class ParityError(UserError):
    """vLLM and the trainer differ, or one of them does not see the video."""


@dataclass(frozen=True)
class Diagnosis:
    """What was found, prompt by prompt."""

    rows: tuple[tuple[str, Examined], ...]
    dtype: str

    @property
    def blind(self) -> bool:
        """Most videos change nothing, on one side or the other."""
        return bool(self._blind_sides())

    def first_difference(self) -> str:
        """The first difference, by prompt and then from input to output; empty where there is none."""
        for name, row in self.rows:
            for differs, what in self._differences(row):
                if differs:
                    return f"{name}: {what}"
        return " and ".join(self._blind_sides())

    def _differences(self, row: Examined) -> list[tuple[bool, str]]:
        pixels, logprobs = PIXEL_TOLERANCE[self.dtype], LOGPROB_TOLERANCE[self.dtype]
        return [
            (not row.ids_equal, "vLLM holds other token ids than the trainer"),
            (not row.placeholders_equal, "vLLM's video placeholders stand elsewhere, or are more or fewer"),
            (not row.grids_equal, "vLLM holds other video grids than the trainer"),
            (not row.positions_equal, "vLLM's M-RoPE positions differ from the trainer's"),
            (not row.pixels_max_diff <= pixels, f"pixel values differ by {row.pixels_max_diff:.3g}, over {pixels:g}"),
            (
                not row.logprob_max_diff <= logprobs,
                f"log-probabilities differ by {row.logprob_max_diff:.3g}, over {logprobs:g}",
            ),
        ]

    def _blind_sides(self) -> list[str]:
        """What to say of each side on which most videos change nothing; one prompt that hangs on none is no fault."""
        shown = [row for _, row in self.rows if row.num_placeholders]
        sides = {"the trainer": [row.trainer_effect for row in shown], "vLLM": [row.vllm_effect for row in shown]}
        found = []
        for name, effects in sides.items():
            telling = [effect for effect in effects if not math.isnan(effect)]
            blind = sum(effect <= LEAST_EFFECT[self.dtype] for effect in telling)
            if 2 * blind > len(telling):
                where = f"in {blind} of {len(telling)} prompts"
                found.append(f"{where} the video has no effect on the log-probabilities of {name}")
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; an effect that is no number (another token, or a certain one) is null."""
        rows = [{"id": name} | asdict(row) for name, row in self.rows]
        for row in rows:
            row |= {key: None for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
        found = [row for _, row in self.rows]
        return {
            "logprob_max_diff": max(row.logprob_max_diff for row in found),
            "ids_equal": all(row.ids_equal for row in found),
            "placeholders_equal": all(row.placeholders_equal for row in found),
            "grids_equal": all(row.grids_equal for row in found),
            "positions_equal": all(row.positions_equal for row in found),
            "pixels_equal": all(row.pixels_max_diff <= PIXEL_TOLERANCE[self.dtype] for row in found),
            "blind": self.blind,
            "ok": not self.first_difference(),
            "first_difference": self.first_difference(),
            "rows": rows,
        }

    def table(self) -> str:
        """One line a prompt."""
        head = ("row", "tokens", "video", "grids", "ids", "places", "positions", "pixels", "logprobs", "effect")
        lines = [head, *(self._cells(name, row) for name, row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )

    def _cells(self, name: str, row: Examined) -> tuple[str, ...]:
        def same(is_equal: bool) -> str:
            return "equal" if is_equal else "DIFFER"

        return (
            name,
            str(row.num_tokens),
            str(row.num_placeholders),
            " ".join("x".join(map(str, grid)) for grid in row.grids) if row.grids_equal else "DIFFER",
            same(row.ids_equal),
            same(row.placeholders_equal),
            same(row.positions_equal),
            f"{row.pixels_max_diff:.1e}",
            f"{row.logprob_max_diff:.1e}",
            f"{row.trainer_effect:.1e} {row.vllm_effect:.1e}",
        )


def diagnose(config: RunConfig, source: Source) -> Diagnosis:
    """Examine the first prompts of a run.

    Raises:
        UserError: there is no prompt to examine.
    """
    runtime = source.runtime
    assert isinstance(runtime, Rollplex)
    prompts = source.prompts(NUM_PROMPTS)
    if not prompts:
        raise UserError("the doctor found no prompt to examine: no video can be shown, or no environment starts")
    found = examine(runtime, [prompt for _, prompt in prompts])
    return Diagnosis(tuple((name, row) for (name, _), row in zip(prompts, found, strict=True)), config.model.dtype)


def check_parity(config: RunConfig, source: Source) -> None:
    """Stop a run before its first step where vLLM and the trainer differ; every rank comes here.

    Raises:
        ParityError: on every rank, if one of them found a difference.
    """
    started = time.perf_counter()
    found = diagnose(config, source)
    problem = found.first_difference()
    failed = source.runtime.all_reduce({"failed_max": float(bool(problem))})["failed_max"]
    if failed:
        raise ParityError(_message(problem or "another rank found a difference"))
    worst, seconds = max(row.logprob_max_diff for _, row in found.rows), time.perf_counter() - started
    logger.info("doctor: vLLM and the trainer agree on %d prompts to %.1e, %.1f s", len(found.rows), worst, seconds)


def doctor_command(config: RunConfig) -> Diagnosis:
    """`run.py doctor`: examine without training."""
    with StopSignals() as stop:
        model_dir = resolve_model(config.model.path, Path(config.run_dir) / "model")
        with open_source(config, model_dir, stop.requested) as source:
            return diagnose(config, source)


def require_parity(found: Diagnosis) -> None:
    """Stop where something was found.

    Raises:
        ParityError: names the first difference.
    """
    if problem := found.first_difference():
        raise ParityError(_message(problem))


def _message(problem: str) -> str:
    return (
        f"parity doctor: {problem}. Rewards would be learned from another prompt than the one that was answered: "
        "check that vllm and transformers are the pinned versions and that the model folder is whole; "
        "runtime.doctor=false trains all the same"
    )
