"""Checks of a run: values that were not measured are neither right nor wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.facts import Fact
from bench.plan import make_plan
from bench.study.verify import Verification, verify_run
from bench.words import sentence
from tests.commands.command_line import bench
from tests.common import change_json
from tests.matrices import command, matrix

MATRIX = matrix("own", axes={"tasks_per_node": [2]}, batch=8, workload=command("true"), repeats=3)
UNMEASURED = {
    "processes": "2 with WORLD_SIZE 2",
    "ranks joined": "2 of 2",
    "world size": "2",
    "backend": "gloo",
    "nodes": "1",
    "global batch": "16",
}


@pytest.fixture
def run_folder(tmp_path) -> Path:
    """Return the folder of a completed run of a command that measures nothing."""
    matrix = tmp_path / "own.yaml"
    matrix.write_text(MATRIX)
    (cell,) = make_plan(matrix).cells
    folder = tmp_path / "attempt-1"
    folder.mkdir()
    content = {"run_id": "a-run", "state": "completed", "cell": cell.as_json()}
    (folder / "run.json").write_text(json.dumps(content))
    return folder


def test_what_was_not_measured_is_not_ok_and_does_not_fail_the_run(run_folder):
    verdict = verify_run(run_folder)
    assert verdict.passed
    unmeasured = {check.name: check for check in verdict.checks if check.passed is None}
    assert {name: check.expected for name, check in unmeasured.items()} == UNMEASURED
    assert str(unmeasured["backend"]) == "--    backend: not measured"
    assert unmeasured["backend"].as_json() == {
        "check": "backend",
        "outcome": "not measured",
        "passed": None,
        "found": None,
        "expected": "gloo",
    }


@pytest.mark.parametrize("state", ["queued", "running"])
def test_only_the_state_of_a_run_that_has_not_ended_is_checked(run_folder, state):
    change_json(run_folder / "run.json", state=state)
    verdict = verify_run(run_folder)
    assert [str(check) for check in verdict.checks] == [f"FAIL  state: {state}, expected completed"]


def test_a_failed_check_fails_a_run_with_unmeasured_values(run_folder):
    (run_folder / "env.json").write_text('{"backend": "nccl", "world_size": 2}')
    verdict: Verification = verify_run(run_folder)
    assert not verdict.passed
    outcomes = {check.name: check.outcome for check in verdict.checks}
    assert (outcomes["backend"], outcomes["world size"]) == ("failed", "ok")
    assert outcomes["global batch"] == "not measured"
    failed = next(check for check in verdict.failures if check.name == "backend")
    assert failed.as_json()["outcome"] == "failed"


def test_missing_accounting_is_not_measured(run_folder):
    path = run_folder / "run.json"
    change_json(path, accounting="none: sacct is not installed")
    verdict = verify_run(run_folder)
    check = next(check for check in verdict.checks if check.name == "accounting")
    assert verdict.passed
    assert check.outcome == "not measured"
    assert "none: sacct is not installed" in str(check)


def test_the_command_prints_both(run_folder):
    done = bench("verify", str(run_folder), cwd=run_folder.parent)
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[0], lines[-1]) == (0, "pass  a-run", "1 of 1 runs pass")
    assert lines[1:-1] == [
        "  ok    state: completed",
        "  ok    files: complete",
        *(f"  --    {name}: not measured" for name in UNMEASURED),
    ]
    content = json.loads(bench("verify", str(run_folder), "--json", cwd=run_folder.parent).stdout)
    assert content["passed"] is True
    outcomes = {check["check"]: check["outcome"] for check in content["runs"][0]["checks"]}
    assert outcomes == {"state": "ok", "files": "ok", **dict.fromkeys(UNMEASURED, "not measured")}


def test_warnings_about_cores_and_threads_are_shown_and_fail_no_run(run_folder):
    values = {"ranks": 4, "threads": 4, "cores": 2, "machines": [["n1"]]}
    facts = [Fact("shared-cores", values=values), Fact("model-not-called")]
    (run_folder / "env.json").write_text(json.dumps({"facts": [fact.as_json() for fact in facts]}))
    shared = sentence(facts[0])
    assert verify_run(run_folder).warnings == [shared]
    done = bench("verify", str(run_folder), cwd=run_folder.parent)
    assert done.stdout.splitlines()[-2] == f"  warn  {shared}"
    content = json.loads(bench("verify", str(run_folder), "--json", cwd=run_folder.parent).stdout)
    assert content["runs"][0]["warnings"] == [shared]
