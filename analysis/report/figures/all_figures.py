"""Draw all figures of a report."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pandas as pd

from analysis.checks.fabric import all_reduces
from analysis.report.figures.bars import ranks_figure, split, split_figure
from analysis.report.figures.curves import (
    EFFICIENCY,
    SPEEDUP,
    THROUGHPUT,
    bandwidth_figure,
    curve_figure,
)
from analysis.report.figures.drawing import Drawing, Selection, select
from analysis.report.figures.heatmaps import batch_figure, grid_figure
from analysis.report.figures.step_times import MAX_SERIES, step_times, steps_figure
from analysis.stats.columns import ScalingRow
from bench.units import known

if TYPE_CHECKING:
    from analysis.report.results import Results

MODES = ("strong", "weak", "")


def scaling_figures(
    table: Sequence[ScalingRow],
    runs: pd.DataFrame,
    *,
    parts: dict[str, dict[str, str]],
    axes: Mapping[str, Selection[ScalingRow]],
    invalid: Collection[str] = (),
) -> Iterator[Drawing]:
    """Yield the figures of the scaling table: curves, heat maps and step times of each mode.

    The curves mark the cells whose values, or those of their baseline, are ``invalid``.
    """
    rates = _rates(runs)
    for mode in MODES:
        rows = [row for row in table if row.mode == mode and row.n]
        if not rows:
            continue
        for curve in (EFFICIENCY, SPEEDUP, THROUGHPUT):
            drawn = [row for row in rows if known(curve.value(row))]
            if drawn and (curve is THROUGHPUT or len({row.gpus for row in drawn}) > 1):
                yield curve_figure(curve, select(drawn, mode, parts), rates, invalid)
        if mode in axes:
            yield grid_figure(axes[mode])
        if mode and (heat := batch_figure(table, mode, parts)):
            yield heat
        if divided := [row for row in rows if split(row)]:
            selection = select(divided, mode, parts, bars=True)
            yield split_figure(selection)
            yield split_figure(selection, shares=True)


def efficiency_figure(results: Results, rows: Sequence[ScalingRow], *, name: str) -> Drawing:
    """Draw the efficiencies of ``rows``, which have one mode, as a figure with its own file name."""
    selection, rates = select(rows, rows[0].mode, results.parts), _rates(results.frames.runs)
    return replace(curve_figure(EFFICIENCY, selection, rates, results.invalid), name=name)


def _rates(runs: pd.DataFrame) -> dict[str, list[tuple[str, float]]]:
    """Return the id and the throughput of the measured runs of each cell."""
    rates: dict[str, list[tuple[str, float]]] = {}
    counted = runs[runs["measured"]]
    for cell_id, *run in zip(*(counted[name] for name in ("cell_id", "run_id", "rate")), strict=True):
        rates.setdefault(cell_id, []).append(tuple(run))
    return rates


def all_names() -> list[str]:
    """Return the names of all figures that a report can have."""
    kinds = (
        SPEEDUP.kind,
        EFFICIENCY.kind,
        "axes",
        "heat",
        THROUGHPUT.kind,
        "step",
        "shares",
        "times",
    )
    why = [f"{kind}-{place}" for kind in ("why", "steps") for place in range(1, MAX_SERIES + 1)]
    return [*(f"{kind}-{mode or 'other'}" for kind in kinds for mode in MODES), "bandwidth", "ranks", *why]


def detail_figures(results: Results) -> list[Drawing]:
    """Draw the figures of steps.csv, ranks.csv and probes.json; a large study is sampled."""
    bandwidth = bandwidth_figure(all_reduces(results.sweep), results.study)
    drawings = [bandwidth] if bandwidth else []
    for mode in MODES:
        rows = [row for row in results.rows if row.mode == mode and row.n]
        if not rows:
            continue
        selection = select(rows, mode, results.parts, bars=True)
        times = step_times(results.study, selection.rows, results.frames.runs)
        if timed := [row for row in selection.rows if row.cell_id in times]:
            drawings.append(steps_figure(replace(selection, rows=timed), times))
    if results.ranks is not None:
        balance = {row.cell_id: row.load_balance for row in results.rows}
        drawings.append(ranks_figure(results.ranks, balance=balance))
    return drawings
