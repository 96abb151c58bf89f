"""The networks of the workload, from mlp (much communication per computation) to convnet (little).

To add a model, add its class, its builder in :data:`BUILDERS`, its entry in :data:`KINDS`, its synthetic
sample in :mod:`bench.workload.data`, and its name in ``WorkloadOptions.model``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ..matrix.workload import WorkloadOptions
from .failures import SetupError

Kind = Literal["classes", "tokens", "values"]

#: The kind of target that each model learns: one class per sample, the next token, or real values.
KINDS: dict[str, Kind] = {
    "mlp": "classes",
    "convnet": "classes",
    "resnet50": "classes",
    "transformer": "tokens",
    "traffic": "values",
}
#: The models whose inputs are images [batch, channels, height, width].
IMAGE_MODELS = ("convnet", "resnet50")
#: Sizes of transformer and mlp if ``parameters`` is not given.
DEFAULT_PARAMETERS = {"transformer": 10_000_000, "mlp": 8_000_000}


def memory_format_of(options: WorkloadOptions) -> torch.memory_format:
    """Return the memory format of the weights and of the inputs, which are images in some models only."""
    is_last = options.memory_format == "channels_last" and options.model in IMAGE_MODELS
    return torch.channels_last if is_last else torch.contiguous_format


@dataclass(frozen=True)
class DataShape:
    """The shape of one sample; ``classes`` is the number of classes or tokens, or None for real values."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    classes: int | None


class Blocks(nn.Sequential):
    """A sequence of blocks; with ``recompute``, activations are recomputed in backward instead of stored."""

    def __init__(self, blocks: Iterable[nn.Module], *, recompute: bool) -> None:
        super().__init__(*blocks)
        self.recompute = recompute

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the output of the last block."""
        for block in self:
            if self.recompute and self.training:
                hidden = checkpoint(block, hidden, use_reentrant=False)
            else:
                hidden = block(hidden)
        return hidden


class Mlp(nn.Module):
    """A perceptron with eight hidden layers of equal width: large gradients, but little computation."""

    #: Number of hidden layers. At the default size, each layer fills one DDP bucket of 4 MiB.
    HIDDEN_LAYERS = 8

    def __init__(self, *, features: int, classes: int, width: int, recompute: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Flatten(), nn.Linear(features, width), nn.ReLU())
        hidden = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(self.HIDDEN_LAYERS - 1)]
        self.hidden = Blocks(hidden, recompute=recompute)
        self.last = nn.Linear(width, classes)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, inputs: Tensor) -> Tensor:
        """Return one score per class from inputs of any shape [batch, ...]."""
        scores: Tensor = self.last(self.hidden(self.first(inputs)))
        return scores


def mlp_width(parameters: int, *, features: int, classes: int) -> int:
    """Return the width of the :class:`Mlp` whose size is nearest to ``parameters``.

    The size is (L-1)·w² + (features + classes + L)·w + classes for L hidden layers of width w.
    """
    squares, linear = Mlp.HIDDEN_LAYERS - 1, features + classes + Mlp.HIDDEN_LAYERS
    root = (math.sqrt(linear**2 + 4 * squares * max(0, parameters - classes)) - linear) / (2 * squares)
    return max(1, round(root))


def _build_mlp(options: WorkloadOptions, shape: DataShape) -> nn.Module:
    features, classes = math.prod(shape.inputs), _classes(shape)
    parameters = options.parameters or DEFAULT_PARAMETERS["mlp"]
    width = mlp_width(parameters, features=features, classes=classes)
    return Mlp(features=features, classes=classes, width=width, recompute=options.activation_checkpointing)


class Convnet(nn.Module):
    """Two 3x3 convolutions, pooling and two linear layers, for images [batch, channels, height, width].

    For MNIST-sized images it has 1.2 million parameters and short steps.
    """

    def __init__(self, *, channels: int, height: int, width: int, classes: int, recompute: bool) -> None:
        super().__init__()
        first = nn.Sequential(nn.Conv2d(channels, 32, 3), nn.ReLU())
        second = nn.Sequential(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.images = Blocks([first, second], recompute=recompute)
        pooled = 64 * ((height - 4) // 2) * ((width - 4) // 2)
        self.scores = nn.Sequential(nn.Linear(pooled, 128), nn.ReLU(), nn.Linear(128, classes))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return one score per class."""
        scores: Tensor = self.scores(torch.flatten(self.images(inputs), 1))
        return scores


def _build_convnet(options: WorkloadOptions, shape: DataShape) -> nn.Module:
    channels, height, width = _image_size(shape, "convnet", least=6)
    classes, recompute = _classes(shape), options.activation_checkpointing
    return Convnet(channels=channels, height=height, width=width, classes=classes, recompute=recompute)


class Bottleneck(nn.Module):
    """A residual block: 1x1, 3x3 and 1x1 convolutions whose output is added to a shortcut."""

    #: Ratio of output channels to inner channels.
    EXPANSION = 4

    def __init__(self, channels: int, inner: int, *, stride: int) -> None:
        super().__init__()
        outputs = inner * self.EXPANSION
        self.inner = nn.Sequential(
            *_convolution(channels, inner, 1),
            nn.ReLU(inplace=True),
            *_convolution(inner, inner, 3, stride=stride),
            nn.ReLU(inplace=True),
            *_convolution(inner, outputs, 1),
        )
        same = stride == 1 and channels == outputs
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(*_convolution(channels, outputs, 1, stride=stride))
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the block's outputs [batch, 4 x inner, ...]."""
        return torch.relu(self.inner(hidden) + self.shortcut(hidden))


class ResNet50(nn.Module):
    """ResNet-50 v1.5, which has the stride in the 3x3 convolution.

    The input is images [batch, channels, size, size]. For 3 channels and 1,000 classes it has 25,557,032
    parameters. Source: He et al., "Deep Residual Learning for Image Recognition", 2015, table 1.
    """

    #: Number of bottlenecks per stage; the inner width is 64 in the first stage and doubles with each stage.
    STAGES = (3, 4, 6, 3)

    def __init__(self, *, channels: int, classes: int, recompute: bool) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *_convolution(channels, 64, 7, stride=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks: list[nn.Module] = []
        inputs = 64
        for stage, count in enumerate(self.STAGES):
            inner = 64 * 2**stage
            for number in range(count):
                blocks.append(Bottleneck(inputs, inner, stride=2 if stage and not number else 1))
                inputs = inner * Bottleneck.EXPANSION
        self.blocks = Blocks(blocks, recompute=recompute)
        self.last = nn.Linear(inputs, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return one score per class."""
        pooled = self.blocks(self.stem(inputs)).mean(dim=(2, 3))
        scores: Tensor = self.last(pooled)
        return scores


def _convolution(channels: int, outputs: int, size: int, *, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    weights = nn.Conv2d(channels, outputs, size, stride=stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(weights.weight, mode="fan_out", nonlinearity="relu")
    return weights, nn.BatchNorm2d(outputs)


def _build_resnet50(options: WorkloadOptions, shape: DataShape) -> nn.Module:
    channels, _, _ = _image_size(shape, "resnet50", least=32)
    return ResNet50(channels=channels, classes=_classes(shape), recompute=options.activation_checkpointing)


#: (minimum number of parameters, vocabulary), chosen so that the embedding is a minor part of the network.
_VOCABULARIES = ((10**8, 32_768), (3 * 10**6, 8_192), (10**5, 256), (0, 32))
#: (minimum number of parameters, width of an attention head); the model's width is a multiple of the head's.
_HEADS = ((10**8, 64), (10**6, 32), (10**5, 8), (0, 2))
#: Usual ratio of width to number of layers (GPT-3: from 64 at 125M parameters to 128 at 175B).
_ASPECT = 64.0
#: Among shapes whose size has at most this relative error, the most usual ratio is preferred.
_TOLERANCE = 0.05


@dataclass(frozen=True)
class DecoderShape:
    """The dimensions of a :class:`Transformer`."""

    vocabulary: int
    width: int
    layers: int
    heads: int

    @property
    def parameters(self) -> int:
        """The number of parameters: tied embeddings, layers of 12w² + 13w, and the last norm (2w)."""
        return (
            self.vocabulary * self.width
            + self.layers * (12 * self.width**2 + 13 * self.width)
            + 2 * self.width
        )


def decoder_shape(parameters: int, *, vocabulary: int | None = None) -> DecoderShape:
    """Choose the dimensions of a decoder with about ``parameters`` parameters.

    Among shapes within 5 % of that size, the shape with the most usual ratio of width to layers is returned.

    Args:
        parameters: the wanted number of parameters, at least 1,000. The result differs by at most 10 %.
        vocabulary: the number of tokens in the data; None chooses a vocabulary that suits the size.
    """
    tokens = vocabulary or next(size for least, size in _VOCABULARIES if parameters >= least)
    step = next(width for least, width in _HEADS if parameters >= least)

    def cost(shape: DecoderShape) -> tuple[float, float]:
        error = abs(shape.parameters / parameters - 1)
        aspect_error = abs(math.log(shape.width / shape.layers / _ASPECT))
        return (max(error, _TOLERANCE), aspect_error)

    return min(_decoder_shapes(parameters, tokens=tokens, step=step), key=cost)


def _decoder_shapes(parameters: int, *, tokens: int, step: int) -> Iterator[DecoderShape]:
    """Yield, for each number of layers, the shapes just below and above the wanted size."""
    for layers in range(1, 257):
        square, linear = 12 * layers, tokens + 13 * layers + 2
        exact = (math.sqrt(linear**2 + 4 * square * parameters) - linear) / (2 * square)
        for multiple in (math.floor(exact / step), math.floor(exact / step) + 1):
            width = max(1, multiple) * step
            yield DecoderShape(tokens, width, layers, width // step)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.mixed = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return outputs [batch, time, width]; each token attends to itself and to earlier tokens."""
        batch, time, width = hidden.shape
        parts = (
            self.mixed(hidden).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        )
        query, key, value = parts.unbind(0)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.out(attended.transpose(1, 2).reshape(batch, time, width))
        return result


class DecoderLayer(nn.Module):
    """Attention and an MLP of four times the width, each with layer normalisation and a shortcut."""

    def __init__(self, shape: DecoderShape) -> None:
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
    """A GPT-like decoder with tied embeddings and parameter-free sinusoidal positions."""

    positions: Tensor

    def __init__(self, shape: DecoderShape, *, seq_len: int, recompute: bool) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = Blocks([DecoderLayer(shape) for _ in range(shape.layers)], recompute=recompute)
        self.norm = nn.LayerNorm(shape.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        # The buffer is not persistent, because a checkpoint contains only trained values.
        self.register_buffer("positions", _sinusoids(seq_len, shape.width), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores [batch, time, vocabulary] for the next token."""
        hidden = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        hidden = self.norm(self.layers(hidden))
        return functional.linear(hidden, self.embedding.weight)


def _sinusoids(length: int, width: int) -> Tensor:
    """Return position encodings [length, width] (Vaswani et al., 2017, 3.5), scaled like the embeddings."""
    position = torch.arange(length, dtype=torch.float32)[:, None]
    rate = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10_000.0) / width))
    waves = torch.stack((torch.sin(position * rate), torch.cos(position * rate)), dim=2).reshape(length, -1)
    return 0.02 * waves[:, :width]


def _build_transformer(options: WorkloadOptions, shape: DataShape) -> nn.Module:
    if len(shape.inputs) != 1 or shape.targets != shape.inputs:
        raise _wrong_shape("transformer", shape, "tokens [samples, time] and as many targets")
    parameters = options.parameters or DEFAULT_PARAMETERS["transformer"]
    dimensions = decoder_shape(parameters, vocabulary=_classes(shape))
    return Transformer(dimensions, seq_len=shape.inputs[0], recompute=options.activation_checkpointing)


#: Sizes of the traffic model: hidden features per sensor, blocks, and features that relate sensors.
_SENSOR_WIDTH, _SENSOR_BLOCKS, _RELATION = 64, 4, 10


class SensorBlock(nn.Module):
    """A residual block that combines the features of a sensor with the features of related sensors.

    The relations between sensors are learned, as in Graph WaveNet (Wu et al., 2019).
    """

    def __init__(self, sensors: int) -> None:
        super().__init__()
        width = _SENSOR_WIDTH
        self.sources = nn.Parameter(torch.randn(sensors, _RELATION) * _RELATION**-0.5)
        self.targets = nn.Parameter(torch.randn(sensors, _RELATION) * _RELATION**-0.5)
        self.norm = nn.LayerNorm(width)
        self.own, self.related = nn.Linear(width, width), nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the block's outputs [batch, sensors, width]."""
        graph = torch.softmax(torch.relu(self.targets @ self.sources.T), dim=1)
        normed = self.norm(hidden)
        mixed = torch.relu(self.own(normed) + self.related(graph @ normed))
        result: Tensor = hidden + self.out(mixed)
        return result


class Traffic(nn.Module):
    """A traffic forecast: regression from [batch, sensors, history] to [batch, sensors, horizon]."""

    def __init__(self, *, sensors: int, history: int, horizon: int, recompute: bool) -> None:
        super().__init__()
        self.first = nn.Linear(history, _SENSOR_WIDTH)
        self.blocks = Blocks([SensorBlock(sensors) for _ in range(_SENSOR_BLOCKS)], recompute=recompute)
        self.last = nn.Linear(_SENSOR_WIDTH, horizon)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the next ``horizon`` readings of every sensor."""
        forecast: Tensor = self.last(self.blocks(self.first(inputs)))
        return forecast


def _build_traffic(options: WorkloadOptions, shape: DataShape) -> nn.Module:
    if len(shape.inputs) != 2 or len(shape.targets) != 2 or shape.inputs[0] != shape.targets[0]:
        wanted = "inputs [samples, sensors, history] and targets [samples, sensors, horizon]"
        raise _wrong_shape("traffic", shape, wanted)
    (sensors, history), horizon = shape.inputs, shape.targets[1]
    recompute = options.activation_checkpointing
    return Traffic(sensors=sensors, history=history, horizon=horizon, recompute=recompute)


#: The function that builds each model. It raises a SetupError if the model does not support the data's shape.
BUILDERS: dict[str, Callable[[WorkloadOptions, DataShape], nn.Module]] = {
    "mlp": _build_mlp,
    "convnet": _build_convnet,
    "resnet50": _build_resnet50,
    "transformer": _build_transformer,
    "traffic": _build_traffic,
}


def _image_size(shape: DataShape, model: str, *, least: int) -> tuple[int, int, int]:
    if len(shape.inputs) != 3 or min(shape.inputs[1:]) < least:
        wanted = f"images [samples, channels, height, width] of at least {least} x {least} pixels"
        raise _wrong_shape(model, shape, wanted)
    channels, height, width = shape.inputs
    return channels, height, width


def _classes(shape: DataShape) -> int:
    assert shape.classes is not None, "data of this kind has classes"
    return shape.classes


def _wrong_shape(model: str, shape: DataShape, wanted: str) -> SetupError:
    found = f"inputs {list(shape.inputs)} and targets {list(shape.targets)} per sample"
    return SetupError(f"model {model} takes {wanted}; the data has {found}")
