"""Settle the runs of a study: determine and record how their Slurm jobs ended.

Jobs are looked up in squeue, then in sacct, and then in their run folders. A run is settled when the job's
rows in sacct are complete. The rows arrive one by one over some seconds, and the last row can contain the
cause of a failure. Without accounting, a run is settled from squeue (which remembers a job for some minutes)
and its run folder. If accounting was only temporarily unavailable, a later refresh adds the values from
sacct.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

from ...errors import UnwritableError
from ...study.conditions import Neighbours, Occupation
from ...study.files import write_atomically
from ...study.ledger import FailureClass, RunRecord, RunState, now
from ...study.plan_json import PlannedStudy
from ...study.run_json import update_run
from ..neighbours import Jobs, occupation, occupations
from ..outcome import EndNote, JobStatus, Outcome, log_tail, process_outcome
from ..scheduler import add_unsaved, settle_run_json
from .client import Slurm, SlurmUnavailableError
from .job_states import (
    SlurmState,
    classify,
    end_of_last_start,
    job_outcome,
    queue_statuses,
    state_from_notices,
)
from .pack import Packs, is_packed, own_rows
from .parsing import AccountingRow, QueueRow, accounting_table, expand_hosts

#: Seconds after the end of a job until its rows in sacct are considered complete.
GRACE_S = 30.0
#: The limit in place of GRACE_S if the end time comes from the clock of a node, which can be wrong.
NODE_CLOCK_GRACE_S = 120.0
#: Seconds after the end of a job during which missing rows are looked up again in sacct.
MISSING_FOR_S = 24 * 3600.0

_PRIVATE = "job data of other users are private (PrivateData)"
INCOMPLETE = "has ended; its accounting in sacct is not complete yet"

#: From this number of runs on, several threads settle them.
MANY_RUNS = 64
#: On a shared file system each of the two dozen file operations per run takes a millisecond, so threads are
#: useful.
THREADS = 8


@dataclass
class Neighbourhood:
    """The jobs on the nodes of runs that have ``ended``. Slurm is asked once, when they are first needed.

    ``unknown`` is the reason why sacct cannot be asked, or why jobs are possibly missing.
    """

    study: PlannedStudy
    slurm: Slurm
    ended: Sequence[Occupation]
    queue: Mapping[str, JobStatus]
    unknown: str

    def of(self, run: Occupation) -> Neighbours:
        """Return the other jobs on the nodes of ``run``."""
        jobs = self.jobs.beside(run)  # can set unknown
        return Neighbours(jobs, self.unknown)

    @cached_property
    def jobs(self) -> Jobs:
        """All jobs that are known to have been on these nodes."""
        return Jobs(self._find())

    def _find(self) -> list[Occupation]:
        if not self.unknown:
            try:
                return self._ask()
            except SlurmUnavailableError as error:
                self.unknown = error.message.partition("\n")[0]
        return [*self.ended, *occupations(self.study, queue=self.queue)]

    def _ask(self) -> list[Occupation]:
        nodes = sorted({node for run in self.ended for node in run.nodes})
        if not nodes:
            return []
        last = max((run.end or datetime.now(UTC) for run in self.ended), default=datetime.now(UTC))
        start, end = min(run.start for run in self.ended), last + timedelta(seconds=1)
        rows = self.slurm.jobs_on(nodes, start=start, end=end)
        self.unknown = self._privacy()
        ours = {str(event["job_id"]) for event in self.study.ledger.events() if event.get("job_id")}
        return [
            Occupation(row.key.job, expand_hosts(row.hosts), row.started, row.ended, row.key.job in ours)
            for row in rows
            if row.started is not None
        ]

    def _privacy(self) -> str:
        """Return why jobs of other users are possibly missing, or ``""`` if all jobs are visible."""
        try:
            return _PRIVATE if self.slurm.jobs_are_private() else ""
        except SlurmUnavailableError as error:
            return f"job data of other users may be private ({error.message})".partition("\n")[0]


class Settlement:
    """Update the records of a study's runs, and record the end of runs whose jobs have ended.

    All events are appended to the ledger in one operation, because syncing the file after each event would be
    slow.
    """

    def __init__(self, study: PlannedStudy, slurm: Slurm) -> None:
        self._study, self._slurm, self._packs = study, slurm, Packs(study.folder)
        #: Answers of squeue and sacct by job id, and the error message of sacct.
        self._queue: Mapping[str, JobStatus] = {}
        self._rows: dict[str, list[AccountingRow]] = {}
        self._no_accounting, self._accounting_may_return = "", False
        self._settled: dict[str, tuple[RunRecord, dict[str, Any]]] = {}

    def update(
        self, active: Sequence[RunRecord], queue: Sequence[QueueRow], *, unaccounted: Sequence[RunRecord] = ()
    ) -> None:
        """Update ``active`` attempts and record how they ended; add accounting to ``unaccounted`` attempts.

        Calls sacct once for all jobs that have left the queue. An attempt whose rows in sacct are
        incomplete stays ``running`` until a later call.
        """
        names = {str(record.job_name) for record in active}
        self._queue = queue_statuses([row for row in queue if row.name in names])
        gone = []
        for record in active:
            job = self._queue.get(str(record.job_id))
            if job is None or job.state.ended or self._packs.has_ended(record):
                gone.append(record)
                continue
            status = self._packs.active_status(record, job)
            record.state, record.reason = status.state, status.reason
            record.details["stuck"] = status.stuck
            self._add_earlier_end(record)
        if not gone and not unaccounted:
            return
        self._ask_accounting([*gone, *unaccounted])
        ended, unknown = (
            list(self._occupations([*gone, *unaccounted])),
            self._no_accounting.partition("\n")[0],
        )
        self._neighbourhood = Neighbourhood(self._study, self._slurm, ended, self._queue, unknown)
        todo = [(record, "ended") for record in gone] + [(record, "accounted") for record in unaccounted]
        if len(todo) < MANY_RUNS:
            for record, event in todo:
                self._settle_one(record, event)
        else:
            self._neighbourhood.jobs  # noqa: B018 (asks Slurm once, and not in each thread)
            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(self._settle_one, *zip(*todo, strict=True)))
        self._write_events()

    def _ask_accounting(self, records: Sequence[RunRecord]) -> None:
        names = {record.job_id: record.job_name for record in records}
        try:
            rows = self._slurm.accounting([str(job) for job in names])
        except SlurmUnavailableError as error:
            self._no_accounting, self._accounting_may_return = error.output, not error.permanent
            return
        # A controller that lost its state counts job ids from 1 again, so compare names too.
        # The row of a job precedes the rows of its steps.
        ours: dict[str, bool] = {}
        for row in rows:
            job = row.key.job
            if row.key.step is None:
                ours[job] = row.name in (names.get(job), "allocation")
            if ours.get(job, False):
                self._rows.setdefault(job, []).append(row)

    def _occupations(self, records: Sequence[RunRecord]) -> Iterator[Occupation]:
        """Yield the nodes and times of the jobs of ``records``, from their rows in sacct."""
        for job in dict.fromkeys(str(record.job_id) for record in records):
            for row in self._rows.get(job, []):
                if row.key.step is None and row.started is not None and row.hosts:
                    yield Occupation(job, expand_hosts(row.hosts), row.started, row.ended, of_study=True)

    def _rows_of(self, record: RunRecord) -> list[AccountingRow]:
        """Return the sacct rows of a run's job, excluding the steps of other runs in the same pack."""
        rows = self._rows.get(str(record.job_id), [])
        return own_rows(record, rows) if is_packed(record) else rows

    def _settle_one(self, record: RunRecord, event: str) -> None:
        """Record the end of an attempt whose job has ended, or add the accounting that was missing."""
        rows, in_queue = self._rows_of(record), self._queue.get(str(record.job_id))
        packed, is_first, accounted = is_packed(record), event == "ended", classify(rows)
        status = accounted
        if packed:
            status = self._packs.final_status(record, rows, in_queue)
        elif is_first and not (accounted and accounted.state.ended):
            status = in_queue
        if status is None:
            if is_first:
                self._settle_forgotten(record, None if packed else accounted)
        elif status.state is RunState.PLANNED:
            if is_first:
                self._withdraw(record, status.reason)
        elif is_first or packed:
            complete = status.settled or bool(self._no_accounting) or self._is_old(record, status)
            if complete or (is_first and packed and status.state is RunState.COMPLETED):
                self._settle(record, status, event=event, complete=complete)
            elif is_first:
                _await_accounting(record)
        elif status.settled:
            self._add_accounting(record, status)

    def _add_accounting(self, record: RunRecord, status: JobStatus) -> None:
        """Add sacct's values to an attempt that was recorded without them."""
        requeued = record.state is RunState.CANCELLED and status.failure_class is FailureClass.PREEMPTED
        if requeued and not self._is_old(record, status):
            return  # sacct lacks the row of the requeued job, which was cancelled after its preemption
        if record.details.get("by_bench") and record.state is status.state is RunState.CANCELLED:
            status = replace(status, reason=record.reason)  # this reason is more specific than Slurm's
        self._settle(record, status, event="accounted")

    def _is_old(self, record: RunRecord, status: JobStatus) -> bool:
        """Return True if a job ended so long ago that its rows in sacct must be complete."""
        if status.ended is not None:
            return _age_s(status.ended) > GRACE_S
        ended = EndNote.read(self._study.run_folder(record)).time
        return ended is not None and _age_s(ended) > NODE_CLOCK_GRACE_S

    def _settle_forgotten(self, record: RunRecord, accounted: JobStatus | None) -> None:
        """Record the end of a job that Slurm no longer knows: from its files, or else as ``unknown``."""
        end = EndNote.read(self._study.run_folder(record))
        if end.exit_code is not None or self._state_by_notices(record) is not None:
            outcome = self._outcome_by_folder(record, end)
            if self._no_accounting:
                outcome.details["accounting"] = _absence(self._no_accounting)
            self._add(record, outcome, None, ended_at=end.written_at or now())
            return
        record.state = RunState.UNKNOWN
        if accounted is not None:
            what = f"job {record.job_id} is not in the queue, but sacct says that it has not ended"
        elif self._no_accounting:
            what = f"squeue does not list job {record.job_id}; sacct is unavailable ({self._no_accounting})"
        else:
            what = f"Slurm does not know job {record.job_id}"
        record.reason = f"{what}; the run wrote no end.json. `bench cancel` marks the run as cancelled"

    def settle_by_folder(self, record: RunRecord) -> None:
        """Record how a run ended, using only the files in its run folder."""
        end = EndNote.read(self._study.run_folder(record))
        outcome, ended_at = self._outcome_by_folder(record, end), end.written_at or now()
        self._study.ledger.append_all([settle_run_json(self._study, record, outcome, ended_at=ended_at)])

    def _outcome_by_folder(self, record: RunRecord, end: EndNote) -> Outcome:
        found, folder = self._state_by_notices(record), self._study.run_folder(record)
        if end.exit_code == 0 or found is None:
            outcome = process_outcome(folder, self._study.cell_of(record.run_id), end.exit_code)
        else:
            reason = f"{found.word}: {found.meaning} (according to job.err; Slurm has forgotten the job)"
            state = (
                RunState.FAILED if found.state.active else found.state
            )  # requeued, and no longer in the queue
            outcome = Outcome(state, reason, found.failure_class, end.exit_code)
        outcome.details = {"job_id": record.job_id}
        return outcome

    def _with_cause_from_notices(self, record: RunRecord, status: JobStatus) -> JobStatus:
        """Correct a status from squeue if job.err shows that the job ran out of memory."""
        if status.failure_class not in (FailureClass.BAD_EXIT, FailureClass.KILLED):
            return status
        found = self._state_by_notices(record)
        if found is None or found.failure_class is not FailureClass.OUT_OF_MEMORY:
            return status
        reason = f"{found.word}: {found.meaning} (according to job.err); {status.reason}"
        return replace(status, failure_class=found.failure_class, reason=reason)

    def _add_earlier_end(self, record: RunRecord) -> None:
        """Add the reason why Slurm stopped a requeued job, which squeue does not show."""
        found = self._state_by_notices(record) if record.state is RunState.QUEUED else None
        if found is not None:
            record.reason = f"{found.word}: {found.meaning}; {record.reason}"

    def _state_by_notices(self, record: RunRecord) -> SlurmState | None:
        """Return the state in which Slurm ended the job, according to job.err, or None without a message."""
        lines = log_tail(self._study.run_folder(record).err)
        return state_from_notices("\n".join(lines), job_id=str(record.job_id))

    def _settle(
        self, record: RunRecord, status: JobStatus, *, event: str = "ended", complete: bool = True
    ) -> None:
        """Record the end of an attempt; ``complete`` is True if sacct has all rows of its job."""
        folder, cell = self._study.run_folder(record), self._study.cell_of(record.run_id)
        rows, end = self._rows_of(record), end_of_last_start(folder, status)
        status = status if rows else self._with_cause_from_notices(record, status)
        outcome = job_outcome(folder, cell, status, end, rows)
        allocation = {"kind": "job", "nodes": cell.nodes, **(record.details.get("allocation") or {})}
        allocation |= {"job_id": record.job_id, "hosts": status.hosts}
        started_at = as_iso(status.started)
        outcome.details = {"job_id": record.job_id, "started_at": started_at, "allocation": allocation}
        if self._no_accounting or event == "accounted":
            # This value explains why sacct_summary.txt is missing.
            outcome.details["accounting"] = _absence(self._no_accounting)
        ended_at = as_iso(status.ended) or end.written_at or now()
        accounted = complete and not self._accounting_may_return
        self._add(record, outcome, status, ended_at=ended_at, event=event, rows=rows, accounted=accounted)

    def _add(
        self,
        record: RunRecord,
        outcome: Outcome,
        status: JobStatus | None,
        *,
        ended_at: str,
        event: str = "ended",
        rows: Sequence[AccountingRow] = (),
        accounted: bool = True,
    ) -> None:
        """Write run.json and sacct_summary.txt of an attempt, and collect its event for the ledger."""
        folder, where = self._study.run_folder(record), occupation(self._study, record, status)
        neighbours = self._neighbourhood.of(where) if where else None
        try:
            content = settle_run_json(
                self._study, record, outcome, ended_at=ended_at, event=event, neighbours=neighbours
            )
            if rows and folder.path.is_dir():
                write_atomically(folder.sacct_summary, accounting_table(rows))
        except UnwritableError as error:
            add_unsaved(record, error)
            return
        self._settled[record.run_id] = (record, {**content, "accounted": accounted})

    def _withdraw(self, record: RunRecord, reason: str) -> None:
        """Record that an attempt never started; the next submission creates a new attempt."""
        record.state, record.reason = RunState.PLANNED, reason
        identity = {"run_id": record.run_id, "attempt": record.attempt}
        changes = {"state": str(record.state), "reason": reason}
        try:
            update_run(self._study.run_folder(record), changes, fallback=identity)
        except UnwritableError as error:
            add_unsaved(record, error)
            return
        event = {"event": "withdrawn", **identity, "reason": reason, "refused": False}
        self._settled[record.run_id] = (record, event)

    def _write_events(self) -> None:
        """Append the collected events to the ledger, in the planned order of the runs."""
        settled = [self._settled[run.run_id] for run in self._study.runs if run.run_id in self._settled]
        try:
            self._study.ledger.append_all([event for _, event in settled])
        except UnwritableError as error:
            for record, _ in settled:
                add_unsaved(record, error)


def lacks_accounting(record: RunRecord) -> bool:
    """Return True if an attempt ended recently and was recorded while sacct was unavailable."""
    if not record.state.ended or record.job_id is None or record.details.get("accounted") is not False:
        return False
    try:
        return _age_s(datetime.fromisoformat(str(record.details.get("time")))) < MISSING_FOR_S
    except ValueError:
        return False


def _await_accounting(record: RunRecord) -> None:
    record.state, record.reason = RunState.RUNNING, INCOMPLETE
    record.details["ending"] = True


def _absence(no_accounting: str) -> str | None:
    """Return the value of ``accounting`` in run.json: the reason why sacct's rows are missing, or None."""
    reason = no_accounting.partition("\n")[0]
    return f"none: {reason}" if reason else None


def _age_s(moment: datetime) -> float:
    return (datetime.now(UTC) - moment).total_seconds()


def as_iso(moment: datetime | None) -> str | None:
    """Format a UTC time as in run.json (ISO 8601 with ``Z``)."""
    return None if moment is None else moment.isoformat().replace("+00:00", "Z")
