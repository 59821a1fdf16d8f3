from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.kernels import batch_windows, best_kernels, padded_length, use_kernels
from tests.runtime.support import PATCH_FEATURES, load_tiny, relative_error


@pytest.mark.usefixtures("exact_tower")
@pytest.mark.parametrize("grid", [(2, 4, 4), (1, 8, 12), (3, 10, 22)], ids=str)
def test_windows_in_batches_are_windows_one_by_one(model_cache: Path, grid: tuple[int, int, int]) -> None:
    tower = load_tiny(model_cache, torch.float64, exact=True).model.visual
    pixels = torch.randn(grid[0] * grid[1] * grid[2], PATCH_FEATURES, dtype=torch.float64)
    results = []
    for batched in (False, True):
        if batched:
            batch_windows(tower)
        features = tower(pixels, grid_thw=torch.tensor([grid])).pooler_output
        slope = torch.sin(torch.arange(features.numel(), dtype=torch.float64)).view_as(features)
        gradients = torch.autograd.grad((features * slope).sum(), list(tower.parameters()))
        results.append([features.detach(), *gradients])
    scale = max(float(tensor.norm()) for tensor in results[0][1:])
    for single, together in zip(*results, strict=True):
        # Key biases have no effect under softmax: their gradient is 0 up to rounding.
        if float(single.norm()) > 1e-12 * scale:
            assert relative_error(together, single) <= 1e-10


def test_flex_attention_is_given_whole_blocks_and_more_than_one() -> None:
    assert [padded_length(tokens) for tokens in (1, 128, 256, 257)] == [256, 256, 256, 384]


@pytest.mark.skipif(best_kernels() == "fused", reason="this machine has a CUDA device")
def test_a_cpu_has_plain_kernels_alone(model_cache: Path) -> None:
    model = load_tiny(model_cache, torch.float32)
    assert use_kernels(model, "fused") == "plain"
    assert model.model.language_model.config._attn_implementation == "sdpa"
