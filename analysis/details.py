"""What lies behind the curves: bandwidth of the fabric, step times, ranks and nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pandas as pd

from analysis.bandwidth import bandwidth_figure
from analysis.drawing import Drawing
from analysis.fabric import fabric_table, frame_csv, sweep_rows
from analysis.load import Study
from analysis.measured import Frames
from analysis.rank_view import Ranks, nodes_frame, rank_means, ranks_figure, worst_cells
from analysis.selection import select
from analysis.step_times import step_rows, steps_figure

#: The files that a report may have beside those that it always has.
FILES = ("sweep.csv", "fabric.csv", "nodes.csv")


@dataclass(frozen=True)
class Details:
    """Figures, the ranks' means (None where no run tells them), and files by name."""

    drawings: list[Drawing]
    ranks: Ranks | None
    files: dict[str, str]


def look_closer(
    study: Study, frames: Frames, rows: pd.DataFrame, *, parts: dict[str, dict[str, str]]
) -> Details:
    """Return what a study's steps.csv, ranks.csv and probes.json tell; of a large one a sample.

    Args:
        study: whose files are read.
        frames: of :func:`analysis.measured.measure`.
        rows: from :func:`analysis.scaling.scale`.
        parts: from :func:`analysis.labels.series_parts`.
    """
    files = {}
    sweep = sweep_rows(study)
    if len(sweep):
        files = {"sweep.csv": frame_csv(sweep), "fabric.csv": frame_csv(fabric_table(sweep))}
    drawings = [figure for figure in [bandwidth_figure(sweep, study.cells)] if figure is not None]
    drawings += _step_figures(study, frames, rows, parts)
    ranks = rank_means(study, worst_cells(rows), frames.runs)
    if ranks is not None:
        balance = dict(zip(rows["cell_id"], rows["load_balance"].astype(float), strict=True))
        drawings.append(ranks_figure(ranks, balance=balance))
        files["nodes.csv"] = frame_csv(nodes_frame(ranks))
    return Details(drawings, ranks, files)


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
