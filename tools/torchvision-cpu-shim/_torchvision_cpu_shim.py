"""Makes a CPU-only torch usable next to torchvision, torchaudio and torchcodec as a package registry serves them.

Those are built for CUDA. Beside a CPU build of torch (its version ends in `+cpu`):

- torchvision's compiled extension does not load, so two operators that its Python code refers to by name are missing
  and the import fails. Nothing that we run calls them; declaring their signatures is enough, and is done just before
  torchvision is first imported.
- torchaudio and torchcodec raise OSError when imported. Libraries that treat them as optional catch ImportError only,
  so they are marked as absent.

A package that has a CPU build of its own (`+cpu` too) is left alone, and beside any other torch this does nothing. It
hangs on a .pth file because vLLM inspects models in subprocesses, where a patch made by our own code would not exist.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
OPERATORS = ("nms", "qnms")


class _DeclareOperators:
    """An import hook that finds nothing; it only notices that torchvision is about to be imported."""

    library: Any = None
    """Holds the declarations: torch forgets them when it is collected."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision" and cls.library is None:
            import torch

            cls.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in OPERATORS:
                cls.library.define(operator + SIGNATURE)
        return None


def _is_cpu_build(package: str) -> bool | None:
    """None where the package is not installed."""
    try:
        return version(package).endswith("+cpu")
    except PackageNotFoundError:
        return None


if _is_cpu_build("torch"):
    if _is_cpu_build("torchvision") is False:
        sys.meta_path.insert(0, _DeclareOperators)
    for _package in ("torchaudio", "torchcodec"):
        if _is_cpu_build(_package) is False:
            sys.modules[_package] = None  # type: ignore[assignment]
