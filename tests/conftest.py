"""What all tests share: the process's environment, set before anything heavy is imported, and the GPU markers."""

from __future__ import annotations

import hypothesis
import pytest

from configs.environment import has_gpu, set_defaults

set_defaults()
hypothesis.settings.register_profile("busy_machine", deadline=None)
hypothesis.settings.load_profile("busy_machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` and `multigpu` tests where the devices are missing. Torch is imported only if such tests exist."""
    if not any(item.get_closest_marker(name) for item in items for name in ("gpu", "multigpu")):
        return
    num_devices = _count_devices()
    for item in items:
        needed = 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0
        if needed > num_devices:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), found {num_devices}"))


def _count_devices() -> int:
    if not has_gpu():
        return 0
    import torch

    return torch.cuda.device_count()
