"""Frozen weights that leave the device while something else needs its memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


class HostCopy:
    """Frozen weights in pinned host memory as well, so that the device's copy can be dropped and made again.

    Args:
        parameters: of one dtype; must not change any more, except through `refresh`.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        assert len({parameter.dtype for parameter in self._parameters}) == 1, "one buffer has one dtype"
        self._device = self._parameters[0].device
        self._pin = self._device.type == "cuda"
        # One buffer: PyTorch rounds each pinned tensor up to a power of two.
        numels = [parameter.numel() for parameter in self._parameters]
        flat = torch.empty(sum(numels), dtype=self._parameters[0].dtype, pin_memory=self._pin)
        self._host = [part.view_as(p) for part, p in zip(flat.split(numels), self._parameters, strict=True)]
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over what the parameters hold now."""
        for parameter, host in zip(self._parameters, self._host, strict=True):
            host.copy_(parameter)

    @contextmanager
    def parked(self) -> Iterator[None]:
        """Inside, the weights are on the host alone."""
        for parameter, host in zip(self._parameters, self._host, strict=True):
            parameter.data = host
        try:
            yield
        finally:
            for parameter, host in zip(self._parameters, self._host, strict=True):
                parameter.data = host.to(self._device, non_blocking=True) if self._pin else host.clone()
