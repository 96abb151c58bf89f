"""Rates, means and ratios equal a second computation and have the required invariances."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from analysis.checks.scaling_table import scaling_table
from analysis.stats.columns import ScalingRow, frame_of_records
from analysis.stats.estimate import (
    log_moments,
    mean_interval,
    outliers,
    ratio_interval,
    run_rates,
    run_readings,
    runs_to_decide,
)
from analysis.stats.scaling import GUIDE
from tests.analysis.points import frames_of_points

values = st.lists(st.floats(0.01, 1e6), min_size=3, max_size=8)


def interval_of(group: list[float]) -> tuple[float, float]:
    low, high = mean_interval(log_moments([group]))
    return float(low[0]), float(high[0])


def ratio_of(top: list[float], bottom: list[float]) -> tuple[float, float]:
    both = log_moments([top, bottom])
    low, high = ratio_interval(both.take(np.array([0])), both.take(np.array([1])))
    return float(low[0]), float(high[0])


def epochs(**columns: list[float]) -> pd.DataFrame:
    return pd.DataFrame({"run_id": pd.Categorical(["a"] * len(columns["samples"])), **columns})


def test_a_runs_throughput_is_all_samples_over_all_time() -> None:
    frame = epochs(samples=[100, 300], steps=[1, 3], throughput_samples_per_sec=[50.0, 100.0])
    rates = run_rates(frame)
    assert rates.loc["a", "window_s"] == 100 / 50 + 300 / 100
    assert rates.loc["a", "throughput_samples_per_sec"] == 400 / 5
    equal = epochs(samples=[10, 10, 10], steps=[1, 1, 1], throughput_samples_per_sec=[90.0, 100.0, 110.0])
    assert run_rates(equal)["throughput_samples_per_sec"].item() == pytest.approx(stats.hmean([90, 100, 110]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -3.0])
def test_an_epoch_without_a_usable_rate_is_ignored(bad: float) -> None:
    frame = epochs(samples=[10, 10], steps=[1, 1], throughput_samples_per_sec=[bad, 20.0])
    assert run_rates(frame)["throughput_samples_per_sec"].to_list() == [20.0]
    assert run_rates(frame)["epochs"].to_list() == [1]
    only_bad = epochs(samples=[10], steps=[1], throughput_samples_per_sec=[bad])
    assert run_rates(only_bad).empty


def test_readings_are_means_over_steps_and_the_last_validation_loss() -> None:
    nan = math.nan
    columns = {"mfu": [0.2, 0.4, nan], "gpu_util_avg": [nan] * 3, "energy_joules": [10.0, nan, 50.0]}
    columns |= {"wire_bytes_per_step": [4.0, nan, 7.0], "wire_bytes_predicted_per_step": [3.0] * 3}
    columns |= {f"comm_{part}_time_sec": [0.25, nan, 1.0] for part in ("forward", "backward", "end")}
    columns["peak_mem_bytes"] = [2.0**30, nan, 2.0**31]
    frame = epochs(samples=[1] * 3, steps=[10, 30, 20], val_loss=[3.0, 2.0, nan], **columns)
    found = run_readings(frame).loc["a"]
    assert found["mfu"] == pytest.approx((10 * 0.2 + 30 * 0.4) / 40)
    assert found["energy_joules"] == pytest.approx((10 + 50) / (10 + 20))
    assert found["wire_bytes"] == pytest.approx((10 * 4 + 20 * 7) / 30)
    assert found["wire_predicted"] == 3.0
    assert found["comm_end"] == pytest.approx((10 * 0.25 + 20 * 1.0) / 30)
    assert found["val_loss"] == 2.0
    assert found["peak_mem_bytes"] == 2.0**31
    assert math.isnan(found["gpu_util"])


def test_the_interval_of_a_mean_is_students_t_on_logarithms() -> None:
    group = [95.0, 102.0, 99.0, 104.0]
    expected = stats.ttest_1samp(np.log(group), 0).confidence_interval(0.95)
    assert interval_of(group) == pytest.approx((math.exp(expected.low), math.exp(expected.high)), rel=1e-12)


def test_the_interval_of_a_ratio_is_welchs_t_on_logarithms() -> None:
    top, bottom = [10.1, 10.4, 9.7, 10.9], [5.0, 5.6, 5.2]
    result = stats.ttest_ind(np.log(top), np.log(bottom), equal_var=False).confidence_interval(0.95)
    assert ratio_of(top, bottom) == pytest.approx((math.exp(result.low), math.exp(result.high)), rel=1e-12)


@pytest.mark.parametrize("group", [[], [3.0], [3.0, 4.0]])
def test_fewer_than_three_runs_have_no_interval(group: list[float]) -> None:
    assert all(math.isnan(bound) for bound in interval_of(group))
    assert all(math.isnan(bound) for bound in ratio_of(group, [1.0, 2.0, 3.0]))
    assert all(math.isnan(bound) for bound in ratio_of([1.0, 2.0, 3.0], group))


def test_equal_runs_have_an_interval_of_no_width() -> None:
    assert interval_of([7.0] * 3) == pytest.approx((7.0, 7.0))
    assert ratio_of([8.0] * 3, [2.0] * 4) == pytest.approx((4.0, 4.0))


@given(top=values, bottom=values, factor=st.floats(1e-3, 1e3))
def test_a_ratio_does_not_depend_on_the_unit_and_inverts(top, bottom, factor):
    low, high = ratio_of(top, bottom)
    assume(low > 1e-250 and high < 1e250)
    scaled = ratio_of([factor * v for v in top], [factor * v for v in bottom])
    assert scaled == pytest.approx((low, high), rel=1e-4)
    inverse = ratio_of(bottom, top)
    assert (1 / inverse[1], 1 / inverse[0]) == pytest.approx((low, high), rel=1e-6)


def test_an_outlier_is_flagged_and_small_or_constant_groups_flag_none() -> None:
    frame = pd.DataFrame(
        {
            "group": ["a"] * 6 + ["b"] * 4 + ["c"] * 5,
            "value": [10.0, 10.1, 9.9, 10.05, 9.95, 14.0, 1.0, 1.0, 1.1, 99.0, 5.0, 5.0, 5.0, 5.0, 6.0],
        }
    )
    flagged = outliers(frame["value"], by=frame["group"])
    assert flagged.to_list() == [False] * 5 + [True] + [False] * 9


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
