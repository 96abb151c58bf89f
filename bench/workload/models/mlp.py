"""A multilayer perceptron: many gradient bytes per computation, so communication shows early."""

from __future__ import annotations

import math

from torch import Tensor, nn

from bench.workload.models.blocks import Blocks

#: Hidden layers; each is one communication bucket of 4 MiB at the default size.
HIDDEN_LAYERS = 8


class Mlp(nn.Module):
    """Eight hidden layers of one width between flattened inputs and classes."""

    def __init__(self, *, features: int, classes: int, width: int, recompute: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Flatten(), nn.Linear(features, width), nn.ReLU())
        hidden = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(HIDDEN_LAYERS - 1)]
        self.hidden = Blocks(hidden, recompute=recompute)
        self.last = nn.Linear(width, classes)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, inputs: Tensor) -> Tensor:
        """Return one score per class from inputs of any shape [batch, ...]."""
        scores: Tensor = self.last(self.hidden(self.first(inputs)))
        return scores


def width_for(parameters: int, *, features: int, classes: int) -> int:
    """Return the width whose parameter count comes nearest to ``parameters``.

    The count is (L-1)·w² + (features + classes + L)·w + classes for L hidden layers of width w.
    """
    squares, linear = HIDDEN_LAYERS - 1, features + classes + HIDDEN_LAYERS
    root = (math.sqrt(linear**2 + 4 * squares * max(0, parameters - classes)) - linear) / (2 * squares)
    return max(1, round(root))
