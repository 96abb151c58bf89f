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

    def __init__(self, options: TrainOptions, shape: DataShape) -> None:
        super().__init__()
        channels, height, width = image_size(shape, "convnet", least=6)
        first = nn.Sequential(nn.Conv2d(channels, 32, 3), nn.ReLU())
        second = nn.Sequential(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.images = Blocks([first, second], recompute=options.activation_checkpointing)
        pooled = 64 * ((height - 4) // 2) * ((width - 4) // 2)
        self.scores = nn.Sequential(nn.Linear(pooled, 128), nn.ReLU(), nn.Linear(128, classes_of(shape)))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return one score per class."""
        scores: Tensor = self.scores(torch.flatten(self.images(inputs), 1))
        return scores


SPEC = ModelSpec(
    "convnet",
    "classes",
    build=Convnet,
    sample=lambda options: DataShape((1, 28, 28), (), 10),  # MNIST's images
    options=("memory_format",),
)
