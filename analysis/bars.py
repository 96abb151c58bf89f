"""Where a step's time goes: one stacked bar per size."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from analysis.bar_rows import draw_rows, parts_legend
from analysis.palette import MUTED, STEP_PARTS, SURFACE
from analysis.wording import percent, seconds


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
