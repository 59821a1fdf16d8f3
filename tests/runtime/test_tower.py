from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data.types import Media
from runtime.tower import num_patches, run_tower, tower_batches
from runtime.vlm import SplitVLM
from tests.runtime.support import PATCH_FEATURES, load_tiny, relative_error, stock_tower, vocabulary_of

GRIDS = [[(2, 4, 4)], [(1, 2, 2)], [(1, 8, 12)], [(3, 10, 22)], [(2, 4, 4), (3, 10, 22), (2, 4, 4)]]


def clips(grids: list[tuple[int, int, int]]) -> list[Media]:
    generator = torch.Generator().manual_seed(0)
    return [
        Media(
            torch.randn(t * h * w, PATCH_FEATURES, generator=generator, dtype=torch.float64),
            (t, h, w), 1.0, 0, t * h * w // 4, str(index),
        )
        for index, (t, h, w) in enumerate(grids)
    ]  # fmt: skip


def features_and_gradients(tower: Any, features: Tensor) -> list[Tensor]:
    slope = torch.sin(torch.arange(features.numel(), dtype=torch.float64)).view_as(features).to(features)
    return [features.detach(), *torch.autograd.grad((features * slope).sum(), list(tower.parameters()))]


@pytest.mark.usefixtures("exact_tower")
@pytest.mark.parametrize("grids", GRIDS, ids=str)
def test_the_tower_computes_what_hugging_face_computes(model_cache: Path, grids: list[tuple[int, int, int]]) -> None:
    model = load_tiny(model_cache, torch.float64, exact=True)
    tower, media = model.model.visual, clips(grids)
    with stock_tower(model):
        pixels = torch.cat([item.pixel_values for item in media])
        features = tower(pixels, grid_thw=torch.tensor(grids)).pooler_output
    expected = features_and_gradients(tower, features)
    actual = features_and_gradients(tower, run_tower(tower, media))
    scale = max(float(tensor.norm()) for tensor in expected[1:])
    for stock, ours in zip(expected, actual, strict=True):
        # Key biases have no effect under softmax: their gradient is 0 up to rounding.
        if float(stock.norm()) > 1e-12 * scale:
            assert relative_error(ours, stock) <= 1e-10


def test_clips_of_another_shape_are_not_mistaken_for_those_before(model_cache: Path) -> None:
    tower = load_tiny(model_cache, torch.float32).model.visual
    first = run_tower(tower, clips([(1, 4, 8)]))
    run_tower(tower, clips([(1, 8, 4)]))
    assert torch.equal(run_tower(tower, clips([(1, 4, 8)])), first)
    assert not torch.allclose(run_tower(tower, clips([(1, 8, 4)])), first)


def test_a_copy_computes_with_its_own_weights(model_cache: Path) -> None:
    tower = load_tiny(model_cache, torch.float32).model.visual
    media = clips([(1, 4, 8)])
    before = run_tower(tower, media)
    frozen = copy.deepcopy(tower)
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.mul_(1.5)
    assert torch.equal(run_tower(frozen, media), before)
    assert not torch.allclose(run_tower(tower, media), before)


def test_a_tower_without_windows_computes_what_hugging_face_computes(model_cache: Path) -> None:
    model = load_tiny(model_cache, torch.float32, name="tiny:qwen3_vl")
    tower, grids = model.model.visual, [(2, 4, 4), (1, 6, 8)]
    features = tower.patch_embed.proj.weight[0].numel()
    media = [replace(item, pixel_values=item.pixel_values[:, :1].expand(-1, features)) for item in clips(grids)]
    with torch.no_grad(), stock_tower(model):
        pixels = torch.cat([item.pixel_values for item in media]).float()
        expected = tower(pixels, grid_thw=torch.tensor(grids)).pooler_output
    assert relative_error(run_tower(tower, media).detach(), expected) <= 1e-5


def test_clips_run_together_with_a_graph_up_to_a_limit() -> None:
    def sizes(grids: list[tuple[int, int, int]]) -> list[int]:
        return [num_patches(batch) for batch in tower_batches(clips(grids))]

    half = (1, 32, 64)  # 2,048 of 4,096 patches
    assert sizes([half, half, half]) == [4096, 2048]
    assert sizes([half, (2, 64, 64), half, half]) == [2048, 8192, 4096]
    assert sizes([]) == []


@pytest.mark.parametrize("limit", [1, 40, 4096])
def test_gradients_do_not_depend_on_which_clips_run_together(
    model_cache: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    model = load_tiny(model_cache, torch.float64)
    media = clips([(2, 4, 4), (1, 4, 4), (1, 2, 2), (2, 4, 4)])
    offsets, length = [1, 12, 17, 20], 30
    tokens = torch.arange(length)
    slope = torch.randn(length, model.config.text_config.hidden_size, dtype=torch.float64)

    def gradients() -> dict[torch.nn.Parameter, Tensor]:
        totals: dict[torch.nn.Parameter, Tensor] = {}
        for parameters, parts in SplitVLM(model, vocabulary_of(model)).embed_gradients(tokens, media, offsets, slope):
            for parameter, part in zip(parameters, parts, strict=True):
                if part is not None:
                    totals[parameter] = totals.get(parameter, torch.zeros_like(part)) + part
        return totals

    expected = gradients()
    monkeypatch.setattr("runtime.tower.TOWER_BATCH_PATCHES", limit)
    actual = gradients()
    assert len(tower_batches(media)) == {1: 4, 40: 3, 4096: 1}[limit]
    assert actual.keys() == expected.keys()
    scale = max(float(tensor.norm()) for tensor in expected.values())
    for parameter, gradient in actual.items():
        assert float((gradient - expected[parameter]).norm()) <= 1e-6 * scale  # rotary embeddings are float32
    table = actual[model.model.language_model.embed_tokens.weight]
    places = [
        place for item, offset in zip(media, offsets, strict=True) for place in range(offset, offset + item.num_tokens)
    ]
    assert not table[places].any()
    assert torch.equal(table[0], slope[0])
