"""Draw all figures of a report, and return the data that was read for them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import pandas as pd

from analysis.checks.fabric import (
    fabric_table,
    fabrics_of,
    sweep_rows,
)
from analysis.checks.slow_ranks import RankMeans, least_balanced_cells, nodes_table, rank_means
from analysis.data.csv_files import csv_text
from analysis.data.load import Study
from analysis.report.figures.bars import ranks_figure, split_figure, split_rows
from analysis.report.figures.curves import (
    EFFICIENCY,
    SPEEDUP,
    THROUGHPUT,
    bandwidth_figure,
    curve_figure,
)
from analysis.report.figures.drawing import Drawing, Selection, select
from analysis.report.figures.heatmaps import batch_figure, grid_figure
from analysis.report.figures.step_times import MAX_SERIES, step_rows, steps_figure
from analysis.stats.columns import PARTS
from analysis.stats.law_forms import Fabric
from analysis.stats.measured import Frames

_COLUMNS = (
    *("cell_id", "series", "baseline", "is_base", "nodes", "gpus_per_node", "gpus", "n", "rate"),
    *(name for curve in (SPEEDUP, EFFICIENCY, THROUGHPUT) for name in (curve.column, curve.low, curve.high)),
    *(*PARTS, "exposed"),
)

MODES = ("strong", "weak", "")

#: Files that :func:`detail_figures` may add to a report.
DETAIL_FILES = ("sweep.csv", "fabric.csv", "nodes.csv")


def scaling_figures(
    table: pd.DataFrame,
    runs: pd.DataFrame,
    *,
    parts: dict[str, dict[str, str]],
    axes: Mapping[str, Selection],
    invalid: Collection[str] = (),
) -> Iterator[Drawing]:
    """Yield the figures of the scaling table: curves, heat maps and step times of each mode.

    The curves mark the cells whose values, or those of their baseline, are ``invalid``.
    """
    columns = [name for name in _COLUMNS if name in table]
    valid = ~table["cell_id"].isin(invalid)
    compared = valid & ~table["base_cell"].isin(invalid)
    for mode in MODES:
        rows = table[(table["mode"] == mode) & (table["n"] > 0)][columns]
        if not len(rows):
            continue
        for curve in (EFFICIENCY, SPEEDUP, THROUGHPUT):
            drawn = rows[rows[curve.column].notna()].drop(columns=[*PARTS, "exposed"])
            if len(drawn) and (curve is THROUGHPUT or drawn["gpus"].nunique() > 1):
                drawn = drawn.assign(valid=valid if curve is THROUGHPUT else compared)
                yield curve_figure(curve, select(drawn, mode, parts), runs)
        if mode in axes:
            yield grid_figure(axes[mode])
        if mode and (heat := batch_figure(table, mode, parts)):
            yield heat
        split = split_rows(rows)
        if len(split):
            selection = select(split, mode, parts, bars=True)
            yield split_figure(selection)
            yield split_figure(selection, shares=True)


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


@dataclass(frozen=True)
class Details:
    """Figures of single steps, ranks and messages, with the data that was read for them.

    Attributes:
        ranks: means of the ranks; None if no run has ranks.csv.
        fabrics: the measured all-reduce of each series.
        files: the texts of those :data:`DETAIL_FILES` that have content, by file name.
    """

    drawings: list[Drawing]
    ranks: RankMeans | None
    fabrics: dict[str, Fabric]
    files: dict[str, str]
    fabric: pd.DataFrame


def detail_figures(
    study: Study, frames: Frames, rows: pd.DataFrame, *, parts: dict[str, dict[str, str]]
) -> Details:
    """Draw the figures of steps.csv, ranks.csv and probes.json; a large study is sampled."""
    sweep = sweep_rows(study)
    fabric = fabric_table(sweep)
    files = {"sweep.csv": _csv(sweep), "fabric.csv": _csv(fabric)} if len(sweep) else {}
    drawings = [figure for figure in [bandwidth_figure(sweep, study)] if figure is not None]
    drawings += _step_figures(study, frames, rows, parts)
    ranks = rank_means(study, least_balanced_cells(rows), frames.runs)
    if ranks is not None:
        balance = dict(zip(rows["cell_id"], rows["load_balance"].astype(float), strict=True))
        drawings.append(ranks_figure(ranks, balance=balance))
        files["nodes.csv"] = _csv(nodes_table(ranks))
    return Details(drawings, ranks, fabrics_of(sweep, fabric, rows), files, fabric)


def _csv(table: pd.DataFrame) -> str:
    # Nine digits resolve microseconds in steps that take seconds.
    return csv_text(table, digits=9)


def _step_figures(
    study: Study, frames: Frames, rows: pd.DataFrame, parts: dict[str, dict[str, str]]
) -> list[Drawing]:
    drawings = []
    for mode in MODES:
        own = rows[(rows["mode"] == mode) & (rows["n"] > 0)]
        if not len(own):
            continue
        selection = select(own, mode, parts, bars=True)
        timed = step_rows(study, selection.rows, frames.runs)
        if len(timed):
            drawings.append(steps_figure(replace(selection, rows=timed)))
    return drawings
