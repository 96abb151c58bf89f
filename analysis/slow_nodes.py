"""Nodes whose ranks take longer for their own work than those of other nodes, run after run."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from scipy import special

from analysis.decompose import USEFUL_PARTS
from analysis.estimate import MIN_RUNS
from analysis.load import Study
from analysis.measured import Frames
from analysis.wording import count, one_line, percent

#: How much longer a slow node's ranks take, at least.
SLOW_NODE = 1.03
#: Of how many runs ranks.csv is read in search of a slow node.
MAX_RUNS_READ = 300
#: What one does about such a node.
WHAT_TO_DO = "leave it out (--exclude) or have it looked at"


def ranks_over_nodes(study: Study, frames: Frames) -> pd.DataFrame:
    """Return the rows of ranks.csv of runs over several nodes, of a very large study of the first ones."""
    wide = set(frames.cells.loc[frames.cells["nodes"] > 1, "cell_id"])
    runs = frames.runs[frames.runs["measured"] & frames.runs["cell_id"].isin(wide)]
    return study.ranks_of(runs["run_id"].head(MAX_RUNS_READ))


def slow_nodes(ranks: pd.DataFrame) -> pd.DataFrame:
    """Return the nodes that are slower than the others of their runs, in several runs: the slowest first.

    A node's time in a run is the median over its ranks and epochs of their own work; its excess
    is that over the median of the run's other nodes, minus 1. It is slow if the interval of the mean
    log ratio over runs (t, at a level that allows for the number of nodes) lies above 0 and the
    excess is above 3 %; with two runs, if it is so in both.

    Args:
        ranks: rows of ranks.csv with ``run_id, host`` and the columns of a rank's own work.

    Returns:
        ``host, runs, excess``.
    """
    ratios = _log_ratios(ranks)
    table = ratios.groupby("host", sort=False)["ratio"].agg(["size", "mean", "std", "min"])
    table = table[(table["size"] >= 2) & (table["mean"] > math.log(SLOW_NODE))]
    level = 0.5 + (1 - 0.05 / max(ratios["host"].nunique(), 1)) / 2
    half = special.stdtrit(table["size"] - 1, level) * table["std"] / np.sqrt(table["size"])
    few = table["size"] < MIN_RUNS
    slow = table[(few & (table["min"] > math.log(SLOW_NODE))) | (~few & (table["mean"] - half > 0))]
    slow = slow.sort_values("mean", ascending=False)
    return pd.DataFrame(
        {
            "host": slow.index.astype("str"),
            "runs": slow["size"].to_numpy(dtype="int64"),
            "excess": np.expm1(slow["mean"].to_numpy(dtype=float)),
        }
    )


def _log_ratios(ranks: pd.DataFrame) -> pd.DataFrame:
    """Return by run and host (where there are others) the logarithm of its time over that of the others."""
    own = ranks[[name for name in USEFUL_PARTS.values() if name in ranks]].astype(float)
    own_s = own.sum(axis=1, min_count=1)
    timed = ranks.assign(own_s=own_s)[own_s > 0]
    by_host = timed.groupby(["run_id", "host"], observed=True, sort=False)["own_s"].median().reset_index()
    ratios = []
    for _, run in by_host.groupby("run_id", observed=True, sort=False):
        times = run["own_s"].to_numpy()
        for place, host in enumerate(run["host"] if len(run) > 1 else ()):
            others = float(np.median(np.delete(times, place)))
            ratios.append((str(host), math.log(times[place] / others)))
    return pd.DataFrame(ratios, columns=["host", "ratio"])


def by_how_much(slow: pd.DataFrame) -> list[str]:
    """Return ``n3 by 20 % in 4 runs`` for each slow node."""
    return [
        f"{one_line(row['host'], limit=60)} by {percent(row['excess'])} in {count(row['runs'], 'run')}"
        for row in slow.to_dict("records")
    ]
