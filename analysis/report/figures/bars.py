"""Figures of horizontal bars: efficiency losses and parts of the step by size, work and waiting by rank."""

from __future__ import annotations

import math
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
from analysis.stats.losses import LOSSES, SHORT_NAMES, SMALLEST_SHARE, TYPICAL_RANK_COLUMNS, factors
from analysis.text import count, fraction, known, one_line, percent, seconds

#: The parts of a bar of the step time in the order of stacking.
STEP_PARTS = {name: part for name, part in PARTS.items() if name != "compute"}

#: The factors of the efficiency in the order of stacking, each drawn like the part of the step causing it.
LOSS_PARTS = {
    factor: replace(PARTS[part], words=SHORT_NAMES[factor])
    for factor, part in {
        "comm_efficiency": "transfer",
        "load_balance": "wait",
        "data_scalability": "data",
        "compute_scalability": "compute",
    }.items()
}

_LOSS_COLUMNS = (
    "load_balance",
    "comm_efficiency",
    "useful_s",
    "data",
    "gpus",
    "global_batch",
    *TYPICAL_RANK_COLUMNS,
)
_LOSS_TICKS = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 1e-3, 1e-4)
_MAX_LOSS_TICKS = 7
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
    topic: str,
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
        topic=topic,
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
        topic="time",
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


# -- efficiency losses ----------------------------------------------------------------


def loss_rows(rows: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows whose loss factors are known, except for baselines, and add a column per factor."""
    beyond = rows[rows["base_place"].notna() & ~rows["is_base"] & rows["efficiency"].notna()]
    needed = [name for name in _LOSS_COLUMNS if name in table]
    bases = table.loc[beyond["base_place"].astype("int64"), needed].to_dict("records")
    found = [factors(row, base) for row, base in zip(beyond[needed].to_dict("records"), bases, strict=True)]
    frame = pd.DataFrame(found, index=beyond.index, columns=list(LOSSES))
    return beyond.drop(columns=[*LOSSES], errors="ignore").join(frame)[frame.notna().all(axis=1)]


def loss_figure(selection: Selection) -> Drawing:
    """Draw the factors of the efficiency; the selection's rows come from :func:`loss_rows`."""
    rows = selection.rows
    draft = bars_draft(
        selection,
        kind="loss",
        subject="Efficiency losses",
        topic="loss",
        view=selection.mode.capitalize(),
        description=_loss_description(rows),
        legend=part_keys({n: part for n, part in LOSS_PARTS.items() if (rows[n].sub(1).abs() > 1e-9).any()}),
    )
    return finish(draft, lambda axes: _draw_losses(axes, rows, labels=selection.labels))


def _loss_description(rows: pd.DataFrame) -> str:
    largest = rows.sort_values("gpus", kind="stable").iloc[-1]
    lost = {name: max(0.0, -math.log(largest[name])) for name in LOSSES}
    total = sum(lost.values())
    shares = [
        f"{SHORT_NAMES[name]} {percent(part / total)}"
        for name, part in sorted(lost.items(), key=lambda item: -item[1])
        if total > 0 and part / total >= SMALLEST_SHARE
    ]
    return (
        f"Stacked bars of {count(len(rows), 'cell')}. At {ranks(largest)} the efficiency is "
        f"{fraction(largest['efficiency'], decimals=2)}; of the loss: {', '.join(shares) or 'nothing'}."
    )


def _draw_losses(axes: Axes, rows: pd.DataFrame, *, labels: dict[str, str]) -> Tips:
    extents = [_loss_extent(row) for row in rows.to_dict("records")]
    longest = max(0.01, *(end for _, end in extents))
    least = min(0.0, *(start for start, _ in extents))
    bar = partial(_draw_loss_bar, axes, gap=0.02 * (longest - least))
    tips = draw_rows(axes, rows, labels=labels, bar=bar)
    # Leave room for the number after a bar.
    axes.set_xlim(least * 1.03, longest * 1.16)
    ticks = _spaced_ticks([tick for tick in _LOSS_TICKS if least <= -math.log(tick) <= 1.1 * longest])
    axes.set_xticks([-math.log(tick) for tick in ticks], [f"{tick:g}" for tick in ticks])
    axes.set_xlabel("Remaining efficiency (logarithmic)")
    return tips


def _spaced_ticks(ticks: Sequence[float]) -> list[float]:
    """Return the first tick, and each further tick whose label does not overlap the label before."""
    room = -math.log(min(ticks)) / _MAX_LOSS_TICKS
    kept = [ticks[0]]
    for tick in ticks[1:]:
        if math.log(kept[-1] / tick) >= room:
            kept.append(tick)
    return kept


def _loss_extent(row: dict[Hashable, Any]) -> tuple[float, float]:
    """Return both ends of a bar on the logarithmic axis; the efficiency 1 is at 0."""
    lost = [-math.log(row[name]) for name in LOSSES]
    return sum(min(0.0, part) for part in lost), sum(max(0.0, part) for part in lost)


def _draw_loss_bar(axes: Axes, place: float, row: dict[Hashable, Any], name: str, *, gap: float) -> Tips:
    tips = {}
    left = right = 0.0
    total = _loss_extent(row)[1]
    for factor, part in LOSS_PARTS.items():
        value = float(row[factor])
        lost = -math.log(value)
        if abs(lost) < 1e-9:
            continue
        gid = f"{factor}@{place:.2f}"
        start = right if lost > 0 else left
        draw_part(axes, place, lost, left=start, part=part, gid=gid)
        share = f", {percent(lost / total)} of the loss" if lost > 0 else ", a gain"
        tips[gid] = [Tip(f"{name}, {part.words}: factor {fraction(value)}{share}", row["cell_id"])]
        right, left = right + max(lost, 0.0), left + min(lost, 0.0)
    axes.plot([0, 0], [place - 0.5, place + 0.5], color=Colour.MUTED, linewidth=0.8)
    text = fraction(row["efficiency"], decimals=2)
    axes.text(right + gap, place, text, va="center", ha="left", fontsize="small", color=Colour.MUTED)
    return tips


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
