"""Detect changes in a series of studies.

After each study, all splits of the last :data:`WINDOW` studies in two parts of at least two are compared by a
pooled t test of the studies' logarithmic means. Studies count equally, so their spread contains the noise
between runs and that between studies. The largest t is a change if it exceeds the limit for the number of
studies. A change is final when it is first reported, and the series begins anew with it.
``benchmarks/campaign_history.py`` writes the limits, thresholds.csv: with them, :data:`LOOKS` studies raise a
false alarm in few unchanged series.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from math import exp, inf, sqrt
from pathlib import Path
from typing import NamedTuple

#: The fewest studies of a verdict, the studies that count, and the looks for which rates are stated.
LEAST, WINDOW, LOOKS = 6, 60, 60
#: The number of series for which the limits of a folder were computed.
FOLDER = 40
TABLE = Path(__file__).with_name("thresholds.csv")


class Limits(NamedTuple):
    """Limits of t for one series and for each series of a folder; t quantile of a 95 % interval."""

    one: float
    folder: float
    quantile: float


@cache
def limits() -> dict[int, Limits]:
    """Return the limits by the number of studies, which is at most :data:`WINDOW`."""
    rows = [line.split(",") for line in TABLE.read_text(encoding="utf-8").splitlines()[1:]]
    return {int(studies): Limits(*map(float, values)) for studies, *values in rows}


def find_changes(logs: Sequence[float], *, searched: int) -> list[tuple[int, int]]:
    """Return the first study after each change, and the study with which the change was first reported.

    ``logs`` are logarithms of throughputs in the order of time, and ``searched`` is the number of series that
    are searched together.
    """
    start, found = 0, []
    for end in range(LEAST, len(logs) + 1):
        first = max(start, end - WINDOW)
        if end - first >= LEAST:
            t, split = largest_t(logs[first:end])
            if t > _limit(end - first, searched):
                start = first + split
                found.append((start, end - 1))
    return found


def largest_t(logs: Sequence[float]) -> tuple[float, int]:
    """Return the largest t of all splits, and the number of studies before that split.

    It is 0 if the first or the last study alone differs most from the others: that is not confirmed.
    """
    mean = sum(logs) / len(logs)
    distances = [value - mean for value in logs]
    # With d the sum of the first k distances, the sum of squares between the parts is d² n / (k (n - k)).
    sums = [*accumulate(distances)][:-1]
    between = [weight * d * d for weight, d in zip(_weights(len(logs)), sums, strict=True)]
    most = max(between)
    if most in (between[0], between[-1]):
        return 0.0, 0
    return _t(most, sum(d * d for d in distances) - most, len(logs)), between.index(most) + 1


def deviation_of_last(logs: Sequence[float], *, searched: int) -> float | None:
    """Return the ratio of the last study to those before it, if it alone is too far off; else None."""
    *before, last = logs[-WINDOW:]
    if len(before) + 1 < LEAST:
        return None
    mean = sum(before) / len(before)
    between = (last - mean) ** 2 * len(before) / (len(before) + 1)
    t = _t(between, sum((value - mean) ** 2 for value in before), len(before) + 1)
    return exp(last - mean) if t > _limit(len(before) + 1, searched) else None


def ratio_of(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio of the geometric means of two parts, and the ends of its interval by Student's t."""
    parts = (before[-WINDOW:], after[-WINDOW:])
    means = [sum(part) / len(part) for part in parts]
    squares = sum((value - mean) ** 2 for part, mean in zip(parts, means, strict=True) for value in part)
    studies = sum(map(len, parts))
    error = sqrt(squares / (studies - 2) * sum(1 / len(part) for part in parts))
    half, centre = limits()[min(studies, WINDOW)].quantile * error, means[1] - means[0]
    return exp(centre), exp(centre - half), exp(centre + half)


def _limit(studies: int, searched: int) -> float:
    return limits()[studies].one if searched == 1 else limits()[studies].folder


def _t(between: float, within: float, studies: int) -> float:
    if between < 1e-18:  # a relative change of 1e-9: the values are equal
        return 0.0
    return sqrt((studies - 2) * between / within) if within > 1e-12 * between else inf


@cache
def _weights(studies: int) -> list[float]:
    return [studies / (k * (studies - k)) for k in range(1, studies)]
