"""Status of the runs of a pack, from the marks of its script and rows of sacct, without a cluster."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from bench.jobs.outcome import JobStatus
from bench.jobs.slurm.job_states import classify
from bench.jobs.slurm.pack import Marks, Packs, not_started, own_rows
from bench.jobs.slurm.parsing import AccountingRow, parse_job_id
from bench.study.files import write_json
from bench.study.layout import PackFolder, StudyFolder
from bench.study.ledger import RunRecord, RunState

BEGAN, ENDED = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"


def mark(event: str, place: int, **more: object) -> str:
    time = BEGAN if event == "start" else ENDED
    return json.dumps({"event": event, "place": place, "run_id": f"r{place}", "time": time, **more})


def started(place: int) -> str:
    return mark("start", place, hosts="n1,n2")


def ended(place: int, exit_code: int, by: str = "exit") -> str:
    return mark("end", place, exit_code=exit_code, by=by)


@pytest.fixture
def packs(tmp_path):
    def make(*marks: str) -> Packs:
        study = StudyFolder(tmp_path)
        study.pack(1).path.mkdir(parents=True, exist_ok=True)
        study.pack(1).marks.write_text("".join(f"{line}\n" for line in marks))
        return Packs(study)

    return make


def record(place: int) -> RunRecord:
    allocation = {"kind": "pack", "pack": 1, "place": place, "nodes": 4}
    return RunRecord(f"r{place}", 1, RunState.QUEUED, job_id="7", details={"allocation": allocation})


def row(shown: str, state: str, name: str, **more: object) -> AccountingRow:
    time = datetime(2026, 1, 1, tzinfo=UTC)
    plain = AccountingRow(
        key=parse_job_id(shown),
        state=state,
        exit_code=0,
        signal=0,
        derived_exit_code=0,
        reason="",
        submitted=time,
        started=time,
        ended=None if state == "RUNNING" else time,
        elapsed="00:01:00",
        nodes=2,
        hosts="n[1-2]",
        max_rss="",
        name=name,
    )
    return replace(plain, **more)


JOB = row("7", "RUNNING", "study.pack.a1.key")


def status_of(
    packs: Packs, place: int, *rows: AccountingRow, job: JobStatus | None = None
) -> tuple[object, ...]:
    found = packs.status(record(place), job, own_rows(record(place), rows))
    assert found is not None
    return str(found.state), found.failure_class, found.exit_code, found.reason


def test_the_step_of_a_run_names_the_cause_and_those_of_others_do_not(packs):
    of = packs(started(1), ended(1, 1), started(2), ended(2, 1))
    steps = [row("7.0", "OUT_OF_MEMORY", "r1", signal=125), row("7.1", "FAILED", "r2", exit_code=1)]
    out_of_memory = "OUT_OF_MEMORY in step 0 (r1); the job says FAILED"
    assert status_of(of, 1, JOB, *steps) == ("failed", "out-of-memory", 1, out_of_memory)
    assert status_of(of, 2, JOB, *steps) == ("failed", "bad-exit", 1, "FAILED: exit code 1")


def test_end_json_distinguishes_a_signal_from_an_exit_code_above_128(packs, tmp_path):
    of = packs(started(1), ended(1, 137), started(2), ended(2, 137))
    folder = StudyFolder(tmp_path).attempt("r2", 1)
    folder.path.mkdir(parents=True)
    write_json(folder.end, {"exit_code": 137, "time": ENDED})
    assert status_of(of, 1, JOB) == ("failed", "killed", 137, "FAILED: the script was ended by SIGKILL")
    assert status_of(of, 2, JOB)[:3] == ("failed", "bad-exit", 137)


def test_an_active_run_shares_the_jobs_status_and_a_finished_one_does_not(packs, tmp_path):
    of = packs(started(1), ended(1, 0), started(2), ended(2, 143, by="stop"))
    job = classify([row("7", "CANCELLED by 0", "study.pack.a1.key")])
    assert status_of(of, 1, JOB, job=job) == ("completed", None, 0, "")
    shared = "ended with its pack (job 7): cancelled by user id 0"
    assert status_of(of, 2, JOB, job=job)[:2] == ("cancelled", "cancelled")
    assert status_of(of, 2, JOB, job=job)[3] == shared
    folder = StudyFolder(tmp_path).attempt("r2", 1)
    folder.path.mkdir(parents=True)
    write_json(folder.end, {"exit_code": 0, "time": ENDED})
    assert status_of(of, 2, JOB, job=job)[0] == "completed"
    assert not_started(record(3), job) == (
        "not started: its pack (job 7) ended before its turn (cancelled by user id 0)"
    )


def test_a_run_waits_for_those_before_it(packs):
    running = JobStatus(RunState.RUNNING)
    assert (
        packs().active_status(record(2), running).reason
        == "waits for its pack (job 7) to start its first run"
    )
    of = packs(started(1), ended(1, 0), started(2))
    shown = [of.active_status(record(place), running) for place in (2, 3, 5)]
    assert [(str(one.state), one.reason) for one in shown] == [
        ("running", ""),
        ("queued", "waits for 1 run before it in its pack (job 7)"),
        ("queued", "waits for 3 runs before it in its pack (job 7)"),
    ]
    waits = JobStatus(RunState.QUEUED, reason="waits to start (Priority)")
    assert of.active_status(record(3), waits) == waits


def test_broken_marks_are_ignored(tmp_path):
    good = [started(1), ended(1, 0)]
    bad = ["", "{", "[]", "7", '{"event": "end"}', mark("end", 9, exit_code=0, by="exit"), started(2)[:40]]
    (tmp_path / "marks.jsonl").write_bytes("\n".join([*bad, *good]).encode() + b"\n\xff")
    marks = Marks.read(PackFolder(tmp_path))
    assert list(marks.runs) == ["r1"]
    assert (marks.runs["r1"].exit_code, marks.runs["r1"].hosts) == (0, "n1,n2")


def test_a_requeued_pack_is_not_over(packs):
    of = packs(started(1), ended(1, 143, by="stop"), mark("stop", 1, by="TERM"))
    assert of.marks(record(1)).over
    assert not of.has_ended(record(1))
    again = packs(started(1), ended(1, 143, by="stop"), mark("stop", 1, by="TERM"), started(1))
    assert not again.marks(record(1)).over
