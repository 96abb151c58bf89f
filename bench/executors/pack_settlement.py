"""What became of the runs of a pack: what its script noted, together with Slurm's word on job and steps.

A run that ended while the pack went on is judged like a job of its own: its exit code stands in
the marks, and its steps bear its name. A run that was going on when the whole job ended shares
the job's fate; one that had not begun waits for the next submission.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from bench.errors import BenchError
from bench.executors.outcome import ProvisionalEnd
from bench.executors.pack import Mark, Marks, number_of
from bench.slurm.accounting import JobStatus, classify
from bench.slurm.parsing import AccountingRow, JobKey
from bench.slurm.states import FailureClass
from bench.study.layout import StudyFolder
from bench.study.ledger import RunRecord, RunState

#: Marks that say how a run ended, whatever becomes of its pack.
_OWN_ENDS = ("exit", "limit")


@dataclass(frozen=True)
class PackedVerdict:
    """What one look tells of a run of a pack.

    ``known`` is None where nobody knows; ``rows`` are sacct's about this run; ``whole`` says that no
    more of them are to come; ``not_started`` is why a run never began, once that is certain.
    """

    known: JobStatus | None
    rows: list[AccountingRow]
    whole: bool = False
    not_started: str = ""


@dataclass(frozen=True)
class Packs:
    """The packs of one study, as one look finds them."""

    folder: StudyFolder
    _marks: dict[int, Marks] = field(default_factory=dict)

    def marks(self, record: RunRecord) -> Marks:
        """Return what the script of a member's pack has noted; read once a look."""
        number = number_of(record)
        assert number is not None, f"{record.run_id} has a job of its own"
        if number not in self._marks:
            self._marks[number] = Marks.read(self.folder.pack(number))
        return self._marks[number]

    def mark(self, record: RunRecord) -> Mark | None:
        """Return how a member stands by its pack's marks; None where it has not begun."""
        return self.marks(record).runs.get(record.run_id)

    def has_ended(self, record: RunRecord) -> bool:
        """Whether a run has ended by itself, though its pack may still go on."""
        if not is_packed(record):
            return False
        mark = self.mark(record)
        return mark is not None and mark.by in _OWN_ENDS

    def standing(self, record: RunRecord, job: JobStatus) -> JobStatus:
        """Return how a run stands while its job waits or runs; for a run of its own, as the job does."""
        if not is_packed(record) or job.state is not RunState.RUNNING:
            return job
        if self.mark(record) is not None:
            return replace(job, reason="")
        before = max(1, int(record.details["allocation"]["place"]) - max(1, self.marks(record).last_place))
        count = "1 run" if before == 1 else f"{before} runs"
        waits = f"waits in its pack (job {record.job_id}) for {count} before it"
        if not self.marks(record).runs:
            waits = f"waits in its pack (job {record.job_id}), which begins"
        return JobStatus(RunState.QUEUED, reason=waits)

    def never_began(self, record: RunRecord) -> bool:
        """Whether nothing shows that a run of a pack was ever started."""
        own = self.folder.attempt(record.run_id, record.attempt)
        return self.mark(record) is None and ProvisionalEnd.read(own).exit_code is None

    def verdict(
        self, record: RunRecord, rows: Sequence[AccountingRow], queued: JobStatus | None
    ) -> PackedVerdict:
        """Judge a run that has ended, or whose job has; ``rows`` are all of its job."""
        own = own_rows(record, rows)
        ends = (job for job in (classify(own), queued) if job is not None and job.state.ended)
        job = next(ends, None)
        never_began = self.never_began(record)
        over = job is not None
        if never_began and record.state is not RunState.CANCELLED:
            certain = over or self.marks(record).over
            return PackedVerdict(None, own, not_started=not_started(record, job) if certain else "")
        known = self.outcome(record, job, own)
        if known is None:
            return PackedVerdict(None, own)
        if record.state is RunState.CANCELLED and (known.state is RunState.CANCELLED or never_began):
            ours = JobStatus(record.state, FailureClass.CANCELLED, record.reason)  # by us: that says more
            known = replace(ours, started=known.started, ended=known.ended, settled=known.settled)
        jobs_row_is_there = not any(row.key.step is None and row.name != record.job_name for row in own)
        whole = known.settled and jobs_row_is_there and (over or bool(_steps(own)))
        return PackedVerdict(known, own, whole=whole)

    def outcome(
        self, record: RunRecord, job: JobStatus | None, rows: Sequence[AccountingRow]
    ) -> JobStatus | None:
        """Return what became of a run that has begun; ``rows`` are its own, None where nobody knows."""
        mark = self.mark(record)
        noted = ProvisionalEnd.read(self.folder.attempt(record.run_id, record.attempt))
        if mark is not None and mark.by in _OWN_ENDS:
            return classify([_as_job(record, mark, noted, rows), *_steps(rows)])
        if noted.exit_code == 0:  # it was through when the job was ended
            done = Mark("", mark.started if mark else None, 0, "exit", noted.time)
            return classify([_as_job(record, done, noted, rows), *_steps(rows)])
        if job is None:
            return None
        why = f"with its pack (job {record.job_id}): {job.reason}" if job.reason else ""
        return replace(job, reason=why, started=mark.started if mark else None)


def is_packed(record: RunRecord) -> bool:
    """Whether an attempt is one of a pack."""
    return number_of(record) is not None


def not_started(record: RunRecord, job: JobStatus | None) -> str:
    """Return why a run of a pack that is over never began."""
    why = f" ({job.reason})" if job is not None and job.reason else ""
    return f"not started: its pack (job {record.job_id}) ended before its turn{why}"


def own_rows(record: RunRecord, rows: Sequence[AccountingRow]) -> list[AccountingRow]:
    """Return the rows of sacct that are about one run of a pack: the job's, and those of its steps."""
    return [row for row in rows if row.key.step is None or row.name == record.run_id]


def _steps(rows: Sequence[AccountingRow]) -> list[AccountingRow]:
    return [row for row in rows if row.key.step is not None]


def _as_job(
    record: RunRecord, mark: Mark, noted: ProvisionalEnd, rows: Sequence[AccountingRow]
) -> AccountingRow:
    """Return the row that sacct would show if the run had been a job of its own."""
    code = mark.exit_code or 0
    state = "COMPLETED" if code == 0 else "TIMEOUT" if mark.by == "limit" else "FAILED"
    # The shell's way to say that the script was ended by a signal; it could note nothing itself.
    number = code - 128 if code > 128 and noted.exit_code is None else 0
    return AccountingRow(
        key=JobKey(str(record.job_id)),
        state=state,
        exit_code=0 if number or state == "TIMEOUT" else code,
        signal=number,
        derived_exit_code=None,
        reason="",
        submitted=next((row.submitted for row in rows if row.key.step is None), None),
        started=mark.started,
        ended=mark.ended,
        elapsed="",
        nodes=None,
        hosts=mark.hosts or "?",
        max_rss="",
        name=record.run_id,
    )


def refuse_part_of_a_pack(records: Iterable[RunRecord], going: Sequence[RunRecord]) -> None:
    """Refuse to end some runs of a pack, whose job would end the others, too.

    Raises:
        BenchError: the runs that are ``going`` to be ended share a job with others.
    """
    jobs, chosen = {record.job_id for record in going}, {record.run_id for record in going}
    for record in records:
        if record.state.active and record.job_id in jobs and record.run_id not in chosen:
            what = f"job {record.job_id} is a pack, which would end {record.run_id} and perhaps others, too"
            raise BenchError(what, remedy="cancel without --only, or wait for the runs")
