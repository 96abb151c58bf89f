"""Detect and describe anomalies of a study; no run is dropped because of an anomaly.

Thresholds are chosen so that noise is rarely reported. If a value has an interval, the whole interval must be
beyond the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import pandas as pd
from scipy import special

from analysis.data.names import ranks, size_paths
from analysis.stats.estimate import LEVEL, MIN_RUNS
from analysis.stats.measured import Frames
from analysis.text import count, fraction, known, listed, one_line, percent

#: Without intervals, minimum excess of an efficiency over 1 or over the efficiency of the previous size.
MARGIN = 0.05
#: A cell is unstable if the standard deviation of its runs' log throughput is above this.
UNSTABLE = 0.05
#: Significance level of a drift, and its minimum relative change over the study.
DRIFT_LEVEL = 0.01
DRIFT_LEAST = 0.01
_PATH_COLUMNS = [
    *("series", "nodes", "gpus_per_node", "gpus"),
    *("efficiency", "efficiency_low", "efficiency_high"),
]


class Anomaly(NamedTuple):
    """An anomaly: a heading of a few words, and one or more sentences."""

    heading: str
    words: str


def anomalies(rows: pd.DataFrame, frames: Frames, *, whole_nodes: bool = False) -> list[Anomaly]:
    """Return the anomalies of a study; those that affect most numbers come first.

    Args:
        rows: the scaling table.
        frames: the study's frames.
        whole_nodes: True if the runs have whole nodes, so that no other job can share them.
    """
    return [
        *_baselines_with_outliers(rows, frames),
        *_drift(frames),
        *_superlinear(rows),
        *_recoveries(rows),
        *_unstable(frames, whole_nodes=whole_nodes),
    ]


def _baselines_with_outliers(rows: pd.DataFrame, frames: Frames) -> Iterator[Anomaly]:
    bases = set(rows["base_cell"].dropna())
    odd = frames.runs[frames.runs["outlier"] & frames.runs["cell_id"].isin(bases)]
    if len(odd):
        cells = [one_line(cell, limit=60) for cell in dict.fromkeys(odd["cell_id"])]
        yield Anomaly(
            "Baseline with an outlier",
            f"{listed(cells)}: {count(len(odd), 'run')} far from the baseline's other runs. "
            "This affects every efficiency relative to this baseline: run the baseline again.",
        )


def _superlinear(rows: pd.DataFrame) -> Iterator[Anomaly]:
    beyond = rows[(rows["gpus"] > rows["base_gpus"]) & rows["ddp"] & (rows["mode"] != "")]
    clear = beyond[beyond["efficiency_low"] > 1]
    apart = beyond[beyond["efficiency_low"].isna() & (beyond["efficiency"] > 1 + MARGIN)]
    found = pd.concat([clear, apart])
    if len(found):
        cells = [f"{fraction(row['efficiency'])} at {ranks(row)}" for row in found.to_dict("records")]
        sure = "the interval excludes 1" if len(apart) == 0 else "no interval: fewer than 3 runs"
        yield Anomaly(
            "Efficiency above 1",
            f"{listed(cells)} ({sure}). Either the baseline is slower than it should be (fewer threads, "
            "another node, a slow first run), or the smaller share of the work fits into a cache.",
        )


def _recoveries(rows: pd.DataFrame) -> Iterator[Anomaly]:
    """Yield the sizes with a lower efficiency than the next smaller and the next larger size."""
    found = []
    measured = rows.loc[rows["efficiency"].notna() & rows["ddp"], _PATH_COLUMNS]
    for _, own in size_paths(measured):
        path = own.to_dict("records")
        for before, low, after in zip(path, path[1:], path[2:], strict=False):
            if low["efficiency"] < before["efficiency"] and _clearly_above(after, low):
                three = (before, low, after)
                values = ", ".join(fraction(row["efficiency"]) for row in three)
                found.append(f"{values} at {', '.join(str(row['gpus']) for row in three)} ranks")
    if found:
        yield Anomaly(
            "Efficiency falls, then rises again",
            f"{listed(list(dict.fromkeys(found)))}. A loss should not disappear at larger sizes: check "
            "the nodes, the order of the runs and the batch per rank of the middle size.",
        )


def _clearly_above(upper: dict[Hashable, Any], lower: dict[Hashable, Any]) -> bool:
    if known(upper["efficiency_low"]) and known(lower["efficiency_high"]):
        return bool(upper["efficiency_low"] > lower["efficiency_high"])
    return bool(upper["efficiency"] > lower["efficiency"] * (1 + MARGIN))


def _unstable(frames: Frames, *, whole_nodes: bool) -> Iterator[Anomaly]:
    runs = frames.runs[frames.runs["measured"]]
    logs = runs["rate"].astype(float).map(math.log).groupby(runs["cell_id"])
    spread = logs.std()[logs.size() >= MIN_RUNS].sort_values(ascending=False)
    wide = spread[spread > UNSTABLE]
    if len(wide):
        cells = [f"{one_line(cell, limit=60)} by {percent(value)}" for cell, value in wide.items()]
        shared, advice = "shared nodes, ", "Use more repeats, or whole nodes (exclusive: true)."
        if whole_nodes:
            shared, advice = "", "Use more repeats."
        yield Anomaly(
            "Runs of a cell differ",
            f"{listed(cells)} (standard deviation between runs). Possible causes: {shared}a shared network "
            f"or file system, changing clock rates. {advice}",
        )


def _drift(frames: Frames) -> Iterator[Anomaly]:
    """Yield a trend of the throughput over time, from a regression with a separate level for each cell."""
    runs = frames.runs[frames.runs["measured"]]
    if "started_at" not in runs or runs["started_at"].isna().any() or not len(runs):
        return
    hours = (runs["started_at"] - runs["started_at"].min()).dt.total_seconds() / 3600
    logs = runs["rate"].astype(float).map(math.log)
    time = hours - hours.groupby(runs["cell_id"]).transform("mean")
    change = logs - logs.groupby(runs["cell_id"]).transform("mean")
    freedom = len(runs) - runs["cell_id"].nunique() - 1
    spread = float((time**2).sum())
    if freedom < MIN_RUNS or spread <= 0:
        return
    slope = float((time * change).sum()) / spread
    error = math.sqrt(float(((change - slope * time) ** 2).sum()) / freedom / spread)
    span = float(hours.max())
    p_value = 2 * float(special.stdtr(freedom, -abs(slope) / error)) if error > 0 else 0.0
    if p_value > DRIFT_LEVEL or abs(slope * span) < DRIFT_LEAST:
        return
    half = float(special.stdtrit(freedom, 0.5 + LEVEL / 2)) * error
    low, high = sorted(abs(math.expm1(bound * span)) for bound in (slope - half, slope + half))
    direction = "falls" if slope < 0 else "rises"
    yield Anomaly(
        "Drift",
        f"The throughput of repeats of the same cell {direction} by "
        f"{percent(abs(math.expm1(slope * span)), decimals=1)} "
        f"[{percent(low, decimals=1)}, {percent(high, decimals=1)}] over the {span:.1f} h of the study "
        f"(p = {p_value:.2g}). Repeats are spread over the study, so a drift mainly widens confidence "
        "intervals and changes efficiencies less. Check temperatures, other users and disk space.",
    )
