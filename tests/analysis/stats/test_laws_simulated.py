"""Prediction intervals at twice the largest size contain the truth of a ring all-reduce."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from analysis.stats.law_fit import LawFit, LawRun, fit_laws

SIZES = np.array([1, 2, 4, 8, 16])


def ring_truth(mode: str, kind: str, draw: np.random.Generator) -> Callable[[float], float]:
    """Return the seconds per step of compute and a ring all-reduce with random constants.

    ``a`` in ``kind`` has latency, ``b`` bandwidth, ``s`` an eighth of the communication; with ``o`` a
    share of the computation hides all but the last bucket.
    """

    def between(low: float, high: float) -> float:
        return float(np.exp(draw.uniform(np.log(low), np.log(high))))

    small = 8 if "s" in kind else 1
    fixed = between(0.003, 0.03)
    alpha = between(3e-4, 1e-2) / small if "a" in kind else 0.0
    beta = between(0.02, 0.3) / small if "b" in kind else 0.0
    overlap = float(draw.uniform(0.05, 0.6)) if "o" in kind else 0.0

    def seconds(ranks: float) -> float:
        compute = fixed + (1 / ranks if mode == "strong" else 1.0)
        every = 2 * (ranks - 1) * alpha + (ranks - 1) / ranks * beta
        return compute + max(every - overlap * compute, every * (0.15 if overlap else 1.0))

    return seconds


def covered(mode: str, kind: str, *, n: int, studies: int, seed: int) -> float:
    """Return the share of studies whose 90 % interval at 32 ranks contains the truth; none may refuse."""
    draw = np.random.default_rng(seed)
    hits = 0
    for _ in range(studies):
        truth = ring_truth(mode, kind, draw)
        times = np.array([truth(size) for size in np.repeat(SIZES, n)])
        noisy = times * np.exp(draw.normal(0, 0.02, len(times)))
        runs = [LawRun(*run) for run in zip(np.repeat(SIZES, n), noisy, strict=True)]
        found = fit_laws(runs, mode=mode)
        assert isinstance(found, LawFit)
        (predicted,) = found.predict([32], 0.90)
        hits += bool(predicted.low <= truth(32) <= predicted.high)
    return hits / studies


@pytest.mark.parametrize(("mode", "kind", "n"), [("strong", "ab", 3), ("strong", "ab", 1), ("weak", "ab", 3)])
def test_at_least_85_percent_of_studies_contain_the_truth(mode: str, kind: str, n: int) -> None:
    assert covered(mode, kind, n=n, studies=40, seed=20260) >= 0.85


@pytest.mark.parametrize("kind", ["a", "b", "sab"])
def test_latency_or_bandwidth_alone_or_little_of_both_is_covered(kind: str) -> None:
    assert covered("strong", kind, n=3, studies=30, seed=7) >= 0.85
    assert covered("weak", kind, n=3, studies=20, seed=8) >= 0.85
