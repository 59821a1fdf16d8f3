from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from data.types import Media
from runtime.memory import Ledger
from runtime.vision import VisionCache


class Tower(nn.Module):
    """Sums each pair of patches; a feature row is 4 float32, 16 bytes."""

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), weight))

    def forward(self, pixels: Tensor, grid_thw: Tensor) -> SimpleNamespace:
        return SimpleNamespace(pooler_output=(pixels * self.weight).view(-1, 2, 4).sum(1))


def media(key: str, value: float, patches: int = 4) -> Media:
    return Media(torch.full((patches, 4), value), (1, 2, patches // 2), 1.0, 0, patches // 2, key)


def test_features_are_computed_once_while_they_fit() -> None:
    ledger = Ledger()
    cache, tower = VisionCache(budget=64, ledger=ledger), Tower()  # two clips of two rows
    assert torch.equal(cache.features(tower, media("a", 1.0)), torch.full((2, 4), 2.0))
    cache.features(tower, media("b", 2.0))
    cache.features(tower, media("a", 1.0))
    assert cache.computed == 2
    assert ledger.used["vision_features"] == 64
    cache.features(tower, media("c", 3.0))  # b was used least recently
    cache.features(tower, media("a", 1.0))
    assert cache.computed == 3
    cache.features(tower, media("b", 2.0))
    assert cache.computed == 4
    assert ledger.used["vision_features"] == 64
    cache.forget(tower)
    ledger.check_integrity(empty=("vision_features",))


def test_a_clip_over_the_budget_is_computed_each_time() -> None:
    ledger = Ledger()
    cache, tower = VisionCache(budget=16, ledger=ledger), Tower()
    for _ in range(2):
        assert torch.equal(cache.features(tower, media("a", 1.0)), torch.full((2, 4), 2.0))
    assert cache.computed == 2
    assert ledger.used.get("vision_features", 0) == 0


def test_features_have_no_graph() -> None:
    assert not VisionCache(64, Ledger()).features(Tower(), media("a", 1.0)).requires_grad


def test_each_tower_has_features_of_its_own_until_its_weights_change() -> None:
    ledger = Ledger()
    cache, actor, reference = VisionCache(budget=1 << 10, ledger=ledger), Tower(), Tower(3.0)
    assert torch.equal(cache.features(actor, media("a", 1.0)), torch.full((2, 4), 2.0))
    assert torch.equal(cache.features(reference, media("a", 1.0)), torch.full((2, 4), 6.0))
    with torch.no_grad():
        actor.weight.fill_(5.0)
    cache.forget(actor)
    assert torch.equal(cache.features(actor, media("a", 1.0)), torch.full((2, 4), 10.0))
    cache.features(reference, media("a", 1.0))
    assert cache.computed == 3
    assert ledger.used["vision_features"] == 64
