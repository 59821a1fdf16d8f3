"""Rows with decoded clips as prompts: the plan's numbers are those the model's own processor comes to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent.prompts import Conversation, PromptRenderer
from data.budget import ClipSpec
from data.decode import DecodedClip, decode
from data.types import Prompt
from data.video_qa import VideoQARow, make_row
from tests.data.clips import make_video, steady

SPEC = ClipSpec(fps=2.0, max_frames=16, min_pixels=28 * 28, max_pixels=224 * 224)


@pytest.fixture(scope="module")
def renderer(tiny_model_dir: Path) -> PromptRenderer:
    return PromptRenderer(tiny_model_dir, fps=SPEC.fps, min_pixels=SPEC.min_pixels, max_pixels=SPEC.max_pixels)


def row(num_videos: int, question: str) -> VideoQARow:
    fields: dict[str, Any] = {"video": [f"{place}.mp4" for place in range(num_videos)], "question": question}
    return make_row(fields | {"answer": "x"}, row_id="q", source="", media_root=Path("/media"))


def render(renderer: PromptRenderer, asked: VideoQARow, clips: list[DecodedClip]) -> Prompt:
    parts = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "video"} for part in asked.parts]
    conversation = Conversation([{"role": "user", "content": parts}], [clip.frames for clip in clips])
    return renderer.render([conversation])[0]


def assert_as_planned(prompt: Prompt, clips: list[DecodedClip]) -> None:
    for media, clip in zip(prompt.media, clips, strict=True):
        time, height, width = clip.plan.grid_thw
        assert media.grid_thw == (time, 2 * height, 2 * width)
        assert media.num_tokens == clip.plan.num_tokens


def test_one_frame_has_64_tokens(renderer: PromptRenderer, tmp_path: Path) -> None:
    """Development case D01."""
    clip = decode(make_video(tmp_path / "a.mp4", [0.0], width=224, height=224), SPEC)
    prompt = render(renderer, row(1, "What colour?"), [clip])
    assert prompt.media[0].grid_thw == (1, 16, 16)
    assert prompt.media[0].num_tokens == 64


@pytest.mark.parametrize(("width", "height"), [(332, 27), (21, 19), (641, 359), (200, 1), (1000, 30)])
def test_odd_sizes_have_the_planned_tokens(renderer: PromptRenderer, tmp_path: Path, width: int, height: int) -> None:
    """Development case D03."""
    video = make_video(tmp_path / "a.mkv", steady(3, 2.0), width=width, height=height, codec="ffv1", pix_fmt="bgr0")
    clip = decode(video, SPEC)
    prompt = render(renderer, row(1, "What colour?"), [clip])
    assert_as_planned(prompt, [clip])
    assert clip.plan.grid_thw[0] == 2  # three frames, the last one twice


def test_two_videos_of_one_size_and_other_lengths(renderer: PromptRenderer, tmp_path: Path) -> None:
    """Development case D09."""
    clips = [decode(make_video(tmp_path / f"{count}.mp4", steady(count, 2.0)), SPEC) for count in (4, 8)]
    prompt = render(renderer, row(2, "<video><video>\nWhich is longer?"), clips)
    assert [media.grid_thw[0] for media in prompt.media] == [2, 4]
    assert_as_planned(prompt, clips)
    between = render(renderer, row(2, "First:\n<video>\nThen:\n<video>\nWhich is longer?"), clips)
    assert between.media[1].offset - (between.media[0].offset + between.media[0].num_tokens) > 5


@pytest.mark.parametrize(("num_videos", "question"), [(0, "What does `<video>` do?"), (1, "What does `\\<video>` do?")])
def test_a_tag_that_is_text_stays_text(
    renderer: PromptRenderer, tmp_path: Path, num_videos: int, question: str
) -> None:
    """Development case D08."""
    clips = [decode(make_video(tmp_path / "a.mp4", steady(4)), SPEC)] * num_videos
    prompt = render(renderer, row(num_videos, question), clips)
    assert "What does `<video>` do?" in renderer.tokenizer.decode(prompt.token_ids)
    assert len(prompt.media) == num_videos


def test_a_long_video_fits_its_tokens_whole(renderer: PromptRenderer, tmp_path: Path) -> None:
    spec = ClipSpec(fps=100.0, max_frames=1024, min_pixels=28 * 28, max_pixels=224 * 224, max_tokens=600)
    clip = decode(make_video(tmp_path / "a.mp4", steady(400, fps=100.0), width=112, height=112), spec)
    assert clip.plan.num_frames == 400
    assert clip.plan.notes == ("400 frames of 112x112 reduced to 400 frames of 28x28: at most 600 tokens a video",)
    prompt = render(renderer, row(1, "What happens?"), [clip])
    assert_as_planned(prompt, [clip])
    assert prompt.media[0].num_tokens == 200
