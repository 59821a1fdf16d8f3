"""Prompts that continue the one before them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from agent.models import resolve_model
from agent.policy import Observation, VLMPolicy
from configs.schema import AgentConfig

ACTIONS = ("forward", "left", "right")


def observation(seed: int, actions: tuple[str, ...] = ()) -> Observation:
    clip = np.random.default_rng(seed).integers(0, 255, (4, 56, 56, 3), dtype=np.uint8)
    return Observation(clip, "go to the red box", actions)


def policy(model_cache: Path, **config: object) -> VLMPolicy:
    folder = resolve_model("tiny:qwen2_5_vl", model_cache)
    return VLMPolicy(AgentConfig(**config), folder, ACTIONS)  # type: ignore[arg-type]


def test_a_continued_prompt_is_the_conversation_rendered_whole(model_cache: Path) -> None:
    history = policy(model_cache, context="history")
    window = policy(model_cache, context="window", context_clips=3)
    first, second, third = observation(0), observation(1, ("left",)), observation(2, ("forward", "forward"))
    (prompt,) = history.render([[first]], [None])
    for seen, before in (([first, second], ("left",)), ([first, second, third], ("forward", "forward"))):
        response = history.encode_actions(before)
        (prompt,), earlier = history.render([seen], [(prompt, response)]), prompt
        assert prompt.token_ids[: len(earlier.token_ids) + len(response)] == (*earlier.token_ids, *response)
        (expected,) = window.render([seen])
        assert prompt.token_ids == expected.token_ids
        assert torch.equal(prompt.positions, expected.positions)
        assert [item.offset for item in prompt.media] == [item.offset for item in expected.media]
        assert prompt.key == expected.key


def test_a_cut_response_is_closed_before_the_next_observation(model_cache: Path) -> None:
    history = policy(model_cache, context="history")
    (prompt,) = history.render([[observation(0)]], [None])
    cut = history.encode_actions(("left", "forward"))[:-1]
    (following,) = history.render([[observation(0), observation(1)]], [(prompt, cut)])
    start = len(prompt.token_ids) + len(cut)
    assert following.token_ids[:start] == (*prompt.token_ids, *cut)
    assert following.token_ids[start] == history.vocabulary.end_of_turn


def test_positions_of_a_response_are_those_that_its_continuation_gives_it(model_cache: Path) -> None:
    history = policy(model_cache, context="history")
    (prompt,) = history.render([[observation(0)]], [None])
    response = history.encode_actions(("left", "forward"))
    (following,) = history.render([[observation(0), observation(1)]], [(prompt, response)])
    start = len(prompt.token_ids)
    expected = torch.arange(len(response)) + prompt.next_position
    assert torch.equal(following.positions[:, start : start + len(response)], expected[None].expand(3, -1))


def test_new_and_continued_prompts_keep_their_places(model_cache: Path) -> None:
    history = policy(model_cache, context="history")
    (old,) = history.render([[observation(0)]], [None])
    response = history.encode_actions(("right",))
    fresh, longer, other = history.render(
        [[observation(5)], [observation(0), observation(1)], [observation(6)]], [None, (old, response), None]
    )
    assert (len(fresh.media), len(longer.media), len(other.media)) == (1, 2, 1)
    assert fresh.key == history.render([[observation(5)]], [None])[0].key
