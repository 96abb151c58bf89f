"""Step times over the step number, thinned for a figure so that slow steps remain visible."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis.data.load import Study

#: Limits of a figure: runs, and points per run.
MAX_RUNS, MAX_POINTS = 60, 200
#: Columns of :func:`step_series`. ``number`` counts the steps of all windows of a run from 1.
SERIES_COLUMNS = ("run_id", "cell_id", "number", "epoch", "step", "step_time_sec", "slowest_rank")


def choose_runs(runs: pd.DataFrame, *, limit: int = MAX_RUNS) -> list[str]:
    """Return the ids of at most ``limit`` runs: the first repeats of all cells, then the second ones, ...

    Args:
        runs: runs with ``run_id`` and ``cell_id``, in the order in which they are preferred.
        limit: maximum number of runs.
    """
    turn = runs.groupby("cell_id", sort=False, observed=True).cumcount().to_numpy()
    chosen = np.sort(np.argsort(turn, kind="stable")[:limit])
    return [str(run_id) for run_id in runs["run_id"].iloc[chosen]]


def step_series(study: Study, run_ids: Sequence[str], *, points: int = MAX_POINTS) -> pd.DataFrame:
    """Return the step times of some runs (:data:`SERIES_COLUMNS`), at most ``points`` rows per run.

    If a run has more steps, each row is the slowest one of a group of consecutive steps. Steps outside of
    the throughput windows were not timed and do not count.
    """
    steps = study.steps_of(run_ids)
    steps = steps[np.isfinite(steps["step_time_sec"])].astype({"run_id": "str", "cell_id": "str"})
    steps = steps.sort_values(["run_id", "epoch", "step"], kind="stable").reset_index(drop=True)
    runs = steps.groupby("run_id", sort=False)["step"]
    steps["number"] = runs.cumcount() + 1
    per_group = np.ceil(runs.transform("size") / points)
    groups = (steps["number"] - 1) // per_group
    slowest = steps.groupby([steps["run_id"], groups], sort=False)["step_time_sec"].idxmax()
    found: pd.DataFrame = steps.loc[slowest.to_numpy(dtype=int), list(SERIES_COLUMNS)]
    return found.reset_index(drop=True)
