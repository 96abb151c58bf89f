"""A study's folder is loaded as frames, with reasons for missing or broken files."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from analysis.data.load import load_study
from analysis.stats.measured import measure
from bench.errors import BenchError
from bench.finding import messages
from bench.study.checksums import write_sums
from bench.study.layout import RunFolder, StudyFolder
from bench.study.records import EpochRow, header
from tests.analysis import studies
from tests.common import edited_csv, edited_json, raised

RUN = "n1x1-gloo-srun-b64-r1"


def attempt(path: Path, run: str = RUN, number: int = 1) -> Path:
    return StudyFolder(path).attempt(run, number).path


def row(path: Path, run: str = RUN) -> pd.Series:
    runs = load_study(path).runs
    return runs[runs["run_id"] == run].iloc[0]


def test_epochs_are_the_rows_of_the_files(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", repeats=2)
    study = load_study(path)
    assert set(study.epochs["run_id"]) == set(study.runs["run_id"])
    for run_id, epochs in study.epochs.groupby("run_id", observed=True):
        expected = pd.read_csv(attempt(path, str(run_id)) / "metrics.csv")
        for name in ("throughput_samples_per_sec", "samples", "load_balance"):
            assert epochs[name].to_list() == expected[name].to_list()


def test_a_run_that_the_ledger_does_not_name_is_planned_and_the_latest_attempt_counts(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", repeats=1)
    shutil.rmtree(attempt(path).parent)
    ledger = path / "ledger.jsonl"
    ledger.write_text("".join(line for line in ledger.read_text().splitlines(True) if RUN not in line))
    other = "n2x1-gloo-srun-b32-r1"
    lost = {"state": "failed", "reason": "node n2 was lost", "failure_class": "node-failure"}
    for number, values in ((10, lost), (9, {})):
        shutil.copytree(attempt(path, other), attempt(path, other, number))
        studies.change_run(path, other, attempt=number, **values)
    missing, tried = row(path), row(path, other)
    assert (missing["state"], missing["reason"], pd.isna(missing["attempt"])) == ("planned", "", True)
    assert (tried["attempt"], tried["state"], tried["reason"]) == (10, "failed", "node n2 was lost")
    assert tried["failure_class"] == "node-failure"


@pytest.mark.parametrize(
    ("spoil", "state", "reason"),
    [
        (lambda f: shutil.rmtree(f), "completed", "the folder of attempt 1 is missing"),
        (
            lambda f: ((f / "metrics.csv").write_text(header(EpochRow)), write_sums(RunFolder(f))),
            "completed",
            "metrics.csv has no epoch with samples and a throughput",
        ),
    ],
)
def test_a_missing_or_broken_file_is_a_reason(tmp_path: Path, spoil: Any, state: str, reason: str) -> None:
    path = studies.finished(tmp_path / "s", repeats=1)
    spoil(attempt(path))
    runs = measure(load_study(path)).runs
    found = runs[runs["run_id"] == RUN].iloc[0]
    assert (found["state"], messages(found["facts"]), found["measured"]) == (state, reason, False)
    assert runs["measured"].sum() == 3


def test_a_broken_line_of_the_ledger_is_skipped(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", repeats=1)
    before = row(path)
    line = {"run_id": RUN, "attempt": 1, "state": "failed"}
    odd: list[dict[str, Any]] = [{"state": "exploded"}, {"exit_code": "nine"}, {"started_at": 17}]
    with (path / "ledger.jsonl").open("a") as ledger:
        ledger.writelines(json.dumps(line | one) + "\n" for one in odd)
        ledger.write('{"run_id": "' + RUN)
    pd.testing.assert_series_equal(row(path), before)


def test_a_cell_without_metrics_has_a_reason_of_its_own(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", repeats=1)
    with edited_json(path / "plan.json") as plan:
        plan["cells"][0] |= {"argv": ["true"], "planned_epochs": None, "metrics": {"source": "none"}}
    (attempt(path) / "metrics.csv").unlink()
    assert row(path)["reason"] == "the matrix asks for no metrics (metrics: none)"


def test_partial_results_of_a_failed_run_do_not_count(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", repeats=1)
    studies.change_run(path, RUN, state="failed", reason="killed")
    study = load_study(path)
    assert (study.epochs["run_id"] == RUN).sum() == 3
    runs = measure(study).runs
    assert not runs.loc[runs["run_id"] == RUN, "measured"].item()


def test_samples_per_step_other_than_planned_are_a_reason(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", repeats=1)
    with edited_csv(attempt(path) / "metrics.csv") as metrics:
        metrics[["samples", "epoch_time_sec"]] /= 2
    runs = measure(load_study(path)).runs
    found = runs[runs["run_id"] == RUN].iloc[0]
    assert messages(found["facts"]) == "32.00 samples per step, but the plan's global batch is 64"
    assert found["measured"]


def test_folders_that_are_not_in_the_plan_are_ignored_with_a_remark(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", repeats=1)
    for name in ("stranger", "x\x1b[31m"):
        (path / "runs" / name / "attempt-1").mkdir(parents=True)
    (path / "runs" / ".hidden").mkdir()
    study = load_study(path)
    assert study.remarks == ["Not in the plan and ignored: 2 folders in runs/ (stranger and x\ufffd[31m)"]
    assert len(study.runs) == 4


def test_ranks_and_environments_are_read_on_request(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", repeats=1)
    (attempt(path) / "env.json").write_text("{")
    study = load_study(path)
    assert "ranks" not in vars(study)
    ranks = study.ranks_of(study.runs["run_id"])
    assert [*Counter(row.run_id for row in ranks if row.epoch == 1).values()] == [1, 2, 4, 8]
    assert ranks[0].host == "n1"
    assert set(study.envs_of(study.runs["run_id"])) == set(study.runs["run_id"]) - {RUN}
    assert {row.run_id for row in study.ranks_of([RUN])} == {RUN}


def test_a_folder_without_a_plan_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    assert raised(BenchError, load_study, tmp_path) == (
        f"{tmp_path}/plan.json: the study's plan does not exist; "
        "give the folder of a study, such as results/<study>, or plan one: bench plan MATRIX"
    )


FILES = ("run.json", "metrics.csv", "env.json", "ranks.csv", "steps.csv")


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from(FILES))
def test_no_bytes_in_a_runs_files_stop_the_loading(tmp_path: Path, data: st.DataObject, name: str) -> None:
    path = tmp_path / "s"
    if not path.exists():
        studies.finished(path, studies.strong(sizes=(1, 2)), repeats=1)
    target = attempt(path) / name
    whole = target.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    spoiled = (
        whole[:cut] + data.draw(st.binary(max_size=40)) + whole[data.draw(st.integers(cut, len(whole))) :]
    )
    target.write_bytes(spoiled)
    try:
        study = load_study(path)
        frames = measure(study)
        assert len(frames.runs) == 2
        assert len(study.ranks_of(study.runs["run_id"])) >= 0
        assert len(study.envs_of(study.runs["run_id"])) <= 2
    finally:
        target.write_bytes(whole)
