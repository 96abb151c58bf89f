"""Findings about samples, batches and windows of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from analysis.checks.slow_ranks import unequal_samples, unequal_windows
from analysis.data.load import RankOfRun
from analysis.stats.columns import ScalingRow, distinct, first_of_cells
from analysis.stats.scaling import SAME_UNIT
from ddp_scaling_bench.finding import Finding, Severity
from ddp_scaling_bench.units import listed, names, number, seconds, short_name


class UnevenSamples(Finding, kind="unequal-samples"):
    """Cells in which ``rank`` processes ``ratio`` times the samples of ``other_rank``."""

    heading = "Unequal samples"
    remedy = "Split the data evenly, for example with DistributedSampler."
    severity: Severity = "error"
    rank: int
    other_rank: int
    ratio: float

    def _message(self) -> str:
        return (
            f"Rank {self.rank} processes {self.ratio:.3g} times the samples of rank {self.other_rank} "
            f"({names(self.subject)}): the load balance measures this split of the data."
        )


class PausedRank(Finding, kind="unequal-windows"):
    """Runs in which a rank stopped its clock alone: the seconds of both ranks' windows."""

    heading = "A rank paused alone"
    remedy = (
        "Pause all ranks: call the recorder's pause() on each rank, with a barrier at the end of the "
        "pause (docs/recorder.md)."
    )
    severity: Severity = "error"
    rank: int
    other_rank: int
    seconds: tuple[float, float]
    runs: tuple[str, ...] = ()

    def _message(self) -> str:
        short, long = map(seconds, self.seconds)
        return (
            f"For the same steps, rank {self.rank} measured {short} and rank {self.other_rank} {long} "
            f"({names(self.subject)}): rank {self.rank} stopped its clock, for example to evaluate or write "
            "a checkpoint, and the others waited for it."
        )


@dataclass(frozen=True, kw_only=True)
class SamplesPerStep:
    """Planned and measured samples per step; None if the runs differ."""

    planned: int
    measured: float | None

    def __str__(self) -> str:
        measured = "runs differ" if self.measured is None else f"measured {number(self.measured)}"
        return f"{measured}, planned {self.planned:,}"


class OtherBatch(Finding, kind="other-batch"):
    """Cells that process another batch than planned."""

    heading = "Other batch than planned"
    remedy = "Let the script use {per_gpu_batch} or {global_batch}, and count samples in every cell."
    severity: Severity = "error"
    samples_per_step: Mapping[str, SamplesPerStep]

    def _message(self) -> str:
        cells = [f"{short_name(cell)} ({one})" for cell, one in self.samples_per_step.items()]
        return (
            f"Samples per step: {listed(cells, limit=4)}. The reported batch and time per step of these "
            "configurations are for the planned batch. A configuration has an efficiency only if measured / "
            "planned is the same for its baseline."
        )


def uneven_samples(ranks: Sequence[RankOfRun]) -> Iterator[Finding]:
    """Yield the cells in which one rank processes more samples than another."""
    if odd := unequal_samples(ranks):
        worst = max(odd, key=lambda one: one.ratio)
        yield UnevenSamples(
            subject=distinct(one.cell_id for one in odd),
            rank=worst.most,
            other_rank=worst.least,
            ratio=worst.ratio,
        )


def paused_ranks(ranks: Sequence[RankOfRun]) -> Iterator[Finding]:
    """Yield the runs in which a rank stopped its clock alone."""
    if odd := unequal_windows(ranks):
        rank, other = odd[0]
        yield PausedRank(
            subject=distinct(one.shortest.cell_id for one in odd),
            rank=rank.rank,
            other_rank=other.rank,
            seconds=(rank.window_time_sec, other.window_time_sec),
            runs=tuple(one.shortest.run_id for one in odd),
        )


def other_batches(rows: Sequence[ScalingRow]) -> Iterator[Finding]:
    """Yield the cells that process another batch than planned."""
    odd = first_of_cells(row for row in rows if row.n and abs(row.unit - 1) > SAME_UNIT)
    if odd:
        samples = {
            # The unit is infinite if the runs of a cell differ.
            row.cell_id: SamplesPerStep(
                planned=int(row.global_batch),
                measured=row.unit * row.global_batch if math.isfinite(row.unit) else None,
            )
            for row in odd
        }
        yield OtherBatch(subject=tuple(samples), samples_per_step=samples)
