"""Format the names of sizes, series and states for people.

A size is a row with ``nodes, gpus_per_node, gpus``. A table measured elsewhere may not contain the number of
nodes. Then ``gpus_per_node`` is an empty text, and the size is named by its number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from analysis.text import clean, one_line
from bench.matrix.cell import safe_text, value_text
from bench.study.plan_json import planned_cells
from ddp_scaling_bench.units import count, whole


class Size(Protocol):
    """A size: the number of its nodes, the ranks of each node, and all ranks."""

    nodes: int
    gpus_per_node: str
    gpus: int


class InSeries(Protocol):
    """A size in a series."""

    series: str
    gpus: int


def nodes_known(row: Size) -> bool:
    """Return whether the number of nodes of a size is known."""
    return bool(row.gpus_per_node != "")


def ranks(row: Size) -> str:
    """Return the number of ranks as text, such as ``8 ranks``."""
    return count(int(row.gpus), "rank")


def layout(row: Size, *, times: str = "×") -> str:
    """Return ``2 × 4`` for two nodes of four ranks; empty if the number of nodes is unknown."""
    return f"{row.nodes} {times} {row.gpus_per_node}" if nodes_known(row) else ""


def with_layout(row: Size) -> str:
    """Return the number of ranks and, if the nodes are known, the layout: ``8 ranks (2 × 4)``."""
    return f"{ranks(row)} ({layout(row)})" if nodes_known(row) else ranks(row)


def job_size(row: Size, device: str = "rank") -> str:
    """Return ``8 ranks on 2 nodes``, the size of a job request; ``device`` is the noun that is counted."""
    amount = count(int(row.gpus), device)
    return f"{amount} on {count(int(row.nodes), 'node')}" if nodes_known(row) else amount


def devices(row: Size, kind: str, *, counted: bool) -> str:
    """Return ``2 nodes x 4 GPUs``, or ``8 GPUs`` on one node.

    ``counted`` is True if ``kind`` is a plural such as ``GPUs``, False if it is a model such as ``L40S``.
    """
    nodes = int(row.nodes)
    amount = row.gpus if nodes == 1 else row.gpus_per_node
    named = kind.removesuffix("s") if counted and str(amount) == "1" else kind
    return f"{amount} {named}" if nodes == 1 else f"{nodes} nodes x {amount} {named}"


def size_name(row: Size) -> str:
    """Return a size as ``--baseline`` accepts it: ``2x4``, or the ranks if nodes are unknown."""
    return layout(row, times="x").replace(" ", "") or str(row.gpus)


def baseline_name(row: Size) -> str:
    """Return a size in the form of the column ``baseline``: ``2x4 (8 ranks)``."""
    return f"{size_name(row)} ({ranks(row)})" if nodes_known(row) else ranks(row)


def series_parts(plan: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return the name of each series in parts: series -> kind of part -> text.

    The kinds are ``mode``, ``batch``, ``backend``, ``launcher`` and ``swept NAME`` for each swept axis. A
    command may use another backend than that of the plan, so its backend is marked.
    """
    is_certain = all(cell.follows_plan for cell in planned_cells(plan))
    parts: dict[str, dict[str, str]] = {}
    for series in plan.get("series") or []:
        batch = series.get("batch")
        size = whole(batch) if isinstance(batch, int) else one_line(batch, limit=20)
        mode, backend = one_line(series.get("mode"), limit=20), one_line(series.get("backend"), limit=30)
        known = {
            "mode": mode,
            "batch": "" if not size else f"{size} per rank" if mode == "weak" else f"batch {size}",
            "backend": backend if is_certain or not backend else f"{backend} in the plan",
            "launcher": one_line(series.get("launcher"), limit=30),
        }
        for name, value in (series.get("swept") or {}).items():
            axis = one_line(name, limit=40).removeprefix("env.")
            text = f"{value:g}" if isinstance(value, float) else value_text(value)
            if name == "command" and len(text) > 40:  # the label tells commands with equal beginnings apart
                text = safe_text(value)
            known[f"swept {axis}"] = f"{axis} {one_line(text, limit=40)}"
        parts[clean(series.get("series"))] = known
    return parts


def widest_series(rows: Iterable[InSeries], *, limit: int) -> list[str]:
    """Return the series with the most sizes, in the plan's order. A series of one size is never returned.

    In a tie, series that are earlier in the plan are returned.
    """
    sizes: dict[str, set[int]] = {}
    for row in rows:
        sizes.setdefault(row.series, set()).add(row.gpus)
    several = [series for series, own in sizes.items() if len(own) > 1]
    chosen = sorted(several, key=lambda series: -len(sizes[series]))[:limit]
    return [series for series in several if series in chosen]


def short_labels(parts: dict[str, dict[str, str]], series: Iterable[str]) -> tuple[dict[str, str], str]:
    """Return a label for each series, and the parts of their names that all series share, as a text.

    The labels differ. A label contains only the parts that differ. A single series is labelled by its batch.
    The mode is left out, because the wording of the batch implies it. ``parts`` is from
    :func:`series_parts`.
    """
    shown = list(series)
    names = [n for n in dict.fromkeys(n for one in shown for n in parts.get(one, {})) if n != "mode"]
    values = {name: {parts.get(one, {}).get(name, "") for one in shown} for name in names}
    differing = [name for name in names if len(values[name]) > 1] or ["batch"]
    labels = {}
    for one in shown:
        texts = [parts.get(one, {}).get(name, "") for name in differing]
        labels[one] = one_line(", ".join(filter(None, texts)) or one, limit=60)
    if len(set(labels.values())) < len(labels):
        labels = {one: one_line(one, limit=56) for one in shown}
    if len(set(labels.values())) < len(labels):
        labels = {one: f"{number}: {label}" for number, (one, label) in enumerate(labels.items(), start=1)}
    common = [name for name in names if name not in differing]
    shared = [parts[shown[0]].get(name, "") for name in common] if shown and shown[0] in parts else []
    return labels, ", ".join(filter(None, shared))
