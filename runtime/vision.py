"""Vision features of clips, computed once for rollout, reference and actor.

With a frozen tower a clip's features depend on the clip alone, so they are kept under a byte budget, least recently
used first out. Each clip goes through the tower by itself: its features do not depend on what is asked for with it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from data.transfer import on_device
from data.types import Media
from runtime.memory import Ledger


class VisionCache:
    """Features of a frozen vision tower by content hash.

    Args:
        tower: the model's vision tower, in the dtype that features are wanted in.
        budget: most bytes kept; a clip that does not fit is computed whenever it is asked for.
    """

    def __init__(self, tower: Any, budget: int, ledger: Ledger) -> None:
        self._tower = tower
        self._budget = budget
        self._ledger = ledger
        self._kept: OrderedDict[str, tuple[Tensor, int]] = OrderedDict()
        self._used = 0
        self.computed = 0
        """Clips that went through the tower (count)."""

    @torch.no_grad()
    def features(self, media: Media) -> Float[Tensor, "token hidden"]:
        """A clip's features, one row for each of its placeholder tokens."""
        if media.content_hash in self._kept:
            self._kept.move_to_end(media.content_hash)
            return self._kept[media.content_hash][0]
        weight = next(self._tower.parameters())
        pixels = on_device(media.pixel_values, weight.device).to(weight.dtype)
        features: Tensor = self._tower(
            pixels, grid_thw=torch.tensor([media.grid_thw], device=weight.device)
        ).pooler_output
        self.computed += 1
        self._keep(media.content_hash, features)
        return features

    def _keep(self, key: str, features: Tensor) -> None:
        size = features.numel() * features.element_size()
        if size > self._budget:
            return
        while self._used + size > self._budget:
            self._evict()
        self._kept[key] = (features, self._ledger.lease("vision_features", size))
        self._used += size

    def _evict(self) -> None:
        features, lease = self._kept.popitem(last=False)[1]
        self._ledger.release(lease)
        self._used -= features.numel() * features.element_size()

    def clear(self) -> None:
        """Forget everything: the tower's weights have been replaced."""
        while self._kept:
            self._evict()
