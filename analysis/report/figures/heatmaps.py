"""Heat maps of the efficiency: by nodes and ranks per node, and by size and batch."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

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

#: Opacity of a square's colour at efficiency 1 and at 0. Text is readable on both, in light and dark themes.
_STRONGEST, _WEAKEST = 0.5, 0.04
#: Height of a panel's heading, relative to the height of a square.
_HEADING = 0.62

#: Maximum numbers of series, nodes and ranks per node in a heat map of nodes and ranks per node.
MAX_SERIES, MAX_NODES, MAX_PER_NODE = 4, 8, 8
#: Maximum numbers of panels, sizes and batches in a heat map of sizes and batches.
MAX_PANELS, MAX_SIZES, MAX_BATCHES = 3, 8, 8


@dataclass(frozen=True)
class Field:
    """One square of a heat map, at a column and a row (``line``), both from 0.

    Attributes:
        efficiency: determines the colour and is the upper number; NaN if it is not known.
        below: the lower number.
        state: the state of the cell, shown instead of an unknown efficiency.
        tip: shown when the pointer is on the square.
    """

    column: int
    line: int
    efficiency: float
    below: str
    state: object
    tip: Tip


@dataclass(frozen=True)
class Panel:
    """The squares under one heading, with the names of their rows (``lines``)."""

    heading: str
    lines: Sequence[str]
    fields: Sequence[Field]


@dataclass(frozen=True)
class Panels:
    """Panels, one below the other, that share their columns."""

    panels: Sequence[Panel]
    columns: Sequence[str]
    xlabel: str
    ylabel: str

    def figure(self, draft: Draft) -> Drawing:
        """Return the panels as a finished figure."""
        lines = sum(len(panel.lines) for panel in self.panels)
        height_in = 0.42 * (lines + self._heading * len(self.panels)) + 0.62
        return finish(replace(draft, height_in=height_in, with_axis=False), self._draw)

    @property
    def _heading(self) -> float:
        return _HEADING if len(self.panels) > 1 else 0.0

    def _draw(self, axes: Axes) -> Tips:
        tips: Tips = {}
        ticks: list[float] = []
        top = 0.0
        for panel_number, panel in enumerate(self.panels):
            if self._heading:
                axes.text(-0.5, top - 0.16, panel.heading, **HEADING)
                top += self._heading
            for place, field in enumerate(panel.fields):
                gid = f"field-{panel_number}-{place}"
                _draw_field(axes, field, y=top + field.line, gid=gid)
                tips[gid] = [field.tip]
            ticks += [top + line for line in range(len(panel.lines))]
            top += len(panel.lines)
        axes.set_yticks(ticks, [name for panel in self.panels for name in panel.lines])
        axes.set_xticks(range(len(self.columns)), list(self.columns))
        axes.set(xlabel=self.xlabel, ylabel=self.ylabel)
        axes.set(xlim=(-0.5, len(self.columns) - 0.5), ylim=(top - 0.5, -0.5))
        axes.tick_params(length=0)
        axes.spines["bottom"].set_visible(False)
        return tips


def _draw_field(axes: Axes, field: Field, *, y: float, gid: str) -> None:
    x, efficiency = field.column, field.efficiency
    measured = math.isfinite(efficiency)
    strength = _WEAKEST + (_STRONGEST - _WEAKEST) * min(max(efficiency, 0.0), 1.0) if measured else 0.0
    box = Rectangle((x - 0.47, y - 0.46), 0.94, 0.92, linewidth=0.8)
    box.set_facecolor((Colour.BLUE, strength) if measured else "none")
    box.set_edgecolor(Colour.BLUE if measured else Colour.GREY)
    box.set_linestyle("-" if measured else (0, (2, 2)))
    box.set_gid(gid)
    axes.add_patch(box)
    if not measured:
        has_value = not field.below.startswith(MISSING)
        text = f"no efficiency\n{field.below}" if has_value else state_name(field.state)
        axes.text(x, y, text, va="center", ha="center", fontsize=7, color=Colour.MUTED)
        return
    centred: dict[str, Any] = {"va": "center", "ha": "center", "color": Colour.INK}
    axes.text(x, y - 0.17, fraction(efficiency, decimals=2), fontsize=9.5, **centred)
    axes.text(x, y + 0.23, field.below, fontsize=7.5, **centred)


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
    nodes = sorted(set(grid.rows["nodes"]))
    panels = []
    for series, label in grid.labels.items():
        own = grid.rows[grid.rows["series"] == series]
        per_node = sorted(set(own["per_node"]))
        fields = [
            Field(
                column=nodes.index(row["nodes"]),
                line=per_node.index(row["per_node"]),
                efficiency=float(row["efficiency"]),
                below=f"{number(float(row['speedup']), digits=3)}×",
                state=row["state"],
                tip=Tip(f"{label}\n{_grid_tip(row)}", row.get("cell_id", "")),
            )
            for row in own.to_dict("records")
        ]
        panels.append(Panel(label, [str(amount) for amount in per_node], fields))
    return Panels(panels, [f"{amount:,}" for amount in nodes], "Nodes", "Ranks per node").figure(draft)


def _grid_tip(row: dict[Hashable, Any]) -> str:
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


@dataclass(frozen=True)
class BatchGrid:
    """The sizes and batches of one scaling mode.

    Attributes:
        mode: ``strong`` (global batches) or ``weak`` (batches per rank).
        panels: rows of the scaling table with ``size`` and ``batch``, by panel name. Each combination of
            backend, launcher and swept options has its own panel.
        axis: the unit of ``size``: nodes, or ranks if all cells have one node.
        left_out: sentences about cells that are not drawn.
    """

    mode: str
    panels: dict[str, pd.DataFrame]
    axis: str
    left_out: list[str]


def batch_grids(table: pd.DataFrame, parts: Mapping[str, Mapping[str, str]]) -> dict[str, BatchGrid]:
    """Return a grid of sizes and batches for each mode that has at least two sizes and two batches."""
    found = {}
    for mode in ("strong", "weak"):
        rows = table[(table["mode"] == mode) & table["gpus_per_node"].str.isdecimal()].copy()
        rows["batch"] = rows["global_batch" if mode == "strong" else "per_gpu_batch"]
        over_nodes = rows["nodes"].nunique() > 1
        rows["size"] = rows["nodes"] if over_nodes else rows["gpus"]
        rows["panel"] = [
            _panel_name(parts.get(series, {}), per_node if over_nodes else "")
            for series, per_node in zip(rows["series"], rows["gpus_per_node"], strict=True)
        ]
        grid = _batch_grid(mode, rows, "Nodes" if over_nodes else "Ranks")
        if grid is not None:
            found[mode] = grid
    return found


def _panel_name(parts: Mapping[str, str], per_node: str) -> str:
    words = [text for name, text in parts.items() if name not in ("mode", "batch")]
    words += [f"{count(int(per_node), 'rank')} per node"] if per_node else []
    return ", ".join(filter(None, words)) or "all"


def _batch_grid(mode: str, rows: pd.DataFrame, axis: str) -> BatchGrid | None:
    panels, left_out = {}, []
    values = rows[rows["n"] > 0].groupby("panel", sort=False)[["batch", "size"]].nunique()
    varied = set(values.index[(values > 1).all(axis=1)])
    names = [name for name in dict.fromkeys(rows["panel"]) if name in varied]
    if not names:
        return None
    if len(names) > MAX_PANELS:
        left_out.append(f"{MAX_PANELS} of {len(names)} panels drawn")
    for name in names[:MAX_PANELS]:
        own = rows[rows["panel"] == name]
        # If several cells have equal size and batch, the first measured one is drawn.
        first = own.assign(unmeasured=own["n"] == 0).sort_values("unmeasured", kind="stable")
        panels[str(name)] = first.drop_duplicates(["size", "batch"])
    limits = {"size": MAX_SIZES, "batch": MAX_BATCHES}
    shown = {name: _spread_rows(own, limits) for name, own in panels.items()}
    drawn, all_of = (sum(map(len, some.values())) for some in (shown, panels))
    if drawn < all_of:
        left_out.append(f"{drawn:,} of {count(all_of, 'cell')} drawn")
    return BatchGrid(mode, shown, axis, left_out)


def batch_figure(grid: BatchGrid) -> Drawing:
    """Draw the heat map of sizes (left to right) and batches (top down)."""
    draft = Draft(
        name=f"heat-{grid.mode}",
        subject=f"Efficiency and throughput by {grid.axis.lower()} and batch",
        mode=grid.mode,
        labels={name: name for name in grid.panels},
        description=_batch_description(grid),
        caption=WORDS["captions"]["heat"].format(baselines=_baselines(grid)),
        left_out=list(grid.left_out),
        left_in=0.9,
    )
    sizes = sorted({size for rows in grid.panels.values() for size in rows["size"]})
    panels = []
    for label, rows in grid.panels.items():
        batches = sorted(set(rows["batch"]), reverse=True)
        fields = [
            Field(
                column=sizes.index(row["size"]),
                line=batches.index(row["batch"]),
                efficiency=float(row["efficiency"]),
                below=number(float(row["rate"]), digits=3),
                state=row["state"],
                tip=Tip(f"{label}\n{_batch_tip(row)}", row["cell_id"]),
            )
            for row in rows.to_dict("records")
        ]
        panels.append(Panel(one_line(label, limit=60), [whole(batch) for batch in batches], fields))
    ylabel = "Global batch" if grid.mode == "strong" else "Batch per rank"
    return Panels(panels, [f"{size:,}" for size in sizes], grid.axis, ylabel).figure(draft)


def _baselines(grid: BatchGrid) -> str:
    names = [name for rows in grid.panels.values() for name in rows["baseline"] if name]
    return listed(list(dict.fromkeys(names)), limit=2)


def _batch_description(grid: BatchGrid) -> str:
    """Describe the heat map: the highest throughput of each panel."""
    texts = []
    for label, rows in grid.panels.items():
        measured = rows[rows["rate"].notna()].sort_values("rate", kind="stable")
        if len(measured):
            best = measured.iloc[-1]
            texts.append(
                f"{label}: the highest throughput, {number(best['rate'])} samples/s, with batch "
                f"{whole(best['batch'])} on {ranks(best)}, at an efficiency "
                f"of {fraction(best['efficiency'])}."
            )
    return f"Efficiency and throughput by {grid.axis.lower()} (columns) and batch (rows). {' '.join(texts)}"


def _batch_tip(row: Mapping[Hashable, Any]) -> str:
    size = f"{as_product(row)}, batch {whole(row['global_batch'])}, {whole(row['per_gpu_batch'])} per rank"
    if not known(row["rate"]):
        return _not_measured(size, row)
    efficiency = f"\nefficiency {fraction(row['efficiency'])}" if known(row["efficiency"]) else ""
    return f"{size}{efficiency}\n{number(row['rate'])} samples/s"
