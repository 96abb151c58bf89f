"""Late ranks, slow nodes, drifts and cells whose runs differ; noise is not reported."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.checks.assessment import CheckedStudy
from analysis.checks.rate_changes import Drift, drift, unstable_cells
from analysis.checks.scaling_table import scaling_table
from analysis.checks.slow_ranks import (
    late_nodes_of,
    nodes_table,
    rank_means,
    slow_nodes_of,
    stragglers,
    unequal_windows,
)
from analysis.data.csv_files import rows_of
from analysis.data.load import RankOfRun, load_study
from analysis.text import message
from ddp_scaling_bench.records import RANKS_COLUMNS, columns_of
from tests.analysis.studies import finished, frames_of_points, make_cell, seal

STEP_S = 0.1


def rank_records(frame: pd.DataFrame) -> list[RankOfRun]:
    return rows_of(frame.reindex(columns=columns_of(RankOfRun)), RankOfRun)


def ranks_frame(late: dict[int, float], *, ranks: int = 4, epochs: int = 3, run: str = "r1") -> pd.DataFrame:
    """Ranks of one run, two per host; ``late`` gives the extra seconds of backward by rank."""
    numbers = [(epoch, rank) for epoch in range(1, epochs + 1) for rank in range(ranks)]
    frame = pd.DataFrame(numbers, columns=["epoch", "rank"]).assign(run_id=run, cell_id="cell")
    frame["host"] = [f"n{rank // 2 + 1}" for rank in frame["rank"]]
    more, latest = frame["rank"].map(lambda rank: late.get(rank, 0.0)), max(late.values(), default=0.0)
    parts = {"data_load": 0.01, "forward": 0.02, "backward": 0.05 + more, "optimizer": 0.01, "other": 0.0}
    parts |= {"step": STEP_S + latest, "comm_exposed": 0.01 + latest - more, "comm_wait": latest - more}
    return frame.assign(**{f"{part}_time_sec": seconds for part, seconds in parts.items()})


def run_of(cell: str) -> SimpleNamespace:
    return SimpleNamespace(cell_id=cell)


def test_equal_ranks_small_or_rare_differences_and_other_clocks_have_no_straggler():
    once = pd.concat([ranks_frame({1: 0.04}, epochs=1), ranks_frame({}).query("epoch > 1")])
    clocks = ranks_frame({3: 0.04})  # of rank 0 stopped earlier
    clocks.loc[clocks["rank"] == 0, "step_time_sec"] *= 0.8
    for frame in (ranks_frame({}), ranks_frame({1: 0.004}), once, clocks):
        assert not len(stragglers(rank_records(frame)))


def test_work_outside_the_timers_may_be_absent_from_some_epochs():
    late = ranks_frame({1: 0.04}, epochs=2)
    late["other_time_sec"] = late.pop("backward_time_sec") - 0.05
    frame = pd.concat([late.assign(backward_time_sec=0.05), ranks_frame({}).query("epoch > 2")])
    (row,) = stragglers(rank_records(frame))
    assert (row.rank, row.part, row.ranks) == (1, "other", 4)
    assert row.share == pytest.approx(2 / 3 * 0.04 / (STEP_S + 2 / 3 * 0.04))
    # In the epoch without the work, the rank is a little faster than the others.
    faster = frame.copy()
    faster.loc[(frame["epoch"] == 3) & (frame["rank"] == 1), "comm_exposed_time_sec"] += 0.003
    (row,) = stragglers(rank_records(faster))
    assert row.excess_s == pytest.approx(2 / 3 * 0.04 - 0.003 / 3)
    # One of three epochs is not enough, and the same in the backward pass is noise.
    assert not len(stragglers(rank_records(frame.query("epoch > 1"))))
    assert not len(
        stragglers(
            rank_records(pd.concat([ranks_frame({1: 0.04}, epochs=2), ranks_frame({}).query("epoch > 2")]))
        )
    )


def test_a_node_is_late_in_more_than_half_of_the_runs():
    quiet, late = ranks_frame({}), {1: 0.04}
    one = pd.concat([quiet.assign(run_id="a"), quiet.assign(run_id="b"), ranks_frame(late, run="c")])
    assert not [*late_nodes_of(stragglers(rank_records(one)), [run_of("cell")] * 3)]
    two = pd.concat([quiet.assign(run_id="a"), ranks_frame(late, run="b"), ranks_frame(late, run="c")])
    (found,) = late_nodes_of(stragglers(rank_records(two)), [run_of("cell")] * 3)
    (late,) = found.late
    assert (late.late_in, late.runs) == (2, 3)


def rank_rows(slow: dict[str, float], *, runs: int = 4, noise: float = 0.01, seed: int = 2) -> pd.DataFrame:
    """Return rows of ranks.csv of runs on four hosts; ``slow`` gives a factor by host."""
    draw = np.random.default_rng(seed)
    rows = [
        {
            "run_id": f"r{run}",
            "cell_id": "cell",
            "host": host,
            "rank": 2 * place + local,
            "samples": 100.0,
            "forward_time_sec": 0.1 * slow.get(host, 1.0) * float(np.exp(draw.normal(0, noise))),
            "backward_time_sec": 0.2 * slow.get(host, 1.0),
        }
        for run in range(runs)
        for place, host in enumerate(("n1", "n2", "n3", "n4"))
        for local in range(2)
    ]
    ranks = pd.DataFrame(rows)
    step_s = ranks["forward_time_sec"] + ranks["backward_time_sec"]
    return ranks.assign(step_time_sec=step_s + 0.1, comm_exposed_time_sec=0.1)


def other_runs() -> pd.DataFrame:
    """n1 is measured in slow runs and n2 in fast ones; in no run is one of them slower than the other nodes."""
    ranks = rank_rows({}, runs=6)
    slow_run = ranks["run_id"].isin(["r0", "r1", "r2"])
    ranks.loc[slow_run, ["forward_time_sec", "backward_time_sec", "step_time_sec"]] *= 2
    return ranks[~((ranks["host"] == "n2") & slow_run) & ~((ranks["host"] == "n1") & ~slow_run)]


SLOW = rank_rows({"n1": 1.5, "n2": 1.5})
MORE_SAMPLES = SLOW.assign(samples=SLOW["samples"].where(SLOW["host"] != "n2", 300.0))


@pytest.mark.parametrize(
    ("ranks", "hosts"),
    [
        pytest.param(rank_rows({"n2": 1.5}, runs=2), [], id="two-runs-are-too-few"),
        pytest.param(rank_rows({"n2": 1.5}, runs=3), ["n2"], id="three-runs"),
        pytest.param(other_runs(), [], id="only-within-a-run"),
        pytest.param(
            SLOW[(SLOW["host"] != "n1") | (SLOW["rank"] % 2 == 0)], ["n2"], id="fewer-ranks-by-design"
        ),
        pytest.param(MORE_SAMPLES, [], id="more-samples-by-design"),
    ],
)
def test_a_slow_node_is_slower_than_alike_nodes_of_three_runs(ranks, hosts):
    assert [node.host for node in slow_nodes_of(rank_records(ranks))] == hosts


def test_at_most_1_percent_of_simulated_studies_call_an_equal_node_slow() -> None:
    """A second alarm in 60 studies would be above 1 %."""
    draw = np.random.default_rng(8)
    alarms = 0
    for _ in range(60):
        ranks = rank_rows({}, runs=4)
        factor = np.exp(draw.normal(0, 0.1, len(ranks) // 2)).repeat(2)
        alarms += bool(slow_nodes_of(rank_records(ranks.assign(step_time_sec=0.3 * factor + 0.1))))
    assert alarms <= 1


def test_the_table_of_nodes_compares_nodes_of_the_same_run_only(tmp_path: Path) -> None:
    """Run 1 uses n1 and n2, the twice as slow run 2 uses n3 and n4; in both, the second node is 10 % slower."""
    folder = finished(tmp_path / "study", [make_cell(2, batch=64)], repeats=2)
    study = load_study(folder)
    for place, attempt in enumerate(run.folder or "" for run in study.runs):
        useful = (1 + place) * np.array([0.1, 0.11])
        rows = pd.DataFrame(
            {"epoch": 1, "rank": [0, 1], "local_rank": 0, "host": [f"n{2 * place + 1}", f"n{2 * place + 2}"]}
        )
        rows = rows.assign(
            step_time_sec=useful.max() + 0.01, comm_exposed_time_sec=useful.max() + 0.01 - useful
        )
        rows.reindex(columns=list(RANKS_COLUMNS)).to_csv(Path(attempt, "ranks.csv"), index=False)
    study = load_study(seal(folder))
    means = rank_means(CheckedStudy.of(study))
    table = pd.DataFrame(nodes_table(means)).set_index("host")
    assert table["n"].to_dict() == {"n1": 1, "n2": 1, "n3": 1, "n4": 1}
    expected = {"n1": 0.0, "n2": 0.01 / 0.12, "n3": 0.0, "n4": 0.02 / 0.23}
    assert table["beyond_usual"].to_dict() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("steps", "longer", "paused", "is_found"),
    [
        *[(10, 1.9, 1.9, False), (10, 2.1, 2.1, True), (50, 4.5, 4.5, False), (50, 5.5, 5.5, True)],
        *[(10, 4, 2.1, True), (10, 4, 1.9, False), (10, 4, 0, False), (10, 4, np.nan, False)],
    ],
)
def test_a_pause_makes_windows_differ_by_more_than_two_steps_and_a_tenth(steps, longer, paused, is_found):
    rows = [
        {"run_id": "r1", "cell_id": "cell", "epoch": 1, "rank": rank, "steps": steps}
        | {"window_time_sec": time, "paused_time_sec": 0.3 + pause}
        for rank, (time, pause) in enumerate(((steps * 0.1, paused * 0.1), ((steps + longer) * 0.1, 0)))
    ]
    assert len(unequal_windows(rank_records(pd.DataFrame(rows)))) == is_found
    assert not len(unequal_windows(rank_records(pd.DataFrame(rows).assign(window_time_sec=np.nan))))


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
