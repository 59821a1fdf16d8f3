from __future__ import annotations

import os
from pathlib import Path

import pytest

from configs import environment


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The process's environment without anything that `set_defaults` sets."""
    for table in (environment.EVERYWHERE, environment.CPU, environment.GPU, environment.OFFLINE):
        for name in table:
            monkeypatch.setenv(name, "")  # registers the name, so that what the test sets is undone
            monkeypatch.delenv(name)
    return monkeypatch


def test_a_cpu_machine_gets_one_thread_no_dynamo_and_deepspeeds_cpu_accelerator(bare: pytest.MonkeyPatch) -> None:
    bare.setattr(environment, "has_gpu", lambda: False)
    environment.set_defaults()
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
    assert os.environ["DS_ACCELERATOR"] == "cpu"


def test_a_gpu_machine_keeps_its_threads_and_its_compiler(bare: pytest.MonkeyPatch) -> None:
    bare.setattr(environment, "has_gpu", lambda: True)
    environment.set_defaults()
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    for name in ("OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE", "DS_ACCELERATOR"):
        assert name not in os.environ


def test_what_the_user_has_set_is_kept(bare: pytest.MonkeyPatch) -> None:
    bare.setattr(environment, "has_gpu", lambda: False)
    bare.setenv("OMP_NUM_THREADS", "4")
    environment.set_defaults()
    assert os.environ["OMP_NUM_THREADS"] == "4"


def test_the_hub_is_off_for_models_that_are_here_and_on_for_others(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.set_defaults("some-lab/some-model")
    assert "HF_HUB_OFFLINE" not in os.environ
    environment.set_defaults(str(tmp_path))
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert environment.is_local("tiny:qwen2_5_vl")


@pytest.mark.parametrize("devices", ["", "-1"])
def test_hidden_devices_mean_no_gpu(monkeypatch: pytest.MonkeyPatch, devices: str) -> None:
    monkeypatch.setattr(environment, "version", lambda package: "2.13.0")
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert environment.has_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    assert not environment.has_gpu()


def test_a_cpu_build_of_torch_means_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(environment, "version", lambda package: "2.13.0+cpu")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert not environment.has_gpu()
