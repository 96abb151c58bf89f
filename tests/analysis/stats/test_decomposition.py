"""Exact identities of load balance, communication and computation, and unknown values."""

import math

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.stats.columns import RunRow, ScalingRow, missing_values, records_of
from analysis.stats.decompose import cell_parts, computational_scalability, run_parts
from bench.study.records import METRICS_COLUMNS


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
    return cell_parts(records_of(RunRow, run_parts(epochs)))


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


@given(
    st.lists(
        st.tuples(st.integers(1, 100), st.floats(0.01, 1.0), st.floats(0.05, 1.0), st.floats(0.05, 1.0)),
        min_size=1,
        max_size=6,
    )
)
def test_parallel_efficiency_is_the_product_of_its_factors(rows):
    frame = metrics(
        [row(steps=s, forward_time_sec=f, load_balance=b, comm_efficiency=c) for s, f, b, c in rows]
    )
    found = of_cell(frame)
    product = found["load_balance"] * found["comm_efficiency"]
    assert found["pop_parallel_efficiency"] == pytest.approx(product, rel=1e-12)
    assert min(r[2] for r in rows) - 1e-9 <= found["load_balance"] <= max(r[2] for r in rows) + 1e-9
    assert min(r[3] for r in rows) - 1e-9 <= found["comm_efficiency"] <= max(r[3] for r in rows) + 1e-9


@pytest.mark.parametrize("bad", [math.nan, 0.0, -1.0, 1.5, math.inf])
def test_an_epoch_with_impossible_factors_is_ignored(bad: float) -> None:
    parts = of_cell(metrics([row(load_balance=bad), row(load_balance=0.6)]))
    assert parts["load_balance"] == pytest.approx(0.6)
    assert run_parts(metrics([row(load_balance=bad)])).empty


def test_without_one_part_the_factors_are_known_and_the_times_are_not() -> None:
    parts = of_cell(metrics([row(other_time_sec=math.nan), row()]))
    assert parts["load_balance"] == pytest.approx(0.8)
    assert parts["pop_parallel_efficiency"] == pytest.approx(0.72)
    assert math.isnan(parts["useful_s"])
    assert math.isnan(parts["other"])
    assert parts["forward"] == pytest.approx(0.02)


def test_runs_with_and_without_known_parts_are_not_mixed() -> None:
    frame = pd.concat([metrics([row()], "a"), metrics([row(other_time_sec=math.nan, load_balance=0.1)], "b")])
    frame["run_id"] = pd.Categorical(frame["run_id"])
    assert of_cell(frame)["load_balance"] == pytest.approx(0.8)


def test_computational_scalability_compares_useful_time_per_sample() -> None:
    useful = {1: 1.0, 2: 0.6, 4: math.nan}
    missing = missing_values(ScalingRow) | {"global_batch": 10}
    rows = [ScalingRow(**missing | {"gpus": gpus, "useful_s": own}) for gpus, own in useful.items()]
    found = [computational_scalability(row, rows[0]) for row in rows]
    assert found[:2] == pytest.approx([1.0, (1.0 / 10) / (0.6 * 2 / 10)])
    assert math.isnan(found[2])
