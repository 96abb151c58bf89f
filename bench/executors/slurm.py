"""One Slurm job per run, submitted so that nothing is submitted twice and nothing is lost.

The order of writing makes it so: the *intent*, with a job name that no other attempt
has, is durable before sbatch is called, and the job's id after it. Whoever comes after a
crash finds an intent without an id, and asks Slurm for a job of that name. The study's
lock is inherited by sbatch: an orphaned one still holds it, so the answer is final when
the lock is free.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypedDict

from bench.errors import BenchError
from bench.executors.base import Attempt, Outcome, PlannedStudy, Watch, new_attempt, next_attempt, settle
from bench.executors.evidence import incomplete, outcome_of, said_error
from bench.layout import read_json, write_atomically, write_json
from bench.ledger import RunRecord, RunState, now, submit_lock
from bench.matrix.cell import Cell, Run
from bench.slurm.client import Slurm, sbatch_command
from bench.slurm.errors import SlurmRefusedError, SlurmUnavailableError, SubmissionUncertainError
from bench.slurm.outcome import JobOutcome, outcomes, queue_outcomes
from bench.slurm.parsing import AccountingRow
from bench.slurm.summary import accounting_table

#: An orphaned sbatch ends by itself; it may wait this long for a busy controller.
LOCK_WAIT_S = 200.0
#: A job whose answer was lost is in squeue at once, if Slurm has it.
UNCERTAIN_WAIT_S = 10.0


class SlurmExecutor:
    """Runs of one study as jobs of Slurm."""

    def __init__(self, study: PlannedStudy, *, slurm: Slurm | None = None) -> None:
        self.study = study
        own = (
            {} if study.plan.get("setup") or study.plan.get("container") else {"BENCH_PYTHON": sys.executable}
        )
        self.slurm = slurm or Slurm(environment={**os.environ, **own})
        self._cells = {run.run_id: study.cells[run.cell_id] for run in study.runs}

    def submit(self, runs: Sequence[Run], *, watch: Watch, max_queued: int | None = None) -> None:
        """Submit ``runs`` in order, as far as ``max_queued`` allows.

        Raises:
            BenchError: Slurm refused one (those before it are kept, it and those after it
                wait for the next call), or cannot be asked.
        """
        with submit_lock(self.study.folder.lock, wait_s=LOCK_WAIT_S) as lock:
            records = self._refreshed()
            todo = [run for run in runs if not records[run.run_id].state.active]
            todo = [run for run in todo if records[run.run_id].state is not RunState.COMPLETED]
            self._ask_first(todo)
            queued = sum(record.state.active for record in records.values())
            for done, run in enumerate(todo):
                if max_queued is not None and queued >= max_queued:
                    left = len(todo) - done
                    watch.said(
                        f"{queued} jobs are queued (--max-queued): {left} runs wait for the next bench submit"
                    )
                    return
                watch.started(run)
                try:
                    record = self._submit_one(run, records[run.run_id], lock)
                except SlurmRefusedError as refusal:
                    raise self._refused(refusal, run, done, len(todo)) from None
                queued += 1
                watch.ended(run, record)

    def command_line(self, run: Run) -> str:
        """Return sbatch's command for the next attempt of ``run``."""
        attempt = next_attempt(self.study, run, self.study.records()[run.run_id])
        return shlex.join(sbatch_command(self._script(attempt), _arguments(attempt), **_names(attempt)))

    def refresh(self) -> dict[str, RunRecord]:
        """Settle what ended since; one squeue and one sacct, whatever the number of jobs."""
        records = self.study.records()
        if any(record.state.active and record.job_id is None for record in records.values()):
            try:
                with submit_lock(self.study.folder.lock):
                    return self._refreshed()
            except BenchError:
                pass  # a submission is at work: its intents are its own to settle
        return self._refreshed(reconcile=False)

    def cancel(self, runs: Sequence[Run]) -> int:
        """Cancel this study's jobs of ``runs`` and settle them; return how many there were."""
        with submit_lock(self.study.folder.lock, wait_s=LOCK_WAIT_S):
            records = self._refreshed()
            wanted = {run.run_id for run in runs}
            going = [r for r in records.values() if r.run_id in wanted and r.state.active and r.job_id]
            if going:
                self.slurm.cancel([str(record.job_id) for record in going])
                for record in going:
                    settle(
                        self.study,
                        record,
                        Outcome(RunState.CANCELLED, "cancelled by bench cancel", "cancelled"),
                        ended_at=now(),
                    )
            return len(going)

    # -- submitting ---------------------------------------------------------------------

    def _ask_first(self, runs: Sequence[Run]) -> None:
        """Have Slurm judge the largest cell before the study's first job is queued.

        Raises:
            BenchError: its refusal, in Slurm's words.
        """
        if not runs or any(True for _ in self.study.ledger.events()):
            return
        largest = max(
            (self._cells[run.run_id] for run in runs), key=lambda cell: (cell.nodes, cell.world_size)
        )
        try:
            self.slurm.test_only(self.study.script(largest.cell_id))
        except SlurmRefusedError as refusal:
            what = f"Slurm would not take the largest cell, {largest.cell_id}: {refusal.words}"
            raise BenchError(
                what, remedy="nothing was submitted; mend the matrix's cluster section"
            ) from None

    def _submit_one(self, run: Run, record: RunRecord, lock: int) -> RunRecord:
        attempt = new_attempt(self.study, run, record)
        content = attempt.describe(self.study, submitted_at=now())
        write_json(attempt.folder.run_json, content)
        self.study.ledger.append(
            "intent", run_id=run.run_id, attempt=attempt.number, job_name=attempt.job_name
        )
        record = RunRecord(run.run_id, attempt.number, RunState.QUEUED, job_name=attempt.job_name)
        try:
            job_id = self._sbatch(attempt, lock)
        except SubmissionUncertainError as lost:
            found = self._find_by_name(attempt.job_name)
            if found is None:
                raise BenchError(
                    f"{run.run_id}: sbatch gave no answer ({lost.words}), and no job has its name yet",
                    remedy="type `bench submit` again in a minute: it looks for the job before it submits",
                ) from None
            job_id = found
        except (SlurmRefusedError, SlurmUnavailableError) as error:
            self.study.ledger.append(
                "withdrawn", run_id=run.run_id, attempt=attempt.number, reason=error.words
            )
            write_json(
                attempt.folder.run_json, {**content, "state": str(RunState.PLANNED), "reason": error.words}
            )
            raise
        self._note_job(attempt.folder.run_json, record, job_id)
        return record

    def _sbatch(self, attempt: Attempt, lock: int) -> str:
        submission = self.slurm.submit(
            self._script(attempt), _arguments(attempt), **_names(attempt), keep_open=(lock,)
        )
        return submission.job_id

    def _script(self, attempt: Attempt) -> Path:
        return self.study.script(attempt.cell.cell_id)

    def _note_job(self, run_json: Path, record: RunRecord, job_id: str) -> None:
        self.study.ledger.append("submitted", run_id=record.run_id, attempt=record.attempt, job_id=job_id)
        content = read_json(run_json)
        if isinstance(content, dict):
            write_json(run_json, {**content, "job_id": job_id})
        record.job_id = job_id

    @staticmethod
    def _refused(refusal: SlurmRefusedError, run: Run, done: int, total: int) -> BenchError:
        what = f"sbatch refused {run.run_id}: {refusal.words} ({done} of {total} are submitted and kept)"
        if refusal.queue_is_full:
            return BenchError(
                what, remedy="type `bench submit` again when jobs have ended, or use --max-queued"
            )
        return BenchError(
            what, remedy="mend the reason, then type `bench submit` again: it goes on with this run"
        )

    # -- finding out ----------------------------------------------------------------------

    def _refreshed(self, *, reconcile: bool = True) -> dict[str, RunRecord]:
        records = self.study.records()
        active = [record for record in records.values() if record.state.active]
        if not active:
            return records
        known, rows = self._ask_slurm(active)
        if reconcile:
            self._reconcile([record for record in active if record.job_id is None], known.names)
        for record in active:
            if record.job_id is not None:
                self._settle_or_update(record, known.jobs.get(record.job_id), rows.get(record.job_id, []))
        return records

    def _ask_slurm(self, active: Sequence[RunRecord]) -> tuple[_Known, dict[str, list[AccountingRow]]]:
        """Return what squeue and sacct say of these jobs; sacct's word counts for what has ended."""
        queue = self.slurm.queue()
        jobs = queue_outcomes(queue)
        names = {row.name: row.key.job for row in queue}
        ids = [str(record.job_id) for record in active if record.job_id is not None]
        rows: dict[str, list[AccountingRow]] = {}
        accounted = True
        if ids:
            try:
                for row in self.slurm.accounting(ids):
                    rows.setdefault(row.key.job, []).append(row)
            except SlurmUnavailableError:
                accounted = False
        told = outcomes([row for its_rows in rows.values() for row in its_rows])
        for job, outcome in told.items():
            if outcome.state.ended or job not in jobs:
                jobs[job] = outcome
        return _Known(jobs, names, accounted), rows

    def _reconcile(self, intents: Sequence[RunRecord], names: Mapping[str, str]) -> None:
        """Find the jobs of intents that were never answered; withdraw the others."""
        for record in intents:
            job_id = names.get(str(record.job_name)) or self._accounted_by_name(record)
            run_json = self.study.folder.attempt(record.run_id, record.attempt).run_json
            if job_id is not None:
                self._note_job(run_json, record, job_id)
            else:
                reason = "sbatch was interrupted before Slurm took the job"
                self.study.ledger.append(
                    "withdrawn", run_id=record.run_id, attempt=record.attempt, reason=reason
                )
                record.state = RunState.PLANNED

    def _accounted_by_name(self, record: RunRecord) -> str | None:
        """Return the id of a job that ended so long ago that squeue has forgotten it."""
        try:
            since = datetime.fromisoformat(str(record.details.get("time"))) - timedelta(minutes=10)
        except ValueError:
            since = datetime.now(UTC) - timedelta(days=30)
        try:
            rows = self.slurm.accounting_by_name([str(record.job_name)], since=since)
        except SlurmUnavailableError:
            return None
        return next((row.key.job for row in rows if row.key.step is None), None)

    def _find_by_name(self, job_name: str) -> str | None:
        """Return the id of a job whose answer was lost, if Slurm shows it within a moment."""
        deadline = time.monotonic() + UNCERTAIN_WAIT_S
        while time.monotonic() < deadline:
            try:
                rows = self.slurm.queue(names=[job_name])
            except SlurmUnavailableError:
                rows = []
            if rows:
                return rows[0].key.job
            time.sleep(1)
        return None

    def _settle_or_update(
        self, record: RunRecord, known: JobOutcome | None, rows: Sequence[AccountingRow]
    ) -> None:
        folder = self.study.folder.attempt(record.run_id, record.attempt)
        cell = self._cells[record.run_id]
        if known is None:
            outcome = self._forgotten(record, cell)
            if outcome is None:
                record.state, record.reason = RunState.UNKNOWN, "Slurm does not know this job (any more)"
                return
            settle(self.study, record, outcome, ended_at=now())
            return
        record.reason, record.state = known.reason, known.state
        if not known.state.ended:
            return
        if rows:
            write_atomically(folder.sacct_summary, accounting_table(rows))
        outcome = self._judged(record, cell, known)
        settle(self.study, record, outcome, ended_at=_iso(known.ended) or now())

    def _judged(self, record: RunRecord, cell: Cell, known: JobOutcome) -> Outcome:
        """Return Slurm's verdict together with what the run's folder says."""
        folder = self.study.folder.attempt(record.run_id, record.attempt)
        details: dict[str, Any] = {"started_at": _iso(known.started), "job_id": record.job_id}
        if known.state is RunState.COMPLETED:
            lack = incomplete(folder, cell)
            if lack:
                return Outcome(
                    RunState.FAILED, f"{lack}, although Slurm says COMPLETED", "bad-exit", 0, details
                )
            return Outcome(RunState.COMPLETED, known.reason, None, 0, details)
        said = said_error(folder) if known.failure_class in ("bad-exit", "killed", None) else ""
        reason = "; ".join(filter(None, (said, known.reason)))
        failure_class = str(known.failure_class) if known.failure_class else None
        return Outcome(known.state, reason, failure_class, known.exit_code, details)

    def _forgotten(self, record: RunRecord, cell: Cell) -> Outcome | None:
        """Return what the folder alone says of a job that neither squeue nor sacct knows."""
        folder = self.study.folder.attempt(record.run_id, record.attempt)
        end = read_json(folder.end)
        if not isinstance(end, dict) or not isinstance(end.get("exit_code"), int):
            return None
        return outcome_of(folder, cell, end["exit_code"])


class _Names(TypedDict):
    job_name: str
    output: Path
    error: Path


def _names(attempt: Attempt) -> _Names:
    folder = attempt.folder
    return {"job_name": attempt.job_name, "output": folder.out.absolute(), "error": folder.err.absolute()}


def _arguments(attempt: Attempt) -> list[str]:
    """Return what the script gets: the run's folder, from wherever the job starts."""
    return [str(attempt.folder.path.absolute())]


@dataclass
class _Known:
    """What Slurm says: outcomes by job id, ids by job name, and whether sacct answered."""

    jobs: dict[str, JobOutcome]
    names: dict[str, str]
    accounted: bool


def _iso(time_utc: datetime | None) -> str | None:
    return None if time_utc is None else time_utc.isoformat().replace("+00:00", "Z")
