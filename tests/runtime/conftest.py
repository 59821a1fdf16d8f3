"""Fixtures that need a model: built once a session, without a download."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which `tiny:` models are built."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def exact_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vision tower's rotary embedding keeps float64."""
    import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl as stock

    from tests.runtime.support import exact_vision_rotary

    monkeypatch.setattr(stock, "apply_rotary_pos_emb_vision", exact_vision_rotary)
