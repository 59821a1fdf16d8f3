from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data.types import Media
from runtime.tower import run_tower
from tests.runtime.support import PATCH_FEATURES, load_tiny, relative_error, stock_tower

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
    slope = torch.sin(torch.arange(features.numel(), dtype=torch.float64)).view_as(features)
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
