from __future__ import annotations

import pytest

from bench.flops import PEAK_FLOPS, forward_flops, prompt_tokens, response_tokens, rollout_flops, training_flops
from runtime.memory import ModelShape

SMALL = ModelShape(
    parameters=0, trainable=0, layers=1, hidden=2, intermediate=3, key_value=4, vocabulary=5, item_bytes=2
)
# A layer's weights: 2 x (2 x 2 + 4 + 3 x 3) = 34.
PROMPT = 2 * 34 * 2 + 4 * 2 * (1 + 2)  # two tokens, which attend to 1 and 2 keys
RESPONSES = 2 * 34 * 1 + 4 * 2 * 3 + 2 * 2 * 5 * 3  # of 2 and 1 tokens: one is fed and attends to 3 keys, 3 are read


def test_a_forward_is_weights_attention_and_head() -> None:
    assert PROMPT == 160
    assert RESPONSES == 152
    assert forward_flops(SMALL, prompt_tokens(2)) == PROMPT
    assert forward_flops(SMALL, response_tokens(2, [2, 1])) == RESPONSES


def test_a_rollout_computes_the_prompt_once() -> None:
    assert rollout_flops(SMALL, 2, [2, 1]) == PROMPT + RESPONSES


@pytest.mark.parametrize(
    ("share", "reuse", "reference", "expected"),
    [
        (True, False, True, 4 * (PROMPT + RESPONSES)),
        (True, False, False, 3 * (PROMPT + RESPONSES)),
        (True, True, True, 3 * PROMPT + 4 * RESPONSES),
        (False, False, True, 4 * (2 * PROMPT + RESPONSES)),
    ],
)
def test_training_is_three_forwards_and_the_references(
    share: bool, reuse: bool, reference: bool, expected: float
) -> None:
    assert training_flops(SMALL, 2, [2, 1], share=share, reuse=reuse, reference=reference) == expected


def test_a_prompt_of_the_3b_shape_takes_70_ms_at_best() -> None:
    """The floor of the prefix forward, worked out by hand before (70 ms for 8,192 tokens)."""
    shape = ModelShape(
        parameters=0, trainable=0, layers=36, hidden=2048, intermediate=11008, key_value=512, vocabulary=151936,
        item_bytes=2,
    )  # fmt: skip
    assert forward_flops(shape, prompt_tokens(8192)) / PEAK_FLOPS == pytest.approx(0.070, rel=0.01)
