"""A traffic forecast: regression for the sensors of a road network."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..options import TrainOptions
from .spec import Blocks, DataShape, ModelSpec, wrong_shape

#: The sensors of METR-LA, and an hour of readings, five minutes apart, before and after each moment.
_SENSORS, _HISTORY, _HORIZON = 207, 12, 12
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

    def __init__(self, options: TrainOptions, shape: DataShape) -> None:
        super().__init__()
        if len(shape.inputs) != 2 or len(shape.targets) != 2 or shape.inputs[0] != shape.targets[0]:
            wanted = "inputs [samples, sensors, history] and targets [samples, sensors, horizon]"
            raise wrong_shape("traffic", shape, wanted)
        (sensors, history), horizon = shape.inputs, shape.targets[1]
        blocks = [SensorBlock(sensors) for _ in range(_SENSOR_BLOCKS)]
        self.first = nn.Linear(history, _SENSOR_WIDTH)
        self.blocks = Blocks(blocks, recompute=options.activation_checkpointing)
        self.last = nn.Linear(_SENSOR_WIDTH, horizon)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the next ``horizon`` readings of every sensor."""
        forecast: Tensor = self.last(self.blocks(self.first(inputs)))
        return forecast


SPEC = ModelSpec(
    "traffic",
    "values",
    build=Traffic,
    sample=lambda options: DataShape((_SENSORS, _HISTORY), (_SENSORS, _HORIZON), None),
)
