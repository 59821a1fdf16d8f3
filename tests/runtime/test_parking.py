from __future__ import annotations

import torch
from torch import nn

from runtime.parking import HostCopy


def test_parked_weights_come_back_and_a_refresh_is_kept() -> None:
    layer = nn.Linear(3, 2)
    before = layer.weight.detach().clone()
    copy = HostCopy(layer.parameters())
    address = layer.weight.data_ptr()
    with copy.parked():
        assert layer.weight.data_ptr() != address
    assert torch.equal(layer.weight, before)
    layer.weight.data.fill_(3.0)
    copy.refresh()
    with copy.parked():
        pass
    assert torch.equal(layer.weight, torch.full((2, 3), 3.0))
