"""What lies behind the curves: bandwidth of the fabric, step times, ranks and nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pandas as pd

from analysis.checks.fabric import fabric_table, fabrics_of, sweep_rows
from analysis.checks.slow_ranks import RankMeans, least_balanced_cells, nodes_table, rank_means
from analysis.data.csv_files import csv_text
from analysis.data.load import Study
from analysis.report.figures.bandwidth import bandwidth_figure
from analysis.report.figures.drawing import Drawing
from analysis.report.figures.ranks import ranks_figure
from analysis.report.figures.selection import select
from analysis.report.figures.step_times import step_rows, steps_figure
from analysis.stats.laws.forms import Fabric
from analysis.stats.measured import Frames

#: The files that a report may have beside those that it always has.
FILES = ("sweep.csv", "fabric.csv", "nodes.csv")


@dataclass(frozen=True)
class Details:
    """What lies behind the curves.

    Attributes:
        drawings: the figures.
        ranks: the ranks' means; None where no run tells them.
        fabrics: by series, the all-reduce as its runs probed it.
        files: texts by name, some of :data:`FILES`.
    """

    drawings: list[Drawing]
    ranks: RankMeans | None
    fabrics: dict[str, Fabric]
    files: dict[str, str]


def look_closer(
    study: Study, frames: Frames, rows: pd.DataFrame, *, parts: dict[str, dict[str, str]]
) -> Details:
    """Return what a study's steps.csv, ranks.csv and probes.json tell; of a large one a sample.

    Args:
        study: whose files are read.
        frames: of :func:`analysis.stats.measured.measure`.
        rows: from :func:`analysis.checks.scaling_table.scaling_table`.
        parts: from :func:`analysis.data.names.series_parts`.
    """
    files = {}
    sweep = sweep_rows(study)
    fits = fabric_table(sweep)
    if len(sweep):
        files = {"sweep.csv": _csv(sweep), "fabric.csv": _csv(fits)}
    drawings = [figure for figure in [bandwidth_figure(sweep, study.cells)] if figure is not None]
    drawings += _step_figures(study, frames, rows, parts)
    ranks = rank_means(study, least_balanced_cells(rows), frames.runs)
    if ranks is not None:
        balance = dict(zip(rows["cell_id"], rows["load_balance"].astype(float), strict=True))
        drawings.append(ranks_figure(ranks, balance=balance))
        files["nodes.csv"] = _csv(nodes_table(ranks))
    return Details(drawings, ranks, fabrics_of(sweep, fits, rows), files)


def _csv(table: pd.DataFrame) -> str:
    # Timers tell microseconds of steps that take seconds: nine digits hold all of it.
    return csv_text(table, digits=9)


def _step_figures(
    study: Study, frames: Frames, rows: pd.DataFrame, parts: dict[str, dict[str, str]]
) -> list[Drawing]:
    drawings = []
    for regime in ("strong", "weak", ""):
        own = rows[(rows["mode"] == regime) & (rows["n"] > 0)]
        if not len(own):
            continue
        selection = select(own, regime, parts, bars=True)
        told = step_rows(study, selection.rows, frames.runs)
        if len(told):
            drawings.append(steps_figure(replace(selection, rows=told)))
    return drawings
