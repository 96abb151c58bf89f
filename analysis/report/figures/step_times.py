"""Figure of the distribution of step times: a box per cell."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis.data.load import Study
from analysis.data.names import ranks
from analysis.report.figures.bars import bars_draft, draw_rows
from analysis.report.figures.drawing import (
    Colour,
    Drawing,
    Selection,
    Tip,
    Tips,
    evenly_spaced,
    finish,
    log_ticks,
    set_ticks,
)
from analysis.text import count, number, one_line, seconds, whole

#: Number of runs per cell whose steps.csv is read, evenly spaced over the repeats.
MAX_RUNS = 5
#: Multiples of a power of ten that may get a tick: few for a wide span of times, many for a narrow one.
_STEPS = ((1.0,), (1.0, 2.0, 5.0), tuple(range(1, 10)), tuple(np.arange(1, 10, 0.25)))
_QUANTILES = {"low": 0.05, "lower": 0.25, "median": 0.5, "upper": 0.75, "high": 0.95}


def step_rows(study: Study, rows: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of cells that have step times; add quantiles of these times and the slowest step.

    Args:
        study: the study whose steps.csv files are read.
        rows: a few rows of the scaling table.
        runs: from :func:`analysis.stats.measured.measure`.
    """
    wanted = runs[runs["measured"] & runs["cell_id"].isin(rows["cell_id"])]
    sample = wanted.groupby("cell_id", sort=False)["run_id"].apply(_sample).explode()
    steps = study.steps_of(sample.to_list())
    steps = steps[np.isfinite(steps["step_time_sec"]) & (steps["step_time_sec"] > 0)]
    groups = steps.groupby(steps["cell_id"].astype("str"), sort=False)
    found = [{"cell_id": cell_id, **_statistics(own)} for cell_id, own in groups if len(own) > 1]
    further = ("steps", "runs_read", "slowest", "slowest_run", "slowest_at", "over_twice")
    columns = ["cell_id", *_QUANTILES, *further]
    return rows.merge(pd.DataFrame(found, columns=columns), on="cell_id")


def _sample(run_ids: pd.Series) -> list[str]:
    return [str(run_ids.iloc[place]) for place in evenly_spaced(len(run_ids), MAX_RUNS)]


def _statistics(steps: pd.DataFrame) -> dict[str, Any]:
    times = steps["step_time_sec"].to_numpy(dtype=float)
    slowest = steps.iloc[int(times.argmax())]
    rank = slowest["slowest_rank"]
    by = f", rank {whole(float(rank))} was slowest" if pd.notna(rank) else ""
    place = f"epoch {whole(float(slowest['epoch']))}, step {whole(float(slowest['step']))}"
    levels = dict(zip(_QUANTILES, np.quantile(times, list(_QUANTILES.values())), strict=True))
    return {
        **levels,
        "steps": len(times),
        "runs_read": steps["run_id"].nunique(),
        "slowest": float(times.max()),
        "slowest_run": str(slowest["run_id"]),
        "slowest_at": f"run {one_line(slowest['run_id'], limit=120)}, {place}{by}",
        "over_twice": float((times > 2 * levels["median"]).mean()),
    }


def steps_figure(selection: Selection) -> Drawing:
    """Draw the step times of one scaling mode; the selection's rows come from :func:`step_rows`."""
    rows = selection.rows
    widest = rows.assign(spread=rows["high"] / rows["low"]).sort_values("spread").iloc[-1]
    draft = bars_draft(
        selection,
        kind="times",
        subject="Step time distribution",
        topic="time",
        view="Distribution",
        description=(
            f"Box plots of {count(len(rows), 'cell')}. The widest spread is at {ranks(widest)}, where "
            f"the middle 90 % of the steps took {seconds(widest['low'])} to {seconds(widest['high'])}, "
            f"median {seconds(widest['median'])}."
        ),
    )
    return finish(draft, lambda axes: _draw(axes, rows, selection.labels))


def _draw(axes: Axes, rows: pd.DataFrame, labels: dict[str, str]) -> Tips:
    axes.set_xscale("log")
    axes.grid(axis="x")
    tips = draw_rows(axes, rows, labels=labels, bar=partial(_draw_box, axes))
    low, high = float(rows["low"].min()) / 1.1, float(rows["slowest"].max()) * 1.1
    axes.set(xlim=(low, high), xlabel="Time per step")
    ticks = log_ticks(low, high, *_STEPS)
    set_ticks(axes.xaxis, ticks[:: -(-len(ticks) // 6)], _short)
    return tips


def _short(value: float) -> str:
    """Return a time in a form that fits at a tick: ``2 ms``."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= 0.9999 * factor:
            return f"{value / factor:.4g} {unit}"
    return f"{value / 1e-6:.4g} µs"


def _draw_box(axes: Axes, place: float, row: dict[Hashable, Any], name: str) -> Tips:
    line: dict[str, Any] = {"color": Colour.MUTED, "linewidth": 1.0, "zorder": 2}
    for start, end in (("low", "lower"), ("upper", "high")):
        axes.plot([row[start], row[end]], [place, place], **line)
    for end in ("low", "high"):
        axes.plot([row[end], row[end]], [place - 0.16, place + 0.16], **line)
    width = row["upper"] - row["lower"]
    style: dict[str, Any] = {"color": Colour.GRID, "edgecolor": Colour.MUTED}
    (box,) = axes.barh(place, width, left=row["lower"], height=0.6, zorder=3, **style)
    box.set_gid(f"box-{place:.2f}")
    axes.plot([row["median"]] * 2, [place - 0.36, place + 0.36], color=Colour.INK, linewidth=1.4, zorder=4)
    dot = axes.scatter([row["slowest"]], [place], s=12, color=Colour.INK, linewidth=0, zorder=4)
    dot.set_gid(f"slowest-{place:.2f}")
    slow = (
        f"\n{number(100 * row['over_twice'], digits=2)} % take more than twice the median"
        if row["over_twice"] > 0
        else ""
    )
    box_tip = (
        f"{name}: median {seconds(row['median'])}\nhalf of the steps {seconds(row['lower'])} to "
        f"{seconds(row['upper'])}, 90 % {seconds(row['low'])} to {seconds(row['high'])}{slow}\n"
        f"{count(int(row['steps']), 'step')} of {count(int(row['runs_read']), 'run')}"
    )
    slowest_tip = f"{name}: the slowest step, {seconds(row['slowest'])}\n{row['slowest_at']}"
    cell, run = row["cell_id"], row["slowest_run"]
    return {f"box-{place:.2f}": [Tip(box_tip, cell)], f"slowest-{place:.2f}": [Tip(slowest_tip, cell, run)]}
