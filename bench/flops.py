"""Floating-point operations that a step of one-turn groups needs, counted from the model's shape and the tokens.

With h hidden, m intermediate, kv key and value elements a token, L layers and V vocabulary, a forward takes

    2 L h (2h + kv + 3m)   a token: q and o, k and v, gate, up and down
    4 L h                  a token and key it attends to: scores and weighted values (heads x head_dim = h)
    2 h V                  a token whose log-probabilities are read or that is sampled

and a backward twice that. Not counted: the vision tower, what is recomputed in the backward, norms and rotary. So the
utilisation that comes of it is of work that has to be done, and a little low.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from runtime.memory import ModelShape

PEAK_FLOPS = 790e12
"""What an H200 reaches in a large bf16 matrix product (operations a second)."""


class Tokens(NamedTuple):
    """What a forward of one group computes (counts)."""

    fed: int
    attended: int
    """Keys, summed over the tokens that attend to them."""
    read: int
    """Tokens whose distribution over the vocabulary is computed."""


def prompt_tokens(prompt: int, copies: int = 1) -> Tokens:
    """A prompt's, computed `copies` times."""
    return Tokens(copies * prompt, copies * prompt * (prompt + 1) // 2, 0)


def response_tokens(prompt: int, lengths: Sequence[int]) -> Tokens:
    """A group's responses to a prompt; nothing attends to their last tokens."""
    fed = [length - 1 for length in lengths]
    return Tokens(sum(fed), sum(n * prompt + n * (n + 1) // 2 for n in fed), sum(lengths))


def forward_flops(shape: ModelShape, tokens: Tokens) -> float:
    """One forward's, without the vision tower."""
    h, layers = shape.hidden, shape.layers
    weights = layers * h * (2 * h + shape.key_value + 3 * shape.intermediate)
    return 2.0 * weights * tokens.fed + 4.0 * layers * h * tokens.attended + 2.0 * h * shape.vocabulary * tokens.read


def training_flops(
    shape: ModelShape, prompt: int, lengths: Sequence[int], *, share: bool, reuse: bool, reference: bool
) -> float:
    """One group's, in reference and actor.

    Args:
        share: the prompt is computed once, not once a response.
        reuse: the actor's forward of the prompt is the rollout's.
    """
    prompts = forward_flops(shape, prompt_tokens(prompt, 1 if share else len(lengths)))
    responses = forward_flops(shape, response_tokens(prompt, lengths))
    passes = 3 + reference  # the actor's forward, its backward that counts twice, the reference's forward
    return passes * (prompts + responses) - reuse * prompts


def rollout_flops(shape: ModelShape, prompt: int, lengths: Sequence[int]) -> float:
    """One group's: the prompt once, since the rollout engine caches prefixes, and every sampled token."""
    responses = forward_flops(shape, response_tokens(prompt, lengths))
    return forward_flops(shape, prompt_tokens(prompt)) + responses
