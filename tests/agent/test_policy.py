from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoProcessor

from agent.policy import Observation, VLMPolicy
from agent.prompts import ObservationError
from configs.errors import ConfigError
from data.types import Prompt

Observe = Callable[..., Observation]
MakePolicy = Callable[..., VLMPolicy]
CLIP = "<|vision_start|>" + "<|video_pad|>" * 8 + "<|vision_end|>"


@pytest.fixture
def text(tiny_model_dir: Path) -> Callable[[Prompt], str]:
    tokenizer = AutoProcessor.from_pretrained(tiny_model_dir).tokenizer
    return lambda prompt: str(tokenizer.decode(prompt.token_ids, clean_up_tokenization_spaces=False))


def test_a_first_observation_is_one_user_turn(policy: VLMPolicy, observe: Observe, text: Callable[..., str]) -> None:
    prompt = policy.render([[observe(0)]])[0]
    assert text(prompt) == f"<|im_start|>user\n{CLIP}go to the red box<|im_end|>\n<|im_start|>assistant\n"


def test_history_alternates_with_the_actions_answered(
    make_policy: MakePolicy, observe: Observe, text: Callable[..., str]
) -> None:
    history = [observe(0), observe(1, actions=("left", "forward")), observe(2, actions=("stop",))]
    prompt = make_policy(context_clips=2, system_prompt="you are a robot").render([history])[0]
    assert text(prompt) == (
        "<|im_start|>system\nyou are a robot<|im_end|>\n"
        f"<|im_start|>user\n{CLIP}go to the red box<|im_end|>\n"
        "<|im_start|>assistant\nstop<|im_end|>\n"
        f"<|im_start|>user\n{CLIP}go to the red box<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_history_shows_the_newest_clips_oldest_first(make_policy: MakePolicy, observe: Observe) -> None:
    policy = make_policy(context_clips=2)
    alone = [policy.render([[observe(seed)]])[0].media[0].content_hash for seed in range(3)]
    shown = policy.render([[observe(0), observe(1), observe(2)]])[0]
    assert [media.content_hash for media in shown.media] == alone[1:]


def test_a_longer_history_continues_the_tokens_of_prompt_and_response(
    make_policy: MakePolicy, observe: Observe
) -> None:
    policy = make_policy(context_clips=3)
    first = policy.render([[observe(0)]])[0]
    second = policy.render([[observe(0), observe(1, actions=("left", "stop"))]])[0]
    start = first.token_ids + policy.encode_actions(("left", "stop"))
    assert second.token_ids[: len(start)] == start
    assert second.positions[:, : len(first.token_ids)].tolist() == first.positions.tolist()
    assert second.positions[:, len(first.token_ids)].tolist() == [first.next_position] * 3


def test_rendering_together_or_alone_gives_the_same_prompts(policy: VLMPolicy, observe: Observe) -> None:
    histories = [[observe(seed % 3)] for seed in range(5)]
    together = policy.render(histories)
    alone = [policy.render([history])[0] for history in histories]
    assert [prompt.key for prompt in together] == [prompt.key for prompt in alone]


def test_instruction_template_is_filled_in(make_policy: MakePolicy, observe: Observe, text: Callable[..., str]) -> None:
    policy = make_policy(instruction_template="task: {instruction}. {{{actions}}}")
    assert "task: go to the red box. {forward, left, right, stop, wait}<|im_end|>" in text(
        policy.render([[observe(0)]])[0]
    )


@pytest.mark.parametrize("template", ["{instructions}", "{}", "{instruction"])
def test_a_template_that_cannot_be_filled_in_is_refused_at_once(make_policy: MakePolicy, template: str) -> None:
    with pytest.raises(ConfigError, match=r"agent\.instruction_template"):
        make_policy(instruction_template=template)


def test_bounds_that_exclude_each_other_are_refused(make_policy: MakePolicy) -> None:
    with pytest.raises(ConfigError, match=r"agent\.min_pixels=1000 is over agent\.max_pixels=999"):
        make_policy(min_pixels=1000, max_pixels=999)


def test_float_frames_are_refused(policy: VLMPolicy) -> None:
    with pytest.raises(ObservationError, match="float64"):
        policy.render([[Observation(np.zeros((4, 64, 64, 3)), "go")]])


def test_vocabulary_forbids_everything_that_is_no_text(policy: VLMPolicy, tiny_model_dir: Path) -> None:
    tokenizer = AutoProcessor.from_pretrained(tiny_model_dir).tokenizer
    special = {"<|endoftext|>", "<|im_start|>", "<|vision_start|>", "<|vision_end|>"}
    special |= {"<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"}
    ids = {tokenizer.convert_tokens_to_ids(token) for token in special}
    padding = set(range(len(tokenizer), -(-len(tokenizer) // 64) * 64))
    assert policy.vocabulary.end_of_turn == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert set(policy.vocabulary.forbidden) == ids | padding
    assert len(policy.vocabulary.forbidden) == len(ids | padding)


def test_every_answer_that_parses_can_be_sampled(policy: VLMPolicy) -> None:
    for actions in (("forward",), ("left", "right", "wait")):
        response = policy.encode_actions(actions)
        assert not set(response) & set(policy.vocabulary.forbidden)
        assert policy.parse(response).actions == actions
