"""A GPT-like decoder whose size follows from the number of parameters that was asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.workload.models.blocks import Blocks

#: (fewest parameters, vocabulary): the embedding stays a minor share of the network.
_VOCABULARIES = ((10**8, 32_768), (3 * 10**6, 8_192), (10**5, 256), (0, 32))
#: (fewest parameters, width of a head): widths are multiples of it.
_HEADS = ((10**8, 64), (10**6, 32), (10**5, 8), (0, 2))
#: Width per layer of published decoders (GPT-3's range from 64 at 125M to 128 at 175B).
_ASPECT = 64.0
#: How far a size may be from what was asked, before a less usual shape is taken.
_TOLERANCE = 0.05


@dataclass(frozen=True)
class Shape:
    """A decoder's dimensions."""

    vocabulary: int
    width: int
    layers: int
    heads: int

    @property
    def parameters(self) -> int:
        """The parameters: tied embeddings, layers of 12w² + 13w, and the last norm (2w)."""
        return (
            self.vocabulary * self.width
            + self.layers * (12 * self.width**2 + 13 * self.width)
            + 2 * self.width
        )


def shape_for(parameters: int, *, vocabulary: int | None = None) -> Shape:
    """Return the shape nearest to ``parameters``; of those within 5 %, the one most usually built.

    Args:
        parameters: how many are wanted, from 1,000 (met within 10 %).
        vocabulary: the tokens of given data; None chooses by size.
    """
    tokens = vocabulary or next(size for least, size in _VOCABULARIES if parameters >= least)
    step = next(width for least, width in _HEADS if parameters >= least)

    def cost(shape: Shape) -> tuple[float, float]:
        error = abs(shape.parameters / parameters - 1)
        unusual = abs(math.log(shape.width / shape.layers / _ASPECT))
        return (max(error, _TOLERANCE), unusual)

    return min(_shapes(parameters, tokens=tokens, step=step), key=cost)


def _shapes(parameters: int, *, tokens: int, step: int) -> Iterator[Shape]:
    """Yield the widths on both sides of the wanted size for every number of layers."""
    for layers in range(1, 257):
        square, linear = 12 * layers, tokens + 13 * layers + 2
        exact = (math.sqrt(linear**2 + 4 * square * parameters) - linear) / (2 * square)
        for multiple in (math.floor(exact / step), math.floor(exact / step) + 1):
            width = max(1, multiple) * step
            yield Shape(tokens, width, layers, width // step)


class Attention(nn.Module):
    """Causal self-attention of several heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.mixed = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [batch, time, width] where each token saw only those before it."""
        batch, time, width = hidden.shape
        parts = (
            self.mixed(hidden).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        )
        query, key, value = parts.unbind(0)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.out(seen.transpose(1, 2).reshape(batch, time, width))
        return result


class Layer(nn.Module):
    """Attention and a fourfold wider perceptron, each after a norm and beside a shortcut."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.before_attention, self.before_wide = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(shape)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the layer's outputs [batch, time, width]."""
        hidden = hidden + self.attention(self.before_attention(hidden))
        result: Tensor = hidden + self.wide(self.before_wide(hidden))
        return result


class Transformer(nn.Module):
    """A decoder with tied embeddings and sinusoidal positions, which need no parameters."""

    positions: Tensor

    def __init__(self, shape: Shape, *, seq_len: int, recompute: bool) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = Blocks([Layer(shape) for _ in range(shape.layers)], recompute=recompute)
        self.norm = nn.LayerNorm(shape.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        # Not persistent: a checkpoint holds what was trained.
        self.register_buffer("positions", _sinusoids(seq_len, shape.width), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return a score per token of the vocabulary [batch, time, vocabulary]."""
        hidden = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        hidden = self.norm(self.layers(hidden))
        return functional.linear(hidden, self.embedding.weight)


def _sinusoids(length: int, width: int) -> Tensor:
    """Return position encodings [length, width] (Vaswani et al., 2017, 3.5), as small as embeddings."""
    place = torch.arange(length, dtype=torch.float32)[:, None]
    rate = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10_000.0) / width))
    waves = torch.stack((torch.sin(place * rate), torch.cos(place * rate)), dim=2).reshape(length, -1)
    return 0.02 * waves[:, :width]
