"""From messages and clips to prompts: chat template, token ids with video placeholders expanded, pixels, positions.

Its output equals what the Hugging Face processor of the model makes of the same frames; both vLLM and the trainer read
it, so nothing is tokenized or resized twice. Knows nothing about observations, actions or environments.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from transformers import AutoConfig, AutoProcessor
from transformers.video_utils import VideoMetadata

from agent.families import family_of
from agent.positions import mrope_positions
from configs.errors import ConfigError, UserError
from data.types import Media, Prompt

MAX_ASPECT_RATIO = 200
"""The processors refuse frames that are longer and thinner."""

Clip = UInt8[np.ndarray, "frame height width 3"]


class ObservationError(UserError, ValueError):
    """An environment's observation cannot be shown to a model."""


@dataclass(frozen=True, eq=False)
class Conversation:
    """Chat messages, and the clips that their video parts stand for, in order."""

    messages: Sequence[dict[str, Any]]
    clips: Sequence[np.ndarray]
    """Unchecked: `render` refuses what is not `uint8[T, H, W, 3]`."""
    fps: Sequence[float] | None = None
    """Frames a second that each clip's timestamps claim (1/s); None: the renderer's, for all."""


@dataclass(frozen=True, eq=False)
class _Video:
    """A clip after the video processor."""

    pixel_values: Float[Tensor, "patch feature"]
    grid_thw: tuple[int, int, int]
    fps: float
    seconds_per_grid: float
    content_hash: str


class PromptRenderer:
    """Renders conversations for the model in `model_dir`.

    Args:
        fps: frames a second that clips' timestamps claim where the conversation does not say (1/s).
        min_pixels: smallest area of a frame after resizing (pixels).
        max_pixels: largest area of a frame after resizing (pixels).
    """

    def __init__(self, model_dir: Path, *, fps: float, min_pixels: int, max_pixels: int) -> None:
        if min_pixels > max_pixels:
            raise ConfigError(f"agent.min_pixels={min_pixels} is over agent.max_pixels={max_pixels}. Lower the first.")
        config = AutoConfig.from_pretrained(model_dir)
        self.family = family_of(json.loads((model_dir / "config.json").read_text(encoding="utf-8")))
        self.processor = AutoProcessor.from_pretrained(model_dir)
        self.tokenizer = self.processor.tokenizer
        self.chat_template = self.processor.chat_template or self.tokenizer.chat_template
        if not self.chat_template:
            raise ConfigError(f"model folder {model_dir} has no chat template. Add its chat_template.jinja.")
        self.vocab_size = int(config.get_text_config().vocab_size)
        self._tokens_per_second = float(getattr(config.vision_config, "tokens_per_second", 1.0))
        self._image_token, self._video_token = config.image_token_id, config.video_token_id
        self._fps, self._min_pixels, self._max_pixels = fps, min_pixels, max_pixels
        self._video_processor = self.processor.video_processor
        self.temporal_patch = int(self._video_processor.temporal_patch_size)
        """Frames that share one step of the temporal grid (count)."""
        self._merge = int(self._video_processor.merge_size)
        self.patch_factor = int(self._video_processor.patch_size) * self._merge
        """Sides of resized frames are multiples of it (pixels)."""
        if getattr(self._video_processor, "cap_pixels_per_frame", False) is None:
            self._video_processor.cap_pixels_per_frame = False  # what unset means, without the warning

    def render(self, conversations: Sequence[Conversation]) -> list[Prompt]:
        """Render many conversations; clips of one shape go through the video processor together.

        Raises:
            ObservationError: a clip is not `uint8[T, H, W, 3]`, or a text holds a special token.
        """
        videos = iter(self._process(*self._clips(conversations)))
        prompts = []
        for conversation in conversations:
            clips = [next(videos) for _ in conversation.clips]
            prompts.append(self._assemble(self._template(conversation.messages), clips))
        return prompts

    def extend(
        self, earlier: Sequence[tuple[Prompt, Sequence[int]]], conversations: Sequence[Conversation]
    ) -> list[Prompt]:
        """Continue prompts by their responses, token by token, and by what came after them.

        Args:
            earlier: each prompt, and the tokens that answered it (end-of-turn or cut before it).
            conversations: the user's turn that follows each response.

        Raises:
            ObservationError: as in `render`.
        """
        videos = iter(self._process(*self._clips(conversations)))
        prompts = []
        for (prompt, response), conversation in zip(earlier, conversations, strict=True):
            clips = [next(videos) for _ in conversation.clips]
            text = self._continuation(conversation.messages)
            ended = bool(response) and self.tokenizer.convert_ids_to_tokens(response[-1]) == self.family.end_of_turn
            prompts.append(self._assemble(text if ended else self.family.end_of_turn + text, clips, prompt, response))
        return prompts

    def num_text_tokens(self, messages: Sequence[dict[str, Any]]) -> int:
        """Tokens of a prompt's text, a video counted as none (count)."""
        ids = self._tokenize(self._template(messages))
        return sum(token != self._video_token for token in ids)

    def _clips(self, conversations: Sequence[Conversation]) -> tuple[list[np.ndarray], list[float]]:
        """All clips in order, and the rate of each."""
        clips: list[np.ndarray] = []
        rates: list[float] = []
        for conversation in conversations:
            clips += conversation.clips
            rates += [self._fps] * len(conversation.clips) if conversation.fps is None else conversation.fps
        assert len(clips) == len(rates), "a clip without a rate"
        return clips, rates

    def _continuation(self, messages: Sequence[dict[str, Any]]) -> str:
        """What the chat template writes after an assistant's end-of-turn when these messages follow."""
        answer = "the answer before"
        whole = self._template([{"role": "user", "content": ""}, {"role": "assistant", "content": answer}, *messages])
        return whole.partition(answer)[2].partition(self.family.end_of_turn)[2]

    def _template(self, messages: Sequence[dict[str, Any]]) -> str:
        for message in messages:
            parts = message["content"]
            texts = [parts] if isinstance(parts, str) else [part.get("text", "") for part in parts]
            for token in self.tokenizer.all_special_tokens:
                if any(token in text for text in texts):
                    raise ObservationError(
                        f"a {message['role']} text holds the special token {token}. Remove it: {texts}"
                    )
        return str(
            self.tokenizer.apply_chat_template(
                messages, chat_template=self.chat_template, tokenize=False, add_generation_prompt=True
            )
        )

    def _tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _process(self, clips: Sequence[np.ndarray], rates: Sequence[float]) -> list[_Video]:
        """Resize, normalise and cut every clip into patches. Equal clips, as a group's first ones are, share theirs."""
        for clip in clips:
            _check_clip(clip)
        padded = [_pad_frames(clip, self.temporal_patch) for clip in clips]
        hashes = [_frames_hash(clip) for clip in padded]
        by_shape: dict[tuple[int, ...], dict[str, Clip]] = defaultdict(dict)
        for clip, frames_hash in zip(padded, hashes, strict=True):
            by_shape[clip.shape][frames_hash] = clip
        patches: dict[str, tuple[Float[Tensor, "patch feature"], tuple[int, int, int]]] = {}
        for distinct in by_shape.values():
            pixels, grid = self._process_equal(list(distinct.values()))
            for frames_hash, pixel_values in zip(distinct, pixels, strict=True):
                # A copy of its own: a view would keep the whole batch in memory for as long as one prompt lives.
                patches[frames_hash] = pixel_values.clone(), grid
        return [self._video(key, *patches[key], fps) for key, fps in zip(hashes, rates, strict=True)]

    def _video(
        self, frames_hash: str, pixel_values: Float[Tensor, "patch feature"], grid: tuple[int, int, int], fps: float
    ) -> _Video:
        # The processor rounds this to float32 before it is multiplied into a position.
        seconds = float(np.float32(self.temporal_patch / fps))
        return _Video(pixel_values, grid, fps, seconds, _digest(f"{frames_hash} {grid} {seconds}".encode()))

    def _process_equal(self, clips: Sequence[Clip]) -> tuple[Float[Tensor, "clip patch feature"], tuple[int, int, int]]:
        """One call of the video processor for clips of one shape."""
        batch = self._video_processor(
            videos=[torch.from_numpy(clip) for clip in clips],
            video_metadata=[VideoMetadata(total_num_frames=len(clip), fps=self._fps) for clip in clips],
            do_sample_frames=False,
            size=self.family.pixel_bounds(self._min_pixels, self._max_pixels, len(clips[0])),
            return_tensors="pt",
        )
        time, height, width = batch["video_grid_thw"][0].tolist()
        return batch["pixel_values_videos"].view(len(clips), time * height * width, -1), (time, height, width)

    def _assemble(
        self, text: str, videos: Sequence[_Video], earlier: Prompt | None = None, response: Sequence[int] = ()
    ) -> Prompt:
        """Tokens, media and positions of a text, after an earlier prompt and its response where there are such."""
        ids: list[int] = [*earlier.token_ids, *response] if earlier else []
        media: list[Media] = list(earlier.media) if earlier else []
        remaining = iter(videos)
        for token in self._tokenize(text):
            if token != self._video_token:
                ids.append(token)
                continue
            video = next(remaining)
            expanded = self._tokenize(
                self.family.video_text(
                    video.grid_thw, merge=self._merge, temporal_patch=self.temporal_patch, fps=video.fps
                )
            )
            media.append(
                Media(
                    pixel_values=video.pixel_values,
                    grid_thw=video.grid_thw,
                    seconds_per_grid=video.seconds_per_grid,
                    offset=len(ids) + expanded.index(self._video_token),
                    num_tokens=expanded.count(self._video_token),
                    content_hash=video.content_hash,
                )
            )
            ids.extend(expanded)
        assert next(remaining, None) is None, "the chat template dropped a video"
        timed = [(grid, item.seconds_per_grid) for item in media for grid in self.family.position_grids(item.grid_thw)]
        positions = mrope_positions(
            ids,
            self._image_token,
            self._video_token,
            [grid for grid, _ in timed],
            [seconds for _, seconds in timed],
            self._merge,
            self._tokens_per_second,
        )
        return Prompt(tuple(ids), positions, tuple(media), _prompt_key(ids, media))


def _digest(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _frames_hash(clip: Clip) -> str:
    return _digest(repr(clip.shape).encode(), np.ascontiguousarray(clip).tobytes())


def _prompt_key(ids: Sequence[int], media: Sequence[Media]) -> str:
    return _digest(np.asarray(ids, dtype=np.int64).tobytes(), *(video.content_hash.encode() for video in media))


def _check_clip(clip: Any) -> None:
    if not isinstance(clip, np.ndarray) or clip.dtype != np.uint8 or clip.ndim != 4 or clip.shape[-1] != 3:
        found = f"{clip.dtype}{list(clip.shape)}" if isinstance(clip, np.ndarray) else type(clip).__name__
        raise ObservationError(f"observation clip is {found}. Return frames as uint8[T, H, W, 3], values 0 to 255.")
    if 0 in clip.shape:
        raise ObservationError(f"observation clip of shape {list(clip.shape)} is empty. Return at least one frame.")
    height, width = clip.shape[1:3]
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise ObservationError(
            f"frames of {height} x {width} pixels are over {MAX_ASPECT_RATIO} times as long as wide. Crop them."
        )


def _pad_frames(clip: Clip, multiple: int) -> UInt8[np.ndarray, "padded height width 3"]:
    """Repeat the last frame until the frames fill whole temporal patches."""
    missing = -len(clip) % multiple
    return np.concatenate([clip, np.repeat(clip[-1:], missing, axis=0)]) if missing else clip
