"""Heat maps of the efficiency: by nodes and ranks per node, and by size and batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgba

from analysis.data.names import as_product, layout, ranks, short_labels, state_name
from analysis.report.figures.drawing import (
    HEADING,
    Colour,
    Draft,
    Drawing,
    Selection,
    Tip,
    Tips,
    evenly_spaced,
    finish,
)
from analysis.report.words import WORDS
from analysis.text import MISSING, count, fraction, known, listed, number, one_line, whole

#: Colours from efficiency 0 to 1. Text is readable on all of them, in light and dark themes.
_COLOURS = LinearSegmentedColormap.from_list(
    "efficiency", [to_rgba(Colour.BLUE, 0.04), to_rgba(Colour.BLUE, 0.5)]
).with_extremes(under=to_rgba(Colour.GREY, 0.15))
#: The value of a square without an efficiency, which is below all efficiencies.
_UNKNOWN = -1.0
#: The line of a panel's heading. All other lines are positive.
_HEADING = 0

#: Maximum numbers of series, nodes and ranks per node in a heat map of nodes and ranks per node.
MAX_SERIES, MAX_NODES, MAX_PER_NODE = 4, 8, 8
#: Maximum numbers of panels, sizes and batches in a heat map of sizes and batches.
MAX_PANELS, MAX_SIZES, MAX_BATCHES = 3, 8, 8


def _figure(
    draft: Draft,
    rows: pd.DataFrame,
    *,
    below: Callable[[Mapping[Hashable, Any]], str],
    tip: Callable[[Mapping[Hashable, Any]], str],
    xlabel: str,
    ylabel: str,
    descending: bool = False,
) -> Drawing:
    """Draw a square per row in panels, one below the other.

    ``rows`` have ``panel, line, column, cell_id, efficiency, state``. ``below`` returns the lower number of a
    row's square, and ``tip`` its tip. ``descending`` is the order of the lines.
    """
    squares = rows[["panel", "line", "column", "cell_id"]].assign(
        efficiency=rows["efficiency"].astype(float).fillna(_UNKNOWN),
        text=[_text(row, below(row)) for row in rows.to_dict("records")],
        tip=[f"{row['panel']}\n{tip(row)}" for row in rows.to_dict("records")],
    )
    order = []
    for panel, own in squares.groupby("panel", sort=False):
        order += [(panel, _HEADING)] if squares["panel"].nunique() > 1 else []
        order += [(panel, line) for line in sorted(set(own["line"]), reverse=descending)]
    grid = squares.pivot(index=["panel", "line"], columns="column").reindex(order)
    draft = replace(draft, height_in=0.42 * len(grid) + 0.62, with_axis=False)
    return finish(draft, partial(_draw, grid=grid, xlabel=xlabel, ylabel=ylabel))


def _text(row: Mapping[Hashable, Any], below: str) -> str:
    """Return the efficiency above another number, or the state of the cell."""
    if known(row["efficiency"]):
        return f"{fraction(row['efficiency'], decimals=2)}\n{below}"
    return state_name(row["state"]) if below.startswith(MISSING) else f"no efficiency\n{below}"


def _draw(axes: Axes, *, grid: pd.DataFrame, xlabel: str, ylabel: str) -> Tips:
    sns.heatmap(
        grid["efficiency"],
        ax=axes,
        vmin=0,
        vmax=1,
        cmap=_COLOURS,
        cbar=False,
        annot=grid["text"],
        fmt="",
        annot_kws={"color": Colour.INK, "fontsize": 8},
        linewidths=3,
        linecolor=Colour.SURFACE,
        xticklabels=[f"{column:,}" for column in grid["efficiency"].columns],
        yticklabels=False,
    )
    axes.collections[0].set_gid("squares")
    ticks = {}
    for place, (panel, line) in enumerate(grid.index):
        if line == _HEADING:
            axes.text(0, place + 0.7, one_line(panel, limit=60), **HEADING)
        else:
            ticks[place + 0.5] = whole(line)
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.tick_params(length=0)
    # The tip of a size that was not planned is empty.
    tips, cells = (grid[name].fillna("").to_numpy().flat for name in ("tip", "cell_id"))
    return {"squares": [Tip(tip, cell) for tip, cell in zip(tips, cells, strict=True)]}


def _not_measured(size: str, row: Mapping[Hashable, Any]) -> str:
    """Return the tooltip of a square without a value: the state of the cell and the reason."""
    reason = one_line(row["reason"], limit=160)
    return f"{size}: {state_name(row['state'])}" + (f"\n{reason}" if reason else "")


# -- nodes and ranks per node ---------------------------------------------------------


def grids(rows: pd.DataFrame, parts: dict[str, dict[str, str]]) -> dict[str, Selection]:
    """Select the rows to draw, by scaling mode; ``rows`` are from :func:`analysis.stats.scaling.two_axes`."""
    return {str(mode): _grid(str(mode), own, parts) for mode, own in rows.groupby("mode", sort=False)}


def _grid(mode: str, rows: pd.DataFrame, parts: dict[str, dict[str, str]]) -> Selection:
    series = list(dict.fromkeys(rows["series"]))
    left_out = []
    if len(series) > MAX_SERIES:
        left_out.append(f"{MAX_SERIES} of {len(series)} series drawn")
        series = series[:MAX_SERIES]
    shown = rows[rows["series"].isin(series)]
    drawn = _spread_rows(shown, {"nodes": MAX_NODES, "per_node": MAX_PER_NODE})
    if len(drawn) < len(shown):
        left_out.append(f"{len(drawn):,} of {count(len(shown), 'size')} drawn")
    labels, shared = short_labels(parts, series)
    return Selection(mode, drawn, labels, shared, left_out)


def _spread_rows(rows: pd.DataFrame, limits: Mapping[str, int]) -> pd.DataFrame:
    """Keep rows with evenly spaced values; ``limits`` maps columns to their maximum numbers of values."""
    for column, most in limits.items():
        values = sorted(set(rows[column]))
        rows = rows[rows[column].isin([values[place] for place in evenly_spaced(len(values), most)])]
    return rows


def grid_figure(grid: Selection) -> Drawing:
    """Draw the heat map of nodes and ranks per node, with a panel per series."""
    draft = Draft(
        name=f"axes-{grid.mode}",
        subject="Efficiency and speedup by nodes and ranks per node",
        mode=grid.mode,
        labels=grid.labels,
        shared=grid.shared,
        description=_grid_description(grid),
        caption=WORDS["captions"]["axes"],
        left_out=list(grid.left_out),
        left_in=0.6,
    )
    rows = grid.rows.assign(
        panel=grid.rows["series"].map(grid.labels), line=grid.rows["per_node"], column=grid.rows["nodes"]
    )
    return _figure(
        draft,
        rows,
        below=lambda row: f"{number(float(row['speedup']), digits=3)}×",
        tip=_grid_tip,
        xlabel="Nodes",
        ylabel="Ranks per node",
    )


def _grid_tip(row: Mapping[Hashable, Any]) -> str:
    size = as_product(row)
    if not known(row["efficiency"]):
        return _not_measured(size, row)
    text = f"{size}\nefficiency {fraction(row['efficiency'])}, speedup {number(row['speedup'], digits=3)}×"
    if row["nodes"] > 1 and known(row["efficiency_over_nodes"]):
        text += f"\nover nodes {fraction(row['efficiency_over_nodes'])}"
    if known(row["efficiency_within_node"]):
        text += f"\nwithin one node {fraction(row['efficiency_within_node'])}"
    return text


def _grid_description(grid: Selection) -> str:
    """Describe the heat map: for each series, the efficiency at its largest size on one node and overall."""
    texts = []
    for series, label in grid.labels.items():
        own = grid.rows[(grid.rows["series"] == series) & grid.rows["efficiency"].notna()]
        ends = own[(own["nodes"] == 1)].tail(1), own.sort_values(["per_node", "nodes"]).tail(1)
        values = [
            f"{fraction(row['efficiency'], decimals=2)} at {layout(row)}"
            for end in ends
            for row in end.to_dict("records")
        ]
        texts.append(f"{label}: efficiency {', '.join(dict.fromkeys(values)) or 'not measured'}.")
    return f"Efficiency and speedup by nodes (columns) and ranks per node (rows). {' '.join(texts)}"


# -- sizes and batches ----------------------------------------------------------------


def batch_figure(
    table: pd.DataFrame,
    mode: str,
    parts: Mapping[str, Mapping[str, str]],
) -> Drawing | None:
    """Draw the heat map of sizes (left to right) and batches (top down) of one scaling mode.

    Each combination of backend, launcher and swept options has its own panel. The result is None if none of
    them has at least two sizes and two batches.
    """
    rows = table[(table["mode"] == mode) & table["gpus_per_node"].str.isdecimal()].copy()
    over_nodes = rows["nodes"].nunique() > 1
    rows["line"] = rows["global_batch" if mode == "strong" else "per_gpu_batch"]
    rows["column"] = rows["nodes" if over_nodes else "gpus"]
    rows["panel"] = [
        _panel_name(parts.get(series, {}), per_node if over_nodes else "")
        for series, per_node in zip(rows["series"], rows["gpus_per_node"], strict=True)
    ]
    rows, left_out = _select_batches(rows)
    if not len(rows):
        return None
    axis = "Nodes" if over_nodes else "Ranks"
    baselines = listed([name for name in dict.fromkeys(rows["baseline"]) if name], limit=2)
    draft = Draft(
        name=f"heat-{mode}",
        subject=f"Efficiency and throughput by {axis.lower()} and batch",
        mode=mode,
        labels={name: name for name in dict.fromkeys(rows["panel"])},
        description=_batch_description(rows, axis),
        caption=WORDS["captions"]["heat"].format(baselines=baselines),
        left_out=left_out,
        left_in=0.9,
    )
    return _figure(
        draft,
        rows,
        below=lambda row: number(float(row["rate"]), digits=3),
        tip=_batch_tip,
        xlabel=axis,
        ylabel="Global batch" if mode == "strong" else "Batch per rank",
        descending=True,
    )


def _panel_name(parts: Mapping[str, str], per_node: str) -> str:
    words = [text for name, text in parts.items() if name not in ("mode", "batch")]
    words += [f"{count(int(per_node), 'rank')} per node"] if per_node else []
    return ", ".join(filter(None, words)) or "all"


def _select_batches(rows: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return the rows to draw, panel by panel, and texts about what is left out."""
    values = rows[rows["n"] > 0].groupby("panel", sort=False)[["line", "column"]].nunique()
    varied = set(values.index[(values > 1).all(axis=1)])
    names = [name for name in dict.fromkeys(rows["panel"]) if name in varied]
    left_out = [f"{MAX_PANELS} of {len(names)} panels drawn"] if len(names) > MAX_PANELS else []
    # If several cells have equal size and batch, the first measured one is drawn.
    first = rows.assign(unmeasured=rows["n"] == 0).sort_values("unmeasured", kind="stable")
    first = first.drop_duplicates(["panel", "column", "line"])
    panels = [first[first["panel"] == name] for name in names[:MAX_PANELS]]
    drawn = [_spread_rows(own, {"column": MAX_SIZES, "line": MAX_BATCHES}) for own in panels]
    if (some := sum(map(len, drawn))) < (every := sum(map(len, panels))):
        left_out.append(f"{some:,} of {count(every, 'cell')} drawn")
    return pd.concat([rows.iloc[:0], *drawn]), left_out


def _batch_description(rows: pd.DataFrame, axis: str) -> str:
    """Describe the heat map: the highest throughput of each panel."""
    texts = []
    for label, own in rows[rows["rate"].notna()].groupby("panel", sort=False):
        best = own.sort_values("rate", kind="stable").iloc[-1]
        texts.append(
            f"{label}: the highest throughput, {number(best['rate'])} samples/s, with batch "
            f"{whole(best['line'])} on {ranks(best)}, at an efficiency of {fraction(best['efficiency'])}."
        )
    return f"Efficiency and throughput by {axis.lower()} (columns) and batch (rows). {' '.join(texts)}"


def _batch_tip(row: Mapping[Hashable, Any]) -> str:
    size = f"{as_product(row)}, batch {whole(row['global_batch'])}, {whole(row['per_gpu_batch'])} per rank"
    if not known(row["rate"]):
        return _not_measured(size, row)
    efficiency = f"\nefficiency {fraction(row['efficiency'])}" if known(row["efficiency"]) else ""
    return f"{size}{efficiency}\n{number(row['rate'])} samples/s"
