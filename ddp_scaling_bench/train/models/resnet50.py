"""ResNet-50 for images of ImageNet."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..options import TrainOptions
from .spec import Blocks, DataShape, ModelSpec, classes_of, image_size


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

    def __init__(self, options: TrainOptions, shape: DataShape) -> None:
        super().__init__()
        channels, _, _ = image_size(shape, "resnet50", least=32)
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
        self.blocks = Blocks(blocks, recompute=options.activation_checkpointing)
        self.last = nn.Linear(inputs, classes_of(shape))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return one score per class."""
        pooled = self.blocks(self.stem(inputs)).mean(dim=(2, 3))
        scores: Tensor = self.last(pooled)
        return scores


def _convolution(channels: int, outputs: int, size: int, *, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    weights = nn.Conv2d(channels, outputs, size, stride=stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(weights.weight, mode="fan_out", nonlinearity="relu")
    return weights, nn.BatchNorm2d(outputs)


SPEC = ModelSpec(
    "resnet50",
    "classes",
    build=ResNet50,
    sample=lambda options: DataShape((3, options.image_size, options.image_size), (), 1_000),  # ImageNet
    options=("image_size", "memory_format"),
    fp32_weights=True,
)
