"""Traffic forecasting: every sensor's next readings from its own past and that of related sensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.workload.models.blocks import Blocks

#: Hidden features per sensor, blocks, and features by which sensors find related ones.
WIDTH, BLOCKS, RELATION = 64, 4, 10


class SensorBlock(nn.Module):
    """Mixes a sensor's features with those of the sensors related to it, beside a shortcut."""

    def __init__(self, sensors: int) -> None:
        super().__init__()
        self.sources = nn.Parameter(torch.randn(sensors, RELATION) * RELATION**-0.5)
        self.targets = nn.Parameter(torch.randn(sensors, RELATION) * RELATION**-0.5)
        self.norm = nn.LayerNorm(WIDTH)
        self.own, self.related = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [batch, sensors, width]; the graph is learned, as in Graph WaveNet (Wu et al., 2019)."""
        graph = torch.softmax(torch.relu(self.targets @ self.sources.T), dim=1)
        normed = self.norm(hidden)
        mixed = torch.relu(self.own(normed) + self.related(graph @ normed))
        result: Tensor = hidden + self.out(mixed)
        return result


class Traffic(nn.Module):
    """A regression from [batch, sensors, history] to [batch, sensors, horizon]."""

    def __init__(self, *, sensors: int, history: int, horizon: int, recompute: bool) -> None:
        super().__init__()
        self.first = nn.Linear(history, WIDTH)
        self.blocks = Blocks([SensorBlock(sensors) for _ in range(BLOCKS)], recompute=recompute)
        self.last = nn.Linear(WIDTH, horizon)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the next ``horizon`` readings of every sensor."""
        forecast: Tensor = self.last(self.blocks(self.first(inputs)))
        return forecast
