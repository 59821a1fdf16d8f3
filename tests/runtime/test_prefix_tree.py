from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.prefix_tree import GradientBuffer, Row, Segment, StaleEncoding, backward, encode, score
from runtime.vlm import SplitVLM
from tests.runtime.support import load_tiny, vocabulary_of


def segment(length: int, parent: Segment | None = None, targets: tuple[int, ...] = ()) -> Segment:
    return Segment(tuple(range(length)), torch.arange(length)[None].expand(3, -1), parent, targets=targets)


def run(generator):  # type: ignore[no-untyped-def]
    while True:
        try:
            next(generator)
        except StopIteration as stop:
            return stop.value


def test_mask_admits_the_same_branch_and_nothing_later() -> None:
    first, second = segment(2), segment(1)
    roots = Row((first, second))
    leaves = Row((segment(2, first, (1, 2, 3)), segment(1, second, (1,))), (roots,))
    mask = roots.mask()
    assert mask is not None
    assert mask.dense()[0, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    mask = leaves.mask()
    assert mask is not None
    # Columns: the two tokens of `first`, the one of `second`, then the row's own three.
    assert mask.dense()[0, 0].int().tolist() == [[1, 1, 0, 1, 0, 0], [1, 1, 0, 1, 1, 0], [0, 0, 1, 0, 0, 1]]


def test_mask_of_a_chain_reaches_grandparents_but_not_siblings() -> None:
    root = segment(1)
    left, right = segment(1, root), segment(1, root)
    middle = Row((left, right), (Row((root,)),))
    leaf = Row((segment(1, right, (5,)),), (*middle.context, middle))
    mask = leaf.mask()
    assert mask is not None
    assert mask.dense()[0, 0].int().tolist() == [[1, 0, 1, 1]]


def test_one_segment_without_ancestors_is_plain_causal() -> None:
    assert Row((segment(3),)).mask() is None


def test_targets_are_read_from_the_parents_last_token_and_then_their_own() -> None:
    first, second = segment(3), segment(2)
    roots = Row((first, second))
    assert roots.readouts() == [2, 4]
    leaves = Row((segment(2, second, (7, 8, 9)), segment(0, first, (6,))), (roots,))
    assert leaves.readouts() == [0, 1]
    assert leaves.targets() == [7, 8, 9, 6]
    # Readouts 0 and 1 are the prompts' last tokens, 2 and 3 the row's own.
    assert leaves.sources() == [1, 2, 3, 0]


def test_stale_boundary_is_refused(model_cache: Path) -> None:
    model = SplitVLM(load := load_tiny(model_cache, torch.float32), vocabulary_of(load))
    root = segment(4)
    prompts = Row((root,))
    leaves = Row((segment(1, root, (5, 6)),), (prompts,))
    prefix = run(encode(model, prompts, keep="graph"))
    half = encode(model, leaves, [prefix], keep="graph")
    next(half)
    done = run(encode(model, leaves, [prefix], keep="graph"))
    model.version += 1
    sink = GradientBuffer(list(load.parameters()))
    for use in (
        lambda: run(encode(model, leaves, [prefix], keep="nothing")),
        lambda: run(half),
        lambda: score(model, done, [prefix]),
        lambda: run(backward(model, prefix, [], sink)),
    ):
        with pytest.raises(StaleEncoding, match="policy version 0 was used at version 1"):
            use()


def test_recompute_and_kept_graph_give_the_same_bits(model_cache: Path) -> None:
    model = load_tiny(model_cache, torch.float32)
    split = SplitVLM(model, vocabulary_of(model))
    gradients = []
    for keep in ("graph", "inputs"):
        prefix = run(encode(split, Row((segment(5), segment(3))), keep=keep))
        prefix.grad_final = torch.ones_like(prefix.final)
        sink = GradientBuffer(list(model.parameters()))
        run(backward(split, prefix, [], sink))
        gradients.append(sink.flat)
    assert torch.equal(*gradients)
    assert float(gradients[0].abs().sum()) > 0
