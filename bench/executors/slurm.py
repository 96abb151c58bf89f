"""Submit each run as a Slurm job, without submitting one twice or losing one.

The order of writes ensures this. The *intent*, with a globally unique job name, is synced to the
ledger before sbatch is called, and the job id after it. After a crash, the next call finds an intent
without an id and asks Slurm for a job of that name. sbatch inherits the study's lock: as long as an
orphaned sbatch may still submit its job, the lock is held.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from bench.errors import BenchError, UnwritableError
from bench.executors.base import Callbacks, QueueFullError, settle_run_json
from bench.executors.outcome import EndNote, Outcome
from bench.executors.pack import is_packed, refuse_part_of_a_pack
from bench.executors.settlement import Settlement, as_iso, lacks_accounting
from bench.matrix.cell import Run
from bench.slurm.accounting import JobStatus, queue_statuses
from bench.slurm.client import (
    BatchJob,
    Slurm,
    SlurmRefusedError,
    SlurmUnavailableError,
    SubmissionUncertainError,
)
from bench.slurm.parsing import NodeGroup, QueueRow
from bench.study.ledger import FailureClass, RunRecord, RunState, now, submit_lock
from bench.study.plan_json import PlannedStudy
from bench.study.run_json import Attempt, new_attempt, next_attempt, update_run, write_run

#: An orphaned sbatch may wait this long for a busy controller before it ends.
LOCK_WAIT_S = 200.0
#: A job whose submission was not confirmed appears in squeue within this time.
UNCERTAIN_WAIT_S = 10.0
#: Requests that wait for a busy controller are served at about the same time.
SECOND_LOOK_S = 1.0

_INTERRUPTED = "sbatch was interrupted before Slurm took the job"

#: sbatch --test-only says this of jobs that can never run, and of those whose nodes are down or
#: drained. sbatch itself accepts both (unless the site rejects the former), and the job waits.
_NOT_NOW = re.compile(r"node configuration is not available|[Rr]equired node not available")
#: States of nodes that run jobs or could.
_IN_SERVICE = {"idle", "mixed", "allocated", "completing", "planned"}
_PARTITION = re.compile(r"^#SBATCH --partition=(\S+)", re.M)


class SlurmExecutor:
    """Execute the runs of a study as Slurm jobs."""

    def __init__(self, study: PlannedStudy, *, slurm: Slurm | None = None) -> None:
        self.study = study
        provides_python = study.plan.get("setup") or study.plan.get("container")
        #: Added to the environment of sbatch: without set-up lines, jobs use this python.
        self.variables = {} if provides_python else {"BENCH_PYTHON": sys.executable}
        self.slurm = slurm or Slurm(environment={**os.environ, **self.variables})
        self._cells = {run.run_id: study.cells[run.cell_id] for run in study.runs}
        self._warned_of_overriding = False

    def submit(
        self, runs: Sequence[Run], *, callbacks: Callbacks, max_queued: int | None = None
    ) -> list[Run]:
        """Submit ``runs`` in order until ``max_queued`` is reached; return those it holds back.

        Raises:
            BenchError: Slurm rejected a run (QueueFullError: at the user's limit of jobs) or is
                unreachable. Earlier runs stay submitted; the next call continues with this one.
        """
        seen = {run_id: record.attempt for run_id, record in self.study.records().items()}
        with self._lock(callbacks) as lock:
            records = self._refreshed(reconcile=True)
            todo = [run for run in runs if may_start(records[run.run_id], seen[run.run_id])]
            self._warn_of_overriding(todo, callbacks)
            todo = self._test_largest(todo, callbacks)
            queued = sum(record.state.active for record in records.values())
            room = len(todo) if max_queued is None else max(0, max_queued - queued)
            for done, run in enumerate(todo[:room]):
                callbacks.on_start(run)
                try:
                    record = self._submit_one(run, records[run.run_id], lock)
                except SlurmRefusedError as refusal:
                    _raise_refused(refusal, todo, done)
                callbacks.on_end(run, record)
            return todo[room:]

    def check_largest(self, runs: Sequence[Run]) -> None:
        """Raise BenchError with Slurm's message if it would not accept the largest of ``runs``."""
        self._test_largest(list(runs), Callbacks())

    def command_line(self, run: Run) -> str:
        """Return the sbatch command for the next attempt of ``run``, with added variables."""
        attempt = next_attempt(self.study, run, self._records_once[run.run_id])
        return self._shell_line(self._job(attempt))

    def _shell_line(self, job: BatchJob) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*variables, shlex.join(job.command)])

    def refresh(self) -> dict[str, RunRecord]:
        """Settle ended runs; calls squeue once, and sacct once for all jobs that left the queue."""
        if any(_lacks_job_id(record) for record in self.study.records().values()):
            try:
                with submit_lock(self.study.folder.lock):
                    return self._refreshed(reconcile=True)
            except SlurmUnavailableError:
                raise
            except BenchError:
                pass  # a running submission settles its own intents
        return self._refreshed(reconcile=False)

    def cancel(self, runs: Sequence[Run]) -> int:
        """Cancel this study's jobs of ``runs`` and settle them; return their number."""
        with submit_lock(self.study.folder.lock, wait_s=LOCK_WAIT_S):
            records = self._refreshed(reconcile=True)
            wanted = {run.run_id for run in runs}
            chosen = [r for r in records.values() if r.run_id in wanted and r.state.active and r.job_id]
            refuse_part_of_a_pack(records.values(), chosen)
            # Compare job names too: a cluster that was set up again counts job ids from 1.
            queue = self.slurm.queue() if chosen else []
            ours, known = {(row.key.job, row.name) for row in queue}, queue_statuses(queue)
            jobs = [str(r.job_id) for r in chosen if (r.job_id, r.job_name) in ours]
            if jobs:
                self.slurm.cancel(jobs)
            events = [self._cancelled(record, known.get(str(record.job_id)), jobs) for record in chosen]
            self.study.ledger.append_all(events)
            return len(chosen)

    def _cancelled(self, record: RunRecord, job: JobStatus | None, jobs: Sequence[str]) -> dict[str, Any]:
        """Settle an attempt as cancelled, before accounting of its job is available."""
        lost = record.state is RunState.UNKNOWN
        reason = f"given up by bench cancel: {record.reason}" if lost else "cancelled by bench cancel"
        ours = record.job_id in jobs
        started = job.started if job and ours and not is_packed(record) else None
        details = {"job_id": record.job_id, "started_at": as_iso(started)}
        outcome = Outcome(RunState.CANCELLED, reason, FailureClass.CANCELLED, details=details)
        event = settle_run_json(self.study, record, outcome, ended_at=now())
        return {**event, "accounted": not ours}

    @contextmanager
    def _lock(self, callbacks: Callbacks) -> Iterator[int]:
        """Hold the study's lock; report if another submission has to end first."""
        with ExitStack() as held:
            try:
                lock = held.enter_context(submit_lock(self.study.folder.lock, wait_s=0.5))
            except UnwritableError:
                raise
            except BenchError as busy:
                callbacks.on_message(f"{busy.message}: waiting for it to end")
                lock = held.enter_context(submit_lock(self.study.folder.lock, wait_s=LOCK_WAIT_S))
            yield lock

    def _warn_of_overriding(self, runs: Sequence[Run], callbacks: Callbacks) -> None:
        """Warn once about environment variables that override directives of the scripts."""
        variables = self.slurm.sbatch_variables() if runs else {}
        if variables and not self._warned_of_overriding:
            self._warned_of_overriding = True
            listed = ", ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
            callbacks.on_message(
                f"{listed} in the environment: sbatch prefers that to the scripts' #SBATCH lines"
            )

    def _test_largest(self, runs: list[Run], callbacks: Callbacks) -> list[Run]:
        """Raise BenchError if Slurm would reject the largest cell; skip cells that it accepted before.

        If Slurm leaves the question open, a run of the largest cell is first in the returned list.
        """
        if not runs:
            return runs
        size = {run_id: (cell.nodes, cell.world_size) for run_id, cell in self._cells.items()}
        largest = max(runs, key=lambda run: size[run.run_id])
        accepted = [event["run_id"] for event in self.study.ledger.events() if event["event"] == "submitted"]
        if any(size.get(run_id, (0, 0)) >= size[largest.run_id] for run_id in accepted):
            return runs
        script, nodes = self.study.script(largest.cell_id), self._cells[largest.run_id].nodes
        try:
            self.slurm.test_only(script)
        except SlurmRefusedError as refusal:
            why = permanent_refusal(self.slurm, refusal, script=script, nodes=nodes)
            if not why:
                callbacks.on_message(
                    f"{largest.run_id} goes first: Slurm says of its size now: {refusal.output}"
                )
                return [largest, *(run for run in runs if run is not largest)]
            what = f"Slurm would not take the largest cell, {largest.cell_id}: {why}"
            remedy = (
                "nothing was submitted; correct the matrix's cluster section, or leave that size out (--only)"
            )
            raise BenchError(what, remedy=remedy) from None
        return runs

    def _submit_one(self, run: Run, record: RunRecord, lock: int) -> RunRecord:
        attempt = new_attempt(self.study, run, record)
        allocation = {"kind": "job", "nodes": attempt.cell.nodes}
        write_run(attempt.folder, attempt.describe(self.study, submitted_at=now(), allocation=allocation))
        self.study.ledger.append(
            "intent", run_id=run.run_id, attempt=attempt.number, job_name=attempt.job_name, refused=False
        )
        record = RunRecord(run.run_id, attempt.number, RunState.QUEUED, job_name=attempt.job_name)
        self._submit_job(self._job(attempt), [record], lock)
        return record

    def _submit_job(self, job: BatchJob, records: Sequence[RunRecord], lock: int) -> None:
        """Submit a job for ``records``, whose intents are written, and save its id."""
        try:
            job_id = self.slurm.submit(job, pass_fds=(lock,))
        except SubmissionUncertainError as lost:
            job_id = self._find_by_name(records[0].run_id, job.job_name, lost)
        except (SlurmRefusedError, SlurmUnavailableError) as error:
            for record in records:
                self._withdraw(record, error.output, refused=True)
            raise
        self._add_job_id(records, job_id)

    def _job(self, attempt: Attempt) -> BatchJob:
        """Return the job of an attempt; the script gets the run's folder as an absolute path."""
        folder = attempt.folder
        return BatchJob(
            script=self.study.script(attempt.cell.cell_id),
            arguments=[str(folder.path.absolute())],
            job_name=attempt.job_name,
            output=folder.out.absolute(),
            error=folder.err.absolute(),
        )

    def _add_job_id(self, records: Sequence[RunRecord], job_id: str) -> None:
        events = [
            {"event": "submitted", "run_id": record.run_id, "attempt": record.attempt, "job_id": job_id}
            for record in records
        ]
        self.study.ledger.append_all(events)
        for record in records:
            update_run(self.study.run_folder(record), {"job_id": job_id})
            record.job_id = job_id

    def _find_by_name(self, run_id: str, job_name: str, lost: SubmissionUncertainError) -> str:
        """Return the id of a job whose submission was not confirmed; the intent is kept if there is none."""
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
            f"no answer for {run_id} ({lost.output}), and no job has its name yet",
            remedy="type `bench submit` again in a minute: it looks for the job before it submits",
        )

    @cached_property
    def _records_once(self) -> dict[str, RunRecord]:
        return self.study.records()

    def _refreshed(self, *, reconcile: bool) -> dict[str, RunRecord]:
        records = self.study.records()
        queue: list[QueueRow] = []
        if any(record.state.active for record in records.values()):
            queue = self.slurm.queue()
            intents = [record for record in records.values() if _lacks_job_id(record)]
            if reconcile and intents:
                queue = self._reconcile(intents, queue)
        active = [record for record in records.values() if record.state.active and record.job_id]
        unaccounted = [record for record in records.values() if lacks_accounting(record)]
        Settlement(self.study, self.slurm).update(active, queue, unaccounted=unaccounted)
        return records

    def _reconcile(self, intents: Sequence[RunRecord], queue: list[QueueRow]) -> list[QueueRow]:
        """Find the jobs of intents without a job id, withdraw the others; return the latest squeue."""
        names: dict[str, str | None] = {row.name: row.key.job for row in queue}
        if any(record.job_name not in names for record in intents):
            time.sleep(SECOND_LOOK_S)
            queue = self.slurm.queue()
            names = {row.name: row.key.job for row in queue}
        for record in intents:
            folder, name = self.study.run_folder(record), str(record.job_name)
            if name not in names:  # the runs of a pack share a name: ask once
                names[name] = self._accounted_by_name(record)
            job_id = names[name]
            if job_id is not None:
                self._add_job_id([record], job_id)
            elif EndNote.read(folder).exit_code is None:
                self._withdraw(record, _INTERRUPTED)
            else:  # it ran, and Slurm has forgotten it
                Settlement(self.study, self.slurm).settle_by_folder(record)
        return queue

    def _withdraw(self, record: RunRecord, reason: str, *, refused: bool = False) -> None:
        """Withdraw an intent; ``refused`` if it certainly left no job."""
        self.study.ledger.append(
            "withdrawn", run_id=record.run_id, attempt=record.attempt, reason=reason, refused=refused
        )
        changes = {"state": str(RunState.PLANNED), "reason": reason}
        update_run(self.study.run_folder(record), changes)
        record.state, record.reason = RunState.PLANNED, reason

    def _accounted_by_name(self, record: RunRecord) -> str | None:
        """Return the id of a job that squeue has forgotten."""
        try:
            since = datetime.fromisoformat(str(record.details.get("time"))) - timedelta(minutes=10)
        except ValueError:
            since = datetime.now(UTC) - timedelta(days=30)
        try:
            rows = self.slurm.accounting_by_name([str(record.job_name)], since=since)
        except SlurmUnavailableError:
            return None
        return next((row.key.job for row in rows if row.key.step is None), None)


def _lacks_job_id(record: RunRecord) -> bool:
    """Return True if the submission of an attempt was not confirmed."""
    return record.state.active and record.job_id is None


def may_start(record: RunRecord, attempt_seen: int) -> bool:
    """Return True if a run is still to be started: another `bench submit` may have started it."""
    if record.state.active or record.state is RunState.COMPLETED:
        return False
    return record.attempt == attempt_seen or record.state is RunState.PLANNED


def _raise_refused(refusal: SlurmRefusedError, todo: Sequence[Run], done: int) -> NoReturn:
    kept = f"{done} of {len(todo)} are submitted and kept"
    what = f"sbatch refused {todo[done].run_id}: {refusal.output} ({kept})"
    if refusal.queue_is_full:
        remedy = "type `bench submit` again when jobs have ended, or use --max-queued or --wait"
        raise QueueFullError(what, remedy=remedy, left=todo[done:]) from None
    remedy = "correct the cause, then type `bench submit` again: it continues with this run"
    raise BenchError(what, remedy=remedy) from None


def partitions_of(slurm: Slurm, script: Path) -> dict[str, list[NodeGroup]]:
    """Return the nodes of each partition that a script asks for; empty if they are unknown."""
    try:
        groups = slurm.nodes()
    except SlurmUnavailableError:
        return {}
    named = _PARTITION.search(script.read_text(encoding="utf-8"))
    names = named[1].split(",") if named else [group.partition for group in groups if group.default]
    found = {name: [group for group in groups if group.partition == name] for name in names}
    return found if all(found.values()) else {}


def longest_limit_s(partitions: Mapping[str, Sequence[NodeGroup]]) -> int | None:
    """Return the longest time limit of partitions in seconds; None if unlimited or unknown."""
    limits = {group.time_limit_s for groups in partitions.values() for group in groups}
    known = [limit for limit in limits if limit is not None]
    return max(known) if known and len(known) == len(limits) else None


def permanent_refusal(slurm: Slurm, refusal: SlurmRefusedError, *, script: Path, nodes: int) -> str:
    """Return why Slurm will never accept a job on ``nodes`` nodes; empty if it may later.

    Slurm gives the same message for a job that fits no node and for nodes that are down or drained.
    """
    if not _NOT_NOW.search(refusal.output):
        return refusal.output
    partitions = partitions_of(slurm, script)
    sizes = {name: sum(group.nodes for group in groups) for name, groups in partitions.items()}
    if sizes and max(sizes.values()) < nodes:
        has = " and ".join(f"partition {name} has {count} nodes" for name, count in sizes.items())
        return f"{refusal.output} ({has}, and it takes {nodes})"
    groups = [group for groups in partitions.values() for group in groups]
    all_in_service = bool(groups) and all(group.state in _IN_SERVICE for group in groups)
    return refusal.output if all_in_service else ""
