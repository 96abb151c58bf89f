"""A small convolutional network for MNIST-sized images: 1.2 million parameters, short steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.workload.models.blocks import Blocks


class Convnet(nn.Module):
    """Two 3x3 convolutions, pooling, two linear layers, for images [batch, channels, height, width]."""

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
