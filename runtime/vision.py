"""Vision features of clips, computed once for each vision tower: for rollout and actor, and for the reference with them
where it has the same tower.

A clip's features depend on the clip and the tower's weights alone, so they are kept under a byte budget until those
weights change, least recently used first out. Each clip goes through the tower by itself: its features do not depend on
what is asked for with it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from data.types import Media
from runtime.memory import Ledger
from runtime.tower import run_tower

_Key = tuple[Any, str]
"""A tower, and the content hash of a clip."""


class VisionCache:
    """Features of clips by tower and content hash.

    Args:
        budget: most bytes kept; a clip that does not fit is computed whenever it is asked for.
    """

    def __init__(self, budget: int, ledger: Ledger) -> None:
        self._budget = budget
        self._ledger = ledger
        self._kept: OrderedDict[_Key, tuple[Tensor, int]] = OrderedDict()
        self._used = 0
        self.computed = 0
        """Clips that went through a tower (count)."""

    @torch.no_grad()
    def features(self, tower: Any, media: Media) -> Float[Tensor, "token hidden"]:
        """A clip's features, one row for each of its placeholder tokens."""
        key = (tower, media.content_hash)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key][0]
        features = run_tower(tower, [media])
        self.computed += 1
        self._keep(key, features)
        return features

    def _keep(self, key: _Key, features: Tensor) -> None:
        size = _bytes(features)
        if size > self._budget:
            return
        while self._used + size > self._budget:
            self._drop(next(iter(self._kept)))
        self._kept[key] = (features, self._ledger.lease("vision_features", size))
        self._used += size

    def _drop(self, key: _Key) -> None:
        features, lease = self._kept.pop(key)
        self._ledger.release(lease)
        self._used -= _bytes(features)

    def forget(self, tower: Any) -> None:
        """Drop a tower's features: its weights have been replaced."""
        for key in [key for key in self._kept if key[0] is tower]:
            self._drop(key)


def _bytes(features: Tensor) -> int:
    return features.numel() * features.element_size()
