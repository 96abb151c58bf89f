"""Find unexpected results; no run is dropped because of them.

Thresholds are chosen so that noise is rarely reported. If a value has an interval, the whole interval must be
beyond the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from analysis.stats.columns import ScalingRow, by_series, distinct, grouped
from analysis.stats.estimate import MIN_RUNS
from analysis.stats.measured import Frames
from ddp_scaling_bench.finding import Finding, Severity
from ddp_scaling_bench.units import (
    count,
    fraction,
    join_names,
    known,
    listed,
    names,
    short_name,
    short_percent,
)

#: Without intervals, an efficiency must exceed 1, or the efficiency of the previous size, by this much.
MARGIN = 0.05
#: A cell is unstable if the standard deviation of its runs' log throughput is above this.
UNSTABLE = 0.05


class BaselineOutlier(Finding, kind="baseline-outlier"):
    """Baselines with outliers; ``runs`` is the number of outliers."""

    heading = "Baseline with an outlier"
    remedy = "Run the baseline again."
    severity: Severity = "info"
    runs: int

    def _message(self) -> str:
        far = f"{count(self.runs, 'run')} {'is' if self.runs == 1 else 'are'} far from"
        return (
            f"{names(self.subject)}: {far} the baseline's other runs. This affects every efficiency relative "
            "to this baseline."
        )


@dataclass(frozen=True, kw_only=True)
class SuperlinearSize:
    """A size with an efficiency above 1."""

    efficiency: float
    ranks: int

    def __str__(self) -> str:
        return f"{fraction(self.efficiency)} at {count(self.ranks, 'rank')}"


class Superlinear(Finding, kind="superlinear"):
    """Efficiencies above 1; ``certainty`` is ``interval``, or ``few-runs`` if one has no interval."""

    heading = "Efficiency above 1"
    severity: Severity = "info"
    sizes: tuple[SuperlinearSize, ...]
    certainty: str

    def _message(self) -> str:
        few_runs = self.certainty == "few-runs"
        why = "no interval: fewer than 3 runs" if few_runs else "the interval excludes 1"
        return (
            f"{listed([*map(str, self.sizes)])} ({why}). Either the baseline is slower than it should be "
            "(fewer threads, another node, a slow first run), or the smaller share of the work fits into a "
            "cache."
        )


@dataclass(frozen=True, kw_only=True)
class LowSize:
    """Three sizes in order, of which the second has the lowest efficiency."""

    efficiencies: tuple[float, ...]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{', '.join(map(fraction, self.efficiencies))} at {join_names([*map(str, self.ranks)])} ranks"


class Recovery(Finding, kind="recovery"):
    """Sizes with a lower efficiency than the next smaller and the next larger size."""

    heading = "Efficiency falls, then rises again"
    remedy = "Check the nodes, the order of the runs and the batch per rank of the middle size."
    severity: Severity = "info"
    sizes: tuple[LowSize, ...]

    def _message(self) -> str:
        return f"{listed([*map(str, self.sizes)])}. A loss should not disappear at larger sizes."


class UnstableCells(Finding, kind="unstable"):
    """Cells whose runs differ, with the standard deviation of the logarithms of their rates.

    Attributes:
        advice: ``whole-nodes`` if no other job can share the nodes of the runs, else ``shared-nodes``.
    """

    heading = "Runs of a cell differ"
    severity: Severity = "info"
    spread: Mapping[str, float]
    advice: str

    def _message(self) -> str:
        cells = [f"{short_name(cell)} by {short_percent(value)}" for cell, value in self.spread.items()]
        return f"{listed(cells)} (standard deviation between runs)."

    def _remedy(self) -> str:
        if self.advice == "whole-nodes":
            causes, more = "a shared network or file system", "more repeats"
        else:
            causes = "shared nodes, a shared network or file system"
            more = "more repeats, or whole nodes (exclusive: true)"
        return f"Possible causes: {causes}, changing clock rates. Use {more}."


def anomalies(rows: Sequence[ScalingRow], frames: Frames, *, whole_nodes: bool = False) -> list[Finding]:
    """Return the anomalies of a study; those that affect most numbers come first.

    With ``whole_nodes``, no other job can share the nodes of the runs.
    """
    return [
        *_baselines_with_outliers(rows, frames),
        *_superlinear(rows),
        *_recoveries(rows),
        *_unstable(frames, whole_nodes=whole_nodes),
    ]


def _baselines_with_outliers(rows: Sequence[ScalingRow], frames: Frames) -> Iterator[Finding]:
    bases = {row.base.cell_id for row in rows if row.base}
    if odd := [run for run in frames.run_rows if run.outlier and run.cell_id in bases]:
        yield BaselineOutlier(subject=distinct(run.cell_id for run in odd), runs=len(odd))


def _superlinear(rows: Sequence[ScalingRow]) -> Iterator[Finding]:
    beyond = [row for row in rows if row.base and row.gpus > row.base.gpus and row.ddp and row.mode]
    clear = [row for row in beyond if row.efficiency_low > 1]
    apart = [row for row in beyond if not known(row.efficiency_low) and row.efficiency > 1 + MARGIN]
    if found := [*clear, *apart]:
        yield Superlinear(
            subject=distinct(row.cell_id for row in found),
            sizes=tuple(SuperlinearSize(efficiency=row.efficiency, ranks=row.gpus) for row in found),
            certainty="few-runs" if apart else "interval",
        )


def _recoveries(rows: Sequence[ScalingRow]) -> Iterator[Finding]:
    """Yield the sizes with a lower efficiency than the next smaller and the next larger size."""
    found: dict[LowSize, None] = {}
    odd: dict[str, None] = {}
    for path in _paths([row for row in rows if known(row.efficiency) and row.ddp]):
        for three in zip(path, path[1:], path[2:], strict=False):
            before, low, after = three
            if low.efficiency < before.efficiency and _clearly_above(after, low):
                efficiencies, ranks = zip(*((row.efficiency, row.gpus) for row in three), strict=True)
                found[LowSize(efficiencies=efficiencies, ranks=ranks)] = odd[low.cell_id] = None
    if found:
        yield Recovery(subject=tuple(odd), sizes=tuple(found))


def _paths(rows: Sequence[ScalingRow]) -> Iterator[list[ScalingRow]]:
    """Yield the sizes of each series within one node, and those with the same number of ranks per node."""
    for own in by_series(rows).values():
        layouts = grouped(own, lambda row: row.gpus_per_node)
        within = [row for row in own if row.nodes == 1]
        yield from [own] if len(layouts) == 1 or len(within) == len(own) else [within, *layouts.values()]


def _clearly_above(upper: ScalingRow, lower: ScalingRow) -> bool:
    if known(upper.efficiency_low) and known(lower.efficiency_high):
        return upper.efficiency_low > lower.efficiency_high
    return upper.efficiency > lower.efficiency * (1 + MARGIN)


def _unstable(frames: Frames, *, whole_nodes: bool) -> Iterator[Finding]:
    """Yield the cells whose runs differ, the least stable first, with the deviation of log rates."""
    runs = frames.runs[frames.runs["measured"]]
    logs = runs["rate"].astype(float).map(math.log).groupby(runs["cell_id"])
    spread = logs.std()[logs.size() >= MIN_RUNS].sort_values(ascending=False)
    if wide := {str(cell): float(value) for cell, value in spread[spread > UNSTABLE].items()}:
        advice = "whole-nodes" if whole_nodes else "shared-nodes"
        yield UnstableCells(subject=tuple(wide), spread=wide, advice=advice)
