"""Interpret the states of Slurm jobs as states of runs, and the reasons for which jobs wait or failed.

A :class:`SlurmState` is the meaning of one state word. :func:`classify` determines a job's status from sacct,
and :func:`classify_queue` from squeue. :func:`classify` also reads the rows of the steps, because the job's
own state may be FAILED although a step's state is OUT_OF_MEMORY. :func:`state_from_notices` reads the notices
of slurmstepd on the job's standard error: without accounting, Slurm forgets a job some minutes after its end
(MinJobAge), and then the notices are the only source.

Sources: https://slurm.schedmd.com/job_state_codes.html (base states and flags, 20.11 to 26.05) and
the state tables of squeue(1) and sacct(1) (if a flag is set, both print it instead of the base state);
https://slurm.schedmd.com/job_reason_codes.html and the table of names in Slurm's job_state_reason.c.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from ddp_scaling_bench.finding import Finding

from ...study.ledger import FailureClass, RunState
from ...study.reasons import (
    CancelledBy,
    CompletedBut,
    EndedBySignal,
    ExitCode,
    FailedEarly,
    JobSays,
    JobState,
    NoOutput,
    Requeued,
    StepState,
)
from ..contract import Status
from ..logs import signal_name
from .messages import END_REASONS, ENDED, OUT_OF_MEMORY, match_start, step_daemon_message
from .parsing import JobRow, accounting_table

#: Reasons (regular expressions) that last until somebody acts, with their meaning and remedy; the first that
#: matches applies. PerUser and PerAccount limits are missing: these end when other jobs of the user or the
#: account end.
_OBSTACLES = {
    "JobHeldUser": "the job is held; release it with `scontrol release JOB`",
    "JobHeldAdmin": "an administrator holds the job; ask the administrators to release it",
    "JobHoldMaxRequeue|.*requeued[ _](?:in[ _])?held": "Slurm holds the job because it could not be "
    "launched; read job.err, then cancel the job and submit again",
    "BurstBufferOperation": "an operation on the burst buffer failed; correct cluster.directives",
    "DependencyNeverSatisfied": "another job, on which it depends, did not end as required; "
    "correct --dependency in cluster.directives",
    "PartitionTimeLimit": "its time limit exceeds the partition's; "
    "lower cluster.time_limit, or choose another cluster.partition",
    "PartitionNodeLimit": "the partition does not allow this number of nodes, or nodes that the job requires "
    "are down; choose other axes.nodes or another cluster.partition "
    "(`scontrol show partition` shows the limits)",
    "PartitionConfig": "it exceeds a limit of the partition; "
    "compare the matrix with `scontrol show partition`, or choose another cluster.partition",
    r"(?:Assoc|QOS)MaxWall\w+": "its time limit exceeds that of the {owner}; "
    "lower cluster.time_limit, or choose another {key}",
    r"(?:Assoc|QOS)Max\w+MinutesPerJob\w*": "its resources, multiplied by its time limit, exceed the limit "
    "of the {owner} for one job; "
    "lower cluster.time_limit, request fewer nodes, ranks or cores, or choose another {key}",
    r"(?:Assoc|QOS)Max\w+Per(?:Job|Node)(?:Limit)?": "it requests more than the {owner} allows for one job; "
    "request fewer nodes, ranks or cores, or choose another {key}",
    r"QOSMin\w+": "it requests less than the QOS requires; "
    "request more nodes, ranks or cores, or choose another cluster.qos",
    "MaxMemPerLimit": "it requests more memory than the cluster allows per core or node; lower cluster.mem",
    "InvalidAccount|AccountNotAllowed": "the account does not exist, or the partition does not allow it; "
    "correct cluster.account or cluster.partition",
    "InvalidQOS|QOSNotAllowed": "the QOS does not exist, or the account or the partition does not allow it; "
    "correct cluster.qos",
    "BadConstraints": "no node of the partition satisfies the job's constraints; "
    "correct cluster.constraint, cluster.gpu_type or cluster.nodelist",
    "ReservationDeleted|ReservationInvalid": "its reservation does not exist or is not valid; "
    "correct or remove cluster.reservation",
}
#: Limits that all jobs of an account or QOS share. They end when jobs end or recorded usage decays.
_GROUP_LIMIT = re.compile(r"(?:Assoc|QOS)Grp\w+|Max\w+PerAccount")


def obstacle(reason: str) -> str:
    """Return why a job that waits for ``reason`` does not start until somebody acts, else ``""``."""
    # Slurm may append details after a comma: "ReqNodeNotAvail, UnavailableNodes:n3".
    name = reason.partition(",")[0]
    owner, key = ("QOS", "cluster.qos") if name.startswith("QOS") else ("account", "cluster.account")
    found = (text for reasons, text in _OBSTACLES.items() if re.fullmatch(reasons, name))
    return next(found, "").format(owner=owner, key=key)


def describe_wait(reason: str, *, meaning: str = "waits to start") -> str:
    """Describe why a job waits, with Slurm's reason if any, and the remedy if the job will not start."""
    if text := obstacle(reason):
        return f"will not start ({reason}): {text}"
    if _GROUP_LIMIT.fullmatch(reason):
        return f"waiting for your group's limit ({reason})"
    return f"{meaning} ({reason})" if reason else meaning


@dataclass(frozen=True)
class SlurmState:
    """A Slurm state: its name and its meaning for a run."""

    word: str
    state: RunState
    failure_class: FailureClass | None
    meaning: str


_QUEUED, _RUNNING, _FAILED = RunState.QUEUED, RunState.RUNNING, RunState.FAILED
_INVALID = "measured times are invalid"
_NO_ENVIRONMENT = "its environment could not be loaded"
_HELD = "was requeued and is held until somebody releases it"

_STATES = (
    SlurmState("PENDING", _QUEUED, None, "waits to start"),
    SlurmState("REQUEUED", _QUEUED, FailureClass.REQUEUED, "was stopped and is queued again"),
    SlurmState("REQUEUE_FED", _QUEUED, FailureClass.REQUEUED, "is queued again by the federation"),
    SlurmState("EXPEDITING", _QUEUED, FailureClass.REQUEUED, "is queued again, before all others"),
    SlurmState("RESV_DEL_HOLD", _QUEUED, None, "held: its reservation was deleted"),
    # A job in one of the next two states waits for a person. Waiting for the job would never end.
    SlurmState("REQUEUE_HOLD", _FAILED, FailureClass.REQUEUED, _HELD),
    SlurmState("SPECIAL_EXIT", _FAILED, FailureClass.REQUEUED, _HELD),
    SlurmState("CONFIGURING", _RUNNING, None, "has nodes, which are being made ready"),
    SlurmState("POWER_UP_NODE", _RUNNING, None, "has nodes, which are being powered up"),
    SlurmState("RUNNING", _RUNNING, None, "runs"),
    SlurmState("SUSPENDED", _RUNNING, None, f"is suspended, and its nodes may run other jobs: {_INVALID}"),
    SlurmState("STOPPED", _RUNNING, None, f"is stopped by SIGSTOP: {_INVALID}"),
    SlurmState("SIGNALING", _RUNNING, None, "is being signalled"),
    SlurmState("RESIZING", _RUNNING, None, "changes its size"),
    SlurmState("STAGE_OUT", _RUNNING, None, "has ended and stages files out"),
    SlurmState("COMPLETING", _RUNNING, None, "has ended; its nodes are being cleared"),
    SlurmState("UPDATE_DB", _RUNNING, None, "is being written to the database"),
    SlurmState("COMPLETED", RunState.COMPLETED, None, "ended with exit code 0"),
    SlurmState("FAILED", _FAILED, FailureClass.BAD_EXIT, "ended with a bad exit code"),
    SlurmState("TIMEOUT", _FAILED, FailureClass.TIME_LIMIT, "reached its time limit"),
    SlurmState("OUT_OF_MEMORY", _FAILED, FailureClass.OUT_OF_MEMORY, "ran out of memory"),
    SlurmState("NODE_FAIL", _FAILED, FailureClass.NODE_FAILURE, "lost a node"),
    SlurmState("PREEMPTED", _FAILED, FailureClass.PREEMPTED, "was stopped for another job"),
    SlurmState("BOOT_FAIL", _FAILED, FailureClass.NEVER_STARTED, "its nodes did not boot"),
    SlurmState("LAUNCH_FAILED", _FAILED, FailureClass.NEVER_STARTED, "could not be launched"),
    SlurmState("GETENV_FAILED", _FAILED, FailureClass.NEVER_STARTED, _NO_ENVIRONMENT),
    SlurmState("RECONFIG_FAIL", _FAILED, FailureClass.NEVER_STARTED, "its nodes could not be set up"),
    SlurmState("DEADLINE", _FAILED, FailureClass.NEVER_STARTED, "could not meet its deadline"),
    SlurmState("CANCELLED", RunState.CANCELLED, FailureClass.CANCELLED, "was cancelled"),
    SlurmState("REVOKED", RunState.CANCELLED, FailureClass.CANCELLED, "was started by another cluster"),
)

_BY_WORD = {state.word: state for state in _STATES}


def read_state(word: str) -> SlurmState:
    """Return the state that squeue or sacct print as ``word``; ``CANCELLED by 1000`` is CANCELLED.

    Unknown words give an UNKNOWN state.
    """
    unknown = f"Slurm reports the unknown state {word.strip()!r}"
    head = word.strip().partition(" ")[0]
    return _BY_WORD.get(head) or SlurmState("UNKNOWN", RunState.UNKNOWN, None, unknown)


def state_from_notices(text: str, *, job_id: str) -> SlurmState | None:
    """Return the state in which Slurm ended a job, according to the notices in its standard error.

    Returns None if there is no notice. A notice about a step counts only if it gives a reason, because
    srun also ends steps on its own. Out of memory takes precedence, because it causes the notices that
    follow it.
    """
    found: str | None = None
    for message in map(step_daemon_message, text.splitlines()):
        if (memory := match_start(OUT_OF_MEMORY, message)) and memory["job"] == job_id:
            return read_state("OUT_OF_MEMORY")
        notice = match_start(ENDED, message)
        if notice is None or notice["job"] != job_id:
            continue
        state = END_REASONS.get(notice["why"])
        if state or notice["kind"] == "JOB":
            found = state or found or "CANCELLED"
    return read_state(found) if found else None


#: slurmdbd shows this name while it has records of a job's steps but not yet of the job itself.
PROVISIONAL_NAME = "allocation"
#: slurmstepd could not open the job's output: this value in the signal field of an exit code is no signal.
_NO_OUTPUT_MARK = 53
#: Neither is 125, which means out of memory.
_NO_SIGNALS = (None, 0, 125, _NO_OUTPUT_MARK)
#: squeue of 24.11 and later shows this reason for 53; 22.05 shows only NonZeroExitCode.
_NO_OUTPUT_REASON = f"RaisedSignal:{_NO_OUTPUT_MARK}("
#: Exit code with which a batch script reports that it could not write end.json (EX_IOERR of sysexits.h).
EXIT_UNWRITABLE = 74
#: Causes that the states of steps show, the gravest first; the job itself can be FAILED.
_IN_STEPS = (FailureClass.OUT_OF_MEMORY, FailureClass.NODE_FAILURE, FailureClass.TIME_LIMIT)


@dataclass
class _Attempt:
    """Rows of sacct for one attempt of a job, and its steps."""

    job: JobRow
    steps: list[JobRow] = field(default_factory=list)

    @property
    def slurm_state(self) -> SlurmState:
        state = read_state(self.job.state)
        # sacct shows a running job as pending until the database has the record of its start.
        return read_state("RUNNING") if state.word == "PENDING" and self.started else state

    @property
    def settled(self) -> bool:
        """True if the attempt has ended and sacct has all of its rows."""
        rows_end = all(read_state(row.state).state.ended for row in (self.job, *self.steps))
        # A row with a final state but no end time is a guess of slurmdbd.
        return rows_end and self.job.ended is not None and self.job.name != PROVISIONAL_NAME

    @property
    def started(self) -> datetime | None:
        """Start time. None if the job got no nodes: sacct may then show the time of the cancellation."""
        return self.job.started if self.job.hosts else None


def rows_by_job(rows: Iterable[JobRow]) -> dict[str, list[JobRow]]:
    """Return the rows of each job."""
    jobs: dict[str, list[JobRow]] = {}
    for row in rows:
        jobs.setdefault(row.job, []).append(row)
    return jobs


def classify(rows: Sequence[JobRow]) -> Status | None:
    """Return the status of one job from ``sacct --duplicates``, or None if the job's own row is missing."""
    attempts = _attempts(rows)
    if not attempts:
        return None
    last, restarts = attempts[-1], len(attempts) - 1
    job, state = last.job, last.slurm_state.state
    failure_class, reasons, exit_code = _explained(last)
    is_live = state in (RunState.QUEUED, RunState.RUNNING, RunState.UNKNOWN)
    return Status(
        job_id=job.job,
        state=state,
        failure_class=failure_class,
        reasons=reasons + ((Requeued(times=restarts),) if restarts else ()),
        remark=_remark(last) if is_live else "",
        exit_code=exit_code,
        started=last.started,
        ended=job.ended if state.ended else None,
        hosts=job.hosts,
        restarts=restarts,
        stuck=state is RunState.QUEUED and obstacle(job.reason) != "",
        settled=last.settled,
        owner=_other_user(job),
        summary=accounting_table(rows),
    )


def classify_queue(row: JobRow) -> Status:
    """Return the status of a job from its row in squeue, which needs no accounting.

    squeue does not show exit codes, steps and the end time, and forgets a job some minutes after
    its end (MinJobAge).
    """
    slurm_state = read_state(row.state)
    state, waits = slurm_state.state, slurm_state.state is RunState.QUEUED
    failure_class, meaning = slurm_state.failure_class, slurm_state.meaning
    reasons: tuple[Finding, ...] = ()
    remark = f"{meaning} ({row.reason})" if row.reason else meaning
    if waits:
        remark = describe_wait(row.reason, meaning=meaning)
    if state is RunState.COMPLETED or slurm_state.word == "RUNNING":
        remark = ""
    elif state is RunState.FAILED and row.reason.startswith(_NO_OUTPUT_REASON):
        failure_class, reasons = FailureClass.NEVER_STARTED, (NoOutput(detail=row.reason),)
    elif state.ended:
        reasons = (JobState(meaning=meaning, detail=row.reason),)
    return Status(
        job_id=row.job,
        state=state,
        failure_class=failure_class,
        reasons=reasons,
        remark="" if state.ended else remark,
        # Without hosts, the time is an estimate or the time of the cancellation.
        started=row.started if row.hosts else None,
        hosts=row.hosts,
        stuck=waits and obstacle(row.reason) != "",
        # The scheduler may still replace the reason of a job that it has not yet considered: Slurm 22.05
        # reports PartitionConfig at the submission and a specific limit some moments later.
        considered=not waits or row.reason not in ("", "PartitionConfig"),
        settled=False,
        owner=_other_user(row),
    )


def _other_user(row: JobRow) -> str:
    """Return the name of a job's owner, or ``""`` if the job belongs to the user of this process."""
    return f"user {row.user}" if row.uid not in ("", str(os.geteuid())) else ""


def _attempts(rows: Sequence[JobRow]) -> list[_Attempt]:
    """Group rows into the attempts of a job; the rows of steps follow the row of their job."""
    attempts: list[_Attempt] = []
    for row in rows:
        if row.step is None:
            attempts.append(_Attempt(row))
        elif attempts:
            attempts[-1].steps.append(row)
    return attempts


def _remark(attempt: _Attempt) -> str:
    """Return the explanation of the state of a job that has not ended."""
    slurm_state = attempt.slurm_state
    if slurm_state.state is RunState.QUEUED:
        return describe_wait(attempt.job.reason, meaning=slurm_state.meaning)
    return "" if slurm_state.word == "RUNNING" else slurm_state.meaning


def _explained(attempt: _Attempt) -> tuple[FailureClass | None, tuple[Finding, ...], int | None]:
    """Return the failure class, the reasons of the end, and the exit code."""
    job, slurm_state = attempt.job, attempt.slurm_state
    failure_class = slurm_state.failure_class
    match slurm_state.state:
        case RunState.FAILED:
            if failure_class is FailureClass.BAD_EXIT and job.signal == _NO_OUTPUT_MARK:
                return FailureClass.NEVER_STARTED, (NoOutput(state="FAILED (0:53)"),), None
            if failure_class is FailureClass.BAD_EXIT and attempt.started is None:
                return FailureClass.NEVER_STARTED, (FailedEarly(),), job.exit_code or None
            steps = _status_of_steps(job, attempt.steps, derived=job.derived_exit_code)
            number = None if job.signal in _NO_SIGNALS else job.signal
            return failed_end(slurm_state, steps, code=job.exit_code, number=number)
        case RunState.CANCELLED:
            return failure_class, (_cancellation(attempt),), None
        case RunState.COMPLETED:
            return None, _bad_steps(attempt.steps), job.exit_code
        case RunState.QUEUED:
            return failure_class, (), None
    return None, (), None


def failed_end(
    slurm_state: SlurmState, steps: Status, *, code: int | None, number: int | None
) -> tuple[FailureClass | None, tuple[Finding, ...], int | None]:
    """Return the failure class, the reasons and the exit code of a job that failed.

    Args:
        slurm_state: the state of the job.
        steps: the status of its steps.
        code: exit code of its script.
        number: signal that ended its script, if any.
    """
    word, cause = slurm_state.word, slurm_state.failure_class
    # Slurm itself sets the exit code of a job that lost a node (1 on 24.11 and later, 0 before), and of a job
    # that reached its time limit (15 or 0, depending on which process ends first).
    by_slurm = cause in (FailureClass.NODE_FAILURE, FailureClass.TIME_LIMIT)
    killed = steps.failure_class is FailureClass.KILLED
    exit_code = (None if killed else steps.exit_code) or (None if by_slurm else code) or None
    # Ranks whose peer was killed may hang until the time limit; the step shows the cause.
    is_open = cause in (FailureClass.BAD_EXIT, FailureClass.TIME_LIMIT)
    if is_open and steps.failure_class in _IN_STEPS and steps.failure_class is not cause:
        return steps.failure_class, (*steps.reasons, JobSays(state=word)), exit_code
    if cause is not FailureClass.BAD_EXIT:
        return cause, (JobState(state=word, meaning=slurm_state.meaning),), exit_code
    if number:
        by_signal = EndedBySignal(signal=signal_name(number), state="FAILED")
        return FailureClass.KILLED, (by_signal,), 128 + number
    if killed:
        in_steps = (replace(one, state="FAILED") for one in steps.reasons if isinstance(one, EndedBySignal))
        return FailureClass.KILLED, tuple(in_steps), steps.exit_code
    return cause, (_exit_code(exit_code, state="FAILED"),), exit_code


def step_statuses(rows: Sequence[JobRow]) -> dict[str, Status]:
    """Return the status of the steps of each run of a pack. Each step has the name of its run."""
    found: dict[str, Status] = {}
    for attempt in _attempts(rows):
        steps: dict[str, list[JobRow]] = {}
        for step in attempt.steps:
            steps.setdefault(step.name, []).append(step)
        # The last start of a run counts, if the pack was requeued.
        found |= {name: _status_of_steps(attempt.job, own) for name, own in steps.items()}
    return found


def _status_of_steps(job: JobRow, steps: Sequence[JobRow], *, derived: int | None = None) -> Status:
    """Return what steps show: a cause, the highest exit code of the ranks, or the signal that ended a step.

    ``derived`` is DerivedExitCode of sacct. It stays 0 if the record of a step arrived after that of the job.
    """
    states = [(step, read_state(step.state)) for step in steps]
    ranks = [step.exit_code for step in steps if (step.step or "").isdigit()]
    code = max(number or 0 for number in (derived, *ranks)) or None
    grave = [(step, state) for cause in _IN_STEPS for step, state in states if state.failure_class is cause]
    killed = [step for step in steps if not step.exit_code and step.signal not in _NO_SIGNALS]
    failure_class, reasons = None, list[Finding]()
    if grave:
        step, slurm_state = grave[0]
        failure_class = slurm_state.failure_class
        reasons.append(StepState(state=slurm_state.word, step=_name(step)))
    elif code:
        failure_class = FailureClass.BAD_EXIT
        reasons.append(_exit_code(code))
    elif killed:
        number = killed[0].signal or 0
        failure_class, code = FailureClass.KILLED, 128 + number
        reasons.append(EndedBySignal(signal=signal_name(number), step=_name(killed[0])))
    return Status(
        job_id=job.job,
        state=_FAILED if any(state.state is _FAILED for _, state in states) else RunState.COMPLETED,
        failure_class=failure_class,
        reasons=tuple(reasons),
        exit_code=code,
        settled=job.name != PROVISIONAL_NAME and all(state.state.ended for _, state in states),
        summary=accounting_table([job, *steps]),
    )


def _exit_code(code: int | None, *, state: str = "") -> ExitCode:
    """Return the reason of an exit code; sacct shows codes above 128 reduced by 128 (137 as 9)."""
    return ExitCode(exit_code=code, or_more=code in (6, 9, 11, 15), state=state)


def _cancellation(attempt: _Attempt) -> CancelledBy:
    job = attempt.job
    by = re.search(r"by (\S+)", job.state)
    started = attempt.started is not None
    return CancelledBy(user=by[1] if by else "", started=started, waited="" if started else job.reason)


def _bad_steps(steps: Sequence[JobRow]) -> tuple[Finding, ...]:
    """Return the failed steps of a completed job as a reason, if there are any."""
    states = [(step, read_state(step.state)) for step in steps]
    bad = [(_name(step), state.word) for step, state in states if state.state is _FAILED]
    return (CompletedBut(steps=tuple(bad)),) if bad else ()


def _name(step: JobRow) -> str:
    return f"{step.step} ({step.name})"
