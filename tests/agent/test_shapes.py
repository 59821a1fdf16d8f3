from __future__ import annotations

from pathlib import Path

import pytest

from agent.models import resolve_model
from configs.errors import ConfigError
from runtime.memory import model_shape


def test_shapes_have_the_published_number_of_parameters(tmp_path: Path) -> None:
    small = model_shape(resolve_model("random:qwen2_5_vl_3b", tmp_path), "bfloat16", train_tower=False)
    large = model_shape(resolve_model("random:qwen2_5_vl_7b", tmp_path), "bfloat16", train_tower=False)
    # Qwen2.5-VL-3B holds 3.75 billion parameters, 7B 8.29 billion (Hugging Face model cards).
    assert small.parameters == pytest.approx(3.75e9, rel=0.01)
    assert large.parameters == pytest.approx(8.29e9, rel=0.01)
    assert small.trainable < small.parameters


def test_an_unknown_shape_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="qwen2_5_vl_3b, qwen2_5_vl_7b"):
        resolve_model("random:qwen2_5_vl_1b", tmp_path)
