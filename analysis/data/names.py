"""Format the names of sizes, series and states for people.

A size is a row with ``nodes, gpus_per_node, gpus``. A table measured elsewhere may not contain the number of
nodes. Then ``gpus_per_node`` is an empty text, and the size is named by its number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from analysis.text import clean, count, one_line, whole
from bench.matrix.cell import command_label, value_text
from bench.study.ledger import RunState

#: A row of a frame with the columns of a size.
Row = pd.Series | Mapping[Any, Any]

_STATE_NAMES = {
    str(RunState.PLANNED): "not started",
    str(RunState.COMPLETED): "completed without a throughput",
    str(RunState.UNKNOWN): "of unknown state",
}


def nodes_known(row: Row) -> bool:
    """Return whether the number of nodes of a size is known."""
    return bool(row["gpus_per_node"] != "")


def ranks(row: Row) -> str:
    """Return the number of ranks as text, such as ``8 ranks``."""
    return count(int(row["gpus"]), "rank")


def layout(row: Row, *, times: str = "×") -> str:
    """Return ``2 × 4`` for two nodes of four ranks; empty if the number of nodes is unknown."""
    return f"{row['nodes']} {times} {row['gpus_per_node']}" if nodes_known(row) else ""


def with_layout(row: Row) -> str:
    """Return the number of ranks and, if the nodes are known, the layout: ``8 ranks (2 × 4)``."""
    return f"{ranks(row)} ({layout(row)})" if nodes_known(row) else ranks(row)


def as_product(row: Row) -> str:
    """Return ``2 nodes × 4 ranks = 8 ranks``; all nodes must have the same number of ranks."""
    if not nodes_known(row):
        return ranks(row)
    per_node = count(int(row["gpus_per_node"]), "rank")
    return f"{count(int(row['nodes']), 'node')} × {per_node} = {ranks(row)}"


def job_size(row: Row) -> str:
    """Return ``2 nodes x 4 (8 ranks)``, the size of a job request."""
    if not nodes_known(row):
        return ranks(row)
    return f"{count(int(row['nodes']), 'node')} x {row['gpus_per_node']} ({ranks(row)})"


def devices(row: Row, kind: str, *, counted: bool) -> str:
    """Return ``2 nodes x 4 GPUs``, or ``8 GPUs`` on one node.

    ``counted`` is True if ``kind`` is a plural such as ``GPUs``, False if it is a model such as ``L40S``.
    """
    nodes = int(row["nodes"])
    amount = row["gpus"] if nodes == 1 else row["gpus_per_node"]
    named = kind.removesuffix("s") if counted and str(amount) == "1" else kind
    return f"{amount} {named}" if nodes == 1 else f"{nodes} nodes x {amount} {named}"


def sizes_of(rows: pd.DataFrame) -> pd.Series:
    """Return each row's size as ``--baseline`` accepts it: ``2x4``, or the ranks if nodes are unknown."""
    compact = rows["nodes"].astype("str") + "x" + rows["gpus_per_node"].astype("str")
    return compact.where(rows["gpus_per_node"] != "", rows["gpus"].astype("str"))


def baseline_names(rows: pd.DataFrame) -> list[str]:
    """Return each row's size in the form of the column ``baseline``: ``2x4 (8 ranks)``."""
    return [
        f"{size} ({count(int(gpus), 'rank')})" if per_node else count(int(gpus), "rank")
        for size, per_node, gpus in zip(sizes_of(rows), rows["gpus_per_node"], rows["gpus"], strict=True)
    ]


def size_paths(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Split each series into the lines of a figure; return the name and rows of each line.

    A line connects the sizes within one node, or the sizes with the same number of ranks per node.
    """
    found = []
    for series, own in rows.groupby("series", sort=False):
        per_node = own["gpus_per_node"]
        if per_node.nunique() == 1 or (own["nodes"] == 1).all():
            found.append((f"{series}", own))
            continue
        found.append((f"{series} within", own[own["nodes"] == 1]))
        found += [(f"{series} {size}", part) for size, part in own.groupby("gpus_per_node", sort=False)]
    return found


def series_parts(plan: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return the name of each series in parts: series -> kind of part -> text.

    The kinds are ``mode``, ``batch``, ``backend``, ``launcher`` and ``swept NAME`` for each swept axis. A
    user's command may use another backend than that of the plan, so its backend is marked.
    """
    of_command = any((cell.get("workload") or {}).get("command") for cell in plan.get("cells") or [])
    parts: dict[str, dict[str, str]] = {}
    for series in plan.get("series") or []:
        batch = series.get("batch")
        size = whole(batch) if isinstance(batch, int) else one_line(batch, limit=20)
        mode, backend = one_line(series.get("mode"), limit=20), one_line(series.get("backend"), limit=30)
        known = {
            "mode": mode,
            "batch": "" if not size else f"{size} per rank" if mode == "weak" else f"batch {size}",
            "backend": f"{backend} in the plan" if backend and of_command else backend,
            "launcher": one_line(series.get("launcher"), limit=30),
        }
        for name, value in (series.get("swept") or {}).items():
            axis = one_line(name, limit=40).removeprefix("env.")
            text = value_text(value)
            if name == "command" and len(text) > 40:  # the label tells commands with equal beginnings apart
                text = command_label({}, series["swept"])
            known[f"swept {axis}"] = f"{axis} {one_line(text, limit=40)}"
        parts[clean(series.get("series"))] = known
    return parts


def widest_series(rows: pd.DataFrame, *, limit: int) -> list[str]:
    """Return the series with the most sizes, in the plan's order. A series of one size is never returned.

    ``rows`` have ``series`` and ``gpus``. In a tie, series that are earlier in the plan are returned.
    """
    sizes = rows.groupby("series", sort=False)["gpus"].nunique()
    chosen = sizes[sizes > 1].sort_values(ascending=False, kind="stable").head(limit)
    return [str(series) for series in sizes.index if series in set(chosen.index)]


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


def state_name(state: object) -> str:
    """Describe the state of a cell or run that has no measured value."""
    return _STATE_NAMES.get(str(state), str(state))


def state_counts(runs: pd.DataFrame) -> str:
    """Count runs by state, the most frequent state first: ``4 failed (3 time-limit), 2 not started``.

    The number of a failure class is left out if all runs of the state have this class, and the class
    ``cancelled`` of cancelled runs is left out.

    Completed runs that are left out of the results count as ``disturbed``.
    """
    texts = []
    states = runs["state"].mask(runs["left_out"], "disturbed") if "left_out" in runs else runs["state"]
    for state, group in sorted(runs.groupby(states, sort=False), key=lambda item: -len(item[1])):
        classes = group["failure_class"].dropna()
        counts = classes[~classes.isin(["", str(state)])].value_counts().head(4).items()
        detail = ", ".join(str(name) if n == len(group) else f"{n} {name}" for name, n in counts)
        texts.append(f"{len(group):,} {state_name(state)}" + (f" ({detail})" if detail else ""))
    return ", ".join(texts)
