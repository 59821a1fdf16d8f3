"""Compares what vLLM holds of a prompt with what the trainer is fed, and the numbers both make of it.

Reads a request as vLLM's scheduler holds it (token ids, placeholders, grids, pixels) and lets vLLM's model compute its
own M-RoPE positions from that, scores the sampled tokens with the trainer, and asks both again with another video in
the same place. Changes nothing that a run sees. Knows nothing about where prompts come from or which differences are
too large.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from data.types import Group, Media, Prompt, Response, Rollout, Sampling, Turn, TurnKey
from runtime.prefix_tree import encode, score
from runtime.rollplex import Rollplex
from runtime.vllm_engine import RolloutEngine, turn_key
from runtime.work import GroupWork


@dataclass(frozen=True, eq=False)
class Held:
    """A request as vLLM holds it."""

    token_ids: tuple[int, ...]
    positions: torch.Tensor
    """M-RoPE positions of the prompt by vLLM's own arithmetic, (3, token)."""
    next_position: int
    """Position of the first response token."""
    placeholders: tuple[tuple[int, int], ...]
    """First token and number of tokens of each video."""
    grids: tuple[tuple[int, int, int], ...]
    pixels: torch.Tensor | None
    """Patches of all videos, or their features where those were handed over; None without a video."""


@dataclass(frozen=True)
class Examined:
    """One prompt on both sides."""

    num_tokens: int
    num_placeholders: int
    grids: tuple[tuple[int, int, int], ...]
    ids_equal: bool
    placeholders_equal: bool
    grids_equal: bool
    positions_equal: bool
    pixels_max_diff: float
    """Largest difference of a pixel value, or infinite where even the shapes differ."""
    logprob_max_diff: float
    """Largest difference of a sampled token's log-probability."""
    trainer_effect: float
    """Largest change of the trainer's log-probabilities when the videos are replaced; infinite without a video, not a
    number where they tell nothing (`CERTAIN`)."""
    vllm_effect: float
    """The same of vLLM's first token, infinite where it samples another one."""


CERTAIN = 0.02
"""Log-probabilities that are all nearer to 0 than this, with the video and with another, may hide that it is seen."""


def examine(runtime: Rollplex, prompts: Sequence[Prompt]) -> list[Examined]:
    """Put prompts through both sides, as pixels and as features of the trainer's tower."""
    found: list[Examined] = []
    others = [_with_other_videos(prompt) for prompt in prompts]
    as_pixels = _ask(runtime, [*prompts, *others], as_features=False)
    as_features = _ask(runtime, prompts, as_features=True)
    for place, (prompt, other) in enumerate(zip(prompts, others, strict=True)):
        held, response = as_pixels[place]
        logprobs = _trainer_logprobs(runtime, prompt, response)
        replaced = _trainer_logprobs(runtime, other, response)
        again = as_features[place][1]
        diffs = [
            _difference(logprobs, torch.tensor(response.behaviour_logprobs)),
            _difference(_trainer_logprobs(runtime, prompt, again), torch.tensor(again.behaviour_logprobs)),
        ]
        found.append(
            Examined(
                num_tokens=len(prompt.token_ids),
                num_placeholders=sum(item.num_tokens for item in prompt.media),
                grids=tuple(item.grid_thw for item in prompt.media),
                ids_equal=held.token_ids == prompt.token_ids,
                placeholders_equal=held.placeholders == tuple((m.offset, m.num_tokens) for m in prompt.media),
                grids_equal=held.grids == tuple(item.grid_thw for item in prompt.media),
                positions_equal=torch.equal(held.positions.cpu(), prompt.positions)
                and held.next_position == prompt.next_position,
                pixels_max_diff=_difference(held.pixels, _pixels(prompt.media)) if prompt.media else 0.0,
                logprob_max_diff=max(diffs),
                trainer_effect=_effect(logprobs, replaced) if prompt.media else float("inf"),
                vllm_effect=_first_change(response, as_pixels[len(prompts) + place][1])
                if prompt.media
                else float("inf"),
            )
        )
    runtime.engine.publish(runtime.policy_version)  # drops what the examination left in vLLM's caches
    runtime.vision.forget(runtime.actor.tower)
    return found


def _ask(runtime: Rollplex, prompts: Sequence[Prompt], *, as_features: bool) -> list[tuple[Held, Response]]:
    """Let vLLM answer prompts, and read what it holds of each."""
    engine, rollout = runtime.engine, runtime.config.rollout
    engine.publish(runtime.policy_version)
    responses: dict[TurnKey, Response] = {}
    for place, prompt in enumerate(prompts):
        features = runtime.features(prompt) if as_features else None
        # The same seed for a prompt and its twin with other videos: then equal distributions give equal tokens.
        sampling = Sampling(rollout.max_tokens, rollout.temperature, seed=0)
        engine.submit(TurnKey(place, 0, 0), prompt, sampling, features)
    held = _held(engine)
    while engine.has_unfinished():
        responses |= dict(engine.step())
    return [(held[key], responses[key]) for key in sorted(responses)]


def _held(engine: RolloutEngine) -> dict[TurnKey, Held]:
    """Every request of the scheduler."""
    model = engine.runner.get_model()
    return {turn_key(name): _read(request, model) for name, request in engine.core.scheduler.requests.items()}


def _read(request: Any, model: Any) -> Held:
    features = sorted(request.mm_features, key=lambda feature: feature.mm_position.offset)
    items = [feature.data for feature in features]
    pixels = [item["pixel_values_videos" if "pixel_values_videos" in item else "video_embeds"].data for item in items]
    token_ids = list(request.prompt_token_ids)
    positions, delta = model.get_mrope_input_positions(token_ids, features)
    return Held(
        token_ids=tuple(token_ids),
        positions=positions,
        next_position=len(token_ids) + delta,
        placeholders=tuple((feature.mm_position.offset, feature.mm_position.length) for feature in features),
        grids=tuple(tuple(item["video_grid_thw"].data.tolist()) for item in items),
        pixels=torch.cat(pixels) if pixels else None,
    )


def _trainer_logprobs(runtime: Rollplex, prompt: Prompt, response: Response) -> torch.Tensor:
    """Log-probabilities that the trainer gives a response, by the stages that training uses."""
    rollout = Rollout("", (Turn(prompt, response),), 0.0, success=False, truncated=False)
    (unit,) = GroupWork.of(Group(0, (rollout,)), replace(runtime.packing, chain=False)).units
    (answer,) = unit.responses
    before = _finish(encode(runtime.actor, unit.prompts, [], keep="nothing"))
    encoding = _finish(encode(runtime.actor, answer.row, [before], keep="nothing"))
    return score(runtime.actor, encoding, [before]).logprobs.float().cpu()


def _finish(steps: Generator[None, None, Any]) -> Any:
    """Run to the end, and return what it returns."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        return end.value


def _with_other_videos(prompt: Prompt) -> Prompt:
    """The same prompt with each video's colours inverted."""
    media = tuple(
        replace(item, pixel_values=-item.pixel_values, content_hash=f"inverted {item.content_hash}")
        for item in prompt.media
    )
    return replace(prompt, media=media, key=f"inverted {prompt.key}")


def _pixels(media: Sequence[Media]) -> torch.Tensor:
    return torch.cat([item.pixel_values for item in media])


def _difference(first: torch.Tensor | None, second: torch.Tensor) -> float:
    if first is None or first.shape != second.shape:
        return float("inf")
    return float((first.float().cpu() - second.float().cpu()).abs().max())


def _effect(logprobs: torch.Tensor, replaced: torch.Tensor) -> float:
    """Largest change of a response's log-probabilities; not a number where the response is certain both times."""
    if float(torch.stack([logprobs, replaced]).abs().max()) < CERTAIN:
        return float("nan")
    return _difference(logprobs, replaced)


def _first_change(response: Response, replaced: Response) -> float:
    if response.token_ids[0] != replaced.token_ids[0]:
        return float("inf")
    return _effect(torch.tensor(response.behaviour_logprobs[:1]), torch.tensor(replaced.behaviour_logprobs[:1]))
