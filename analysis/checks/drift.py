"""Find drifts of the throughput, over the study and within runs, and wide intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import pandas as pd
from scipy import special

from analysis.data.load import Study
from analysis.stats.columns import RunRow, ScalingRow, grouped
from analysis.stats.decompose import mean
from analysis.stats.estimate import LEVEL, MIN_RUNS
from analysis.stats.scaling import GUIDE, is_wide
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.units import listed, short_name, signed_percent

#: Significance level of a drift, and its minimum relative change over the study.
DRIFT_LEVEL = 0.01
DRIFT_LEAST = 0.01
#: Minimum relative change of the throughput within a run, as between the halves of a warm-up (`not-stable`).
DRIFT_IN_RUN = 0.1


class Drift(Finding, kind="drift"):
    """A trend of the throughput over the ``hours`` of a study, with its 95 % interval and p-value."""

    heading = "Drift over the study"
    remedy = "Check temperatures, other users and disk space."
    change: float
    change_low: float
    change_high: float
    hours: float
    p: float

    def _message(self) -> str:
        change, low, high = map(signed_percent, (self.change, self.change_low, self.change_high))
        return (
            f"The throughput of repeats of one configuration changes by {change} [{low}, {high}] over the "
            f"{self.hours:.1f} h of the study (p = {self.p:.2g}). Repeats are spread over the study, so a "
            "drift mainly widens confidence intervals and changes efficiencies less."
        )


class DriftInRun(Finding, kind="drift-in-run"):
    """Cells in whose runs the throughput changes: the relative ``change`` by cell."""

    heading = "Drift within runs"
    remedy = "Use a longer warm-up or longer runs, and check clocks and temperatures."
    change: Mapping[str, float]

    def _message(self) -> str:
        cells = [f"{short_name(cell)} by {signed_percent(value)}" for cell, value in self.change.items()]
        return (
            "From the first to the last third of the windows or values of a run, the throughput changes "
            f"(median of the logarithms over the runs): {listed(cells, limit=4)}. The mean depends on the "
            "length of the runs."
        )


@dataclass(frozen=True, kw_only=True)
class Width:
    """The ends of the interval of a quantity, relative to the quantity."""

    quantity: str
    low: float
    high: float


class WideIntervals(Finding, kind="wide-interval"):
    """Cells with wide intervals.

    Attributes:
        intervals: by cell and quantity, both ends of the interval.
        widths: by cell, the interval that is described.
    """

    heading = "Wide intervals"
    remedy = "Use more repeats."
    intervals: Mapping[str, Mapping[str, tuple[float, float]]]
    widths: Mapping[str, Width]
    guide: float

    def _message(self) -> str:
        cells = [
            f"{short_name(cell)} (ends of the interval relative to the {one.quantity}: "
            f"{signed_percent(one.low)} and {signed_percent(one.high)})"
            for cell, one in self.widths.items()
        ]
        return (
            "The 95 % intervals of these configurations are too wide to tell ideal scaling from an "
            f"efficiency of {self.guide}: {listed(cells, limit=4)}."
        )


def timed_runs(runs: Iterable[RunRow]) -> list[RunRow]:
    """Return the measured runs if the drift over the study can be estimated from them, else none of them."""
    counted = [run for run in runs if run.measured]
    starts = grouped(counted, lambda run: run.cell_id)
    if any(pd.isna(run.started_at) for run in counted) or len(counted) - len(starts) - 1 < MIN_RUNS:
        return []
    return counted if any(len({run.started_at for run in own}) > 1 for own in starts.values()) else []


def drift(runs: Iterable[RunRow]) -> Iterator[Drift]:
    """Yield a trend of the throughput over time, from a regression with a separate level for each cell."""
    timed = timed_runs(runs)
    if not timed:
        return
    first = min(run.started_at for run in timed)
    times, changes, span = [], [], 0.0
    cells = grouped(timed, lambda run: run.cell_id).values()
    for own in cells:
        hours = [(run.started_at - first).total_seconds() / 3600 for run in own]
        logs = [math.log(run.rate) for run in own]
        times += [value - mean(hours) for value in hours]
        changes += [value - mean(logs) for value in logs]
        span = max(span, *hours)
    time, change = np.array(times), np.array(changes)
    freedom = len(timed) - len(cells) - 1
    spread = float((time**2).sum())
    slope = float((time * change).sum()) / spread
    error = math.sqrt(float(((change - slope * time) ** 2).sum()) / freedom / spread)
    p_value = 2 * float(special.stdtr(freedom, -abs(slope) / error)) if error > 0 else 0.0
    if p_value > DRIFT_LEVEL or abs(slope * span) < DRIFT_LEAST:
        return
    half = float(special.stdtrit(freedom, 0.5 + LEVEL / 2)) * error
    low, value, high = (math.expm1(bound * span) for bound in (slope - half, slope, slope + half))
    yield Drift(change=value, change_low=low, change_high=high, hours=span, p=p_value)


def changes_in_runs(study: Study, runs: Iterable[RunRow]) -> dict[str, float]:
    """Return by cell the median of log(last / first third of the epochs) over the throughputs of its runs."""
    logs: dict[str, list[float]] = {}
    epochs = study.epochs[study.epochs["throughput_samples_per_sec"] > 0]
    for run_id, rate in zip(epochs["run_id"], epochs["throughput_samples_per_sec"], strict=True):
        logs.setdefault(run_id, []).append(math.log(rate))
    changes: dict[str, list[float]] = {}
    for run in runs:
        own = logs.get(run.run_id, ())
        if run.measured and len(own) > 1:
            third = max(len(own) // 3, 1)
            changes.setdefault(run.cell_id, []).append(mean(own[-third:]) - mean(own[:third]))
    return {cell: median(own) for cell, own in sorted(changes.items())}


def drift_in_runs(study: Study, runs: Iterable[RunRow]) -> Iterator[DriftInRun]:
    """Yield the cells in whose runs the throughput changes."""
    changes = changes_in_runs(study, runs).items()
    values = {cell: math.expm1(log) for cell, log in changes if abs(log) > math.log1p(DRIFT_IN_RUN)}
    if values:
        yield DriftInRun(subject=tuple(values), change=values)


def wide_intervals(rows: Sequence[ScalingRow]) -> Iterator[WideIntervals]:
    """Yield the cells whose intervals of throughput or efficiency are wide (:func:`is_wide`).

    A cell whose interval of the efficiency does not contain the guide is not among them.
    """
    decided = {row.cell_id for row in rows if row.efficiency_high < GUIDE or row.efficiency_low >= GUIDE}
    widths: dict[str, Width] = {}
    intervals: dict[str, dict[str, tuple[float, float]]] = {}
    for name, column in (("efficiency", "efficiency"), ("throughput", "throughput_samples_per_sec")):
        for row in rows:
            value, low, high = (getattr(row, one) for one in (column, f"{name}_low", f"{name}_high"))
            if is_wide(low, high) and row.cell_id not in decided:
                width = Width(quantity=name, low=low / value - 1, high=high / value - 1)
                widths.setdefault(row.cell_id, width)
                intervals.setdefault(row.cell_id, {}).setdefault(name, (low, high))
    if widths:
        yield WideIntervals(subject=tuple(widths), intervals=intervals, widths=widths, guide=GUIDE)
