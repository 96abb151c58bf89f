"""Settlement of many runs, which several processes share."""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from bench.executors import settlement
from bench.executors.settlement import Settlement, share_out
from bench.slurm.client import Slurm
from bench.slurm.parsing import AccountingRow, parse_accounting
from bench.study.layout import METRICS_COLUMNS
from bench.study.run_json import new_attempt, read_run, write_run
from tests.executors.slurm_studies import Study, scripted_study

NUMBERS = range(10)


def squares(share: Sequence[int]) -> list[tuple[int, int]]:
    return [(number**2, os.getpid()) for number in share]


def test_each_process_computes_one_share():
    shares = list(share_out(squares, NUMBERS, processes=4))
    assert sorted(square for share in shares for square, _ in share) == [number**2 for number in NUMBERS]
    assert len({process for share in shares for _, process in share}) == 4
    assert shares[0][0][1] == os.getpid()


@pytest.mark.parametrize("size", [0, 10**6])
def test_a_process_that_is_killed_leaves_its_share_to_its_parent(size):
    parent = os.getpid()

    def die(share: Sequence[int]) -> list[Any]:
        if os.getpid() == parent:
            for child in multiprocessing.active_children():
                child.join()
        elif 3 in share and size:  # the pipe is too small for the result: the process is killed while sending
            threading.Timer(0.5, os._exit, (9,)).start()
            return [b"x" * size]
        elif 3 in share:
            os._exit(9)
        return squares(share)

    shares = list(share_out(die, NUMBERS, processes=4))
    assert sorted(square for share in shares for square, _ in share) == [number**2 for number in NUMBERS]
    assert {process for share in shares for square, process in share if square == 9} == {parent}


@pytest.mark.parametrize("wrong", [0, 3])
def test_an_error_is_raised_and_all_processes_end(wrong, capfd):
    def fail(share: Sequence[int]) -> bytes:
        if wrong in share:
            raise ValueError("this one")
        return b"x" * 10**6

    with pytest.raises(ValueError, match="this one"):
        list(share_out(fail, NUMBERS, processes=4))
    for child in multiprocessing.active_children():
        child.join(60)
        assert child.exitcode == 0
    assert capfd.readouterr() == ("", "")


def test_without_further_processes_all_shares_are_computed_here(monkeypatch):
    monkeypatch.setattr(os, "fork", Mock(side_effect=BlockingIOError(11, "Resource temporarily unavailable")))
    shares = list(share_out(squares, NUMBERS, processes=4))
    assert {process for share in shares for _, process in share} == {os.getpid()}
    assert sum(len(share) for share in shares) == len(NUMBERS)


def test_more_processes_than_items_are_no_error():
    assert sum(len(share) for share in share_out(squares, [1, 2], processes=4)) == 2


class Accounting(Slurm):
    """Jobs that ended; ``calls`` is a file with one character per question about the jobs on nodes."""

    def __init__(self, rows: str, calls: Path) -> None:
        super().__init__()
        self.rows, self.calls = parse_accounting(rows), calls

    def accounting(self, job_ids: Sequence[str]) -> list[AccountingRow]:
        return self.rows

    def jobs_on(self, nodes: Sequence[str], **times: Any) -> list[AccountingRow]:
        with self.calls.open("a") as file:
            file.write("x")
        return self.rows

    def jobs_are_private(self) -> bool:
        return False


def submitted(study: Study) -> str:
    """Write the files of submitted jobs, every third of which fails; return their rows in sacct."""
    planned, rows, events = study.planned, "", []
    for number, run in enumerate(planned.runs):
        attempt = new_attempt(planned, run, planned.records()[run.run_id])
        write_run(
            attempt.folder,
            {**attempt.describe(planned, submitted_at="2026-11-22T09:00:00Z"), "job_id": number},
        )
        identity: dict[str, Any] = {"run_id": run.run_id, "attempt": 1}
        events += [{"event": "intent", **identity, "job_name": attempt.job_name, "refused": False}]
        events += [{"event": "submitted", **identity, "job_id": str(number)}]
        attempt.folder.metrics_csv.write_text(
            ",".join(METRICS_COLUMNS) + "\n" + "," * (len(METRICS_COLUMNS) - 1) + "\n"
        )
        attempt.folder.env.write_text("{}")
        attempt.folder.out.write_text("")
        attempt.folder.err.write_text("RuntimeError: CUDA out of memory\n" if number % 3 == 0 else "")
        state, code = ("FAILED", "1:0") if number % 3 == 0 else ("COMPLETED", "0:0")
        times = f"2026-11-22T10:00:0{number % 7}|2026-11-22T10:00:0{number % 7}|2026-11-22T10:00:09"
        rows += f"{number}|{state}|{code}|{code}|None|{times}|00:00:03|1|n{number % 2}||{attempt.job_name}\n"
    planned.ledger.append_all(events)
    return rows


def test_several_processes_settle_runs_as_one_does(tmp_path, monkeypatch):
    found = []
    for name, many in (("one", 100), ("several", 1)):
        study = scripted_study(tmp_path / name, ["true"] * 20, {})
        slurm = Accounting(submitted(study), tmp_path / f"{name}.calls")
        monkeypatch.setattr(settlement, "MANY_RUNS", many)
        records = study.planned.records()
        Settlement(study.planned, slurm).update(list(records.values()), [])
        assert slurm.calls.read_text() == "x"
        events = list(study.planned.ledger.events())
        runs = [read_run(study.planned.run_folder(record).path)[0] for record in records.values()]
        summaries = [
            study.planned.run_folder(record).sacct_summary.read_text() for record in records.values()
        ]
        assert {str(record.state) for record in records.values()} == {"completed", "failed"}
        # The studies differ in their folders, keys and times of writing, which have milliseconds.
        names = rf"/{name}/|{study.planned.plan['key']}|\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{{3}}Z"
        found.append(re.sub(names, "", str((records, events, runs, summaries))))
    assert found[0] == found[1]
