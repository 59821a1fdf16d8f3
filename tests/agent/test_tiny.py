from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from agent.tiny_tokenizer import SPECIAL_TOKENS, WORDS, build_tokenizer


def test_every_word_is_one_token_with_and_without_a_space_before_it() -> None:
    tokenizer = build_tokenizer()
    split = [text for word in WORDS for text in (word, " " + word) if len(tokenizer.encode(text)) != 1]
    assert split == []
    assert len(tokenizer.encode("follow the moving ball")) == 4


def test_special_tokens_are_one_token_each_even_inside_text() -> None:
    tokenizer = build_tokenizer()
    for token in SPECIAL_TOKENS:
        assert tokenizer.encode(f"left{token}right")[1] == tokenizer.convert_tokens_to_ids(token)


def test_tokenizer_reads_any_text_back() -> None:
    tokenizer = build_tokenizer()
    for text in ("forward left", "  two spaces\n\n", "Größe 12, 東京 🙂", "turn_left"):
        assert tokenizer.decode(tokenizer.encode(text), clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize("fixture", ["tiny_model_dir", "tiny_qwen3_dir"])
def test_tiny_model_loads_as_any_hugging_face_model(fixture: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(fixture)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(folder)
    vocab_size = model.config.get_text_config().vocab_size
    assert vocab_size % 64 == 0
    assert 0 <= vocab_size - len(processor.tokenizer) < 64
    assert model.get_output_embeddings().weight.data_ptr() != model.get_input_embeddings().weight.data_ptr()
    assert model.config.video_token_id == processor.video_token_id
    assert model.generation_config.eos_token_id == processor.tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_chat_template_lays_out_roles_and_media_as_qwen_does() -> None:
    messages = [
        {"role": "system", "content": "you are a robot"},
        {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "go to"}, {"type": "image"}]},
        {"role": "assistant", "content": "left"},
    ]
    text = build_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nyou are a robot<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>go to"
        "<|vision_start|><|image_pad|><|vision_end|><|im_end|>\n"
        "<|im_start|>assistant\nleft<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
