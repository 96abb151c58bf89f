"""The ledger: durable, append only, and readable whatever was torn."""

from __future__ import annotations

import json
import multiprocessing
import os

import pytest

from bench.errors import BenchError
from bench.study.ledger import HaltWatch, Ledger, RunState, final_failure_class, submit_lock


def test_the_last_attempt_of_a_run_counts(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append("intent", run_id="a", attempt=1, job_name="s.a.1")
    ledger.append("submitted", run_id="a", attempt=1, job_id="7")
    ledger.append("started", run_id="a", attempt=1)
    ledger.append(
        "ended",
        run_id="a",
        attempt=1,
        state="failed",
        reason="it broke",
        failure_class="bad-exit",
        exit_code=3,
    )
    ledger.append("intent", run_id="a", attempt=2, job_name="s.a.2")
    records = ledger.records(["a", "b"])
    assert (records["a"].attempt, records["a"].state, records["a"].reason) == (2, RunState.QUEUED, "")
    assert (records["a"].job_name, records["a"].job_id) == ("s.a.2", None)
    assert (records["b"].attempt, records["b"].state) == (0, RunState.PLANNED)


def test_a_withdrawn_intent_leaves_the_run_planned(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append("intent", run_id="a", attempt=1)
    ledger.append("withdrawn", run_id="a", attempt=1, reason="sbatch refused")
    assert ledger.records(["a"])["a"].state is RunState.PLANNED


@pytest.mark.parametrize(
    "torn",
    [
        *(
            '{"event": "ended", "run_',
            "\0\0\0",
            '"just a string"',
            "[1]",
            "é",
            '{"run_id": ["a"], "attempt": 1}',
        ),
        *(
            '{"event": "started", "run_id": "a"}',
            '{"event": "ended", "run_id": "a", "attempt": 1, "state": "odd"}',
        ),
    ],
)
def test_an_incomplete_line_is_skipped_and_the_next_is_kept(tmp_path, torn):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.append("started", run_id="a", attempt=1)
    with path.open("a") as file:
        file.write(torn)
    ledger.append("ended", run_id="a", attempt=1, state="completed")
    assert [event["event"] for event in ledger.events()] == ["started", "ended"]
    assert ledger.records(["a"])["a"].state is RunState.COMPLETED


def _append_many(path, name):
    for i in range(200):
        Ledger(path).append("started", run_id=f"{name}-{i}", attempt=1, note="x" * 500)


def test_concurrent_writers_do_not_mix_their_lines(tmp_path):
    path = tmp_path / "ledger.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_append_many, args=(path, name)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({event["run_id"] for event in events}) == 600


def test_a_ledger_that_cannot_be_written_is_a_clear_error(tmp_path):
    with pytest.raises(BenchError, match=r"ledger\.jsonl: cannot be written: No such file or directory$"):
        Ledger(tmp_path / "gone" / "ledger.jsonl").append("started", run_id="a", attempt=1)


def test_the_lock_is_held_while_a_child_has_its_descriptor(tmp_path):
    path = tmp_path / "submit.lock"
    with submit_lock(path) as descriptor:
        kept = os.dup(descriptor)
    try:
        with (
            pytest.raises(BenchError, match="another `bench submit` is running for this study"),
            submit_lock(path),
        ):
            pass
    finally:
        os.close(kept)
    with submit_lock(path):
        pass


def test_attempts_are_found_by_job_id_in_older_attempts_and_packs(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for run_id, attempt, job_id in [("a", 1, "7"), ("b", 1, "8"), ("a", 2, "9"), ("c", 1, "9")]:
        ledger.append("submitted", run_id=run_id, attempt=attempt, job_id=job_id)
    assert ledger.attempts_of_job("7") == [("a", 1)]
    assert ledger.attempts_of_job("9") == [("a", 2), ("c", 1)]
    assert ledger.attempts_of_job("10") == []


def test_a_halt_is_seen_only_by_watches_created_before_it(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    before = HaltWatch(ledger)
    assert not before.halted()
    ledger.append("started", run_id="halted", attempt=1, note="halted")
    assert not before.halted()
    ledger.halt()
    ledger.append("ended", run_id="halted", attempt=1, state="completed")
    after = HaltWatch(ledger)
    assert [before.halted(), before.halted(), after.halted()] == [True, True, False]
    assert ledger.records(["halted"])["halted"].state is RunState.COMPLETED


@pytest.mark.parametrize(
    ("recorded", "cause", "shown"),
    [
        ("bad-exit", "oom-host", "out-of-memory"),
        ("killed", "oom-gpu", "out-of-memory"),
        ("bad-exit", "node-fail", "node-failure"),
        ("bad-exit", "program-error", "bad-exit"),
        ("killed", None, "killed"),
        ("time-limit", "oom-host", "time-limit"),  # Slurm's own statement stays
        (None, "oom-host", None),
        ("bad-exit", {"cause": 1}, "bad-exit"),
    ],
)
def test_a_cause_in_the_logs_replaces_a_class_that_only_describes_the_exit_code(recorded, cause, shown):
    assert final_failure_class(recorded, cause) == shown
