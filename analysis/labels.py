"""Which series are shown, and their short names: what tells them apart where they stand together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

from analysis.wording import clean, one_line, whole


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
