"""Findings about samples, batches and windows of ranks, and about ranks that do not train together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from analysis.checks.nodes import Environments
from analysis.checks.slow_ranks import unequal_samples, unequal_windows
from analysis.data.load import RankOfRun
from analysis.stats.columns import ScalingRow, distinct, first_of_cells
from analysis.stats.measured import Frames
from bench.study.found import findings_of_env
from bench.study.together import REMEDY as TOGETHER_REMEDY
from ddp_scaling_bench.finding import Finding, Severity
from ddp_scaling_bench.measure.findings import SeparateTrainings
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
            f"Samples per step: {listed(cells, limit=4)}. The batch in the tables is the planned one, so "
            "these cells have neither a time per step nor an efficiency; their throughput is measured."
        )


class ReplicasApart(Finding, kind="separate-trainings"):
    """Cells whose ranks do not train together; ``shown`` is what shows it in one of them.

    ``with_recorder`` is False if only the bytes between the nodes of commands show it.
    """

    heading = SeparateTrainings.heading
    severity: Severity = "error"
    shown: SeparateTrainings
    with_recorder: bool

    def _message(self) -> str:
        return (
            f"{names(self.subject)}: {self.shown.message}. The rates of separate trainings do not show "
            "scaling, so there is no efficiency."
        )

    def _remedy(self) -> str:
        own = SeparateTrainings.remedy
        return own if self.with_recorder else f"{own} Without the recorder: {TOGETHER_REMEDY}."


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
    if odd := first_of_cells(row for row in rows if row.n and row.other_batch):
        samples = {row.cell_id: samples_per_step(row) for row in odd}
        yield OtherBatch(subject=tuple(samples), samples_per_step=samples)


def samples_per_step(row: ScalingRow) -> SamplesPerStep:
    """Return the samples per step of a cell, whose unit is infinite if its runs differ."""
    measured = row.unit * row.global_batch if math.isfinite(row.unit) else None
    return SamplesPerStep(planned=int(row.global_batch), measured=measured)


def separate_trainings(frames: Frames, envs: Environments) -> Iterator[Finding]:
    """Yield the cells whose ranks do not train together."""
    cells = [cell.cell_id for cell in frames.cells if frames.are_separate(cell.cell_id)]
    own = (one for cell, env in envs if cell in cells for one in findings_of_env(env))
    recorded = next((one for one in own if isinstance(one, SeparateTrainings)), None)
    if cells:
        shown = recorded or SeparateTrainings(by="bytes")
        yield ReplicasApart(subject=tuple(cells), shown=shown, with_recorder=recorded is not None)
