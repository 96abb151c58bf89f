"""The usual rank, by the lower median: what tells a late rank from computation that is slower everywhere.

POP's load balance is mean U / max U, and CompS compares the sums of U. A late rank raises the mean,
too: of two ranks of which one takes twice as long, CompS would take most of the loss, although one
rank alone is to blame. In LB · CompS the mean cancels, so that any other centre leaves the product,
and with it the efficiency, exactly as it is. For the shares of the loss the centre is the lower
median over the ranks, which up to half of them can exceed without moving it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis.data.load import Study
from analysis.stats.measured import Frames

#: The lower median of the ranks' useful time, and of their data loading, over the mean useful time.
USUAL_COLUMNS = ("usual_share", "usual_data_share")
#: Cells in better balance need no second look.
_BALANCED = 0.98
_MOST_CELLS, _RUNS_EACH = 120, 3

_LOWER_MEDIAN: dict[str, Any] = {"q": 0.5, "interpolation": "lower"}


def usual_value(frame: pd.DataFrame, column: str, *, among: Sequence[str]) -> pd.Series:
    """Return for each row the lower median of a column over the rows that agree in ``among``."""
    keys = list(among)
    # One quantile of all groups: a function called group by group takes seconds in a large study.
    medians = frame.groupby(keys, sort=False)[column].quantile(**_LOWER_MEDIAN).rename("usual")
    return frame[keys].join(medians, on=keys)["usual"]


def with_usual(study: Study, frames: Frames, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with :data:`USUAL_COLUMNS`; NaN where the cell is balanced, or not looked at.

    Args:
        study: whose ranks.csv are read, of a few runs per cell; of very many cells those of the
            series with the most sizes.
        frames: of :func:`analysis.stats.measured.measure`.
        rows: from :func:`analysis.stats.scaling.scale`.
    """
    shares = _shares(study, frames, _unbalanced(rows))
    return rows.assign(**{name: rows["cell_id"].map(shares[name]).astype(float) for name in USUAL_COLUMNS})


def _unbalanced(rows: pd.DataFrame) -> list[str]:
    wide = rows[(rows["n"] > 0) & (rows["gpus"] > 1) & (rows["load_balance"] < _BALANCED)]
    sizes = rows.groupby("series")["gpus"].nunique()
    order = wide.assign(sizes=wide["series"].map(sizes)).sort_values("sizes", ascending=False, kind="stable")
    return [str(name) for name in order["cell_id"].drop_duplicates().head(_MOST_CELLS)]


def _shares(study: Study, frames: Frames, cells: list[str]) -> pd.DataFrame:
    runs = frames.runs[frames.runs["measured"] & frames.runs["cell_id"].isin(cells)]
    some = runs.groupby("cell_id", sort=False)["run_id"].head(_RUNS_EACH)
    ranks = study.ranks_of(some) if len(some) else pd.DataFrame()
    if not len(ranks):
        return pd.DataFrame(columns=list(USUAL_COLUMNS), dtype=float)
    frame = ranks[["run_id", "cell_id", "epoch"]].astype({"run_id": "str", "cell_id": "str"})
    frame["useful"] = ranks["step_time_sec"] - ranks["comm_exposed_time_sec"]
    frame["data"] = ranks["data_load_time_sec"]
    frame = frame[(frame["useful"] > 0) & np.isfinite(frame["useful"]) & frame["data"].notna()]
    window = frame.groupby(["cell_id", "run_id", "epoch"])
    mean = window["useful"].mean()
    usual = window[["useful", "data"]].quantile(**_LOWER_MEDIAN).div(mean, axis=0)
    means: pd.DataFrame = usual.groupby("cell_id").mean()
    means.columns = pd.Index(USUAL_COLUMNS)
    return means
