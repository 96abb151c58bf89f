"""Intervals of the efficiency contain the truth at their level, in simulated studies."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis.checks.scaling_table import scaling_table
from analysis.stats.columns import ScalingRow, frame_of_records
from analysis.stats.estimate import log_moments, ratio_interval, runs_to_decide
from analysis.stats.scaling import GUIDE
from tests.analysis.points import frames_of_points

STUDIES = 300
STEPS = 50
TRUTH = {1: 1.0, 2: 0.93, 4: 0.81}


def simulated(
    runs: int, *, seed: int, run_noise: float, step_noise: float, studies: int = STUDIES
) -> pd.DataFrame:
    """Return the rows of many strong studies of known efficiency, each one a series.

    A run's noise is shared by its steps; each step adds its own.
    """
    draw = np.random.default_rng(seed)
    parts = []
    for ranks, efficiency in TRUTH.items():
        of_run = np.exp(draw.normal(0, run_noise, (studies, runs, 1)))
        of_steps = np.exp(draw.normal(0, step_noise, (studies, runs, STEPS)))
        seconds = (of_run * of_steps).mean(axis=2) / (ranks * efficiency)
        places = np.repeat([f"s{place:04d}" for place in range(studies)], runs)
        parts.append(pd.DataFrame({"series": places, "gpus": ranks, "time": seconds.ravel()}))
    return frame_of_records(
        ScalingRow, scaling_table(frames_of_points(pd.concat(parts).assign(global_batch=64)))
    )


def decided(efficiency: float, noise: float, *, studies: int, seed: int) -> tuple[int, float]:
    """Return the runs that decide about an efficiency, and the share of studies whose interval excludes 0.8."""
    runs = int(runs_to_decide(np.log(efficiency / GUIDE), error=noise, top_n=2, bottom_n=2))
    draw = np.random.default_rng(seed)
    values = np.exp(draw.normal(0, noise, (2, studies, runs)))
    top, bottom = (log_moments(own.tolist()) for own in values)
    low, high = (efficiency * bound for bound in ratio_interval(top, bottom))
    return runs, float(np.mean((low >= GUIDE) | (high < GUIDE)))


@pytest.mark.parametrize(("efficiency", "noise"), [(0.9, 0.05), (0.75, 0.1)])
def test_the_number_of_runs_that_decide_decides_in_4_of_5_studies(efficiency: float, noise: float) -> None:
    runs, share = decided(efficiency, noise, studies=2000, seed=1)
    assert runs >= 3
    assert 0.77 <= share <= 0.90, (runs, share)


@pytest.mark.parametrize("runs", [3, 6])
def test_95_percent_of_intervals_contain_the_true_efficiency(runs: int) -> None:
    """``make campaign`` repeats this with more studies; the limits are 95 % ± three standard errors."""
    rows = simulated(runs, seed=runs, run_noise=0.02, step_noise=0.1)
    for ranks in (2, 4):
        own = rows[rows["gpus"] == ranks]
        assert len(own) == STUDIES
        held = own["efficiency_low"].le(TRUTH[ranks]) & own["efficiency_high"].ge(TRUTH[ranks])
        assert 0.912 <= held.mean() <= 0.988, (runs, ranks, held.mean())
