"""Classify Slurm jobs by their rows in squeue or sacct.

The job's own row is not enough: its state may be FAILED although a step's state is OUT_OF_MEMORY.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from signal import Signals

from bench.slurm.parsing import AccountingRow, QueueRow
from bench.slurm.states import SlurmState, is_stuck, read_state
from bench.study.ledger import FailureClass, RunState

#: A heterogeneous job gets the first of these states that any of its components has.
_GRAVITY = (
    RunState.UNKNOWN,
    RunState.FAILED,
    RunState.CANCELLED,
    RunState.RUNNING,
    RunState.QUEUED,
    RunState.COMPLETED,
)
#: slurmdbd shows this name while it has records of a job's steps but not yet of the job itself.
_PROVISIONAL_NAME = "allocation"
#: Values in the signal field of an exit code that are not signals: out of memory, and slurmstepd
#: could not open the job's output (its folder does not exist on the node).
_OOM_MARK, _NO_OUTPUT_MARK = 125, 53


@dataclass(frozen=True)
class JobStatus:
    """State of a Slurm job.

    Attributes:
        state: state of the run.
        failure_class: class of the cause if the run did not complete, else None.
        reason: explanation of the state; empty if there is nothing to explain.
        exit_code: highest exit code of the steps, else the script's, else 128 + ``signal``. sacct shows
            codes above 128 reduced by 128 (137 as 9), so prefer the code in end.json.
        signal: name of the signal that ended the job.
        submitted, started, ended: times in UTC.
        hosts: names of the hosts in Slurm's compressed form, such as ``n[1-4]``.
        restarts: number of times Slurm requeued the job; its output files then mix several attempts.
        stuck: whether a queued job cannot start until a person acts.
        settled: whether accounting of an ended job is complete. Rows arrive one by one over
            some seconds, and the last one may contain the cause of a failure.
    """

    state: RunState
    failure_class: FailureClass | None = None
    reason: str = ""
    exit_code: int | None = None
    signal: str | None = None
    submitted: datetime | None = None
    started: datetime | None = None
    ended: datetime | None = None
    hosts: str = ""
    restarts: int = 0
    stuck: bool = False
    settled: bool = False


@dataclass
class _Attempt:
    """Rows of one attempt of a job or component, and of its steps."""

    job: AccountingRow
    steps: list[AccountingRow] = field(default_factory=list)

    @property
    def slurm_state(self) -> SlurmState:
        state = read_state(self.job.state)
        # sacct shows a running job as pending until the database has the record of its start.
        return read_state("RUNNING") if state.word == "PENDING" and self.started else state

    @property
    def settled(self) -> bool:
        """True if the records of an ended attempt are complete."""
        rows_end = all(read_state(row.state).state.ended for row in (self.job, *self.steps))
        # A row with a final state but no end time is a guess of slurmdbd.
        return rows_end and self.job.ended is not None and self.job.name != _PROVISIONAL_NAME

    @property
    def started(self) -> datetime | None:
        """Start time; None if the job got no nodes, because sacct may then show the time of cancellation."""
        return self.job.started if self.job.hosts else None


def job_statuses(rows: Sequence[AccountingRow]) -> dict[str, JobStatus]:
    """Return the status of each job by job id, from the rows of ``sacct --duplicates``."""
    jobs: dict[str, list[AccountingRow]] = {}
    for row in rows:
        jobs.setdefault(row.key.job, []).append(row)
    found = {job: classify(its_rows) for job, its_rows in jobs.items()}
    return {job: status for job, status in found.items() if status is not None}


def queue_statuses(rows: Sequence[QueueRow]) -> dict[str, JobStatus]:
    """Return the status of each job by job id, from the rows of squeue."""
    jobs: dict[str, list[QueueRow]] = {}
    for row in rows:
        jobs.setdefault(row.key.job, []).append(row)
    return {job: classify_queue(its_rows) for job, its_rows in jobs.items()}


def classify(rows: Sequence[AccountingRow]) -> JobStatus | None:
    """Return the status of one job from ``sacct --duplicates``; None if the job's own row is missing."""
    assert len({row.key.job for row in rows}) <= 1, "rows of several jobs"
    attempts = _attempts(rows)
    if not attempts:
        return None
    last = [component[-1] for component in attempts.values()]
    gravest = min(last, key=lambda attempt: _GRAVITY.index(attempt.slurm_state.state))
    state = gravest.slurm_state.state
    steps = [step for attempt in last for step in attempt.steps]
    failure_class, reason = _why(gravest, steps)
    number = _signal(gravest.job, steps) if failure_class is FailureClass.KILLED else None
    restarts = max(len(component) for component in attempts.values()) - 1
    requeued = f"requeued by Slurm {restarts} time{'s' * (restarts > 1)}" if restarts else ""
    return JobStatus(
        state=state,
        failure_class=failure_class,
        reason="; ".join(filter(None, (reason, requeued))),
        exit_code=128 + number if number else _exit_code(gravest.job, steps),
        signal=_signal_name(number) if number else None,
        submitted=_earliest(a.job.submitted for a in last),
        started=_earliest(a.started for a in last),
        ended=_latest(a.job.ended for a in last) if state.ended else None,
        hosts=",".join(a.job.hosts for a in last if a.job.hosts),
        restarts=restarts,
        stuck=state is RunState.QUEUED and is_stuck(gravest.job.reason),
        settled=all(attempt.settled for attempt in last),
    )


def classify_queue(rows: Sequence[QueueRow]) -> JobStatus:
    """Return the status of one job from its rows in squeue, which needs no accounting.

    squeue does not show exit codes, steps and the end time, and forgets a job some minutes after
    its end (MinJobAge).
    """
    row = min(rows, key=lambda row: _GRAVITY.index(read_state(row.state).state))
    slurm_state = read_state(row.state)
    state = slurm_state.state
    needs_no_reason = state is RunState.COMPLETED or slurm_state.word == "RUNNING"
    because = f" ({row.reason})" if row.reason else ""
    hosts = ",".join(r.hosts for r in rows if r.hosts)
    return JobStatus(
        state=state,
        failure_class=slurm_state.failure_class,
        reason="" if needs_no_reason else slurm_state.meaning + because,
        submitted=_earliest(r.submitted for r in rows),
        # Without hosts, the time is an estimate or the time of the cancellation.
        started=_earliest(r.starts for r in rows) if hosts else None,
        hosts=hosts,
        stuck=state is RunState.QUEUED and is_stuck(row.reason),
    )


def _attempts(rows: Sequence[AccountingRow]) -> dict[int | None, list[_Attempt]]:
    """Group rows into the attempts of each component; the rows of steps follow the row of their job."""
    attempts: dict[int | None, list[_Attempt]] = {}
    for row in rows:
        component = attempts.setdefault(row.key.component, [])
        if row.key.step is None:
            component.append(_Attempt(row))
        elif component:
            component[-1].steps.append(row)
    return {key: component for key, component in attempts.items() if component}


def _why(gravest: _Attempt, steps: Sequence[AccountingRow]) -> tuple[FailureClass | None, str]:
    """Return the failure class and an explanation of the state."""
    slurm_state = gravest.slurm_state
    match slurm_state.state:
        case RunState.FAILED:
            return _why_failed(gravest, steps)
        case RunState.CANCELLED:
            return slurm_state.failure_class, _cancellation(gravest)
        case RunState.COMPLETED:
            return None, _bad_steps(steps)
        case RunState.QUEUED:
            waits = f" ({gravest.job.reason})" if gravest.job.reason else ""
            return slurm_state.failure_class, slurm_state.meaning + waits
    return None, "" if slurm_state.word == "RUNNING" else slurm_state.meaning


def _why_failed(attempt: _Attempt, steps: Sequence[AccountingRow]) -> tuple[FailureClass | None, str]:
    slurm_state = attempt.slurm_state
    failure_class = slurm_state.failure_class
    if failure_class in (FailureClass.BAD_EXIT, FailureClass.TIME_LIMIT):
        # Ranks whose peer was killed may hang until the time limit; the step shows the cause.
        for cause in (FailureClass.OUT_OF_MEMORY, FailureClass.NODE_FAILURE, FailureClass.TIME_LIMIT):
            culprits = [step for step in steps if read_state(step.state).failure_class is cause]
            if culprits and cause is not failure_class:
                shown = read_state(culprits[0].state)
                return cause, f"{shown.word} in step {_name(culprits[0])}; the job says {slurm_state.word}"
    if failure_class is FailureClass.BAD_EXIT:
        return _why_bad_exit(attempt, steps)
    return failure_class, f"{slurm_state.word}: {slurm_state.meaning}"


def _why_bad_exit(attempt: _Attempt, steps: Sequence[AccountingRow]) -> tuple[FailureClass, str]:
    job = attempt.job
    if job.signal == _NO_OUTPUT_MARK:
        remedy = "its folder must exist on the nodes and be writable"
        why = f"FAILED (0:53): Slurm could not open the job's output; {remedy}"
        return FailureClass.NEVER_STARTED, why
    if attempt.started is None:
        return FailureClass.NEVER_STARTED, "FAILED before it started"
    if number := _signal(job, steps):
        killed = next((step for step in steps if not step.exit_code and step.signal), None)
        victim = f"step {_name(killed)}" if killed and not job.signal else "the script"
        return FailureClass.KILLED, f"FAILED: {victim} was ended by {_signal_name(number)}"
    code = _exit_code(job, steps)
    alternative = f" or {128 + code}" if code in (6, 9, 11, 15) else ""  # sacct shows 137 as 9
    return FailureClass.BAD_EXIT, f"FAILED: exit code {code}{alternative}"


def _cancellation(attempt: _Attempt) -> str:
    job = attempt.job
    by = re.search(r"by (\S+)", job.state)
    who = f"by user id {by.group(1)}" if by else "by an unknown user"
    if attempt.started is not None:
        return f"cancelled {who}"
    waited = f" (it waited: {job.reason})" if job.reason else ""
    return f"cancelled {who} before it started{waited}"


def _bad_steps(steps: Sequence[AccountingRow]) -> str:
    """Describe the failed steps of a completed job; empty if there are none."""
    states = [(step, read_state(step.state)) for step in steps]
    bad = [
        f"step {_name(step)} says {state.word}" for step, state in states if state.state is RunState.FAILED
    ]
    return f"the job says COMPLETED, but {'; '.join(bad)}" if bad else ""


def _name(step: AccountingRow) -> str:
    return f"{step.key.step} ({step.name})"


def _signal(job: AccountingRow, steps: Sequence[AccountingRow]) -> int | None:
    """Return the signal that ended the script, or else a step's if no rank has a nonzero exit code."""
    ranks = [] if _worst_rank(job, steps) else [step.signal for step in steps if not step.exit_code]
    for number in [job.signal, *ranks]:
        if number and number not in (_OOM_MARK, _NO_OUTPUT_MARK):
            return number
    return None


def _worst_rank(job: AccountingRow, steps: Sequence[AccountingRow]) -> int:
    """Return the highest exit code of the steps that srun started; 0 if all succeeded.

    DerivedExitCode of sacct stays 0 if the record of the step arrived after that of the job.
    """
    started_by_srun = [step for step in steps if (step.key.step or "").isdigit()]
    return max(code or 0 for code in (job.derived_exit_code, *(s.exit_code for s in started_by_srun)))


def _signal_name(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"


def _exit_code(job: AccountingRow, steps: Sequence[AccountingRow]) -> int | None:
    """Return the exit code of an ended job; never 0 for a failed one."""
    state = read_state(job.state).state
    if state is RunState.COMPLETED:
        return job.exit_code
    if state is RunState.FAILED:
        return _worst_rank(job, steps) or job.exit_code or None
    return None


def _earliest(times: Iterable[datetime | None]) -> datetime | None:
    return min((time for time in times if time is not None), default=None)


def _latest(times: Iterable[datetime | None]) -> datetime | None:
    return max((time for time in times if time is not None), default=None)
