"""Tiny vision-language models with random weights, built locally: the real classes, in sizes that train on a CPU.

`tiny:NAME?option=value&...` names one; the same name gives the same bytes. Knows nothing about tasks or training.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import (
    PreTrainedModel,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from agent.families import QWEN2_5_VL, QWEN3_VL
from agent.tiny_tokenizer import build_tokenizer
from configs.errors import ConfigError

HEAD_DIM = 32
"""Smallest attention head that vLLM's CPU kernels take (features)."""
EMBEDDING_STD = 0.1
HEAD_STD = 0.02
RESIDUAL_SCALE = 0.1
NUM_FREQUENCIES = 5
VOCAB_MULTIPLE = 64


@dataclass(frozen=True)
class TinySpec:
    """Sizes of a tiny model; the fields are the options of a `tiny:` name."""

    family: str
    hidden_size: int = 128
    layers: int = 4
    intermediate_size: int = 256
    vision_depth: int = 2
    vision_hidden_size: int = 64
    patch_size: int = 0
    """Side of a vision patch (pixels); 0 is the family's own."""
    seed: int = 0

    @classmethod
    def parse(cls, name: str) -> TinySpec:
        """Read `NAME` or `NAME?option=value&option=value`.

        Raises:
            ConfigError: an unknown name or option, a value that is not a whole number, or a size that does not fit.
        """
        family, _, query = name.partition("?")
        if family not in _BUILDERS:
            raise ConfigError(f"tiny model {family!r} does not exist. Use one of: {', '.join(sorted(_BUILDERS))}.")
        known = [field.name for field in fields(cls) if field.name != "family"]
        options: dict[str, int] = {}
        for option, value in parse_qsl(query, keep_blank_values=True):
            if option not in known:
                raise ConfigError(f"tiny:{name}: unknown option {option!r}. Use one of: {', '.join(known)}.")
            if not value.isdecimal():
                raise ConfigError(f"tiny:{name}: {option} is {value!r}. Use a whole number.")
            options[option] = int(value)
        spec = cls(family, **options)
        spec._check(name)
        return spec

    def _check(self, name: str) -> None:
        for option in ("layers", "intermediate_size", "vision_depth"):
            if getattr(self, option) < 1:
                raise ConfigError(f"tiny:{name}: {option} is {getattr(self, option)}. Use 1 or more.")
        for option in ("hidden_size", "vision_hidden_size"):
            size = getattr(self, option)
            if size < HEAD_DIM or size % HEAD_DIM:
                raise ConfigError(f"tiny:{name}: {option} is {size}. Use a multiple of {HEAD_DIM}.")

    @property
    def num_heads(self) -> int:
        return self.hidden_size // HEAD_DIM

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads // 2 if self.num_heads % 2 == 0 else 1

    @property
    def canonical_name(self) -> str:
        """The name with every option written out, so that equal models have equal names."""
        options = {key: value for key, value in asdict(self).items() if key != "family"}
        return self.family + "?" + "&".join(f"{key}={value}" for key, value in options.items())


def build_tiny(spec: TinySpec, folder: Path) -> None:
    """Write config, weights (float32), tokenizer and processor into `folder`. Leaves the global RNG as it was."""
    tokenizer = build_tokenizer()
    with torch.random.fork_rng(devices=[]):
        model, processor = _BUILDERS[spec.family](spec, tokenizer)
    initialise(model, torch.Generator().manual_seed(spec.seed))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


@torch.no_grad()
def initialise(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Draw every parameter so that AdamW at 1e-3 learns soon, a frozen vision tower included.

    Matrices have variance 1 / fan-in. Those that write into a residual stream of the language model are far smaller,
    so that it starts near the identity, but not 0: then the matrices before them would have no gradient at first.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.normal_(0.0, 0.02, generator=generator) if name.endswith("bias") else parameter.fill_(1.0)
        elif name.endswith("patch_embed.proj.weight"):
            parameter.copy_(smooth_filters(parameter.shape, generator))
        else:
            parameter.normal_(0.0, _std(name, parameter, model), generator=generator)


def _std(name: str, parameter: Tensor, model: PreTrainedModel) -> float:
    """Standard deviation of a matrix at the start, by the place that its name tells."""
    fan_in = math.prod(parameter.shape[1:])
    if "embed_tokens" in name:
        return EMBEDDING_STD
    if "lm_head" in name:
        return HEAD_STD
    if "merger" in name and name.endswith(("mlp.2.weight", "linear_fc2.weight")):
        return 2 * EMBEDDING_STD / math.sqrt(fan_in)  # GELU halves the size: visual tokens as large as words
    if name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight", "mlp.linear_fc2.weight")):
        vision = "visual." in name
        depth = model.config.vision_config.depth if vision else model.config.text_config.num_hidden_layers
        return (1.0 if vision else RESIDUAL_SCALE) / math.sqrt(2 * depth * fan_in)
    return 1 / math.sqrt(fan_in)


def smooth_filters(shape: torch.Size, generator: torch.Generator) -> Float[Tensor, "filter color time height width"]:
    """Random filters of low spatial frequency and norm 1.

    White noise would answer to the same object differently at every offset; these keep what a patch's colours are,
    about where in it, and how they change in time, which is what a tower that is never trained must pass on.
    """
    num_filters, colors, frames, side, _ = shape
    pixel, frequency = torch.arange(side) + 0.5, torch.arange(NUM_FREQUENCIES)
    waves = torch.cos(math.pi * frequency[:, None] * pixel / side)  # (frequency, pixel)
    decay = 1 / (1 + frequency[:, None] ** 2 + frequency**2)  # (frequency, frequency)
    strength = torch.randn(num_filters, colors, frames, *decay.shape, generator=generator) * decay
    filters = torch.einsum("octij,ih,jw->octhw", strength, waves, waves)
    return filters / filters.flatten(1).norm(dim=1).view(-1, 1, 1, 1, 1)


def _common(spec: TinySpec, tokenizer: Qwen2Tokenizer) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Config entries that the families share: of the language model, the vision tower and the whole."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
    text = {
        "vocab_size": math.ceil(len(tokenizer) / VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "max_position_embeddings": 1 << 15,
        "tie_word_embeddings": False,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    vision = {
        "depth": spec.vision_depth,
        "hidden_size": spec.vision_hidden_size,
        "num_heads": spec.vision_hidden_size // HEAD_DIM,
        "intermediate_size": 2 * spec.vision_hidden_size,
        "out_hidden_size": spec.hidden_size,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
    }
    whole = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": False,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    return text, vision, whole


def _rope(sections: list[int], **extra: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections, **extra}


def _qwen2_5_vl(spec: TinySpec, tokenizer: Qwen2Tokenizer) -> tuple[PreTrainedModel, ProcessorMixin]:
    text, vision, whole = _common(spec, tokenizer)
    patch_size = spec.patch_size or 14
    config = Qwen2_5_VLConfig(
        text_config=text | {"use_sliding_window": False, "rope_parameters": _rope([4, 6, 6])},
        vision_config=vision
        | {
            "patch_size": patch_size,
            "window_size": 8 * patch_size,
            "fullatt_block_indexes": [spec.vision_depth - 1],
            "tokens_per_second": 2,
            "hidden_act": "silu",
        },
        **whole,
    )
    pixels = {"min_pixels": (2 * patch_size) ** 2, "max_pixels": 64 * (2 * patch_size) ** 2, "patch_size": patch_size}
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**pixels),
        video_processor=Qwen2VLVideoProcessor(**pixels),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )
    return Qwen2_5_VLForConditionalGeneration(config), processor


def _qwen3_vl(spec: TinySpec, tokenizer: Qwen2Tokenizer) -> tuple[PreTrainedModel, ProcessorMixin]:
    text, vision, whole = _common(spec, tokenizer)
    rope = _rope([6, 5, 5], mrope_interleaved=True)
    config = Qwen3VLConfig(
        text_config=text | {"head_dim": HEAD_DIM, "rope_parameters": rope},
        vision_config=vision
        | {
            "patch_size": 16,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": list(range(min(spec.layers, spec.vision_depth) - 1)),
        },
        **whole,
    )
    image_size = {"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 64}
    video_size = {"shortest_edge": 2 * 32 * 32, "longest_edge": 2 * 32 * 32 * 64}
    half = [0.5, 0.5, 0.5]
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=image_size, patch_size=16, image_mean=half, image_std=half),
        video_processor=Qwen3VLVideoProcessor(size=video_size),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )
    return Qwen3VLForConditionalGeneration(config), processor


_BUILDERS: dict[str, Callable[[TinySpec, Qwen2Tokenizer], tuple[PreTrainedModel, ProcessorMixin]]] = {
    QWEN2_5_VL.model_type: _qwen2_5_vl,
    QWEN3_VL.model_type: _qwen3_vl,
}
