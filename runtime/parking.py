"""Frozen weights that leave the device while something else needs its memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


class HostCopy:
    """Frozen weights in pinned host memory as well, so that the device's copy can be dropped and made again.

    Args:
        parameters: must not change any more, except through `refresh`.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._device = self._parameters[0].device
        self._pin = self._device.type == "cuda"
        self._host = [torch.empty_like(p, device="cpu", pin_memory=self._pin) for p in self._parameters]
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
