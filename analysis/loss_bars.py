"""What each cause takes away from the efficiency: one bar per size, stacked on a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from analysis.bar_rows import draw_rows, parts_legend
from analysis.losses import LOSSES, SHORT, factors
from analysis.palette import LOSS_PARTS, MUTED, SURFACE
from analysis.usual import USUAL_COLUMNS
from analysis.wording import fraction, percent

_TICKS = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 1e-3, 1e-4)
_MOST_TICKS = 7


def loss_rows(rows: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows beyond their baseline whose factors are known, with a column for each factor.

    Args:
        rows: some rows of ``table``.
        table: from :func:`analysis.scaling.scale`.
    """
    beyond = rows[rows["base_place"].notna() & ~rows["is_base"] & rows["efficiency"].notna()]
    needed = [name for name in _NEEDED if name in table]
    bases = table.loc[beyond["base_place"].astype("int64"), needed].to_dict("records")
    found = [factors(row, base) for row, base in zip(beyond[needed].to_dict("records"), bases, strict=True)]
    frame = pd.DataFrame(found, index=beyond.index, columns=list(LOSSES))
    return beyond.drop(columns=[*LOSSES], errors="ignore").join(frame)[frame.notna().all(axis=1)]


_NEEDED = ("load_balance", "comm_efficiency", "useful_s", "data", "gpus", "global_batch", *USUAL_COLUMNS)


def draw_losses(axes: Axes, rows: pd.DataFrame, *, labels: dict[str, str]) -> dict[str, list[str]]:
    """Draw one bar per row from 1 down to its efficiency and return the words for its parts by gid.

    Args:
        axes: where to draw.
        rows: from :func:`loss_rows`, of a few series.
        labels: the series in order, with their names.
    """
    ends = [_ends(row) for row in rows.to_dict("records")]
    longest = max(0.01, *(end for _, end in ends))
    least = min(0.0, *(start for start, _ in ends))
    bar = partial(_draw_bar, axes, beside=0.02 * (longest - least))
    tips = draw_rows(axes, rows, labels=labels, bar=bar)
    # Room for the text behind a bar.
    axes.set_xlim(least * 1.03, longest * 1.16)
    ticks = _few([tick for tick in _TICKS if least <= -math.log(tick) <= 1.1 * longest])
    axes.set_xticks([-math.log(tick) for tick in ticks], [f"{tick:g}" for tick in ticks])
    axes.set_xlabel("Efficiency left (logarithmic)")
    shown = [part for part in LOSS_PARTS if (rows[part[0]].sub(1).abs() > 1e-9).any()]
    parts_legend(axes, [(SHORT[factor], colour, hatch) for factor, colour, hatch in shown])
    return tips


def _few(ticks: Sequence[float]) -> list[float]:
    """Return ticks with room between their numbers, 1 the first."""
    room = -math.log(min(ticks)) / _MOST_TICKS
    kept = [ticks[0]]
    for tick in ticks[1:]:
        if math.log(kept[-1] / tick) >= room:
            kept.append(tick)
    return kept


def _ends(row: dict[Hashable, Any]) -> tuple[float, float]:
    """Return how far a bar reaches to either side of 1, on the logarithmic axis."""
    lost = [-math.log(row[name]) for name in LOSSES]
    return sum(min(0.0, part) for part in lost), sum(max(0.0, part) for part in lost)


def _draw_bar(
    axes: Axes, place: float, row: dict[Hashable, Any], name: str, *, beside: float
) -> dict[str, list[str]]:
    tips = {}
    left = right = 0.0
    total = sum(max(0.0, -math.log(row[factor])) for factor in LOSSES)
    for factor, colour, hatch in LOSS_PARTS:
        value = float(row[factor])
        lost = -math.log(value)
        if abs(lost) < 1e-9:
            continue
        gid = f"loss-{factor}-{place:.2f}"
        style: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": SURFACE, "linewidth": 0.6}
        (bar,) = axes.barh(place, lost, left=right if lost > 0 else left, height=0.72, **style)
        bar.set_gid(gid)
        share = f", {percent(lost / total)} of the loss" if lost > 0 else ", a gain"
        tips[gid] = [f"{name}, {SHORT[factor]}: factor {fraction(value)}{share}"]
        right, left = right + max(lost, 0.0), left + min(lost, 0.0)
    axes.plot([0, 0], [place - 0.5, place + 0.5], color=MUTED, linewidth=0.8)
    text = fraction(row["efficiency"], decimals=2)
    axes.text(right + beside, place, text, va="center", ha="left", fontsize="small", color=MUTED)
    return tips
