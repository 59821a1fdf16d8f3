"""A Hugging Face vision-language model cut open at its layer boundaries.

The prefix tree runs a model a layer at a time, against keys and values that other rows computed. This module gives it
the stages (embed, each decoder layer, head) with stock Hugging Face modules inside, and knows nothing of trees,
schedules, vLLM or DeepSpeed. Written for Qwen2.5-VL; what differs between families stays in `SplitVLM.embed`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from configs.errors import UserError
from data.transfer import on_device
from data.types import Media, Vocabulary
from runtime.kernels import BranchMask, Kernels, best_kernels, use_kernels
from runtime.memory import Ledger
from runtime.tower import run_tower, tower_batches, tune_tower
from runtime.vision import VisionCache

KeyValue = tuple[Tensor, Tensor]
"""Keys and values of one layer, each (1, kv_head, token, head_dim)."""


class Rotary(NamedTuple):
    """Cosines and sines of a row's M-RoPE positions."""

    cos: Tensor
    sin: Tensor


class _LayerCache:
    """What a decoder layer takes for its KV cache: gives it the ancestors' keys and values, keeps the new ones."""

    def __init__(self, context: KeyValue | None) -> None:
        self.context = context
        self.own: KeyValue | None = None

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any) -> KeyValue:
        self.own = (keys, values)
        if self.context is None:
            return keys, values
        return torch.cat([self.context[0], keys], dim=2), torch.cat([self.context[1], values], dim=2)


class SplitVLM:
    """Stages of a causal vision-language model, and the version of its weights.

    Args:
        model: a Hugging Face `*ForConditionalGeneration` with `model.visual` and `model.language_model`.
        vocabulary: what may be sampled; the rest gets probability 0, as in the rollout engine.
        temperature: divides the logits, as in the rollout engine.
        vision: keeps features of clips; None keeps none.
    """

    def __init__(
        self, model: Any, vocabulary: Vocabulary, temperature: float = 1.0, vision: VisionCache | None = None
    ) -> None:
        self.model = model
        self.version = 0
        self.temperature = temperature
        self.vision = vision or VisionCache(0, Ledger())
        self.text: Any = self.model.model.language_model
        self.tower: Any = self.model.model.visual
        self.head: Any = self.model.lm_head
        weight = self.text.embed_tokens.weight
        self.device: torch.device = weight.device
        self.dtype: torch.dtype = weight.dtype
        self.hidden_size: int = weight.shape[1]
        self.num_layers = len(self.text.layers)
        self.log_dtype = torch.promote_types(self.dtype, torch.float32)
        self.mask = torch.zeros(self.head.weight.shape[0], dtype=self.log_dtype, device=self.device)
        self.mask[list(vocabulary.forbidden)] = float("-inf")
        self.table_parameters = _trainable([self.text.embed_tokens])
        self.tower_parameters = _trainable([self.tower])
        self.layer_parameters = [_trainable([layer]) for layer in self.text.layers]
        self.head_parameters = _trainable([self.text.norm, self.head])
        self.kernels: Kernels = use_kernels(model, best_kernels())

    def use_kernels(self, kernels: Kernels) -> None:
        """Run the layers with other kernels from now on; the function that they compute is the same."""
        self.kernels = use_kernels(self.model, kernels)

    def attention_mask(self, mask: BranchMask | None) -> Any:
        """A row's mask in the form that the kernels take."""
        if mask is None:
            return None
        mask = mask.to(self.device)
        return mask.blocks() if self.kernels == "fused" else mask.dense()

    @property
    def trains_tower(self) -> bool:
        return bool(self.tower_parameters)

    @torch.no_grad()
    def embed(
        self, token_ids: Int[Tensor, " token"], media: Sequence[Media], offsets: Sequence[int]
    ) -> Float[Tensor, "1 token hidden"]:
        """Embed tokens, each video's placeholders (from its offset in the row) replaced by the tower's features."""
        hidden: Tensor = self.text.embed_tokens(token_ids)
        if media:
            features = torch.cat([self.vision.features(self.tower, item) for item in media])
            hidden = hidden.index_copy(0, self._placeholders(media, offsets), features.to(hidden.dtype))
        return hidden[None]

    def embed_gradients(
        self,
        token_ids: Int[Tensor, " token"],
        media: Sequence[Media],
        offsets: Sequence[int],
        slope: Float[Tensor, "token hidden"],
    ) -> Iterator[tuple[Sequence[nn.Parameter], Sequence[Tensor | None]]]:
        """Parameters and their gradients, given that of what `embed` returned: the table's, then the tower's.

        A trained tower runs again, with a graph, a batch of clips at a time (`tower_batches`).
        """
        places = self._placeholders(media, offsets) if media else None
        if self.table_parameters:
            text = slope if places is None else slope.index_fill(0, places, 0.0)
            embedded = self.text.embed_tokens(token_ids)
            yield self.table_parameters, torch.autograd.grad(embedded, self.table_parameters, text)
        if places is None or not self.trains_tower:
            return
        batches = tower_batches(media)
        sizes = [sum(item.num_tokens for item in batch) for batch in batches]
        for batch, part in zip(batches, places.split(sizes), strict=True):
            features = run_tower(self.tower, batch)
            gradients = torch.autograd.grad(
                features, self.tower_parameters, slope[part].to(features.dtype), allow_unused=True
            )
            yield self.tower_parameters, gradients

    def _placeholders(self, media: Sequence[Media], offsets: Sequence[int]) -> Int[Tensor, " placeholder"]:
        """Places of videos' placeholders in a row."""
        places = [torch.arange(start, start + item.num_tokens) for item, start in zip(media, offsets, strict=True)]
        return on_device(torch.cat(places), self.device)

    def rotary(self, positions: Int[Tensor, "3 token"]) -> Rotary:
        """Rotary embedding of a row's positions."""
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        return Rotary(*self.text.rotary_emb(like, on_device(positions[:, None], self.device)))

    def layer(
        self, index: int, hidden: Tensor, rotary: Rotary, context: KeyValue | None, mask: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run one decoder layer; returns its output and the keys and values of the row's own tokens.

        Args:
            hidden: (1, token, hidden).
            context: the ancestors' keys and values, before the row's own.
            mask: what `attention_mask` made: who attends to which key (context, then own); None is plain causal.
        """
        cache = _LayerCache(context)
        output = self.text.layers[index](
            hidden, attention_mask=mask, position_embeddings=rotary, past_key_values=cache, use_cache=True
        )
        assert cache.own is not None, "the decoder layer did not use its cache"
        return (output[0] if isinstance(output, tuple) else output, *cache.own)

    @torch.no_grad()
    def keys_values(self, index: int, hidden: Tensor, rotary: Rotary) -> KeyValue:
        """Keys and values that `layer` makes of its input, without the rest of the layer."""
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb

        layer = self.text.layers[index]
        normed = layer.input_layernorm(hidden)
        projections = (layer.self_attn.k_proj(normed), layer.self_attn.v_proj(normed))
        keys, values = (x.unflatten(2, (-1, layer.self_attn.head_dim)).transpose(1, 2) for x in projections)
        # Fused kernels rotate in place, and want heads of queries too.
        return apply_rotary_pos_emb(keys.clone(), keys, *rotary)[1], values

    def logprobs(
        self, hidden: Float[Tensor, "target hidden"], targets: Int[Tensor, " target"]
    ) -> Float[Tensor, " target"]:
        """Log-probability of each target under the final hidden state that predicts it, over what may be sampled."""
        logits = self.head(self.text.norm(hidden)).to(self.log_dtype)
        if self.temperature != 1.0:
            logits = logits / self.temperature
        logits = logits + self.mask
        return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(dim=1)


def _trainable(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]


def load_vlm(model_dir: Path, dtype: torch.dtype, *, train_tower: bool, device: torch.device | None = None) -> Any:
    """Load a Hugging Face vision-language model for training; a frozen tower's parameters need no gradient.

    A folder with `random_weights.json` holds no weights: they are drawn on the device, from its seed.

    Raises:
        UserError: the folder's weights lack tensors of the model, or hold them in other shapes.
    """
    device = device or torch.device("cpu")
    marker = model_dir / "random_weights.json"
    if marker.is_file():
        model = _draw(model_dir, dtype, device, seed=json.loads(marker.read_text())["seed"])
    else:
        model = _read(model_dir, dtype)
    model = model.to(device).eval()  # eval: no dropout; gradients do not depend on it
    tune_tower(model.model.visual)
    for parameter in model.model.visual.parameters():
        parameter.requires_grad_(train_tower)
    return model


def _read(model_dir: Path, dtype: torch.dtype) -> Any:
    """The model in a folder, every tensor of it from there: Hugging Face draws the ones that it does not find."""
    from transformers import AutoModelForImageTextToText

    model, found = AutoModelForImageTextToText.from_pretrained(
        model_dir,
        dtype=dtype,
        attn_implementation="sdpa",
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # refused below, in our words
    )
    wrong = [f"{name} is missing" for name in sorted(found["missing_keys"])]
    wrong += [
        f"{name} is {tuple(held)}, not {tuple(needed)}" for name, held, needed in sorted(found["mismatched_keys"])
    ]
    if wrong:
        total = len(list(model.parameters()))
        raise UserError(
            f"model folder {model_dir}: its weights do not fit its config.json, {len(wrong)} of {total} tensors: "
            f"{', '.join(wrong[:3])}{', ...' if len(wrong) > 3 else ''}. Fetch the folder again, or set model.path."
        )
    return model


def _draw(model_dir: Path, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """A model of this config as Hugging Face initialises it, made on the device; global generators stay as they are."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(model_dir)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        return AutoModelForImageTextToText.from_config(config, dtype=dtype, attn_implementation="sdpa")
