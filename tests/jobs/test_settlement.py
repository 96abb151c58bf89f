"""Settlement of many runs, which several threads share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.jobs.slurm import settlement
from bench.jobs.slurm.client import Slurm
from bench.jobs.slurm.parsing import AccountingRow, parse_accounting
from bench.jobs.slurm.settlement import Settlement
from bench.study.records import METRICS_COLUMNS
from bench.study.run_json import new_attempt, read_run, write_run
from tests.jobs.slurm_studies import Study, scripted_study


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


def test_several_threads_settle_runs_as_one_does(tmp_path, monkeypatch):
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
