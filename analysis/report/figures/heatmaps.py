"""Heat maps of the efficiency: by nodes and ranks per node, and by size and batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgba

from analysis.data.names import as_product, layout, ranks, short_labels
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
from analysis.report.words import CAPTIONS
from analysis.stats.columns import ScalingRow, grouped
from analysis.text import one_line
from bench.units import MISSING, count, fraction, known, listed, number, whole
from bench.words import term

R = TypeVar("R")

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


class Square(NamedTuple):
    """A square of a heat map: its place, its cell, and its texts. ``below`` is the lower number."""

    panel: str
    line: float
    column: int
    row: Any
    below: str
    tip: str

    @property
    def text(self) -> str:
        """The efficiency above another number, or the state of the cell."""
        if known(self.row.efficiency):
            return f"{fraction(self.row.efficiency, decimals=2)}\n{self.below}"
        return (
            term("outcome", self.row.state)
            if self.below.startswith(MISSING)
            else f"no efficiency\n{self.below}"
        )


def _figure(
    draft: Draft, squares: Sequence[Square], *, xlabel: str, ylabel: str, descending: bool = False
) -> Drawing:
    """Draw squares in panels, one below the other; ``descending`` is the order of the lines."""
    panels = list(dict.fromkeys(square.panel for square in squares))
    lines: list[tuple[str, float]] = []
    for panel in panels:
        own = {square.line for square in squares if square.panel == panel}
        lines += [(panel, _HEADING)] if len(panels) > 1 else []
        lines += [(panel, line) for line in sorted(own, reverse=descending)]
    draft = replace(draft, height_in=0.42 * len(lines) + 0.62, with_axis=False)
    return finish(draft, partial(_draw, squares=squares, lines=lines, xlabel=xlabel, ylabel=ylabel))


def _draw(
    axes: Axes, *, squares: Sequence[Square], lines: Sequence[tuple[str, float]], xlabel: str, ylabel: str
) -> Tips:
    columns = sorted({square.column for square in squares})
    values = np.full((len(lines), len(columns)), np.nan)
    texts, tips = np.full(values.shape, "", dtype=object), {}
    for square in squares:
        at = lines.index((square.panel, square.line)), columns.index(square.column)
        values[at] = square.row.efficiency if known(square.row.efficiency) else _UNKNOWN
        texts[at] = square.text
        tips[at] = Tip(f"{square.panel}\n{square.tip}", square.row.cell_id)
    sns.heatmap(
        values,
        ax=axes,
        vmin=0,
        vmax=1,
        cmap=_COLOURS,
        cbar=False,
        annot=texts,
        fmt="",
        annot_kws={"color": Colour.INK, "fontsize": 8},
        linewidths=3,
        linecolor=Colour.SURFACE,
        xticklabels=[f"{column:,}" for column in columns],
        yticklabels=False,
    )
    axes.collections[0].set_gid("squares")
    ticks = {}
    for place, (panel, line) in enumerate(lines):
        if line == _HEADING:
            axes.text(0, place + 0.7, one_line(panel, limit=60), **HEADING)
        else:
            ticks[place + 0.5] = whole(line)
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.tick_params(length=0)
    # The tip of a size that was not planned is empty.
    return {"squares": [tips.get(at, Tip("")) for at in np.ndindex(values.shape)]}


def _not_measured(size: str, row: ScalingRow) -> str:
    """Return the tooltip of a square without a value: the state of the cell and the reason."""
    reason = one_line(row.reason, limit=160)
    return f"{size}: {term('outcome', row.state)}" + (f"\n{reason}" if reason else "")


def _spread(rows: Sequence[R], key: Callable[[R], float], most: int) -> list[R]:
    """Keep the rows of at most ``most`` values of ``key``, evenly spaced."""
    values = sorted(set(map(key, rows)))
    kept = {values[place] for place in evenly_spaced(len(values), most)}
    return [row for row in rows if key(row) in kept]


# -- nodes and ranks per node ---------------------------------------------------------


def grids(sizes: Sequence[ScalingRow], parts: dict[str, dict[str, str]]) -> dict[str, Selection[ScalingRow]]:
    """Select the sizes to draw, by scaling mode; ``sizes`` are those of ``two_axes``."""
    modes = grouped(sizes, lambda size: size.mode)
    return {mode: _grid(mode, own, parts) for mode, own in modes.items()}


def _grid(mode: str, sizes: Sequence[ScalingRow], parts: dict[str, dict[str, str]]) -> Selection[ScalingRow]:
    series = list(dict.fromkeys(size.series for size in sizes))
    left_out = []
    if len(series) > MAX_SERIES:
        left_out.append(f"{MAX_SERIES} of {len(series)} series drawn")
        series = series[:MAX_SERIES]
    shown = [size for size in sizes if size.series in series]
    drawn = _spread(shown, lambda size: size.nodes, MAX_NODES)
    drawn = _spread(drawn, lambda size: int(size.gpus_per_node), MAX_PER_NODE)
    if len(drawn) < len(shown):
        left_out.append(f"{len(drawn):,} of {count(len(shown), 'size')} drawn")
    labels, shared = short_labels(parts, series)
    return Selection(mode, drawn, labels, shared, left_out)


def grid_figure(grid: Selection[ScalingRow]) -> Drawing:
    """Draw the heat map of nodes and ranks per node, with a panel per series."""
    draft = Draft(
        name=f"axes-{grid.mode}",
        subject="Efficiency and speedup by nodes and ranks per node",
        mode=grid.mode,
        labels=grid.labels,
        shared=grid.shared,
        description=_grid_description(grid),
        caption=CAPTIONS["axes"],
        left_out=list(grid.left_out),
        left_in=0.6,
    )
    squares = [
        Square(grid.labels[one.series], int(one.gpus_per_node), one.nodes, one, _speedup(one), _grid_tip(one))
        for one in grid.rows
    ]
    return _figure(draft, squares, xlabel="Nodes", ylabel="Ranks per node")


def _speedup(row: ScalingRow) -> str:
    return f"{number(row.speedup, digits=3)}×"


def _grid_tip(size: ScalingRow) -> str:
    text = as_product(size)
    if not known(size.efficiency):
        return _not_measured(text, size)
    text += f"\nefficiency {fraction(size.efficiency)}, speedup {_speedup(size)}"
    if size.nodes > 1 and known(size.efficiency_over_nodes):
        text += f"\nover nodes {fraction(size.efficiency_over_nodes)}"
    if known(size.efficiency_within_node):
        text += f"\nwithin one node {fraction(size.efficiency_within_node)}"
    return text


def _grid_description(grid: Selection[ScalingRow]) -> str:
    """Describe the heat map: for each series, the efficiency at its largest size on one node and overall."""
    texts = []
    for series, label in grid.labels.items():
        own = [size for size in grid.rows if size.series == series and known(size.efficiency)]
        own.sort(key=lambda size: (int(size.gpus_per_node), size.nodes))
        ends = [size for size in own if size.nodes == 1][-1:] + own[-1:]
        values = [f"{fraction(size.efficiency, decimals=2)} at {layout(size)}" for size in ends]
        texts.append(f"{label}: efficiency {', '.join(dict.fromkeys(values)) or 'not measured'}.")
    return f"Efficiency and speedup by nodes (columns) and ranks per node (rows). {' '.join(texts)}"


# -- sizes and batches ----------------------------------------------------------------


def batch_figure(table: Sequence[ScalingRow], mode: str, parts: dict[str, dict[str, str]]) -> Drawing | None:
    """Draw the heat map of sizes (left to right) and batches (top down) of one scaling mode.

    Each combination of backend, launcher and swept options has its own panel. The result is None if none of
    them has at least two sizes and two batches.
    """
    rows = [row for row in table if row.mode == mode and row.gpus_per_node.isdecimal()]
    over_nodes = len({row.nodes for row in rows}) > 1
    squares = [
        Square(
            _panel_name(parts.get(row.series, {}), row.gpus_per_node if over_nodes else ""),
            row.global_batch if mode == "strong" else row.per_gpu_batch,
            row.nodes if over_nodes else row.gpus,
            row,
            number(row.rate, digits=3),
            _batch_tip(row),
        )
        for row in rows
    ]
    squares, left_out = _select_batches(squares)
    if not squares:
        return None
    axis = "Nodes" if over_nodes else "Ranks"
    baselines = listed(list(dict.fromkeys(one.row.baseline for one in squares if one.row.baseline)), limit=2)
    draft = Draft(
        name=f"heat-{mode}",
        subject=f"Efficiency and throughput by {axis.lower()} and batch",
        mode=mode,
        labels={square.panel: square.panel for square in squares},
        description=_batch_description(squares, axis),
        caption=CAPTIONS["heat"].format(baselines=baselines),
        left_out=left_out,
        left_in=0.9,
    )
    ylabel = "Global batch" if mode == "strong" else "Batch per rank"
    return _figure(draft, squares, xlabel=axis, ylabel=ylabel, descending=True)


def _panel_name(parts: Mapping[str, str], per_node: str) -> str:
    words = [text for name, text in parts.items() if name not in ("mode", "batch")]
    words += [f"{count(int(per_node), 'rank')} per node"] if per_node else []
    return ", ".join(filter(None, words)) or "all"


def _select_batches(squares: Sequence[Square]) -> tuple[list[Square], list[str]]:
    """Return the squares to draw, panel by panel, and texts about what is left out."""
    # If several cells have equal size and batch, the first measured one is drawn.
    first: dict[tuple[str, float, int], Square] = {}
    panels: dict[str, list[Square]] = {}
    for square in sorted(squares, key=lambda square: square.row.n == 0):
        first.setdefault((square.panel, square.line, square.column), square)
    for square in first.values():
        panels.setdefault(square.panel, []).append(square)
    names = [name for name in dict.fromkeys(square.panel for square in squares) if _varies(panels[name])]
    left_out = [f"{MAX_PANELS} of {len(names)} panels drawn"] if len(names) > MAX_PANELS else []
    shown = [square for name in names[:MAX_PANELS] for square in panels[name]]
    drawn = []
    for name in names[:MAX_PANELS]:
        own = _spread(panels[name], lambda square: square.column, MAX_SIZES)
        drawn += _spread(own, lambda square: square.line, MAX_BATCHES)
    if len(drawn) < len(shown):
        left_out.append(f"{len(drawn):,} of {count(len(shown), 'cell')} drawn")
    return drawn, left_out


def _varies(squares: Sequence[Square]) -> bool:
    """Return whether several sizes and several batches were measured."""
    places = [(square.line, square.column) for square in squares if square.row.n]
    return bool(places) and all(len(set(values)) > 1 for values in zip(*places, strict=True))


def _batch_description(squares: Sequence[Square], axis: str) -> str:
    """Describe the heat map: the highest throughput of each panel."""
    texts = []
    for label in dict.fromkeys(square.panel for square in squares):
        best = max(
            (one for one in squares if one.panel == label and known(one.row.rate)),
            key=lambda one: one.row.rate,
        )
        texts.append(
            f"{label}: the highest throughput, {number(best.row.rate)} samples/s, with batch "
            f"{whole(best.line)} on {ranks(best.row)}, at an efficiency of {fraction(best.row.efficiency)}."
        )
    return f"Efficiency and throughput by {axis.lower()} (columns) and batch (rows). {' '.join(texts)}"


def _batch_tip(row: ScalingRow) -> str:
    size = f"{as_product(row)}, batch {whole(row.global_batch)}, {whole(row.per_gpu_batch)} per rank"
    if not known(row.rate):
        return _not_measured(size, row)
    efficiency = f"\nefficiency {fraction(row.efficiency)}" if known(row.efficiency) else ""
    return f"{size}{efficiency}\n{number(row.rate)} samples/s"
