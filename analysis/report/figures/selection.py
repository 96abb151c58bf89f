"""What a figure shows of a large study, and the words that go with it."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from analysis.data.names import paths, ranks, short_labels
from analysis.report.figures.curves import Curve
from analysis.report.figures.drawing import evenly_spaced
from analysis.stats.scaling import GUIDE
from analysis.text import count, fraction, known, listed, number

MAX_SERIES = 6
MAX_SIZES = 24
MAX_REPEATS = 300
MAX_BARS = 18


@dataclass(frozen=True)
class Selection:
    """The rows of one regime that a figure shows."""

    regime: str
    rows: pd.DataFrame
    labels: dict[str, str]
    shared: str
    left_out: list[str]


def select(
    rows: pd.DataFrame, regime: str, parts: dict[str, dict[str, str]], *, bars: bool = False
) -> Selection:
    """Return the series with the most sizes, thinned to what a figure can hold."""
    sizes = rows.groupby("series", sort=False)["gpus"].nunique().sort_values(ascending=False, kind="stable")
    most = MAX_SERIES
    if bars:
        most = max(1, min(MAX_SERIES, MAX_BARS // max(int(sizes.iloc[0]), 1)))
    chosen = set(sizes.index[:most])
    series = [name for name in dict.fromkeys(rows["series"]) if name in chosen]
    left_out = []
    if len(sizes) > len(series):
        left_out.append(
            f"{len(series)} of {count(len(sizes), 'series', 'series')} drawn, those with the most sizes"
        )
    shown = rows[rows["series"].isin(chosen)]
    limit = min(MAX_SIZES, MAX_BARS) if bars else MAX_SIZES
    thinned = pd.concat([_thin(own, limit) for _, own in shown.groupby("series", sort=False)])
    if len(thinned) < len(shown):
        left_out.append(f"{len(thinned):,} of {count(len(shown), 'cell')} drawn, spread over the sizes")
    labels, shared = short_labels(parts, series)
    return Selection(regime, thinned, labels, shared, left_out)


def _thin(rows: pd.DataFrame, limit: int) -> pd.DataFrame:
    return rows.iloc[evenly_spaced(len(rows), limit)]


def repeats_of(curve: Curve, rows: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return one row per run of the rows: its own value on the curve."""
    wanted = runs["measured"] & runs["cell_id"].isin(rows["cell_id"])
    counted = runs.loc[wanted, ["run_id", "cell_id", "rate"]]
    frame = rows[["cell_id", "series", "gpus", "rate", curve.column]]
    frame = frame.merge(counted, on="cell_id", suffixes=("", "_run"))
    own = frame["rate_run"] / frame["rate"]
    return frame.assign(value=frame[curve.column] * own)


def curve_caption(curve: Curve, selection: Selection, *, with_runs: bool) -> str:
    """Return how to read a curve: its formula and baseline, its intervals, its marks."""
    rows = selection.rows
    bases = listed(list(dict.fromkeys(rows.loc[rows["baseline"] != "", "baseline"])), limit=3)
    texts = []
    if curve.kind != "throughput" and selection.regime:
        formula = {
            ("speedup", "strong"): "S = T(N₀)/T(N)",
            ("speedup", "weak"): "scaled speedup = E·N/N₀",
            ("efficiency", "strong"): "E = S·N₀/N",
            ("efficiency", "weak"): "E = T(N₀)/T(N)",
        }[curve.kind, selection.regime]
        texts.append(f"{formula}; baseline N₀: {bases}.")
    if rows[curve.low].notna().any():
        texts.append("Bars: 95 % intervals (t on the logarithms of the runs).")
    else:
        texts.append("No intervals: they need three runs per cell" + (" and baseline." if bases else "."))
    if len(paths(rows)) > len(selection.labels):
        texts.append("Lines join sizes within one node, and over nodes with the ranks per node fixed.")
    if with_runs:
        texts.append("Small dots: single runs.")
    if curve.kind == "efficiency":
        texts.append(f"Dashed: the guide of {GUIDE}.")
    return " ".join(texts)


def curve_description(curve: Curve, selection: Selection) -> str:
    """Return what a curve shows, for who cannot see it: the ends of each series."""
    texts = []
    for series, label in selection.labels.items():
        rows = selection.rows[selection.rows["series"] == series]
        first, last = rows.iloc[0], rows.iloc[-1]
        value = fraction if curve.kind == "efficiency" else number
        ends = f"{value(first[curve.column])} at {ranks(first)}"
        if known(last[curve.column]) and len(rows) > 1:
            ends += f", {value(last[curve.column])} at {ranks(last)}"
        texts.append(f"{label}: {ends}.")
    return f"{curve.axis} over ranks. {' '.join(texts)}"
