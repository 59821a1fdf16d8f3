from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import agent.models
from agent.models import resolve_model
from configs.errors import ConfigError

SMALLEST = "tiny:qwen2_5_vl?hidden_size=32&layers=1&vision_depth=1&vision_hidden_size=32"


@pytest.fixture
def folder(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may damage."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def refusal(path: str | Path, tmp_path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_model(str(path), tmp_path / "cache")
    return str(caught.value)


def test_resolve_model_takes_a_complete_folder_as_it_is(folder: Path, tmp_path: Path) -> None:
    assert resolve_model(str(folder), tmp_path / "cache") == folder
    assert not (tmp_path / "cache").exists()


def test_folder_without_weights_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert f"model folder {folder} has no weights" in refusal(folder, tmp_path)


def test_missing_weight_shards_are_named(folder: Path, tmp_path: Path) -> None:
    shards = {"lm_head.weight": "model.safetensors", "model.norm.weight": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert "lacks 1 of 2 weight files: model-2.safetensors" in refusal(folder, tmp_path)


def test_weights_that_were_cut_short_are_refused(folder: Path, tmp_path: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "model.safetensors" in refusal(folder, tmp_path)
    assert "damaged or incomplete" in refusal(folder, tmp_path)


def test_weights_that_are_a_git_lfs_pointer_are_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "damaged or incomplete" in refusal(folder, tmp_path)


def test_pickled_weights_that_were_cut_short_are_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    weights = folder / "pytorch_model.bin"
    torch.save({"lm_head.weight": torch.ones(4)}, weights)
    resolve_model(str(folder), tmp_path / "cache")
    weights.write_bytes(weights.read_bytes()[:-30])
    assert "pytorch_model.bin" in refusal(folder, tmp_path)
    assert "damaged or incomplete" in refusal(folder, tmp_path)


def test_an_adapter_alone_is_no_weights(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    assert "has no weights: no model.safetensors" in refusal(folder, tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", "[]", "config.json holds [], expected a JSON object"),
        ("model.safetensors.index.json", "{", "model.safetensors.index.json is not JSON"),
        ("model.safetensors.index.json", "[]", "model.safetensors.index.json holds []"),
        ("model.safetensors.index.json", "{}", "model.safetensors.index.json has no weight_map"),
        ("model.safetensors.index.json", '{"weight_map": {}}', "model.safetensors.index.json has no weight_map"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 1}}', "model.safetensors.index.json has no weight_map"),
        ("tokenizer.json", "{", "tokenizer.json is not JSON"),
        ("tokenizer.json", "\0\0", "tokenizer.json is not JSON"),
        ("tokenizer.json", "{}", "tokenizer.json is no tokenizer"),
        ("processor_config.json", "{", "processor_config.json is not JSON"),
    ],
)
def test_a_damaged_json_file_is_refused_by_name(
    folder: Path, tmp_path: Path, name: str, text: str, message: str
) -> None:
    (folder / name).write_text(text)
    assert f"model folder {folder}: {message}" in refusal(folder, tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["config.json"], "has no config.json"),
        (["tokenizer.json"], "has no tokenizer: tokenizer.json"),
        (["processor_config.json"], "has no processor: one of processor_config.json"),
    ],
)
def test_folder_that_lacks_a_file_is_refused_by_name(
    folder: Path, tmp_path: Path, files: list[str], message: str
) -> None:
    for name in files:
        (folder / name).unlink()
    assert message in refusal(folder, tmp_path)


def test_config_that_is_not_json_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").write_text("{")
    assert "config.json is not JSON" in refusal(folder, tmp_path)


def test_unsupported_architecture_is_refused_with_the_supported_ones(folder: Path, tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(config))
    message = refusal(folder, tmp_path)
    assert "LlamaForCausalLM" in message
    assert "Qwen2_5_VLForConditionalGeneration" in message


def test_hub_id_that_is_not_cached_is_refused_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "not in the Hugging Face cache" in refusal("nobody/no-such-model", tmp_path)


def test_name_that_is_neither_folder_nor_hub_id_is_refused(tmp_path: Path) -> None:
    assert "is no folder, no hub id" in refusal(tmp_path / "absent", tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny:gpt2", "'gpt2' does not exist"),
        ("tiny:qwen2_5_vl?depth=2", "unknown option 'depth'"),
        ("tiny:qwen2_5_vl?layers=two", "layers is 'two'. Use a whole number"),
        ("tiny:qwen2_5_vl?layers=0", "layers is 0. Use 1 or more"),
        ("tiny:qwen2_5_vl?hidden_size=40", "hidden_size is 40. Use a multiple of 32"),
    ],
)
def test_tiny_name_with_a_mistake_is_refused(tmp_path: Path, name: str, message: str) -> None:
    assert message in refusal(name, tmp_path)


def test_tiny_model_is_built_once_and_reused(tmp_path: Path) -> None:
    first = resolve_model(SMALLEST, tmp_path)
    written_ns = (first / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(SMALLEST, tmp_path) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written_ns


def test_tiny_model_has_equal_bytes_wherever_it_is_built(tiny_model_dir: Path, tmp_path: Path) -> None:
    torch.manual_seed(12345)
    again = resolve_model(SMALLEST, tmp_path)
    names = sorted(file.name for file in tiny_model_dir.iterdir())
    assert names == sorted(file.name for file in again.iterdir())
    assert all((tiny_model_dir / name).read_bytes() == (again / name).read_bytes() for name in names)


def test_tiny_options_give_models_of_their_own(tmp_path: Path) -> None:
    one, other = resolve_model(SMALLEST, tmp_path), resolve_model(SMALLEST + "&seed=1", tmp_path)
    assert one != other
    assert (one / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_building_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    resolve_model(SMALLEST, tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_build_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_half_way(spec: object, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(agent.models, "build_tiny", fail_half_way)
    with pytest.raises(OSError, match="disk full"):
        resolve_model(SMALLEST, tmp_path)
    assert list((tmp_path / "tiny").iterdir()) == []


def test_of_two_processes_that_build_at_once_the_second_takes_the_first_ones(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "tiny" / tiny_model_dir.name

    def build_while_another_finishes(spec: object, folder: Path) -> None:
        shutil.copytree(tiny_model_dir, folder, dirs_exist_ok=True)
        shutil.copytree(tiny_model_dir, target)

    monkeypatch.setattr(agent.models, "build_tiny", build_while_another_finishes)
    assert resolve_model(SMALLEST, tmp_path) == target
    assert [entry.name for entry in (tmp_path / "tiny").iterdir()] == [target.name]
