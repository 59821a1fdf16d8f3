"""The agent's side of a vision-language model: observations become prompts, responses become actions.

Where the tokens of an answer come from is not its business: it knows nothing about vLLM, training or simulators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agent.action_parser import ActionParser, ParsedAction
from agent.prompts import Conversation, PromptRenderer
from configs.errors import ConfigError
from configs.schema import AgentConfig
from data.types import Prompt, Vocabulary


@dataclass(frozen=True, eq=False)
class Observation:
    """What the agent sees at one turn."""

    clip: np.ndarray
    """Frames since the last action, oldest first: `uint8[T, H, W, 3]`, which `VLMPolicy.render` checks."""
    instruction: str
    actions: tuple[str, ...] = ()
    """What the agent answered to the observation before this one; empty at first, or where that was invalid."""


class VLMPolicy:
    """Renders prompts for, and reads responses of, the model in `model_dir`.

    Args:
        config: templates, limits and frame sizes.
        model_dir: a checked Hugging Face folder (`agent.models.resolve_model`).
        action_names: primitive actions of the environment.

    Raises:
        ConfigError: the template, an action name or the model folder cannot be used.
    """

    vocabulary: Vocabulary

    def __init__(self, config: AgentConfig, model_dir: Path, action_names: Sequence[str]) -> None:
        self._config = config
        self._renderer = PromptRenderer(
            model_dir, fps=config.fps, min_pixels=config.min_pixels, max_pixels=config.max_pixels
        )
        self.vocabulary = vocabulary_of(self._renderer)
        self._parser = ActionParser(
            self._renderer.tokenizer, self.vocabulary.end_of_turn, action_names, config.max_actions
        )
        self._user_text("")  # a template that cannot be filled in is found here, not in the first episode

    def render(
        self,
        histories: Sequence[Sequence[Observation]],
        earlier: Sequence[tuple[Prompt, Sequence[int]] | None] | None = None,
    ) -> list[Prompt]:
        """Prompts for many agents at once: one history each, oldest observation first, the newest one unanswered.

        With `agent.context: window` the last `context_clips` observations are shown, with the actions answered between
        them. With `history` the newest observation continues the prompt before it and the tokens that answered it.

        Args:
            earlier: each agent's last prompt and response; None where it has none yet.

        Raises:
            ObservationError: a clip is not `uint8[T, H, W, 3]`, or a text holds a special token.
        """
        if self._config.context == "window" or earlier is None:
            return self._renderer.render([self._conversation(history) for history in histories])
        prompts: dict[int, Prompt] = {}
        begun = [(index, last) for index, last in enumerate(earlier) if last is not None]
        news = [Conversation([self._user_turn(histories[i][-1])], [histories[i][-1].clip]) for i, _ in begun]
        extended = self._renderer.extend([last for _, last in begun], news)
        prompts |= dict(zip([index for index, _ in begun], extended, strict=True))
        new = [index for index, last in enumerate(earlier) if last is None]
        rendered = self._renderer.render([self._conversation(histories[index]) for index in new])
        prompts |= dict(zip(new, rendered, strict=True))
        return [prompts[index] for index in range(len(histories))]

    def parse(self, token_ids: Sequence[int]) -> ParsedAction:
        """Read a response; one that is not exactly 1 to `max_actions` action names and end of turn is invalid."""
        return self._parser.parse(token_ids)

    def encode_actions(self, actions: Sequence[str]) -> tuple[int, ...]:
        """Tokens of the response that says `actions`, end-of-turn included: the label of an imitation step.

        Raises:
            ValueError: there are no actions, too many, or unknown ones.
        """
        return self._parser.encode(actions)

    def _conversation(self, history: Sequence[Observation]) -> Conversation:
        assert history, "a prompt needs an observation"
        shown = history[-self._config.context_clips :]
        messages: list[dict[str, Any]] = []
        if self._config.system_prompt:
            messages.append({"role": "system", "content": self._config.system_prompt})
        for turn, observation in enumerate(shown):
            if turn > 0:
                messages.append({"role": "assistant", "content": " ".join(observation.actions)})
            messages.append(self._user_turn(observation))
        return Conversation(messages, [observation.clip for observation in shown])

    def _user_turn(self, observation: Observation) -> dict[str, Any]:
        text = {"type": "text", "text": self._user_text(observation.instruction)}
        return {"role": "user", "content": [{"type": "video"}, text]}

    def _user_text(self, instruction: str) -> str:
        template = self._config.instruction_template
        try:
            return template.format(instruction=instruction, actions=", ".join(self._parser.action_names))
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                f"agent.instruction_template {template!r} cannot be filled in ({error!r}). "
                "Use {instruction} and {actions}, and double any other brace."
            ) from error


def vocabulary_of(renderer: PromptRenderer) -> Vocabulary:
    """Forbid every token that is no text: added and special ones, and rows of the embedding that no token has."""
    tokenizer = renderer.tokenizer
    end_of_turn = int(tokenizer.convert_tokens_to_ids(renderer.family.end_of_turn))
    added = set(tokenizer.added_tokens_decoder)
    unused = set(range(renderer.vocab_size)) - set(tokenizer.get_vocab().values())
    return Vocabulary(end_of_turn, tuple(sorted((added | unused) - {end_of_turn})))
