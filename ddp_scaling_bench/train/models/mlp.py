"""A perceptron, with much communication per computation."""

from __future__ import annotations

import math

from torch import Tensor, nn

from ..options import TrainOptions
from .spec import Blocks, DataShape, ModelSpec, classes_of

_PARAMETERS = 8_000_000
_FEATURES, _CLASSES = 784, 10
#: Below _TINY parameters, a synthetic sample has fewer features, so that the hidden layers are not empty.
_TINY, _FEATURES_TINY = 200_000, 16


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


def build(options: TrainOptions, shape: DataShape) -> nn.Module:
    """Return the network whose size is nearest to the option ``parameters``."""
    features, classes = math.prod(shape.inputs), classes_of(shape)
    parameters = options.parameters or _PARAMETERS
    width = mlp_width(parameters, features=features, classes=classes)
    return Mlp(features=features, classes=classes, width=width, recompute=options.activation_checkpointing)


def sample(options: TrainOptions) -> DataShape:
    """Return the shape of a synthetic sample."""
    is_tiny = (options.parameters or _PARAMETERS) < _TINY
    return DataShape((_FEATURES_TINY if is_tiny else _FEATURES,), (), _CLASSES)


SPEC = ModelSpec("mlp", "classes", build, sample, options=("parameters",))
