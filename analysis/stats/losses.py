"""What a series loses on the way from its baseline to a size: four factors that multiply to E(N).

With the factors of :mod:`analysis.stats.decompose`, E(N) = LB/LB₀ · CommE/CommE₀ · CompS. Where ranks differ,
LB and CompS refer to the usual rank instead of the mean one: their product is
the same, and what a late rank has beyond the others is load imbalance alone. Useful time U
holds the loading of data, so that a loader that does not keep up lowers CompS as slower computation
does. To tell the two apart, CompS is split by what each added to the useful time of a sample::

    u = N · U / samples, of which d is data loading and c = u - d the rest
    L(u, u₀) = (u - u₀) / ln(u / u₀), the logarithmic mean; u where both are equal
    data    DataS = exp(-(d - d₀) / L)
    compute CompS' = exp(-(c - c₀) / L),    DataS · CompS' = u₀ / u = CompS, exactly

(The additive split by logarithmic means: B. W. Ang, *The LMDI approach to decomposition analysis*,
Energy Policy 33, 2005.) Factors multiply, so that a share of the loss is one of logarithms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from analysis.data.names import Row
from analysis.stats.typical_rank import USUAL_COLUMNS
from analysis.text import known

#: Factors of the efficiency, with the words for what each takes away.
LOSSES = {
    "load_balance": "uneven work between ranks",
    "comm_efficiency": "communication that computation does not hide",
    "data_scalability": "data loading that takes longer per sample",
    "compute_scalability": "computation that takes longer per sample",
}
#: The same in a word or two.
SHORT = {
    "load_balance": "load imbalance",
    "comm_efficiency": "communication",
    "data_scalability": "data loading",
    "compute_scalability": "slower computation",
}

#: Efficiencies from here on have hardly any loss: shares of it would be shares of noise.
HARDLY_ANY = 0.97
#: Shares of the loss below this are not told of.
WORTH_TELLING = 0.005


@dataclass(frozen=True)
class Loss:
    """A factor, and its share of what all factors below 1 take away (logarithms add)."""

    factor: str
    value: float
    share: float


def factors(row: Row, base: Row) -> dict[str, float]:
    """Return the four factors of a size against its baseline; empty where one is not known.

    Args:
        row: of :func:`analysis.stats.scaling.scale`.
        base: the row of its baseline.
    """
    share, useful, data = _usual(row)
    share_base, useful_base, data_base = _usual(base)
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
    """Return the factors with their shares of the loss, the greatest first.

    Empty where a factor is not known, or where there is nothing to explain.
    """
    found = factors(row, base)
    lost = {name: max(0.0, -math.log(value)) for name, value in found.items()}
    total = sum(lost.values())
    if total <= 0:
        return []
    shares = [Loss(name, found[name], lost[name] / total) for name in found]
    return sorted(shares, key=lambda loss: -loss.share)


def hardly_any_loss(row: Row) -> bool:
    """Return whether a size loses too little to explain, whatever its interval."""
    return bool(row["efficiency"] >= HARDLY_ANY)


def why_not_known(row: Row, base: Row) -> str:
    """Return why :func:`losses` tells nothing of a size that does lose efficiency."""
    if factors(row, base):
        return "the instrumented window that would tell shows no loss"
    if all(known(one["load_balance"]) for one in (row, base)):
        return "a part of the step was not measured"
    return "no attribution window was measured"


def _usual(row: Row) -> tuple[float, float, float]:
    """Return the usual rank's useful time over the mean one's, and what N such ranks spend on a sample.

    That is in seconds, all of their useful time and data loading.
    """
    per_sample = float(row["gpus"]) / float(row["global_batch"])
    useful, data = float(row["useful_s"]), float(row["data"])
    share, data_share = (float(row.get(name, math.nan)) for name in USUAL_COLUMNS)
    if known(share) and known(data_share):
        return share, useful * share * per_sample, useful * data_share * per_sample
    return 1.0, useful * per_sample, data * per_sample


def _logarithmic_mean(a: float, b: float) -> float:
    ratio = a / b
    # Close to 1 the quotient loses its digits; the arithmetic mean agrees to the second order.
    return (a - b) / math.log(ratio) if abs(ratio - 1) > 1e-6 else (a + b) / 2
