"""Compute the factors of the efficiency (load balance, communication, computation) by run and by cell.

The factors are those of the POP Centre of Excellence's multiplicative model
(https://pop-coe.eu/node/69), as TALP computes them at run time (bsc-pm/dlb). All time of a step that is not
useful is DDP's exposed communication::

    U_r  useful time of rank r per step: its step minus its exposed communication
    T    time of a step: the time of the slowest rank
    load balance             LB    = mean U / max U
    communication efficiency CommE = max U / T
    parallel efficiency      PE    = LB · CommE = mean U / T
    computational scalability CompS = (ΣU / work)_ref / (ΣU / work)_N, work in samples
    global efficiency        GE    = PE · CompS

The efficiency of the series is then exactly E(N) = GE(N) / PE(N₀). Sums are divided by sums (epochs
weighted by their steps, runs equally): with means of ratios, the equations for GE and E would not hold. All
parts are assumed to be measured in the same window, the (instrumented) attribution window.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from analysis.data.columns import PARTS, RunRow, ScalingRow

#: Parts of a step that are useful work, with their columns in metrics.csv and ranks.csv.
USEFUL_PARTS = {
    "data": "data_load_time_sec",
    "forward": "forward_time_sec",
    "backward": "backward_time_sec",
    "optimizer": "optimizer_time_sec",
    "other": "other_time_sec",
}
#: Seconds per step: mean useful time of the ranks, longest useful time of a rank, and the whole step.
TIMES = ("useful_s", "most_useful_s", "step_s")


def run_parts(epochs: pd.DataFrame) -> pd.DataFrame:
    """Return the mean parts of a step for each run with an (instrumented) attribution window.

    If a part was not measured in some epoch, the useful time is unknown. ``useful_s`` is then set to 1 and
    ``parts_known`` to False: the factors remain valid, because they are ratios, but the computational
    scalability is unknown. ``epochs`` are rows of metrics.csv with ``run_id``.

    Returns:
        A frame indexed by run_id with :data:`PARTS`, ``exposed``, :data:`TIMES` and ``parts_known``: means
        over the epochs, weighted by their steps.
    """
    frame = pd.DataFrame({name: epochs[column].astype(float) for name, column in USEFUL_PARTS.items()})
    frame["wait"] = epochs["comm_wait_time_sec"].astype(float)
    frame["exposed"] = epochs["comm_exposed_time_sec"].astype(float)
    frame["transfer"] = frame["exposed"] - frame["wait"]
    summed = frame[list(USEFUL_PARTS)].sum(axis=1, skipna=False)
    steps = epochs["steps"].astype(float)
    frame["weight"] = steps.where((steps > 0) & np.isfinite(steps))
    ids = epochs["run_id"]
    frame["parts_known"] = ((summed > 0) & np.isfinite(summed)).groupby(ids, observed=True).transform("all")
    frame["useful_s"] = summed.where(frame["parts_known"], 1.0)
    balance, comm = (_valid_factor(epochs[name]) for name in ("load_balance", "comm_efficiency"))
    frame["most_useful_s"] = frame["useful_s"] / balance
    frame["step_s"] = frame["most_useful_s"] / comm
    whole = frame["step_s"].notna() & frame["weight"].notna()
    return _weighted_means(frame[whole], ids[whole])


def _valid_factor(values: pd.Series) -> pd.Series:
    """Replace by NaN each factor that is not positive or exceeds 1 by more than a rounding error."""
    values = values.astype(float)
    return values.where((values > 0) & (values < 1 + 1e-6))


def _weighted_means(frame: pd.DataFrame, ids: pd.Series) -> pd.DataFrame:
    columns = [*PARTS, "exposed", *TIMES]
    weighted = frame[columns].mul(frame["weight"], axis=0)
    sums = weighted.groupby(ids, observed=True, sort=False).sum(min_count=1)
    groups = frame.groupby(ids, observed=True, sort=False)
    means = sums.div(groups["weight"].sum(), axis=0)
    # An epoch without a part would make the part's mean too small, so the mean is unknown.
    means = means.where(groups[columns].count().eq(groups.size(), axis=0))
    means["parts_known"] = groups["parts_known"].all()
    means.index = means.index.astype("str")
    return means


def mean(values: Iterable[float]) -> float:
    """Return the mean of the values that are known; NaN without any."""
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else math.nan


def cell_parts(runs: Sequence[RunRow]) -> dict[str, float]:
    """Return the mean parts and times of one cell over its measured runs, and the POP factors.

    Runs without an attribution window are ignored. The result is empty without a run that has one.
    """
    known = [run for run in runs if run.step_s == run.step_s]
    # Runs with known parts (useful time in s) and runs without (useful time 1) have no common mean.
    in_seconds = [run for run in known if run.parts_known]
    used = in_seconds or known
    cell = {name: mean(getattr(run, name) for run in used) for name in (*PARTS, "exposed")}
    useful_s, most_useful_s, step_s = (mean(getattr(run, name) for run in used) for name in TIMES)
    return cell | {
        "load_balance": useful_s / most_useful_s,
        "comm_efficiency": most_useful_s / step_s,
        "pop_parallel_efficiency": useful_s / step_s,
        "useful_s": useful_s if in_seconds else math.nan,
    }


def computational_scalability(row: ScalingRow, base: ScalingRow) -> float:
    """Return the computational scalability of a size, (ΣU / work)_base / (ΣU / work)_N.

    ΣU is the useful time of all ranks, and the work of a step is the global batch. A value below 1 means: all
    ranks together compute longer per sample than those of the baseline (smaller batches per rank, shared
    cores, lower clocks).
    """
    at_base, at_size = (one.useful_s * one.gpus / one.global_batch for one in (base, row))
    return at_base / at_size
