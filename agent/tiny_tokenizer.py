"""A byte-level BPE tokenizer of Qwen's kind for tiny models, trained on a small word list of ours.

Words of action names and instructions are single tokens, with and without a space before them, so prompts stay short.
Knows nothing about models.
"""

from __future__ import annotations

import json

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

_WORD_LIST = """
system user assistant you are an agent a the robot
forward left right stop wait back backward up down turn move look go noop done
pick place open close push pull drop grab
red green blue yellow purple orange cyan magenta white black grey gray brown pink
box ball cube key door wall cone pillar cylinder sphere lamp chair table room floor object target goal
to follow find reach touch enter leave near next through behind front of in on at and or then is not it
moving still fast slow first last big small
what where which who how many when does did do was color colour shape
action actions answer instruction task step video frame frames choose one yes no with for from
zero two three four five six seven eight nine ten
"""
WORDS = tuple(_WORD_LIST.split())

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part['type'] == 'video' -%}
<|vision_start|><|video_pad|><|vision_end|>
{%- else -%}
{{ part['text'] }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen's tokenizers cut text into words before byte pairs are merged."""


def build_tokenizer() -> Qwen2Tokenizer:
    """Train the tokenizer on `WORDS` alone; the same words give the same ids in every process."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    # Every word occurs at least `min_frequency` times, so merging goes on until each of them is one token.
    trainer = trainers.BpeTrainer(
        vocab_size=1 << 16,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    bpe.train_from_iterator([variant for word in WORDS for variant in (word, " " + word)] * 2, trainer)
    trained = json.loads(bpe.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=[tuple(pair) for pair in trained["merges"]],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=None,
        additional_special_tokens=list(SPECIAL_TOKENS),
        chat_template=CHAT_TEMPLATE,
        model_max_length=1 << 15,
    )
