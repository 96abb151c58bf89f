"""What became of a job, judged from all that Slurm says about it: its own row and its steps'.

The job's row alone is not enough: it says FAILED where a step of it says OUT_OF_MEMORY.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from signal import Signals

from bench.slurm.parsing import AccountingRow, QueueRow
from bench.slurm.states import FailureClass, SlurmState, is_stuck, read_state
from bench.study.ledger import RunState

#: Of the components of a heterogeneous job, the first of these speaks for the whole.
_GRAVITY = (
    RunState.UNKNOWN,
    RunState.FAILED,
    RunState.CANCELLED,
    RunState.RUNNING,
    RunState.QUEUED,
    RunState.COMPLETED,
)
#: The name that slurmdbd gives a job of which it has steps, but not yet the job's own record.
_PROVISIONAL_NAME = "allocation"
#: In the signal's half of an exit code these are no signals: out of memory, and that slurmstepd
#: could not set up the job's output (its folder does not exist on the node).
_OOM_MARK, _NO_OUTPUT_MARK = 125, 53


@dataclass(frozen=True)
class JobOutcome:
    """What became of a job.

    ``reason`` is empty where all is well. ``exit_code`` is the worst of the steps', else the
    script's, else 128 + ``signal`` as a shell says it; None where Slurm knows none. sacct shows
    codes above 128 less 128 (137 as 9): what the job itself noted is better. ``hosts`` is Slurm's
    short form. ``restarts`` counts how often Slurm stopped the job and queued it again: the files
    of a run are then a mixture. ``stuck`` marks a queued job that waits for a person, not for
    resources. ``settled`` says that accounting has all of an ended job: for a second or some its
    rows come one by one, and a cause may be in the last.
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
    """The row of a job (or component), and its steps'."""

    job: AccountingRow
    steps: list[AccountingRow] = field(default_factory=list)

    @property
    def slurm_state(self) -> SlurmState:
        state = read_state(self.job.state)
        # Until the record of its start is in the database, a job that runs is shown so.
        return read_state("RUNNING") if state.word == "PENDING" and self.started else state

    @property
    def settled(self) -> bool:
        """Whether this is the whole record of an attempt that ended."""
        rows_end = all(read_state(row.state).state.ended for row in (self.job, *self.steps))
        # A row that says how it ended but not when is slurmdbd's guess, until the job's own record comes.
        return rows_end and self.job.ended is not None and self.job.name != _PROVISIONAL_NAME

    @property
    def started(self) -> datetime | None:
        """The start; None without nodes, where sacct may show the time of the cancelling as one."""
        return self.job.started if self.job.hosts else None


def outcomes(rows: Sequence[AccountingRow]) -> dict[str, JobOutcome]:
    """Return what became of each job, by its id, from the rows of ``sacct --duplicates``.

    A job that sacct does not know (yet) has no rows, and is not in the result.
    """
    jobs: dict[str, list[AccountingRow]] = {}
    for row in rows:
        jobs.setdefault(row.key.job, []).append(row)
    found = {job: classify(its_rows) for job, its_rows in jobs.items()}
    return {job: outcome for job, outcome in found.items() if outcome is not None}


def queue_outcomes(rows: Sequence[QueueRow]) -> dict[str, JobOutcome]:
    """Return what squeue says of each job, by its id."""
    jobs: dict[str, list[QueueRow]] = {}
    for row in rows:
        jobs.setdefault(row.key.job, []).append(row)
    return {job: classify_queue(its_rows) for job, its_rows in jobs.items()}


def classify(rows: Sequence[AccountingRow]) -> JobOutcome | None:
    """Return what became of one job, from all its rows of ``sacct --duplicates``.

    None where the job's own row is not among them.
    """
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
    again = f"queued again by Slurm {restarts} time{'s' * (restarts > 1)}" if restarts else ""
    return JobOutcome(
        state=state,
        failure_class=failure_class,
        reason="; ".join(filter(None, (reason, again))),
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


def classify_queue(rows: Sequence[QueueRow]) -> JobOutcome:
    """Return what squeue says of one job: where sacct is not to be had, and sooner than sacct.

    Exit codes, steps and the end's time are not in it. Slurm forgets a job some minutes after its
    end (MinJobAge).
    """
    row = min(rows, key=lambda row: _GRAVITY.index(read_state(row.state).state))
    slurm_state = read_state(row.state)
    state = slurm_state.state
    silent = state is RunState.COMPLETED or slurm_state.word == "RUNNING"
    because = f" ({row.reason})" if row.reason else ""
    hosts = ",".join(r.hosts for r in rows if r.hosts)
    return JobOutcome(
        state=state,
        failure_class=slurm_state.failure_class,
        reason="" if silent else slurm_state.meaning + because,
        submitted=_earliest(r.submitted for r in rows),
        # Without hosts it has not started: the time is a guess, or that of its cancelling.
        started=_earliest(r.starts for r in rows) if hosts else None,
        hosts=hosts,
        stuck=state is RunState.QUEUED and is_stuck(row.reason),
    )


def _attempts(rows: Sequence[AccountingRow]) -> dict[int | None, list[_Attempt]]:
    """Return, per component, the attempts in their order; the steps follow their job's row."""
    attempts: dict[int | None, list[_Attempt]] = {}
    for row in rows:
        component = attempts.setdefault(row.key.component, [])
        if row.key.step is None:
            component.append(_Attempt(row))
        elif component:
            component[-1].steps.append(row)
    return {key: component for key, component in attempts.items() if component}


def _why(gravest: _Attempt, steps: Sequence[AccountingRow]) -> tuple[FailureClass | None, str]:
    """Return the class of a failure, and what there is to say about the state."""
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
        # Ranks whose peer was killed may hang until the time limit: the step names the cause.
        for cause in (FailureClass.OUT_OF_MEMORY, FailureClass.NODE_FAILURE, FailureClass.TIME_LIMIT):
            culprits = [step for step in steps if read_state(step.state).failure_class is cause]
            if culprits and cause is not failure_class:
                said = read_state(culprits[0].state)
                return cause, f"{said.word} in step {_name(culprits[0])}; the job says {slurm_state.word}"
    if failure_class is FailureClass.BAD_EXIT:
        return _why_bad_exit(attempt, steps)
    return failure_class, f"{slurm_state.word}: {slurm_state.meaning}"


def _why_bad_exit(attempt: _Attempt, steps: Sequence[AccountingRow]) -> tuple[FailureClass, str]:
    job = attempt.job
    if job.signal == _NO_OUTPUT_MARK:
        words = (
            "FAILED (0:53): Slurm could not open the job's output: is its folder on the nodes, and writable?"
        )
        return FailureClass.NEVER_STARTED, words
    if attempt.started is None:
        return FailureClass.NEVER_STARTED, "FAILED before it started"
    if number := _signal(job, steps):
        killed = next((step for step in steps if not step.exit_code and step.signal), None)
        what = f"step {_name(killed)} was" if killed and not job.signal else "the script was"
        return FailureClass.KILLED, f"FAILED: {what} ended by {_signal_name(number)}"
    code = _exit_code(job, steps)
    twin = f" or {128 + code}" if code in (6, 9, 11, 15) else ""  # sacct shows 137 as 9
    return FailureClass.BAD_EXIT, f"FAILED: exit code {code}{twin}"


def _cancellation(attempt: _Attempt) -> str:
    job = attempt.job
    by = re.search(r"by (\S+)", job.state)
    who = f"by user id {by.group(1)}" if by else "by an unknown user"
    if attempt.started is not None:
        return f"cancelled {who}"
    waited = f" (it waited: {job.reason})" if job.reason else ""
    return f"cancelled {who} before it started{waited}"


def _bad_steps(steps: Sequence[AccountingRow]) -> str:
    """Return what a completed job hides: a step that failed while the script ended well."""
    said = [(step, read_state(step.state)) for step in steps]
    bad = [f"step {_name(step)} says {state.word}" for step, state in said if state.state is RunState.FAILED]
    return f"the job says COMPLETED, but {'; '.join(bad)}" if bad else ""


def _name(step: AccountingRow) -> str:
    return f"{step.key.step} ({step.name})"


def _signal(job: AccountingRow, steps: Sequence[AccountingRow]) -> int | None:
    """Return the signal that ended the script, or a step of it while none had an exit code."""
    ranks = [] if _worst_rank(job, steps) else [step.signal for step in steps if not step.exit_code]
    for number in [job.signal, *ranks]:
        if number and number not in (_OOM_MARK, _NO_OUTPUT_MARK):
            return number
    return None


def _worst_rank(job: AccountingRow, steps: Sequence[AccountingRow]) -> int:
    """Return the highest exit code of the steps that srun started; 0 where all is well.

    sacct's own DerivedExitCode stays 0 where the step's record came after the job's.
    """
    started_by_srun = [step for step in steps if (step.key.step or "").isdigit()]
    return max(code or 0 for code in (job.derived_exit_code, *(s.exit_code for s in started_by_srun)))


def _signal_name(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"


def _exit_code(job: AccountingRow, steps: Sequence[AccountingRow]) -> int | None:
    """Return the code of a job that ended; one that failed has no code 0."""
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
