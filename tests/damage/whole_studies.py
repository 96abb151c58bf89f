"""Two finished studies with all files that runs on this machine leave, to be damaged by tests."""

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from bench.jobs.end import end_of
from bench.matrix.cell import Run
from bench.plan import make_plan, write_plan
from bench.study.checksums import write_sums
from bench.study.layout import RunFolder
from bench.study.ledger import Record, RunState
from bench.study.plan_json import PlannedStudy, open_study
from bench.study.records import METRICS_COLUMNS, RANKS_COLUMNS, STEPS_COLUMNS
from bench.study.run_json import next_attempt
from tests.analysis.studies import StudyBuilder, environment, table
from tests.matrices import matrix, training

#: The process of a run that has ended: no process has this id.
ENDED_PROCESS = f"{os.uname().nodename}:{2**22 - 1}:5"
BEGIN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
STEPS, EPOCHS, RUN_S = 20, 3, 40
TRAINING = {
    "axes": {"tasks_per_node": [1, 2, 4]},
    "scaling": [{"mode": "strong", "global_batch": [64]}],
    "workload": training(steps_per_epoch=STEPS, epochs=EPOCHS),
}


def write_studies(root: Path) -> list[Path]:
    """Write the studies ``complete`` and ``failed`` (with failed, orphaned and planned runs)."""
    return [
        _write(root, "complete", {}, **TRAINING),
        _write(root, "failed", {1: "failed", 2: "orphan", 4: "killed", 6: "planned"}, **TRAINING),
    ]


def _write(root: Path, name: str, states: Mapping[int, str], **sections: Any) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    path = root / f"{name}.yaml"
    path.write_text(matrix(name, **sections, repeats=3))
    study = open_study(write_plan(make_plan(path), root))
    for place, run in enumerate(study.runs):
        state = states.get(place, "completed")
        if state != "planned":
            _write_run(study, run, place, state)
    path.unlink()
    return study.folder.path


def _iso(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _write_run(study: PlannedStudy, run: Run, place: int, state: str) -> None:
    start = BEGIN + timedelta(minutes=place)
    end = start + timedelta(seconds=RUN_S + place)
    attempt = next_attempt(study, run, Record(run_id=run.run_id))
    attempt.claim(study, submitted_at=_iso(start))
    _, pid, _ = ENDED_PROCESS.split(":")
    attempt.folder.start.write_text(f"{pid} {_iso(start)} {os.uname().nodename} 0\n")
    job = {"job_name": attempt.job_name, "job_id": ENDED_PROCESS}
    record = Record(run_id=run.run_id, attempt=1, state=RunState.QUEUED, **job)
    study.ledger.append([record])
    if state != "killed":
        _write_results(study, attempt.folder, run, place, failed=state == "failed")
        code = 1 if state == "failed" else 0
        note = {"exit_code": code, "signal": None, "stage": "run", "time": _iso(end)}
        attempt.folder.end.write_text(json.dumps(note))
    if state in ("completed", "failed"):
        study.ledger.append([record.ended(end_of(attempt.folder, attempt.cell, None))])


def _write_results(study: PlannedStudy, folder: RunFolder, run: Run, place: int, *, failed: bool) -> None:
    cell = study.cells[run.cell_id]
    folder.out.write_text("bench: started\n")
    folder.err.write_text("RuntimeError: it broke\n" if failed else "")
    folder.env.write_text(json.dumps(environment(cell, cores=8), indent=1))
    if failed:
        return
    builder = StudyBuilder(Path(), [], epochs=EPOCHS, steps=STEPS)
    rows = [builder.epoch(cell, epoch, 1 + 0.004 * (place % 7)) for epoch in range(EPOCHS)]
    folder.metrics_csv.write_text(table(METRICS_COLUMNS, rows))
    folder.ranks_csv.write_text(table(RANKS_COLUMNS, builder.rank_rows(cell)))
    folder.steps_csv.write_text(table(STEPS_COLUMNS, builder.step_rows(cell)))
    folder.probes.write_text(json.dumps({"schema": 1}))
    write_sums(folder)
