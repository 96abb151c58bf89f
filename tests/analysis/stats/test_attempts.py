"""Earlier attempts of runs: their rows and costs, the reserve for failures, and the numbers that do not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.checks.scaling_table import scaling_table
from analysis.data.load import load_study
from analysis.report.tables import csv_table
from analysis.stats.attempts import all_attempts, reserve
from analysis.stats.measured import measure
from tests.analysis.studies import change_run, finished, strong


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
    place = attempts.index[attempts["run_id"] == run_id][0]
    assert attempts["latest"].to_list() == [at != place for at in range(7)]
    first, second = attempts.iloc[place], attempts.iloc[place + 1]
    assert (second["run_id"], first["attempt"], second["attempt"]) == (run_id, 1, 2)
    assert (first["failure_class"], first["measured"], first["node_hours"]) == ("killed", False, 1.0)
    assert second["node_hours"] == pytest.approx(2 * 120 / 3600)
    assert pd.isna(first["throughput_samples_per_sec"])


def test_an_attempt_that_was_withdrawn_before_it_started_is_no_row(tmp_path):
    path = finished(tmp_path / "s", strong(64, sizes=(1,)), repeats=2)
    repeated(path, "n1x1-gloo-srun-b64-r1", state="planned", failure_class=None)
    assert len(load_study(path).earlier) == 0


def test_the_reserve_is_the_mean_number_of_failures_before_the_first_success():
    p = 0.7
    failures = sum(n * p * (1 - p) ** n for n in range(200))
    assert reserve(p) == pytest.approx(failures)
    assert reserve(1.0) == 0.0
