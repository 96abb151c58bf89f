"""Slurm's verdict on a job that has ended, together with what the run's folder says."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from bench.executors.base import Outcome
from bench.executors.evidence import (
    ProvisionalEnd,
    ended_from_outside,
    exited_rank,
    incomplete,
    killed_rank,
    said_error,
    unwritable_folder,
)
from bench.layout import RunFolder
from bench.ledger import RunState
from bench.matrix.cell import Cell
from bench.slurm.outcome import JobOutcome
from bench.slurm.parsing import AccountingRow
from bench.slurm.states import FailureClass


def judged(
    folder: RunFolder,
    cell: Cell,
    known: JobOutcome,
    end: ProvisionalEnd,
    rows: Sequence[AccountingRow] = (),
) -> Outcome:
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
        exited = "" if said else exited_rank(folder, cell.launcher)
        if exited:  # what ended the others is no cause
            failure_class = FailureClass.BAD_EXIT
        said = said or said_error(folder) or exited or unwritable_folder(end, rows)
        slurms = known.reason.replace(f"exit code {known.exit_code} or {exit_code}", f"exit code {exit_code}")
        return ended(known.state, "; ".join(filter(None, (said, slurms))), failure_class, exit_code)
    return ended(known.state, ended_from_outside(folder, known.reason), failure_class, exit_code)


def ended(state: RunState, reason: str, why: FailureClass | None, exit_code: int | None) -> Outcome:
    """Return the outcome of a job that did not complete, or of one that nobody could judge."""
    return Outcome(state, reason, None if why is None else str(why), exit_code)


def last_end(folder: RunFolder, known: JobOutcome) -> ProvisionalEnd:
    """Return what the job noted of its end; not what a part noted after which Slurm queued it again."""
    end = ProvisionalEnd.read(folder)
    if known.restarts and known.started and end.time and end.time <= known.started:
        return ProvisionalEnd()
    return end


def age_s(moment: datetime) -> float:
    """Return the seconds since a moment of UTC."""
    return (datetime.now(UTC) - moment).total_seconds()


def iso(time_utc: datetime | None) -> str | None:
    """Return a time as run.json has it."""
    return None if time_utc is None else time_utc.isoformat().replace("+00:00", "Z")
