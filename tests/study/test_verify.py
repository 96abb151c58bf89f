"""Checks of a run: values that were not measured are neither right nor wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.study.findings import ForeignCpu
from bench.study.ledger import End, FailureClass, Record, RunState
from bench.study.plan_json import PlannedStudy
from bench.study.reasons import ExitCode, LogCause
from bench.study.run_json import next_attempt
from bench.study.verify import Verification, verify_run
from ddp_scaling_bench.measure.findings import ModelNotCalled, SharedCores
from tests.commands.command_line import bench, refusal
from tests.matrices import command, matrix, planned_study

MATRIX = matrix("own", axes={"tasks_per_node": [2]}, batch=8, workload=command("true"), repeats=1)
RUN = "n1x2-gloo-torchrun-b8-r1"
UNMEASURED = ("joined", "world size", "backend", "nodes", "global batch", "trains together")


@pytest.fixture
def study(tmp_path) -> PlannedStudy:
    """Return a study with a completed run of a command that measures nothing."""
    study = planned_study(tmp_path, MATRIX)
    (run,) = study.runs
    assert run.run_id == RUN
    attempt = next_attempt(study, run, Record(run_id=RUN))
    attempt.claim(study)
    study.ledger.append([Record(run_id=RUN, attempt=1).ended(End(state=RunState.COMPLETED, exit_code=0))])
    return study


def folder(study: PlannedStudy) -> Path:
    return study.folder.attempt(RUN, 1).path


def verify(study: PlannedStudy, end: End | None = None, **options: Any) -> Verification:
    """Verify the run, or the run with another end."""
    record = study.records()[RUN]
    record = record.ended(end) if end else record
    return verify_run(study.run_folder(record), record, study.cell_of(RUN), **options)


def test_a_run_that_has_not_ended_neither_passes_nor_fails(study):
    for state in (RunState.RUNNING, RunState.PLANNED):
        record = Record(run_id=RUN, attempt=1, state=state, remark="Priority")
        verdict = verify_run(study.run_folder(record), record, study.cell_of(RUN))
        assert (verdict.passed, [*verdict.checks]) == (False, [])


def test_a_run_that_was_not_started_is_not_yet_run(study):
    study.ledger.append([Record(run_id=RUN, attempt=1, state=RunState.PLANNED, remark="withdrawn")])
    for target in ("own", f"own/{RUN}", f"results/own/runs/{RUN}", "n1x2"):
        done = bench("verify", target, cwd=study.folder.path.parents[1])
        assert (done.returncode, done.stderr) == (1, "")
        shown = f"--    {RUN}: not yet run (planned: withdrawn)\n0 of 1 runs pass; 1 not yet run\n"
        assert done.stdout == shown


def test_what_a_failed_run_did_not_write_is_no_further_failure(study):
    training = matrix("own", axes={"tasks_per_node": [2]}, batch=8, repeats=1)
    planned = planned_study(study.folder.path.parent, training, results=study.folder.path / "x")
    (folder(study) / "SHA256SUMS").unlink(missing_ok=True)
    line = {"path": "job.err", "line": 3, "text": "  train.py: error: unrecognized arguments: --bach"}
    end = End(state=RunState.FAILED, reasons=(ExitCode(exit_code=2),), log_line=line)
    record = study.records()[RUN].ended(end)
    verdict = verify_run(study.run_folder(record), record, planned.cell_of(RUN))
    assert [str(one) for one in verdict.failures] == [
        "FAIL  state: failed: exit code 2; job.err:3: train.py: error: unrecognized arguments: --bach"
    ]


def test_a_failed_check_such_as_other_options_fails_a_run_with_unmeasured_values(study):
    (folder(study) / "env.json").write_text('{"joined": {"ranks": 1}, "backend": "nccl", "world_size": 2}')
    verdict = verify(study)
    assert not verdict.passed
    outcomes = {check.name: check.outcome for check in verdict.checks}
    names = ("joined", "backend", "world size", "nodes", "global batch")
    assert [outcomes[name] for name in names] == ["failed", "failed", "ok", "failed", "not measured"]
    options = {"device": "cpu", "epochs": 7, "optimizer": "sgd"}
    (folder(study) / "env.json").write_text(json.dumps({"workload": options}))
    (check,) = (check for check in verify(study).failures if check.name == "options")
    assert (check.found, check.expected) == ("epochs 7", f"epochs {study.cell_of(RUN).workload['epochs']}")


@pytest.mark.parametrize(("options", "code"), [((), 0), (("--strict",), 3)])
def test_the_command_prints_what_was_not_measured(study, options, code):
    done = bench("verify", str(folder(study)), *options, cwd=study.folder.path.parent)
    assert done.returncode == code
    assert done.stdout.splitlines() == [
        f"--    {RUN}",
        "  ok    state: completed",
        "  ok    files: complete",
        *(f"  --    {name}: not measured" for name in UNMEASURED),
        "0 of 1 runs pass; 1 measured in part, without a failed check",
        *(f"1 of 1 runs: {name} not measured" for name in UNMEASURED),
    ]
    done = bench("verify", str(folder(study)), *options, "--json", cwd=study.folder.path.parent)
    content = json.loads(done.stdout)
    assert (done.returncode, content["passed"]) == (code, True)
    outcomes = {check["check"]: check["outcome"] for check in content["runs"][0]["checks"]}
    assert outcomes == {"state": "ok", "files": "ok", **dict.fromkeys(UNMEASURED, "not measured")}


def test_warnings_about_cores_and_threads_are_shown_and_fail_no_run(study):
    shared = SharedCores(ranks=4, threads=4, cores=2, machines=(("n1",),))
    found = [one.as_json() for one in (shared, ModelNotCalled())]
    (folder(study) / "env.json").write_text(json.dumps({"facts": found}))
    assert verify(study).warnings == [shared]
    done = bench("verify", str(folder(study)), cwd=study.folder.path.parent)
    assert f"  warn  {shared}" in done.stdout.splitlines()
    content = json.loads(bench("verify", str(folder(study)), "--json", cwd=study.folder.path.parent).stdout)
    assert content["runs"][0]["warnings"] == [{**found[0], "message": shared.message}]


def test_the_end_of_a_failed_run_is_shown_with_class_and_cause(study):
    end = End(
        state=RunState.FAILED,
        reasons=(ExitCode(exit_code=1),),
        failure_class=FailureClass.OUT_OF_MEMORY,
        cause=LogCause(cause="oom-gpu", remedy="a smaller batch"),
        disturbed=(ForeignCpu(subject=("n1",), start="a", end="b"),),
        warnings=(LogCause(cause="slow-save", path="job.err", line=3, remedy="save less"),),
    )
    verdict = verify(study, end)
    assert str(verdict.failures[0]) == (
        "FAIL  state: failed (out-of-memory): oom-gpu; exit code 1; a smaller batch"
    )
    assert list(map(str, verdict.warnings)) == [
        "foreign-cpu: CPU time of foreign processes on n1 from a to b",
        "slow-save (job.err:3): save less",
    ]


def test_the_hosts_of_the_ranks_are_those_of_the_job(study):
    hosts = [{"host": "n1", "ranks": [0]}, {"host": "n2.cluster.org", "ranks": [1]}]
    (folder(study) / "env.json").write_text(json.dumps({"hosts": hosts}))
    for allocated, outcome, found in (
        (("n1", "n2"), "ok", "n1, n2.cluster.org"),
        (("n1.cluster.org", "n2"), "ok", "n1, n2.cluster.org"),
        (("n1", "n2.other.org"), "failed", "n2.cluster.org"),
    ):
        (check,) = (check for check in verify(study, allocated=allocated).checks if check.name == "hosts")
        assert (check.outcome, check.found) == (outcome, found)


def test_a_folder_outside_of_a_study_is_an_error_with_a_remedy(study, tmp_path):
    folder(study).rename(tmp_path / "attempt-1")
    said = refusal("verify", str(tmp_path / "attempt-1"), cwd=tmp_path)
    assert "is not in the folder of a study that contains the run; give the folder of a run" in said
