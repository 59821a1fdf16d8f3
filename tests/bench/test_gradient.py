from __future__ import annotations

import pytest
import torch

from bench import gradient
from bench.gradient import Reference, distance
from data.types import Group, Prompt, Response, Rollout, Turn

PROMPT = Prompt((1, 2), torch.zeros(3, 2, dtype=torch.long), (), "key")


def group(index: int, *responses: tuple[int, ...], policy_version: int = 0) -> Group:
    turns = [Turn(PROMPT, Response(ids, (-1.0,) * len(ids), "length", policy_version)) for ids in responses]
    return Group(index, tuple(Rollout("e", (turn,), 0.0, success=False, truncated=False) for turn in turns))


def test_distance_is_the_same_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.tensor([3.0, 4.0, 0.0]), torch.tensor([4.0, 3.0, 0.0])
    for chunk in (8, 2, 1):
        monkeypatch.setattr(gradient, "CHUNK", chunk)
        found = distance(a, b)
        assert found["grad_cosine"] == pytest.approx(24 / 25)
        assert found["grad_rel_err"] == pytest.approx(2**0.5 / 5)


def test_the_first_gradient_is_what_the_others_are_compared_with() -> None:
    reference, flat = Reference(1), torch.tensor([1.0, 0.0])
    assert reference.compare(flat) == {"grad_cosine": 1.0, "grad_rel_err": 0.0}
    flat.copy_(torch.tensor([0.0, 2.0]))
    assert reference.compare(flat) == {"grad_cosine": 0.0, "grad_rel_err": pytest.approx(5**0.5)}


def test_gradients_are_compared_on_the_first_arms_tokens() -> None:
    reference = Reference(1)
    first, again, other = group(0, (1, 2)), group(0, (1, 2), policy_version=1), group(0, (1, 3))
    assert reference.register(first) is first
    assert reference.register(group(1, (1, 2))) is None, "only so many groups are compared"
    assert reference.register(again) is again
    assert reference.same_tokens
    assert reference.register(other) is first
    assert not reference.same_tokens
