"""Values of the host brought to a device without a wait.

A copy from pageable memory makes the host wait for all that its stream has to do before, in the decode loop too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_device(values: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """A tensor of the host, or whole numbers (as int64), on a device, in the order of the present stream."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.long)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
