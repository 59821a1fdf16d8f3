"""Segments of decided tokens, packed into rows, encoded once and differentiated exactly.

A segment attends to its ancestors and to itself. Several segments go through the model as one packed row, against the
keys and values of the rows that hold their ancestors. `encode` and `backward` are generators that stop after each
layer, so that a caller can run something else in between; what they compute does not depend on when they are resumed.
Knows nothing of rollouts, losses or optimizers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor, nn

from data.transfer import on_device
from data.types import Media
from runtime.kernels import BranchMask
from runtime.memory import LOGITS_CHUNK
from runtime.vlm import KeyValue, Rotary, SplitVLM

Keep = Literal["graph", "inputs", "nothing"]
"""What an encoding keeps for its backward: each layer's graph, its input (to recompute), or nothing (no backward)."""


class StaleEncoding(RuntimeError):
    """An encoding was used with weights other than those that computed it."""


@dataclass(frozen=True, eq=False)
class Segment:
    """A run of decided tokens.

    `targets[0]` is predicted by the parent's last token and `targets[i]` by this segment's token i - 1, so a leaf
    response leaves its last token out of `token_ids`: nothing attends to it.
    """

    token_ids: tuple[int, ...]
    positions: Int[Tensor, "3 token"]
    parent: Segment | None = None
    media: tuple[Media, ...] = ()
    targets: tuple[int, ...] = ()
    key: str = ""
    """Digest of the prompt that this is the whole of; empty otherwise."""

    def __post_init__(self) -> None:
        assert len(self.token_ids) >= len(self.targets) - 1, "a target without a token that predicts it"
        assert self.parent is not None or not self.targets, "a root predicts nothing of its own"

    @property
    def num_readouts(self) -> int:
        """Final hidden states that are read: those that predict a target, or the last where there are no targets."""
        return len(self.targets) - 1 if self.targets else 1

    def ancestors(self) -> Iterable[Segment]:
        """Parent first, root last."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent


@dataclass(frozen=True, eq=False)
class Row:
    """Segments that go through the model together, and the rows that hold their ancestors (root first)."""

    segments: tuple[Segment, ...]
    context: tuple[Row, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def media(self) -> list[Media]:
        return [item for segment in self.segments for item in segment.media]

    def starts(self) -> list[int]:
        """Index in the row of each segment's first token."""
        starts, position = [], 0
        for segment in self.segments:
            starts.append(position)
            position += len(segment.token_ids)
        return starts

    def readouts(self) -> list[int]:
        """Indices in the row of the tokens whose final hidden state is read."""
        indices: list[int] = []
        for segment, start in zip(self.segments, self.starts(), strict=True):
            first = start if segment.targets else start + len(segment.token_ids) - 1
            indices += range(first, first + segment.num_readouts)
        return indices

    def mask(self) -> BranchMask | None:
        """Who attends to whom: same branch and not later. None where that is plain causal."""
        if not self.context and len(self.segments) == 1:
            return None
        seen = [segment for row in self.context for segment in row.segments]
        branch = torch.zeros(len(self.segments), len(seen) + len(self.segments), dtype=torch.bool)
        index = {id(segment): i for i, segment in enumerate(seen)}
        for i, segment in enumerate(self.segments):
            branch[i, len(seen) + i] = True
            for ancestor in segment.ancestors():
                if id(ancestor) in index:
                    branch[i, index[id(ancestor)]] = True
        lengths = torch.tensor([len(segment.token_ids) for segment in (*seen, *self.segments)])
        key_segment = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        query_segment = key_segment[len(key_segment) - self.num_tokens :] - len(seen)
        key_order = (torch.arange(len(key_segment)) - (len(key_segment) - self.num_tokens)).clamp(min=-1)
        return BranchMask(branch, query_segment, key_segment, key_order)

    def sources(self) -> list[int]:
        """For each target, in order, the readout that predicts it: the context rows' readouts first, then the row's."""
        last: dict[int, int] = {}  # of a segment without targets, its one readout
        count = 0
        for row in self.context:
            for segment in row.segments:
                count += segment.num_readouts
                last[id(segment)] = count - 1
        sources: list[int] = []
        for segment in self.segments:
            if segment.targets:
                sources += [last[id(segment.parent)], *range(count, count + segment.num_readouts)]
            count += segment.num_readouts
        return sources

    def targets(self) -> list[int]:
        return [token for segment in self.segments for token in segment.targets]


class GradientBuffer:
    """Parameter gradients, summed in float32 (float64 for a float64 model) in one flat tensor.

    `padded_to` lengthens the tensor to the optimizer's flat buffer, whose order the parameters must have.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], padded_to: int = 0) -> None:
        numel = sum(parameter.numel() for parameter in parameters)
        dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        self.flat = torch.zeros(max(numel, padded_to), dtype=dtype, device=parameters[0].device)
        self.views: dict[nn.Parameter, Tensor] = {}
        offset = 0
        for parameter in parameters:
            self.views[parameter] = self.flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()

    def add(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                self.views[parameter].add_(gradient)


@dataclass(eq=False)
class _Layer:
    """One layer of an encoding: its input, and where the graph is kept its outputs with the graph on them."""

    hidden_in: Tensor
    context: KeyValue | None = None
    outputs: tuple[Tensor, Tensor, Tensor] | None = None


@dataclass(eq=False)
class Encoding:
    """A row's boundary (keys and values of every layer, final hidden states), and what its backward needs."""

    row: Row
    version: int
    keep: Keep
    rotary: Rotary
    mask: Any
    layers: list[_Layer] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    final: Tensor | None = None
    """Final hidden states at the row's readouts, before the last norm: (readout, hidden)."""
    grad_keys: list[Tensor | None] = field(default_factory=list)
    grad_values: list[Tensor | None] = field(default_factory=list)
    grad_final: Tensor | None = None


def _check_fresh(model: SplitVLM, encodings: Iterable[Encoding]) -> None:
    for encoding in encodings:
        if encoding.version != model.version:
            raise StaleEncoding(
                f"an encoding of policy version {encoding.version} was used at version {model.version}: "
                "encodings must be dropped when a new version is published"
            )


def _context_at(layer: int, context: Sequence[Encoding], *, leaf: bool) -> KeyValue | None:
    """Keys and values of all context rows at a layer, as leaves of a new graph where gradients must come back."""
    if not context:
        return None
    keys = torch.cat([encoding.keys[layer] for encoding in context], dim=2)
    values = torch.cat([encoding.values[layer] for encoding in context], dim=2)
    return (keys.requires_grad_(), values.requires_grad_()) if leaf else (keys, values)


def encode(
    model: SplitVLM, row: Row, context: Sequence[Encoding] = (), *, keep: Keep, graph_layers: int = 0
) -> Generator[None, None, Encoding]:
    """Forward a row's own tokens against its ancestors' keys and values; stops after the embedding and each layer.

    Args:
        context: encodings of `row.context`, in the same order.
        graph_layers: with `keep="inputs"`, the last layers whose graph is kept all the same (count).

    Raises:
        StaleEncoding: a context encoding was computed with other weights.
    """
    encoding = _begin(model, row, model.version, keep)
    first_graph = 0 if keep == "graph" else model.num_layers - graph_layers
    hidden = model.embed(*_embedded(model, row))
    for index in range(model.num_layers if row.num_tokens else 0):
        yield
        _check_fresh(model, [encoding, *context])
        layer = _run_layer(model, encoding, index, hidden.detach(), context, graph=index >= first_graph)
        assert layer.outputs is not None
        hidden, keys, values = layer.outputs
        encoding.keys.append(keys.detach())
        encoding.values.append(values.detach())
        if index < first_graph:
            layer.outputs = layer.context = None
        if keep != "nothing":
            encoding.layers.append(layer)
    return _finish(encoding, hidden.detach()[0, on_device(row.readouts(), model.device)])


def reuse(
    model: SplitVLM, row: Row, version: int, inputs: deque[list[Tensor]], final: Tensor
) -> Generator[None, None, Encoding]:
    """Encoding of a row of roots that was computed elsewhere: only keys and values are made; stops after each layer.

    Args:
        version: of the weights that computed it.
        inputs: of each layer, (1, token, hidden) for each segment; taken out as they are used.
        final: hidden states after the last layer at the row's readouts, (readout, hidden).

    Raises:
        StaleEncoding: it was computed with other weights.
    """
    assert not row.context, "only a row without ancestors is computed elsewhere"
    encoding = _begin(model, row, version, "inputs")
    for index in range(model.num_layers):
        yield
        _check_fresh(model, [encoding])
        parts = inputs.popleft()
        hidden = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        keys, values = model.keys_values(index, hidden, encoding.rotary)
        encoding.layers.append(_Layer(hidden))
        encoding.keys.append(keys)
        encoding.values.append(values)
    return _finish(encoding, final)


def _begin(model: SplitVLM, row: Row, version: int, keep: Keep) -> Encoding:
    """An encoding without its layers."""
    positions = torch.cat([segment.positions for segment in row.segments], dim=1)
    return Encoding(row, version, keep, model.rotary(positions), model.attention_mask(row.mask()))


def _finish(encoding: Encoding, final: Tensor) -> Encoding:
    """The encoding with its last hidden states, and no gradients on its boundary yet."""
    encoding.final = final
    encoding.grad_keys = [None] * len(encoding.keys)
    encoding.grad_values = [None] * len(encoding.keys)
    return encoding


def _embedded(model: SplitVLM, row: Row) -> tuple[Tensor, list[Media], list[int]]:
    """What a row's embedding is made of: its tokens, its media, and where their placeholders begin."""
    token_ids = [token for segment in row.segments for token in segment.token_ids]
    offsets = [
        start + item.offset for segment, start in zip(row.segments, row.starts(), strict=True) for item in segment.media
    ]
    return on_device(token_ids, model.device), row.media, offsets


def _run_layer(
    model: SplitVLM, encoding: Encoding, index: int, hidden: Tensor, context: Sequence[Encoding], *, graph: bool
) -> _Layer:
    with torch.set_grad_enabled(graph):
        layer = _Layer(hidden.requires_grad_(graph), _context_at(index, context, leaf=graph))
        layer.outputs = model.layer(index, layer.hidden_in, encoding.rotary, layer.context, encoding.mask)
    return layer


@dataclass(eq=False)
class Scores:
    """Log-probabilities of a row's targets, and the final hidden states that predict them."""

    logprobs: Tensor
    """(target,), a leaf that takes a gradient where the encoding keeps what backward needs."""
    hidden: Tensor
    """(target, hidden)."""
    targets: Tensor
    """(target,), token ids."""
    sources: Tensor
    """(target,), the readout that each was read from: the context rows' first, then the row's."""


def score(model: SplitVLM, encoding: Encoding, context: Sequence[Encoding]) -> Scores:
    """Log-probabilities of the targets of an encoded row.

    Raises:
        StaleEncoding: an encoding was computed with other weights.
    """
    _check_fresh(model, [encoding, *context])
    sources, targets = (
        on_device(indices, model.device) for indices in (encoding.row.sources(), encoding.row.targets())
    )
    hidden = torch.cat([_final(item) for item in [*context, encoding]])[sources]
    with torch.no_grad():
        parts = [model.logprobs(*chunk) for chunk in _chunks(hidden, targets)]
    return Scores(torch.cat(parts).requires_grad_(encoding.keep != "nothing"), hidden, targets, sources)


def _chunks(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Tensors of one length, a few targets at a time: logits of a long row are never all in memory."""
    return zip(*(tensor.split(LOGITS_CHUNK) for tensor in tensors), strict=True)


def _final(encoding: Encoding) -> Tensor:
    assert encoding.final is not None, "the encoding is not finished"
    return encoding.final


def backward_scores(
    model: SplitVLM, encoding: Encoding, context: Sequence[Encoding], scores: Scores, loss: Tensor, sink: GradientBuffer
) -> None:
    """Differentiate a loss of `scores.logprobs`: the head's parameters, and the readouts of the row and its context."""
    (slopes,) = torch.autograd.grad(loss, scores.logprobs)
    parts = []
    for hidden, targets, slope in _chunks(scores.hidden, scores.targets, slopes):
        leaf = hidden.detach().requires_grad_()
        gradients = torch.autograd.grad(model.logprobs(leaf, targets), [leaf, *model.head_parameters], slope)
        parts.append(gradients[0])
        sink.add(model.head_parameters, gradients[1:])
    items = [*context, encoding]
    sizes = [len(_final(item)) for item in items]
    gradient = torch.zeros(sum(sizes), model.hidden_size, dtype=model.log_dtype, device=model.device)
    gradient.index_add_(0, scores.sources, torch.cat(parts).to(model.log_dtype))
    for item, part in zip(items, gradient.split(sizes), strict=True):
        item.grad_final = part if item.grad_final is None else item.grad_final.add_(part)


def backward(
    model: SplitVLM, encoding: Encoding, context: Sequence[Encoding], sink: GradientBuffer
) -> Generator[None, None, None]:
    """Differentiate an encoded row; its children must have been differentiated before. Stops after each layer.

    Uses the gradients that the row's own scores and its children left on its boundary. Adds to the boundaries of the
    context and to the parameters, and frees the encoding's layers as it goes.

    Raises:
        StaleEncoding: an encoding was computed with other weights.
    """
    assert encoding.keep != "nothing", "the encoding kept nothing to differentiate"
    hidden_gradient: Tensor | None = None
    if encoding.grad_final is not None and encoding.row.num_tokens:
        hidden_gradient = encoding.grad_final.new_zeros(1, encoding.row.num_tokens, model.hidden_size)
        hidden_gradient[0, on_device(encoding.row.readouts(), model.device)] = encoding.grad_final
    for index in reversed(range(len(encoding.layers))):
        _check_fresh(model, [encoding, *context])
        layer = encoding.layers.pop()
        if layer.outputs is None:
            layer = _run_layer(model, encoding, index, layer.hidden_in, context, graph=True)
        hidden_gradient = _backward_layer(model, encoding, index, layer, hidden_gradient, context, sink)
        yield
    if hidden_gradient is not None:
        slope = hidden_gradient[0].to(model.dtype)
        for parameters, gradients in model.embed_gradients(*_embedded(model, encoding.row), slope):
            sink.add(parameters, gradients)
            yield


def _backward_layer(
    model: SplitVLM,
    encoding: Encoding,
    index: int,
    layer: _Layer,
    hidden_gradient: Tensor | None,
    context: Sequence[Encoding],
    sink: GradientBuffer,
) -> Tensor | None:
    """Differentiate one layer; returns the gradient of its input."""
    assert layer.outputs is not None
    pairs = zip(layer.outputs, (hidden_gradient, encoding.grad_keys[index], encoding.grad_values[index]), strict=True)
    outputs, gradients = [], []
    for output, gradient in pairs:
        if gradient is not None:
            outputs.append(output)
            gradients.append(gradient.to(output.dtype))
    encoding.grad_keys[index] = encoding.grad_values[index] = None
    if not outputs:
        return None
    parameters = model.layer_parameters[index]
    inputs = [layer.hidden_in, *(layer.context or ())]
    results = torch.autograd.grad(outputs, [*inputs, *parameters], gradients, allow_unused=True)
    sink.add(parameters, results[len(inputs) :])
    if layer.context is not None:
        sizes = [item.keys[index].shape[2] for item in context]
        for name, result in zip(("grad_keys", "grad_values"), results[1:3], strict=True):
            for item, part in zip(context, _split(result, sizes), strict=True):
                getattr(item, name)[index] = _accumulate(getattr(item, name)[index], part)
    return results[0]


def _split(gradient: Tensor | None, sizes: list[int]) -> Sequence[Tensor | None]:
    return [None] * len(sizes) if gradient is None else gradient.split(sizes, dim=2)


def _accumulate(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """Sum in float32 or wider."""
    if gradient is None:
        return total
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    return wide.clone() if total is None else total.add_(wide)
