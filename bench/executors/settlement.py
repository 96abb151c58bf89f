"""What became of jobs of Slurm: squeue first, sacct for what has left it, the run's folder for the rest.

A job that has ended is settled once accounting has all of its rows: for a second or some they
come one by one, and the cause may be in the last. Where accounting is off or down, squeue (which
remembers a job for some minutes) and the run's own files have to do.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from bench.executors.base import Outcome, PlannedStudy, settle
from bench.executors.evidence import ProvisionalEnd, incomplete, killed_rank, outcome_of, said_error
from bench.layout import RunFolder, write_atomically
from bench.ledger import RunRecord, RunState, now
from bench.matrix.cell import Cell
from bench.slurm.client import Slurm
from bench.slurm.errors import SlurmUnavailableError
from bench.slurm.outcome import JobOutcome, classify, queue_outcomes
from bench.slurm.parsing import AccountingRow, QueueRow
from bench.slurm.states import FailureClass
from bench.slurm.summary import accounting_table

#: How long one look waits for the last rows of jobs that have just ended.
PATIENCE_S = 4.0
#: Rows that are missing so long after the end do not come any more.
GRACE_S = 30.0
_EVERY_S = 0.4

INCOMPLETE = "has ended; Slurm's accounting of it is not complete yet"


@dataclass
class _Answers:
    """What Slurm said of some jobs: by id, and why sacct said nothing where it could not."""

    queue: Mapping[str, JobOutcome]
    rows: dict[str, list[AccountingRow]] = field(default_factory=dict)
    no_accounting: str = ""

    def accounted(self, record: RunRecord) -> JobOutcome | None:
        rows = self.rows.get(str(record.job_id))
        return classify(rows) if rows else None

    def in_queue(self, record: RunRecord) -> bool:
        """Whether the job still waits or runs."""
        known = self.queue.get(str(record.job_id))
        return known is not None and not known.state.ended


@dataclass(frozen=True)
class Settlement:
    """Finds out what became of a study's jobs, and settles those that have ended."""

    study: PlannedStudy
    slurm: Slurm
    cells: Mapping[str, Cell]

    def look(self, records: Sequence[RunRecord], queue: Sequence[QueueRow]) -> None:
        """Bring records of submitted jobs up to date; settle those that have ended.

        One sacct for all jobs that have left the queue, and more of them for a few seconds
        while rows of just ended jobs are still coming in.
        """
        names = {str(record.job_name) for record in records}
        answers = _Answers(queue_outcomes([row for row in queue if row.name in names]))
        ended = []
        for record in records:
            if answers.in_queue(record):
                _update(record, answers.queue[str(record.job_id)])
            else:
                ended.append(record)
        deadline = time.monotonic() + PATIENCE_S
        while ended:
            self._ask_accounting(answers, ended)
            last = time.monotonic() > deadline
            ended = [record for record in ended if not self._settled(record, answers, last=last)]
            if not ended or last:
                return
            time.sleep(_EVERY_S)

    def _ask_accounting(self, answers: _Answers, records: Sequence[RunRecord]) -> None:
        names = {record.job_id: record.job_name for record in records}
        answers.rows.clear()
        try:
            rows = self.slurm.accounting([str(job) for job in names])
        except SlurmUnavailableError as absent:
            answers.no_accounting = absent.words
            return
        # A cluster that was set up anew counts its jobs from 1 again: another's job has another name.
        others = {
            row.key.job
            for row in rows
            if row.key.step is None and row.name not in (names.get(row.key.job), "allocation")
        }
        for row in rows:
            if row.key.job not in others:
                answers.rows.setdefault(row.key.job, []).append(row)

    def _settled(self, record: RunRecord, answers: _Answers, *, last: bool) -> bool:
        """Settle a job that has left the queue, if what is known will do; False to ask again soon."""
        queued = answers.queue.get(str(record.job_id))
        accounted = answers.accounted(record)
        known = accounted if accounted is not None and accounted.state.ended else queued
        if known is not None and (
            known.settled or answers.no_accounting or self._is_old(record, known, last)
        ):
            self._settle(record, known, answers.rows.get(str(record.job_id), []))
            return True
        if known is not None:
            record.state, record.reason = RunState.RUNNING, INCOMPLETE
            return False
        return self._forgotten(record, accounted, answers.no_accounting)

    def _is_old(self, record: RunRecord, known: JobOutcome, last: bool) -> bool:
        """Whether a job ended so long ago that no more rows of it are to be expected.

        What the job noted itself counts on the ``last`` look only: a node's clock may be wrong.
        """
        noted = ProvisionalEnd.read(self._folder(record)).time if last else None
        ended = known.ended or noted
        return ended is not None and (datetime.now(UTC) - ended).total_seconds() > GRACE_S

    def _forgotten(self, record: RunRecord, accounted: JobOutcome | None, no_accounting: str) -> bool:
        """Settle a job that Slurm knows nothing certain of by its folder; else it is unknown."""
        if ProvisionalEnd.read(self._folder(record)).exit_code is not None:
            self.settle_by_folder(record)
            return True
        record.state = RunState.UNKNOWN
        if accounted is not None:
            knows = f"job {record.job_id} is not in the queue, yet sacct says it has not ended"
        elif no_accounting:
            knows = f"Slurm has forgotten job {record.job_id}, and sacct cannot be asked ({no_accounting})"
        else:
            knows = f"Slurm does not know job {record.job_id} (any more)"
        record.reason = f"{knows}; the run left no end.json. `bench cancel` gives it up"
        return True

    def settle_by_folder(self, record: RunRecord) -> None:
        """Settle a run by its own files alone."""
        folder = self._folder(record)
        end = ProvisionalEnd.read(folder)
        outcome = outcome_of(folder, self.cells[record.run_id], end.exit_code)
        outcome.details = {"job_id": record.job_id}
        settle(self.study, record, outcome, ended_at=end.written or now())

    def _settle(self, record: RunRecord, known: JobOutcome, rows: Sequence[AccountingRow]) -> None:
        folder = self._folder(record)
        if rows and folder.path.is_dir():
            write_atomically(folder.sacct_summary, accounting_table(rows))
        end = ProvisionalEnd.read(folder)
        outcome = judged(folder, self.cells[record.run_id], known, end)
        outcome.details = {"job_id": record.job_id, "started_at": iso(known.started)}
        settle(self.study, record, outcome, ended_at=iso(known.ended) or end.written or now())

    def _folder(self, record: RunRecord) -> RunFolder:
        return self.study.folder.attempt(record.run_id, record.attempt)


def judged(folder: RunFolder, cell: Cell, known: JobOutcome, end: ProvisionalEnd) -> Outcome:
    """Return Slurm's verdict on an ended job together with what the run's folder says."""
    if known.state is RunState.COMPLETED:
        lack = incomplete(folder, cell)
        if lack:
            reason = "; ".join(filter(None, (f"{lack}, although Slurm says COMPLETED", known.reason)))
            return Outcome(RunState.FAILED, reason, str(FailureClass.BAD_EXIT), 0)
        return Outcome(RunState.COMPLETED, known.reason, None, 0)
    # sacct shows codes above 128 less 128: what the script itself noted is better.
    exit_code = end.exit_code or known.exit_code
    failure_class = known.failure_class
    if failure_class in (FailureClass.BAD_EXIT, FailureClass.KILLED, None):
        said = killed_rank(folder, cell.launcher)
        failure_class = FailureClass.KILLED if said else failure_class
        said = said or said_error(folder)
        slurms = known.reason.replace(f"exit code {known.exit_code} or {exit_code}", f"exit code {exit_code}")
        return _outcome(known.state, "; ".join(filter(None, (said, slurms))), failure_class, exit_code)
    return _outcome(known.state, known.reason, failure_class, exit_code)


def _outcome(state: RunState, reason: str, why: FailureClass | None, exit_code: int | None) -> Outcome:
    return Outcome(state, reason, None if why is None else str(why), exit_code)


def _update(record: RunRecord, known: JobOutcome) -> None:
    record.state, record.reason = known.state, known.reason
    more: dict[str, Any] = {"stuck": known.stuck}
    record.details |= more


def iso(time_utc: datetime | None) -> str | None:
    """Return a time as run.json has it."""
    return None if time_utc is None else time_utc.isoformat().replace("+00:00", "Z")
