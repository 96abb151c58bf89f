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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, NoReturn

from bench.errors import BenchError, UnwritableError
from bench.executors.admission import refused_for_good
from bench.executors.base import Outcome, QueueFullError, Watch, settled
from bench.executors.outcome import ProvisionalEnd, iso
from bench.executors.pack_settlement import is_packed, refuse_part_of_a_pack
from bench.executors.settlement import Settlement, is_owed
from bench.matrix.cell import Run
from bench.slurm.accounting import JobStatus, queue_statuses
from bench.slurm.client import (
    BatchJob,
    Slurm,
    SlurmRefusedError,
    SlurmUnavailableError,
    SubmissionUncertainError,
)
from bench.slurm.parsing import QueueRow
from bench.study.ledger import RunRecord, RunState, now, submit_lock
from bench.study.plan_json import PlannedStudy
from bench.study.run_json import Attempt, new_attempt, next_attempt, update_run, write_run

#: An orphaned sbatch ends by itself; it may wait this long for a busy controller.
LOCK_WAIT_S = 200.0
#: A job whose answer was lost is in squeue at once, if Slurm has it.
UNCERTAIN_WAIT_S = 10.0
#: A request that waited while the controller was frozen is served about when ours is.
SECOND_LOOK_S = 1.0

_INTERRUPTED = "sbatch was interrupted before Slurm took the job"


class SlurmExecutor:
    """Runs of one study as jobs of Slurm."""

    def __init__(self, study: PlannedStudy, *, slurm: Slurm | None = None) -> None:
        self.study = study
        own = study.plan.get("setup") or study.plan.get("container")
        #: What sbatch gets beside the caller's environment: without set-up lines, this python runs.
        self.variables = {} if own else {"BENCH_PYTHON": sys.executable}
        self.slurm = slurm or Slurm(environment={**os.environ, **self.variables})
        self._cells = {run.run_id: study.cells[run.cell_id] for run in study.runs}
        self._settlement = Settlement(study, self.slurm, self._cells)
        self._told_of_overriding = False

    def submit(self, runs: Sequence[Run], *, watch: Watch, max_queued: int | None = None) -> list[Run]:
        """Submit ``runs`` in order, as far as ``max_queued`` allows; return those it holds back.

        Raises:
            QueueFullError: Slurm takes no more jobs of this user for now.
            BenchError: Slurm refused one (those before it are kept, it and those after it
                wait for the next call), or cannot be asked.
        """
        seen = {run_id: record.attempt for run_id, record in self.study.records().items()}
        with self._lock(watch) as lock:
            records = self._refreshed(reconcile=True)
            todo = [run for run in runs if may_start(records[run.run_id], seen[run.run_id])]
            self._point_out_overriding(todo, watch)
            todo = self._asked_first(todo, watch)
            queued = sum(record.state.active for record in records.values())
            room = len(todo) if max_queued is None else max(0, max_queued - queued)
            for done, run in enumerate(todo[:room]):
                watch.started(run)
                try:
                    record = self._submit_one(run, records[run.run_id], lock)
                except SlurmRefusedError as refusal:
                    _raise_refused(refusal, todo, done)
                watch.ended(run, record)
            return todo[room:]

    def judge(self, runs: Sequence[Run]) -> None:
        """Have Slurm judge the largest of ``runs``; what it leaves open is seen when they are submitted.

        Raises:
            BenchError: its refusal, in Slurm's words.
        """
        self._asked_first(list(runs), Watch())

    def command_line(self, run: Run) -> str:
        """Return sbatch's command for the next attempt of ``run``, with what it gets by its environment."""
        attempt = next_attempt(self.study, run, self._records_once[run.run_id])
        return self._shown(self._job(attempt))

    def _shown(self, job: BatchJob) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*variables, shlex.join(job.command)])

    def refresh(self) -> dict[str, RunRecord]:
        """Settle what ended since; one squeue, and one sacct for all jobs that have left the queue."""
        if any(_unanswered(record) for record in self.study.records().values()):
            try:
                with submit_lock(self.study.folder.lock):
                    return self._refreshed(reconcile=True)
            except SlurmUnavailableError:
                raise
            except BenchError:
                pass  # a submission is at work: its intents are its own to settle
        return self._refreshed(reconcile=False)

    def cancel(self, runs: Sequence[Run]) -> int:
        """Cancel this study's jobs of ``runs`` and settle them; return how many there were."""
        with submit_lock(self.study.folder.lock, wait_s=LOCK_WAIT_S):
            records = self._refreshed(reconcile=True)
            wanted = {run.run_id for run in runs}
            going = [r for r in records.values() if r.run_id in wanted and r.state.active and r.job_id]
            refuse_part_of_a_pack(records.values(), going)
            # Only jobs that bear their run's name: ids are counted anew on a cluster set up anew.
            queue = self.slurm.queue() if going else []
            ours, known = {(row.key.job, row.name) for row in queue}, queue_statuses(queue)
            jobs = [str(r.job_id) for r in going if (r.job_id, r.job_name) in ours]
            if jobs:
                self.slurm.cancel(jobs)
            ends = [self._cancelled(record, known.get(str(record.job_id)), jobs) for record in going]
            self.study.ledger.append_all(ends)
            return len(going)

    def _cancelled(self, record: RunRecord, known: JobStatus | None, jobs: Sequence[str]) -> dict[str, Any]:
        """Settle an attempt as cancelled; the accounting of its job is still to come."""
        gone = record.state is RunState.UNKNOWN
        reason = f"given up by bench cancel: {record.reason}" if gone else "cancelled by bench cancel"
        ours = record.job_id in jobs
        started = known.started if known and ours and not is_packed(record) else None
        details = {"job_id": record.job_id, "started_at": iso(started)}
        outcome = Outcome(RunState.CANCELLED, reason, "cancelled", details=details)
        return {**settled(self.study, record, outcome, ended_at=now()), "accounted": not ours}

    # -- submitting ---------------------------------------------------------------------

    @contextmanager
    def _lock(self, watch: Watch) -> Iterator[int]:
        """Hold the study's lock; say so where another submission has to be waited for."""
        with ExitStack() as held:
            try:
                lock = held.enter_context(submit_lock(self.study.folder.lock, wait_s=0.5))
            except UnwritableError:
                raise
            except BenchError as busy:
                watch.said(f"{busy.message}: waiting for it to end")
                lock = held.enter_context(submit_lock(self.study.folder.lock, wait_s=LOCK_WAIT_S))
            yield lock

    def _point_out_overriding(self, runs: Sequence[Run], watch: Watch) -> None:
        """Say, once, which variables of the caller change what the scripts ask for."""
        variables = self.slurm.sbatch_variables() if runs else {}
        if variables and not self._told_of_overriding:
            self._told_of_overriding = True
            listed = ", ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
            watch.said(f"{listed} in the environment: sbatch prefers that to the scripts' #SBATCH lines")

    def _asked_first(self, runs: list[Run], watch: Watch) -> list[Run]:
        """Have Slurm judge the largest cell, unless it has taken one as large before.

        Returns:
            ``runs`` in their order; one of the largest cell first, where Slurm leaves it open
            whether it would take that.

        Raises:
            BenchError: its refusal, in Slurm's words.
        """
        if not runs:
            return runs
        size = {run_id: (cell.nodes, cell.world_size) for run_id, cell in self._cells.items()}
        first = max(runs, key=lambda run: size[run.run_id])
        taken = [event["run_id"] for event in self.study.ledger.events() if event["event"] == "submitted"]
        if any(size.get(run_id, (0, 0)) >= size[first.run_id] for run_id in taken):
            return runs
        script, nodes = self.study.script(first.cell_id), self._cells[first.run_id].nodes
        try:
            self.slurm.test_only(script)
        except SlurmRefusedError as refusal:
            why = refused_for_good(self.slurm, refusal, script=script, nodes=nodes)
            if not why:
                watch.said(f"{first.run_id} goes first: Slurm says of its size now: {refusal.output}")
                return [first, *(run for run in runs if run is not first)]
            what = f"Slurm would not take the largest cell, {first.cell_id}: {why}"
            remedy = (
                "nothing was submitted; mend the matrix's cluster section, or leave that size out (--only)"
            )
            raise BenchError(what, remedy=remedy) from None
        return runs

    def _submit_one(self, run: Run, record: RunRecord, lock: int) -> RunRecord:
        attempt = new_attempt(self.study, run, record)
        allocation = {"kind": "job", "nodes": attempt.cell.nodes}
        content = attempt.describe(self.study, submitted_at=now(), allocation=allocation)
        write_run(attempt.folder, content)
        self.study.ledger.append(
            "intent",
            run_id=run.run_id,
            attempt=attempt.number,
            job_name=attempt.job_name,
            refused=False,
        )
        record = RunRecord(run.run_id, attempt.number, RunState.QUEUED, job_name=attempt.job_name)
        try:
            job_id = self.slurm.submit(self._job(attempt), pass_fds=(lock,))
        except SubmissionUncertainError as lost:
            job_id = self._find_by_name(run, attempt.job_name, lost)
        except (SlurmRefusedError, SlurmUnavailableError) as error:
            self._withdraw(record, error.output, refused=True)
            raise
        self._note_job(record, job_id)
        return record

    def _job(self, attempt: Attempt) -> BatchJob:
        """Return the job of an attempt; its script gets the run's folder, wherever the job starts."""
        folder = attempt.folder
        return BatchJob(
            script=self.study.script(attempt.cell.cell_id),
            arguments=[str(folder.path.absolute())],
            job_name=attempt.job_name,
            output=folder.out.absolute(),
            error=folder.err.absolute(),
        )

    def _note_job(self, record: RunRecord, job_id: str) -> None:
        self.study.ledger.append("submitted", run_id=record.run_id, attempt=record.attempt, job_id=job_id)
        update_run(self.study.folder.attempt(record.run_id, record.attempt), {"job_id": job_id})
        record.job_id = job_id

    def _find_by_name(self, run: Run, job_name: str, lost: SubmissionUncertainError) -> str:
        """Return the id of a job whose answer was lost, if Slurm shows it within a moment.

        Raises:
            SlurmUnavailableError: it does not; the intent stands, and the next call looks for the job.
        """
        deadline = time.monotonic() + UNCERTAIN_WAIT_S
        while time.monotonic() < deadline:
            try:
                rows = self.slurm.queue(names=[job_name])
            except SlurmUnavailableError:
                rows = []
            if rows:
                return rows[0].key.job
            time.sleep(1)
        raise SlurmUnavailableError(
            "sbatch",
            f"no answer for {run.run_id} ({lost.output}), and no job has its name yet",
            remedy="type `bench submit` again in a minute: it looks for the job before it submits",
        )

    @cached_property
    def _records_once(self) -> dict[str, RunRecord]:
        return self.study.records()

    # -- finding out ----------------------------------------------------------------------

    def _refreshed(self, *, reconcile: bool) -> dict[str, RunRecord]:
        records = self.study.records()
        queue: list[QueueRow] = []
        if any(record.state.active for record in records.values()):
            queue = self.slurm.queue()
            unanswered = [record for record in records.values() if _unanswered(record)]
            if reconcile and unanswered:
                queue = self._reconcile(unanswered, queue)
        known = [record for record in records.values() if record.state.active and record.job_id]
        owed = [record for record in records.values() if is_owed(record)]
        self._settlement.look(known, queue, owed=owed)
        return records

    def _reconcile(self, intents: Sequence[RunRecord], queue: list[QueueRow]) -> list[QueueRow]:
        """Find the jobs of intents that were never answered; withdraw the others.

        Returns:
            the queue, as seen last.
        """
        names: dict[str, str | None] = {row.name: row.key.job for row in queue}
        if any(record.job_name not in names for record in intents):
            time.sleep(SECOND_LOOK_S)
            queue = self.slurm.queue()
            names = {row.name: row.key.job for row in queue}
        for record in intents:
            folder, name = self.study.folder.attempt(record.run_id, record.attempt), str(record.job_name)
            if name not in names:  # the runs of a pack share one: ask once
                names[name] = self._accounted_by_name(record)
            job_id = names[name]
            if job_id is not None:
                self._note_job(record, job_id)
            elif ProvisionalEnd.read(folder).exit_code is None:
                self._withdraw(record, _INTERRUPTED)
            else:  # it ran, and Slurm has forgotten it
                self._settlement.settle_by_folder(record)
        return queue

    def _withdraw(self, record: RunRecord, reason: str, *, refused: bool = False) -> None:
        """Note that nothing came of an intent; one that was ``refused`` certainly left no job."""
        self.study.ledger.append(
            "withdrawn", run_id=record.run_id, attempt=record.attempt, reason=reason, refused=refused
        )
        folder = self.study.folder.attempt(record.run_id, record.attempt)
        update_run(folder, {"state": str(RunState.PLANNED), "reason": reason})
        record.state, record.reason = RunState.PLANNED, reason

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


def _unanswered(record: RunRecord) -> bool:
    """Whether nobody knows yet what came of an intent."""
    return record.state.active and record.job_id is None


def may_start(record: RunRecord, attempt_seen: int) -> bool:
    """Whether a run is still to be started, after another `bench submit` may have been at work."""
    if record.state.active or record.state is RunState.COMPLETED:
        return False
    return record.attempt == attempt_seen or record.state is RunState.PLANNED


def _raise_refused(refusal: SlurmRefusedError, todo: Sequence[Run], done: int) -> NoReturn:
    kept = f"{done} of {len(todo)} are submitted and kept"
    what = f"sbatch refused {todo[done].run_id}: {refusal.output} ({kept})"
    if refusal.queue_is_full:
        remedy = "type `bench submit` again when jobs have ended, or use --max-queued or --wait"
        raise QueueFullError(what, remedy=remedy, left=todo[done:]) from None
    remedy = "mend the reason, then type `bench submit` again: it goes on with this run"
    raise BenchError(what, remedy=remedy) from None
