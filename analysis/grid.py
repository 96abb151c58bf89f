"""Efficiency and speedup by nodes and ranks per node: a field per size, one panel per series."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from analysis.fields import Field, Panel, Panels
from analysis.listing import row_state
from analysis.sizes import as_product, layout
from analysis.two_axes import Grid
from analysis.wording import fraction, known, number, one_line


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
        return f"{size}: {row_state(row['state'])}" + (f"\n{reason}" if reason else "")
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
