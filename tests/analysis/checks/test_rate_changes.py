"""Drifts and cells whose runs differ are described; noise is not reported."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from analysis.checks.assessment import CheckedStudy
from analysis.checks.rate_changes import Drift, drift, unstable_cells
from analysis.checks.scaling_table import scaling_table
from analysis.text import message
from tests.analysis.studies import frames_of_points


def measurements(rows: pd.DataFrame, *, is_exclusive: bool = False) -> CheckedStudy:
    """Return the measurements of a study whose runs have the given sizes and throughputs."""
    frames: Any = frames_of_points(rows.assign(global_batch=64))
    study: Any = SimpleNamespace(planned=[SimpleNamespace(resources=SimpleNamespace(exclusive=is_exclusive))])
    return CheckedStudy(study, frames, scaling_table(frames))


def drifts(change_per_hour: float, *, seed: int = 3, noise: float = 0.005) -> list[Drift]:
    """Return the drifts of two cells whose runs alternate over ten hours, with a trend."""
    draw = np.random.default_rng(seed)
    hours = np.arange(20) / 2
    sizes = np.tile([1, 2], 10)
    rates = 100 * sizes * np.exp(change_per_hour * hours + draw.normal(0, noise, 20))
    about = measurements(pd.DataFrame({"gpus": sizes, "throughput": rates}))
    for run, hour in zip(about.runs, hours, strict=True):
        run.started_at = pd.Timestamp("2026-01-02T03:00:00Z") + pd.Timedelta(hours=hour)
    return list(drift(about))


def test_a_drift_over_the_study_is_reported_with_its_interval() -> None:
    (found,) = drifts(-0.01)
    assert message(found).startswith(
        "The throughput of repeats of one configuration changes by -8.9 % [-9.8 %, -8 %]"
    )
    assert "over the 9.5 h of the study (p = " in message(found)
    assert found.change_low < np.exp(-0.095) - 1 < found.change_high
    (opposite,) = drifts(0.01)
    assert found.change < 0 < opposite.change


def test_noise_is_rarely_called_a_drift() -> None:
    assert sum(len(drifts(0.0, seed=seed, noise=0.02)) for seed in range(40)) <= 2


def test_cells_whose_runs_differ_are_named_with_advice_that_fits_their_nodes() -> None:
    rows = pd.DataFrame({"gpus": [1, 1, 1, 2, 2, 2], "throughput": [100, 101, 99, 150, 200, 250]})
    shared, whole = (next(unstable_cells(measurements(rows, is_exclusive=one))) for one in (False, True))
    assert message(shared) == "2 ranks-b32 by 25.6 % (standard deviation between runs)."
    assert "shared nodes" in shared.remedy
    assert shared.remedy.endswith("Use more repeats, or whole nodes (exclusive: true).")
    assert "shared nodes" not in whole.remedy
    assert whole.remedy.endswith("Use more repeats.")
