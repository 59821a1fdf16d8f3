"""From response tokens to actions and back, under a strict grammar.

    response = action { " " action } end_of_turn        with 1 to `max_actions` actions

Anything else is invalid; what an invalid response does is decided elsewhere. Knows nothing about models.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from configs.errors import ConfigError


@dataclass(frozen=True)
class ParsedAction:
    """What a response says."""

    actions: tuple[str, ...]
    """Primitive actions in order; empty where the response is invalid."""
    valid: bool
    text: str
    """The response as text, without its end-of-turn token."""


class ActionParser:
    """Reads and writes responses that consist of action names.

    Raises:
        ConfigError: a name is empty, repeated, no plain word, or changed by the tokenizer.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, end_of_turn: int, action_names: Sequence[str], max_actions: int
    ) -> None:
        self.action_names = tuple(action_names)
        self.max_actions = max_actions
        self._tokenizer = tokenizer
        self._end_of_turn = end_of_turn
        if not self.action_names or len(set(self.action_names)) < len(self.action_names):
            raise ConfigError(f"action names {list(action_names)} are empty or repeat. Give each action its own name.")
        for name in self.action_names:
            if not re.fullmatch(r"[\w.-]+", name) or self.parse(self.encode((name,))).actions != (name,):
                raise ConfigError(
                    f"action name {name!r} is no plain word for this tokenizer. Use letters, digits, _ . -"
                )

    def parse(self, token_ids: Sequence[int]) -> ParsedAction:
        """Read a response. One without an end-of-turn token was cut off, and is invalid."""
        ended = bool(token_ids) and token_ids[-1] == self._end_of_turn
        body = list(token_ids[:-1] if ended else token_ids)
        text = str(self._tokenizer.decode(body, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        actions = tuple(text.split(" "))
        valid = ended and len(actions) <= self.max_actions and all(action in self.action_names for action in actions)
        return ParsedAction(actions if valid else (), valid, text)

    def encode(self, actions: Sequence[str]) -> tuple[int, ...]:
        """Tokens of the response that says `actions`, end-of-turn included; `parse` reads them back.

        Raises:
            ValueError: there are no actions, too many, or unknown ones.
        """
        unknown = [action for action in actions if action not in self.action_names]
        if unknown or not 1 <= len(actions) <= self.max_actions:
            raise ValueError(
                f"cannot answer {list(actions)}: a response holds 1 to {self.max_actions} of {list(self.action_names)}."
            )
        return (*self._tokenizer.encode(" ".join(actions), add_special_tokens=False), self._end_of_turn)
