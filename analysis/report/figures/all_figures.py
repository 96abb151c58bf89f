"""The figures of a report, each as SVG (for the page and as a file), PNG and PDF.

A figure holds a few series at most and only as many marks as a reader can point at;
what it leaves out it says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis.data.names import ranks
from analysis.report.figures.bars import bars_draft, draw_losses, draw_split, loss_rows, split_rows
from analysis.report.figures.curves import (
    EFFICIENCY,
    IDEAL,
    SPEEDUP,
    THROUGHPUT,
    Curve,
    draw_curve,
    legend_lines,
    throughput_in,
)
from analysis.report.figures.drawing import Draft, Drawing, finish
from analysis.report.figures.heatmaps import (
    Grid,
    Heat,
    Panels,
    grid_caption,
    grid_description,
    grid_panels,
    heat_caption,
    heat_description,
    heat_panels,
    heats,
)
from analysis.report.figures.selection import (
    MAX_REPEATS,
    Selection,
    curve_caption,
    curve_description,
    repeats_of,
    select,
)
from analysis.stats.columns import PARTS
from analysis.stats.losses import LOSSES, SHORT_NAMES, SMALLEST_SHARE, TYPICAL_RANK_COLUMNS
from analysis.text import count, fraction, percent

_COLUMNS = (
    *("cell_id", "series", "baseline", "is_base", "nodes", "gpus_per_node", "gpus", "n", "rate"),
    *(name for curve in (SPEEDUP, EFFICIENCY, THROUGHPUT) for name in (curve.column, curve.low, curve.high)),
    *("global_batch", "base_place", "load_balance", "comm_efficiency", "useful_s", *TYPICAL_RANK_COLUMNS),
    *(*PARTS, "exposed"),
)


def draw_figures(
    table: pd.DataFrame,
    runs: pd.DataFrame,
    *,
    parts: dict[str, dict[str, str]],
    axes: Mapping[str, Grid],
    rate_unit: str = "samples/s",
) -> Iterator[Drawing]:
    """Yield each regime's figures.

    Speedup, efficiency, its grid of two axes, sizes against batches, throughput; what the
    efficiency is lost to, and the step's time.

    Args:
        table: from :func:`analysis.checks.scaling_table.scaling_table`.
        runs: the runs of :func:`analysis.stats.measured.measure`.
        parts: from :func:`analysis.data.names.series_parts`.
        axes: from :func:`analysis.report.figures.heatmaps.grids`.
        rate_unit: what a throughput counts.
    """
    throughput = throughput_in(rate_unit)
    over_batches = heats(table, parts, rate_unit=rate_unit)
    columns = [name for name in _COLUMNS if name in table]
    for regime in ("strong", "weak", ""):
        rows = table[(table["mode"] == regime) & (table["n"] > 0)][columns]
        if not len(rows):
            continue
        for curve in (SPEEDUP, EFFICIENCY, throughput):
            drawn = rows[rows[curve.column].notna()].drop(columns=[*PARTS, "exposed"])
            if len(drawn) and (curve is throughput or drawn["gpus"].nunique() > 1):
                yield _curve_figure(curve, select(drawn, regime, parts), runs)
            if curve is EFFICIENCY and regime in axes:
                yield _grid_figure(axes[regime])
            if curve is EFFICIENCY and regime in over_batches:
                yield _heat_figure(over_batches[regime])
        lost = loss_rows(rows, table)
        if len(lost):
            yield _loss_figure(select(lost, regime, parts, bars=True))
        split = split_rows(rows)
        if len(split):
            yield _split_figure(select(split, regime, parts, bars=True))


def all_names() -> list[str]:
    """Return the names of all figures that a report may have."""
    kinds = (SPEEDUP.kind, EFFICIENCY.kind, "axes", "heat", THROUGHPUT.kind, "loss", "step", "times")
    by_regime = [f"{kind}-{regime}" for kind in kinds for regime in ("strong", "weak", "other")]
    return [*by_regime, "bandwidth", "ranks"]


def _curve_figure(curve: Curve, selection: Selection, runs: pd.DataFrame) -> Drawing:
    rows = selection.rows
    repeats = repeats_of(curve, rows, runs)
    left_out = list(selection.left_out)
    if len(repeats) > MAX_REPEATS:
        left_out.append(f"the {len(repeats):,} single runs are not drawn")
        repeats = repeats.iloc[:0]
    elif len(repeats) == len(rows):
        repeats = repeats.iloc[:0]  # one run each: the mean is the run

    def draw(axes: Axes) -> dict[str, list[str]]:
        axes.grid(axis="y")
        return draw_curve(axes, curve, rows, repeats, labels=selection.labels)

    draft = Draft(
        name=f"{curve.kind}-{selection.regime or 'other'}",
        what=curve.axis.partition(" (")[0],
        regime=selection.regime,
        labels=selection.labels,
        shared=selection.shared,
        description=curve_description(curve, selection),
        caption=curve_caption(curve, selection, with_runs=len(repeats) > 0),
        left_out=left_out,
        height_in=2.9,
        legend_lines=legend_lines([*selection.labels.values(), IDEAL]),
        left_in=0.9 if curve.kind == THROUGHPUT.kind and rows[curve.column].max() >= 50_000 else 0.78,
    )
    return finish(draft, draw)


def _grid_figure(grid: Grid) -> Drawing:
    draft = Draft(
        name=f"axes-{grid.regime}",
        what="Efficiency and speedup by nodes and ranks per node",
        regime=grid.regime,
        labels=grid.labels,
        shared=grid.shared,
        description=grid_description(grid),
        caption=grid_caption(grid),
        left_out=list(grid.left_out),
        left_in=0.6,
    )
    return _panels_figure(draft, grid_panels(grid))


def _heat_figure(heat: Heat) -> Drawing:
    draft = Draft(
        name=f"heat-{heat.regime}",
        what=f"Efficiency and throughput by {heat.axis.lower()} and batch",
        regime=heat.regime,
        labels={name: name for name in heat.panels},
        description=heat_description(heat),
        caption=heat_caption(heat),
        left_out=list(heat.left_out),
        left_in=0.9,
    )
    return _panels_figure(draft, heat_panels(heat))


def _panels_figure(draft: Draft, panels: Panels) -> Drawing:
    return finish(replace(draft, height_in=panels.height_in, with_axis=False), panels.draw)


def _loss_figure(selection: Selection) -> Drawing:
    draft = bars_draft(
        selection,
        kind="loss",
        what="What the efficiency is lost to",
        topic="time",
        description=_loss_description(selection.rows),
        caption=(
            "From 1 to the efficiency that is left: each factor takes its share on a logarithmic axis, since "
            "factors multiply. Behind the bar: the efficiency, from the throughput windows; the factors are "
            "those of the attribution window. Left of 1: gains."
        ),
        legend_lines=2,
    )
    return finish(draft, lambda axes: draw_losses(axes, selection.rows, labels=selection.labels))


def _loss_description(rows: pd.DataFrame) -> str:
    largest = rows.sort_values("gpus", kind="stable").iloc[-1]
    lost = {name: max(0.0, -math.log(largest[name])) for name in LOSSES}
    total = sum(lost.values())
    shares = [
        f"{SHORT_NAMES[name]} {percent(part / total)}"
        for name, part in sorted(lost.items(), key=lambda item: -item[1])
        if total > 0 and part / total >= SMALLEST_SHARE
    ]
    return (
        f"Stacked bars of {count(len(rows), 'cell')}. At {ranks(largest)} the efficiency is "
        f"{fraction(largest['efficiency'], decimals=2)}; of the loss: {', '.join(shares) or 'nothing'}."
    )


def _split_figure(selection: Selection) -> Drawing:
    rows = selection.rows
    largest = rows.sort_values("gpus", kind="stable").iloc[-1]
    exposed = (largest["transfer"] + np.nan_to_num(largest["wait"])) / largest["total_s"]
    draft = bars_draft(
        selection,
        kind="step",
        what="Where the step's time goes",
        topic="time",
        description=(
            f"Stacked bars of {count(len(rows), 'cell')}. At {ranks(largest)} "
            f"{percent(exposed)} of the step is exposed communication."
        ),
        caption=(
            "Means over ranks, of the attribution window; the step's time stands behind its bar. Hatched: "
            "waiting for the slowest rank, the part of exposed communication above the least of all ranks."
        ),
        legend_lines=4,
    )
    return finish(draft, lambda axes: draw_split(axes, rows, labels=selection.labels))
