"""Jobs that share nodes with a run are found, and disturb it only while it measures."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from bench.jobs.slurm.client import Slurm
from bench.jobs.slurm.settlement import Neighbourhood
from bench.study.conditions import Occupation
from bench.study.run_json import new_attempt, write_run
from tests.cluster.bed import Cluster
from tests.cluster.containers import wait_for
from tests.common import write_program
from tests.jobs.slurm_studies import MEASURE, Study, run_id, scripted_study, submitted

NOON = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def body(node: str, *, jobs: int = 1) -> str:
    """Return the script of a run on a node, on which in all so many ``jobs`` of this study execute at once."""
    # Slurm's times are whole seconds, and the accounting database can learn of a start some seconds later.
    begun = f'"$1/../../../begun-{node}-"'
    both = f"until [ $(ls {begun}* | wc -l) -ge {jobs} ]; do sleep 0.2; done; sleep 6"
    return f"#SBATCH --nodelist={node}\ntouch {begun}$SLURM_JOB_ID; {both}; {MEASURE}"


def shown(run: dict[str, Any]) -> set[tuple[str, str, str]]:
    return {(one["kind"], *one["subject"], *one["values"]["jobs"]) for one in run["disturbed"]}


def test_all_jobs_on_the_nodes_of_runs_are_found(tmp_path: Path, cluster: Cluster) -> None:
    study = scripted_study(
        tmp_path, [body("n1", jobs=2)] * 2 + [body("n2"), body("n3")], cluster.environment, name="neighbours"
    )
    options = ["--account=users", "--partition=l40s", "--output=/dev/null", "--parsable"]
    foreign = cluster.run(["sbatch", *options, "--nodelist=n2,n4", "--nodes=2", "--wrap=sleep 300"])
    job_id = foreign.stdout.strip()
    try:
        # The accounting database can learn of the start later than squeue.
        asked = ["sacct", "-nXP", "-j", job_id, "-o", "State,NodeList"]
        wait_for(lambda: cluster.run(asked).stdout.strip() == "RUNNING|n[2,4]", what="the foreign job")
        with submitted(study, "--wait"):
            runs = [study.run_json(run_id(number)) for number in (1, 2, 3, 4)]
            jobs = [run["job_id"] for run in runs]
            status = {
                run["run_id"]: run
                for run in json.loads(study.bench("status", "STUDY", "--json").stdout)["runs"]
            }
    finally:
        cluster.run(["scancel", job_id])
    expected = [
        {("study-run", "n1", jobs[1])},
        {("study-run", "n1", jobs[0])},
        {("foreign-job", "n2", job_id)},
        set(),
    ]
    assert [shown(run) for run in runs] == expected, [run["neighbours"] for run in runs]
    (neighbour,) = runs[2]["neighbours"]
    assert neighbour.keys() == {"job_id", "start", "end", "nodes"}
    assert (neighbour["job_id"], neighbour["end"], neighbour["nodes"]) == (job_id, None, ["n2"])
    assert status[run_id(3)]["disturbed"] == "a job that is not of the study on n2"
    assert status[run_id(4)]["disturbed"] == ""


def test_disturbed_runs_run_again_once(tmp_path: Path, cluster: Cluster) -> None:
    study = scripted_study(tmp_path, [body("n1", jobs=2)] * 2 + [body("n2")], cluster.environment)
    with submitted(study, "--wait"):
        again = study.bench("submit", "STUDY", "--dry-run")
        assert "0 of 3 runs would be started" in again.stdout
        done = study.bench("submit", "STUDY", "--retry-disturbed", "--max-queued=1", "--wait")
        assert done.returncode == 0, done.stderr
        records = study.status()
        attempts = {run: (one["attempt"], one["state"], one["disturbed"]) for run, one in records.items()}
        assert attempts == {
            run_id(1): (2, "completed", ""),
            run_id(2): (2, "completed", ""),
            run_id(3): (1, "completed", ""),
        }
        assert study.run_json(run_id(1), attempt=1)["disturbed"]
        assert study.jobs_per_run() == {run_id(1): 2, run_id(2): 2, run_id(3): 1}
        last = study.bench("submit", "STUDY", "--retry-disturbed")
        assert "nothing to start" in last.stderr


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return scripted_study(tmp_path / "study", ["true"] * 3, {})


class Commands:
    """A folder with scripts in place of sacct and sacctmgr."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "bin"
        self.folder.mkdir()
        self.slurm = Slurm(environment={"PATH": str(self.folder)})

    def add(self, name: str, out: str, *, code: int = 0) -> None:
        script = self.folder / name
        write_program(
            script, f"#!{sys.executable}\nimport sys\nsys.stdout.write({out!r})\nsys.exit({code})\n"
        )


def neighbourhood(study: Study, slurm: Slurm, *ended: Occupation, no_accounting: str = "") -> Neighbourhood:
    return Neighbourhood(study.planned, slurm, ended, {}, no_accounting)


def row(job: str, start: str, end: str, hosts: str) -> str:
    times = f"2026-11-22T11:00:00|2026-11-22T{start}|{(end and f'2026-11-22T{end}') or 'Unknown'}"
    return f"{job}|RUNNING|0:0||None|{times}|00:00:10|1|{hosts}||a|name\n"


def test_private_data_are_never_taken_for_an_empty_node(tmp_path: Path, study: Study) -> None:
    commands = Commands(tmp_path)
    commands.add("sacct", row("5", "12:00:00", "12:00:20", "n[1-2]") + row("6", "11:00:00", "", "n2"))
    run = Occupation("5", ("n1", "n2"), at(0), at(20))
    commands.add("sacctmgr", "PrivateData            = none\nPrivateData            = none\n")
    known = neighbourhood(study, commands.slurm, run).of(run)
    assert known.as_json() == [{"job_id": "6", "start": "2026-11-22T11:00:00Z", "end": None, "nodes": ["n2"]}]
    commands.add("sacctmgr", "PrivateData            = none\nPrivateData            = accounts,jobs,users\n")
    hidden = neighbourhood(study, commands.slurm, run).of(run)
    assert hidden.as_json() == "unknown: job data of other users are private (PrivateData)"
    assert [job.job_id for job in hidden.jobs] == ["6"]
    commands.add("sacctmgr", "sacctmgr: error: no permission", code=1)
    assert str(neighbourhood(study, commands.slurm, run).of(run).as_json()).startswith("unknown: ")
    (commands.folder / "sacct").unlink()
    assert "command not found" in str(neighbourhood(study, commands.slurm, run).of(run).as_json())


def test_without_accounting_only_the_studys_own_runs_are_known(tmp_path: Path, study: Study) -> None:
    planned = study.planned
    records = planned.records()
    for number, (start, end) in enumerate([(0, 20), (10, 30), (30, 40)], 1):
        record = records[run_id(number)]
        attempt = new_attempt(planned, next(r for r in planned.runs if r.run_id == record.run_id), record)
        times = {"started_at": at(start).isoformat(), "ended_at": at(end).isoformat()}
        allocation = {"kind": "job", "nodes": 1, "hosts": "n1"}
        write_run(
            attempt.folder, attempt.describe(planned, allocation=allocation, job_id=str(number), **times)
        )
        identity = {"run_id": record.run_id, "attempt": 1}
        planned.ledger.append("submitted", **identity, job_id=str(number))
        planned.ledger.append("ended", **identity, state="completed")
    run = Occupation("2", ("n1",), at(10), at(30))
    found = neighbourhood(study, Commands(tmp_path).slurm, run, no_accounting="it is disabled").of(run)
    assert found.as_json() == "unknown: it is disabled"
    assert [(job.job_id, job.nodes, job.of_study) for job in found.jobs] == [("1", ("n1",), True)]
