"""Frames and sizes under a budget, against values worked out by hand and the processor's own arithmetic."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize as processor_resize

from configs.errors import ConfigError
from data.budget import ClipSpec, Unshowable, plan_clip, smart_resize, video_token_budget

SPEC = ClipSpec(fps=2.0, max_frames=64, min_pixels=28 * 28, max_pixels=224 * 224)


def test_one_frame_is_shown_twice_and_said() -> None:
    """Development case D01: 224 / 14 = 16 patches a side, 16 * 16 / 4 = 64 tokens."""
    plan = plan_clip(1 / 30, 1, 224, 224, SPEC)
    assert (plan.num_frames, plan.height, plan.width) == (1, 224, 224)
    assert plan.grid_thw == (1, 8, 8)
    assert plan.num_tokens == 64
    assert plan.notes == ("one frame, shown 2 times",)


@pytest.mark.parametrize("most", [8, 64])
def test_one_frame_where_sixteen_are_wanted_is_one_warning(most: int) -> None:
    plan = plan_clip(1 / 30, 1, 224, 224, dataclasses.replace(SPEC, num_frames=16, max_frames=most))
    assert plan.num_frames == 1
    assert plan.notes == ("one frame, shown 2 times",)


def test_the_limit_that_holds_is_the_one_named() -> None:
    """3 frames there, 8 allowed, 16 wanted: the video is what limits."""
    plan = plan_clip(0.3, 3, 224, 224, dataclasses.replace(SPEC, num_frames=16, max_frames=8))
    assert plan.notes == ("16 frames wanted, 3 taken: the video has no more",)


def test_more_frames_than_there_are_become_those_there_are() -> None:
    """Development case D02: 3 frames, 16 wanted; two steps in time, the last frame twice."""
    plan = plan_clip(0.3, 3, 224, 224, dataclasses.replace(SPEC, num_frames=16))
    assert plan.num_frames == 3
    assert plan.grid_thw[0] == 2
    assert plan.notes == ("16 frames wanted, 3 taken: the video has no more",)
    assert plan.times_s == pytest.approx([0.0, 0.1, 0.2])


@pytest.mark.parametrize(("duration_s", "frames"), [(5.0, 10), (4.99, 10), (5.01, 10), (5.2, 11), (0.1, 1), (0.0, 1)])
def test_a_frame_is_taken_at_every_interval_that_has_begun(duration_s: float, frames: int) -> None:
    plan = plan_clip(duration_s, 1000, 224, 224, SPEC)
    assert plan.times_s == [place / 2 for place in range(frames)]


def test_at_most_max_frames_spread_over_the_whole_clip() -> None:
    plan = plan_clip(100.0, 3000, 224, 224, dataclasses.replace(SPEC, max_frames=8))
    assert plan.times_s == pytest.approx([0, 12.5, 25, 37.5, 50, 62.5, 75, 87.5])
    assert plan.notes == ("200 frames wanted, 8 taken: data.max_frames",)


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [
        # Development case D03. 332 x 27: 12 x 1 patches. 21 x 19: rounds to 1 x 1.
        (332, 27, (28, 336)),
        (21, 19, (28, 28)),
        # 641 x 359 = 230,119 pixels, shrunk by sqrt(230119 / 50176) = 2.1415: 299.3 x 167.6, down to multiples of 28
        (641, 359, (140, 280)),
        # 15420 x 690, by 14.562: 1058.9 x 47.4
        (15420, 690, (28, 1036)),
    ],
)
def test_odd_sizes_become_multiples_of_28(width: int, height: int, expected: tuple[int, int]) -> None:
    assert smart_resize(height, width, SPEC) == expected


@pytest.mark.parametrize(("width", "height"), [(4300, 20), (20, 4300), (0, 10)])
def test_frames_that_are_too_thin_are_refused(width: int, height: int) -> None:
    with pytest.raises(Unshowable, match=f"{width}x{height}"):
        smart_resize(height, width, SPEC)


SIDES = st.integers(1, 5000)


@settings(max_examples=300)
@given(SIDES, SIDES, st.integers(1, 30), st.integers(1, 40))
def test_the_processor_would_choose_the_same_and_changes_it_no_more(
    height: int, width: int, least: int, more: int
) -> None:
    spec = ClipSpec(min_pixels=least * 28 * 28, max_pixels=(least + more) * 28 * 28)
    if max(height, width) > 200 * min(height, width):
        return
    tall, wide = smart_resize(height, width, spec)
    assert tall % 28 == wide % 28 == 0
    assert 0 < tall * wide <= spec.max_pixels
    bounds = {"factor": 28, "min_pixels": spec.min_pixels, "max_pixels": spec.max_pixels}
    theirs = processor_resize(height, width, **bounds)
    if spec.min_pixels <= theirs[0] * theirs[1] <= spec.max_pixels and min(height, width) >= 28:
        assert (tall, wide) == theirs
    if tall * wide >= spec.min_pixels:
        assert processor_resize(tall, wide, **bounds) == (tall, wide)


# --- long videos: at most so many tokens


def test_1024_frames_lose_pixels_first() -> None:
    # 512 steps of 64 tokens are 32,768; 8,192 leave 16 a step: 4 x 4 merged patches of 28 pixels.
    spec = dataclasses.replace(SPEC, max_frames=1024, max_tokens=8192)
    plan = plan_clip(512.0, 15360, 224, 224, spec)
    assert (plan.num_frames, plan.height, plan.width, plan.num_tokens) == (1024, 112, 112, 8192)
    assert plan.notes == ("1024 frames of 224x224 reduced to 1024 frames of 112x112: at most 8192 tokens a video",)


def test_1024_frames_lose_frames_first_where_the_rule_says_so() -> None:
    spec = dataclasses.replace(SPEC, max_frames=1024, max_tokens=8192, gives_way="frames")
    plan = plan_clip(512.0, 15360, 224, 224, spec)
    assert (plan.num_frames, plan.height, plan.num_tokens) == (256, 224, 8192)  # 8192 / 64 steps of two frames
    assert plan.times_s[-1] == pytest.approx(510.0)  # still the whole clip


@pytest.mark.parametrize(("source_frames", "most"), [(1, 64), (30, 1)])
def test_one_frame_never_becomes_two_over_the_budget(source_frames: int, most: int) -> None:
    """64 tokens at 224 x 224, 40 allowed: 6 x 6 merged patches of 28 pixels, still one frame."""
    spec = dataclasses.replace(SPEC, num_frames=16, max_frames=most, max_tokens=40, gives_way="frames")
    plan = plan_clip(1.0, source_frames, 224, 224, spec)
    assert (plan.num_frames, plan.height, plan.width, plan.num_tokens) == (1, 168, 168, 36)
    assert plan.notes[-1] == "1 frames of 224x224 reduced to 1 frames of 168x168: at most 40 tokens a video"


def test_frames_follow_where_the_smallest_pixels_are_too_many() -> None:
    spec = dataclasses.replace(SPEC, min_pixels=112 * 112, max_frames=1024, max_tokens=1600)
    plan = plan_clip(512.0, 15360, 224, 224, spec)
    assert (plan.num_frames, plan.height, plan.num_tokens) == (200, 112, 1600)  # 100 steps of 16


def test_a_budget_below_one_step_is_an_error_with_a_remedy() -> None:
    spec = dataclasses.replace(SPEC, min_pixels=112 * 112, max_tokens=8)
    with pytest.raises(Unshowable, match=r"need 16 tokens; a video may have 8.*Raise data.max_video_tokens"):
        plan_clip(10.0, 300, 224, 224, spec)


@settings(max_examples=200)
@given(
    duration_s=st.floats(0, 5000),
    height=st.integers(28, 2000),
    width=st.integers(28, 2000),
    max_tokens=st.integers(1, 20000),
    frames_first=st.booleans(),
)
def test_a_plan_never_exceeds_its_tokens(
    duration_s: float, height: int, width: int, max_tokens: int, frames_first: bool
) -> None:
    spec = ClipSpec(max_frames=1024, max_tokens=max_tokens, gives_way="frames" if frames_first else "pixels")
    plan = plan_clip(duration_s, 10**6, height, width, spec)
    assert 1 <= plan.num_tokens <= max_tokens
    assert plan.num_tokens == -(-plan.num_frames // 2) * (plan.height // 28) * (plan.width // 28)


def test_a_videos_budget_is_what_text_and_response_leave() -> None:
    assert video_token_budget(1024, 24, 100, 2) == 450
    assert video_token_budget(100, 24, 100, 1) == 0


def test_bounds_that_contradict_one_another_are_refused() -> None:
    for least, most in ((1, 700), (50_000, 40_000)):
        with pytest.raises(ConfigError, match=r"agent\.max_pixels must be at least"):
            ClipSpec(min_pixels=least, max_pixels=most)
