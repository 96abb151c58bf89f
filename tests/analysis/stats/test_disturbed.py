"""Disturbed runs are left out, unless their condition is common to all runs of their cell."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.checks.scaling_table import scaling_table
from analysis.data.load import load_study
from analysis.report.tables import csv_table
from analysis.stats.attempts import all_attempts
from analysis.stats.measured import SlowRun, common_reasons, measure
from tests.analysis.studies import (
    StudyBuilder,
    change_run,
    finished,
    frame,
    recorded,
    runs_frame,
    scale_rate,
    strong,
)
from tests.commands.command_line import bench
from tests.common import read_rows


def entry(reason: str, node: str = "n1") -> dict[str, Any]:
    times = {"start": "2026-01-02T03:04:10Z", "end": "2026-01-02T03:05:00Z"}
    return recorded(reason, node, **times)


def disturbed(folder: Path, cells: Mapping[str, list[list[str] | None]]) -> Path:
    """Write a study of 1, 2 and 4 nodes with three repeats; ``cells`` gives the reasons of each run."""
    builder = StudyBuilder(folder, strong(64, sizes=(1, 2, 4)), repeats=3)
    path = builder.write()
    for cell in builder.cells:
        runs = cells.get(str(cell.nodes), [None] * 3)
        for repeat, reasons in enumerate(runs, 1):
            if reasons is not None:
                change_run(path, f"{cell.cell_id}-r{repeat}", disturbed=list(map(entry, reasons)))
    return path


@pytest.mark.parametrize(
    ("runs", "left_out"),
    [
        ([["foreign-cpu"], [], None], [True, False, False]),
        # The same condition in all runs is a property of the study.
        ([["study-run"], ["study-run", "foreign-cpu"], ["study-run"]], [False, True, False]),
        # No run is undisturbed.
        ([["study-run"], ["foreign-cpu"], ["link-errors"]], [False, False, False]),
    ],
)
def test_a_disturbed_run_is_left_out_if_an_undisturbed_one_exists(tmp_path, runs, left_out):
    study = load_study(disturbed(tmp_path / "s", {"2": runs}))
    own = sorted(
        (run for run in measure(study).runs if run.cell_id.startswith("n2")), key=lambda run: run.repeat
    )
    assert [run.left_out for run in own] == left_out
    assert [run.measured for run in own] == [not out for out in left_out]
    assert not any(run.left_out for run in measure(study, include_disturbed=True).runs)


def test_results_mean_the_undisturbed_runs_and_those_of_all_runs_stand_beside_them(tmp_path: Path) -> None:
    path = disturbed(tmp_path / "s", {"2": [["foreign-cpu"], [], []], "4": [["study-run"]] * 3})
    study = load_study(path)
    rows = frame(scaling_table(study)).set_index("nodes")
    runs = measure(study, include_disturbed=True).runs
    of_two = [run.throughput_samples_per_sec for run in runs if run.run_id.startswith("n2")]
    assert rows.loc[2, "n"] == 2
    assert rows.loc[2, "throughput_samples_per_sec"] == pytest.approx(
        1 / np.mean([1 / x for x in of_two[1:]])
    )
    assert rows.loc[2, "throughput_all"] == pytest.approx(1 / np.mean([1 / x for x in of_two]))
    speedup = rows.loc[2, "throughput_all"] / rows.loc[1, "throughput_all"]
    assert rows.loc[2, "efficiency_all"] == pytest.approx(speedup / 2)
    assert rows.loc[2, "reason"] == "2 of 3 runs counted: 1 disturbed by other programs"
    assert rows["n_disturbed"].fillna(-1).to_list() == [-1, 1, 3]
    assert (rows.loc[4, "n"], rows.loc[4, "reason"]) == (3, "")
    common = common_reasons(measure(study).runs)
    assert [common[cell] for cell in rows["cell_id"]] == [set(), set(), {"study-run"}]


@pytest.mark.usefixtures("nothing_drawn")
def test_the_report_says_which_runs_it_leaves_out_and_can_use_all(tmp_path: Path) -> None:
    path = disturbed(tmp_path / "s", {"2": [["foreign-cpu"], [], []]})
    assert bench("report", str(path), cwd=tmp_path).returncode == 0
    words = "CPU time of foreign processes on n1 from 2026-01-02T03:04:10Z to 2026-01-02T03:05:00Z"
    assert f"left out: disturbed by {words}" in (path / "report/index.html").read_text()
    assert counted(path) == {"1": ("3", ""), "2": ("2", "1"), "4": ("3", "")}
    shown = {
        row["run_id"]: row["disturbed"] for row in read_rows(path / "report/runs.csv") if row["disturbed"]
    }
    assert list(shown.values()) == [words]
    assert bench("report", str(path), "--include-disturbed", cwd=tmp_path).returncode == 0
    assert counted(path)["2"] == ("3", "1")
    table = tmp_path / "t.csv"
    table.write_text("nodes,throughput,mode\n1,10,strong\n2,19,strong\n")
    refused = bench("report", str(table), "--include-disturbed", cwd=tmp_path)
    assert refused.returncode == 2
    assert "--include-disturbed is for a study, not for a table" in refused.stderr


def counted(path: Path) -> dict[str, tuple[str, str]]:
    return {row["nodes"]: (row["n"], row["n_disturbed"]) for row in read_rows(path / "report/scaling.csv")}


def test_a_slow_run_without_a_recorded_reason_is_named_with_its_nodes_and_kept(tmp_path: Path) -> None:
    builder = StudyBuilder(tmp_path / "s", strong(64, sizes=(1, 2)), repeats=6)
    path = builder.write()
    (cell,) = (cell.cell_id for cell in builder.cells if cell.nodes == 2)
    scale_rate(path / f"runs/{cell}-r4/attempt-1/metrics.csv", 0.5)
    assert not any(run.facts for run in measure(load_study(path)).runs), "nothing was recorded"
    change_run(path, f"{cell}-r4", disturbed=[], hosts="n[3-4]")
    runs = runs_frame(measure(load_study(path)).runs).set_index("run_id")
    assert runs["facts"][f"{cell}-r4"] == (SlowRun(hosts="n[3-4]"),)
    assert runs["measured"].all()


def repeated(path: Path, run_id: str, **changes: Any) -> None:
    """Make the only attempt of a run its second one; the first one, with ``changes``, failed."""
    run = path / "runs" / run_id
    (run / "attempt-1").rename(run / "attempt-2")
    (run / "attempt-1").mkdir()
    change_run(path, run_id, attempt=2)
    failed = {"state": "failed", "failure_class": "killed", "reason": "rank 0 was killed by SIGKILL"}
    change_run(path, run_id, attempt=1, **{**failed, **changes})


def test_earlier_attempts_are_rows_before_the_latest_and_change_no_number(tmp_path):
    path = finished(tmp_path / "s", strong(64, sizes=(1, 2)), repeats=3)
    frames = measure(load_study(path))
    before = csv_table(scaling_table(frames))
    run_id = "n2x1-gloo-srun-b32-r2"
    repeated(path, run_id, ended_at="2026-01-02T03:34:05.000Z")
    study = load_study(path)
    frames = measure(study)
    assert csv_table(scaling_table(frames)) == before
    attempts = all_attempts(study, frames.runs)
    place = [run.run_id for run in attempts].index(run_id)
    assert [run.latest for run in attempts] == [at != place for at in range(7)]
    first, second = attempts[place : place + 2]
    assert (second.run_id, first.attempt, second.attempt) == (run_id, 1, 2)
    assert (first.failure_class, first.measured, first.node_hours) == ("killed", False, 1.0)
    assert second.node_hours == pytest.approx(2 * 120 / 3600)
    assert math.isnan(first.throughput_samples_per_sec)


def test_an_attempt_that_was_withdrawn_before_it_started_is_no_row(tmp_path):
    path = finished(tmp_path / "s", strong(64, sizes=(1,)), repeats=2)
    repeated(path, "n1x1-gloo-srun-b64-r1", state="planned", failure_class=None)
    assert len(load_study(path).earlier) == 0
