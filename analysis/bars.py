"""Where a step's time goes: one stacked bar per size."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from analysis.palette import INK, MUTED, STEP_PARTS, SURFACE
from analysis.wording import count, percent, seconds


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


def draw_rows(
    axes: Axes,
    rows: pd.DataFrame,
    *,
    labels: Mapping[str, str],
    bar: Callable[[float, dict[Hashable, Any], str], None],
) -> float:
    """Call ``bar`` with place, row and name for each row, series by series; return the lower edge.

    Args:
        axes: gets the names of the sizes, and headings where there are several series.
        rows: ``series, gpus, nodes, gpus_per_node`` and what ``bar`` draws.
        labels: the series in order, with their names.
        bar: draws one row at a place of the vertical axis.
    """
    ticks: list[float] = []
    names: list[str] = []
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
            ranks = count(int(row["gpus"]), "rank")
            name = f"{ranks} ({row['nodes']} × {row['gpus_per_node']})" if ambiguous else ranks
            bar(place, row, f"{label}\n{name}")
            ticks.append(place)
            names.append(name)
            place += 1
        place += 0.25
    axes.set_yticks(ticks, names)
    axes.tick_params(axis="y", length=0)
    return place - 0.35


def rows_high(rows: pd.DataFrame, labels: Mapping[str, str]) -> float:
    """Return the inches that :func:`draw_rows` needs."""
    headings = 1.1 * len(labels) if len(labels) > 1 else 0
    return 0.25 * (len(rows) + headings) + 0.75


def names_wide(rows: pd.DataFrame) -> float:
    """Return the inches that the names of the sizes need."""
    return 1.2 if rows.duplicated(["series", "gpus"]).any() else 0.78


def draw_split(axes: Axes, rows: pd.DataFrame, *, labels: dict[str, str]) -> dict[str, list[str]]:
    """Draw one bar per row as shares of its step and return the words for its parts by gid.

    Args:
        axes: where to draw.
        rows: from :func:`split_rows`, of a few series.
        labels: the series in order, with their names.
    """
    tips: dict[str, list[str]] = {}

    def bar(place: float, row: dict[Hashable, Any], name: str) -> None:
        tips.update(_draw_bar(axes, place, row, name))

    bottom = draw_rows(axes, rows, labels=labels, bar=bar)
    axes.set(xlim=(0, 1.16), ylim=(bottom, -0.65), xlabel="Share of the step's time")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(value)))
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    axes.spines["bottom"].set_bounds(0, 1)
    _add_legend(axes, rows)
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


def _add_legend(axes: Axes, rows: pd.DataFrame) -> None:
    shown = [part for part in STEP_PARTS if (rows[part[0]] > 0).any()]
    handles = [Patch(facecolor=colour, hatch=hatch, edgecolor=SURFACE) for _, _, colour, hatch in shown]
    axes.figure.legend(
        handles, [words for _, words, *_ in shown], loc="lower left", ncols=2, frameon=False, labelcolor=INK
    )
