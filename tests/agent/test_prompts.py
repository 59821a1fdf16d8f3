from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoProcessor
from transformers.video_utils import VideoMetadata

from agent.positions import mrope_positions
from agent.prompts import Conversation, ObservationError, PromptRenderer
from data.types import Prompt

MakeClip = Callable[..., np.ndarray]
BOUNDS = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 64}


def conversation(clips: Sequence[np.ndarray], text: str = "go to the red box") -> Conversation:
    messages: list[dict[str, Any]] = []
    for _ in clips:
        messages.append({"role": "user", "content": [{"type": "video"}, {"type": "text", "text": text}]})
        messages.append({"role": "assistant", "content": "left"})
    return Conversation(messages[:-1], clips)


@pytest.fixture(scope="module")
def renderer(tiny_model_dir: Path) -> PromptRenderer:
    return PromptRenderer(tiny_model_dir, fps=2.0, **BOUNDS)


def hugging_face(model_dir: Path, talk: Conversation, fps: float, size: dict[str, int]) -> Any:
    """What the model's own processor makes of one conversation, in one call of its own."""
    processor = AutoProcessor.from_pretrained(model_dir)
    text = processor.apply_chat_template(talk.messages, tokenize=False, add_generation_prompt=True)
    metadata = [
        VideoMetadata(
            total_num_frames=len(clip), fps=fps, duration=len(clip) / fps, frames_indices=list(range(len(clip)))
        )
        for clip in talk.clips
    ]
    return processor(
        text=[text],
        videos=list(talk.clips),
        video_metadata=metadata,
        do_sample_frames=False,
        size=size,
        return_tensors="pt",
    )


def assert_equals(prompt: Prompt, batch: Any) -> None:
    assert list(prompt.token_ids) == batch["input_ids"][0].tolist()
    assert torch.equal(torch.cat([media.pixel_values for media in prompt.media]), batch["pixel_values_videos"])
    assert [list(media.grid_thw) for media in prompt.media] == batch["video_grid_thw"].tolist()
    if "second_per_grid_ts" in batch:
        seconds = torch.tensor([media.seconds_per_grid for media in prompt.media], dtype=torch.float32)
        assert torch.equal(seconds, torch.as_tensor(batch["second_per_grid_ts"], dtype=torch.float32))


@pytest.mark.parametrize("fps", [2.0, 3.0, 0.7])
@pytest.mark.parametrize(
    "shape",
    [(4, 64, 64), (1, 64, 64), (3, 56, 84), (2, 5, 7), (2, 1, 200), (2, 10, 1000), (5, 480, 640), (2, 71, 113)],
    ids=str,
)
def test_prompt_equals_hugging_faces(
    tiny_model_dir: Path, clip: MakeClip, shape: tuple[int, int, int], fps: float
) -> None:
    renderer = PromptRenderer(tiny_model_dir, fps=fps, **BOUNDS)
    talk = conversation([clip(0, *shape)])
    size = {"shortest_edge": BOUNDS["min_pixels"], "longest_edge": BOUNDS["max_pixels"]}
    assert_equals(renderer.render([talk])[0], hugging_face(tiny_model_dir, talk, fps, size))


def test_prompts_of_a_mixed_batch_equal_hugging_faces_one_by_one(
    tiny_model_dir: Path, renderer: PromptRenderer, clip: MakeClip
) -> None:
    small, wide = [clip(seed) for seed in range(4)], [clip(seed, 2, 56, 112) for seed in range(2)]
    talks = [
        conversation([small[0], wide[0], small[1]]),
        conversation([small[2]], "follow the moving ball"),
        conversation([wide[1], small[0]]),
        conversation([small[2]]),
        conversation([small[3]]),
    ]
    size = {"shortest_edge": BOUNDS["min_pixels"], "longest_edge": BOUNDS["max_pixels"]}
    for talk, prompt in zip(talks, renderer.render(talks), strict=True):
        assert_equals(prompt, hugging_face(tiny_model_dir, talk, 2.0, size))


def test_pixel_bounds_of_the_config_reach_the_processor(tiny_model_dir: Path, clip: MakeClip) -> None:
    talk = conversation([clip(0)])
    larger = PromptRenderer(tiny_model_dir, fps=2.0, min_pixels=112 * 112, max_pixels=BOUNDS["max_pixels"])
    size = {"shortest_edge": 112 * 112, "longest_edge": BOUNDS["max_pixels"]}
    prompt = larger.render([talk])[0]
    assert prompt.media[0].grid_thw == (2, 8, 8)
    assert_equals(prompt, hugging_face(tiny_model_dir, talk, 2.0, size))


def test_qwen3_prompt_with_time_stamps_equals_hugging_faces(tiny_qwen3_dir: Path, clip: MakeClip) -> None:
    renderer = PromptRenderer(tiny_qwen3_dir, fps=2.0, min_pixels=32 * 32, max_pixels=32 * 32 * 64)
    talk = conversation([clip(0), clip(1)])
    size = {"shortest_edge": 4 * 32 * 32, "longest_edge": 4 * 32 * 32 * 64}
    prompt = renderer.render([talk])[0]
    assert_equals(prompt, hugging_face(tiny_qwen3_dir, talk, 2.0, size))
    # Each temporal patch is a block of its own, so time advances by text alone.
    assert prompt.positions[0].tolist() == sorted(prompt.positions[0].tolist())


def test_media_say_where_their_placeholders_are(renderer: PromptRenderer, clip: MakeClip) -> None:
    prompt = renderer.render([conversation([clip(0), clip(1, 2, 28, 84)])])[0]
    pad = renderer.tokenizer.convert_tokens_to_ids("<|video_pad|>")
    runs = [prompt.token_ids[media.offset : media.offset + media.num_tokens] for media in prompt.media]
    assert [set(run) for run in runs] == [{pad}, {pad}]
    assert [len(run) for run in runs] == [2 * 2 * 2, 1 * 1 * 3]
    assert prompt.token_ids.count(pad) == 8 + 3


def test_positions_of_a_prompt_span_its_videos(renderer: PromptRenderer, clip: MakeClip) -> None:
    prompt = renderer.render([conversation([clip(0)])])[0]
    pad = renderer.tokenizer.convert_tokens_to_ids("<|video_pad|>")
    assert prompt.positions.tolist() == mrope_positions(prompt.token_ids, -1, pad, [(2, 4, 4)], [1.0], 2, 2.0).tolist()
    assert prompt.next_position == int(prompt.positions[0, -1]) + 1


def test_keys_are_equal_where_tokens_and_media_are(renderer: PromptRenderer, clip: MakeClip) -> None:
    one, same, other_text, other_clip = renderer.render(
        [
            conversation([clip(0)]),
            conversation([clip(0)]),
            conversation([clip(0)], "go to the blue box"),
            conversation([clip(1)]),
        ]
    )
    assert one.key == same.key == renderer.render([conversation([clip(0)])])[0].key
    assert len({one.key, other_text.key, other_clip.key}) == 3
    assert one.media[0].content_hash == same.media[0].content_hash == other_text.media[0].content_hash
    assert one.media[0].content_hash != other_clip.media[0].content_hash


def test_one_pixel_changes_the_content_hash(renderer: PromptRenderer, clip: MakeClip) -> None:
    changed = clip(0)
    changed[-1, -1, -1, -1] ^= 1
    one, other = renderer.render([conversation([clip(0)]), conversation([changed])])
    assert one.media[0].content_hash != other.media[0].content_hash
    assert one.key != other.key


def test_the_order_of_clips_is_part_of_the_key(renderer: PromptRenderer, clip: MakeClip) -> None:
    one, other = renderer.render([conversation([clip(0), clip(1)]), conversation([clip(1), clip(0)])])
    assert one.token_ids == other.token_ids
    assert one.key != other.key


def test_timing_is_part_of_the_content_hash(tiny_model_dir: Path, clip: MakeClip) -> None:
    slow, fast = (PromptRenderer(tiny_model_dir, fps=fps, **BOUNDS) for fps in (2.0, 4.0))
    talk = conversation([clip(0)])
    assert slow.render([talk])[0].media[0].content_hash != fast.render([talk])[0].media[0].content_hash


def test_an_odd_clip_equals_the_one_with_its_last_frame_repeated(renderer: PromptRenderer, clip: MakeClip) -> None:
    odd = clip(0, 3)
    one, other = renderer.render([conversation([odd]), conversation([np.concatenate([odd, odd[-1:]])])])
    assert one.key == other.key


def test_pixel_values_own_their_memory(renderer: PromptRenderer, clip: MakeClip) -> None:
    pixels = renderer.render([conversation([clip(seed)]) for seed in range(3)])[0].media[0].pixel_values
    assert pixels.untyped_storage().nbytes() == pixels.numel() * 4
    assert pixels.dtype == torch.float32


def test_clips_that_are_not_contiguous_are_read_rightly(renderer: PromptRenderer, clip: MakeClip) -> None:
    mirrored = clip(0)[:, :, ::-1]
    one, other = renderer.render([conversation([mirrored]), conversation([np.ascontiguousarray(mirrored)])])
    assert one.key == other.key


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.zeros((4, 64, 64, 3), np.float32), r"float32\[4, 64, 64, 3\].*uint8"),
        (np.zeros((64, 64, 3), np.uint8), r"uint8\[64, 64, 3\].*uint8\[T, H, W, 3\]"),
        (np.zeros((4, 3, 64, 64), np.uint8), r"uint8\[4, 3, 64, 64\]"),
        (np.zeros((0, 64, 64, 3), np.uint8), "is empty"),
        (np.zeros((2, 2, 402, 3), np.uint8), "2 x 402 pixels are over 200 times"),
    ],
    ids=["float", "image", "channels-first", "empty", "too-long"],
)
def test_a_clip_that_is_no_clip_is_refused(renderer: PromptRenderer, bad: np.ndarray, message: str) -> None:
    with pytest.raises(ObservationError, match=message):
        renderer.render([conversation([bad])])


@pytest.mark.parametrize("token", ["<|video_pad|>", "<|im_end|>"])
def test_a_text_with_a_special_token_is_refused(renderer: PromptRenderer, clip: MakeClip, token: str) -> None:
    with pytest.raises(ObservationError, match="holds the special token"):
        renderer.render([conversation([clip(0)], f"go to {token}")])


def test_clips_of_one_prompt_keep_their_own_frame_rates(renderer: PromptRenderer, clip: MakeClip) -> None:
    """4 frames at 1 and 4 a second: grid steps of 2 and 0.5 s, which are 4 and 1 positions at 2 positions a second."""
    same = clip(0, 4, 56, 56)
    talk = conversation([same, same])
    (prompt,) = renderer.render([Conversation(talk.messages, talk.clips, fps=[1.0, 4.0])])
    assert [media.seconds_per_grid for media in prompt.media] == [2.0, 0.5]
    assert prompt.media[0].content_hash != prompt.media[1].content_hash
    assert torch.equal(prompt.media[0].pixel_values, prompt.media[1].pixel_values)
    for media, jump in zip(prompt.media, (4, 1), strict=True):
        time = prompt.positions[0, media.offset : media.offset + media.num_tokens]
        assert sorted(set((time - time[0]).tolist())) == [0, jump]


def test_a_continued_prompt_keeps_the_rates_of_its_clips(renderer: PromptRenderer, clip: MakeClip) -> None:
    begin = conversation([clip(0, 4, 56, 56)])
    (first,) = renderer.render([Conversation(begin.messages, begin.clips, fps=[1.0])])
    later = conversation([clip(1, 4, 56, 56)])
    (second,) = renderer.extend([(first, ())], [Conversation(later.messages, later.clips, fps=[4.0])])
    assert [media.seconds_per_grid for media in second.media] == [2.0, 0.5]
    assert torch.equal(second.positions[:, : len(first.token_ids)], first.positions)
