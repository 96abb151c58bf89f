"""Efficiency and speedup by nodes and ranks per node: a field per size, one panel per series."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from analysis.listing import row_state
from analysis.palette import BLUE, GREY, INK, MUTED
from analysis.two_axes import Grid
from analysis.wording import count, fraction, number, one_line

#: Ink stays readable on the strongest field, on light and on dark paper.
_STRONGEST, _WEAKEST = 0.5, 0.04
_HEADING = 0.62


def draw_grid(axes: Axes, grid: Grid) -> dict[str, list[str]]:
    """Draw the panels one below the other and return the words for the fields by gid."""
    nodes = sorted(set(grid.rows["nodes"]))
    tips: dict[str, list[str]] = {}
    ticks: list[float] = []
    names: list[str] = []
    top = 0.0
    for panel, (series, label) in enumerate(grid.labels.items()):
        own = grid.rows[grid.rows["series"] == series]
        if len(grid.labels) > 1:
            style: dict[str, Any] = {"fontsize": "small", "fontweight": "bold", "color": INK}
            axes.text(-0.5, top - 0.16, label, va="center", ha="left", **style)
            top += _HEADING
        per_node = sorted(set(own["per_node"]))
        for row in own.to_dict("records"):
            gid = f"field-{panel}-{row['nodes']}-{row['per_node']}"
            place = (nodes.index(row["nodes"]), top + per_node.index(row["per_node"]))
            below = f"{number(float(row['speedup']), digits=3)}×"
            draw_field(
                axes, place, efficiency=float(row["efficiency"]), below=below, state=row["state"], gid=gid
            )
            tips[gid] = [f"{label}\n{_words(row)}"]
        ticks += [top + place for place in range(len(per_node))]
        names += [str(number) for number in per_node]
        top += len(per_node)
    axes.set_yticks(ticks, names)
    axes.set_xticks(range(len(nodes)), [f"{number:,}" for number in nodes])
    axes.set(xlabel="Nodes", ylabel="Ranks per node", xlim=(-0.5, len(nodes) - 0.5), ylim=(top - 0.5, -0.5))
    axes.tick_params(length=0)
    axes.spines["bottom"].set_visible(False)
    return tips


def height_in(grid: Grid) -> float:
    """Return how high the panels are, with the axis below them."""
    rows = grid.rows.groupby("series")["per_node"].nunique().sum()
    headings = _HEADING * len(grid.labels) if len(grid.labels) > 1 else 0
    return 0.42 * (float(rows) + headings) + 0.62


def draw_field(
    axes: Axes, place: tuple[float, float], *, efficiency: float, below: str, state: object, gid: str
) -> None:
    """Draw one size: its efficiency as number and strength, a text below, or the state of what has none."""
    x, y = place
    known = math.isfinite(efficiency)
    strength = _WEAKEST + (_STRONGEST - _WEAKEST) * min(max(efficiency, 0.0), 1.0) if known else 0.0
    field = Rectangle((x - 0.47, y - 0.46), 0.94, 0.92, linewidth=0.8)
    field.set_facecolor((BLUE, strength) if known else "none")
    field.set_edgecolor(BLUE if known else GREY)
    field.set_linestyle("-" if known else (0, (2, 2)))
    field.set_gid(gid)
    axes.add_patch(field)
    if not known:
        axes.text(x, y, row_state(state), va="center", ha="center", fontsize=7, color=MUTED)
        return
    centred: dict[str, Any] = {"va": "center", "ha": "center", "color": INK}
    axes.text(x, y - 0.17, fraction(efficiency, decimals=2), fontsize=9.5, **centred)
    axes.text(x, y + 0.23, below, fontsize=7.5, **centred)


def _words(row: dict[Hashable, Any]) -> str:
    ranks = count(int(row["gpus"]), "rank")
    size = f"{count(int(row['nodes']), 'node')} × {count(int(row['per_node']), 'rank')} = {ranks}"
    if not math.isfinite(float(row["efficiency"])):
        reason = one_line(row["reason"], limit=160)
        return f"{size}: {row_state(row['state'])}" + (f"\n{reason}" if reason else "")
    words = f"{size}\nefficiency {fraction(row['efficiency'])}, speedup {number(row['speedup'], digits=3)}×"
    if row["nodes"] > 1 and math.isfinite(float(row["efficiency_over_nodes"])):
        words += f"\nover nodes {fraction(row['efficiency_over_nodes'])}"
    if math.isfinite(float(row["efficiency_within_node"])):
        words += f"\nwithin one node {fraction(row['efficiency_within_node'])}"
    return words


def grid_description(grid: Grid) -> str:
    """Return what the figure shows, for who cannot see it: the far ends of both axes."""
    texts = []
    for series, label in grid.labels.items():
        own = grid.rows[(grid.rows["series"] == series) & grid.rows["efficiency"].notna()]
        ends = own[(own["nodes"] == 1)].tail(1), own.sort_values(["per_node", "nodes"]).tail(1)
        told = [
            f"{fraction(row['efficiency'], decimals=2)} at {row['nodes']} × {row['gpus_per_node']}"
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
