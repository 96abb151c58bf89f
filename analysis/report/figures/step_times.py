"""Figures of step times: a box per cell, single steps over time, and the step compared with the ideal one."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from analysis.causes.catalogue import NOT_EXPLAINED, OTHER
from analysis.causes.cells import CellDivision
from analysis.causes.divide import WHOLE
from analysis.causes.table import rest_parts
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
from analysis.report.words import CAPTIONS
from analysis.stats.columns import ScalingRow, grouped
from analysis.text import one_line
from bench.units import count, percent, seconds, whole
from bench.words import about, term

#: Maximum number of runs per cell whose steps.csv is read; the runs are evenly spaced over the repeats.
MAX_RUNS = 5
#: Multiples of a power of ten that may get a tick: few for a wide span of times, many for a narrow one.
_STEPS = ((1.0,), (1.0, 2.0, 5.0), tuple(range(1, 10)), tuple(np.arange(1, 10, 0.25)))
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
#: Maximum number of series in the section "Why".
MAX_SERIES = 4
#: Smaller shares of the step have no bar.
_SMALLEST_BAR = 0.002
_COLOURS = {OTHER: Colour.GREY, NOT_EXPLAINED: Colour.OLIVE}


class StepTimes(NamedTuple):
    """The step times of a cell: quantiles (s), and the slowest step with its run and place.

    ``over_twice`` is the share of the steps that take more than twice the median.
    """

    low: float
    lower: float
    median: float
    upper: float
    high: float
    steps: int
    runs_read: int
    slowest: float
    slowest_run: str
    slowest_at: str
    over_twice: float


def step_times(study: Study, rows: Sequence[ScalingRow], runs: pd.DataFrame) -> dict[str, StepTimes]:
    """Return the step times of the cells that have some."""
    wanted = runs[runs["measured"] & runs["cell_id"].isin([row.cell_id for row in rows])]
    sample = wanted.groupby("cell_id", sort=False)["run_id"].apply(_sample).explode()
    steps = study.steps_of(sample.to_list())
    steps = steps[np.isfinite(steps["step_time_sec"]) & (steps["step_time_sec"] > 0)]
    groups = steps.groupby(steps["cell_id"].astype("str"), sort=False)
    return {str(cell_id): _statistics(own) for cell_id, own in groups if len(own) > 1}


def _sample(run_ids: pd.Series) -> list[str]:
    return [str(run_ids.iloc[place]) for place in evenly_spaced(len(run_ids), MAX_RUNS)]


def _statistics(steps: pd.DataFrame) -> StepTimes:
    times = steps["step_time_sec"].to_numpy(dtype=float)
    slowest: Any = next(steps.iloc[[int(times.argmax())]].itertuples())
    by = f", rank {whole(slowest.slowest_rank)} was slowest" if pd.notna(slowest.slowest_rank) else ""
    place = f"epoch {whole(float(slowest.epoch))}, step {whole(float(slowest.step))}"
    low, lower, middle, upper, high = map(float, np.quantile(times, _QUANTILES))
    return StepTimes(
        *(low, lower, middle, upper, high, len(times), len(set(steps["run_id"])), float(times.max())),
        slowest_run=str(slowest.run_id),
        slowest_at=f"run {one_line(slowest.run_id, limit=120)}, {place}{by}",
        over_twice=float((times > 2 * middle).mean()),
    )


def steps_figure(selection: Selection[ScalingRow], times: Mapping[str, StepTimes]) -> Drawing:
    """Draw the step times of one scaling mode; ``times`` maps the cells to their step times."""
    spreads = [(times[row.cell_id], row) for row in selection.rows]
    widest, row = max(spreads, key=lambda pair: pair[0].high / pair[0].low)
    draft = bars_draft(
        selection,
        kind="times",
        subject="Step time distribution",
        view="Distribution",
        description=(
            f"Box plots of {count(len(spreads), 'cell')}. The widest spread is at {ranks(row)}, where "
            f"the middle 90 % of the steps took {seconds(widest.low)} to {seconds(widest.high)}, "
            f"median {seconds(widest.median)}."
        ),
    )
    return finish(draft, lambda axes: _draw(axes, selection, times))


def _draw(axes: Axes, selection: Selection[ScalingRow], times: Mapping[str, StepTimes]) -> Tips:
    axes.set_xscale("log")
    axes.grid(axis="x")
    tips = draw_rows(
        axes, selection, lambda place, row, name: _draw_box(axes, place, row, name, times[row.cell_id])
    )
    own = [times[row.cell_id] for row in selection.rows]
    low, high = min(one.low for one in own) / 1.1, max(one.slowest for one in own) * 1.1
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


def _draw_box(axes: Axes, place: float, row: ScalingRow, name: str, times: StepTimes) -> Tips:
    line: dict[str, Any] = {"color": Colour.MUTED, "linewidth": 1.0, "zorder": 2}
    for ends in ((times.low, times.lower), (times.upper, times.high)):
        axes.plot(ends, [place, place], **line)
    for end in (times.low, times.high):
        axes.plot([end, end], [place - 0.16, place + 0.16], **line)
    style: dict[str, Any] = {"color": Colour.GRID, "edgecolor": Colour.MUTED}
    (box,) = axes.barh(place, times.upper - times.lower, left=times.lower, height=0.6, zorder=3, **style)
    box.set_gid(f"box-{place:.2f}")
    axes.plot([times.median] * 2, [place - 0.36, place + 0.36], color=Colour.INK, linewidth=1.4, zorder=4)
    dot = axes.scatter([times.slowest], [place], s=12, color=Colour.INK, linewidth=0, zorder=4)
    dot.set_gid(f"slowest-{place:.2f}")
    slow = f"\n{percent(times.over_twice, decimals=1)} take more than twice the median"
    box_tip = (
        f"{name}: median {seconds(times.median)}\nhalf of the steps take {seconds(times.lower)} to "
        f"{seconds(times.upper)}, 90 % take {seconds(times.low)} to {seconds(times.high)}"
        f"{slow if times.over_twice > 0 else ''}\n"
        f"{count(times.steps, 'step')} of {count(times.runs_read, 'run')}"
    )
    slowest_tip = f"{name}: the slowest step, {seconds(times.slowest)}\n{times.slowest_at}"
    return {
        f"box-{place:.2f}": [Tip(box_tip, row.cell_id)],
        f"slowest-{place:.2f}": [Tip(slowest_tip, row.cell_id, times.slowest_run)],
    }


def waterfall_figure(division: CellDivision, row: ScalingRow, *, name: str, label: str) -> Drawing:
    """Draw how the causes add up from the ideal time of a step to its measured time."""
    bars = []
    for one in division.rows:
        shares = [(about(one.causes, "title"), one.share)]
        if one.cause == NOT_EXPLAINED and division.rests and WHOLE not in division.rests:
            shares = [(term("part", part), share) for part, share in rest_parts(division)]
        colour = _COLOURS.get(one.cause, Colour.WINE)
        bars += [(Part(text, colour), share) for text, share in shares if abs(share) >= _SMALLEST_BAR]
    texts = [f"{part.words} {percent(share)}" for part, share in bars]
    draft = Draft(
        name=name,
        subject=f"From the ideal to the measured step, {ranks(row)}",
        topic="why",
        labels={"series": label},
        description=f"Waterfall: ideal step {percent(1 - division.loss)}, {', '.join(texts)}.",
        caption=CAPTIONS["why"],
        height_in=0.27 * (len(bars) + 2) + 0.75,
        left_in=2.25,
        with_axis=False,
    )
    ideal = 1 - division.loss
    return finish(draft, lambda axes: _draw_waterfall(axes, bars, ideal, row.step_time_sec, row.cell_id))


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
    axes.set_yticks(range(len(entries)), [one_line(part.words, limit=30) for part, _ in entries])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(entries) - 0.4, -0.6)
    # Leave room for the text after the longest bar.
    axes.set_xlim(min(0.0, *(share for _, share in entries)) * step_s, 1.55 * step_s)
    axes.xaxis.set_major_locator(MaxNLocator(3))
    axes.xaxis.set_major_formatter(lambda value, _: seconds(value) if value > 0 else "0")
    axes.set_xlabel("Time per step")
    return tips


def series_figure(steps: pd.DataFrame, *, name: str, label: str) -> Drawing:
    """Draw the step times of some runs over the number of the step.

    ``steps`` have ``run_id, cell_id, number, step_time_sec, slowest_rank``.
    """
    rows: list[Any] = list(steps.itertuples(index=False))
    runs = grouped(rows, lambda step: str(step.run_id))
    slowest = max(rows, key=lambda step: step.step_time_sec)
    draft = Draft(
        name=name,
        subject="Step time over step number",
        topic="why",
        labels={"series": label},
        description=(
            f"Lines of {len(runs)} runs; the slowest step takes {seconds(slowest.step_time_sec)} "
            f"(step {slowest.number} of {one_line(slowest.run_id, limit=80)})."
        ),
        caption=CAPTIONS["series"],
        height_in=2.2,
    )
    return finish(draft, lambda axes: _draw_series(axes, runs))


def _draw_series(axes: Axes, runs: Mapping[str, Sequence[Any]]) -> Tips:
    tips: Tips = {}
    for place, (run, own) in enumerate(runs.items()):
        numbers, times = [step.number for step in own], [step.step_time_sec for step in own]
        colour = SERIES_COLOURS[place % len(SERIES_COLOURS)]
        (line,) = axes.plot(numbers, times, color=colour, linewidth=0.9, alpha=0.8)
        line.set_gid(f"run-{place}")
        worst = max(own, key=lambda step: step.step_time_sec)
        by = f", rank {int(worst.slowest_rank)}" if pd.notna(worst.slowest_rank) else ""
        text = (
            f"{one_line(run, limit=80)}: median {seconds(statistics.median(times))}\nslowest "
            f"{seconds(worst.step_time_sec)} at step {worst.number}{by}"
        )
        tips[f"run-{place}"] = [Tip(text, worst.cell_id, run)]
    steps = [step for own in runs.values() for step in own]
    top = max(step.step_time_sec for step in steps)
    axes.set(xlabel="Step", xlim=(0, max(step.number for step in steps) + 1), ylim=(0, 1.05 * top))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(lambda value, _: seconds(value) if value > 0 else "0")
    axes.grid(axis="y")
    return tips
