"""Scaling along two axes: more ranks within one node, and more nodes with the ranks per node fixed.

A size n x k (n nodes of k ranks) is reached from one rank along two paths, whose losses have
different causes: memory bandwidth and cores within a node, the network over nodes. With E the
efficiency of the scaling table (its baseline has one node),

    E(n x k) = E(1 x k) * [E(n x k) / E(1 x k)],

the efficiency within one node times that over nodes. The second factor does not depend on the
baseline: it is T(1 x k) / (n T(n x k)) for strong scaling, T(1 x k) / T(n x k) for weak.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.data.names import short_labels
from analysis.data.runs import row_state
from analysis.data.sampling import spread
from analysis.text import MISSING, count, fraction, interval, listed, number, one_line

#: The columns of report/axes.csv: one row per series and size, sorted by ranks per node, then nodes.
AXES_COLUMNS = (
    *("cell_id", "series", "baseline", "mode", "nodes", "gpus_per_node", "gpus", "n"),
    *("speedup", "efficiency", "efficiency_low", "efficiency_high"),
    *("efficiency_within_node", "efficiency_over_nodes", "state", "reason"),
)

MAX_SERIES = 4
MAX_NODES = 8
MAX_PER_NODE = 8


def two_axes(rows: pd.DataFrame) -> pd.DataFrame:
    """Return :data:`AXES_COLUMNS` of the series that have several node counts and several ranks per node.

    Sizes with unequal nodes have no place on the axes, series without a baseline none in the
    table. Of several cells of one size the first that was measured is taken.

    Args:
        rows: from :func:`analysis.stats.scaling.scale`.
    """
    frame = rows[rows["gpus_per_node"].str.isdecimal() & (rows["baseline"] != "")].copy()
    frame["per_node"] = frame["gpus_per_node"].astype("int64")
    frame["unmeasured"] = frame["n"] == 0
    size = ["series_place", "per_node", "nodes"]
    frame = frame.sort_values([*size, "unmeasured"], kind="stable").drop_duplicates(size)
    by = frame.groupby("series_place")
    grown = (by["nodes"].transform("nunique") > 1) & (by["per_node"].transform("nunique") > 1)
    frame = frame[grown.astype(bool)].reset_index(drop=True)
    one_node = frame[frame["nodes"] == 1].set_index(["series_place", "per_node"])["efficiency"]
    places = pd.MultiIndex.from_frame(frame[["series_place", "per_node"]])
    within = one_node.reindex(places).to_numpy(dtype=float)
    base_nodes = frame["base_place"].map(rows["nodes"]).to_numpy(dtype=float)
    frame["efficiency_within_node"] = np.where(base_nodes == 1, within, np.nan)
    frame["efficiency_over_nodes"] = frame["efficiency"].to_numpy(dtype=float) / within
    return frame[[*AXES_COLUMNS, "per_node"]]


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
        rows: from :func:`two_axes`.
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
        thinned = thinned[thinned[column].isin([values[place] for place in spread(len(values), most)])]
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
        one_line(row["reason"], limit=160) or ("" if row["n"] else row_state(row["state"])),
    ]
