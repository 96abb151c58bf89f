"""The doctor's cause of a failed run in status, verify, the ledger and the report."""

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.report.write import write_report
from bench.jobs.end import end_of
from bench.study.layout import StudyFolder
from bench.study.plan_json import open_study
from ddp_scaling_bench.measure.findings import NoWindow
from tests.analysis import studies
from tests.commands.command_line import bench
from tests.common import change_json
from tests.matrices import SHORT, matrix, training


@pytest.fixture(scope="module")
def failed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fails")
    text = matrix("fails", axes={"tasks_per_node": [1]}, workload=training(data="/nowhere/at all", **SHORT))
    (folder / "fails.yaml").write_text(text)
    assert bench("plan", "fails.yaml", cwd=folder).returncode == 0
    done = bench("submit", cwd=folder)
    assert done.returncode == 1
    assert "1 failed: `bench status fails` shows why" in done.stderr
    return folder


def test_the_doctor_reads_a_run_by_its_name_and_by_its_folder(failed):
    run_id = "n1x1-gloo-torchrun-b4-r1"
    by_name = bench("doctor", run_id, "--json", cwd=failed)
    by_folder = bench("doctor", f"results/fails/runs/{run_id}/attempt-1", "--json", cwd=failed)
    assert by_name.returncode == by_folder.returncode == 1
    assert by_name.stdout == by_folder.stdout
    study = StudyFolder(failed / "results/fails")
    content = study.plan_json.read_text()
    study.plan_json.write_text("{")  # without a plan, only the logs are read
    assert "bench-error" in bench("doctor", str(study.runs / run_id), cwd=failed).stdout
    study.plan_json.write_text(content)
    done = bench("doctor", "no-such-run", cwd=failed)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no-such-run is not a known log, study, run or job; give a log file")


def test_the_reason_is_the_one_that_the_rank_wrote(failed):
    (run,) = json.loads(bench("status", "--json", cwd=failed).stdout)["runs"]
    (reason,) = run["reasons"]
    assert (reason["kind"], reason["message"]) == ("rank-failed", run["reason"])
    assert "/nowhere/at all" in run["reason"]


def settled(root: Path, err: str) -> dict[str, Any]:
    """End the run with exit code 1 and this text on standard error, and return its line in the ledger."""
    study = open_study(StudyFolder(root / "results" / "fails"))
    (record,) = study.records().values()
    folder = study.folder.attempt(record.run_id, 1)
    folder.err.write_text(err)
    record = record.ended(end_of(folder, study.cell_of(record.run_id), None))
    study.ledger.append([record])
    return record.as_json()


def test_a_known_cause_is_stored_with_the_run_and_shown(failed, nothing_drawn):
    content = settled(
        failed,
        "torch.distributed.DistStoreError: Timed out after 3601 seconds waiting for clients. 1/16 clients joined.\n",
    )
    assert (content["cause"]["values"]["cause"], content["cause"]["values"]["line"]) == ("missing-srun", 1)
    cause = "missing-srun: torch.distributed.DistStoreError: Timed out after 3601 seconds"
    assert cause in bench("status", cwd=failed).stdout
    assert f": {cause}" in bench("verify", cwd=failed).stdout
    page = bench("report", cwd=failed)
    assert page.returncode == 1, "no run has a throughput"
    assert "missing-srun" in (failed / "results/fails/report/index.html").read_text()


def test_without_a_known_cause_the_page_shows_the_line_of_the_error(failed, nothing_drawn):
    error = "ERROR feature store answered 503 for shard 7"
    content = settled(
        failed, f"reading\nshard 7\n{error}\nsrun: error: n1: task 0: Exited with exit code 1\n"
    )
    assert (content.get("cause"), content["log_line"]) == (
        None,
        {"path": "job.err", "line": 3, "text": error},
    )
    (run,) = json.loads(bench("status", "--json", cwd=failed).stdout)["runs"]
    assert run["log_line"] == content["log_line"]
    page = write_report(failed / "results/fails").page.read_text(encoding="utf-8")
    assert f"job.err:3: {error}" in page


def test_a_finding_of_a_run_is_below_it_in_status_and_on_the_page(tmp_path, nothing_drawn):
    study = studies.finished(tmp_path / "found")
    finding = NoWindow(steps=6)
    change_json(min(study.glob("runs/*/attempt-1/env.json")), facts=[finding.as_json()])
    lines = bench("status", "./found", "--all", cwd=tmp_path).stdout.splitlines()
    (place,) = (at for at, line in enumerate(lines) if line.strip() == str(finding))
    shown = {**finding.as_json(), "message": finding.message}
    content = json.loads(bench("status", "./found", "--json", cwd=tmp_path).stdout)
    (name,) = (run["run_id"] for run in content["runs"] if shown in run["findings"])
    assert name.replace("-gloo-srun", "") in lines[place - 1]
    assert finding.message in json.dumps(
        json.loads(bench("report", "./found", "--json", cwd=tmp_path).stdout)
    )
    page = (study / "report" / "index.html").read_text()
    assert finding.message in page
