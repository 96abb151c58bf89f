"""How a cell's step times are distributed: a box per cell, over some of its runs."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from analysis.data.load import Study
from analysis.data.names import ranks
from analysis.report.figures.bars import bars_draft, draw_rows
from analysis.report.figures.drawing import Drawing, evenly_spaced, finish, log_ticks
from analysis.report.figures.palette import BLUE, INK, MUTED, VERMILLION
from analysis.report.figures.selection import Selection
from analysis.text import count, number, one_line, seconds, whole

#: Of how many runs of a cell steps.csv is read, spread over its repeats.
MAX_RUNS = 5
#: The ticks of a decade, from few to as many as a narrow span needs.
_STEPS = ((1.0,), (1.0, 2.0, 5.0), tuple(range(1, 10)), tuple(np.arange(1, 10, 0.25)))
_QUANTILES = {"low": 0.05, "lower": 0.25, "median": 0.5, "upper": 0.75, "high": 0.95}


def step_rows(study: Study, rows: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that have step times, with their quantiles and their slowest step.

    Args:
        study: whose steps.csv are read.
        rows: a few rows of the scaling table.
        runs: of :func:`analysis.stats.measured.measure`.
    """
    wanted = runs[runs["measured"] & runs["cell_id"].isin(rows["cell_id"])]
    sample = wanted.groupby("cell_id", sort=False)["run_id"].apply(_some).explode()
    steps = study.steps_of(sample.to_list())
    steps = steps[np.isfinite(steps["step_time_sec"]) & (steps["step_time_sec"] > 0)]
    groups = steps.groupby(steps["cell_id"].astype("str"), sort=False)
    found = [{"cell_id": cell_id, **_told(own)} for cell_id, own in groups if len(own) > 1]
    columns = ["cell_id", *_QUANTILES, "steps", "read", "slowest", "where", "beyond"]
    return rows.merge(pd.DataFrame(found, columns=columns), on="cell_id")


def _some(run_ids: pd.Series) -> list[str]:
    return [str(run_ids.iloc[place]) for place in evenly_spaced(len(run_ids), MAX_RUNS)]


def _told(steps: pd.DataFrame) -> dict[str, Any]:
    times = steps["step_time_sec"].to_numpy(dtype=float)
    slowest = steps.iloc[int(times.argmax())]
    rank = slowest["slowest_rank"]
    by = f", rank {whole(float(rank))} the last" if pd.notna(rank) else ""
    levels = dict(zip(_QUANTILES, np.quantile(times, list(_QUANTILES.values())), strict=True))
    return {
        **levels,
        "steps": len(times),
        "read": steps["run_id"].nunique(),
        "slowest": float(times.max()),
        "where": f"run {one_line(slowest['run_id'], limit=120)}, epoch {whole(float(slowest['epoch']))}, "
        f"step {whole(float(slowest['step']))}{by}",
        "beyond": float((times > 2 * levels["median"]).mean()),
    }


def steps_figure(selection: Selection) -> Drawing:
    """Return the figure of one regime.

    Args:
        selection: of rows from :func:`step_rows`.
    """
    rows = selection.rows
    widest = rows.assign(spread=rows["high"] / rows["low"]).sort_values("spread").iloc[-1]
    draft = bars_draft(
        selection,
        kind="times",
        what="How step times are distributed",
        topic="steps",
        description=(
            f"Boxes of {count(len(rows), 'cell')}. The widest spread is at {ranks(widest)}: "
            f"the middle 90 % of its steps took {seconds(widest['low'])} to {seconds(widest['high'])}, "
            f"median {seconds(widest['median'])}."
        ),
        caption=(
            "Steps of the throughput windows, each the longest rank's. Box: the middle half, with the "
            f"median; whiskers: 5 to 95 %; dot: the slowest step. Of up to {MAX_RUNS} runs per cell."
        ),
    )
    return finish(draft, lambda axes: _draw(axes, rows, selection.labels))


def _draw(axes: Axes, rows: pd.DataFrame, labels: dict[str, str]) -> dict[str, list[str]]:
    axes.set_xscale("log")
    axes.grid(axis="x")
    tips = draw_rows(axes, rows, labels=labels, bar=partial(_draw_box, axes))
    low, high = float(rows["low"].min()) / 1.1, float(rows["slowest"].max()) * 1.1
    axes.set(xlim=(low, high), xlabel="Time per step")
    ticks = log_ticks(low, high, *_STEPS)
    axes.xaxis.set_major_locator(FixedLocator(ticks[:: -(-len(ticks) // 6)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    return tips


def _short(value: float) -> str:
    """Return a time as an axis has room for it: ``2 ms``."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= 0.9999 * factor:
            return f"{value / factor:.4g} {unit}"
    return f"{value / 1e-6:.4g} µs"


def _draw_box(axes: Axes, place: float, row: dict[Hashable, Any], name: str) -> dict[str, list[str]]:
    for start, end in (("low", "lower"), ("upper", "high")):
        axes.plot([row[start], row[end]], [place, place], color=MUTED, linewidth=1.0, zorder=2)
    for end in ("low", "high"):
        axes.plot([row[end], row[end]], [place - 0.16, place + 0.16], color=MUTED, linewidth=1.0, zorder=2)
    (box,) = axes.barh(
        place,
        row["upper"] - row["lower"],
        left=row["lower"],
        height=0.6,
        color=BLUE,
        edgecolor=BLUE,
        zorder=3,
    )
    box.set_gid(f"box-{place:.2f}")
    axes.plot([row["median"]] * 2, [place - 0.36, place + 0.36], color=INK, linewidth=1.4, zorder=4)
    dot = axes.scatter([row["slowest"]], [place], s=12, color=VERMILLION, linewidth=0, zorder=4)
    dot.set_gid(f"slowest-{place:.2f}")
    often = f"\n{number(100 * row['beyond'], digits=2)} % take twice the median" if row["beyond"] > 0 else ""
    words = (
        f"{name}: median {seconds(row['median'])}\nhalf of the steps {seconds(row['lower'])} to "
        f"{seconds(row['upper'])}, 90 % {seconds(row['low'])} to {seconds(row['high'])}{often}\n"
        f"{count(int(row['steps']), 'step')} of {count(int(row['read']), 'run')}"
    )
    slow = f"{name}: the slowest step, {seconds(row['slowest'])}\n{row['where']}"
    return {f"box-{place:.2f}": [words], f"slowest-{place:.2f}": [slow]}
