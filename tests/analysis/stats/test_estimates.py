"""Rates, intervals and parts of the step equal a second computation; unknown values stay unknown."""

import math

import numpy as np
import pandas as pd
import pytest

from analysis.checks.scaling_table import scaling_table
from analysis.data.columns import RunRow
from analysis.stats.decompose import cell_parts, run_parts
from analysis.stats.estimate import (
    log_moments,
    outliers,
    ratio_interval,
    run_rates,
    run_readings,
    runs_to_decide,
)
from analysis.stats.scaling import GUIDE
from ddp_scaling_bench.records import METRICS_COLUMNS
from tests.analysis.studies import frame, frames_of_points


def epochs(**columns: list[float]) -> pd.DataFrame:
    return pd.DataFrame({"run_id": pd.Categorical(["a"] * len(columns["samples"])), **columns})


@pytest.mark.parametrize("bad", [math.nan, 0.0])
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


def test_an_outlier_is_flagged_and_small_or_constant_groups_flag_none() -> None:
    assert outliers([10.0, 10.1, 9.9, 10.05, 9.95, 14.0]) == [False] * 5 + [True]
    assert not any(outliers([1.0, 1.0, 1.1, 99.0]))
    assert not any(outliers([5.0, 5.0, 5.0, 5.0, 6.0]))


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
    return frame(scaling_table(frames_of_points(pd.concat(parts).assign(global_batch=64))))


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


def test_95_percent_of_intervals_contain_the_true_efficiency() -> None:
    """``make campaign`` repeats this with more studies and runs; the limits are 95 % ± three standard errors."""
    rows = simulated(3, seed=3, run_noise=0.02, step_noise=0.1)
    for ranks in (2, 4):
        own = rows[rows["gpus"] == ranks]
        assert len(own) == STUDIES
        held = own["efficiency_low"].le(TRUTH[ranks]) & own["efficiency_high"].ge(TRUTH[ranks])
        assert 0.912 <= held.mean() <= 0.988, (ranks, held.mean())


def metrics(rows: list[dict[str, float]], run_id: str = "a") -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=list(METRICS_COLUMNS)).astype(float)
    return frame.assign(run_id=pd.Categorical([run_id] * len(rows)))


def row(**values: float) -> dict[str, float]:
    parts = {
        "steps": 10,
        "data_load_time_sec": 0.01,
        "forward_time_sec": 0.02,
        "backward_time_sec": 0.04,
        "optimizer_time_sec": 0.02,
        "other_time_sec": 0.01,
        "comm_exposed_time_sec": 0.05,
        "comm_wait_time_sec": 0.02,
        "load_balance": 0.8,
        "comm_efficiency": 0.9,
    }
    return parts | values


def of_cell(epochs: pd.DataFrame) -> dict[str, float]:
    runs = [
        RunRow(run_id=str(name), cell_id="", repeat=1, order=1, **values)
        for name, values in run_parts(epochs).to_dict("index").items()
    ]
    return cell_parts(runs)


def test_epochs_are_weighted_by_their_steps_and_sums_divided_by_sums() -> None:
    rows = [row(steps=10, forward_time_sec=0.02), row(steps=30, forward_time_sec=0.06, load_balance=0.5)]
    found = run_parts(metrics(rows)).loc["a"]
    assert found["forward"] == pytest.approx((10 * 0.02 + 30 * 0.06) / 40)
    useful = [0.1, 0.14]
    most = [0.1 / 0.8, 0.14 / 0.5]
    assert found["useful_s"] == pytest.approx((10 * useful[0] + 30 * useful[1]) / 40)
    assert found["most_useful_s"] == pytest.approx((10 * most[0] + 30 * most[1]) / 40)
    assert found["step_s"] == pytest.approx((10 * most[0] + 30 * most[1]) / 0.9 / 40)
    assert found["transfer"] == pytest.approx(0.03)
    assert found["wait"] == pytest.approx(0.02)


def test_an_epoch_with_impossible_factors_is_ignored_and_without_one_part_the_times_are_not_known() -> None:
    for bad in (math.nan, 1.5):
        parts = of_cell(metrics([row(load_balance=bad), row(load_balance=0.6)]))
        assert parts["load_balance"] == pytest.approx(0.6)
        assert run_parts(metrics([row(load_balance=bad)])).empty
    parts = of_cell(metrics([row(other_time_sec=math.nan), row()]))
    known = {name: parts[name] for name in ("load_balance", "pop_parallel_efficiency", "forward")}
    assert known == pytest.approx({"load_balance": 0.8, "pop_parallel_efficiency": 0.72, "forward": 0.02})
    assert math.isnan(parts["useful_s"])
    assert math.isnan(parts["other"])
