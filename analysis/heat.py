"""Efficiency and throughput over sizes and batches: which batch carries how many nodes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from analysis.fields import Field, Panel, Panels
from analysis.listing import row_state
from analysis.sizes import as_product, ranks
from analysis.thinning import spread
from analysis.wording import count, fraction, known, listed, number, one_line, whole

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
        table: from :func:`analysis.scaling.scale`.
        parts: from :func:`analysis.labels.series_parts`.
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
        rows = rows[rows[column].isin([values[place] for place in spread(len(values), most)])]
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
                words=f"{label}\n{_words(row, heat.rate_unit)}",
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


def _words(row: Mapping[Hashable, Any], rate_unit: str) -> str:
    batch = f"batch {whole(row['global_batch'])}, {whole(row['per_gpu_batch'])} per rank"
    told = f"{as_product(row)}, {batch}"
    if not known(row["rate"]):
        reason = one_line(row["reason"], limit=160)
        return f"{told}: {row_state(row['state'])}" + (f"\n{reason}" if reason else "")
    efficiency = f"\nefficiency {fraction(row['efficiency'])}" if known(row["efficiency"]) else ""
    return f"{told}{efficiency}\n{number(row['rate'])} {rate_unit}"
