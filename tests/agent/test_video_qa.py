from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.video_qa import VideoQAPolicy
from configs.errors import ConfigError
from configs.schema import AgentConfig, DataConfig, RunConfig, RuntimeConfig
from data.decode import DecodedClip, decode
from data.video_qa import VideoQARow, make_row
from tests.data.clips import make_video, steady

MakePolicy = Callable[..., VideoQAPolicy]


@pytest.fixture(scope="module")
def make(tiny_model_dir: Path) -> MakePolicy:
    def policy(agent: dict[str, Any] | None = None, **sections: Any) -> VideoQAPolicy:
        return VideoQAPolicy(RunConfig(agent=AgentConfig(**(agent or {})), **sections), tiny_model_dir)

    return policy


def row(question: str, answer: object = "yes", videos: int = 1, **fields: Any) -> VideoQARow:
    given = {"video": [f"{place}.mp4" for place in range(videos)], "question": question, "answer": answer} | fields
    return make_row(given, row_id="q", source="", media_root=Path("/media"))


def clip(policy: VideoQAPolicy, folder: Path, fps: float = 2.0, frames: int = 4) -> DecodedClip:
    return decode(make_video(folder / f"{fps}.mp4", steady(frames, fps)), policy.spec)


def prompt_text(policy: VideoQAPolicy, asked: VideoQARow, clips: list[DecodedClip]) -> str:
    (prompt,) = policy.render([asked], [clips])
    return str(policy._renderer.tokenizer.decode(prompt.token_ids)).replace("<|video_pad|>" * 2, "")


def test_options_follow_the_question_and_the_video_comes_first(make: MakePolicy, tmp_path: Path) -> None:
    policy = make({"system_prompt": "be brief"})
    asked = row("which colour?", "blue", options=["red", "blue"])
    assert prompt_text(policy, asked, [clip(policy, tmp_path)]) == (
        "<|im_start|>system\nbe brief<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|vision_end|>which colour?\nA. red\nB. blue<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert policy.text(policy.label(asked)) == "B"
    assert policy.label(asked)[-1] == policy.vocabulary.end_of_turn


def test_the_template_surrounds_the_text_with_videos_in_their_places(make: MakePolicy, tmp_path: Path) -> None:
    policy = make({"instruction_template": "{instruction}\nanswer in one word"})
    asked = row("first:\n<video>\nthen:\n<video>\nwhich is longer?", videos=2)
    text = prompt_text(policy, asked, [clip(policy, tmp_path), clip(policy, tmp_path, 4.0)])
    user = text.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
    video = "<|vision_start|><|vision_end|>"
    assert user == f"first:\n{video}then:\n{video}which is longer?\nanswer in one word"


def test_a_template_for_actions_is_refused(make: MakePolicy) -> None:
    with pytest.raises(ConfigError, match="Use \\{instruction\\} alone"):
        make({"instruction_template": "{instruction} {actions}"})


def test_each_clip_is_shown_at_the_rate_it_was_sampled_at(make: MakePolicy, tmp_path: Path) -> None:
    """Two frames of a video of 4 s are 2 s apart; at two frames a second, a frame is there for half of one."""
    policy = make(data=DataConfig(num_frames=2))
    long = decode(make_video(tmp_path / "long.mp4", steady(8, 2.0)), policy.spec)
    short = decode(make_video(tmp_path / "short.mp4", steady(2, 2.0)), policy.spec)
    (prompt,) = policy.render([row("which is longer?", videos=2)], [[long, short]])
    assert [media.seconds_per_grid for media in prompt.media] == [4.0, 1.0]


def test_prompts_within_the_token_budget_fit_the_model(make: MakePolicy, tmp_path: Path) -> None:
    policy = make(data=DataConfig(fps=30.0), runtime=RuntimeConfig(max_model_len=100))
    asked = row("which is longer?", videos=2)
    budget = policy.token_budget(asked)
    video = make_video(tmp_path / "a.mp4", steady(60, 30.0), width=112, height=112)
    shown = decode(video, policy.spec.__class__(**vars(policy.spec) | {"max_tokens": budget}))
    (prompt,) = policy.render([asked], [[shown, shown]])
    assert 0.7 * 100 < len(prompt.token_ids) + RunConfig().rollout.max_tokens <= 100


def test_a_text_that_leaves_no_room_bounds_the_video_all_the_same(make: MakePolicy) -> None:
    policy = make(runtime=RuntimeConfig(max_model_len=20))
    assert policy.token_budget(row("a " * 100)) == 1
