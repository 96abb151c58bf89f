"""Status of the runs of a pack, from what the pack's script wrote and rows of sacct, without a cluster."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bench.jobs.contract import Status
from bench.jobs.slurm.pack import run_status
from bench.jobs.slurm.parsing import parse_accounting
from bench.jobs.slurm.states import classify, step_statuses
from bench.study.files import write_json
from bench.study.layout import RunFolder, StudyFolder
from bench.study.ledger import RunState

BEGAN, ENDED = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"
JOB = Status(job_id="7", state=RunState.RUNNING, settled=False)

Folder = Callable[..., RunFolder]


@pytest.fixture
def folder(tmp_path) -> Folder:
    """Make the folder of a run; a run that has ended has an exit code and a reason for the end."""

    def make(
        run_id: str = "r1", code: int | None = None, by: str = "exit", end: int | None = None
    ) -> RunFolder:
        made = StudyFolder(tmp_path).attempt(run_id, 1)
        made.path.mkdir(parents=True, exist_ok=True)
        made.start.write_text(f"7 {BEGAN} n1 0\n")
        if code is not None:
            times = {"started": BEGAN, "ended": ENDED, "hosts": "n1,n2"}
            write_json(made.pack_end, {"exit_code": code, "by": by, **times})
        if end is not None:
            write_json(made.end, {"exit_code": end, "time": ENDED})
        return made

    return make


def row(shown: str, state: str, exits: str, name: str) -> str:
    user = "|" if "." in shown else "root|0"
    return (
        f"{shown}|{state}|{exits}|0:0||2026-01-01T00:00:00|2026-01-01T00:00:30|00:00:30|n1||{user}|{name}\n"
    )


def job(*steps: str, state: str = "RUNNING", exits: str = "0:0") -> Status:
    rows = parse_accounting(row("7", state, exits, "study.pack.a1.key") + "".join(steps))
    status = classify(rows)
    assert status is not None
    return replace(status, steps=step_statuses(rows))


def told(status: Status | None) -> tuple[Any, ...]:
    assert status is not None
    return str(status.state), status.failure_class, status.exit_code, status.reason


def test_the_step_of_a_run_names_the_cause_and_those_of_others_do_not(folder):
    of = job(row("7.0", "OUT_OF_MEMORY", "0:125", "r1"), row("7.1", "FAILED", "1:0", "r2"))
    out_of_memory = "OUT_OF_MEMORY in step 0 (r1); the job says FAILED"
    assert told(run_status(of, "r1", folder("r1", 1))) == ("failed", "out-of-memory", 1, out_of_memory)
    assert told(run_status(of, "r2", folder("r2", 1))) == ("failed", "bad-exit", 1, "FAILED: exit code 1")


@pytest.mark.parametrize(
    ("exits", "state", "code", "by", "expected"),
    [
        ("7:0", "FAILED", 1, "exit", ("failed", "bad-exit", 7, "FAILED: exit code 7")),
        ("0:9", "FAILED", 1, "exit", ("failed", "killed", 137, "FAILED: step 0 (r1) was ended by SIGKILL")),
        (
            "0:15",
            "CANCELLED",
            143,
            "limit",
            ("failed", "time-limit", None, "TIMEOUT: reached its time limit"),
        ),
        (
            *("0:125", "OUT_OF_MEMORY", 143, "limit"),
            ("failed", "out-of-memory", None, "OUT_OF_MEMORY in step 0 (r1); the job says TIMEOUT"),
        ),
        ("0:0", "COMPLETED", 0, "exit", ("completed", None, 0, "")),
        (
            "3:0",
            "FAILED",
            0,
            "exit",
            ("completed", None, 0, "the job says COMPLETED, but a step failed; exit code 3"),
        ),
    ],
)
def test_a_run_that_ended_before_its_pack_comes_to_what_a_job_would(folder, exits, state, code, by, expected):
    of = job(row("7.0", state, exits, "r1"))
    status = run_status(of, "r1", folder("r1", code, by, end=code))
    assert told(status) == expected
    assert status is not None
    assert (status.hosts, status.settled) == ("n1,n2", True)
    assert status.started is not None
    assert [line.split()[0] for line in status.summary.splitlines()] == ["JobID", "7", "7.0"]


def test_end_json_distinguishes_a_signal_from_an_exit_code_above_128(folder):
    killed = run_status(JOB, "r1", folder("r1", 137))
    assert told(killed) == ("failed", "killed", 137, "FAILED: the script was ended by SIGKILL")
    assert told(run_status(JOB, "r2", folder("r2", 137, end=137)))[:3] == ("failed", "bad-exit", 137)


def test_a_run_without_steps_is_settled_once_its_job_is(folder):
    running = run_status(JOB, "r1", folder("r1", 0))
    assert running is not None
    assert not running.settled
    over = run_status(job(state="COMPLETED"), "r1", folder("r1", 0))
    assert over is not None
    assert over.settled
    away = replace(JOB, accounting="Slurm accounting storage is disabled", settled=True)
    never = run_status(away, "r1", folder("r1", 0))
    assert never is not None
    assert (never.settled, never.accounting) == (True, away.accounting)


def test_an_active_run_shares_the_jobs_end_and_a_finished_one_does_not(folder):
    assert run_status(JOB, "r2", folder("r2")) is None
    cancelled = job(state="CANCELLED by 0")
    assert told(run_status(cancelled, "r1", folder("r1", 0)))[0] == "completed"
    shared = ("cancelled", "cancelled", None, "ended with its pack (job 7); cancelled by user id 0")
    for made in (folder("r2"), folder("r3", 143, "stop", end=143)):
        status = run_status(cancelled, made.path.parent.name, made)
        assert told(status) == shared
        assert status is not None
        assert status.started is not None
    # It had succeeded before the job was ended.
    assert told(run_status(cancelled, "r4", folder("r4", end=0)))[0] == "completed"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"exit_code": "1", "by": "exit"}', '{"by": "limit"}'])
def test_a_broken_end_is_ignored(folder, content):
    made = folder("r1")
    made.pack_end.write_text(content)
    assert run_status(JOB, "r1", made) is None
