"""Speedup and efficiency of every cell within each of its series.

With T the time per step (per global batch), N the ranks and N₀ those of the baseline:

=======  ==========================================  ==================  =============
regime   constant over the series                    speedup             efficiency
=======  ==========================================  ==================  =============
strong   global batch                                S = T(N₀)/T(N)      E = S·N₀/N
weak     batch per rank                              S = E·N/N₀          E = T(N₀)/T(N)
=======  ==========================================  ==================  =============

(G. M. Amdahl 1967 and J. L. Gustafson 1988.) The batches of a series determine its regime; its label in the
plan does not. A series of neither regime has no efficiency. A series of times to train has only the speedup
T(N₀)/T(N).

The incremental efficiency between the sizes of a and b ranks is e = (E(b) / E(a)) ** (1 / log2(b / a)):
1 if each doubling doubles the throughput. Some sites, such as CSC, grant a larger job only if a doubling
gives 1.5 times the throughput, that is e = 0.75.

Karp-Flatt's serial fraction of a strong series (A. H. Karp and H. P. Flatt, Commun. ACM 33, 1990),
with p = N/N₀, is f = (1/S - 1/p) / (1 - 1/p). It is constant if a fixed serial part limits the speedup.
It grows if communication, imbalance or start-up grow with the size.

Two axes: the efficiency of a size n x k (n nodes of k ranks) is a factor within one node times a factor over
nodes: E(n x k) = E(1 x k) * [E(n x k) / E(1 x k)]. The second factor does not depend on the baseline. It is
T(1 x k) / (n T(n x k)) for strong scaling and T(1 x k) / T(n x k) for weak scaling.

The baseline of a series is the requested size or cell, else the smallest measured size.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from analysis.data.columns import (
    READINGS,
    SAME_UNIT,
    RunRow,
    ScalingRow,
    by_series,
    grouped,
)
from analysis.data.load import Study
from analysis.data.names import baseline_name, size_name
from analysis.stats.decompose import cell_parts, computational_scalability, mean
from analysis.stats.estimate import LogMoments, log_moments, mean_interval, ratio_interval
from analysis.stats.measured import Measured, measure
from analysis.text import one_line
from bench.study.ledger import RunState
from ddp_scaling_bench.errors import BenchError
from ddp_scaling_bench.units import known, listed

#: Values of ``--baseline`` for one rank without DDP, and for a number of ranks.
_NO_DDP = re.compile(r"(?:1 (?:gpu|rank) )?(?:no|without)[ -]ddp", re.IGNORECASE)
_RANKS = re.compile(r"([0-9]+)(?: (?:gpus?|ranks?))?", re.IGNORECASE)


def with_baseline(rows: Sequence[ScalingRow], baseline: str | None) -> list[ScalingRow]:
    """Return the rows that a value of ``--baseline`` selects.

    ``baseline`` is a cell's id; a size as nodes x ranks per node (``1x4``) or as ranks (``4``, ``4 GPUs``);
    ``no-ddp`` (one rank without DDP); or ``common``, the smallest size that every series has measured. A size
    selects cells with DDP if there are any.
    """
    baseline = (baseline or "").strip()
    if by_name := [row for row in rows if row.cell_id == baseline]:
        return by_name
    if baseline.casefold() == "common":
        return _smallest_common(rows)
    if _NO_DDP.fullmatch(baseline):
        return [row for row in rows if not row.ddp]
    name = baseline.replace("×", "x").replace(" ", "")
    found = [row for row in rows if size_name(row) == name]
    ranks = _RANKS.fullmatch(baseline)
    if ranks and not found:
        found = [row for row in rows if row.gpus == int(ranks[1])]
    return [row for row in found if row.ddp] or found


def _smallest_common(rows: Sequence[ScalingRow]) -> list[ScalingRow]:
    measured = {(row.series, row.gpus) for row in rows if row.n and row.ddp}
    series = Counter(gpus for _, gpus in measured)
    common = min((gpus for gpus, amount in series.items() if amount == len(by_series(rows))), default=None)
    return [row for row in rows if row.gpus == common and row.ddp]


def check_baseline(rows: Sequence[ScalingRow], baseline: str | None) -> None:
    """Check that the requested baseline exists in some series.

    Raises:
        BenchError: no cell of that name or size was planned; the message lists the sizes.
    """
    if baseline is None or with_baseline(rows, baseline):
        return
    if baseline.strip().casefold() == "common":
        raise BenchError(
            "--baseline common: no size was measured in every series", remedy="give a size or omit --baseline"
        )
    sizes = dict.fromkeys(map(size_name, sorted(rows, key=lambda row: (row.gpus, row.nodes))))
    without = "" if all(row.ddp for row in rows) else ", and no-ddp"
    raise BenchError(
        f"--baseline {one_line(baseline, limit=80)}: no such size or cell; "
        f"the sizes are {listed(list(sizes), limit=20)}{without}",
        remedy="give one of these sizes, a number of ranks, or the cell_id of one of its cells",
    )


def _find_baselines(rows: Sequence[ScalingRow], baseline: str | None) -> Iterator[tuple[str, ScalingRow]]:
    """Yield each series that has a measured row, with the row that is its baseline.

    The baseline of a series is, in order of preference: the requested one, if measured in the series; a
    requested cell without DDP that does the same work in another series; or the smallest measured size (by
    ranks, then nodes, cells with DDP first).
    """
    preferred = {row.place for row in with_baseline(rows, baseline) if row.n}
    elsewhere = [row for row in rows if row.place in preferred and not row.ddp]
    for series, own in by_series(rows).items():
        measured = [row for row in own if row.n]
        if measured:
            first = min(measured, key=lambda row: (row.place not in preferred, not row.ddp, row.place))
            others = [] if first.place in preferred else elsewhere
            yield series, next((row for row in others if _same_work(row, own[0])), first)


def _same_work(row: ScalingRow, other: ScalingRow) -> bool:
    """Return whether ``row`` has the settings and the batch (strong: global, weak: per rank) of ``other``."""
    if other.mode == "strong":
        same = row.global_batch == other.global_batch
    else:
        same = row.batch_per_replica == other.batch_per_replica and other.mode == "weak"
    settings = [(one.launcher, one.backend, one.variant) for one in (row, other)]
    return same and settings[0] == settings[1]


#: Efficiency that POP's guidelines call good scaling (https://pop-coe.eu/node/69).
GUIDE = 0.8


def is_wide(low: Any, high: Any) -> Any:
    """Return whether intervals (numbers or columns) are wide; an unknown interval is not.

    From the middle of a wide interval (on a logarithmic scale), each end is more than a factor of 1 / GUIDE
    away: such an interval around 1 contains :data:`GUIDE`, so it tells nothing about whether a size scales.
    """
    return high / low > GUIDE**-2


#: If no run of a cell counts, the state of the cell is the first of these states that any of its runs has.
_STATE_ORDER = (
    *(RunState.RUNNING, RunState.QUEUED, RunState.FAILED, RunState.UNKNOWN, RunState.CANCELLED),
    *(RunState.COMPLETED, RunState.PLANNED),
)


#: The columns of report/axes.csv: one row per series and size, sorted by ranks per node, then nodes.
AXES_COLUMNS = (
    *("cell_id", "series", "baseline", "mode", "nodes", "gpus_per_node", "gpus", "n"),
    *("speedup", "efficiency", "efficiency_low", "efficiency_high"),
    *("efficiency_within_node", "efficiency_over_nodes", "state", "reason"),
)


def scale(source: Study | Measured, *, baseline: str | None = None) -> list[ScalingRow]:
    """Return the scaling table, sorted by series, then size; ``reason`` is empty.

    :func:`analysis.checks.scaling_table.scaling_table` adds the reasons. Intervals are 95 % and need three
    runs of the cell and of the baseline. The baseline's efficiency is 1 by definition, without an interval.

    :func:`with_baseline` parses ``baseline``, a size or cell. By default, and in a series without this size
    or cell, the baseline is the smallest measured size.

    Raises:
        BenchError: no series contains the size or cell ``baseline``.
    """
    frames = source if isinstance(source, Measured) else measure(source)
    moments = log_moments(
        [
            [run.throughput_samples_per_sec for run in frames.measured_in(cell.cell_id)]
            for cell in frames.cells
        ]
    )
    rows = _measured_rows(frames, moments)
    check_baseline(rows, baseline)
    for own in by_series(rows).values():
        for row in own:
            row.mode = _regime(own, row.label_mode)
    _add_baselines(rows, baseline)
    for row in rows:
        both = (row, row.base or row)
        row.not_compared = any(one.other_batch or frames.are_separate(one.cell_id) for one in both)
    _add_efficiency([row for row in rows if row.base], moments)
    _add_increments(rows, moments)
    ranks = Counter((row.series, row.gpus) for row in rows)
    for row in rows:
        row.several = ranks[row.series, row.gpus] > 1
        row.karp_flatt = _karp_flatt(row)
        row.throughput_all, row.efficiency_all = row.throughput_samples_per_sec, row.efficiency
    if any(run.left_out for run in frames.runs):
        for row, other in zip(rows, scale(frames.with_left_out(), baseline=baseline), strict=True):
            row.throughput_all, row.efficiency_all = other.throughput_samples_per_sec, other.efficiency
    return rows


def _measured_rows(frames: Measured, moments: LogMoments) -> list[ScalingRow]:
    """Return one row per cell and series with the columns that do not depend on the baseline."""
    low, high = mean_interval(moments)
    cells = {}
    for place, cell in enumerate(frames.cells):
        given = {name: value for name, value in vars(cell).items() if name not in ("device", "swept")}
        row = ScalingRow(**given, variant=_variant(cell.swept), cell_place=place)
        row.log_mean, row.log_variance = float(moments.mean[place]), float(moments.variance[place])
        _add_measurements(row, frames.runs_of_cells.get(row.cell_id, ()))
        row.throughput_low = min(float(low[place]), row.throughput_samples_per_sec)
        row.throughput_high = max(float(high[place]), row.throughput_samples_per_sec)
        cells[row.cell_id] = row
    places: dict[str, int] = {}
    rows = [
        replace(cells[cell], series=name, label_mode=mode, series_place=places.setdefault(name, len(places)))
        for cell, name, mode in frames.members
    ]
    rows.sort(key=lambda row: (row.series_place, row.gpus, row.nodes, row.cell_place))
    for place, row in enumerate(rows):
        row.place = place
    return rows


def _add_measurements(row: ScalingRow, runs: Sequence[RunRow]) -> None:
    """Add the values that ``runs``, those of the row's cell, have measured."""
    measured = [run for run in runs if run.measured]
    recorded = [run for run in runs if (run.measured or run.left_out) and run.disturbed is not None]
    row.runs, row.n, row.n_undisturbed = len(runs), len(measured), sum(not run.disturbed for run in measured)
    row.n_disturbed = sum(bool(run.disturbed) for run in recorded) if recorded else None
    states = {run.state for run in runs}
    # A cell is completed if a run counts.
    row.state = str(RunState.COMPLETED if measured else next((s for s in _STATE_ORDER if s in states), ""))
    # The throughput is computed from the mean time per step, so it is the harmonic mean over the runs.
    row.step_time_sec = mean(run.step_time_sec for run in measured)
    row.rate = row.throughput_samples_per_sec = row.global_batch / row.step_time_sec
    row.node_hours = row.nodes * mean(run.wall_s for run in measured) / 3600
    if units := [run.unit for run in measured if run.unit == run.unit]:
        # If runs of one cell count different units, the cell gets the unit infinity, unequal to all others.
        row.unit = median(units) if max(units) <= (1 + SAME_UNIT) * min(units) else math.inf
    if row.other_batch:  # the time of a step is that of the planned batch
        row.step_time_sec = math.nan
    parts = {name: mean(getattr(run, name) for run in measured) for name in READINGS} | cell_parts(measured)
    for name, value in parts.items():
        setattr(row, name, value)


def rate_per_rank(row: ScalingRow) -> float:
    """Return the throughput per rank, in weak scaling per planned sample: ratios of it are efficiencies.

    Without a known batch, as in some tables measured elsewhere, a step of weak scaling does the work of one
    sample per replica.
    """
    if row.mode == "strong":
        return row.rate / row.gpus
    return row.rate / (row.global_batch if known(row.global_batch) else row.gpus / row.model_parallel)


def _variant(swept: dict[str, Any] | None) -> str:
    """Return a text for the swept options without the strategy: cells with the same text do the same work."""
    own = (swept or {}) | {"strategy": None}
    return "" if swept is None else repr(sorted(own.items()))


def _regime(rows: Sequence[ScalingRow], label: str) -> str:
    """Return ``strong``, ``weak`` or an empty text for a series, from all its batches."""
    same_global = len({row.global_batch for row in rows}) == 1
    same_per_rank = len(set(map(batch_per_rank, rows))) == 1
    # If all cells have one size, the batches fit both regimes: the plan's label decides.
    if len(rows) == 1 or (same_global and same_per_rank):
        return label
    return "strong" if same_global else "weak" if same_per_rank else ""


def batch_per_rank(row: ScalingRow) -> str:
    """Return the global batch per rank as text with nine digits, so that rounding errors do not matter."""
    return f"{row.batch_per_replica:.9g}"


def _add_baselines(rows: Sequence[ScalingRow], baseline: str | None) -> None:
    """Add the base and the column ``baseline``: its size, and its cell_id if sizes are ambiguous."""
    measured = [row for row in rows if row.n]
    sizes = Counter((row.series, row.nodes, row.gpus_per_node, row.gpus, row.ddp) for row in measured)
    ambiguous = max(sizes.values(), default=0) > 1
    series = by_series(rows)
    found = dict(_find_baselines(rows, baseline))
    used = {base.place for name, base in found.items() if base.series != name}
    for name, base in found.items():
        # A cell that is compared to nothing has no efficiency.
        alone = len(series[name]) == 1 and base.series == name and base.place not in used
        text = baseline_name(base) + ("" if base.ddp else " without DDP")
        for row in series[name]:
            if row.mode and not alone:
                row.base, row.baseline = base, f"{text}, {base.cell_id}" if ambiguous else text


def _moments_of(rows: Iterable[ScalingRow], moments: LogMoments) -> LogMoments:
    return moments.take(np.array([row.cell_place for row in rows], dtype=np.intp))


def _add_efficiency(rows: Sequence[ScalingRow], moments: LogMoments) -> None:
    """Add speedup and efficiency with their intervals, and the factors that are relative to the baseline.

    All rows have a baseline.
    """
    bases = [row.base for row in rows if row.base]
    ends = ratio_interval(_moments_of(rows, moments), _moments_of(bases, moments))
    for row, base, low, high in zip(rows, bases, *(one.tolist() for one in ends), strict=True):
        if row.not_compared:
            continue
        strong, growth = row.mode == "strong", row.gpus / base.gpus
        # In both regimes, E is the ratio of the throughputs per rank.
        per_rank = 1 / growth if strong else base.global_batch / row.global_batch
        row.efficiency = base.step_time_sec / row.step_time_sec / (growth if strong else 1)
        if not row.is_base:
            # A harmonic mean can lie outside of the interval of the geometric mean.
            row.efficiency_low = min(low * per_rank, row.efficiency)
            row.efficiency_high = max(high * per_rank, row.efficiency)
        row.speedup = row.efficiency * growth
        row.speedup_low, row.speedup_high = row.efficiency_low * growth, row.efficiency_high * growth
        row.computational_scalability = computational_scalability(row, base)
        row.global_efficiency = row.pop_parallel_efficiency * row.computational_scalability


def _add_increments(rows: Sequence[ScalingRow], moments: LogMoments) -> None:
    """Add the columns of the incremental efficiency to the rows with a smaller measured size."""
    usable = [row for row in rows if row.mode and row.n and row.ddp and not row.not_compared]
    pairs = [pair for own in by_series(usable).values() for pair in _with_smaller(own)]
    ends = ratio_interval(*(_moments_of(own, moments) for own in zip(*pairs, strict=True))) if pairs else ()
    for (row, before), low, high in zip(pairs, *(one.tolist() for one in ends), strict=True) if pairs else ():
        growth = row.gpus / before.gpus
        gain = (row.rate / before.rate / growth, low / growth, high / growth)
        with np.errstate(over="ignore"):
            doubled = np.power(gain, 1 / math.log2(growth)).tolist()
        row.incremental_from = before.gpus
        row.incremental_efficiency, row.incremental_low, row.incremental_high = doubled


def _with_smaller(rows: Sequence[ScalingRow]) -> Iterator[tuple[ScalingRow, ScalingRow]]:
    """Yield the rows of a series with the next smaller measured size.

    A size with the same ranks per node is preferred, then one on a single node, then any other size.
    """
    for row in rows:
        smaller = [other for other in rows if other.gpus < row.gpus]
        path = [other for other in smaller if other.gpus_per_node == row.gpus_per_node]
        within = [other for other in smaller if other.nodes == 1]
        if smaller:
            yield row, max(path or within or smaller, key=lambda other: other.gpus)


def _karp_flatt(row: ScalingRow) -> float:
    """Return the serial fraction of a row with strong scaling and more ranks than the baseline, else NaN."""
    times = row.gpus / row.base.gpus if row.base and row.mode == "strong" and row.ddp else 1
    return (1 / row.speedup - 1 / times) / (1 - 1 / times) if times > 1 else math.nan


def two_axes(rows: Sequence[ScalingRow]) -> list[ScalingRow]:
    """Split the efficiency into a factor within one node and a factor over nodes.

    The result contains the series that have several node counts and several values of ranks per node. Sizes
    with unequal nodes and series without a baseline are left out. If several cells of a series have the same
    size, the first measured one is used.
    """
    usable = [row for row in rows if row.gpus_per_node.isdecimal() and row.base]
    usable.sort(key=lambda row: (row.series_place, int(row.gpus_per_node), row.nodes, row.n == 0))
    return [size for own in by_series(usable).values() for size in _split(own)]


def _split(rows: Sequence[ScalingRow]) -> list[ScalingRow]:
    sizes = {key: own[0] for key, own in grouped(rows, lambda row: (row.gpus_per_node, row.nodes)).items()}
    if any(len(set(values)) < 2 for values in zip(*sizes, strict=True)):
        return []
    for (per_node, _), row in sizes.items():
        one_node = sizes.get((per_node, 1))
        within = one_node.efficiency if one_node else math.nan
        row.efficiency_within_node = within if row.base and row.base.nodes == 1 else math.nan
        row.efficiency_over_nodes = row.efficiency / within
    return list(sizes.values())
