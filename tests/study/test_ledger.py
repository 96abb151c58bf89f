"""The ledger and the other files of a study are written whole, and readable whatever was torn."""

import json
import os
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.study.findings import LinkErrors, StudyRun
from bench.study.ledger import (
    End,
    FailureClass,
    Ledger,
    LockedError,
    Record,
    RunState,
    final_class,
    study_lock,
)
from bench.study.plan_json import PlannedStudy
from bench.study.reasons import ExitCode, LogCause, Said
from bench.study.run_json import next_attempt
from ddp_scaling_bench.errors import BenchError, UnwritableError
from ddp_scaling_bench.files import read_json, read_object, write_json
from tests.common import raised
from tests.matrices import matrix, planned_study

INTENT = Record(run_id="a", attempt=1, state=RunState.QUEUED, job_name="s.a.1")
SUBMITTED = replace(INTENT, job_id="7", pack=2, place=3)
ENDED = SUBMITTED.ended(
    End(
        state=RunState.FAILED,
        reasons=(Said(text="it broke: é", source="job.err"), ExitCode(exit_code=3)),
        failure_class=FailureClass.BAD_EXIT,
        exit_code=3,
        cause=LogCause(cause="program-error", path="job.err", line=4, remedy="correct it"),
        warnings=(),
        started_at="2026-01-02T03:04:05Z",
        ended_at="2026-01-02T03:04:06Z",
        hosts="n[1-2]",
        disturbed=(
            LinkErrors(subject=("n1",), errors=3),
            StudyRun(subject=("n2",), jobs=("7",), more_jobs=2),
        ),
        neighbours="unknown: no accounting",
        settled=False,
    )
)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl")


def test_a_record_is_read_as_it_was_written(ledger):
    for record in (INTENT, SUBMITTED, ENDED):
        ledger.append([record])
        read = ledger.records(["a"])["a"]
        assert read.time
        assert replace(read, time="") == record


def test_the_last_line_of_the_latest_attempt_is_the_state(ledger):
    again = Record(run_id="a", attempt=2, state=RunState.QUEUED, job_name="s.a.2")
    ledger.append([INTENT, SUBMITTED, again])
    ledger.append([ENDED])  # the end of an earlier attempt is found later
    records = ledger.records(["a", "b"])
    assert (records["a"].attempt, records["a"].state) == (2, RunState.QUEUED)
    assert records["b"] == Record(run_id="b")
    assert {number: record.state for number, record in ledger.attempts()["a"].items()} == {
        1: RunState.FAILED,
        2: RunState.QUEUED,
    }


@pytest.mark.parametrize(
    "torn",
    [
        '{"run_id": "a", "attempt": 1, "state": "compl',
        "\0\0\0",
        "[1]",
        "[" * 100_000,
        "é",
        '{"run_id": ["a"], "attempt": 1, "state": "failed"}',
        '{"run_id": "a", "attempt": 1, "state": "odd"}',
        '{"run_id": "a", "attempt": 1, "state": "failed", "failure_class": "odd"}',
    ],
)
def test_a_torn_or_odd_line_is_skipped_and_the_next_is_kept(ledger, torn):
    ledger.append([SUBMITTED])
    with ledger.path.open("a") as file:
        file.write(torn)
    assert ledger.records(["a"])["a"].state is RunState.QUEUED
    ledger.append([ENDED])
    assert ledger.records(["a"])["a"].state is RunState.FAILED


def _append_many(path: Path, name: str) -> None:
    for i in range(200):
        Ledger(path).append([Record(run_id=f"{name}-{i}", attempt=1, remark="x" * 500)])


def test_concurrent_writers_do_not_mix_their_lines(ledger):
    # A lock of flock belongs to an opened file, so threads exclude each other as processes do.
    writers = [Thread(target=_append_many, args=(ledger.path, name)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    lines = [json.loads(line) for line in ledger.path.read_text().splitlines()]
    assert len({line["run_id"] for line in lines}) == 600


def test_a_ledger_that_cannot_be_written_is_a_clear_error(tmp_path):
    said = raised(BenchError, Ledger(tmp_path / "gone" / "ledger.jsonl").append, [INTENT])
    assert said.endswith(
        "ledger.jsonl: cannot be written: No such file or directory; check the folders of this path"
    )


def test_an_event_is_found_after_the_size_that_the_ledger_had(ledger):
    ledger.append([replace(INTENT, run_id="halted")])
    before = ledger.size
    assert ledger.events("halted") == []
    ledger.note("halted")
    assert len(ledger.events("halted", before)) == 1
    assert ledger.events("halted", ledger.size) == []


def test_the_lock_is_held_while_a_child_has_its_descriptor(tmp_path):
    path = tmp_path / "submit.lock"
    with study_lock(path) as descriptor:
        kept = os.dup(descriptor)
    try:
        with pytest.raises(LockedError, match="another command holds the lock"), study_lock(path):
            pass
    finally:
        os.close(kept)
    with study_lock(path):
        pass


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ({"reasons": "exit code 3"}, ""),
        ({"reasons": [7, {"kind": "said"}]}, ""),
        ({"reasons": [{"kind": "exit-code", "subject": [], "values": {}, "severity": "error"}]}, ""),
        ({"reasons": [{"kind": "odd", "subject": [], "values": {"n": 3}, "severity": "error"}]}, "n 3"),
        ({"cause": "oom", "warnings": [None, {"kind": []}]}, "it broke: é; exit code 3"),
    ],
)
def test_a_damaged_finding_does_not_lose_its_line(ledger, damage, reason):
    line = json.dumps({**ENDED.as_json(), **damage})
    ledger.path.write_text(f"{line}\n")
    found = ledger.records(["a"])["a"]
    assert (found.state, found.exit_code, found.reason) == (RunState.FAILED, 3, reason)


@pytest.mark.parametrize(
    ("recorded", "cause", "shown"),
    [
        ("bad-exit", "oom-host", "out-of-memory"),
        ("killed", "oom-host", "killed"),
        ("bad-exit", "node-fail", "node-failure"),
        ("bad-exit", "program-error", "bad-exit"),
        ("time-limit", "oom-host", "time-limit"),  # Slurm's own statement stays
        (None, "oom-host", None),
    ],
)
def test_a_cause_in_the_logs_replaces_a_class_that_only_describes_the_exit_code(recorded, cause, shown):
    assert final_class(recorded and FailureClass(recorded), cause) == shown


@settings(max_examples=20, deadline=None)
@given(old=st.text(max_size=5000), new=st.text(max_size=5000))
def test_rewritten_content_is_read_back_whatever_its_length(tmp_path_factory, old, new):
    path = tmp_path_factory.mktemp("layout") / "env.json"
    for text in (old, new):
        write_json(path, {"text": text})
    assert read_json(path) == {"text": new}
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_cannot_be_written_keeps_its_content(tmp_path):
    path = tmp_path / "env.json"
    write_json(path, {"state": 1})
    with pytest.raises(TypeError):
        write_json(path, {"state": {1}})
    with pytest.raises(UnwritableError):
        write_json(tmp_path / "gone" / "env.json", {})
    assert read_json(path) == {"state": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_no_json_object_has_a_problem_in_words(tmp_path):
    path, invalid = tmp_path / "run.json", "is not valid JSON"
    assert read_object(path) == (None, "is missing")
    contents = {b'{"state": "com': invalid, b"[" * 100_000: invalid, b"[1]": "is not a JSON object"}
    for content, problem in contents.items():
        path.write_bytes(content)
        assert (read_object(path), read_json(path)) == ((None, problem), None)


@pytest.fixture
def study(tmp_path: Path) -> PlannedStudy:
    return planned_study(tmp_path, matrix("s", axes={"tasks_per_node": [1]}))


def test_an_attempt_is_described_when_its_number_is_claimed(study):
    run = study.runs[0]
    attempt = next_attempt(study, run, Record(run_id=run.run_id))
    attempt.claim(study, interpreter="python")
    content = json.loads(attempt.folder.run_json.read_text())
    described = [content[name] for name in ("run_id", "attempt", "job_name", "interpreter")]
    assert described == [run.run_id, 1, attempt.job_name, "python"]
    assert "state" not in content
    with pytest.raises(UnwritableError, match="File exists"):
        attempt.claim(study)


def test_a_folder_that_the_ledger_does_not_know_is_an_intent(study):
    run = study.runs[0]
    assert study.records()[run.run_id].attempt == 0
    attempt = next_attempt(study, run, study.records()[run.run_id])
    attempt.claim(study, allocation={"pack": 1, "place": 2})
    record = study.records()[run.run_id]
    assert (record.attempt, record.state, record.job_name) == (1, RunState.QUEUED, attempt.job_name)
    assert (record.pack, record.place) == (1, 2)
    attempt.folder.run_json.write_text("{")
    assert study.records()[run.run_id].job_name == attempt.job_name
    assert next_attempt(study, run, record).number == 2
