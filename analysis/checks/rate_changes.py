"""Findings about rates: drifts, wide intervals, and cells whose runs differ.

Thresholds are chosen so that noise is rarely reported. No run is dropped because of these findings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from scipy import special

from analysis.checks.assessment import CheckedStudy, check
from analysis.data.columns import RunRow, grouped
from analysis.stats.decompose import mean
from analysis.stats.estimate import LEVEL, MIN_RUNS
from analysis.stats.scaling import GUIDE, is_wide
from ddp_scaling_bench.finding import Finding, Severity
from ddp_scaling_bench.units import known, listed, short_name, short_percent, signed_percent

#: Significance level of a drift, and its minimum relative change over the study.
DRIFT_LEVEL = 0.01
DRIFT_LEAST = 0.01
#: Minimum relative change of the throughput within a run, as between the halves of a warm-up (`not-stable`).
DRIFT_IN_RUN = 0.1
#: A cell is unstable if the standard deviation of its runs' log throughput is above this.
UNSTABLE = 0.05


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


def _timed_runs(about: CheckedStudy) -> list[RunRow]:
    """Return the measured runs if the drift over the study can be estimated from them, else none of them."""
    counted = [run for run in about.runs if run.measured]
    starts = grouped(counted, lambda run: run.cell_id)
    if any(run.started_at is None for run in counted) or len(counted) - len(starts) - 1 < MIN_RUNS:
        return []
    return counted if any(len({run.started_at for run in own}) > 1 for own in starts.values()) else []


@check("drift", possible=lambda about: {run.cell_id for run in _timed_runs(about)})
def drift(about: CheckedStudy) -> Iterator[Drift]:
    """Yield a trend of the throughput over time, from a regression with a separate level for each cell."""
    timed = _timed_runs(about)
    if not timed:
        return
    begun = {run.run_id: run.started_at.timestamp() for run in timed if run.started_at}
    first = min(begun.values())
    times, changes, span = [], [], 0.0
    cells = grouped(timed, lambda run: run.cell_id).values()
    for own in cells:
        hours = [(begun[run.run_id] - first) / 3600 for run in own]
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


@check("drift-in-run", possible=lambda about: {*about.changes_in_runs})
def _drift_in_runs(about: CheckedStudy) -> Iterator[DriftInRun]:
    changes = about.changes_in_runs.items()
    if values := {cell: math.expm1(log) for cell, log in changes if abs(log) > math.log1p(DRIFT_IN_RUN)}:
        yield DriftInRun(subject=tuple(values), change=values)


@dataclass(frozen=True, kw_only=True)
class WideInterval:
    """A wide interval of a quantity."""

    quantity: str
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        ends = " and ".join(signed_percent(end / self.value - 1) for end in (self.low, self.high))
        return f"(ends of the interval relative to the {self.quantity}: {ends})"


class WideIntervals(Finding, kind="wide-interval"):
    """Cells with a wide interval of the efficiency, or else of the throughput."""

    heading = "Wide intervals"
    remedy = "Use more repeats."
    intervals: Mapping[str, WideInterval]

    def _message(self) -> str:
        cells = [f"{short_name(cell)} {one}" for cell, one in self.intervals.items()]
        return (
            "The 95 % intervals of these configurations are too wide to tell ideal scaling from an "
            f"efficiency of {GUIDE}: {listed(cells, limit=4)}."
        )


@check(
    "intervals", possible=lambda about: {row.cell_id for row in about.measured if known(row.throughput_low)}
)
def wide_intervals(about: CheckedStudy) -> Iterator[WideIntervals]:
    """Yield the cells whose intervals of throughput or efficiency are wide (:func:`is_wide`).

    A cell whose interval of the efficiency does not contain the guide is not among them.
    """
    decided = {
        row.cell_id for row in about.rows if row.efficiency_high < GUIDE or row.efficiency_low >= GUIDE
    }
    found: dict[str, WideInterval] = {}
    for name, column in (("efficiency", "efficiency"), ("throughput", "throughput_samples_per_sec")):
        for row in about.rows:
            value, low, high = (getattr(row, one) for one in (column, f"{name}_low", f"{name}_high"))
            if is_wide(low, high) and row.cell_id not in decided:
                found.setdefault(row.cell_id, WideInterval(quantity=name, value=value, low=low, high=high))
    if found:
        yield WideIntervals(subject=tuple(found), intervals=found)


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


@check()
def unstable_cells(about: CheckedStudy) -> Iterator[UnstableCells]:
    """Yield the cells whose runs differ, the least stable first, with the deviation of log rates."""
    runs = grouped((run for run in about.runs if run.measured), lambda run: run.cell_id)
    spread = {
        cell: float(np.log([run.rate for run in own]).std(ddof=1))
        for cell, own in runs.items()
        if len(own) >= MIN_RUNS
    }
    wide = {cell: value for cell, value in spread.items() if value > UNSTABLE}
    if wide := dict(sorted(wide.items(), key=lambda item: -item[1])):
        planned = about.study.planned
        is_whole = bool(planned) and all(cell.resources.exclusive for cell in planned)
        advice = "whole-nodes" if is_whole else "shared-nodes"
        yield UnstableCells(subject=tuple(wide), spread=wide, advice=advice)
