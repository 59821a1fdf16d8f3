from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.kernels import best_kernels, padded_length, use_kernels
from tests.runtime.support import load_tiny


def test_flex_attention_is_given_whole_blocks_and_more_than_one() -> None:
    assert [padded_length(tokens) for tokens in (1, 128, 256, 257)] == [256, 256, 256, 384]


@pytest.mark.skipif(best_kernels() == "fused", reason="this machine has a CUDA device")
def test_a_cpu_has_plain_kernels_alone(model_cache: Path) -> None:
    model = load_tiny(model_cache, torch.float32)
    assert use_kernels(model, "fused") == "plain"
    assert model.model.language_model.config._attn_implementation == "sdpa"
