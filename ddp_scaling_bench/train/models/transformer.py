"""A GPT-like decoder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..options import TrainOptions
from .spec import Blocks, DataShape, ModelSpec, classes_of, compute_type, wrong_shape

#: (minimum number of parameters, vocabulary), chosen so that the embedding is a minor part of the network.
_VOCABULARIES = ((10**8, 32_768), (3 * 10**6, 8_192), (10**5, 256), (0, 32))
#: (minimum number of parameters, width of an attention head); the model's width is a multiple of the head's.
#: Tensor Cores are fastest with multiples of 128.
_HEADS = ((10**8, 128), (10**6, 32), (10**5, 8), (0, 2))
#: Usual ratio of width to number of layers (GPT-3: from 64 at 125M parameters to 128 at 175B).
_ASPECT = 64.0
#: Among shapes whose size has at most this relative error, the most usual ratio is preferred.
_TOLERANCE = 0.05


@dataclass(frozen=True)
class DecoderShape:
    """The dimensions of a decoder; the number of parameters is that of a :class:`Transformer`."""

    #: Number of matrices of the size of the vocabulary.
    EMBEDDINGS: ClassVar[int] = 1

    vocabulary: int
    width: int
    layers: int
    heads: int

    @property
    def parameters(self) -> int:
        """The number of parameters: tied embeddings, layers of 12w² + 13w, and the last norm (2w)."""
        width = self.width
        return self.vocabulary * width + self.layers * (12 * width**2 + 13 * width) + 2 * width


Shape = TypeVar("Shape", bound=DecoderShape)


def decoder_shape(kind: type[Shape], parameters: int, *, vocabulary: int | None = None) -> Shape:
    """Choose the dimensions of a decoder of a kind with about ``parameters`` parameters.

    At least 1,000 parameters are possible, and the result differs by at most 10 %. Among shapes within 5 %,
    the one with the most usual ratio of width to layers is returned. Without a ``vocabulary``, that is the
    number of tokens in the data, one is chosen that suits the size.
    """
    tokens = vocabulary or next(size for least, size in _VOCABULARIES if parameters >= least)
    step = next(width for least, width in _HEADS if parameters >= least)

    def cost(shape: Shape) -> tuple[float, float]:
        error = abs(shape.parameters / parameters - 1)
        aspect_error = abs(math.log(shape.width / shape.layers / _ASPECT))
        return (max(error, _TOLERANCE), aspect_error)

    shapes = []  # for each number of layers, those just below and above the wanted size
    for layers in range(1, 257):
        square, linear = 12 * layers, kind.EMBEDDINGS * tokens + 13 * layers + 2
        exact = (math.sqrt(linear**2 + 4 * square * parameters) - linear) / (2 * square)
        for multiple in (math.floor(exact / step), math.floor(exact / step) + 1):
            width = max(1, multiple) * step
            shapes.append(kind(tokens, width, layers, width // step))
    return min(shapes, key=cost)


class Linear(nn.Linear):
    """A linear layer that computes in the type of the activations."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the layer's outputs."""
        bias = None if self.bias is None else self.bias.to(hidden.dtype)
        return functional.linear(hidden, self.weight.to(hidden.dtype), bias)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.mixed = Linear(shape.width, 3 * shape.width)
        self.out = Linear(shape.width, shape.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return outputs [batch, time, width]; each token attends to itself and to earlier tokens."""
        batch, time, width = hidden.shape
        parts = self.mixed(hidden).split(width, dim=-1)  # backward joins their gradients with one copy
        query, key, value = (one.view(batch, time, self.heads, -1).transpose(1, 2) for one in parts)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.out(attended.transpose(1, 2).reshape(batch, time, width))
        return result


class LayerNorm(nn.LayerNorm):
    """Layer normalisation of activations in their type; torch computes the sums in fp32."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the normalised activations."""
        weight, bias = (one.to(hidden.dtype) for one in (self.weight, self.bias))
        return functional.layer_norm(hidden, self.normalized_shape, weight, bias, self.eps)


class DecoderLayer(nn.Module):
    """Attention and an MLP of four times the width, each with layer normalisation and a shortcut."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        width = shape.width
        self.before_attention, self.before_wide = LayerNorm(width), LayerNorm(width)
        self.attention = Attention(shape)
        self.wide = nn.Sequential(Linear(width, 4 * width), nn.GELU(), Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the layer's outputs [batch, time, width]."""
        hidden = hidden + self.attention(self.before_attention(hidden))
        result: Tensor = hidden + self.wide(self.before_wide(hidden))
        return result


class Transformer(nn.Module):
    """A GPT-like decoder with tied embeddings and parameter-free sinusoidal positions.

    All activations have one type, ``dtype``, up to the scores.
    """

    positions: Tensor

    def __init__(self, shape: DecoderShape, dtype: torch.dtype, *, seq_len: int, recompute: bool) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = Blocks([DecoderLayer(shape) for _ in range(shape.layers)], recompute=recompute)
        self.norm = LayerNorm(shape.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        # The buffer is not persistent, because a checkpoint contains only trained values.
        self.register_buffer("positions", _sinusoids(seq_len, shape.width), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores [batch, time, vocabulary] for the next token."""
        hidden = self.embedding(tokens).to(self.dtype)
        hidden = hidden + self.positions[: tokens.shape[1]].to(hidden.dtype)
        hidden = self.norm(self.layers(hidden))
        return functional.linear(hidden, self.embedding.weight.to(hidden.dtype))


def _sinusoids(length: int, width: int) -> Tensor:
    """Return position encodings [length, width] (Vaswani et al., 2017, 3.5), scaled like the embeddings."""
    position = torch.arange(length, dtype=torch.float32)[:, None]
    rate = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10_000.0) / width))
    waves = torch.stack((torch.sin(position * rate), torch.cos(position * rate)), dim=2).reshape(length, -1)
    return 0.02 * waves[:, :width]


def tokens_of(options: TrainOptions, shape: DataShape) -> int:
    """Return the number of tokens of the data, or raise a SetupError if it is no text."""
    if len(shape.inputs) != 1 or shape.targets != shape.inputs:
        raise wrong_shape(options.model, shape, "tokens [samples, time] and as many targets")
    return classes_of(shape)


def build(options: TrainOptions, shape: DataShape) -> nn.Module:
    """Return the decoder whose size is near to the option ``parameters``."""
    tokens = tokens_of(options, shape)
    assert options.parameters is not None, "a language model has a default size"
    dimensions = decoder_shape(DecoderShape, options.parameters, vocabulary=tokens)
    recompute = options.activation_checkpointing
    return Transformer(dimensions, compute_type(options), seq_len=shape.inputs[0], recompute=recompute)


def sample(options: TrainOptions, *, kind: type[DecoderShape] = DecoderShape) -> DataShape:
    """Return the shape of a sequence of tokens, which is also the shape of its targets."""
    parameters, seq_len = options.parameters, options.seq_len
    assert parameters is not None, "a language model has a default size"
    assert seq_len is not None, "a language model has a default length"
    return DataShape((seq_len,), (seq_len,), decoder_shape(kind, parameters).vocabulary)


SPEC = ModelSpec("transformer", "tokens", build, sample, options=("parameters", "seq_len"), converts=True)
