"""Four exact factors of the efficiency, with data loading separate from computation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.checks.scaling_table import scaling_table
from analysis.data.load import load_study
from analysis.report.figures.bars import loss_rows
from analysis.stats.losses import LOSSES, add_typical_rank, factors
from analysis.stats.measured import measure
from bench.matrix.cell import Cell
from tests.analysis import studies

fraction = st.floats(0.05, 1.0)
seconds = st.floats(1e-6, 10.0)


def row(*, useful: float, data: float, gpus: int, balance: float = 1.0, comm: float = 1.0) -> dict[Any, Any]:
    factors = {"load_balance": balance, "comm_efficiency": comm}
    return factors | {"useful_s": useful, "data": data, "gpus": gpus, "global_batch": 64}


@given(
    balances=st.tuples(fraction, fraction),
    comms=st.tuples(fraction, fraction),
    useful=st.tuples(seconds, seconds),
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    gpus=st.integers(1, 4096),
)
def test_the_factors_multiply_to_the_efficiency(
    balances: Any, comms: Any, useful: Any, shares: Any, gpus: int
) -> None:
    base, last = (
        row(useful=u, data=u * share, gpus=n, balance=b, comm=c)
        for u, share, n, b, c in zip(useful, shares, (1, gpus), balances, comms, strict=True)
    )
    found = factors(last, base)
    assert tuple(found) == ("load_balance", "comm_efficiency", "data_scalability", "compute_scalability")
    assert set(found) == set(LOSSES)
    # Strong scaling of 64 samples: E = T(1) / (N · T(N)), T = U / (LB · CommE).
    efficiency = useful[0] / (balances[0] * comms[0]) / (gpus * useful[1] / (balances[1] * comms[1]))
    assert math.prod(found.values()) == pytest.approx(efficiency, rel=1e-6)


def test_equal_useful_time_with_another_split_moves_between_the_two_parts() -> None:
    found = factors(row(useful=1.0, data=0.3, gpus=1), row(useful=1.0, data=0.1, gpus=1))
    assert found["data_scalability"] == pytest.approx(math.exp(-0.2))
    assert found["compute_scalability"] == pytest.approx(math.exp(0.2))


@pytest.mark.parametrize("missing", ["useful_s", "data", "load_balance", "comm_efficiency"])
def test_an_unknown_factor_makes_the_losses_unknown(missing: str) -> None:
    base = row(useful=1.0, data=0.1, gpus=1)
    assert factors(row(useful=1.0, data=0.1, gpus=2) | {missing: math.nan}, base) == {}


class SlowLoader(studies.Timing):
    """A loader with a constant time per batch: a sample costs more with more ranks."""

    def parts(self, cell: Cell) -> dict[str, float]:
        return super().parts(cell) | {"data": 0.02}


def test_a_slow_loader_is_data_loading_and_not_slower_computation(tmp_path: Path) -> None:
    timing = SlowLoader(comm_s=1e-3, fixed_s=0, imbalance=0)
    rows = scaling_table(load_study(studies.finished(tmp_path / "s", timing=timing, noise=0.0)))
    found = factors(rows.iloc[-1].to_dict(), rows.iloc[0].to_dict())
    assert found["data_scalability"] < 0.5
    assert found["compute_scalability"] == pytest.approx(1)


def test_the_bars_contain_the_factors_of_every_size_except_the_baseline(tmp_path: Path) -> None:
    rows = scaling_table(load_study(studies.finished(tmp_path / "s", noise=0.0)))
    bars = loss_rows(rows, rows)
    assert bars["gpus"].to_list() == [2, 4, 8]
    products = bars[list(LOSSES)].prod(axis=1).to_list()
    assert products == pytest.approx(bars["efficiency"].to_list(), rel=1e-9)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("times", [1.5, 3.0, 20.0])
def test_one_late_rank_is_load_imbalance_however_late_it_is(ranks: int, times: float) -> None:
    work = [1.0] * (ranks - 1) + [times]
    mean = sum(work) / ranks
    base = row(useful=float(ranks), data=0.0, gpus=1)
    last = row(useful=mean, data=0.0, gpus=ranks, balance=mean / times)
    found = factors(last | {"typical_share": 1.0 / mean, "typical_data_share": 0.0}, base)
    assert found.pop("load_balance") == pytest.approx(1 / times)
    assert list(found.values()) == [pytest.approx(1)] * 3
    # Without the ranks' own times the mean has to do: the product is the same.
    assert math.prod(factors(last, base).values()) == pytest.approx(1 / times)


def test_the_typical_rank_is_read_from_ranks_csv(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", studies.strong(sizes=(1, 2)), timing=Late(), noise=0.0)
    for file in path.glob("runs/n2x1*/attempt-1/ranks.csv"):
        frame = pd.read_csv(file)
        late = frame["rank"] == 1
        frame["step_time_sec"] = 0.1
        frame["comm_exposed_time_sec"] = frame["step_time_sec"] - late.map({True: 0.09, False: 0.03})
        frame["data_load_time_sec"] = 0.001
        frame.to_csv(file, index=False)
    study = load_study(path)
    frames = measure(study)
    rows = add_typical_rank(study, frames, scaling_table(frames))
    assert rows["typical_share"].isna().to_list() == [True, False]
    assert rows["typical_share"].iloc[1] == pytest.approx(0.03 / 0.06)
    assert rows["typical_data_share"].iloc[1] == pytest.approx(0.001 / 0.06)


class Late(studies.Timing):
    """Two ranks of which one does twice the work."""

    def parts(self, cell: Cell) -> dict[str, float]:
        parts = super().parts(cell)
        return parts | {"wait": 0.03, "exposed": 0.04} if cell.world_size > 1 else parts
