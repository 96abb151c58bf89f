"""ResNet-50 with the stride in the 3x3 convolution (the variant that benchmarks call v1.5).

Source: He et al., "Deep Residual Learning for Image Recognition", 2015, table 1; 25,557,032
parameters for 1,000 classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.workload.models.blocks import Blocks

#: Bottlenecks per stage; a stage's inner width doubles from 64.
STAGES = (3, 4, 6, 3)
#: A bottleneck's outputs per inner channel.
EXPANSION = 4


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut."""

    def __init__(self, channels: int, inner: int, *, stride: int) -> None:
        super().__init__()
        outputs = inner * EXPANSION
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
    """A stem, sixteen bottlenecks, mean pooling and one linear layer, for images [batch, 3, size, size]."""

    def __init__(self, *, channels: int, classes: int, recompute: bool) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *_convolution(channels, 64, 7, stride=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks: list[nn.Module] = []
        inputs = 64
        for stage, count in enumerate(STAGES):
            inner = 64 * 2**stage
            for place in range(count):
                blocks.append(Bottleneck(inputs, inner, stride=2 if stage and not place else 1))
                inputs = inner * EXPANSION
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
