"""A small network of convolutions for images of MNIST's size, with little communication per computation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..options import TrainOptions
from .spec import Blocks, DataShape, ModelSpec, classes_of, image_size


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


def build(options: TrainOptions, shape: DataShape) -> nn.Module:
    """Return the network for images of a shape."""
    channels, height, width = image_size(shape, "convnet", least=6)
    classes, recompute = classes_of(shape), options.activation_checkpointing
    return Convnet(channels=channels, height=height, width=width, classes=classes, recompute=recompute)


def sample(options: TrainOptions) -> DataShape:
    """Return the shape of one of MNIST's images."""
    return DataShape((1, 28, 28), (), 10)


SPEC = ModelSpec("convnet", "classes", build, sample, options=("memory_format",))
