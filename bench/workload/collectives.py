"""What ranks tell each other about measurements: small tensors, outside of every window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Collectives:
    """Reductions of plain numbers over all ranks of the default process group."""

    def __init__(self, device: torch.device, backend: str) -> None:
        self._device = device if backend == "nccl" else torch.device("cpu")
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def barrier(self) -> None:
        """Wait until every rank is here."""
        dist.all_reduce(self._tensor([0.0]))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def maxima(self, values: Sequence[float]) -> list[float]:
        """Return each place's largest value over the ranks."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def minima(self, values: Sequence[float]) -> list[float]:
        """Return each place's smallest value over the ranks."""
        return self._reduced(values, dist.ReduceOp.MIN)

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return each place's sum over the ranks."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def slowest(self, values: Sequence[float]) -> tuple[list[float], list[int]]:
        """Return each place's largest value, and the lowest rank that has it."""
        largest = self.maxima(values)
        claims = [
            float(self.rank if own >= most else self.world_size)
            for own, most in zip(values, largest, strict=True)
        ]
        return largest, [int(rank) for rank in self.minima(claims)]

    def rows(self, values: Sequence[float]) -> list[list[float]]:
        """Return every rank's values (as many on each rank), in the order of the ranks."""
        own = self._tensor(values)
        gathered = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(gathered, own)
        return [row.tolist() for row in gathered]

    def objects(self, value: Any) -> list[Any]:
        """Return every rank's object, in the order of the ranks."""
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value)
        return gathered

    def _reduced(self, values: Sequence[float], operation: Any) -> list[float]:
        reduced = self._tensor(values)
        dist.all_reduce(reduced, op=operation)
        return [float(value) for value in reduced.tolist()]

    def _tensor(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._device)
