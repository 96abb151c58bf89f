"""The shares of a division add up to the loss, whatever is claimed, and healthy studies get no cause."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.causes.catalogue import CAUSES
from analysis.causes.cells import divide_cell
from analysis.causes.claims import RunEvidence
from analysis.causes.divide import Claim, divide
from analysis.causes.table import late_ranks
from analysis.data.csv_files import rows_of
from analysis.data.load import RankOfRun
from analysis.stats.columns import PARTS
from analysis.stats.decompose import USEFUL_PARTS
from bench.study.records import columns_of

fractions = st.lists(st.floats(0.0, 1.0), min_size=len(PARTS), max_size=len(PARTS)).filter(sum)
claims = st.lists(
    st.builds(
        Claim,
        cause=st.sampled_from(CAUSES),
        evidence=st.just(()),
        pools=st.lists(st.sampled_from(PARTS), min_size=1, max_size=3).map(tuple),
        share=st.just(math.nan) | st.floats(0.0, 1.5),
    ),
    max_size=5,
)


def parts_of(values: list[float]) -> dict[str, float]:
    return {part: value / sum(values) for part, value in zip(PARTS, values, strict=True)}


@given(fractions, fractions, claims, st.floats(0.05, 1.5))
@settings(max_examples=60, deadline=None)
def test_the_shares_add_up_to_the_loss_and_give_the_efficiency(
    base: list[float], larger: list[float], found: list[Claim], efficiency: float
) -> None:
    first = divide(parts_of(base), found)
    ideal = 1 - sum(first.shares.values())
    assert ideal == pytest.approx(sum(first.ideal.values()), abs=1e-9)
    reference = {part: efficiency * value for part, value in first.ideal.items()}
    second = divide(parts_of(larger), found, reference=reference)
    assert 1 - sum(second.shares.values()) == pytest.approx(efficiency * ideal, abs=1e-9)


#: Fractions of the work of a healthy rank.
WORK = {"data": 0.02, "forward": 0.3, "backward": 0.6, "optimizer": 0.05, "other": 0.03}
STUDIES, RUNS, RANKS, EPOCHS = 1000, 3, 4, 3


def healthy_ranks(rng: np.random.Generator) -> pd.DataFrame:
    """Return ranks.csv of the runs of all studies: 90 ms of work with 1.4 % noise, 10 ms of communication."""
    shape = (STUDIES, RUNS, EPOCHS, RANKS)
    study, run, epoch, rank = (grid.ravel() for grid in np.indices(shape))
    noise = rng.normal(0, 0.01, shape) + rng.normal(0, 0.01, (STUDIES, RUNS, 1, RANKS))
    work = 0.09 * np.exp(noise)
    latest = np.broadcast_to(work.max(axis=3, keepdims=True), shape).ravel()
    work = work.ravel()
    frame = pd.DataFrame({"cell_id": study.astype(str), "epoch": epoch, "rank": rank})
    frame["run_id"] = [f"{one}-{two}" for one, two in zip(study, run, strict=True)]
    frame["host"] = [f"n{one}" for one in rank]
    frame["step_time_sec"] = latest + 0.01
    frame["comm_exposed_time_sec"], frame["comm_wait_time_sec"] = latest + 0.01 - work, latest - work
    for part, share in WORK.items():
        frame[USEFUL_PARTS[part]] = share * work
    return frame


def test_at_most_2_percent_of_1000_healthy_studies_have_a_cause() -> None:
    """Weak scaling, three runs of one and of four ranks; the runs' throughput has 2 % noise."""
    rng = np.random.default_rng(7)
    ranks = healthy_ranks(rng)
    late = late_ranks(rows_of(ranks.reindex(columns=columns_of(RankOfRun)), RankOfRun))
    means = ranks.groupby("run_id")[[*USEFUL_PARTS.values(), "comm_wait_time_sec"]].mean()
    means.columns = pd.Index([*USEFUL_PARTS, "wait"])
    parts = {run: row | {"transfer": 0.01} for run, row in means.to_dict("index").items()}
    alone = WORK | {"transfer": 0.0, "wait": 0.0}
    wrong = 0
    for study in range(STUDIES):
        times = np.exp(rng.normal(0, 0.02, (2, RUNS)))
        base, large = times / times.mean(axis=1, keepdims=True)
        base_runs = [RunEvidence(alone, 0.1, run_id=str(n), factor=t) for n, t in enumerate(base)]
        ideal = divide_cell(base_runs).ideal
        efficiency = 0.9 * times[0].mean() / times[1].mean()
        reference = {part: efficiency * value for part, value in ideal.items()}
        names = [f"{study}-{run}" for run in range(RUNS)]
        runs = [
            RunEvidence(
                parts_of([*map(parts[one].get, PARTS)]), 0.1, late=late.get(one, ()), run_id=one, factor=t
            )
            for one, t in zip(names, large, strict=True)
        ]
        found = divide_cell(runs, reference, base_runs)
        assert found.loss == pytest.approx(1 - sum(reference.values()))
        wrong += any(not row.is_rest for row in found.rows)
    assert wrong <= STUDIES // 50
