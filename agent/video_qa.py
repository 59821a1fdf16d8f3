"""The agent's side of a question about videos: rows become prompts, responses become text, answers become labels.

Knows nothing about where clips come from, what a response is worth, vLLM or training.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent.families import TimestampFamily
from agent.policy import vocabulary_of
from agent.prompts import Conversation, PromptRenderer
from configs.errors import ConfigError
from configs.schema import RunConfig
from data.budget import ClipSpec, video_token_budget
from data.check import clip_spec
from data.decode import DecodedClip
from data.types import Prompt
from data.video_qa import VideoQARow

_TIMESTAMP = "<1000.0 seconds><|vision_start|><|vision_end|>"
"""What Qwen3-VL writes around each step of a video's grid, at its longest."""
_MARK = "\x00"
"""Stands for a video while the template is filled in; no row can hold it."""


class VideoQAPolicy:
    """Renders prompts for, and reads responses of, the model in `model_dir`.

    Args:
        config: templates, bounds on frames, and the longest prompt and response.
        model_dir: a checked Hugging Face folder (`agent.models.resolve_model`).

    Raises:
        ConfigError: the template or the model folder cannot be used.
    """

    def __init__(self, config: RunConfig, model_dir: Path) -> None:
        self._config = config
        agent = config.agent
        self._renderer = PromptRenderer(
            model_dir, fps=config.data.fps, min_pixels=agent.min_pixels, max_pixels=agent.max_pixels
        )
        self.vocabulary = vocabulary_of(self._renderer)
        self.spec: ClipSpec = clip_spec(
            config, factor=self._renderer.patch_factor, temporal_patch=self._renderer.temporal_patch
        )
        """What the model is shown of one video."""
        self._fill("")  # a template that cannot be filled in is found here

    def render(self, rows: Sequence[VideoQARow], clips: Sequence[Sequence[DecodedClip]]) -> list[Prompt]:
        """Prompts of rows with the clips of each one's videos, each clip at its own frame rate.

        Raises:
            ObservationError: a text holds a special token.
        """
        return self._renderer.render(
            [
                Conversation(self._messages(row), [clip.frames for clip in shown], [clip.fps for clip in shown])
                for row, shown in zip(rows, clips, strict=True)
            ]
        )

    def text(self, token_ids: Sequence[int]) -> str:
        """What a response says, without its end-of-turn."""
        kept = [token for token in token_ids if token != self.vocabulary.end_of_turn]
        return str(self._renderer.tokenizer.decode(kept))

    def label(self, row: VideoQARow) -> tuple[int, ...]:
        """Tokens of the response that gives the row's answer, end-of-turn included: what a warm start imitates."""
        answer = self._renderer.tokenizer.encode(row.answer, add_special_tokens=False)
        return (*answer, self.vocabulary.end_of_turn)

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text (count)."""
        return [len(ids) for ids in self._renderer.tokenizer(list(texts), add_special_tokens=False)["input_ids"]]

    def token_budget(self, row: VideoQARow) -> int:
        """Placeholder tokens that each of a row's videos may have, so that prompt and response fit (tokens)."""
        text = self._renderer.num_text_tokens(self._messages(row))
        if isinstance(self._renderer.family, TimestampFamily):
            steps = -(-self.spec.max_frames // self.spec.temporal_patch)
            text += len(row.videos) * steps * self.count_tokens([_TIMESTAMP])[0]
        longest, response = self._config.runtime.max_model_len, self._config.rollout.max_tokens
        return max(1, video_token_budget(longest, response, text, len(row.videos)))  # 0 would set no bound

    def _messages(self, row: VideoQARow) -> list[dict[str, Any]]:
        """The system's turn, and the row's parts with its options as the user's; videos before any text come first."""
        leading = next((place for place, part in enumerate(row.parts) if isinstance(part, str)), len(row.parts))
        rest = "".join(part if isinstance(part, str) else _MARK for part in row.parts[leading:])
        pieces = self._fill("\n".join(filter(None, (rest, row.options_text)))).split(_MARK)
        content: list[dict[str, Any]] = [{"type": "video"} for _ in range(leading)]
        for place, piece in enumerate(pieces):
            content += [{"type": "video"}] if place else []
            content += [{"type": "text", "text": piece}] if piece else []
        system = self._config.agent.system_prompt
        user = {"role": "user", "content": content}
        return [{"role": "system", "content": system}, user] if system else [user]

    def _fill(self, text: str) -> str:
        template = self._config.agent.instruction_template
        try:
            return template.format(instruction=text)
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                f"agent.instruction_template {template!r} cannot be filled in ({error!r}). "
                "Use {instruction} alone for questions about videos, and double any other brace."
            ) from error
