"""Rates, means and ratios equal a second computation and have the required invariances."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from analysis.stats.estimate import (
    log_moments,
    mean_interval,
    outliers,
    ratio_interval,
    run_rates,
    run_readings,
)

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


@given(group=values, factor=st.floats(1e-3, 1e3))
def test_an_interval_does_not_depend_on_the_unit(group: list[float], factor: float) -> None:
    low, high = interval_of(group)
    assert interval_of([factor * v for v in group]) == pytest.approx((factor * low, factor * high), rel=1e-6)


@given(top=values, bottom=values, factor=st.floats(1e-3, 1e3))
def test_a_ratio_does_not_depend_on_the_unit_and_inverts(
    top: list[float], bottom: list[float], factor: float
) -> None:
    low, high = ratio_of(top, bottom)
    assume(low > 1e-250 and high < 1e250)
    scaled = ratio_of([factor * v for v in top], [factor * v for v in bottom])
    assert scaled == pytest.approx((low, high), rel=1e-4)
    inverse = ratio_of(bottom, top)
    assert (1 / inverse[1], 1 / inverse[0]) == pytest.approx((low, high), rel=1e-6)


@given(group=values, seed=st.integers(0, 99))
def test_an_interval_does_not_depend_on_the_order_of_runs(group: list[float], seed: int) -> None:
    shuffled = list(np.random.default_rng(seed).permutation(group))
    assert interval_of(shuffled) == pytest.approx(interval_of(group), rel=1e-6)


@given(group=st.lists(st.floats(90, 110), min_size=3, max_size=10))
def test_the_interval_contains_the_harmonic_mean(group: list[float]) -> None:
    low, high = interval_of(group)
    slack = 1 + 1e-9
    assert low / slack <= stats.hmean(group) <= high * slack


@pytest.mark.parametrize("runs", [3, 5])
def test_95_percent_intervals_cover_the_truth_95_percent_of_the_time(runs: int) -> None:
    noise = np.random.default_rng(7).normal(0.0, 0.02, size=(4000, 2, runs))
    both = log_moments(np.exp(noise).reshape(8000, runs).tolist())
    low, high = ratio_interval(both.take(np.arange(0, 8000, 2)), both.take(np.arange(1, 8000, 2)))
    assert 0.94 < np.mean((low <= 1) & (high >= 1)) < 0.985


def test_an_outlier_is_flagged_and_small_or_constant_groups_flag_none() -> None:
    frame = pd.DataFrame(
        {
            "group": ["a"] * 6 + ["b"] * 4 + ["c"] * 5,
            "value": [10.0, 10.1, 9.9, 10.05, 9.95, 14.0, 1.0, 1.0, 1.1, 99.0, 5.0, 5.0, 5.0, 5.0, 6.0],
        }
    )
    flagged = outliers(frame["value"], by=frame["group"])
    assert flagged.to_list() == [False] * 5 + [True] + [False] * 9
