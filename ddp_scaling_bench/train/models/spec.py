"""What a model tells the rest of the program, and parts that several models share.

To add a model, add a file here with its network and its ``SPEC``. ``bench plan`` reads the name, the kind and
the options from the text of that file, because it must not import torch: write them as literals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..failures import SetupError
from ..options import TrainOptions

Kind = Literal["classes", "tokens", "values"]


@dataclass(frozen=True)
class DataShape:
    """The shape of one sample; ``classes`` is the number of classes or tokens, or None for real values."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    classes: int | None


@dataclass(frozen=True)
class ModelSpec:
    """One model.

    Attributes:
        name: the name in a matrix.
        kind: what the model learns: one class per sample, the next token, or real values.
        options: the workload options that this model uses and not every model does. A model that uses
            ``memory_format`` takes images [batch, channels, height, width].
        fp32_weights: True for a model with batch normalisation, whose weights must stay in fp32.
        converts: True for a network that itself converts its weights to the type of the computation. Autocast
            would also convert the activations before each norm to fp32, and back after it.
        build: returns the network for data of a shape, or raises a SetupError if it does not support that
            shape.
        sample: returns the shape of a synthetic sample.
    """

    name: str
    kind: Kind
    build: Callable[[TrainOptions, DataShape], nn.Module]
    sample: Callable[[TrainOptions], DataShape]
    options: tuple[str, ...] = ()
    fp32_weights: bool = False
    converts: bool = False

    @property
    def takes_images(self) -> bool:
        """Whether a sample is an image [channels, height, width]."""
        return "memory_format" in self.options


class Blocks(nn.Sequential):
    """A sequence of blocks; with ``recompute``, activations are recomputed in backward instead of stored.

    FSDP gathers the weights of one block at a time. No block draws random numbers.
    """

    def __init__(self, blocks: Iterable[nn.Module], *, recompute: bool) -> None:
        super().__init__(*blocks)
        self.recompute = recompute

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the output of the last block."""
        for block in self:
            if self.recompute and self.training:
                hidden = checkpoint(block, hidden, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = block(hidden)
        return hidden


def compute_type(options: TrainOptions) -> torch.dtype:
    """Return the type of matrix products and of their inputs."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(options.precision, torch.float32)


def image_size(shape: DataShape, model: str, *, least: int) -> tuple[int, int, int]:
    """Return the channels, height and width of a sample, or raise a SetupError if it is not such an image."""
    if len(shape.inputs) != 3 or min(shape.inputs[1:]) < least:
        wanted = f"images [samples, channels, height, width] of at least {least} x {least} pixels"
        raise wrong_shape(model, shape, wanted)
    channels, height, width = shape.inputs
    return channels, height, width


def classes_of(shape: DataShape) -> int:
    """Return the number of classes or tokens."""
    assert shape.classes is not None, "data of this kind has classes"
    return shape.classes


def wrong_shape(model: str, shape: DataShape, wanted: str) -> SetupError:
    """Return the error for data of a shape that the model does not support."""
    found = f"inputs {list(shape.inputs)} and targets {list(shape.targets)} per sample"
    return SetupError(f"model {model} takes {wanted}; the data has {found}")
