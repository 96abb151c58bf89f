"""Submit each run as a Slurm job. A crash neither loses a job nor submits a run twice.

Before sbatch is called, an ``intent`` event with a unique job name is synced to the ledger; the job id is
written after sbatch returns. After a crash, the next call finds an intent without a job id and asks Slurm for
a job with this name. sbatch inherits the study's lock. The lock therefore stays held while an sbatch process
that outlived `bench submit` can still submit its job.

With ``max_running: 1``, each job depends on all jobs of the study that have not ended
(``--dependency=afterany``). A dependency on the preceding job alone is not enough: if that job is cancelled
while it waits, Slurm would start its successor although an earlier job still executes. The ledger contains
the jobs' names, and squeue shows which jobs have not ended. A submission keeps no other state, so that a
killed submission cannot break the chain.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from ...errors import BenchError, UnwritableError
from ...matrix.cell import Run
from ...study.layout import JobFolder
from ...study.ledger import FailureClass, RunRecord, RunState, now, submit_lock
from ...study.plan_json import PlannedStudy
from ...study.run_json import Attempt, new_attempt, next_attempt, update_run, write_run
from ...units import count, human_duration, slurm_time
from ..outcome import EndNote, JobStatus, Outcome
from ..scheduler import Callbacks, QueueFullError, Records, Scheduler, may_start, settle_run_json
from .client import (
    BatchJob,
    Slurm,
    SlurmRefusedError,
    SlurmUnavailableError,
    SubmissionUncertainError,
)
from .job_states import is_preliminary, queue_statuses, read_state
from .messages import NOT_NOW, search
from .pack import is_packed, refuse_part_of_a_pack
from .parsing import NodeGroup, QueueRow
from .settlement import Settlement, as_iso, lacks_accounting

#: An sbatch process that outlived `bench submit` waits at most this long for a busy controller.
LOCK_WAIT_S = 200.0
#: Unless the cluster is very busy, Slurm's scheduler considers a new job within this time.
SCHEDULED_S = 4.0
#: Pause before squeue is called again: a busy controller can answer squeue just before it creates the job.
SECOND_LOOK_S = 1.0

#: The time limit that is requested for a training, divided by its expected time.
_LIMIT_FACTOR = 1.1
_SHORTEST_LIMIT_S = 600

_INTERRUPTED = "sbatch was interrupted before Slurm accepted the job"

#: States of nodes that run jobs or can start one.
_IN_SERVICE = {"idle", "mixed", "allocated", "completing", "planned"}
_PARTITION = re.compile(r"^#SBATCH --partition=(\S+)", re.M)


class SlurmScheduler(Scheduler):
    """Execute the runs of a study as Slurm jobs."""

    def __init__(self, study: PlannedStudy, *, slurm: Slurm | None = None) -> None:
        super().__init__(study)
        provides_python = study.plan.get("setup") or study.plan.get("container")
        samples = any(cell.is_unrecorded for cell in study.cells.values())
        #: Variables for sbatch. Without cluster.setup or a container, jobs use this Python interpreter. It
        #: also samples the conditions on the nodes for commands without the recorder, whose Python can lack
        #: bench.
        self.variables = {} if provides_python and not samples else {"BENCH_PYTHON": sys.executable}
        self.slurm = slurm or Slurm(environment={**os.environ, **self.variables})
        self._cells = {run.run_id: study.cells[run.cell_id] for run in study.runs}
        self._warned_of_overriding = False
        self._partitions: dict[Path, dict[str, list[NodeGroup]]] = {}

    def submit(
        self, runs: Sequence[Run], *, seen: Records, callbacks: Callbacks, max_queued: int | None = None
    ) -> list[Run]:
        """Submit ``runs`` as jobs; the next call continues with a run that Slurm rejected."""
        with self._lock(callbacks) as lock:
            records = self._refreshed(reconcile=True)
            todo = [run for run in runs if may_start(records[run.run_id], seen[run.run_id])]
            self._warn_of_overriding(todo, callbacks)
            active = sum(record.state.active for record in records.values())
            room = None if max_queued is None else max(0, max_queued - active)
            return self._submit_now(todo, records, lock, callbacks, room)

    def _submit_now(
        self, runs: list[Run], records: Records, lock: int, callbacks: Callbacks, room: int | None
    ) -> list[Run]:
        """Submit the first ``room`` of ``runs`` (None: all); return the others."""
        todo, before = self._test_largest(runs, callbacks), self._unended_jobs()
        for done, run in enumerate(todo[:room]):
            callbacks.on_start(run)
            attempt = new_attempt(self.study, run, records[run.run_id])
            work = [(attempt, {"kind": "job", "nodes": attempt.cell.nodes})]
            try:
                (record,) = self._submit_attempts(work, self._job(attempt), before, lock)
            except SlurmRefusedError as refusal:
                _raise_refused(refusal, todo, done)
            if before is not None and record.job_id is not None:
                before.append(record.job_id)
            callbacks.on_end(run, record)
        return [] if room is None else todo[room:]

    def command_line(self, run: Run) -> str:
        """Return the sbatch command for the next attempt of ``run``, including environment variables."""
        attempt = next_attempt(self.study, run, self._records_once[run.run_id])
        return self._shell_line(self._job(attempt))

    def _shell_line(self, job: BatchJob) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*variables, shlex.join(job.command)])

    def poll(self) -> dict[str, RunRecord]:
        """Update the records of all runs with one call of squeue and one of sacct; return the records."""
        if any(_lacks_job_id(record) for record in self.study.records().values()):
            try:
                with submit_lock(self.study.folder.lock):
                    return self._refreshed(reconcile=True)
            except SlurmUnavailableError:
                raise
            except BenchError:
                pass  # the running `bench submit` completes its own intents
        return self._refreshed(reconcile=False)

    def stuck_runs(self, runs: Sequence[Run]) -> list[RunRecord]:
        """Return the submitted ``runs`` that Slurm will not start unless somebody acts.

        Slurm accepts some jobs that it never starts, and does not report this before its scheduler has
        considered the job. This method waits at most :data:`SCHEDULED_S` seconds for the scheduler.
        """
        records, stuck = self.study.records(), []
        submitted = [record for run in runs if (record := records[run.run_id]).state.active and record.job_id]
        jobs = queue_statuses(self._considered({str(record.job_name) for record in submitted}))
        for record in submitted:
            job = jobs.get(str(record.job_id))
            if job is not None and job.stuck:
                record.reason, record.details["stuck"] = job.reason, True
                stuck.append(record)
        return stuck

    def _considered(self, job_names: Collection[str]) -> list[QueueRow]:
        """Return the rows of squeue after the scheduler has considered these jobs.

        The list is empty if Slurm does not answer.
        """
        deadline = time.monotonic() + SCHEDULED_S
        while job_names:
            try:
                rows = self.slurm.queue(names=list(job_names))
            except SlurmUnavailableError:
                return []
            unconsidered = [row for row in rows if row.state == "PENDING" and is_preliminary(row.reason)]
            if not unconsidered or time.monotonic() > deadline:
                return rows
            time.sleep(0.25)
        return []

    def queue_wait(self, cell_id: str, *, nodes: int, training_s: float) -> tuple[float | None, str, str]:
        """Estimate a wait with a test submission of the cell's script, with the time limit of the training.

        Long jobs wait longer than the short jobs of the benchmark.
        """
        script = self.study.script(cell_id)
        wanted_s = max(_SHORTEST_LIMIT_S, math.ceil(_LIMIT_FACTOR * training_s))
        if script not in self._partitions:
            self._partitions[script] = partitions_of(self.slurm, script) if script.is_file() else {}
        partitions = self._partitions[script]
        if reason := too_many_nodes(partitions, nodes):  # the test of Slurm 26.05 does not notice this
            return None, "", f"Slurm would not start the job: {reason}"
        limit_s = longest_limit_s(partitions)
        jobs = 1 if limit_s is None else math.ceil(wanted_s / limit_s)
        asked_s = wanted_s if limit_s is None else min(wanted_s, limit_s)
        remark = ""
        if jobs > 1 and limit_s is not None:
            limit = human_duration(limit_s)
            remark = (
                f"{jobs} consecutive jobs: the partition's limit is {limit}; only the first wait is counted"
            )
        # A predicted size has no script. These options override the directives of a similar cell's script.
        options = [f"--nodes={nodes}", f"--time={slurm_time(asked_s)}"]
        try:
            starts = self.slurm.test_only(script, options=options)
        except SlurmRefusedError as refusal:
            return None, "", f"Slurm would not start the job: {refusal.output}"
        if starts is None:
            return None, "", f"Slurm cannot estimate the start{'; ' if remark else ''}{remark}"
        answered_at = datetime.now(UTC)  # not before: a busy controller answers late, with its time then
        seconds = max(0.0, (starts - answered_at).total_seconds())
        # Slurm rounds to seconds, so that an immediate start can appear to be one second away.
        seconds = 0.0 if seconds < 2 else seconds
        return seconds, f"Slurm's estimate at {answered_at:%Y-%m-%d %H:%M} UTC (sbatch --test-only)", remark

    def cancel(self, runs: Sequence[Run]) -> int:
        """Cancel the jobs of ``runs`` and record the runs as cancelled; return the number of runs."""
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
        """Record an attempt as cancelled before sacct shows the end of its job; return the ledger event."""
        lost = record.state is RunState.UNKNOWN
        reason = (
            f"marked as cancelled by bench cancel: {record.reason}" if lost else "cancelled by bench cancel"
        )
        ours = record.job_id in jobs
        started = job.started if job and ours and not is_packed(record) else None
        details = {"job_id": record.job_id, "started_at": as_iso(started)}
        outcome = Outcome(RunState.CANCELLED, reason, FailureClass.CANCELLED, details=details)
        event = settle_run_json(self.study, record, outcome, ended_at=now())
        return {**event, "accounted": not ours, "by_bench": True}

    @contextmanager
    def _lock(self, callbacks: Callbacks) -> Iterator[int]:
        """Hold the study's lock. If another submission holds the lock, print a message and wait."""
        with ExitStack() as held:
            try:
                lock = held.enter_context(submit_lock(self.study.folder.lock, wait_s=0.5))
            except UnwritableError:
                raise
            except BenchError as busy:
                callbacks.on_message(f"{busy.message}; waiting until it ends")
                lock = held.enter_context(submit_lock(self.study.folder.lock, wait_s=LOCK_WAIT_S))
            yield lock

    def _warn_of_overriding(self, runs: Sequence[Run], callbacks: Callbacks) -> None:
        """Warn once about environment variables that override directives of the scripts."""
        variables = self.slurm.sbatch_variables() if runs else {}
        if variables and not self._warned_of_overriding:
            self._warned_of_overriding = True
            listed = ", ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
            callbacks.on_message(f"{listed} in the environment overrides the scripts' #SBATCH lines")

    def _test_largest(self, runs: list[Run], callbacks: Callbacks) -> list[Run]:
        """Raise BenchError if Slurm would reject the largest run; return the runs in submission order.

        The test is skipped if Slurm has already accepted a run of this size. If Slurm rejects the run now
        but may accept it later, the run is moved to the front.
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
                    f"{largest.run_id} is submitted first, because sbatch --test-only says: {refusal.output}"
                )
                return [largest, *(run for run in runs if run is not largest)]
            what = f"Slurm does not accept the largest cell, {largest.cell_id}: {why}"
            remedy = (
                "nothing was submitted; correct the matrix's cluster section and plan it again (`sinfo -s` "
                "lists partitions, `sacctmgr show assoc where user=$USER` accounts and QOS), or leave out "
                "that size (--only)"
            )
            raise BenchError(what, remedy=remedy) from None
        return runs

    def _unended_jobs(self) -> list[str] | None:
        """Return the ids of the study's jobs that have not ended; None without max_running."""
        if self.study.max_running is None:
            return None
        names = {event["job_name"] for event in self.study.ledger.events() if event["event"] == "intent"}
        rows = [row for row in self.slurm.queue() if row.name in names]
        jobs = [row.key for row in rows if not read_state(row.state).state.ended]
        # A heterogeneous job has several rows.
        return list(dict.fromkeys(key.job for key in sorted(jobs, key=lambda key: int(key.number))))

    def _submit_attempts(
        self,
        work: Sequence[tuple[Attempt, dict[str, Any]]],
        job: BatchJob,
        before: Sequence[str] | None,
        lock: int,
    ) -> list[RunRecord]:
        """Submit one job for attempts with their allocations, and save its id; return their records.

        The job waits for the end of the jobs ``before``.
        """
        records, intents = [], []
        for attempt, allocation in work:
            content = self._describe(attempt, submitted_at=now(), allocation=allocation)
            write_run(attempt.folder, content)
            run_id, number, name = attempt.run.run_id, attempt.number, attempt.job_name
            records.append(RunRecord(run_id, number, RunState.QUEUED, job_name=name))
            intent = {"event": "intent", "run_id": run_id, "attempt": number, "job_name": name}
            of_pack = {"allocation": allocation} if "pack" in allocation else {}
            intents.append({**intent, **of_pack, "refused": False})
        self.study.ledger.append_all(intents)
        if before:
            job = replace(job, options=[*job.options, f"--dependency=afterany:{':'.join(before)}"])
        self._submit_job(job, records, lock)
        return records

    def _submit_job(self, job: BatchJob, records: Sequence[RunRecord], lock: int) -> None:
        """Submit a job for ``records``, whose ``intent`` events are in the ledger, and save its id."""
        try:
            job_id = self.slurm.submit(job, pass_fds=(lock,))
        except SubmissionUncertainError as lost:
            job_id = self.slurm.find_uncertain(job.job_name) or ""
            if not job_id:
                what = f"no answer to the submission of {records[0].run_id} ({lost.output})"
                what = f"{what}, and squeue does not list its job yet"
                remedy = (
                    "run `bench submit` again in a minute; it looks for the job before it submits the run"
                )
                raise SlurmUnavailableError("sbatch", what, remedy=remedy) from None
        except (SlurmRefusedError, SlurmUnavailableError) as error:
            for record in records:
                self._withdraw(record, error.output, refused=True)
            raise
        self._add_job_id(records, job_id)

    def _job(self, attempt: Attempt) -> BatchJob:
        return self._batch_job(self.study.script(attempt.cell.cell_id), attempt.folder, attempt.job_name)

    def _batch_job(self, script: Path, folder: JobFolder, name: str, options: Sequence[str] = ()) -> BatchJob:
        """Return a batch job; its script receives the absolute path of ``folder``."""
        return BatchJob(
            script=script,
            arguments=[str(folder.path.absolute())],
            job_name=name,
            output=folder.out.absolute(),
            error=folder.err.absolute(),
            # The site's default, or SBATCH_EXPORT, can keep variables from the job.
            options=[*options, *["--export=ALL"] * bool(self.study.plan.get("env_from"))],
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
        """Find the jobs of interrupted submissions, or withdraw the attempts; return the rows of squeue."""
        names: dict[str, str | None] = {row.name: row.key.job for row in queue}
        if any(record.job_name not in names for record in intents):
            time.sleep(SECOND_LOOK_S)
            queue = self.slurm.queue()
            names = {row.name: row.key.job for row in queue}
        for record in intents:
            folder, name = self.study.run_folder(record), str(record.job_name)
            if name not in names:  # the runs of a pack share a job name: call sacct once
                names[name] = self._accounted_by_name(record)
            job_id = names[name]
            if job_id is not None:
                self._add_job_id([record], job_id)
            elif EndNote.read(folder).exit_code is None:
                self._withdraw(record, _INTERRUPTED)
            else:  # the job has ended, and Slurm no longer knows it
                Settlement(self.study, self.slurm).settle_by_folder(record)
        return queue

    def _accounted_by_name(self, record: RunRecord) -> str | None:
        """Find in sacct the id of a job that squeue no longer lists; return None if there is none."""
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
    """Return True if an attempt is to be submitted but has no job id yet."""
    return record.state.active and record.job_id is None


def _raise_refused(refusal: SlurmRefusedError, todo: Sequence[Run], done: int) -> NoReturn:
    kept = f"{done} of {len(todo)} runs are submitted"
    what = f"sbatch rejected {todo[done].run_id}: {refusal.output} ({kept})"
    if refusal.queue_is_full:
        remedy = "run `bench submit` again when some jobs have ended, or use --max-queued or --wait"
        raise QueueFullError(what, remedy=remedy, left=todo[done:]) from None
    remedy = "correct the cause, then run `bench submit` again: it continues with this run"
    raise BenchError(what, remedy=remedy) from None


def partitions_of(slurm: Slurm, script: Path) -> dict[str, list[NodeGroup]]:
    """Return the node groups of each partition that a script requests, or ``{}`` if any is unknown."""
    try:
        groups = slurm.nodes()
    except SlurmUnavailableError:
        return {}
    named = _PARTITION.search(script.read_text(encoding="utf-8"))
    names = named[1].split(",") if named else [group.partition for group in groups if group.default]
    found = {name: [group for group in groups if group.partition == name] for name in names}
    return found if all(found.values()) else {}


def longest_limit_s(partitions: Mapping[str, Sequence[NodeGroup]]) -> int | None:
    """Return the longest time limit of ``partitions`` in seconds, or None if any is unlimited or unknown."""
    limits = {group.time_limit_s for groups in partitions.values() for group in groups}
    known = [limit for limit in limits if limit is not None]
    return max(known) if known and len(known) == len(limits) else None


def too_many_nodes(partitions: Mapping[str, Sequence[NodeGroup]], nodes: int) -> str:
    """Return why no partition can run a job on ``nodes`` nodes, or ``""`` if there is no such reason."""
    reasons = []
    for name, groups in partitions.items():
        size, limit = sum(group.nodes for group in groups), groups[0].max_nodes
        if nodes > size:
            reasons.append(f"partition {name} has {count(size, 'node')}")
        elif limit is not None and nodes > limit:
            reasons.append(f"partition {name} allows {count(limit, 'node')} per job")
        else:
            return ""
    return f"{' and '.join(reasons)}, and the job needs {nodes}" if reasons else ""


def permanent_refusal(slurm: Slurm, refusal: SlurmRefusedError, *, script: Path, nodes: int) -> str:
    """Return why Slurm can never start a job on ``nodes`` nodes, or ``""`` if the job can start later.

    Slurm's message is the same in two cases: no nodes suit the job, or such nodes are down or drained.
    """
    if refusal.queue_is_full:
        return ""
    if not search(NOT_NOW, refusal.output):
        return refusal.output
    partitions = partitions_of(slurm, script)
    if reason := too_many_nodes(partitions, nodes):
        return f"{refusal.output} ({reason})"
    groups = [group for groups in partitions.values() for group in groups]
    all_in_service = bool(groups) and all(group.state in _IN_SERVICE for group in groups)
    return refusal.output if all_in_service else ""


SCHEDULER = SlurmScheduler
