"""All attempts of a study's runs: their cost, and how many succeeded.

A run that is started again, for example by ``bench submit --retry-failed``, has several attempts. Only the
latest one can count for the measurements.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import special

from analysis.data.load import Study
from analysis.stats.estimate import Floats
from bench.study.ledger import RunState

#: States that count for the success rate; a cancelled or queued attempt does not.
_FINAL_STATES = (str(RunState.COMPLETED), str(RunState.FAILED))


def all_attempts(study: Study, runs: pd.DataFrame) -> pd.DataFrame:
    """Return one row per attempt, the attempts of a run one after another.

    ``runs`` is :attr:`analysis.stats.measured.Frames.runs`, whose rows are the latest attempts. The result
    has its columns, ``latest``, and ``node_hours`` (the nodes times the time from start to end; NaN if
    unknown). Earlier attempts have no measurements.
    """
    both = runs.assign(latest=True)
    if len(study.earlier):
        earlier = study.earlier.assign(measured=False, left_out=False, outlier=False, latest=False)
        places = {run_id: place for place, run_id in enumerate(runs["run_id"])}
        both = pd.concat([earlier.assign(wall_s=wall_seconds(earlier)), both])
        both = both.iloc[both["run_id"].map(places).argsort(kind="stable")].reset_index(drop=True)
    nodes = study.cells.set_index("cell_id")["nodes"].reindex(both["cell_id"]).to_numpy(dtype=float)
    both["node_hours"] = both["wall_s"] * nodes / 3600
    return both


def wall_seconds(runs: pd.DataFrame) -> pd.Series:
    """Return the seconds from the start to the end of each run; NaN if unknown."""
    return (runs["ended_at"] - runs["started_at"]).dt.total_seconds().where(lambda s: s >= 0)


def cell_success(study: Study) -> pd.DataFrame:
    """Return ``completed``, ``attempted`` and ``success_low`` by ``cell_id``.

    The first two count attempts, including earlier attempts of restarted runs. ``success_low`` is the
    lower bound of Wilson's 95 % interval (E. B. Wilson, JASA 22, 1927), which is lower for 3 of 3 than
    for 30 of 30; it is 0 without attempts.
    """
    names = ["cell_id", "state"]
    both = pd.concat([study.earlier[names], study.runs[names]], ignore_index=True)
    final = both[both["state"].isin(_FINAL_STATES)]
    groups = final["state"].eq(str(RunState.COMPLETED)).groupby(final["cell_id"])
    cells = pd.Index(study.cells["cell_id"], name="cell_id")
    frame = pd.DataFrame({"completed": groups.sum(), "attempted": groups.size()}).reindex(cells)
    frame = frame.fillna(0).astype("int64")
    frame["success_low"] = wilson_low(frame["completed"].to_numpy(), frame["attempted"].to_numpy())
    return frame


def wilson_low(completed: Floats, attempted: Floats) -> Floats:
    """Return the lower bounds of Wilson's 95 % intervals of success rates; 0 without attempts."""
    z, n = special.ndtri(0.975), np.maximum(attempted, 1)
    rate, spread = completed / n, z**2 / n
    low = (rate + spread / 2 - z * np.sqrt(rate * (1 - rate) / n + spread / (4 * n))) / (1 + spread)
    return np.where(attempted > 0, low, 0.0)


def reserve(success: float) -> float:
    """Return the expected cost of failed attempts as a fraction of the cost of the attempt that succeeds.

    The number of attempts until the first success has the geometric distribution with the mean 1/p
    (W. Feller, An Introduction to Probability Theory, vol. 1, 1968, VI.8), so the reserve is 1/p - 1 with
    the success rate p. Attempts are assumed to be independent, and each failed attempt to cost as much as
    a whole job.
    """
    return 1 / success - 1
