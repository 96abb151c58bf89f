"""How a size is told: the ranks of a cell, and the nodes and ranks per node that make them up.

Every row here has ``nodes, gpus_per_node, gpus``. A table measured elsewhere may not tell its nodes:
then ``gpus_per_node`` is an empty text, and a size is its ranks alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from analysis.text import clean, count, one_line, whole

#: A row of a frame with sizes.
Row = pd.Series | Mapping[Any, Any]


def nodes_known(row: Row) -> bool:
    """Return whether the nodes of a size were told."""
    return bool(row["gpus_per_node"] != "")


def ranks(row: Row) -> str:
    """Return ``8 ranks``."""
    return count(int(row["gpus"]), "rank")


def layout(row: Row, *, times: str = "×") -> str:
    """Return ``2 × 4`` for two nodes of four ranks; nothing where the nodes are not known."""
    return f"{row['nodes']} {times} {row['gpus_per_node']}" if nodes_known(row) else ""


def with_layout(row: Row) -> str:
    """Return ``8 ranks (2 × 4)``."""
    return f"{ranks(row)} ({layout(row)})" if nodes_known(row) else ranks(row)


def as_product(row: Row) -> str:
    """Return ``2 nodes × 4 ranks = 8 ranks``, of nodes that have as many ranks each."""
    if not nodes_known(row):
        return ranks(row)
    each = count(int(row["gpus_per_node"]), "rank")
    return f"{count(int(row['nodes']), 'node')} × {each} = {ranks(row)}"


def job_size(row: Row) -> str:
    """Return ``2 nodes x 4 (8 ranks)``: what one asks a cluster for."""
    if not nodes_known(row):
        return ranks(row)
    return f"{count(int(row['nodes']), 'node')} x {row['gpus_per_node']} ({ranks(row)})"


def devices(row: Row, what: str, *, counted: bool) -> str:
    """Return ``2 nodes x 4 GPUs``, or ``8 GPUs`` on one node.

    Args:
        row: the size.
        what: the devices, in the plural.
        counted: whether ``what`` has a singular: a model's name has none.
    """
    nodes = int(row["nodes"])
    each = row["gpus"] if nodes == 1 else row["gpus_per_node"]
    named = what.removesuffix("s") if counted and str(each) == "1" else what
    return f"{each} {named}" if nodes == 1 else f"{nodes} nodes x {each} {named}"


def sizes_of(rows: pd.DataFrame) -> pd.Series:
    """Return each row's size as ``--baseline`` takes it: ``2x4``, or the ranks where nodes are not known."""
    compact = rows["nodes"].astype("str") + "x" + rows["gpus_per_node"].astype("str")
    return compact.where(rows["gpus_per_node"] != "", rows["gpus"].astype("str"))


def baseline_names(rows: pd.DataFrame) -> list[str]:
    """Return each row's size as the column ``baseline`` names it: ``2x4 (8 ranks)``."""
    told = zip(sizes_of(rows), rows["gpus_per_node"], rows["gpus"], strict=True)
    return [
        f"{size} ({count(int(gpus), 'rank')})" if per_node else count(int(gpus), "rank")
        for size, per_node, gpus in told
    ]


def paths(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Return by name what one line joins: sizes within one node, or over nodes with one layout."""
    found = []
    for series, own in rows.groupby("series", sort=False):
        per_node = own["gpus_per_node"]
        if per_node.nunique() == 1 or (own["nodes"] == 1).all():
            found.append((f"{series}", own))
            continue
        found.append((f"{series} within", own[own["nodes"] == 1]))
        found += [(f"{series} {size}", own[per_node == size]) for size in per_node.unique()]
    return found


# Which series are shown, and their short names: what tells them apart where they stand together.


def series_parts(plan: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return by series what it consists of, in words: mode, batch, backend, launcher, swept axes."""
    parts: dict[str, dict[str, str]] = {}
    for series in plan.get("series") or []:
        batch = series.get("batch")
        size = whole(batch) if isinstance(batch, int) else one_line(batch, limit=20)
        mode = one_line(series.get("mode"), limit=20)
        known = {
            "mode": mode,
            "batch": "" if not size else f"{size} per rank" if mode == "weak" else f"batch {size}",
            "backend": one_line(series.get("backend"), limit=30),
            "launcher": one_line(series.get("launcher"), limit=30),
        }
        for name, value in (series.get("swept") or {}).items():
            axis = one_line(name, limit=40).removeprefix("env.")
            known[f"swept {axis}"] = f"{axis} {one_line(value, limit=40)}"
        parts[clean(series.get("series"))] = known
    return parts


def widest_series(rows: pd.DataFrame, *, limit: int) -> list[str]:
    """Return the series with the most sizes, of those with two or more, in the plan's order.

    Args:
        rows: ``series, gpus``, in the plan's order.
        limit: how many series; among equals the plan's first.
    """
    sizes = rows.groupby("series", sort=False)["gpus"].nunique()
    chosen = sizes[sizes > 1].sort_values(ascending=False, kind="stable").head(limit)
    return [str(series) for series in sizes.index if series in set(chosen.index)]


def short_labels(parts: dict[str, dict[str, str]], series: Iterable[str]) -> tuple[dict[str, str], str]:
    """Return a label for each series, and what they all share.

    The label holds only what differs among ``series``; of one series alone, its batch. The
    mode shows in how the batch is told.
    """
    shown = list(series)
    names = [n for n in dict.fromkeys(n for one in shown for n in parts.get(one, {})) if n != "mode"]
    values = {name: {parts.get(one, {}).get(name, "") for one in shown} for name in names}
    telling = [name for name in names if len(values[name]) > 1] or ["batch"]
    labels = {}
    for one in shown:
        words = [parts.get(one, {}).get(name, "") for name in telling]
        labels[one] = one_line(", ".join(filter(None, words)) or one, limit=60)
    if len(set(labels.values())) < len(labels):
        labels = {one: one_line(one, limit=60) for one in shown}
    common = [name for name in names if name not in telling]
    shared = [parts[shown[0]].get(name, "") for name in common] if shown and shown[0] in parts else []
    return labels, ", ".join(filter(None, shared))
