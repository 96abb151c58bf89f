"""Two finished studies with all files that runs on this machine leave, to be damaged by tests."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from bench.jobs.outcome import Outcome
from bench.jobs.scheduler import settle_run_json
from bench.matrix.cell import Run
from bench.plan import make_plan, write_plan
from bench.study.checksums import write_sums
from bench.study.layout import RunFolder
from bench.study.ledger import FailureClass, RunRecord, RunState
from bench.study.plan_json import PlannedStudy, open_study
from bench.study.records import EpochRow, RankRow, StepRow, csv_lines, header
from bench.study.run_json import new_attempt, write_run
from tests.analysis.studies import environment
from tests.matrices import matrix, training

#: The process of a `bench submit` that no longer exists: no process has this id.
ENDED_PROCESS = {"pid": 2**22 - 1, "pid_started": 5.0, "host": os.uname().nodename}
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
    attempt = new_attempt(study, run, RunRecord(run.run_id))
    times = {"submitted_at": _iso(start), "started_at": _iso(start)}
    write_run(attempt.folder, attempt.describe(study, state="running", **times, pid=ENDED_PROCESS["pid"]))
    record = RunRecord(run.run_id, 1, RunState.RUNNING)
    events: list[dict[str, Any]] = [
        {"time": _iso(start), "event": "started", "run_id": run.run_id, "attempt": 1, **ENDED_PROCESS}
    ]
    if state != "killed":
        _write_results(study, attempt.folder, run, place, failed=state == "failed")
        code = 1 if state == "failed" else 0
        note = {"exit_code": code, "signal": None, "stage": "run", "time": _iso(end)}
        attempt.folder.end.write_text(json.dumps(note))
    if state in ("completed", "failed"):
        outcome = Outcome(RunState.COMPLETED, exit_code=0)
        if state == "failed":
            outcome = Outcome(RunState.FAILED, "exit code 1", FailureClass.BAD_EXIT, 1)
        event = settle_run_json(study, record, outcome, ended_at=_iso(end))
        events.append({"time": _iso(end + timedelta(milliseconds=80)), **event})
    with study.folder.ledger.open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def _write_results(study: PlannedStudy, folder: RunFolder, run: Run, place: int, *, failed: bool) -> None:
    cell = study.cells[run.cell_id]
    folder.out.write_text("bench: started\n")
    folder.err.write_text("RuntimeError: it broke\n" if failed else "")
    folder.env.write_text(json.dumps(environment(cell, cores=8), indent=1))
    if failed:
        return
    metrics, ranks, steps = [], [], []
    for epoch in range(1, EPOCHS + 1):
        step_s = 0.04 / cell.world_size**0.8 * (1 + 0.004 * (place % 7) + 0.001 * epoch)
        exposed = 0.1 * step_s
        parts = {
            "data_load_time_sec": 0.05 * step_s,
            "forward_time_sec": 0.25 * step_s,
            "backward_time_sec": 0.5 * step_s,
            "comm_exposed_time_sec": exposed,
            "optimizer_time_sec": 0.06 * step_s,
            "other_time_sec": 0.04 * step_s,
        }
        common = {"comm_wait_time_sec": 0.0, "peak_mem_bytes": 2**28, "steps": STEPS, **parts}
        metrics.append(
            EpochRow(
                epoch,
                samples=STEPS * cell.global_batch,
                train_loss=1 / epoch,
                epoch_time_sec=STEPS * step_s,
                throughput_samples_per_sec=cell.global_batch / step_s,
                step_time_sec_median=step_s,
                step_time_sec_p95=step_s,
                compute_time_sec=0.75 * step_s,
                load_balance=0.945,
                comm_efficiency=0.9,
                pop_parallel_efficiency=0.9 * 0.945,
                cpu_util_avg=90.0,
                **common,
            )
        )
        own = {
            "samples": STEPS * cell.per_gpu_batch,
            "window_time_sec": STEPS * step_s,
            "step_time_sec": step_s,
        }
        ranks += [RankRow(epoch, rank, rank, "n1", "cpu", **own, **common) for rank in range(cell.world_size)]
        steps += [StepRow(epoch, step, step_s, 0) for step in range(1, STEPS + 1)]
    for path, rows in ((folder.metrics_csv, metrics), (folder.ranks_csv, ranks), (folder.steps_csv, steps)):
        path.write_text(header(type(rows[0])) + csv_lines(rows))
    folder.probes.write_text(json.dumps({"schema": 1}))
    write_sums(folder)
