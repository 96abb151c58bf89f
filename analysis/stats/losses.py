"""Split the efficiency E(N) of a size into four factors, and compute each factor's share of the loss.

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
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import special

from analysis.data.load import Study
from analysis.data.names import Row
from analysis.stats.decompose import ERRORS, useful_time
from analysis.stats.estimate import LEVEL, lower_median
from analysis.stats.measured import Frames, ranks_sample
from analysis.text import known

#: The factors of the efficiency, each with a description of the loss that it measures.
LOSSES = {
    "load_balance": "uneven work between ranks",
    "comm_efficiency": "communication that computation does not hide",
    "data_scalability": "data loading that takes longer per sample",
    "compute_scalability": "computation that takes longer per sample",
}
#: The factors of the efficiency, each with a short name of the loss that it measures.
SHORT_NAMES = {
    "load_balance": "load imbalance",
    "comm_efficiency": "communication",
    "data_scalability": "data loading",
    "compute_scalability": "slower computation",
}

#: At this efficiency or above, the factors' shares of the loss would only reflect noise.
HARDLY_ANY = 0.97
#: Smallest lower end of the interval of such an efficiency; below, the loss may be larger.
HARDLY_ANY_LOW = 0.9
#: Smaller shares of the loss are not reported.
SMALLEST_SHARE = 0.005
#: Useful time and data loading of the typical rank, both divided by the mean useful time of the ranks.
TYPICAL_RANK_COLUMNS = ("typical_share", "typical_data_share")
#: At this load balance or above, the mean over the ranks is used as the typical rank.
_BALANCED = 0.98


@dataclass(frozen=True)
class Loss:
    """A factor of the efficiency: its name, its value, and its share of the loss (of the logarithm).

    ``certain`` is true if the 95 % interval of the factor over the runs excludes 1.
    """

    factor: str
    value: float
    share: float
    certain: bool = False


def add_typical_rank(study: Study, frames: Frames, rows: pd.DataFrame) -> pd.DataFrame:
    """Add :data:`TYPICAL_RANK_COLUMNS`; NaN for balanced cells and for cells without ranks.csv.

    Args:
        study: the study whose ranks.csv files are read.
        frames: the study's frames.
        rows: the scaling table.
    """
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
    """Return the four factors of a size relative to its baseline by name; empty if one is unknown.

    Args:
        row: a row of the scaling table, with :data:`TYPICAL_RANK_COLUMNS` if known.
        base: the row of the baseline.
    """
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


def losses(row: Row, base: Row) -> list[Loss]:
    """Return the factors, largest share of the loss first; empty if none is below 1 or one is unknown."""
    found = factors(row, base)
    lost = {name: max(0.0, -math.log(value)) for name, value in found.items()}
    total = sum(lost.values())
    if total <= 0:
        return []
    widths = _half_widths(row, base)
    shares = [Loss(name, found[name], lost[name] / total, lost[name] > widths[name]) for name in found]
    return sorted(shares, key=lambda loss: -loss.share)


def _half_widths(row: Row, base: Row) -> dict[str, float]:
    """Return half the width of the interval of each factor's logarithm (Welch's t); NaN if unknown.

    The typical rank and the mean L are taken as constants.
    """
    mean = _logarithmic_mean(_typical_rank(row)[1], _typical_rank(base)[1])
    found = {}
    for factor, column in zip(LOSSES, ERRORS, strict=True):
        scales = [1.0, 1.0]
        if column in ("data_error", "compute_error"):
            scales = [float(one["gpus"]) / float(one["global_batch"]) / mean for one in (row, base)]
        errors = [
            scale * float(one.get(column, math.nan)) for scale, one in zip(scales, (row, base), strict=True)
        ]
        found[factor] = _half_width(errors, [float(one.get("n", math.nan)) for one in (row, base)])
    return found


def _half_width(errors: list[float], runs: list[float]) -> float:
    squares = [error**2 for error in errors]
    if not all(known(value) for value in (*squares, *runs)):
        return math.nan
    if sum(squares) == 0:
        return 0.0
    freedom = sum(squares) ** 2 / sum(s**2 / max(n - 1, 1) for s, n in zip(squares, runs, strict=True))
    return float(special.stdtrit(freedom, 0.5 + LEVEL / 2)) * math.sqrt(sum(squares))


@dataclass(frozen=True)
class Causes:
    """The causes of the loss of a size, as far as intervals support them.

    Attributes:
        losses: the factors that are certainly below 1, largest share first; empty if they are unknown.
        main: the largest loss; None if it is not certain.
        hardly_any: True if there is hardly any loss.
        short: text instead of the main loss: ``hardly any``, ``cannot tell`` or ``not known``.
        unknown: the reason if the causes are unknown.
    """

    losses: list[Loss]
    main: Loss | None = None
    hardly_any: bool = False
    short: str = "not known"
    unknown: str = ""


def causes_of(row: Row, base: Row) -> Causes:
    """Return the causes of the loss of a size. No cause is named without an interval that excludes 1."""
    low, high = float(row["efficiency_low"]), float(row["efficiency_high"])
    if not known(low):
        return Causes([], short="cannot tell", unknown="the efficiency has no interval, which needs 3 runs")
    if row["efficiency"] >= HARDLY_ANY and low >= HARDLY_ANY_LOW:
        return Causes([], hardly_any=True, short="hardly any")
    if high >= 1:
        return Causes([], short="cannot tell", unknown="the interval of the efficiency includes 1")
    found = losses(row, base)
    if not found:
        return Causes([], unknown=_why_unknown(row, base))
    certain = [loss for loss in found if loss.certain and loss.share >= SMALLEST_SHARE]
    if not certain:
        return Causes([], short="cannot tell", unknown="the intervals of all factors include 1")
    main = found[0] if found[0].certain else None
    return Causes(certain, main, short="" if main else "cannot tell")


def _why_unknown(row: Row, base: Row) -> str:
    """Return why :func:`losses` is empty for a size that loses efficiency."""
    if factors(row, base):
        return "the instrumented window shows no loss"
    if all(known(one["load_balance"]) for one in (row, base)):
        return "a part of the step was not measured"
    return "no instrumented window was measured"


def _typical_rank(row: Row) -> tuple[float, float, float]:
    """Return the useful time of the typical rank relative to the mean over ranks, and two absolute times.

    These are the useful time and the data loading time, in seconds per sample times the number of ranks.
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
