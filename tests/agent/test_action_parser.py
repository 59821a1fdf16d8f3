from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from agent.action_parser import ActionParser
from agent.tiny_tokenizer import build_tokenizer
from configs.errors import ConfigError

NAMES = ("forward", "left", "right", "turn_left", "stop")
TOKENIZER: PreTrainedTokenizerBase = build_tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
PARSER = ActionParser(TOKENIZER, END, NAMES, max_actions=3)


def tokens(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


@given(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3))
def test_parse_reads_back_what_encode_writes(actions: list[str]) -> None:
    response = PARSER.encode(actions)
    parsed = PARSER.parse(response)
    assert (parsed.actions, parsed.valid, parsed.text) == (tuple(actions), True, " ".join(actions))
    assert response[-1] == END
    assert END not in response[:-1]


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        " left",
        "left ",
        "left  right",
        "left\n",
        "left\tright",
        "left right left right",
        "Left",
        "leftright",
        "left,right",
        "go left",
        "forwards",
        "<|vision_start|>left",
    ],
)
def test_anything_but_action_names_and_single_spaces_is_invalid(text: str) -> None:
    parsed = PARSER.parse([*tokens(text), END])
    assert (parsed.actions, parsed.valid, parsed.text) == ((), False, text)


def test_a_response_without_end_of_turn_was_cut_off_and_is_invalid() -> None:
    assert PARSER.parse(tokens("left")).valid is False
    assert PARSER.parse([]).valid is False


@pytest.mark.parametrize("text", ["<|im_end|>", "left<|im_end|>", "left<|im_end|>right"])
def test_end_of_turn_belongs_at_the_end_and_only_there(text: str) -> None:
    assert PARSER.parse([*tokens(text), END]).valid is False


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=8))
def test_parse_takes_any_tokens_and_is_valid_only_for_the_grammar(token_ids: list[int]) -> None:
    parsed = PARSER.parse(token_ids)
    if parsed.valid:
        assert token_ids[-1] == END
        assert parsed.text == " ".join(parsed.actions)
        assert 1 <= len(parsed.actions) <= 3
        assert set(parsed.actions) <= set(NAMES)
    else:
        assert parsed.actions == ()


def test_letters_sampled_one_by_one_spell_the_same_action() -> None:
    letters = [TOKENIZER.convert_tokens_to_ids(letter) for letter in "stop"]
    assert PARSER.parse([*letters, END]).actions == ("stop",)


@pytest.mark.parametrize("actions", [[], ["fly"], ["left"] * 4])
def test_encode_refuses_what_parse_would_not_accept(actions: list[str]) -> None:
    with pytest.raises(ValueError, match="a response holds 1 to 3 of"):
        PARSER.encode(actions)


@pytest.mark.parametrize("names", [(), ("left", "left"), ("",), ("turn left",), ("a\u0301",), ("<|im_end|>",)])
def test_action_names_that_cannot_be_read_back_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="action name"):
        ActionParser(TOKENIZER, END, names, max_actions=1)
