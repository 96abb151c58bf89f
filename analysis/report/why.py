"""Compose the page's section "Why": for each series, the causes of the loss with evidence and remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.causes.catalogue import RESTS, remedy_of, title_of
from analysis.causes.cells import CellDivision
from analysis.causes.table import evidence_text
from analysis.checks.scaling_table import Invalid
from analysis.data.load import Study
from analysis.data.names import ranks, widest_series
from analysis.report.figures.drawing import Drawing
from analysis.report.figures.step_times import MAX_SERIES, series_figure, waterfall_figure
from analysis.report.summary import loss_sentence, share_text
from analysis.text import known, number

#: Limits of a figure: runs, and points per run.
MAX_RUNS, MAX_POINTS = 60, 200
#: Columns of :func:`step_series`. ``number`` counts the steps of all windows of a run from 1.
SERIES_COLUMNS = ("run_id", "cell_id", "number", "epoch", "step", "step_time_sec", "slowest_rank")
#: Time outside all timers, and loss without a cause, are not listed below this share of the step.
_SMALLEST_REST = 0.005


@dataclass(frozen=True)
class WhySection:
    """The causes of the loss of one series at its largest size.

    Attributes:
        heading: the series and the size.
        sentence: the loss and its main causes.
        figures: the waterfall and, if single steps were recorded, their times.
        rows: title, share, evidence and remedy of each cause; the loss without a cause has only title and
            share.
    """

    heading: str
    sentence: str
    figures: list[Drawing]
    rows: list[tuple[str, str, str, str]]


def why_sections(
    study: Study,
    runs: pd.DataFrame,
    rows: pd.DataFrame,
    divisions: Mapping[int, CellDivision],
    *,
    labels: Mapping[str, str],
    rings: Mapping[str, float],
    invalid: Invalid,
) -> list[WhySection]:
    """Return a section for each of the series with the most measured sizes, in the plan's order.

    ``labels`` maps series to their names. ``rings`` maps cells to the fitted rate of the network (bytes/s).
    A section describes the largest size with valid values; if a series has none, it has the causes that do
    not depend on times at its largest size.
    """
    with_causes = [place for place, division in divisions.items() if division.rows]
    divided = rows[rows.index.isin(with_causes)].copy()
    divided["valid"] = ~divided[["cell_id", "base_cell"]].isin(list(invalid)).any(axis=1)
    last = [
        divided[divided["series"] == series].sort_values(["valid", "gpus"], kind="stable").iloc[-1]
        for series in widest_series(divided, limit=MAX_SERIES)
    ]
    cells = list(dict.fromkeys(str(row["cell_id"]) for row in last))
    shown = runs[runs["measured"] & runs["cell_id"].isin(cells)]
    steps = step_series(study, choose_runs(shown))
    return [
        _section(
            row,
            divisions.get(int(row["base_place"])) if known(row["efficiency"]) else None,
            divisions[int(str(row.name))],
            steps,
            place,
            label=labels.get(str(row["series"]), str(row["series"])),
            ring=rings.get(str(row["cell_id"])),
            not_valid=invalid.get(str(row["cell_id"])) or invalid.get(str(row["base_cell"]), ""),
        )
        for place, row in enumerate(last, 1)
    ]


def _section(
    row: pd.Series,
    base: CellDivision | None,
    division: CellDivision,
    steps: pd.DataFrame,
    place: int,
    *,
    label: str,
    ring: float | None,
    not_valid: str,
) -> WhySection:
    figures = [] if not_valid else [waterfall_figure(division, row, name=f"why-{place}", label=label)]
    own = steps[steps["cell_id"].astype("str") == row["cell_id"]]
    if not not_valid and own.groupby("run_id", observed=True).size().max() > 1:
        figures.append(series_figure(own, name=f"steps-{place}", label=label))
    shown = [one for one in division.rows if one.key.cause not in RESTS or abs(one.share) >= _SMALLEST_REST]
    return WhySection(
        f"{label}, {ranks(row)}",
        loss_sentence(division, row, base, size=ranks(row), not_valid=not_valid)
        + ("" if not_valid else _links(row, ring)),
        figures,
        [
            (
                title_of(one.key.cause),
                share_text(one),
                evidence_text(one, division, row),
                remedy_of(one.key.cause),
            )
            for one in shown
        ],
    )


def _links(row: pd.Series, ring: float | None) -> str:
    """Return a sentence about the links between the nodes: their rate, or how to measure it."""
    if row["nodes"] < 2:
        return ""
    if ring is None:
        return (
            " The links between the nodes were not measured, because the training has no all-reduce sweep: "
            "bench preflight measures them."
        )
    rate = f" The fitted rate of the all-reduces is {number(ring * 8e-9, digits=3)} Gbit/s"
    if row["gpus_per_node"] == "1":
        return f"{rate}, on the link of each node."
    return (
        f"{rate}: with {row['gpus_per_node']} ranks per node, this is the rate of a node's link if the ring "
        "crosses each node once, otherwise an effective rate."
    )


def choose_runs(runs: pd.DataFrame, *, limit: int = MAX_RUNS) -> list[str]:
    """Return the ids of at most ``limit`` runs: the first repeats of all cells, then the second ones, ..."""
    turn = runs.groupby("cell_id", sort=False, observed=True).cumcount().to_numpy()
    chosen = np.sort(np.argsort(turn, kind="stable")[:limit])
    return [str(run_id) for run_id in runs["run_id"].iloc[chosen]]


def step_series(study: Study, run_ids: Sequence[str], *, points: int = MAX_POINTS) -> pd.DataFrame:
    """Return the step times of some runs (:data:`SERIES_COLUMNS`), at most ``points`` rows per run.

    If a run has more steps, each row is the slowest one of a group of consecutive steps. Steps outside of
    the throughput windows were not timed and do not count.
    """
    steps = study.steps_of(run_ids)
    steps = steps[np.isfinite(steps["step_time_sec"])].astype({"run_id": "str", "cell_id": "str"})
    steps = steps.sort_values(["run_id", "epoch", "step"], kind="stable").reset_index(drop=True)
    runs = steps.groupby("run_id", sort=False)["step"]
    steps["number"] = runs.cumcount() + 1
    per_group = np.ceil(runs.transform("size") / points)
    groups = (steps["number"] - 1) // per_group
    slowest = steps.groupby([steps["run_id"], groups], sort=False)["step_time_sec"].idxmax()
    found: pd.DataFrame = steps.loc[slowest.to_numpy(dtype=int), list(SERIES_COLUMNS)]
    return found.reset_index(drop=True)
