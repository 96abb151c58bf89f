"""Split the efficiency E(N) of a size into four factors.

With the factors of :mod:`analysis.stats.decompose` (₀: at the baseline), E(N) = LB/LB₀ · CommE/CommE₀ ·
CompS. Two refinements change factors, but not their product.

**Typical rank.** A late rank raises the mean of U and thereby lowers CompS: if one of two ranks takes twice
as long, CompS would account for most of the loss. In LB · CompS the mean of U cancels. If ranks differ, LB
and CompS are therefore computed with the lower median of U (the typical rank), which does not change if up to
half of the ranks are late. The excess of a late rank is then load imbalance only.

**Data loading.** CompS is split into the effects of data loading and of all other useful time per sample::

    u = N · U / samples, of which d is data loading and c = u - d the rest
    L(u, u₀) = (u - u₀) / ln(u / u₀), the logarithmic mean; u if both are equal
    data    DataS = exp(-(d - d₀) / L)
    compute CompS' = exp(-(c - c₀) / L),    DataS · CompS' = u₀ / u = CompS, exactly

(Additive split by logarithmic means: B. W. Ang, *The LMDI approach to decomposition analysis*,
Energy Policy 33, 2005.) Factors multiply, so a factor's share of the loss is its -log divided by the sum of
-log over all factors below 1.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from analysis.data.load import Study
from analysis.data.names import Row
from analysis.stats.decompose import useful_time
from analysis.stats.estimate import lower_median
from analysis.stats.measured import Frames, ranks_sample
from analysis.text import known

#: Words for the change of the computation time per sample, relative to the baseline.
LONGER_COMPUTATION = "longer computation per sample"
SHORTER_COMPUTATION = "shorter computation per sample"
#: The factors of the efficiency, each with a short name of the loss that it measures.
SHORT_NAMES = {
    "load_balance": "load imbalance",
    "comm_efficiency": "communication",
    "data_scalability": "data loading",
    "compute_scalability": LONGER_COMPUTATION,
}
LOSSES = tuple(SHORT_NAMES)

#: Smaller shares of the loss are not reported.
SMALLEST_SHARE = 0.005
#: Useful time and data loading of the typical rank, both divided by the mean useful time of the ranks.
TYPICAL_RANK_COLUMNS = ("typical_share", "typical_data_share")
#: At this load balance or above, the mean over the ranks is used as the typical rank.
_BALANCED = 0.98


def add_typical_rank(study: Study, frames: Frames, rows: pd.DataFrame) -> pd.DataFrame:
    """Add :data:`TYPICAL_RANK_COLUMNS`; NaN for balanced cells and for cells without ranks.csv."""
    wide = rows[(rows["n"] > 0) & (rows["gpus"] > 1) & (rows["load_balance"] < _BALANCED)]
    runs = frames.runs[frames.runs["cell_id"].isin(wide["cell_id"])]
    shares = _typical_shares(study.ranks_of(ranks_sample(runs)["run_id"]))
    return rows.assign(
        **{name: rows["cell_id"].map(shares[name]).astype(float) for name in TYPICAL_RANK_COLUMNS}
    )


def _typical_shares(ranks: pd.DataFrame) -> pd.DataFrame:
    """Return :data:`TYPICAL_RANK_COLUMNS` by cell_id: means over the epochs of the cell's runs."""
    frame = ranks[["run_id", "cell_id", "epoch"]].astype({"run_id": "str", "cell_id": "str"})
    frame["useful"] = useful_time(ranks)
    frame["data"] = ranks["data_load_time_sec"]
    frame = frame[(frame["useful"] > 0) & np.isfinite(frame["useful"]) & frame["data"].notna()]
    window = frame.groupby(["cell_id", "run_id", "epoch"])
    typical = lower_median(window[["useful", "data"]]).div(window["useful"].mean(), axis=0)
    means: pd.DataFrame = typical.groupby("cell_id").mean()
    means.columns = pd.Index(TYPICAL_RANK_COLUMNS)
    return means


def factors(row: Row, base: Row) -> dict[str, float]:
    """Return the size's four factors relative to the baseline, by name; empty if a factor is unknown."""
    share, useful, data = _typical_rank(row)
    share_base, useful_base, data_base = _typical_rank(base)
    found = {
        "load_balance": float(row["load_balance"]) * share / (float(base["load_balance"]) * share_base),
        "comm_efficiency": float(row["comm_efficiency"]) / float(base["comm_efficiency"]),
    }
    if not all(known(value) for value in (useful, data, useful_base, data_base)):
        return {}
    if not (useful > 0 and useful_base > 0 and all(known(v) and v > 0 for v in found.values())):
        return {}
    mean = _logarithmic_mean(useful, useful_base)
    found["data_scalability"] = math.exp(-(data - data_base) / mean)
    found["compute_scalability"] = math.exp(-((useful - data) - (useful_base - data_base)) / mean)
    return found


def _typical_rank(row: Row) -> tuple[float, float, float]:
    """Return the typical rank's useful time relative to the ranks' mean, its useful time and loading time.

    The last two values are in seconds per sample, times the number of ranks.
    """
    per_sample = float(row["gpus"]) / float(row["global_batch"])
    useful, data = float(row["useful_s"]), float(row["data"])
    share, data_share = (float(row.get(name, math.nan)) for name in TYPICAL_RANK_COLUMNS)
    if known(share) and known(data_share):
        return share, useful * share * per_sample, useful * data_share * per_sample
    return 1.0, useful * per_sample, data * per_sample


def _logarithmic_mean(a: float, b: float) -> float:
    ratio = a / b
    # If the ratio is close to 1, the quotient loses its digits; the arithmetic mean is then nearly equal.
    return (a - b) / math.log(ratio) if abs(ratio - 1) > 1e-6 else (a + b) / 2
