"""Find the runs whose metrics.csv contradicts itself, ranks.csv or the plan.

All runs are compared at once; :mod:`bench.study.consistency` then describes the few that differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.data.csv_files import read_csvs, rows_of
from bench.facts import Fact
from bench.study.consistency import ROUNDING, metrics_contradictions
from bench.study.layout import RunFolder
from bench.study.records import MEAN_COLUMNS, EpochRow, RankRow

#: Number of runs whose ranks.csv are in memory at once.
_CHUNK = 500
_RANKS_FILE = RunFolder(Path()).ranks_csv.name
_MEANS = ("steps", *MEAN_COLUMNS)


def find_contradictions(
    epochs: pd.DataFrame, folders: Mapping[str, str], cells: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, list[Fact]]]:
    """Yield the runs with contradictions.

    Args:
        epochs: the rows of metrics.csv of completed runs, with ``run_id``.
        folders: the folder of each of these runs, by run_id.
        cells: the planned cell of each of these runs, by run_id.
    """
    run_ids = list(folders)
    numbers = {run_id: number for number, run_id in enumerate(run_ids)}
    codes = epochs["run_id"].astype(str).map(numbers).astype("float64")
    for begin in range(0, len(run_ids), _CHUNK):
        own = run_ids[begin : begin + _CHUNK]
        paths = [f"{folders[run_id]}/{_RANKS_FILE}" for run_id in own]
        ranks = read_csvs(paths, RankRow).rows.rename(columns={"file": "run"})
        rows = epochs.assign(run=codes - begin)
        rows = rows[rows["run"].between(0, len(own) - 1)].astype({"run": "int64"})
        planned = np.array([_planned_epochs(cells[run_id]) or np.nan for run_id in own], dtype=float)
        for code in _suspects(rows, ranks, planned):
            cell = cells[own[code]]
            found = metrics_contradictions(
                rows_of(rows[rows["run"] == code], EpochRow),
                rows_of(ranks[ranks["run"] == code], RankRow),
                epochs=_planned_epochs(cell),
                global_batch=float(cell["global_batch"]),
            )
            if listed := list(found):
                yield own[code], listed


def _planned_epochs(cell: Mapping[str, Any]) -> int | None:
    """Return the planned number of epochs; None if the command determines it or the plan does not say it."""
    workload = cell["workload"]
    epochs = workload.get("epochs")
    return epochs if isinstance(epochs, int) and not workload.get("command") else None


def _suspects(rows: pd.DataFrame, ranks: pd.DataFrame, planned: npt.NDArray[np.float64]) -> Sequence[int]:
    """Return the runs (numbers in the column ``run``) that may contain a contradiction."""
    counts = rows["run"].value_counts().reindex(range(len(planned)), fill_value=0).to_numpy()
    found = set(np.flatnonzero(np.isfinite(planned) & (counts != planned) & (counts > 0)).tolist())
    rate, seconds = rows["throughput_samples_per_sec"], rows["epoch_time_sec"]
    with np.errstate(all="ignore"):
        product = (rate * seconds).mask(rate.isna() & seconds.notna(), 0.0)
        bad = (rate <= 1e-12) | (rate >= 1e18)
    bad |= _apart(product.to_numpy(), rows["samples"].to_numpy())
    jumps = rows.groupby("run")["epoch"].diff()
    bad |= jumps.notna() & (jumps != 1)
    for name, other in (("steps", "samples"), ("samples", "throughput_samples_per_sec")):
        bad |= rows[name].isna() & rows[other].notna()
    found |= set(rows.loc[bad, "run"].tolist())
    if len(ranks):
        groups = ranks.groupby(["run", "epoch"])
        of_ranks = groups[list(_MEANS)].mean().where(groups[list(_MEANS)].count().eq(groups.size(), axis=0))
        of_ranks["samples"] = groups["samples"].sum(min_count=1)
        of_ranks["epoch_time_sec"] = groups["window_time_sec"].max()
        both = rows.merge(
            of_ranks.reset_index(), on=["run", "epoch"], how="outer", suffixes=("", "_ranks"), indicator=True
        )
        with_ranks = both["run"].isin(ranks["run"].unique())
        bad = (both["_merge"] != "both") & with_ranks & both["run"].isin(rows["run"].unique())
        names = [*_MEANS, "samples", "epoch_time_sec"]
        values, means = both[names].to_numpy(), both[[f"{name}_ranks" for name in names]].to_numpy()
        no_mean, no_value = ~np.isnan(values) & np.isnan(means), np.isnan(values) & ~np.isnan(means)
        bad |= (_apart(values, means) | no_value).any(axis=1) | (no_mean.any(axis=1) & with_ranks)
        found |= set(both.loc[bad, "run"].tolist())
    return sorted(found)


def _apart(a: Any, b: Any) -> npt.NDArray[np.bool_]:
    """Return a mask of the values that differ by more than rounding; unknown values never differ."""
    with np.errstate(all="ignore"):
        infinite = (np.isinf(a) | np.isinf(b)) & (a != b)
        differ = infinite | ~(np.abs(a - b) <= ROUNDING * np.maximum(np.abs(a), np.abs(b)) + 1e-11)
    mask: npt.NDArray[np.bool_] = differ & ~np.isnan(a) & ~np.isnan(b)
    return mask
