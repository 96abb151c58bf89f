"""Advice: times, waits, costs, success rates and texts."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from analysis.advise.options import Advice, Wait, options_of, rank
from analysis.advise.text import config, remarks, summary, table_rows
from analysis.data.load import Study, load_study
from analysis.stats.attempts import Success, cell_success
from analysis.stats.measured import measure
from bench.matrix.cell import Cell
from tests.analysis.studies import State, Timing, change_run, environment, finished, runs_frame, strong, weak
from tests.common import edited_csv

SAMPLES, EPOCHS = 1_300_000, 90
LOST = ("failed", "node lost", "node-failure")


def gpu_study(path: Path, cells: list[Cell], *, gpu: str, sample_s: float, **options: Any) -> Study:
    """Return a finished study on GPUs of one kind."""
    for cell in cells:
        cell.workload = {**cell.workload, "device": "cuda"}

    def env(cell: Cell) -> dict[str, Any]:
        return {**environment(cell), "device": "cuda", "device_name": gpu}

    timing = Timing(sample_s=sample_s, comm_s=2e-4)
    return load_study(finished(path, cells, timing=timing, env=env, **options))


@pytest.fixture
def l40s(tmp_path):
    cells = strong(352, sizes=(4, 8), per_node=4, backend="nccl")
    return gpu_study(tmp_path / "l40s", cells, gpu="NVIDIA L40S", sample_s=2.9e-3, noise=0.002)


@pytest.fixture
def h200(tmp_path):
    cells = strong(352, sizes=(4, 8), per_node=8, backend="nccl")
    return gpu_study(tmp_path / "h200", cells, gpu="NVIDIA H200", sample_s=2.37e-3, noise=0.002)


def advise(waits: Mapping[str, float | None], **studies: Study) -> Advice:
    found = options_of(studies, samples=SAMPLES, epochs=EPOCHS)
    known = {
        option.layout: Wait(waits[option.study], "as given (--wait)")
        for option in found.options
        if option.study in waits
    }
    return rank(found, known)


def test_two_slower_nodes_beat_a_faster_one_only_if_that_one_has_a_wait(l40s, h200):
    found = advise({"l40s": 0, "h200": 6.5 * 3600}, l40s=l40s, h200=h200)
    assert summary(found)[0] == "Ends first: 2 nodes x 4 L40S (l40s): about 12 h, can start now."
    row = next(row for row in table_rows(found) if row[0] == "h200")
    assert (row[6], row[8]) == ("6.5 h", "16.5 h")
    assert not any("distinguishable" in text for text in summary(found)), "all differences are clear"
    assert {option.distinguishable for option in found.options} == {None, True}
    found = advise({"l40s": 0, "h200": 0}, l40s=l40s, h200=h200)
    assert summary(found)[0] == "Ends first: 8 H200 (h200): about 10 h, can start now."


def test_a_training_is_whole_steps_at_the_measured_rate_with_the_interval_of_one_further_run(l40s):
    row = advise({"l40s": 3600}, l40s=l40s).options[0]
    runs = runs_frame(measure(l40s).runs)
    steps = runs.loc[runs["cell_id"] == row.cell_id, "step_time_sec"].to_numpy(dtype=float)
    assert row.steps_per_epoch == math.ceil(SAMPLES / 352) == 3694
    assert row.epoch_s == pytest.approx(3694 * steps.mean())
    assert row.training_s == pytest.approx(90 * 3694 * steps.mean())
    assert row.total_s == pytest.approx(row.training_s + 3600)
    assert row.gpu_hours == pytest.approx(8 * row.training_s / 3600)
    assert row.node_hours == pytest.approx(2 * row.training_s / 3600)
    logs = np.log(steps)
    half = stats.t.ppf(0.95, len(logs) - 1) * logs.std(ddof=1) * math.sqrt(1 + 1 / len(logs))
    expected = [90 * 3694 * math.exp(logs.mean() + sign * half) for sign in (-1, 1)]
    assert [row.training_low_s, row.training_high_s] == pytest.approx(expected)


def test_measured_checkpoints_are_included(tmp_path, l40s):
    for file in l40s.folder.path.glob("runs/*/attempt-1/metrics.csv"):
        with edited_csv(file) as metrics:
            metrics["checkpoint_time_sec"] = 12.5
    before = advise({}, l40s=l40s).options[0]
    after = advise({}, l40s=load_study(l40s.folder.path)).options[0]
    assert after.epoch_s == pytest.approx(before.epoch_s + 12.5)


def test_first_cheapest_and_safest_can_be_different_options(tmp_path):
    def state(cell: Cell, repeat: int) -> State | None:
        return LOST if (cell.world_size, repeat) in {(8, 1), (8, 2), (1, 1)} else None

    cells = strong(352, sizes=(1, 2, 4, 8), per_node=8, backend="nccl")
    study = gpu_study(tmp_path / "s", cells, gpu="NVIDIA H200", sample_s=1e-3, repeats=6, state=state)
    found = advise({"s": 0}, s=study)
    assert [found.chosen(mark).gpus for mark in ("first", "cheapest", "safest")] == [8, 1, 4]
    first = found.options[0]
    assert (first.completed, first.attempted, first.success_rate) == (4, 6, pytest.approx(2 / 3))
    assert first.remark == "4 of 6 runs counted: 2 lost a node (node lost)"


def test_an_earlier_attempt_that_failed_counts_against_a_cell_and_a_cancelled_one_does_not(tmp_path):
    cancelled = {3: ("cancelled", "", None)}
    path = finished(tmp_path / "s", strong(sizes=(1,)), state=lambda _, repeat: cancelled.get(repeat))
    run = next((tmp_path / "s/runs").iterdir())
    (run / "attempt-1").rename(run / "attempt-2")
    change_run(tmp_path / "s", run.name, attempt=2)
    change_run(tmp_path / "s", run.name, attempt=1, state="failed")
    success = next(iter(cell_success(load_study(path)).values()))
    assert (success.completed, success.attempted) == (2, 3)


def test_wilsons_bound_agrees_with_scipy():
    for done, tried in ((3, 3), (30, 30), (2, 5), (0, 4)):
        expected = stats.binomtest(done, tried).proportion_ci(0.95, method="wilson").low
        assert Success(done, tried).low == pytest.approx(expected, abs=1e-12)
    assert Success(0, 0).low == 0.0


def test_options_of_different_global_batches_are_ranked_in_groups(tmp_path):
    cells = [*strong(64, sizes=(2, 4)), *weak(32, sizes=(4, 8))]
    found = advise({}, s=load_study(finished(tmp_path / "s", cells)))
    options = found.options
    groups = [group.options for group in found.groups()]
    assert [option for own in groups for option in own] == options
    for own in groups:
        assert len({option.global_batch for option in own}) == 1
        for mark in ("first", "cheapest", "safest"):
            assert sum(getattr(option, mark) for option in own) == 1
        (first,) = (option for option in own if option.first)
        assert first.total_s == min(option.total_s for option in own)
    texts = summary(found)
    headings = [f"With a global batch of {own[0].global_batch:.0f}:" for own in groups]
    assert [text for text in texts if text in headings] == headings
    assert (
        "Options with different global batches are ranked separately: their convergence is not comparable."
        in remarks(found)
    )


def test_a_cell_without_a_run_is_listed_last_with_its_reason(tmp_path):
    failed = {4: ("failed", "out of memory", "out-of-memory")}
    path = finished(
        tmp_path / "s", strong(sizes=(1, 2, 4)), state=lambda cell, _: failed.get(cell.world_size)
    )
    last = advise({"s": 0}, s=load_study(path)).options[-1]
    assert (last.kind, last.attempted, last.completed) == ("not measured", 3, 0)
    assert math.isnan(last.training_s)
    assert last.remark == "no run counted: 3 ran out of memory (out of memory)"
    assert {last.first, last.cheapest, last.safest} == {False}


def test_an_unknown_wait_has_no_total_unless_none_is_known(l40s, h200):
    found = advise({}, l40s=l40s)
    assert all(option.total_s == option.training_s for option in found.options)
    assert found.notes[-1] == "No queue wait is known, so totals are training times only"
    assert summary(found)[0] == "Ends first: 2 nodes x 4 L40S (l40s): about 12 h."
    found = advise({"l40s": 3600}, l40s=l40s, h200=h200)
    assert [option.study for option in found.options] == ["l40s", "l40s", "h200", "h200"]
    assert all(math.isnan(option.total_s) for option in found.options if option.study == "h200")
    assert "Options with an unknown queue wait have no total and are listed last" in found.notes


def test_an_option_that_slurm_refuses_is_listed_last_and_not_recommended(l40s):
    found = options_of({"l40s": l40s}, samples=1000, epochs=1)
    layouts = sorted({option.layout for option in found.options})
    for refused in ([layouts[-1]], layouts):
        advice = rank(found, {layout: Wait(None, "", "no", refused=layout in refused) for layout in layouts})
        assert not any(one.first for one in advice.options if one.layout in refused)
        last = advice.options[-1]
        assert (last.layout in refused, math.isnan(last.total_s)) == (True, True)
    assert summary(advice) == ["No advice: Slurm would start none of the measured options."]


def test_options_whose_interval_contains_1_are_not_distinguishable(tmp_path):
    cells = [*strong(sizes=(4,), backend="gloo"), *strong(sizes=(4,), backend="nccl")]
    study = load_study(finished(tmp_path / "s", cells, noise=0.05))
    found = advise({"s": 600}, s=study)
    first, other = found.options
    runs = runs_frame(measure(study).runs)
    steps = {
        row.cell_id: runs.loc[runs["cell_id"] == row.cell_id, "step_time_sec"].to_numpy(dtype=float)
        for row in (first, other)
    }
    # A wait is a constant: the ratio is that of wait + training.
    totals = [np.log(600 + 90 * row.steps_per_epoch * steps[row.cell_id]) for row in (other, first)]
    bounds = stats.ttest_ind(*totals, equal_var=False).confidence_interval(0.95)
    assert bounds.low < 0 < bounds.high
    assert (other.distinguishable, first.distinguishable) == (False, None)
    needed = other.runs_needed
    assert needed > len(totals[0])
    said = (
        f"about {needed:.0f} runs of each option would probably decide"
        if needed <= 100
        else "more than 100 runs of each option would be needed"
    )
    assert table_rows(found)[1][-1] == f"not distinguishable from the first: {said}"
    assert summary(found)[1] == (
        "Not distinguishable from this option (the 95 % interval of the ratio of total times contains 1): "
        f"{config(other)}, {said}."
    )
    assert {option.setting for option in found.options} == {"backend gloo", "backend nccl"}


def test_ranks_on_a_cpu_cost_node_hours(tmp_path):
    found = advise({"s": 0}, s=load_study(finished(tmp_path / "s", strong(sizes=(1, 2)))))
    assert all(math.isnan(option.gpu_hours) for option in found.options)
    assert found.chosen("cheapest").gpus == 1
    assert config(found.chosen("cheapest")) == "1 rank (s)"
    assert any(row[9].endswith(" node-h") for row in table_rows(found))
