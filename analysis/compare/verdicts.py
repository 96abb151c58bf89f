"""Judge ratios of throughputs: intervals, adjusted p-values and a verdict for each cell.

A ratio is the geometric mean of the runs of B over that of A. If the runs of A and B are interleaved in one
allocation, the interval of the ratio is Student's t on the logarithms of the pairwise ratios. Otherwise it is
Welch's t on the logarithms of the runs (B. L. Welch, Biometrika 34, 1947). Assumptions: pairs, or unpaired
runs, are independent, and noise is multiplicative.

With many cells, false alarms become likely. Therefore the one-sided p-values of each direction are
adjusted as described by Benjamini and Hochberg (J. R. Stat. Soc. B 57, 1995), each direction with half
of the error rate. If no cell is slower, at most 2.5 % of comparisons report a slower cell, for any number
of cells; likewise for faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import special

from analysis.stats.estimate import LEVEL, MIN_RUNS, Floats, LogMoments, welch

#: A smaller relative change of the throughput is not called faster or slower.
MINIMUM_EFFECT = 0.02


class Verdict(StrEnum):
    """Verdict on B relative to A."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    UNKNOWN = "cannot tell"


class LogRatios(NamedTuple):
    """Ratios B / A of all cells as means of log B - log A, with standard errors and degrees of freedom."""

    centre: Floats
    error: Floats
    freedom: Floats


def unpaired(a: LogMoments, b: LogMoments) -> LogRatios:
    """Return the ratios of independent runs; errors are NaN below 3 runs in A or B."""
    centre, error, freedom = welch(b, a)
    enough = (a.n >= MIN_RUNS) & (b.n >= MIN_RUNS)
    return LogRatios(centre, np.where(enough, error, np.nan), np.where(enough, freedom, np.nan))


def paired(differences: LogMoments) -> LogRatios:
    """Return the ratios of paired runs from the moments of the pairs; errors are NaN below 3 pairs."""
    enough = differences.n >= MIN_RUNS
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.sqrt(differences.variance / differences.n)
    freedom = np.where(enough, differences.n - 1, np.nan)
    return LogRatios(differences.mean, np.where(enough, error, np.nan), freedom)


def joined(parts: Sequence[LogRatios]) -> LogRatios:
    """Concatenate ratios, so that :func:`judge` adjusts the p-values over all of them."""
    return LogRatios(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def judge(ratios: LogRatios, *, minimum_effect: float = MINIMUM_EFFECT, level: float = LEVEL) -> pd.DataFrame:
    """Return one row per ratio: ``ratio, low, high, p_slower, p_faster, verdict``.

    ``low`` and ``high`` are the 95 % interval of the single ratio. ``p_slower`` and ``p_faster`` are
    one-sided and adjusted over all rows. With δ = log(1 + minimum effect), the verdicts are:

    - faster, slower: the adjusted p-value is at most 2.5 %, and the logarithm of the ratio is beyond ±δ.
    - same: the interval of the logarithm is within ±δ.
    - cannot tell: all other cases, and always below 3 runs.
    """
    centre = ratios.centre
    low, high = bounds(ratios)
    not_faster = _p_not_faster(ratios)
    slower, faster = (benjamini_hochberg(p) for p in (1 - not_faster, not_faster))
    delta, threshold = math.log1p(minimum_effect), (1 - LEVEL) / 2 + 1e-12
    with np.errstate(invalid="ignore"):
        conditions = [
            (faster <= threshold) & (centre >= delta),
            (slower <= threshold) & (centre <= -delta),
            (low >= -delta) & (high <= delta),
        ]
    verdicts = np.select(conditions, [Verdict.FASTER, Verdict.SLOWER, Verdict.SAME], Verdict.UNKNOWN)
    rows = pd.DataFrame({"ratio": np.exp(centre), "low": np.exp(low), "high": np.exp(high)})
    return rows.assign(p_slower=slower, p_faster=faster, verdict=[str(verdict) for verdict in verdicts])


def bounds(ratios: LogRatios) -> tuple[Floats, Floats]:
    """Return the lower and upper ends of the 95 % interval of each difference of logarithms."""
    freedom = np.where(ratios.freedom > 0, ratios.freedom, np.nan)
    half = special.stdtrit(freedom, 0.5 + LEVEL / 2) * ratios.error
    half = np.where(ratios.error == 0, 0.0, half)
    return ratios.centre - half, ratios.centre + half


def _p_not_faster(ratios: LogRatios) -> Floats:
    """Return one-sided p-values: the probability of a larger t if B is not faster."""
    with np.errstate(divide="ignore", invalid="ignore"):
        t = ratios.centre / ratios.error
    p = special.stdtr(ratios.freedom, -t)
    without_noise = np.where(ratios.centre > 0, 0.0, np.where(ratios.centre < 0, 1.0, 0.5))
    return np.asarray(np.where(ratios.error == 0, without_noise, p), dtype=float)


def benjamini_hochberg(p: Floats) -> Floats:
    """Return adjusted p-values; NaN values remain and do not count as tests."""
    known = np.flatnonzero(~np.isnan(p))
    order = known[np.argsort(p[known], kind="stable")]
    ranked = p[order] * len(order) / np.arange(1, len(order) + 1)
    adjusted = np.full(len(p), np.nan)
    adjusted[order] = np.minimum(np.minimum.accumulate(ranked[::-1])[::-1], 1.0)
    return adjusted


def runs_needed(ratios: LogRatios, *, minimum_effect: float = MINIMUM_EFFECT, n: Floats) -> Floats:
    """Estimate the runs per side for which half of the interval is as wide as the minimum effect.

    The estimate assumes the observed noise. It is at least one more than ``n``, the observed runs per side,
    and NaN for a ratio without an interval.
    """
    low, high = bounds(ratios)
    with np.errstate(invalid="ignore"):
        factor = ((high - low) / 2 / math.log1p(minimum_effect)) ** 2
        return np.asarray(np.maximum(np.ceil(n * factor), n + 1), dtype=float)
