"""Figures of horizontal bars: parts of the step by size, work and waiting by rank."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from analysis.checks.slow_ranks import LATE_FROM, RankMeans
from analysis.data.names import ranks, with_layout
from analysis.report.figures.drawing import (
    HEADING,
    PARTS,
    WIDTH_IN,
    Colour,
    Draft,
    Drawing,
    Key,
    Part,
    Selection,
    Tip,
    Tips,
    finish,
    part_keys,
)
from analysis.report.words import WORDS
from analysis.text import count, fraction, known, one_line, percent, seconds

#: The parts of a bar of the step time in the order of stacking.
STEP_PARTS = {name: part for name, part in PARTS.items() if name != "compute"}

#: With more ranks, the figure has a bar per node.
MAX_BARS = 40
_LEFT_IN = 1.2
#: The parts of the bar of a rank in the order of stacking.
_PARTS = {
    "data": PARTS["data"],
    "compute": PARTS["compute"],
    "rest": replace(PARTS["other"], words="optimizer, other"),
    "transfer": PARTS["transfer"],
    "wait": PARTS["wait"],
}


def bars_draft(
    selection: Selection,
    *,
    kind: str,
    subject: str,
    description: str,
    view: str = "",
    legend: Sequence[Key] = (),
) -> Draft:
    """Return the draft of a figure with one bar per row of a selection."""
    rows = selection.rows
    headings = 1.1 * len(selection.labels) if len(selection.labels) > 1 else 0
    return Draft(
        name=f"{kind}-{selection.mode or 'other'}",
        subject=subject,
        topic="time",
        mode=selection.mode,
        labels=selection.labels,
        shared=selection.shared,
        description=description,
        caption=WORDS["captions"][kind],
        left_out=list(selection.left_out),
        height_in=0.28 * (len(rows) + headings) + 0.75,
        view=view,
        legend=legend,
        left_in=1.2 if rows.duplicated(["series", "gpus"]).any() else 0.78,
        with_axis=False,
    )


def draw_rows(
    axes: Axes,
    rows: pd.DataFrame,
    *,
    labels: Mapping[str, str],
    bar: Callable[[float, dict[Hashable, Any], str], Tips],
) -> Tips:
    """Draw each row, series by series, with the sizes as tick labels.

    ``rows`` have ``series, gpus, nodes, gpus_per_node`` and the columns that ``bar`` needs. ``labels`` maps
    the series, in order, to their names, which are drawn as headings if there are several. ``bar`` draws one
    row, given its vertical position, the row and its name, and returns the row's tips.
    """
    tips: Tips = {}
    names: dict[float, str] = {}
    place = 0.0
    for series, label in labels.items():
        own = rows[rows["series"] == series]
        if not len(own):
            continue
        if len(labels) > 1:
            # The transform places the text at the panel's edge, independent of the limits of the axis.
            axes.text(0, place, label, transform=axes.get_yaxis_transform(), **HEADING)
            place += 0.85
        several = own["gpus"].duplicated(keep=False)
        for row, ambiguous in zip(own.to_dict("records"), several, strict=True):
            names[place] = with_layout(row) if ambiguous else ranks(row)
            tips |= bar(place, row, f"{label}\n{names[place]}")
            place += 1
        place += 0.25
    axes.set_yticks(list(names), list(names.values()))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(place - 0.35, -0.65)
    return tips


def draw_part(
    axes: Axes,
    place: float,
    width: float,
    *,
    left: float,
    part: Part,
    gid: str,
    height: float = 0.72,
    edge: float = 0.6,
) -> None:
    """Draw one part of a stacked bar."""
    style: dict[str, Any] = {"color": part.colour, "hatch": part.hatch, "linewidth": edge}
    style["edgecolor"] = Colour.SURFACE
    (bar,) = axes.barh(place, width, left=left, height=height, **style)
    bar.set_gid(gid)


# -- parts of the step ----------------------------------------------------------------


def split_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows for which all parts of the step are known, with the sum of the parts as ``total_s``.

    ``other`` may be slightly negative, because timers overlap by microseconds; it is drawn as 0. If waiting
    is not known, ``transfer`` contains all exposed communication.
    """
    frame = rows.copy()
    frame["transfer"] = frame["transfer"].fillna(frame["exposed"])
    names = list(STEP_PARTS)
    required = [name for name in names if name != "wait"]
    frame = frame[frame[required].notna().all(axis=1)]
    frame[names] = frame[names].clip(lower=0)
    frame["total_s"] = frame[names].sum(axis=1)
    return frame[frame["total_s"] > 0]


def split_figure(selection: Selection, *, shares: bool = False) -> Drawing:
    """Draw the parts of the step as times or as shares; the selection's rows come from :func:`split_rows`."""
    rows = selection.rows
    largest = rows.sort_values("gpus", kind="stable").iloc[-1]
    exposed = (largest["transfer"] + np.nan_to_num(largest["wait"])) / largest["total_s"]
    draft = bars_draft(
        selection,
        kind="shares" if shares else "step",
        subject="Shares of the step time" if shares else "Parts of the step time",
        view="Shares" if shares else "Step time",
        description=(
            f"Stacked bars of {count(len(rows), 'cell')}. At {ranks(largest)} "
            f"{percent(exposed)} of the step is exposed communication."
        ),
        legend=part_keys({name: part for name, part in STEP_PARTS.items() if (rows[name] > 0).any()}),
    )
    return finish(draft, lambda axes: _draw_split(axes, rows, labels=selection.labels, shares=shares))


def _draw_split(axes: Axes, rows: pd.DataFrame, *, labels: dict[str, str], shares: bool) -> Tips:
    longest = 1.0 if shares else float(rows["total_s"].max())
    bar = partial(_draw_split_bar, axes, longest=longest, shares=shares)
    tips = draw_rows(axes, rows, labels=labels, bar=bar)
    axes.set(xlim=(0, 1.16 * longest))
    if shares:
        axes.set_xlabel("Share of the step's time")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(value)))
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
        axes.spines["bottom"].set_bounds(0, 1)
    else:
        set_time_axis(axes, longest)
    return tips


def set_time_axis(axes: Axes, longest: float) -> None:
    """Label the horizontal axis of times per step in a unit that suits the longest."""
    unit, factor = next(
        (u, f) for u, f in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)) if longest * f >= 1 or u == "µs"
    )
    axes.set_xlabel(f"Time per step ({unit})")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * factor:.4g}"))


def _draw_split_bar(
    axes: Axes, place: float, row: dict[Hashable, Any], name: str, *, longest: float, shares: bool
) -> Tips:
    tips = {}
    left, total = 0.0, row["total_s"]
    unit = total if shares else 1.0
    for key, part in STEP_PARTS.items():
        value = row[key]
        if not value > 0:
            continue
        gid = f"{key}@{place:.2f}"
        draw_part(axes, place, value / unit, left=left, part=part, gid=gid)
        text = f"{name}, {part.words}: {seconds(value)}, {percent(value / total, decimals=1)} of the step"
        tips[gid] = [Tip(text, row["cell_id"])]
        left += value / unit
    end = left + 0.015 * longest
    axes.text(end, place, seconds(total), va="center", ha="left", fontsize="small", color=Colour.MUTED)
    return tips


# -- work and waiting by rank ---------------------------------------------------------


def ranks_figure(means: RankMeans, *, balance: Mapping[str, float]) -> Drawing:
    """Draw work and waiting: a bar per rank, or per node if there are too many ranks."""
    panels, left_out = _panels(means)
    late = pd.concat(panels).loc[lambda rows: rows["late"]].sort_values("beyond")
    longest = f"{_rank_name(late.iloc[-1])} works longest" if len(late) else "no rank is late"
    cells = ", ".join(
        f"{one_line(panel['cell_id'].iloc[0], limit=80)} (load balance {_balance(panel, balance)})"
        for panel in panels
    )
    draft = Draft(
        name="ranks",
        subject="Work and waiting by rank",
        topic="ranks",
        description=f"Stacked bars of the ranks of {cells}: {longest}.",
        caption=WORDS["captions"]["ranks"].format(limit=percent(LATE_FROM)),
        left_out=left_out,
        height_in=0.21 * (sum(map(len, panels)) + 1.4 * len(panels)) + 0.75,
        legend=part_keys(
            {n: part for n, part in _PARTS.items() if any((panel[n] > 0).any() for panel in panels)}
        ),
        left_in=_LEFT_IN,
        with_axis=False,
    )
    return finish(draft, lambda axes: _draw(axes, panels, balance))


def _balance(panel: pd.DataFrame, balance: Mapping[str, float]) -> str:
    return fraction(balance.get(str(panel["cell_id"].iloc[0])), decimals=2)


def _panels(means: RankMeans) -> tuple[list[pd.DataFrame], list[str]]:
    """Return the rows of each cell that fit into the figure, and texts about what is left out."""
    panels, left_out = [], []
    room = MAX_BARS // means.by_rank["cell_id"].nunique()
    for cell_id, own in means.by_rank.groupby("cell_id", sort=False):
        panel = own.sort_values("rank", kind="stable")
        if len(panel) > room:
            left_out.append(f"{count(len(panel), 'rank')} of {one_line(cell_id, limit=60)} drawn by node")
            panel = means.by_host[means.by_host["cell_id"] == cell_id]
        if len(panel) > room:
            left_out.append(f"the {room} slowest of {count(len(panel), 'node')} drawn")
            panel = panel.sort_values("beyond", ascending=False, kind="stable").head(room)
        panels.append(panel)
    return panels, left_out


def _rank_name(row: Mapping[Hashable, Any] | pd.Series) -> str:
    host = one_line(row["host"], limit=40)
    return f"rank {int(row['rank'])} on {host}" if "rank" in row and pd.notna(row["rank"]) else host


def _draw(axes: Axes, panels: Sequence[pd.DataFrame], balance: Mapping[str, float]) -> Tips:
    tips: Tips = {}
    ticks, names = [], []
    place = 0.0
    widest = max(float(panel["step"].max()) for panel in panels)
    # Headings begin at the figure's edge, because names of cells are long.
    outside = -(_LEFT_IN - 0.04) / (WIDTH_IN * axes.get_position().width)
    for panel in panels:
        cell = one_line(panel["cell_id"].iloc[0], limit=36)
        heading = f"{cell}, load balance {_balance(panel, balance)}"
        axes.text(outside, place, heading, transform=axes.get_yaxis_transform(), **HEADING)
        place += 0.95
        for row in panel.to_dict("records"):
            tips.update(_draw_bar(axes, place, row))
            ticks.append(place)
            label = f"{int(row['rank'])} · " if "rank" in row and pd.notna(row["rank"]) else ""
            names.append(f"{label}{one_line(row['host'], limit=14)}{' ◀' if row['late'] else ''}")
            place += 1
        place += 0.45
    axes.set_yticks(ticks, names, fontsize="small")
    axes.set(xlim=(0, 1.02 * widest), ylim=(place - 0.5, -0.6))
    set_time_axis(axes, widest)
    axes.tick_params(axis="y", length=0)
    return tips


def _draw_bar(axes: Axes, place: float, row: dict[Hashable, Any]) -> Tips:
    tips = {}
    left = 0.0
    excess = (
        f"{percent(abs(row['beyond']), decimals=1)} of the step {'more' if row['beyond'] > 0 else 'less'}"
    )
    for key, part in _PARTS.items():
        value = row[key]
        if not (known(value) and value > 0):
            continue
        gid = f"{key}@{place:.2f}"
        draw_part(axes, place, value, left=left, part=part, gid=gid, height=0.74, edge=0.4)
        text = f"{_rank_name(row)}, {part.words}: {seconds(value)} per step\nuseful time: "
        text += f"{seconds(row['useful'])}, {excess} than usual\n{count(int(row['n']), 'run')}"
        tips[gid] = [Tip(text, row["cell_id"])]
        left += value
    return tips
