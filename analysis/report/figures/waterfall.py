"""Figures of the section "Why": the way from the ideal to the measured step, and single steps over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from analysis.causes.catalogue import NOT_EXPLAINED, OTHER, title_of
from analysis.causes.cells import CellDivision
from analysis.data.names import ranks
from analysis.report.figures.bars import draw_part
from analysis.report.figures.drawing import SERIES_COLOURS, Colour, Draft, Drawing, Part, Tip, Tips, finish
from analysis.report.words import WORDS
from analysis.text import one_line, percent, seconds

#: Maximum number of series in the section "Why".
MAX_SERIES = 4
#: Smaller shares of the step have no bar.
_SMALLEST_BAR = 0.002
_COLOURS = {OTHER: Colour.GREY, NOT_EXPLAINED: Colour.OLIVE}


def waterfall_figure(
    division: CellDivision, row: Mapping[Any, Any] | pd.Series, *, name: str, label: str
) -> Drawing:
    """Draw the time of a step from the ideal part over each cause to the measured time.

    Args:
        division: the division of the cell.
        row: the cell's row of the scaling table.
        name: file name without suffix.
        label: the series.
    """
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
    # Leaves room for the text after the longest bar.
    axes.set_xlim(min(0.0, *(share for _, share in entries)) * step_s, 1.55 * step_s)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(lambda value, _: seconds(value) if value > 0 else "0")
    axes.set_xlabel("Time per step")
    return tips


def series_figure(steps: pd.DataFrame, *, name: str, label: str, left_out: int = 0) -> Drawing:
    """Draw the step times of some runs over the number of the step.

    Args:
        steps: ``run_id, number, step_time_sec, slowest_rank``.
        name: file name without suffix.
        label: the cell.
        left_out: number of further runs that are not drawn.
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
        left_out=[f"{left_out} more runs"] if left_out else [],
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
