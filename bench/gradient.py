"""How far the gradients of different ways of doing a step are apart, on the same sampled tokens.

Knows nothing of what is timed: gradients are kept and compared in steps that are not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from data.types import Group

CHUNK = 1 << 23
"""Elements of a gradient that are compared at once: what the comparison needs must not count as an arm's memory."""


@dataclass
class Reference:
    """The first arm's gradient, and the groups that it is of, on which every arm's gradient is compared."""

    num_groups: int
    same_tokens: bool = True
    """Every group of the present arm was sampled as in the first."""
    _groups: dict[int, Group] = field(default_factory=dict)
    _gradient: Tensor | None = None

    def register(self, group: Group) -> Group | None:
        """The group to train on: this one, or the first arm's where other tokens were sampled."""
        if group.index >= self.num_groups:
            return None
        first = self._groups.setdefault(group.index, group)
        same = _token_ids(first) == _token_ids(group)
        self.same_tokens &= same
        return group if same else first

    def compare(self, gradient: Tensor) -> dict[str, float]:
        """Cosine and relative error to the first gradient, which is kept (rounded to bfloat16 if it is a device's)."""
        if self._gradient is None:
            self._gradient = _to_host(gradient)
            return {"grad_cosine": 1.0, "grad_rel_err": 0.0}
        return distance(gradient, self._gradient)


def _token_ids(group: Group) -> list[tuple[int, ...]]:
    return [turn.response.token_ids for rollout in group.rollouts for turn in rollout.turns]


def _to_host(flat: Tensor) -> Tensor:
    # Copies to and from pageable memory would take longer than a step.
    kept = torch.empty(len(flat), dtype=torch.bfloat16 if flat.is_cuda else flat.dtype, pin_memory=flat.is_cuda)
    for part, source in zip(kept.split(CHUNK), flat.split(CHUNK), strict=True):
        part.copy_(source.to(part.dtype))  # on the device: `copy_` alone would convert on the host
    return kept


def distance(flat: Tensor, reference: Tensor) -> dict[str, float]:
    """Cosine and relative error of a vector to one on the host, summed in float64 a chunk at a time."""
    sums = torch.zeros(4, dtype=torch.float64, device=flat.device)
    for part, other in zip(flat.split(CHUNK), reference.split(CHUNK), strict=True):
        a, b = part.double(), other.to(flat.device).double()
        apart = a - b
        sums += torch.stack([a @ b, a @ a, b @ b, apart @ apart])
    dot, own, theirs, apart_squared = sums.tolist()
    return {"grad_cosine": dot / (own * theirs) ** 0.5, "grad_rel_err": (apart_squared / theirs) ** 0.5}
