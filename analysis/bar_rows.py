"""One horizontal bar per size, series by series: places, names and measures of a figure of such bars."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from analysis.drawing import Draft
from analysis.palette import INK, SURFACE
from analysis.selection import Selection
from analysis.sizes import ranks, with_layout

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
