"""Environment variables that the stack reads once, when it is imported. Knows nothing about the libraries themselves.

`run.py` and `tests/conftest.py` call `set_defaults` before anything heavy is imported. What the user has set wins.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

TINY_PREFIX = "tiny:"
RANDOM_PREFIX = "random:"

EVERYWHERE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # vLLM's weights are views of the trainer's: one process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # 0.32's second one takes no logits processors, and has no `_to_list`
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",  # threads of a tokenizer, for prompts this short
}
CPU = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",  # two threads spin against each other on a busy machine: 500 times slower
    "TORCHDYNAMO_DISABLE": "1",  # 22 s of C++ compiling at the first call
}
GPU = {
    "DS_SKIP_CUDA_CHECK": "1",  # no DeepSpeed op is compiled, so the CUDA toolkit's version is irrelevant
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # compiles at the first call
}
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # reading and writing a local folder; a download keeps its bar
}


def set_defaults(model_path: str = TINY_PREFIX) -> None:
    """Fill in what is unset; call it before torch, transformers, vLLM or DeepSpeed are imported.

    With a model that is on this machine already (`tiny:...` or a folder) the Hugging Face hub is not asked.
    """
    for name, value in _defaults(has_gpu(), is_local(model_path)):
        os.environ.setdefault(name, value)


def _defaults(gpu: bool, local: bool) -> Iterator[tuple[str, str]]:
    yield from EVERYWHERE.items()
    yield from (GPU if gpu else CPU).items()
    if local:
        yield from OFFLINE.items()


def is_local(model_path: str) -> bool:
    """True where the model needs no download."""
    return model_path.startswith((TINY_PREFIX, RANDOM_PREFIX)) or Path(model_path).exists()


def has_gpu() -> bool:
    """True where an NVIDIA device is visible and the installed torch can use one. Imports nothing heavy."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    try:
        cpu_build = version("torch").endswith("+cpu")
    except PackageNotFoundError:
        cpu_build = False
    return not cpu_build and Path("/dev/nvidiactl").exists()
