"""Anomalies are described; noise is not reported."""

from typing import Any

import numpy as np
import pandas as pd

from analysis.checks.anomalies import anomalies
from analysis.checks.drift import drift
from analysis.checks.scaling_table import scaling_table
from analysis.stats.measured import Frames
from analysis.text import message
from tests.analysis.studies import frames_of_points


def points(rates: dict[int, list[float]], *, batch: int = 64) -> Frames:
    """Return a strong series with the given throughputs by size."""
    rows = [{"gpus": size, "throughput": rate} for size, own in rates.items() for rate in own]
    return frames_of_points(pd.DataFrame(rows).assign(global_batch=batch))


def texts_by_kind(frames: Frames, **options: Any) -> dict[str, str]:
    return {one.kind: message(one) for one in anomalies(scaling_table(frames), frames, **options)}


def around(value: float, spread: float = 0.01) -> list[float]:
    return [value * (1 + step * spread) for step in (-1, 0, 1, 0.5)]


def test_a_normal_study_has_no_anomaly() -> None:
    assert texts_by_kind(points({1: around(100), 2: around(195), 4: around(370), 8: around(690)})) == {}


def test_an_efficiency_above_1_is_reported_if_its_interval_is_clear_of_1() -> None:
    found = texts_by_kind(points({1: around(100), 2: around(240)}))
    assert found["superlinear"] == (
        "1.200 at 2 ranks (the interval excludes 1). Either the baseline is slower than it should be (fewer "
        "threads, another node, a slow first run), or the smaller share of the work fits into a cache."
    )
    assert texts_by_kind(points({1: around(100, 0.2), 2: around(204, 0.2)})).keys() == {"unstable"}
    assert "no interval: fewer than 3 runs" in texts_by_kind(points({1: [100], 2: [240]}))["superlinear"]


def test_sizes_below_a_selected_baseline_are_no_anomaly() -> None:
    frames = points({1: around(100), 2: around(180), 4: around(300)})
    assert anomalies(scaling_table(frames, baseline="4"), frames) == []


def test_a_lower_efficiency_between_two_sizes_is_reported() -> None:
    found = texts_by_kind(points({1: around(100), 2: around(120), 4: around(370)}))
    assert found["recovery"].startswith("1.000, 0.600, 0.925 at 1, 2, 4 ranks. ")


def test_an_outlier_in_the_baseline_is_reported() -> None:
    found = texts_by_kind(points({1: [100, 100.1, 99.9, 100.2, 99.8, 60], 2: around(190)}))
    assert found["baseline-outlier"] == (
        "1 rank-b64: 1 run is far from the baseline's other runs. This affects every efficiency relative "
        "to this baseline."
    )


def timed(change_per_hour: float, *, seed: int = 3, noise: float = 0.005) -> Frames:
    """Return two cells whose runs alternate over ten hours, with a trend."""
    draw = np.random.default_rng(seed)
    hours = np.arange(20) / 2
    sizes = np.tile([1, 2], 10)
    rates = 100 * sizes * np.exp(change_per_hour * hours + draw.normal(0, noise, 20))
    frames = frames_of_points(pd.DataFrame({"gpus": sizes, "throughput": rates, "global_batch": 64}))
    start = pd.Timestamp("2026-01-02T03:00:00Z")
    frames.runs["started_at"] = start + pd.to_timedelta(hours, unit="h")
    return frames


def test_a_drift_over_the_study_is_reported_with_its_interval() -> None:
    (found,) = drift(timed(-0.01).run_rows)
    assert message(found).startswith(
        "The throughput of repeats of one configuration changes by -8.9 % [-9.8 %, -8 %]"
    )
    assert "over the 9.5 h of the study (p = " in message(found)
    assert found.values["change_low"] < np.exp(-0.095) - 1 < found.values["change_high"]
    (opposite,) = drift(timed(0.01).run_rows)
    assert found.values["change"] < 0 < opposite.values["change"]


def test_noise_is_rarely_called_a_drift() -> None:
    found = [list(drift(timed(0.0, seed=seed, noise=0.02).run_rows)) for seed in range(60)]
    assert sum(map(len, found)) <= 3


def test_whole_nodes_are_not_recommended_to_a_study_that_has_them() -> None:
    frames = points({1: [100, 101, 99], 2: [150, 200, 250]})
    shared, whole = (
        anomalies(scaling_table(frames), frames, whole_nodes=given)[0].remedy for given in (False, True)
    )
    found = texts_by_kind(frames)["unstable"]
    assert found.startswith("2 ranks-b32 by 25.6 % (standard deviation")
    assert shared.endswith("Use more repeats, or whole nodes (exclusive: true).")
    assert "shared nodes" in shared
    assert whole.endswith("Use more repeats.")
    assert "shared nodes" not in whole
