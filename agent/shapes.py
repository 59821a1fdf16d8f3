"""Models of real sizes without weights: for measuring speed and memory where no checkpoint can be had.

The folder holds a config, our small tokenizer and a processor, and a marker that says how to draw the weights; the
runtime draws them on its device when it loads the folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import Qwen2_5_VLConfig, Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

from agent.tiny_tokenizer import build_tokenizer
from configs.errors import ConfigError

RANDOM_WEIGHTS = "random_weights.json"
"""Marker in a folder whose weights are drawn at load."""

TEXT_SHAPES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl_3b": {
        "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
        "intermediate_size": 11008, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "qwen2_5_vl_7b": {
        "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Sizes of the language models that Qwen published under these names."""


def build_shape(name: str, folder: Path, seed: int = 0) -> None:
    """Write the folder of a shape.

    Raises:
        ConfigError: there is no such shape.
    """
    if name not in TEXT_SHAPES:
        raise ConfigError(f"random model {name!r} does not exist. Use one of: {', '.join(TEXT_SHAPES)}.")
    text = TEXT_SHAPES[name]
    tokenizer = build_tokenizer()
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
    ends = {"bos_token_id": None, "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    vision = {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
        "out_hidden_size": text["hidden_size"], "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "hidden_act": "silu",
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    sizes = {"max_position_embeddings": 128000, "rms_norm_eps": 1e-6, "rope_parameters": rope}
    config = Qwen2_5_VLConfig(
        text_config=text | sizes | ends,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=text["tie_word_embeddings"],
    )
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    config.save_pretrained(folder)
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(),
        video_processor=Qwen2VLVideoProcessor(),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )
    processor.save_pretrained(folder)
    (folder / RANDOM_WEIGHTS).write_text(json.dumps({"seed": seed}))
