"""Compute the throughput of runs, and means and ratios of groups of runs with intervals.

The unit is the run (one job): steps and epochs of one job correlate, so intervals over steps would be
two to three times too narrow. All functions handle all groups (cells) at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import special

from analysis.data.columns import READINGS

Floats = npt.NDArray[np.float64]

#: Minimum number of runs for an interval, and the interval's level of confidence.
MIN_RUNS = 3
LEVEL = 0.95

#: A run is an outlier if |x - median| / MAD exceeds this: a modified z-score of 10, as in hyperfine
#: (https://github.com/sharkdp/hyperfine).
OUTLIER_MADS = 14.826
#: Minimum number of runs of a cell for identifying outliers.
OUTLIER_MIN_RUNS = 5


def run_rates(epochs: pd.DataFrame) -> pd.DataFrame:
    """Return the throughput of each run that has a usable epoch: the run's samples divided by their time.

    This is the harmonic mean of the epochs' rates weighted by samples, because each epoch's time is samples /
    rate. Epochs without samples or without a positive finite rate are ignored. However, a run's only epoch is
    an average of the whole run if it has neither steps nor samples, and its rate is that of the run.
    ``epochs`` are rows of metrics.csv with ``run_id``.

    Returns:
        A frame indexed by run_id: ``epochs`` (number used), ``samples``, ``steps`` and ``window_s`` (NaN for
        an average of the run), ``throughput_samples_per_sec``.
    """
    rate = epochs["throughput_samples_per_sec"].to_numpy(dtype=float)
    samples = epochs["samples"].to_numpy(dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        window_s = samples / rate
    alone = ~epochs["run_id"].duplicated(keep=False)
    is_average = (alone & epochs["samples"].isna() & epochs["steps"].isna()).to_numpy()
    usable = np.isfinite(rate) & (rate > 0) & (np.isfinite(samples) & (samples > 0) | is_average)
    columns = {"run_id": epochs["run_id"], "epochs": 1, "samples": samples, "steps": epochs["steps"]}
    average = np.where(is_average, rate, np.nan)
    frame = pd.DataFrame({**columns, "window_s": window_s, "average": average})[usable]
    sums = frame.groupby("run_id", observed=True, sort=False).sum(min_count=1)
    sums.index = sums.index.astype("str")
    throughput = (sums["samples"] / sums["window_s"]).fillna(sums.pop("average"))
    rates: pd.DataFrame = sums.assign(throughput_samples_per_sec=throughput)
    return rates


def run_readings(epochs: pd.DataFrame) -> pd.DataFrame:
    """Return the :data:`~analysis.data.columns.READINGS` of each run, in a frame indexed by run_id.

    Epochs without a value are ignored. ``epochs`` are rows of metrics.csv with ``run_id``.
    """
    frame = pd.DataFrame({name: epochs[column.source].astype(float) for name, column in READINGS.items()})
    steps, ids = epochs["steps"].astype(float), epochs["run_id"]
    kinds = {name: column.over_epochs for name, column in READINGS.items()}
    per_step = [name for name, kind in kinds.items() if kind == "per step"]
    frame[per_step] = frame[per_step].div(steps, axis=0)
    means = [name for name, kind in kinds.items() if kind in ("mean", "per step")]
    sums = frame[means].mul(steps, axis=0).groupby(ids, observed=True, sort=False).sum(min_count=1)
    readings = sums / frame[means].notna().mul(steps, axis=0).groupby(ids, observed=True, sort=False).sum()
    for kind, function in (("last", "last"), ("largest", "max")):
        names = [name for name in kinds if kinds[name] == kind]
        readings[names] = frame[names].groupby(ids, observed=True, sort=False).agg(function)
    readings.index = readings.index.astype("str")
    return readings


@dataclass(frozen=True)
class LogMoments:
    """Moments of groups of values: the number of values, the mean and the variance of their logarithms."""

    n: Floats
    mean: Floats
    variance: Floats

    def take(self, places: npt.NDArray[np.intp]) -> LogMoments:
        """Return the moments of some groups, in the order of ``places``."""
        return LogMoments(self.n[places], self.mean[places], self.variance[places])


def log_moments(groups: Sequence[Sequence[float]]) -> LogMoments:
    """Return the moments of groups of values, all positive and finite; NaN if a group has too few values."""
    size = len(groups)
    counts = np.array([len(values) for values in groups], dtype=np.intp)
    places, n = np.repeat(np.arange(size), counts), counts.astype(float)
    logs = np.log(np.fromiter(chain.from_iterable(groups), dtype=float))
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.bincount(places, weights=logs, minlength=size) / n
        squares = np.bincount(places, weights=(logs - mean[places]) ** 2, minlength=size)
        variance = np.where(n > 1, squares / (n - 1), np.nan)
    return LogMoments(n, mean, variance)


class LogRatios(NamedTuple):
    """Ratios as means of logarithms, with standard errors (NaN below 3 runs) and degrees of freedom."""

    centre: Floats
    error: Floats
    freedom: Floats


def paired(differences: LogMoments) -> LogRatios:
    """Return the means of groups of logarithms, such as those of the ratios of paired runs."""
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.sqrt(differences.variance / differences.n)
    return LogRatios(differences.mean, np.where(differences.n >= MIN_RUNS, error, np.nan), differences.n - 1)


def unpaired(a: LogMoments, b: LogMoments) -> LogRatios:
    """Return the ratios of B to A of independent runs: Welch's t on the logarithms.

    The degrees of freedom are those of Welch and Satterthwaite (B. L. Welch, Biometrika 34, 1947).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        own, other = b.variance / b.n, a.variance / a.n
        freedom = (own + other) ** 2 / (own**2 / (b.n - 1) + other**2 / (a.n - 1))
    enough = (a.n >= MIN_RUNS) & (b.n >= MIN_RUNS)
    return LogRatios(b.mean - a.mean, np.where(enough, np.sqrt(own + other), np.nan), freedom)


def bounds(ratios: LogRatios) -> tuple[Floats, Floats]:
    """Return the lower and upper ends of the 95 % interval of each mean logarithm."""
    freedom = np.where(ratios.freedom > 0, ratios.freedom, np.nan)
    half = special.stdtrit(freedom, 0.5 + LEVEL / 2) * ratios.error
    half = np.where(ratios.error == 0, 0.0, half)
    return ratios.centre - half, ratios.centre + half


def mean_interval(moments: LogMoments) -> tuple[Floats, Floats]:
    """Return the ends of the interval of each group's geometric mean; NaN below 3 runs.

    The interval is Student's t on the logarithms. It assumes that runs of a cell are independent and that
    their noise is multiplicative. Simulated coverage of 95 % intervals: 97/96/95/95 % at n = 3/5/6/10
    (bootstrap intervals: 81 to 92 %).
    """
    low, high = bounds(paired(moments))
    return np.exp(low), np.exp(high)


def ratio_interval(top: LogMoments, bottom: LogMoments) -> tuple[Floats, Floats]:
    """Return the ends of the interval of top / bottom for :func:`unpaired` runs; NaN below 3 runs."""
    low, high = bounds(unpaired(bottom, top))
    return np.exp(low), np.exp(high)


#: Probability that as many runs as :func:`runs_to_decide` returns are enough.
DECISION_POWER = 0.8
#: :func:`runs_to_decide` returns infinity beyond this number of runs.
MOST_RUNS = 100


def runs_to_decide(distance: float, *, error: float, top_n: float, bottom_n: float) -> float:
    """Return the runs per cell after which the interval of a ratio probably excludes a threshold.

    For n runs of both cells, Welch's interval has the half-width t(0.975) · s · √(2/n) with 2n - 2 degrees of
    freedom, where s is the standard deviation of a run's logarithm. The smallest n is returned for which
    s · √(2/n) · (t(0.975) + t(0.8)) is at most ``distance``: the interval then excludes the threshold with a
    probability of about 80 %, if ratio and noise are as measured. (Sample size of a two-sample t test, with t
    instead of normal quantiles: J. Cohen, *Statistical Power Analysis for the Behavioral Sciences*, 1988.)

    Args:
        distance: difference between the logarithms of the ratio and of the threshold.
        error: standard error of the logarithm of the measured ratio, which is half the width of the
            logarithm's interval divided by the quantile of t.
        top_n: number of measured runs of the cell.
        bottom_n: number of measured runs of the cell's baseline.
    """
    spread = error / np.sqrt(1 / top_n + 1 / bottom_n)
    runs = np.arange(MIN_RUNS, MOST_RUNS + 1)
    quantiles = special.stdtrit(2 * runs - 2, 0.5 + LEVEL / 2) + special.stdtrit(2 * runs - 2, DECISION_POWER)
    enough = np.flatnonzero(spread * np.sqrt(2 / runs) * quantiles <= abs(distance))
    return float(runs[enough[0]]) if len(enough) else float("inf")


def outliers(values: Sequence[float]) -> list[bool]:
    """Return which values of a cell's runs are far from their median; outliers are never dropped.

    No value is marked among fewer than 5, or if more than half of them are equal.
    """
    if len(values) < OUTLIER_MIN_RUNS:
        return [False] * len(values)
    middle = median(values)
    distances = [abs(value - middle) for value in values]
    spread = median(distances)
    return [spread > 0 and distance > OUTLIER_MADS * spread for distance in distances]
