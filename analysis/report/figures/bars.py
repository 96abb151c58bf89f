"""One horizontal bar per size, series by series: places, names and measures of a figure of such bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from analysis.data.names import ranks, with_layout
from analysis.report.figures.drawing import Draft
from analysis.report.figures.palette import INK, LOSS_PARTS, MUTED, STEP_PARTS, SURFACE
from analysis.report.figures.selection import Selection
from analysis.stats.losses import LOSSES, SHORT_NAMES, TYPICAL_RANK_COLUMNS, factors
from analysis.text import fraction, percent, seconds

#: What a stacked bar consists of: words, colour and hatch of a part.
Part = tuple[str, str, str]


def bars_draft(
    selection: Selection,
    *,
    kind: str,
    what: str,
    topic: str,
    description: str,
    caption: str,
    legend_lines: int = 0,
) -> Draft:
    """Return the draft of a figure with one bar per row of a selection."""
    rows = selection.rows
    headings = 1.1 * len(selection.labels) if len(selection.labels) > 1 else 0
    return Draft(
        name=f"{kind}-{selection.regime or 'other'}",
        what=what,
        topic=topic,
        regime=selection.regime,
        labels=selection.labels,
        shared=selection.shared,
        description=description,
        caption=caption,
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
    bar: Callable[[float, dict[Hashable, Any], str], dict[str, list[str]]],
) -> dict[str, list[str]]:
    """Call ``bar`` with place, row and name for each row, series by series.

    Args:
        axes: gets the names of the sizes, and headings where there are several series.
        rows: ``series, gpus, nodes, gpus_per_node`` and what ``bar`` draws.
        labels: the series in order, with their names.
        bar: draws one row at a place of the vertical axis and returns the words for its marks by gid.

    Returns:
        The words of all bars.
    """
    tips: dict[str, list[str]] = {}
    names: dict[float, str] = {}
    place = 0.0
    for series, label in labels.items():
        own = rows[rows["series"] == series]
        if not len(own):
            continue
        if len(labels) > 1:
            style: dict[str, Any] = {"fontsize": "small", "fontweight": "bold", "color": INK}
            # At the panel's edge, wherever its axis begins.
            axes.text(0, place, label, va="center", ha="left", transform=axes.get_yaxis_transform(), **style)
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


def parts_legend(axes: Axes, parts: Sequence[Part]) -> None:
    """Add the legend of what bars are stacked of, in two columns below the figure."""
    handles = [Patch(facecolor=colour, hatch=hatch, edgecolor=SURFACE) for _, colour, hatch in parts]
    axes.figure.legend(
        handles, [words for words, *_ in parts], loc="lower left", ncols=2, frameon=False, labelcolor=INK
    )


# Where a step's time goes: one stacked bar per size.


def split_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows whose step is known in all its parts, with ``total_s`` of what is stacked.

    ``other`` may be slightly negative (timers overlap by microseconds): it is stacked as 0.
    Where waiting was not told apart, all exposed communication is one part.
    """
    frame = rows.copy()
    frame["transfer"] = frame["transfer"].fillna(frame["exposed"])
    names = [name for name, *_ in STEP_PARTS]
    required = [name for name in names if name != "wait"]
    frame = frame[frame[required].notna().all(axis=1)]
    frame[names] = frame[names].clip(lower=0)
    frame["total_s"] = frame[names].sum(axis=1)
    return frame[frame["total_s"] > 0]


def draw_split(axes: Axes, rows: pd.DataFrame, *, labels: dict[str, str]) -> dict[str, list[str]]:
    """Draw one bar per row as shares of its step and return the words for its parts by gid.

    Args:
        axes: where to draw.
        rows: from :func:`split_rows`, of a few series.
        labels: the series in order, with their names.
    """
    tips = draw_rows(axes, rows, labels=labels, bar=partial(_draw_bar, axes))
    axes.set(xlim=(0, 1.16), xlabel="Share of the step's time")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(value)))
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    axes.spines["bottom"].set_bounds(0, 1)
    parts_legend(axes, [part[1:] for part in STEP_PARTS if (rows[part[0]] > 0).any()])
    return tips


def _draw_bar(axes: Axes, place: float, row: dict[Hashable, Any], name: str) -> dict[str, list[str]]:
    tips = {}
    left, total = 0.0, row["total_s"]
    for part, words, colour, hatch in STEP_PARTS:
        value = row[part]
        if not value > 0:
            continue
        share = value / total
        gid = f"part-{part}-{place:.2f}"
        style: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": SURFACE, "linewidth": 0.6}
        (bar,) = axes.barh(place, share, left=left, height=0.72, **style)
        bar.set_gid(gid)
        tips[gid] = [f"{name}, {words}: {seconds(value)}, {percent(share, decimals=1)} of the step"]
        left += share
    axes.text(1.015, place, seconds(total), va="center", ha="left", fontsize="small", color=MUTED)
    return tips


# What each cause takes away from the efficiency: one bar per size, stacked on a logarithmic axis.

_TICKS = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 1e-3, 1e-4)
_MOST_TICKS = 7


def loss_rows(rows: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows beyond their baseline whose factors are known, with a column for each factor.

    Args:
        rows: some rows of ``table``.
        table: from :func:`analysis.checks.scaling_table.scaling_table`.
    """
    beyond = rows[rows["base_place"].notna() & ~rows["is_base"] & rows["efficiency"].notna()]
    needed = [name for name in _NEEDED if name in table]
    bases = table.loc[beyond["base_place"].astype("int64"), needed].to_dict("records")
    found = [factors(row, base) for row, base in zip(beyond[needed].to_dict("records"), bases, strict=True)]
    frame = pd.DataFrame(found, index=beyond.index, columns=list(LOSSES))
    return beyond.drop(columns=[*LOSSES], errors="ignore").join(frame)[frame.notna().all(axis=1)]


_NEEDED = (
    "load_balance",
    "comm_efficiency",
    "useful_s",
    "data",
    "gpus",
    "global_batch",
    *TYPICAL_RANK_COLUMNS,
)


def draw_losses(axes: Axes, rows: pd.DataFrame, *, labels: dict[str, str]) -> dict[str, list[str]]:
    """Draw one bar per row from 1 down to its efficiency and return the words for its parts by gid.

    Args:
        axes: where to draw.
        rows: from :func:`loss_rows`, of a few series.
        labels: the series in order, with their names.
    """
    ends = [_ends(row) for row in rows.to_dict("records")]
    longest = max(0.01, *(end for _, end in ends))
    least = min(0.0, *(start for start, _ in ends))
    bar = partial(_draw_bar_loss_bars, axes, beside=0.02 * (longest - least))
    tips = draw_rows(axes, rows, labels=labels, bar=bar)
    # Room for the text behind a bar.
    axes.set_xlim(least * 1.03, longest * 1.16)
    ticks = _few([tick for tick in _TICKS if least <= -math.log(tick) <= 1.1 * longest])
    axes.set_xticks([-math.log(tick) for tick in ticks], [f"{tick:g}" for tick in ticks])
    axes.set_xlabel("Efficiency left (logarithmic)")
    shown = [part for part in LOSS_PARTS if (rows[part[0]].sub(1).abs() > 1e-9).any()]
    parts_legend(axes, [(SHORT_NAMES[factor], colour, hatch) for factor, colour, hatch in shown])
    return tips


def _few(ticks: Sequence[float]) -> list[float]:
    """Return ticks with room between their numbers, 1 the first."""
    room = -math.log(min(ticks)) / _MOST_TICKS
    kept = [ticks[0]]
    for tick in ticks[1:]:
        if math.log(kept[-1] / tick) >= room:
            kept.append(tick)
    return kept


def _ends(row: dict[Hashable, Any]) -> tuple[float, float]:
    """Return how far a bar reaches to either side of 1, on the logarithmic axis."""
    lost = [-math.log(row[name]) for name in LOSSES]
    return sum(min(0.0, part) for part in lost), sum(max(0.0, part) for part in lost)


def _draw_bar_loss_bars(
    axes: Axes, place: float, row: dict[Hashable, Any], name: str, *, beside: float
) -> dict[str, list[str]]:
    tips = {}
    left = right = 0.0
    total = sum(max(0.0, -math.log(row[factor])) for factor in LOSSES)
    for factor, colour, hatch in LOSS_PARTS:
        value = float(row[factor])
        lost = -math.log(value)
        if abs(lost) < 1e-9:
            continue
        gid = f"loss-{factor}-{place:.2f}"
        style: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": SURFACE, "linewidth": 0.6}
        (bar,) = axes.barh(place, lost, left=right if lost > 0 else left, height=0.72, **style)
        bar.set_gid(gid)
        share = f", {percent(lost / total)} of the loss" if lost > 0 else ", a gain"
        tips[gid] = [f"{name}, {SHORT_NAMES[factor]}: factor {fraction(value)}{share}"]
        right, left = right + max(lost, 0.0), left + min(lost, 0.0)
    axes.plot([0, 0], [place - 0.5, place + 0.5], color=MUTED, linewidth=0.8)
    text = fraction(row["efficiency"], decimals=2)
    axes.text(right + beside, place, text, va="center", ha="left", fontsize="small", color=MUTED)
    return tips
