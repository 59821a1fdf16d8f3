"""The doctor on real engines: both sides agree, and each kind of difference is found where it is made."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import runtime.doctor
from agent.models import resolve_model
from agent.policy import vocabulary_of
from agent.prompts import Conversation, PromptRenderer
from configs.schema import ModelConfig, RolloutConfig, RunConfig, RuntimeConfig
from data.types import Prompt
from runtime.doctor import Examined, examine
from runtime.rollplex import Rollplex
from runtime.vllm_engine import RolloutEngine

CONFIG = RunConfig(
    model=ModelConfig(path="tiny:qwen2_5_vl"),
    rollout=RolloutConfig(max_tokens=6, temperature=0.7),
    runtime=RuntimeConfig(max_model_len=128),
)


@pytest.fixture(scope="module")
def prompts(model_cache: Path) -> list[Prompt]:
    """Two clips at other rates, one clip, and none."""
    folder = resolve_model(CONFIG.model.path, model_cache)
    renderer = PromptRenderer(folder, fps=2.0, min_pixels=28 * 28, max_pixels=28 * 28 * 64)
    frames = np.random.default_rng(0).integers(0, 256, (3, 4, 56, 84, 3), dtype=np.uint8)
    text = {"type": "text", "text": "which way does it move?"}
    talks = [
        Conversation([{"role": "user", "content": [{"type": "video"}] * count + [text]}], list(frames[:count]), rates)
        for count, rates in ((2, [1.0, 4.0]), (1, [0.7]), (0, []))
    ]
    return renderer.render(talks)


@pytest.fixture(scope="module")
def engines(model_cache: Path) -> Iterator[Rollplex]:
    folder = resolve_model(CONFIG.model.path, model_cache)
    vocabulary = vocabulary_of(PromptRenderer(folder, fps=2.0, min_pixels=28 * 28, max_pixels=28 * 28 * 64))
    with Rollplex(CONFIG, folder, vocabulary) as engines:
        yield engines


def agrees(row: Examined) -> bool:
    inputs = (row.ids_equal, row.placeholders_equal, row.grids_equal, row.positions_equal, row.pixels_max_diff == 0)
    return all(inputs) and row.logprob_max_diff < 1e-4


def test_both_sides_agree_and_see_the_video(engines: Rollplex, prompts: list[Prompt]) -> None:
    rows = examine(engines, prompts)
    assert [agrees(row) for row in rows] == [True] * 3
    assert [row.grids for row in rows] == [((2, 4, 6),) * 2, ((2, 4, 6),), ()]
    assert [row.num_placeholders for row in rows] == [24, 12, 0]
    assert all(1e-3 < row.trainer_effect < 100 for row in rows[:2])
    assert all(row.vllm_effect > 1e-3 for row in rows[:2])
    assert not engines.engine.has_unfinished()


def test_other_positions_are_found(engines: Rollplex, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers 5.16-5.24 does: text after a video resumes too early."""
    first = prompts[0]
    late = first.media[0].offset + first.media[0].num_tokens
    positions = first.positions.clone()
    positions[:, late:] -= 1
    (row,) = examine(engines, [replace(first, positions=positions)])
    assert row.ids_equal
    assert not row.positions_equal
    assert row.logprob_max_diff > 1e-3


def test_what_the_engine_is_given_otherwise_is_found(
    engines: Rollplex, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Swapped videos, and one token that is another."""
    whole = RolloutEngine._engine_input

    def swapped(self: RolloutEngine, prompt: Prompt, features: Any) -> Any:
        media = tuple(
            replace(other, offset=item.offset, seconds_per_grid=item.seconds_per_grid)
            for item, other in zip(prompt.media, reversed(prompt.media), strict=True)
        )
        return whole(self, replace(prompt, media=media, token_ids=(*prompt.token_ids[:-1], 65)), features)

    monkeypatch.setattr(RolloutEngine, "_engine_input", swapped)
    (row,) = examine(engines, prompts[:1])
    assert (row.ids_equal, row.placeholders_equal, row.grids_equal, row.positions_equal) == (False, True, True, True)
    assert row.pixels_max_diff > 0
    assert row.logprob_max_diff > 1e-3


def test_a_blind_engine_is_found(engines: Rollplex, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another video under the same name: caches answer for it, which no comparison of inputs shows."""
    monkeypatch.setattr(runtime.doctor, "_with_other_videos", _under_the_same_name)
    (row,) = examine(engines, prompts[1:2])
    assert agrees(row)
    assert row.vllm_effect < 1e-5
    assert row.trainer_effect < 1e-5


def test_a_certain_response_says_nothing_about_the_video() -> None:
    certain, other, unsure = torch.tensor([-1e-4, -0.01]), torch.tensor([-2e-4, -0.01]), torch.tensor([-1e-4, -0.51])
    assert math.isnan(runtime.doctor._effect(certain, other))
    assert runtime.doctor._effect(certain, unsure) == pytest.approx(0.5)
    assert runtime.doctor._effect(unsure, unsure) == 0.0


def _under_the_same_name(prompt: Prompt) -> Prompt:
    return replace(prompt, media=tuple(replace(m, pixel_values=torch.zeros_like(m.pixel_values)) for m in prompt.media))
