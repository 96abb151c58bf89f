"""The page's section "Why": for each series, the causes of the loss with evidence and remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.causes.cells import CauseRow, CellDivision
from analysis.causes.divide import WHOLE
from analysis.causes.evidence import fact
from analysis.data.load import Study
from analysis.data.names import ranks, widest_series
from analysis.report.figures.drawing import Drawing
from analysis.report.figures.step_times import MAX_SERIES, series_figure, waterfall_figure
from analysis.report.results import Results
from analysis.report.words import WORDS
from analysis.stats.columns import ScalingRow, by_series
from analysis.text import one_line
from bench.facts import Fact
from bench.units import MISSING, known, percent
from bench.words import about, remedy, sentences, words

#: Limits of a figure: runs, and points per run.
MAX_RUNS, MAX_POINTS = 60, 200
#: Columns of :func:`step_series`. ``number`` counts the steps of all windows of a run from 1.
SERIES_COLUMNS = ("run_id", "cell_id", "number", "epoch", "step", "step_time_sec", "slowest_rank")
#: Time outside all timers, loss without a cause, and parts of the step are not listed below this share.
_SMALLEST_REST = 0.005
#: Parts of the step that are lost time at any size.
_LOST = ("data", "other", "transfer", "wait")


@dataclass(frozen=True)
class WhySection:
    """The causes of the loss of one series at its largest size.

    Attributes:
        heading: the series and the size.
        figures: the waterfall and, if single steps were recorded, their times.
        rows: title, share, evidence and remedy of the whole loss, its causes and the links between nodes.
    """

    heading: str
    figures: list[Drawing]
    rows: list[tuple[str, str, str, str]]


def why_sections(results: Results) -> list[WhySection]:
    """Return a section for each of the series with the most measured sizes, in the plan's order.

    A section describes the largest size with valid values; if a series has none, the largest size.
    """
    divided = [row for row in results.rows if row.place in results.divisions]
    own = by_series(divided)
    last = [
        max(reversed(own[series]), key=lambda row: (not results.error_of(row), row.gpus))
        for series in widest_series(divided, limit=MAX_SERIES)
    ]
    runs, cells = results.frames.runs, list(dict.fromkeys(row.cell_id for row in last))
    steps = step_series(results.study, choose_runs(runs[runs["measured"] & runs["cell_id"].isin(cells)]))
    return [
        _section(row, results, steps[steps["cell_id"].astype("str") == row.cell_id], place)
        for place, row in enumerate(last, 1)
    ]


def _section(row: ScalingRow, results: Results, steps: pd.DataFrame, place: int) -> WhySection:
    label, figures = results.titles.get(row.series, row.series), []
    table = loss_table(row, results)
    if not results.error_of(row):
        figures = [waterfall_figure(results.divisions[row.place], row, name=f"why-{place}", label=label)]
        if steps.groupby("run_id", observed=True).size().max() > 1:
            figures.append(series_figure(steps, name=f"steps-{place}", label=label))
        if row.nodes > 1:
            links = _links(row, results.evidence[row.cell_id][0].ring_bytes_per_s)
            table.append((WORDS["headings"]["links"], MISSING, words(links), remedy(links)))
    return WhySection(f"{label}, {ranks(row)}", figures, table)


def _links(row: ScalingRow, ring: float) -> Fact:
    if not known(ring):
        return fact("links-unknown")
    several = None if row.gpus_per_node == "1" else row.gpus_per_node
    return fact("link-rate", gbit_s=ring * 8e-9, ranks_per_node=several)


def loss_table(row: ScalingRow, results: Results) -> list[tuple[str, str, str, str]]:
    """Return title, share, evidence and remedy of the whole loss of a size and of each of its causes.

    The table has no row of the whole loss if the values are not valid.
    """
    own = [one for one in results.causes if (one.series, one.cell_id) == (row.series, row.cell_id)]
    if own and not results.error_of(row):
        own.insert(0, _whole_loss(row, results.divisions))
    return [
        (
            about(one.causes, "title"),
            share_text(one),
            one_line(sentences(one.evidence), limit=600),
            about(one.causes, "remedy"),
        )
        for one in own
        if not one.is_rest or not abs(one.share) < _SMALLEST_REST
    ]


def _whole_loss(row: ScalingRow, divisions: Mapping[int, CellDivision]) -> CauseRow:
    """Return the loss of a size, compared with that of its baseline."""
    division = divisions[row.place]
    relative = row.base and known(row.efficiency) and not row.is_base
    base = divisions.get(row.base.place) if row.base and relative else None
    evidence = []
    if base and WHOLE not in division.ideal:
        evidence.append(fact("base-loss", share=base.loss))
    if row.efficiency_low <= 1 <= row.efficiency_high:
        evidence.append(fact("loss-may-be-0"))
    here, there = division.parts, base.parts if base else {}
    parts = [
        {"part": part, "share": here[part], "base_share": there[part]}
        for part in _LOST
        if part in here and part in there and max(here[part], there[part]) >= _SMALLEST_REST
    ]
    if parts:
        evidence.append(fact("whole-parts", parts=parts))
    return CauseRow("loss", division.loss, evidence=tuple(evidence))


def share_text(row: CauseRow) -> str:
    """Return the share of a row with its interval."""
    if not known(row.share):
        return "share not certain" if row.timed else MISSING
    if not known(row.share_low):
        return percent(row.share)
    if row.share_high - row.share_low > 1:
        return f"{percent(row.share)} [share not certain]"
    doubtful = "; share not certain" if row.share_low <= 0 <= row.share_high else ""
    return f"{percent(row.share)} [{percent(row.share_low)}, {percent(row.share_high)}{doubtful}]"


def choose_runs(runs: pd.DataFrame) -> list[str]:
    """Return the ids of at most ``MAX_RUNS`` runs: the first repeats of all cells, then the second, ..."""
    turn = runs.groupby("cell_id", sort=False, observed=True).cumcount().to_numpy()
    chosen = np.sort(np.argsort(turn, kind="stable")[:MAX_RUNS])
    return [str(run_id) for run_id in runs["run_id"].iloc[chosen]]


def step_series(study: Study, run_ids: Sequence[str]) -> pd.DataFrame:
    """Return the step times of some runs (:data:`SERIES_COLUMNS`), at most ``MAX_POINTS`` rows per run.

    If a run has more steps, each row is the slowest one of a group of consecutive steps. Steps outside of
    the throughput windows were not timed and do not count.
    """
    steps = study.steps_of(run_ids)
    steps = steps[np.isfinite(steps["step_time_sec"])].astype({"run_id": "str", "cell_id": "str"})
    steps = steps.sort_values(["run_id", "epoch", "step"], kind="stable").reset_index(drop=True)
    runs = steps.groupby("run_id", sort=False)["step"]
    steps["number"] = runs.cumcount() + 1
    per_group = np.ceil(runs.transform("size") / MAX_POINTS)
    groups = (steps["number"] - 1) // per_group
    slowest = steps.groupby([steps["run_id"], groups], sort=False)["step_time_sec"].idxmax()
    found: pd.DataFrame = steps.loc[slowest.to_numpy(dtype=int), list(SERIES_COLUMNS)]
    return found.reset_index(drop=True)
