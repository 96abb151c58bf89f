"""Figures of horizontal bars, one bar per size: efficiency losses and the parts of the step time."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from analysis.data.names import ranks, with_layout
from analysis.report.figures.drawing import HEADING, Colour, Draft, Drawing, Selection, add_legend, finish
from analysis.report.words import WORDS
from analysis.stats.losses import LOSSES, SHORT_NAMES, SMALLEST_SHARE, TYPICAL_RANK_COLUMNS, factors
from analysis.text import count, fraction, percent, seconds

#: The parts of a step in the order of stacking: name, words, colour, hatch.
STEP_PARTS = (
    ("data", "data loading", Colour.SKY, ""),
    ("forward", "forward", Colour.GREEN, ""),
    ("backward", "backward", Colour.BLUE, ""),
    ("optimizer", "optimizer", Colour.PURPLE, ""),
    ("other", "other", Colour.GREY, ""),
    ("transfer", "exposed communication", Colour.VERMILLION, ""),
    ("wait", "waiting for the slowest rank", Colour.ORANGE, "////"),
)

#: The factors of the efficiency in the order of stacking. A colour is that of the step part causing the loss.
LOSS_PARTS = (
    ("comm_efficiency", Colour.VERMILLION, ""),
    ("load_balance", Colour.ORANGE, "////"),
    ("data_scalability", Colour.SKY, ""),
    ("compute_scalability", Colour.BLUE, ""),
)

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

#: Tooltips of the marks in a figure, by the gid (matplotlib's id) of the artist that draws the marks.
Tips = dict[str, list[str]]


def bars_draft(
    selection: Selection, *, kind: str, subject: str, topic: str, description: str, legend_lines: int = 0
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
        height_in=0.25 * (len(rows) + headings) + 0.75,
        legend_lines=legend_lines,
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

    Args:
        axes: the panel to draw into. If there are several series, each has a heading.
        rows: ``series, gpus, nodes, gpus_per_node`` and the columns that ``bar`` needs.
        labels: the series in order, with their names.
        bar: function that draws one row, given its vertical position, the row and its name; returns tooltips.
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
    colour: str,
    hatch: str,
    gid: str,
    height: float = 0.72,
    edge: float = 0.6,
) -> None:
    """Draw one part of a stacked bar."""
    style: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": Colour.SURFACE, "linewidth": edge}
    (bar,) = axes.barh(place, width, left=left, height=height, **style)
    bar.set_gid(gid)


def parts_legend(axes: Axes, parts: Sequence[tuple[str, str, str]]) -> None:
    """Add a legend of the parts (words, colour, hatch) in two columns below the figure."""
    handles = [Patch(facecolor=colour, hatch=hatch, edgecolor=Colour.SURFACE) for _, colour, hatch in parts]
    add_legend(axes, handles, [words for words, *_ in parts], columns=2)


# -- parts of the step ----------------------------------------------------------------


def split_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows for which all parts of the step are known, with the sum of the parts as ``total_s``.

    ``other`` may be slightly negative, because timers overlap by microseconds; it is drawn as 0. If waiting
    is not known, ``transfer`` contains all exposed communication.
    """
    frame = rows.copy()
    frame["transfer"] = frame["transfer"].fillna(frame["exposed"])
    names = [name for name, *_ in STEP_PARTS]
    required = [name for name in names if name != "wait"]
    frame = frame[frame[required].notna().all(axis=1)]
    frame[names] = frame[names].clip(lower=0)
    frame["total_s"] = frame[names].sum(axis=1)
    return frame[frame["total_s"] > 0]


def split_figure(selection: Selection) -> Drawing:
    """Draw the parts of the step; the selection's rows come from :func:`split_rows`."""
    rows = selection.rows
    largest = rows.sort_values("gpus", kind="stable").iloc[-1]
    exposed = (largest["transfer"] + np.nan_to_num(largest["wait"])) / largest["total_s"]
    draft = bars_draft(
        selection,
        kind="step",
        subject="Parts of the step time",
        topic="time",
        description=(
            f"Stacked bars of {count(len(rows), 'cell')}. At {ranks(largest)} "
            f"{percent(exposed)} of the step is exposed communication."
        ),
        legend_lines=4,
    )
    return finish(draft, lambda axes: _draw_split(axes, rows, labels=selection.labels))


def _draw_split(axes: Axes, rows: pd.DataFrame, *, labels: dict[str, str]) -> Tips:
    tips = draw_rows(axes, rows, labels=labels, bar=partial(_draw_split_bar, axes))
    axes.set(xlim=(0, 1.16), xlabel="Share of the step's time")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(value)))
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    axes.spines["bottom"].set_bounds(0, 1)
    parts_legend(axes, [part[1:] for part in STEP_PARTS if (rows[part[0]] > 0).any()])
    return tips


def _draw_split_bar(axes: Axes, place: float, row: dict[Hashable, Any], name: str) -> Tips:
    tips = {}
    left, total = 0.0, row["total_s"]
    for part, words, colour, hatch in STEP_PARTS:
        value = row[part]
        if not value > 0:
            continue
        share = value / total
        gid = f"part-{part}-{place:.2f}"
        draw_part(axes, place, share, left=left, colour=colour, hatch=hatch, gid=gid)
        tips[gid] = [f"{name}, {words}: {seconds(value)}, {percent(share, decimals=1)} of the step"]
        left += share
    axes.text(1.015, place, seconds(total), va="center", ha="left", fontsize="small", color=Colour.MUTED)
    return tips


# -- efficiency losses ----------------------------------------------------------------


def loss_rows(rows: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows whose loss factors are known, except for baselines, and add a column per factor.

    Args:
        rows: some rows of ``table``.
        table: from :func:`analysis.checks.scaling_table.scaling_table`.
    """
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
        topic="time",
        description=_loss_description(rows),
        legend_lines=2,
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
    # Leaves room for the number after a bar.
    axes.set_xlim(least * 1.03, longest * 1.16)
    ticks = _spaced_ticks([tick for tick in _LOSS_TICKS if least <= -math.log(tick) <= 1.1 * longest])
    axes.set_xticks([-math.log(tick) for tick in ticks], [f"{tick:g}" for tick in ticks])
    axes.set_xlabel("Remaining efficiency (logarithmic)")
    shown = [part for part in LOSS_PARTS if (rows[part[0]].sub(1).abs() > 1e-9).any()]
    parts_legend(axes, [(SHORT_NAMES[factor], colour, hatch) for factor, colour, hatch in shown])
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
    for factor, colour, hatch in LOSS_PARTS:
        value = float(row[factor])
        lost = -math.log(value)
        if abs(lost) < 1e-9:
            continue
        gid = f"loss-{factor}-{place:.2f}"
        start = right if lost > 0 else left
        draw_part(axes, place, lost, left=start, colour=colour, hatch=hatch, gid=gid)
        share = f", {percent(lost / total)} of the loss" if lost > 0 else ", a gain"
        tips[gid] = [f"{name}, {SHORT_NAMES[factor]}: factor {fraction(value)}{share}"]
        right, left = right + max(lost, 0.0), left + min(lost, 0.0)
    axes.plot([0, 0], [place - 0.5, place + 0.5], color=Colour.MUTED, linewidth=0.8)
    text = fraction(row["efficiency"], decimals=2)
    axes.text(right + gap, place, text, va="center", ha="left", fontsize="small", color=Colour.MUTED)
    return tips
