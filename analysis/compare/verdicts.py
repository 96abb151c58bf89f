"""Whether B is faster than A: ratios of throughputs with intervals, and verdicts on many at once.

A ratio is the geometric mean of B's runs over that of A's. Its interval is Student's t on
logarithms: of the pairs' ratios where runs were interleaved in one allocation, else Welch's
(B. L. Welch, Biometrika 34, 1947). Assumes runs that are independent but for their pairing,
and multiplicative noise.

Many cells give many chances of a false alarm. In each direction the one-sided p-values are
adjusted by Benjamini and Hochberg (J. R. Stat. Soc. B 57, 1995), each direction with half of
what is allowed: where no cell is slower, some cell is called slower in at most 2.5 % of
comparisons, however many cells there are; the same holds for faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import pandas as pd
from scipy import special

from analysis.stats.estimate import LEVEL, MIN_RUNS, Floats, LogMoments, welch

#: A change of throughput below this is not worth a verdict.
MINIMUM_EFFECT = 0.02


class Verdict(StrEnum):
    """What can be said of B against A."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    UNKNOWN = "cannot tell"


@dataclass(frozen=True)
class Contrast:
    """Differences of mean logarithms, B − A: one per cell, with standard error and degrees of freedom."""

    centre: Floats
    error: Floats
    freedom: Floats


def unpaired(a: LogMoments, b: LogMoments) -> Contrast:
    """Return the contrasts of runs that are no pairs; NaN errors below 3 runs on either side."""
    centre, error, freedom = welch(b, a)
    enough = (a.n >= MIN_RUNS) & (b.n >= MIN_RUNS)
    return Contrast(centre, np.where(enough, error, np.nan), np.where(enough, freedom, np.nan))


def paired(differences: LogMoments) -> Contrast:
    """Return the contrasts of pairs, from the moments of their ratios; NaN errors below 3 pairs."""
    enough = differences.n >= MIN_RUNS
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.sqrt(differences.variance / differences.n)
    return Contrast(
        differences.mean,
        np.where(enough, error, np.nan),
        np.where(enough, differences.n - 1, np.nan),
    )


def joined(parts: Sequence[Contrast]) -> Contrast:
    """Return contrasts one after another: one family, to be judged at once."""
    return Contrast(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in ("centre", "error", "freedom"))
    )


def judge(
    contrast: Contrast, *, minimum_effect: float = MINIMUM_EFFECT, level: float = LEVEL
) -> pd.DataFrame:
    """Return one row per contrast: ``ratio, low, high, p_slower, p_faster, verdict``.

    ``low`` and ``high`` are each ratio's own interval; ``p_slower`` and ``p_faster`` are
    one-sided and adjusted over all rows. With δ = log(1 + minimum effect):

    - faster, slower: the adjusted p-value is at most (1 − level) / 2 and the point lies beyond δ.
      Of one row alone this says that the interval is clear of 1.
    - same: the whole interval lies within ±δ.
    - cannot tell: anything else, and always below 3 runs.
    """
    centre = contrast.centre
    low, high = bounds(contrast, level=level)
    above = _tail(contrast)
    slower, faster = (benjamini_hochberg(p) for p in (1 - above, above))
    delta, allowed = math.log1p(minimum_effect), (1 - level) / 2 + 1e-12
    with np.errstate(invalid="ignore"):
        conditions = [
            (faster <= allowed) & (centre >= delta),
            (slower <= allowed) & (centre <= -delta),
            (low >= -delta) & (high <= delta),
        ]
    verdicts = np.select(conditions, [Verdict.FASTER, Verdict.SLOWER, Verdict.SAME], Verdict.UNKNOWN)
    return pd.DataFrame(
        {
            "ratio": np.exp(centre),
            "low": np.exp(low),
            "high": np.exp(high),
            "p_slower": slower,
            "p_faster": faster,
            "verdict": [str(verdict) for verdict in verdicts],
        }
    )


def bounds(contrast: Contrast, *, level: float = LEVEL) -> tuple[Floats, Floats]:
    """Return the interval of each difference of logarithms."""
    certain = contrast.error == 0
    freedom = np.where(contrast.freedom > 0, contrast.freedom, np.nan)
    half = special.stdtrit(freedom, 0.5 + level / 2) * contrast.error
    half = np.where(certain, 0.0, half)
    return contrast.centre - half, contrast.centre + half


def _tail(contrast: Contrast) -> Floats:
    """Return the one-sided p-values of "not faster": the chance of a larger t without a change."""
    with np.errstate(divide="ignore", invalid="ignore"):
        t = contrast.centre / contrast.error
    p = special.stdtr(contrast.freedom, -t)
    certain = np.where(contrast.centre > 0, 0.0, np.where(contrast.centre < 0, 1.0, 0.5))
    return np.asarray(np.where(contrast.error == 0, certain, p), dtype=float)


def benjamini_hochberg(p: Floats) -> Floats:
    """Return adjusted p-values; a NaN stays one, and does not count among the tests."""
    known = np.flatnonzero(~np.isnan(p))
    order = known[np.argsort(p[known], kind="stable")]
    ranked = p[order] * len(order) / np.arange(1, len(order) + 1)
    adjusted = np.full(len(p), np.nan)
    adjusted[order] = np.minimum(np.minimum.accumulate(ranked[::-1])[::-1], 1.0)
    return adjusted


def runs_needed(contrast: Contrast, *, minimum_effect: float = MINIMUM_EFFECT, n: Floats) -> Floats:
    """Return about how many runs a side would make the interval as narrow as the minimum effect.

    Takes the noise as it was seen; more than ``n``, and NaN where there is no interval.

    Args:
        contrast: what was seen.
        minimum_effect: half the interval's width that is wanted.
        n: runs a side behind each contrast.
    """
    low, high = bounds(contrast)
    with np.errstate(invalid="ignore"):
        times = ((high - low) / 2 / math.log1p(minimum_effect)) ** 2
        return np.asarray(np.maximum(np.ceil(n * times), n + 1), dtype=float)
