"""Loading a model folder for training: every tensor comes from its files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from agent.models import resolve_model
from configs.errors import UserError
from runtime.vlm import load_vlm

SIZES = "hidden_size=32&layers=1&vision_depth=1&vision_hidden_size=32"
Tensors = dict[str, Tensor]


@pytest.fixture(params=["qwen2_5_vl", "qwen3_vl"])
def folder(request: pytest.FixtureRequest, model_cache: Path, tmp_path: Path) -> Path:
    """A copy of a tiny model that a test may damage."""
    return Path(shutil.copytree(resolve_model(f"tiny:{request.param}?{SIZES}", model_cache), tmp_path / "model"))


def change(folder: Path, edit: Callable[[Tensors], Tensors]) -> Tensors:
    """Rewrite the folder's weights; returns what they were."""
    file = folder / "model.safetensors"
    tensors: Tensors = load_file(file)
    save_file(edit(dict(tensors)), file, metadata={"format": "pt"})
    return tensors


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_vlm(folder, torch.float32, train_tower=False)
    return str(caught.value)


def test_a_missing_tensor_is_refused_by_name(folder: Path) -> None:
    before = change(folder, lambda tensors: {name: tensors[name] for name in tensors if name != "lm_head.weight"})
    expected = f"model folder {folder}: its weights do not fit its config.json, 1 of {len(before)} tensors: lm_head"
    assert refusal(folder).startswith(f"{expected}.weight is missing. ")


def test_weights_of_something_else_are_refused_with_the_first_names(folder: Path) -> None:
    before = change(folder, lambda tensors: {"x": torch.ones(2)})
    message = refusal(folder)
    assert f"{len(before)} of {len(before)} tensors: lm_head.weight is missing, " in message
    assert message.count("is missing") == 3


def test_a_tensor_of_another_shape_is_refused_with_both(folder: Path) -> None:
    before = change(folder, lambda tensors: tensors | {"lm_head.weight": torch.ones(1, 32)})
    rows = len(before["lm_head.weight"])
    assert f"tensors: lm_head.weight is (1, 32), not ({rows}, 32). " in refusal(folder)


def test_a_tensor_that_the_model_does_not_have_is_left_aside(folder: Path) -> None:
    before = change(folder, lambda tensors: tensors | {"extra": torch.ones(1)})
    model = load_vlm(folder, torch.float32, train_tower=False)
    assert torch.equal(model.lm_head.weight, before["lm_head.weight"])


def test_a_head_that_is_tied_to_the_embeddings_need_not_be_there(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    change(folder, lambda tensors: {name: tensors[name] for name in tensors if name != "lm_head.weight"})
    model = load_vlm(folder, torch.float32, train_tower=False)
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
