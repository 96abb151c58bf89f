"""A decoder like Llama: RMSNorm, rotary positions, SwiGLU, no biases, and an output layer of its own.

Source: Touvron et al., "LLaMA", 2023, 2.2. All activations have one type, up to the scores.
"""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..options import TrainOptions
from .spec import Blocks, DataShape, ModelSpec, compute_type
from .transformer import DecoderShape, Linear, decoder_shape, sample, tokens_of

_EPSILON = 1e-5
#: The base of the rotary positions' wavelengths.
_BASE = 10_000.0


class LlamaShape(DecoderShape):
    """The dimensions of a :class:`Llama`."""

    EMBEDDINGS: ClassVar[int] = 2

    @property
    def hidden(self) -> int:
        """The inner width of SwiGLU: about 8/3 of the width, and a multiple of an attention head's width."""
        head = self.width // self.heads
        return round(8 * self.width / 3 / head) * head

    @property
    def parameters(self) -> int:
        """The number of parameters: both ends, layers of 4w² + 3wh + 2w, and the last norm (w)."""
        width = self.width
        layer = 4 * width**2 + 3 * width * self.hidden + 2 * width
        return 2 * self.vocabulary * width + self.layers * layer + width


class RmsNorm(nn.Module):
    """Divide activations by their root mean square, which is computed in fp32; the result has their type."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the normalised activations."""
        return functional.rms_norm(hidden, self.weight.shape, self.weight.to(hidden.dtype), _EPSILON)


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions."""

    turns: Tensor

    def __init__(self, shape: LlamaShape, turns: Tensor) -> None:
        super().__init__()
        self.heads = shape.heads
        self.mixed = Linear(shape.width, 3 * shape.width, bias=False)
        self.out = Linear(shape.width, shape.width, bias=False)
        self.register_buffer("turns", turns, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return outputs [batch, time, width]; each token attends to itself and to earlier tokens."""
        batch, time, width = hidden.shape
        parts = self.mixed(hidden).split(width, dim=-1)
        query, key, value = (one.view(batch, time, self.heads, -1).transpose(1, 2) for one in parts)
        cosines, sines = self.turns[:, :time].to(hidden.dtype)
        query, key = (
            torch.addcmul(one * cosines, one.roll(one.shape[-1] // 2, dims=-1), sines) for one in (query, key)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.out(attended.transpose(1, 2).reshape(batch, time, width))
        return result


class SwiGlu(nn.Module):
    """An MLP whose inner values are gated: out(silu(gate(x)) · wide(x)); gate and wide are one matrix."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.both = Linear(width, 2 * hidden, bias=False)
        self.out = Linear(hidden, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return outputs of the inputs' shape."""
        gate, wide = self.both(hidden).chunk(2, dim=-1)
        result: Tensor = self.out(functional.silu(gate) * wide)
        return result


class LlamaLayer(nn.Module):
    """Attention and SwiGLU, each with a norm and a shortcut."""

    def __init__(self, shape: LlamaShape, turns: Tensor) -> None:
        super().__init__()
        self.before_attention, self.before_wide = RmsNorm(shape.width), RmsNorm(shape.width)
        self.attention = Attention(shape, turns)
        self.wide = SwiGlu(shape.width, shape.hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the layer's outputs [batch, time, width]."""
        hidden = hidden + self.attention(self.before_attention(hidden))
        result: Tensor = hidden + self.wide(self.before_wide(hidden))
        return result


class Llama(nn.Module):
    """The decoder."""

    def __init__(self, shape: LlamaShape, dtype: torch.dtype, *, seq_len: int, recompute: bool) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        turns = _turns(seq_len, shape.width // shape.heads)
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = Blocks([LlamaLayer(shape, turns) for _ in range(shape.layers)], recompute=recompute)
        self.norm = RmsNorm(shape.width)
        self.scores = Linear(shape.width, shape.vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores [batch, time, vocabulary] for the next token."""
        hidden = self.layers(self.embedding(tokens).to(self.dtype))
        scores: Tensor = self.scores(self.norm(hidden))
        return scores


def _turns(length: int, width: int) -> Tensor:
    """Return the factors [2, length, width] of a head's values and of the other half of its values.

    Each pair of values, one from each half, is turned by an angle that grows with the position.
    """
    rate = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(_BASE) / width))
    angle = torch.arange(length, dtype=torch.float32)[:, None] * rate
    cosine, sine = angle.cos(), angle.sin()
    return torch.stack((torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1)))


def build(options: TrainOptions, shape: DataShape) -> nn.Module:
    """Return the decoder whose size is near to the option ``parameters``."""
    tokens = tokens_of(options, shape)
    assert options.parameters is not None, "a language model has a default size"
    dimensions = decoder_shape(LlamaShape, options.parameters, vocabulary=tokens)
    recompute = options.activation_checkpointing
    return Llama(dimensions, compute_type(options), seq_len=shape.inputs[0], recompute=recompute)


SPEC = ModelSpec(
    "llama",
    "tokens",
    build,
    sample=partial(sample, kind=LlamaShape),
    options=("parameters", "seq_len"),
    converts=True,
)
