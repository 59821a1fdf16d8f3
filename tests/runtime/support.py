"""A tiny model, random prompts and groups, and the plain per-sequence computation that every schedule is compared with.

The reference uses nothing of `runtime/` but the loading of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agent.models import resolve_model
from agent.positions import mrope_positions
from data.types import Group, Media, Prompt, Response, Rollout, Turn, Vocabulary
from runtime.vlm import load_vlm

PATCH_FEATURES = 3 * 2 * 14 * 14


class ExactNorm(nn.Module):
    """RMSNorm in the dtype of its input; Hugging Face's rounds through float32."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.weight, self.epsilon = stock.weight, stock.variance_epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.epsilon)


def exact_vision_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The tower's rotary embedding in the dtype of its input; Hugging Face's rounds through float32."""

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos.unsqueeze(-2) + torch.cat([-second, first], dim=-1) * sin.unsqueeze(-2)

    return rotate(q), rotate(k)


def load_tiny(
    cache: Path, dtype: torch.dtype, *, train_tower: bool = True, exact: bool = False, name: str = "tiny:qwen2_5_vl"
) -> Any:
    """The tiny model; `exact` replaces what rounds through float32 (the caller patches the tower's rotary)."""
    model = load_vlm(resolve_model(name, cache), dtype, train_tower=train_tower)
    if exact:
        for path, module in list(model.named_modules()):
            if type(module).__name__.endswith("RMSNorm"):
                parent, _, leaf = path.rpartition(".")
                setattr(model.get_submodule(parent), leaf, ExactNorm(module))
    return model


def vocabulary_of(model: Any) -> Vocabulary:
    config = model.config
    media = (config.video_token_id, config.image_token_id, config.vision_start_token_id, config.vision_end_token_id)
    return Vocabulary(end_of_turn=config.text_config.eos_token_id, forbidden=media)


def random_prompt(model: Any, generator: torch.Generator, num_text: int, frames: int = 2) -> Prompt:
    """Some text, a video of `frames` temporal patches of 4x4 patches, more text."""
    config = model.config
    grid = (frames, 4, 4)
    num_video = frames * 4
    text = torch.randint(0, 250, (num_text,), generator=generator).tolist()
    token_ids = (*text[:3], *[config.video_token_id] * num_video, *text[3:])
    positions = mrope_positions(token_ids, config.image_token_id, config.video_token_id, [grid], [1.0], 2, 2.0)
    pixels = torch.randn(frames * 16, PATCH_FEATURES, generator=generator)
    key = f"{text}-{float(pixels.sum())}"
    media = Media(pixels, grid, 1.0, offset=3, num_tokens=num_video, content_hash=key)
    return Prompt(token_ids, positions, (media,), key)


def random_response(generator: torch.Generator, length: int) -> Response:
    token_ids = tuple(torch.randint(0, 250, (length,), generator=generator).tolist())
    logprobs = tuple((-torch.rand(length, generator=generator)).tolist())
    return Response(token_ids, logprobs, "length", policy_version=0)


def random_group(
    model: Any, generator: torch.Generator, index: int, lengths: Sequence[Sequence[int]], rewards: Sequence[float]
) -> Group:
    """A group whose first turn is one prompt for all and whose later turns differ; `lengths[rollout][turn]`."""
    first = random_prompt(model, generator, num_text=9)
    rollouts = []
    for reward, turns in zip(rewards, lengths, strict=True):
        prompts = [first, *(random_prompt(model, generator, 7 + turn, frames=1) for turn in range(1, len(turns)))]
        record = tuple(
            Turn(prompt, random_response(generator, length)) for prompt, length in zip(prompts, turns, strict=True)
        )
        rollouts.append(Rollout(f"episode {index}", record, reward, success=reward > 0, truncated=False))
    return Group(index, tuple(rollouts))


def extend_prompt(model: Any, generator: torch.Generator, prompt: Prompt, response: Response) -> Prompt:
    """The prompt of the next turn of a chain: what was, the response, and an observation with a video."""
    observation = random_prompt(model, generator, num_text=6, frames=1)
    start = len(prompt.token_ids) + len(response.token_ids)
    token_ids = (*prompt.token_ids, *response.token_ids, *observation.token_ids)
    media = (*prompt.media, *(replace(item, offset=item.offset + start) for item in observation.media))
    config = model.config
    positions = mrope_positions(
        token_ids,
        config.image_token_id,
        config.video_token_id,
        [item.grid_thw for item in media],
        [1.0] * len(media),
        2,
        2.0,
    )
    return Prompt(token_ids, positions, media, f"{prompt.key} {observation.key} {response.token_ids}")


def random_chain_group(
    model: Any, generator: torch.Generator, index: int, lengths: Sequence[Sequence[int]], rewards: Sequence[float]
) -> Group:
    """A group whose rollouts share their first prompt and then grow, each its own history."""
    first = random_prompt(model, generator, num_text=9)
    rollouts = []
    for reward, turns in zip(rewards, lengths, strict=True):
        prompt, record = first, []
        for length in turns:
            record.append(Turn(prompt, random_response(generator, length)))
            prompt = extend_prompt(model, generator, prompt, record[-1].response)
        rollouts.append(Rollout(f"episode {index}", tuple(record), reward, success=reward > 0, truncated=False))
    return Group(index, tuple(rollouts))


@contextmanager
def stock_tower(model: Any) -> Iterator[None]:
    """Inside, the vision tower is Hugging Face's own."""
    tower = model.model.visual
    attention, embed = tower.config._attn_implementation, vars(tower.patch_embed).pop("forward")
    tower.config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        tower.config._attn_implementation, tower.patch_embed.forward = attention, embed


def naive_logprobs(model: Any, vocabulary: Vocabulary, prompt: Prompt, response: Response) -> Tensor:
    """Log-probabilities of one response by one whole Hugging Face forward."""
    token_ids = torch.tensor([[*prompt.token_ids, *response.token_ids]], device=model.device)
    length, start = len(response.token_ids), len(prompt.token_ids)
    after = (prompt.next_position + torch.arange(length))[None].expand(3, -1)
    with stock_tower(model):
        logits = model(
            input_ids=token_ids,
            attention_mask=torch.ones_like(token_ids),
            position_ids=torch.cat([prompt.positions, after], dim=1)[:, None].to(model.device),
            pixel_values_videos=torch.cat([item.pixel_values for item in prompt.media]).to(model.device, model.dtype),
            video_grid_thw=torch.tensor([item.grid_thw for item in prompt.media], device=model.device),
            use_cache=False,
        ).logits[0]
    logits[:, list(vocabulary.forbidden)] = float("-inf")
    logprobs = logits.log_softmax(dim=-1)[start - 1 : start - 1 + length]
    return logprobs.gather(1, torch.tensor(response.token_ids, device=model.device)[:, None])[:, 0]


def naive_gradients(
    model: Any, vocabulary: Vocabulary, groups: Sequence[Group], loss: Callable[[Group, int, Turn, Tensor], Tensor]
) -> dict[str, Tensor]:
    """Gradients of the summed loss, one response after another; `loss(group, rollout, turn, logprobs)`."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    totals = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
    for group in groups:
        for index, rollout in enumerate(group.rollouts):
            for turn in rollout.turns:
                value = loss(group, index, turn, naive_logprobs(model, vocabulary, turn.prompt, turn.response))
                gradients = torch.autograd.grad(value, list(named.values()), allow_unused=True)
                for name, gradient in zip(named, gradients, strict=True):
                    if gradient is not None:
                        totals[name] += gradient
    return totals


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected|; 0 where both are 0."""
    scale = float(expected.norm())
    return float((actual - expected).norm()) / scale if scale else float(actual.norm())
