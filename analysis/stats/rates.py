"""The unit in which people read rates: tables for programs always contain samples/s."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from analysis.data.columns import CellSize, ScalingRow
from ddp_scaling_bench.units import known

#: The columns of the scaling table that are rates.
RATES = ("throughput_samples_per_sec", "throughput_low", "throughput_high")


class RateUnit(NamedTuple):
    """A unit: samples/s, or tokens/s."""

    name: str = "samples/s"

    def of(self, rate: float, cell: CellSize | ScalingRow) -> float:
        """Return a rate of a cell, given in samples/s, in this unit."""
        return rate if self == SAMPLES else rate * cell.tokens_per_sample

    def rows(self, rows: Sequence[ScalingRow]) -> list[ScalingRow]:
        """Return rows of the scaling table with their throughputs in this unit."""
        if self == SAMPLES:
            return list(rows)
        changes: list[dict[str, Any]] = [
            {name: self.of(getattr(row, name), row) for name in RATES} for row in rows
        ]
        return [replace(row, **own) for row, own in zip(rows, changes, strict=True)]


SAMPLES = RateUnit()


def rate_unit(cells: Iterable[CellSize | ScalingRow]) -> RateUnit:
    """Return tokens/s if the matrix gives the throughput of all cells so, else samples/s."""
    counts = [known(cell.tokens_per_sample) for cell in cells]
    return RateUnit("tokens/s") if counts and all(counts) else SAMPLES
