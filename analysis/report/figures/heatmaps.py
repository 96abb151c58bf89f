"""Fields in panels, one below the other: a size or a batch each, its efficiency as number and strength."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from analysis.data.names import as_product, layout, ranks, short_labels, state_name
from analysis.report.figures.drawing import evenly_spaced
from analysis.report.figures.palette import BLUE, GREY, INK, MUTED
from analysis.text import MISSING, count, fraction, interval, known, listed, number, one_line, whole

#: Ink stays readable on the strongest field, on light and on dark paper.
_STRONGEST, _WEAKEST = 0.5, 0.04
#: How much room a panel's heading takes, in fields.
_HEADING = 0.62


@dataclass(frozen=True)
class Field:
    """One field: its column and its line (from 0), what stands in it, and the words under the pointer.

    ``state`` stands in a field whose efficiency is not known (NaN).
    """

    column: int
    line: int
    efficiency: float
    below: str
    state: object
    words: str


@dataclass(frozen=True)
class Panel:
    """The fields of one heading, with the names of their lines."""

    heading: str
    lines: Sequence[str]
    fields: Sequence[Field]


@dataclass(frozen=True)
class Panels:
    """Panels that share their columns."""

    panels: Sequence[Panel]
    columns: Sequence[str]
    xlabel: str
    ylabel: str

    @property
    def _heading(self) -> float:
        return _HEADING if len(self.panels) > 1 else 0.0

    @property
    def height_in(self) -> float:
        """How high the panels are, in inches, with the axis below them."""
        lines = sum(len(panel.lines) for panel in self.panels)
        return 0.42 * (lines + self._heading * len(self.panels)) + 0.62

    def draw(self, axes: Axes) -> dict[str, list[str]]:
        """Draw the panels and return the words for the fields by gid."""
        tips: dict[str, list[str]] = {}
        ticks: list[float] = []
        top = 0.0
        for panel_number, panel in enumerate(self.panels):
            if self._heading:
                style: dict[str, Any] = {"fontsize": "small", "fontweight": "bold", "color": INK}
                axes.text(-0.5, top - 0.16, panel.heading, va="center", ha="left", **style)
                top += self._heading
            for place, field in enumerate(panel.fields):
                gid = f"field-{panel_number}-{place}"
                _draw_field(axes, field, y=top + field.line, gid=gid)
                tips[gid] = [field.words]
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
    known = math.isfinite(efficiency)
    strength = _WEAKEST + (_STRONGEST - _WEAKEST) * min(max(efficiency, 0.0), 1.0) if known else 0.0
    box = Rectangle((x - 0.47, y - 0.46), 0.94, 0.92, linewidth=0.8)
    box.set_facecolor((BLUE, strength) if known else "none")
    box.set_edgecolor(BLUE if known else GREY)
    box.set_linestyle("-" if known else (0, (2, 2)))
    box.set_gid(gid)
    axes.add_patch(box)
    if not known:
        axes.text(x, y, state_name(field.state), va="center", ha="center", fontsize=7, color=MUTED)
        return
    centred: dict[str, Any] = {"va": "center", "ha": "center", "color": INK}
    axes.text(x, y - 0.17, fraction(efficiency, decimals=2), fontsize=9.5, **centred)
    axes.text(x, y + 0.23, field.below, fontsize=7.5, **centred)


# Efficiency and speedup by nodes and ranks per node: a field per size, one panel per series.

MAX_SERIES = 4
MAX_NODES = 8
MAX_PER_NODE = 8


@dataclass(frozen=True)
class Grid:
    """What a figure of one regime shows: at most a few series, and as many sizes as one can read."""

    regime: str
    rows: pd.DataFrame
    labels: dict[str, str]
    shared: str
    left_out: list[str]

    @property
    def baselines(self) -> str:
        """The baselines' names."""
        return listed(list(dict.fromkeys(self.rows["baseline"])), limit=3)


def grids(rows: pd.DataFrame, parts: dict[str, dict[str, str]]) -> dict[str, Grid]:
    """Return by regime what its figure shows, where there are two axes.

    Args:
        rows: from :func:`analysis.stats.scaling.two_axes`.
        parts: from :func:`analysis.data.names.series_parts`.
    """
    return {str(regime): _grid(str(regime), own, parts) for regime, own in rows.groupby("mode", sort=False)}


def _grid(regime: str, rows: pd.DataFrame, parts: dict[str, dict[str, str]]) -> Grid:
    series = list(dict.fromkeys(rows["series"]))
    left_out = []
    if len(series) > MAX_SERIES:
        left_out.append(f"{MAX_SERIES} of {len(series)} series drawn")
        series = series[:MAX_SERIES]
    shown = rows[rows["series"].isin(series)]
    thinned = shown
    for column, most in (("nodes", MAX_NODES), ("per_node", MAX_PER_NODE)):
        values = sorted(set(shown[column]))
        thinned = thinned[thinned[column].isin([values[place] for place in evenly_spaced(len(values), most)])]
    if len(thinned) < len(shown):
        left_out.append(f"{len(thinned):,} of {count(len(shown), 'size')} drawn")
    labels, shared = short_labels(parts, series)
    return Grid(regime, thinned, labels, shared, left_out)


def grid_table(grid: Grid) -> list[tuple[str, list[list[str]]]]:
    """Return for each series its name and the rows of its table, as texts."""
    return [
        (label, [_table_row(row) for row in grid.rows[grid.rows["series"] == series].to_dict("records")])
        for series, label in grid.labels.items()
    ]


#: The headings of :func:`grid_table`; "numeric" but for the last.
GRID_HEADINGS = (
    *("Ranks per node", "Nodes", "Ranks", "Speedup", "Efficiency", "Within one node", "Over nodes", "Remark"),
)


def _table_row(row: dict[Hashable, Any]) -> list[str]:
    bounds = interval(row["efficiency_low"], row["efficiency_high"], digits=3)
    over = MISSING if row["nodes"] == 1 else fraction(row["efficiency_over_nodes"])
    return [
        *(str(row[name]) for name in ("gpus_per_node", "nodes", "gpus")),
        number(row["speedup"], digits=3),
        f"{fraction(row['efficiency'])} {bounds}".strip(),
        fraction(row["efficiency_within_node"]),
        over,
        one_line(row["reason"], limit=160) or ("" if row["n"] else state_name(row["state"])),
    ]


def grid_panels(grid: Grid) -> Panels:
    """Return a panel for each series: nodes from left to right, ranks per node from top to bottom."""
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
                words=f"{label}\n{_words(row)}",
            )
            for row in own.to_dict("records")
        ]
        panels.append(Panel(label, [str(amount) for amount in per_node], fields))
    return Panels(panels, [f"{amount:,}" for amount in nodes], "Nodes", "Ranks per node")


def _words(row: dict[Hashable, Any]) -> str:
    size = as_product(row)
    if not known(row["efficiency"]):
        reason = one_line(row["reason"], limit=160)
        return f"{size}: {state_name(row['state'])}" + (f"\n{reason}" if reason else "")
    words = f"{size}\nefficiency {fraction(row['efficiency'])}, speedup {number(row['speedup'], digits=3)}×"
    if row["nodes"] > 1 and known(row["efficiency_over_nodes"]):
        words += f"\nover nodes {fraction(row['efficiency_over_nodes'])}"
    if known(row["efficiency_within_node"]):
        words += f"\nwithin one node {fraction(row['efficiency_within_node'])}"
    return words


def grid_description(grid: Grid) -> str:
    """Return what the figure shows, for who cannot see it: the far ends of both axes."""
    texts = []
    for series, label in grid.labels.items():
        own = grid.rows[(grid.rows["series"] == series) & grid.rows["efficiency"].notna()]
        ends = own[(own["nodes"] == 1)].tail(1), own.sort_values(["per_node", "nodes"]).tail(1)
        told = [
            f"{fraction(row['efficiency'], decimals=2)} at {layout(row)}"
            for end in ends
            for row in end.to_dict("records")
        ]
        texts.append(f"{label}: efficiency {', '.join(dict.fromkeys(told)) or 'not measured'}.")
    return f"Efficiency and speedup by nodes (columns) and ranks per node (rows). {' '.join(texts)}"


def grid_caption(grid: Grid) -> str:
    """Return how to read the figure: formulas, baseline, and the two paths."""
    formula = {
        "strong": "E = S·N₀/N above S = T(N₀)/T(N)",
        "weak": "E = T(N₀)/T(N) above the scaled speedup E·N/N₀",
    }[grid.regime]
    texts = [
        f"{formula}; baseline N₀: {grid.baselines}.",
        "Down the first column: within one node. Along a row: over nodes, with the ranks per node fixed.",
        "No field: not in the matrix.",
    ]
    return " ".join(texts)


# Efficiency and throughput over sizes and batches: which batch carries how many nodes.

MAX_PANELS = 3
MAX_BATCHES = 8
MAX_SIZES = 8


@dataclass(frozen=True)
class Heat:
    """What a figure of one regime shows: a panel per backend, launcher and whatever else is swept.

    Attributes:
        regime: ``strong`` (batches are global) or ``weak`` (per rank).
        panels: by the panel's name: ``size, batch``, the columns of the scaling table.
        axis: what a size counts: nodes, or ranks where there is one node only.
        left_out: what is not drawn, in words.
        rate_unit: what a throughput counts.
    """

    regime: str
    panels: dict[str, pd.DataFrame]
    axis: str
    left_out: list[str]
    rate_unit: str = "samples/s"


def heats(
    table: pd.DataFrame, parts: Mapping[str, Mapping[str, str]], *, rate_unit: str = "samples/s"
) -> dict[str, Heat]:
    """Return by regime what its figure shows, where there are two or more batches and sizes.

    Args:
        table: from :func:`analysis.checks.scaling_table.scaling_table`.
        parts: from :func:`analysis.data.names.series_parts`.
        rate_unit: what a throughput counts.
    """
    found = {}
    for regime in ("strong", "weak"):
        rows = table[(table["mode"] == regime) & table["gpus_per_node"].str.isdecimal()].copy()
        rows["batch"] = rows["global_batch" if regime == "strong" else "per_gpu_batch"]
        over_nodes = rows["nodes"].nunique() > 1
        rows["size"] = rows["nodes"] if over_nodes else rows["gpus"]
        rows["panel"] = [
            _panel(parts.get(series, {}), per_node if over_nodes else "")
            for series, per_node in zip(rows["series"], rows["gpus_per_node"], strict=True)
        ]
        heat = _heat(regime, rows, "Nodes" if over_nodes else "Ranks")
        if heat is not None:
            found[regime] = replace(heat, rate_unit=rate_unit)
    return found


def _panel(parts: Mapping[str, str], per_node: str) -> str:
    words = [text for name, text in parts.items() if name not in ("mode", "batch")]
    words += [f"{count(int(per_node), 'rank')} per node"] if per_node else []
    return ", ".join(filter(None, words)) or "all"


def _heat(regime: str, rows: pd.DataFrame, axis: str) -> Heat | None:
    panels, left_out = {}, []
    for name, own in rows.groupby("panel", sort=False):
        measured = own[own["n"] > 0]
        if measured["batch"].nunique() > 1 and measured["size"].nunique() > 1:
            # Of several cells of one size and batch the first that was measured.
            first = own.assign(unmeasured=own["n"] == 0).sort_values("unmeasured", kind="stable")
            panels[str(name)] = first.drop_duplicates(["size", "batch"])
    if not panels:
        return None
    if len(panels) > MAX_PANELS:
        left_out.append(f"{MAX_PANELS} of {len(panels)} panels drawn")
        panels = dict(list(panels.items())[:MAX_PANELS])
    shown = {name: _few(own) for name, own in panels.items()}
    drawn, all_of = (sum(map(len, some.values())) for some in (shown, panels))
    if drawn < all_of:
        left_out.append(f"{drawn:,} of {count(all_of, 'cell')} drawn")
    return Heat(regime, shown, axis, left_out)


def _few(rows: pd.DataFrame) -> pd.DataFrame:
    for column, most in (("size", MAX_SIZES), ("batch", MAX_BATCHES)):
        values = sorted(set(rows[column]))
        rows = rows[rows[column].isin([values[place] for place in evenly_spaced(len(values), most)])]
    return rows


def heat_panels(heat: Heat) -> Panels:
    """Return a panel for each of the heat's: sizes from left to right, batches from the top down."""
    sizes = sorted({size for rows in heat.panels.values() for size in rows["size"]})
    panels = []
    for label, rows in heat.panels.items():
        batches = sorted(set(rows["batch"]), reverse=True)
        fields = [
            Field(
                column=sizes.index(row["size"]),
                line=batches.index(row["batch"]),
                efficiency=float(row["efficiency"]),
                below=number(float(row["rate"]), digits=3),
                state=row["state"],
                words=f"{label}\n{_words_heat(row, heat.rate_unit)}",
            )
            for row in rows.to_dict("records")
        ]
        panels.append(Panel(one_line(label, limit=60), [whole(batch) for batch in batches], fields))
    batch = "Global batch" if heat.regime == "strong" else "Batch per rank"
    return Panels(panels, [f"{size:,}" for size in sizes], heat.axis, batch)


def heat_description(heat: Heat) -> str:
    """Return what the figure shows, for who cannot see it: the best throughput of each panel."""
    texts = []
    for label, rows in heat.panels.items():
        measured = rows[rows["rate"].notna()].sort_values("rate", kind="stable")
        if len(measured):
            best = measured.iloc[-1]
            texts.append(
                f"{label}: the highest throughput, {number(best['rate'])} {heat.rate_unit}, with batch "
                f"{whole(best['batch'])} on {ranks(best)}, at an efficiency "
                f"of {fraction(best['efficiency'])}."
            )
    return f"Efficiency and throughput by {heat.axis.lower()} (columns) and batch (rows). {' '.join(texts)}"


def heat_caption(heat: Heat) -> str:
    """Return how to read the figure."""
    bases = [name for rows in heat.panels.values() for name in rows["baseline"] if name]
    return (
        f"Efficiency above {heat.rate_unit}. Each batch has its own baseline "
        f"({listed(list(dict.fromkeys(bases)), limit=2)}), so that efficiencies compare along a row and "
        "throughputs everywhere."
    )


def _words_heat(row: Mapping[Hashable, Any], rate_unit: str) -> str:
    batch = f"batch {whole(row['global_batch'])}, {whole(row['per_gpu_batch'])} per rank"
    told = f"{as_product(row)}, {batch}"
    if not known(row["rate"]):
        reason = one_line(row["reason"], limit=160)
        return f"{told}: {state_name(row['state'])}" + (f"\n{reason}" if reason else "")
    efficiency = f"\nefficiency {fraction(row['efficiency'])}" if known(row["efficiency"]) else ""
    return f"{told}{efficiency}\n{number(row['rate'])} {rate_unit}"
