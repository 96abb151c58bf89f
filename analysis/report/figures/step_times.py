"""Figures of step times: a box per cell, single steps over time, and the step compared with the ideal one."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from analysis.causes.catalogue import NOT_EXPLAINED, OTHER, title_of
from analysis.causes.cells import CellDivision
from analysis.data.load import Study
from analysis.data.names import ranks
from analysis.report.figures.bars import bars_draft, draw_part, draw_rows
from analysis.report.figures.drawing import (
    SERIES_COLOURS,
    Colour,
    Draft,
    Drawing,
    Part,
    Selection,
    Tip,
    Tips,
    evenly_spaced,
    finish,
    log_ticks,
    set_ticks,
)
from analysis.report.words import WORDS
from analysis.text import count, number, one_line, percent, seconds, whole

#: Maximum number of runs per cell whose steps.csv is read; the runs are evenly spaced over the repeats.
MAX_RUNS = 5
#: Multiples of a power of ten that may get a tick: few for a wide span of times, many for a narrow one.
_STEPS = ((1.0,), (1.0, 2.0, 5.0), tuple(range(1, 10)), tuple(np.arange(1, 10, 0.25)))
_QUANTILES = {"low": 0.05, "lower": 0.25, "median": 0.5, "upper": 0.75, "high": 0.95}
#: Maximum number of series in the section "Why".
MAX_SERIES = 4
#: Smaller shares of the step have no bar.
_SMALLEST_BAR = 0.002
_COLOURS = {OTHER: Colour.GREY, NOT_EXPLAINED: Colour.OLIVE}


def step_rows(study: Study, rows: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of cells that have step times; add quantiles of these times and the slowest step."""
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
    """Return a time short enough for the label of a tick: ``2 ms``."""
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
        f"{name}: median {seconds(row['median'])}\nhalf of the steps take {seconds(row['lower'])} to "
        f"{seconds(row['upper'])}, 90 % take {seconds(row['low'])} to {seconds(row['high'])}{slow}\n"
        f"{count(int(row['steps']), 'step')} of {count(int(row['runs_read']), 'run')}"
    )
    slowest_tip = f"{name}: the slowest step, {seconds(row['slowest'])}\n{row['slowest_at']}"
    cell, run = row["cell_id"], row["slowest_run"]
    return {f"box-{place:.2f}": [Tip(box_tip, cell)], f"slowest-{place:.2f}": [Tip(slowest_tip, cell, run)]}


def waterfall_figure(
    division: CellDivision, row: Mapping[Any, Any] | pd.Series, *, name: str, label: str
) -> Drawing:
    """Draw how the causes add up from the ideal time of a step to its measured time."""
    bars = [
        (Part(title_of(one.key.cause), _COLOURS.get(one.key.cause, Colour.WINE)), one.share)
        for one in division.rows
        if abs(one.share) >= _SMALLEST_BAR
    ]
    step_s = float(row["step_time_sec"])
    texts = [f"{part.words} {percent(share)}" for part, share in bars]
    draft = Draft(
        name=name,
        subject=f"From the ideal to the measured step, {ranks(row)}",
        topic="why",
        labels={"series": label},
        description=f"Waterfall: ideal step {percent(1 - division.loss)}, {', '.join(texts)}.",
        caption=WORDS["captions"]["why"],
        height_in=0.27 * (len(bars) + 2) + 0.75,
        left_in=1.75,
        with_axis=False,
    )
    cell = str(row.get("cell_id", ""))
    return finish(draft, lambda axes: _draw_waterfall(axes, bars, 1 - division.loss, step_s, cell))


def _draw_waterfall(
    axes: Axes, bars: list[tuple[Part, float]], ideal: float, step_s: float, cell: str
) -> Tips:
    tips: Tips = {}
    end = 0.0
    ends = [Part(f"{name} step", Colour.BLUE) for name in ("ideal", "measured")]
    entries = [(ends[0], ideal), *bars, (ends[1], 1.0)]
    for place, (part, share) in enumerate(entries):
        start = end if 0 < place < len(entries) - 1 else 0.0
        gid = f"step-{place}"
        draw_part(axes, place, share * step_s, left=start * step_s, part=part, gid=gid)
        right = max(start, start + share) * step_s
        text = f"{seconds(share * step_s)}, {percent(share)}" if share > 0 else percent(share)
        axes.text(
            right + 0.01 * step_s, place, text, va="center", ha="left", fontsize="small", color=Colour.MUTED
        )
        tips[gid] = [Tip(f"{part.words}: {text} of the step", cell)]
        end = start + share
    axes.set_yticks(range(len(entries)), [one_line(part.words, limit=28) for part, _ in entries])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(entries) - 0.4, -0.6)
    # Leave room for the text after the longest bar.
    axes.set_xlim(min(0.0, *(share for _, share in entries)) * step_s, 1.55 * step_s)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(lambda value, _: seconds(value) if value > 0 else "0")
    axes.set_xlabel("Time per step")
    return tips


def series_figure(steps: pd.DataFrame, *, name: str, label: str) -> Drawing:
    """Draw the step times of some runs over the number of the step.

    ``steps`` have ``run_id, number, step_time_sec, slowest_rank``.
    """
    runs = list(dict.fromkeys(steps["run_id"]))
    slowest = steps.iloc[int(steps["step_time_sec"].to_numpy().argmax())]
    draft = Draft(
        name=name,
        subject="Step time over step number",
        topic="why",
        labels={"series": label},
        description=(
            f"Lines of {len(runs)} runs; the slowest step takes {seconds(slowest['step_time_sec'])} "
            f"(step {int(slowest['number'])} of {one_line(slowest['run_id'], limit=80)})."
        ),
        caption=WORDS["captions"]["series"],
        height_in=2.2,
    )
    return finish(draft, lambda axes: _draw_series(axes, steps, runs))


def _draw_series(axes: Axes, steps: pd.DataFrame, runs: list[str]) -> Tips:
    tips: Tips = {}
    top = 0.0
    for place, run in enumerate(runs):
        own = steps[steps["run_id"] == run]
        colour = SERIES_COLOURS[place % len(SERIES_COLOURS)]
        (line,) = axes.plot(own["number"], own["step_time_sec"], color=colour, linewidth=0.9, alpha=0.8)
        line.set_gid(f"run-{place}")
        worst = own.iloc[int(own["step_time_sec"].to_numpy().argmax())]
        median = float(own["step_time_sec"].median())
        by = f", rank {int(worst['slowest_rank'])}" if pd.notna(worst["slowest_rank"]) else ""
        text = (
            f"{one_line(run, limit=80)}: median {seconds(median)}\nslowest {seconds(worst['step_time_sec'])} "
            f"at step {int(worst['number'])}{by}"
        )
        tips[f"run-{place}"] = [Tip(text, str(own["cell_id"].iloc[0]), run)]
        top = max(top, float(worst["step_time_sec"]))
    axes.set(xlabel="Step", xlim=(0, float(steps["number"].max()) + 1), ylim=(0, 1.05 * top))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(lambda value, _: seconds(value) if value > 0 else "0")
    axes.grid(axis="y")
    return tips
