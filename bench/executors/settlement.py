"""The ends of attempts that one look at Slurm finds, written down together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from bench.errors import UnwritableError
from bench.executors.base import Outcome, each, settle, settled
from bench.executors.outcome import ProvisionalEnd, age_s, ended, iso, judged, last_end, outcome_of, tail
from bench.executors.pack_settlement import Packs, is_packed
from bench.matrix.cell import Cell
from bench.slurm.accounting import JobStatus, classify, queue_statuses
from bench.slurm.client import Slurm, SlurmUnavailableError
from bench.slurm.parsing import AccountingRow, QueueRow, accounting_table
from bench.slurm.states import FailureClass, SlurmState, state_from_notices
from bench.study.files import write_atomically
from bench.study.layout import RunFolder
from bench.study.ledger import RunRecord, RunState, now
from bench.study.plan_json import PlannedStudy
from bench.study.run_json import update_run


@dataclass
class Ends:
    """The ends that one look finds; where they cannot be written down, the records still have them.

    Several threads may add to it, each the end of another run.
    """

    study: PlannedStudy
    _found: dict[str, tuple[RunRecord, dict[str, Any]]] = field(default_factory=dict)

    def add(
        self,
        record: RunRecord,
        outcome: Outcome,
        *,
        ended_at: str,
        event: str = "ended",
        table: str = "",
        accounted: bool = True,
    ) -> None:
        """Note how an attempt ended; ``table`` is its accounting, ``accounted`` false where that is owed."""
        folder = self.study.folder.attempt(record.run_id, record.attempt)
        try:
            noted = settled(self.study, record, outcome, ended_at=ended_at, event=event)
            if table and folder.path.is_dir():
                write_atomically(folder.sacct_summary, table)
        except UnwritableError as full:
            record.reason = "; ".join(filter(None, (record.reason, f"not saved: {full.message}")))
            return
        self._found[record.run_id] = (record, {**noted, "accounted": accounted})

    def withdraw(self, record: RunRecord, reason: str) -> None:
        """Note that nothing came of an attempt: the next submission starts the run, as another one."""
        record.state, record.reason = RunState.PLANNED, reason
        end = {"state": str(record.state), "reason": reason}
        try:
            folder = self.study.folder.attempt(record.run_id, record.attempt)
            update_run(folder, end, fallback={"run_id": record.run_id, "attempt": record.attempt})
        except UnwritableError as full:
            record.reason = f"{reason}; not saved: {full.message}"
            return
        event = {"event": "withdrawn", "run_id": record.run_id, "attempt": record.attempt}
        self._found[record.run_id] = (record, {**event, "reason": reason, "refused": False})

    def write(self) -> None:
        """Write all of them into the ledger in the planned order, at once: durable writing is slow."""
        found = [self._found[run.run_id] for run in self.study.runs if run.run_id in self._found]
        try:
            self.study.ledger.append_all([event for _, event in found])
        except UnwritableError as full:
            for record, _ in found:
                record.reason = "; ".join(filter(None, (record.reason, f"not saved: {full.message}")))


# What became of jobs of Slurm: squeue first, sacct for what has left it, the run's folder for the rest.
#
# A job that has ended is settled once accounting has all of its rows: for a second or some they
# come one by one, and the cause may be in the last. Where accounting is off or down, squeue (which
# remembers a job for some minutes) and the run's own files have to do. Accounting that was only down
# is *owed*: a later look fetches it, and corrects what was settled without it.

#: Rows that are missing so long after the end do not come any more.
GRACE_S = 30.0
#: The same by the clock of a node, which may be wrong.
NOTED_GRACE_S = 120.0
#: Accounting that did not come in this time does not come any more.
OWED_FOR_S = 24 * 3600.0
#: sacct's words where there is no accounting at all.
_NO_ACCOUNTING = re.compile(r"accounting storage is disabled|command not found|permission denied")

INCOMPLETE = "has ended; Slurm's accounting of it is not complete yet"


@dataclass
class _Answers:
    """What Slurm said of some jobs: by id, and why sacct said nothing where it could not."""

    queue: Mapping[str, JobStatus]
    rows: dict[str, list[AccountingRow]] = field(default_factory=dict)
    no_accounting: str = ""

    def accounted(self, record: RunRecord) -> JobStatus | None:
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

    def look(
        self, active: Sequence[RunRecord], queue: Sequence[QueueRow], *, owed: Sequence[RunRecord] = ()
    ) -> None:
        """Bring records of submitted jobs up to date; settle those that have ended.

        One sacct for all jobs that have left the queue. One that has just ended and is not whole
        in it stays as running, with that reason: look again a little later.

        Args:
            active: the attempts that wait or run, as far as was known.
            queue: what squeue says now.
            owed: attempts that have ended, whose accounting could not be had so far.
        """
        names = {str(record.job_name) for record in active}
        answers = _Answers(queue_statuses([row for row in queue if row.name in names]))
        packs, gone = Packs(self.study.folder), []
        for record in active:
            if answers.in_queue(record) and not packs.has_ended(record):
                _update(record, packs.standing(record, answers.queue[str(record.job_id)]))
                self._tell_of_earlier_start(record)
            else:
                gone.append(record)
        if not gone and not owed:
            return
        self._ask_accounting(answers, [*gone, *owed])
        ends = Ends(self.study)

        def settle_one(record: RunRecord, event: str) -> None:
            if is_packed(record):
                self._settle_packed(record, answers, ends, packs, event=event)
            elif event == "ended":
                self._settle_gone(record, answers, ends)
            else:
                self._settle_owed(record, answers, ends)

        each(
            settle_one, [*((record, "ended") for record in gone), *((record, "accounted") for record in owed)]
        )
        ends.write()

    def _ask_accounting(self, answers: _Answers, records: Sequence[RunRecord]) -> None:
        names = {record.job_id: record.job_name for record in records}
        answers.rows.clear()
        try:
            rows = self.slurm.accounting([str(job) for job in names])
        except SlurmUnavailableError as absent:
            answers.no_accounting = absent.output
            return
        # A controller that lost its state counts its jobs from 1 again: another's job has another name,
        # also where both have rows. The rows of steps follow their job's.
        ours: dict[str, bool] = {}
        for row in rows:
            job = row.key.job
            if row.key.step is None:
                ours[job] = row.name in (names.get(job), "allocation")
            if ours.get(job, False):
                answers.rows.setdefault(job, []).append(row)

    def _settle_gone(self, record: RunRecord, answers: _Answers, ends: Ends) -> None:
        """Settle a job that has left the queue, if what is known will do."""
        queued = answers.queue.get(str(record.job_id))
        accounted = answers.accounted(record)
        known = accounted if accounted is not None and accounted.state.ended else queued
        if known is None:
            self._settle_forgotten(record, accounted, answers.no_accounting, ends)
        elif known.settled or answers.no_accounting or self._is_old(record, known):
            self._settle(record, known, answers, ends)
        else:
            record.state, record.reason = RunState.RUNNING, INCOMPLETE
            record.details["ending"] = True

    def _settle_owed(self, record: RunRecord, answers: _Answers, ends: Ends) -> None:
        """Complete an attempt that was settled without accounting, once that is whole."""
        known = answers.accounted(record)
        if known is None or not known.settled:
            return
        by_us = "bench cancel" in record.reason
        if by_us and record.state is known.state is RunState.CANCELLED:  # that reason says more
            known = replace(known, reason=record.reason)
        self._settle(record, known, answers, ends, event="accounted")

    def _settle_packed(
        self, record: RunRecord, answers: _Answers, ends: Ends, packs: Packs, *, event: str = "ended"
    ) -> None:
        """Settle a run of a pack: by its own end, else with the pack; one that never began waits anew."""
        job = str(record.job_id)
        verdict = packs.verdict(record, answers.rows.get(job, []), answers.queue.get(job))
        known, first_look = verdict.known, event == "ended"
        if verdict.not_started and first_look:
            ends.withdraw(record, verdict.not_started)
            return
        if known is None:
            if first_look:
                self._settle_forgotten(record, None, answers.no_accounting, ends)
            return
        enough = verdict.whole or bool(answers.no_accounting) or self._is_old(record, known)
        if enough or (first_look and known.state is RunState.COMPLETED):
            self._settle(record, known, answers, ends, event=event, rows=verdict.rows, whole=enough)
        elif first_look:
            record.state, record.reason = RunState.RUNNING, INCOMPLETE
            record.details["ending"] = True

    def _is_old(self, record: RunRecord, known: JobStatus) -> bool:
        """Whether a job ended so long ago that no more rows of it are to be expected."""
        if known.ended is not None:
            return age_s(known.ended) > GRACE_S
        noted = ProvisionalEnd.read(self._folder(record)).time
        return noted is not None and age_s(noted) > NOTED_GRACE_S

    def _settle_forgotten(
        self, record: RunRecord, accounted: JobStatus | None, no_accounting: str, ends: Ends
    ) -> None:
        """Settle a job that Slurm knows nothing certain of by its folder; else it is unknown."""
        end = ProvisionalEnd.read(self._folder(record))
        if end.exit_code is not None or self._last_words(record) is not None:
            outcome = self._by_folder(record, end)
            if no_accounting:
                outcome.details["accounting"] = _absent(no_accounting)
            ends.add(record, outcome, ended_at=end.written or now())
            return
        record.state = RunState.UNKNOWN
        if accounted is not None:
            knows = f"job {record.job_id} is not in the queue, yet sacct says it has not ended"
        elif no_accounting:
            knows = f"Slurm has forgotten job {record.job_id}, and sacct cannot be asked ({no_accounting})"
        else:
            knows = f"Slurm does not know job {record.job_id} (any more)"
        record.reason = f"{knows}; the run left no end.json. `bench cancel` gives it up"

    def settle_by_folder(self, record: RunRecord) -> None:
        """Settle a run by its own files alone."""
        end = ProvisionalEnd.read(self._folder(record))
        settle(self.study, record, self._by_folder(record, end), ended_at=end.written or now())

    def _by_folder(self, record: RunRecord, end: ProvisionalEnd) -> Outcome:
        told = self._last_words(record)
        if end.exit_code == 0 or told is None:
            outcome = outcome_of(self._folder(record), self.cells[record.run_id], end.exit_code)
        else:
            reason = f"{told.word}: {told.meaning} (job.err says so; Slurm has forgotten the job)"
            state = RunState.FAILED if told.state.active else told.state  # queued again, and gone since
            outcome = ended(state, reason, told.failure_class, end.exit_code)
        outcome.details = {"job_id": record.job_id}
        return outcome

    def _with_last_words(self, record: RunRecord, known: JobStatus) -> JobStatus:
        """Return squeue's verdict with the cause that it cannot know: a step's, not the job's."""
        if known.failure_class not in (FailureClass.BAD_EXIT, FailureClass.KILLED):
            return known
        told = self._last_words(record)
        if told is None or told.failure_class is not FailureClass.OUT_OF_MEMORY:
            return known
        reason = f"{told.word}: {told.meaning} (job.err says so); {known.reason}"
        return replace(known, failure_class=told.failure_class, reason=reason)

    def _tell_of_earlier_start(self, record: RunRecord) -> None:
        """Add to a waiting job's reason why it waits again: squeue's row does not say that it ran."""
        told = self._last_words(record) if record.state is RunState.QUEUED else None
        if told is not None:
            record.reason = f"{told.word}: {told.meaning}; {record.reason}"

    def _last_words(self, record: RunRecord) -> SlurmState | None:
        """Return what Slurm wrote into job.err when it ended the job, if it did."""
        return state_from_notices("\n".join(tail(self._folder(record).err)), job_id=str(record.job_id))

    def _settle(
        self,
        record: RunRecord,
        known: JobStatus,
        answers: _Answers,
        ends: Ends,
        *,
        event: str = "ended",
        rows: Sequence[AccountingRow] | None = None,
        whole: bool = True,
    ) -> None:
        """Settle an attempt; ``rows`` are its own of a job's, ``whole`` is false where more are to come."""
        folder = self._folder(record)
        rows = answers.rows.get(str(record.job_id), []) if rows is None else rows
        end = last_end(folder, known)
        known = known if rows else self._with_last_words(record, known)
        outcome = judged(folder, self.cells[record.run_id], known, end, rows)
        own = {"kind": "job", "nodes": self.cells[record.run_id].nodes}
        allocation = {**own, **(record.details.get("allocation") or {})}
        allocation |= {"job_id": record.job_id, "hosts": known.hosts}
        started_at = iso(known.started)
        outcome.details = {"job_id": record.job_id, "started_at": started_at, "allocation": allocation}
        ended_at = iso(known.ended) or end.written or now()
        table = accounting_table(rows) if rows else ""
        if answers.no_accounting or event == "accounted":
            # Said instead of a sacct_summary.txt.
            outcome.details["accounting"] = _absent(answers.no_accounting)
        owed = bool(answers.no_accounting) and not _NO_ACCOUNTING.search(answers.no_accounting)
        ends.add(record, outcome, ended_at=ended_at, event=event, table=table, accounted=whole and not owed)

    def _folder(self, record: RunRecord) -> RunFolder:
        return self.study.folder.attempt(record.run_id, record.attempt)


def is_owed(record: RunRecord) -> bool:
    """Whether an attempt was settled while accounting was down, not too long ago."""
    if not record.state.ended or record.job_id is None or record.details.get("accounted") is not False:
        return False
    try:
        return age_s(datetime.fromisoformat(str(record.details.get("time")))) < OWED_FOR_S
    except ValueError:
        return False


def _update(record: RunRecord, known: JobStatus) -> None:
    record.state, record.reason = known.state, known.reason
    more: dict[str, Any] = {"stuck": known.stuck}
    record.details |= more


def _absent(no_accounting: str) -> str | None:
    """Return what run.json says in place of an accounting; None where there is one."""
    words = no_accounting.partition("\n")[0]
    return f"none: {words}" if words else None
