"""Interpret the states of Slurm jobs as states of runs, and the reasons for which jobs wait or failed.

A :class:`SlurmState` is the meaning of one state word. :func:`state_from_notices` reads the notices of
slurmstepd on the job's standard error: without accounting, Slurm forgets a job some minutes after its end
(MinJobAge), and then the notices are the only source. :func:`classify` determines a job's status from sacct,
and :func:`classify_queue` from squeue. :func:`classify` also reads the rows of the steps, because the job's
own state may be FAILED although a step's state is OUT_OF_MEMORY. :func:`job_outcome` also reads the files of
the run, and srun's messages in job.err.

Sources: https://slurm.schedmd.com/job_state_codes.html (base states and flags, 20.11 to 26.05) and
the state tables of squeue(1) and sacct(1) (if a flag is set, both print it instead of the base state);
https://slurm.schedmd.com/job_reason_codes.html and the table of names in Slurm's job_state_reason.c.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from ...matrix.cell import Cell
from ...measure.nccl_errors import LOST_CONNECTION
from ...study.layout import RunFolder
from ...study.ledger import FailureClass, RunState
from ...units import count
from ..outcome import (
    EndNote,
    JobStatus,
    Outcome,
    error_line,
    joined,
    killed_by_torchrun,
    log_tail,
    missing_results,
    nccl_error,
    signal_name,
    with_workload_error,
    wrong_ranks_of,
)
from .messages import (
    END_REASONS,
    ENDED,
    OUT_OF_MEMORY,
    SIGNALS,
    TASK_EXITED,
    TASK_KILLED,
    TASKS_ENDED,
    match_start,
    search,
    step_daemon_message,
)
from .parsing import AccountingRow, QueueRow


@dataclass(frozen=True)
class _Obstacle:
    """Reasons (a regular expression) that last until somebody acts, with their meaning and remedy."""

    reasons: str
    meaning: str
    remedy: str


def _limits(begin: str, owner: str, key: str) -> tuple[_Obstacle, ...]:
    """Return the limits of an account or a QOS for one job; their reasons begin with ``begin``."""
    fewer = f"request fewer nodes, ranks or cores, or choose another {key}"
    return (
        _Obstacle(
            rf"{begin}MaxWall\w+",
            f"its time limit exceeds that of the {owner}",
            f"lower cluster.time_limit, or choose another {key}",
        ),
        _Obstacle(
            rf"{begin}Max\w+MinutesPerJob\w*",
            f"its resources, multiplied by its time limit, exceed the limit of the {owner} for one job",
            f"lower cluster.time_limit, {fewer}",
        ),
        _Obstacle(
            rf"{begin}Max\w+Per(?:Job|Node)(?:Limit)?",
            f"it requests more than the {owner} allows for one job",
            fewer,
        ),
    )


#: The first obstacle that matches a reason applies. PerUser and PerAccount limits are missing: these end
#: when other jobs of the user or the account end.
_OBSTACLES = (
    _Obstacle("JobHeldUser", "the job is held", "release it with `scontrol release JOB`"),
    _Obstacle("JobHeldAdmin", "an administrator holds the job", "ask the administrators to release it"),
    _Obstacle(
        r"JobHoldMaxRequeue|.*requeued[ _](?:in[ _])?held",
        "Slurm holds the job because it could not be launched",
        "read job.err, then cancel the job and submit again",
    ),
    _Obstacle(
        "BurstBufferOperation", "an operation on the burst buffer failed", "correct cluster.directives"
    ),
    _Obstacle(
        "DependencyNeverSatisfied",
        "another job, on which it depends, did not end as required",
        "correct --dependency in cluster.directives",
    ),
    _Obstacle(
        "PartitionTimeLimit",
        "its time limit exceeds the partition's",
        "lower cluster.time_limit, or choose another cluster.partition",
    ),
    _Obstacle(
        "PartitionNodeLimit",
        "the partition does not allow this number of nodes, or nodes that the job requires are down",
        "choose other axes.nodes or another cluster.partition (`scontrol show partition` shows the limits)",
    ),
    _Obstacle(
        "PartitionConfig",
        "it exceeds a limit of the partition",
        "compare the matrix with `scontrol show partition`, or choose another cluster.partition",
    ),
    *_limits("Assoc", "account", "cluster.account"),
    *_limits("QOS", "QOS", "cluster.qos"),
    _Obstacle(
        r"QOSMin\w+",
        "it requests less than the QOS requires",
        "request more nodes, ranks or cores, or choose another cluster.qos",
    ),
    _Obstacle(
        "MaxMemPerLimit",
        "it requests more memory than the cluster allows per core or node",
        "lower cluster.mem",
    ),
    _Obstacle(
        "InvalidAccount|AccountNotAllowed",
        "the account does not exist, or the partition does not allow it",
        "correct cluster.account or cluster.partition",
    ),
    _Obstacle(
        "InvalidQOS|QOSNotAllowed",
        "the QOS does not exist, or the account or the partition does not allow it",
        "correct cluster.qos",
    ),
    _Obstacle(
        "BadConstraints",
        "no node of the partition satisfies the job's constraints",
        "correct cluster.constraint, cluster.gpu_type or cluster.nodelist",
    ),
    _Obstacle(
        "ReservationDeleted|ReservationInvalid",
        "its reservation does not exist or is not valid",
        "correct or remove cluster.reservation",
    ),
)

#: Limits that all jobs of an account or QOS share. They end when jobs end or recorded usage decays.
_GROUP_LIMIT = re.compile(r"(?:Assoc|QOS)Grp\w+|Max\w+PerAccount")


def is_preliminary(reason: str) -> bool:
    """Return True if the scheduler may still replace ``reason``, because it has not yet considered the job.

    Slurm 22.05 reports PartitionConfig at the submission and a specific limit some moments later.
    """
    return reason in ("", "PartitionConfig")


def will_not_start(reason: str) -> bool:
    """Return True if a job that waits for ``reason`` does not start until somebody acts."""
    return _obstacle(reason) is not None


def describe_wait(reason: str, *, meaning: str = "waits to start") -> str:
    """Describe why a job waits, with the remedy if the job will not start.

    ``reason`` is Slurm's reason (may be empty). ``meaning`` describes the job's state.
    """
    if obstacle := _obstacle(reason):
        return f"will not start ({reason}): {obstacle.meaning}; {obstacle.remedy}"
    if _GROUP_LIMIT.fullmatch(reason):
        return f"waiting for your group's limit ({reason})"
    return f"{meaning} ({reason})" if reason else meaning


def _obstacle(reason: str) -> _Obstacle | None:
    # Slurm may append details after a comma: "ReqNodeNotAvail, UnavailableNodes:n3".
    name = reason.partition(",")[0]
    return next((one for one in _OBSTACLES if re.fullmatch(one.reasons, name)), None)


@dataclass(frozen=True)
class SlurmState:
    """A Slurm state: its name, its short code in squeue (if any), and its meaning for a run."""

    word: str
    code: str | None
    state: RunState
    failure_class: FailureClass | None
    meaning: str


_QUEUED, _RUNNING, _FAILED = RunState.QUEUED, RunState.RUNNING, RunState.FAILED
_HELD = "was requeued and is held until somebody releases it"

_STATES = (
    SlurmState("PENDING", "PD", _QUEUED, None, "waits to start"),
    SlurmState("REQUEUED", "RQ", _QUEUED, FailureClass.REQUEUED, "was stopped and is queued again"),
    SlurmState("REQUEUE_FED", "RF", _QUEUED, FailureClass.REQUEUED, "is queued again by the federation"),
    SlurmState("EXPEDITING", None, _QUEUED, FailureClass.REQUEUED, "is queued again, before all others"),
    SlurmState("RESV_DEL_HOLD", "RD", _QUEUED, None, "held: its reservation was deleted"),
    # A job in one of the next two states waits for a person. Waiting for the job would never end.
    SlurmState("REQUEUE_HOLD", "RH", _FAILED, FailureClass.REQUEUED, _HELD),
    SlurmState("SPECIAL_EXIT", "SE", _FAILED, FailureClass.REQUEUED, _HELD),
    SlurmState("CONFIGURING", "CF", _RUNNING, None, "has nodes, which are being made ready"),
    SlurmState("POWER_UP_NODE", None, _RUNNING, None, "has nodes, which are being powered up"),
    SlurmState("RUNNING", "R", _RUNNING, None, "runs"),
    SlurmState(
        "SUSPENDED",
        "S",
        _RUNNING,
        None,
        "is suspended, and its nodes may run other jobs: measured times are invalid",
    ),
    SlurmState("STOPPED", "ST", _RUNNING, None, "is stopped by SIGSTOP: measured times are invalid"),
    SlurmState("SIGNALING", "SI", _RUNNING, None, "is being signalled"),
    SlurmState("RESIZING", "RS", _RUNNING, None, "changes its size"),
    SlurmState("STAGE_OUT", "SO", _RUNNING, None, "has ended and stages files out"),
    SlurmState("COMPLETING", "CG", _RUNNING, None, "has ended; its nodes are being cleared"),
    SlurmState("UPDATE_DB", None, _RUNNING, None, "is being written to the database"),
    SlurmState("COMPLETED", "CD", RunState.COMPLETED, None, "ended with exit code 0"),
    SlurmState("FAILED", "F", _FAILED, FailureClass.BAD_EXIT, "ended with a bad exit code"),
    SlurmState("TIMEOUT", "TO", _FAILED, FailureClass.TIME_LIMIT, "reached its time limit"),
    SlurmState("OUT_OF_MEMORY", "OOM", _FAILED, FailureClass.OUT_OF_MEMORY, "ran out of memory"),
    SlurmState("NODE_FAIL", "NF", _FAILED, FailureClass.NODE_FAILURE, "lost a node"),
    SlurmState("PREEMPTED", "PR", _FAILED, FailureClass.PREEMPTED, "was stopped for another job"),
    SlurmState("BOOT_FAIL", "BF", _FAILED, FailureClass.NEVER_STARTED, "its nodes did not boot"),
    SlurmState("LAUNCH_FAILED", None, _FAILED, FailureClass.NEVER_STARTED, "could not be launched"),
    SlurmState(
        "GETENV_FAILED", None, _FAILED, FailureClass.NEVER_STARTED, "its environment could not be loaded"
    ),
    SlurmState("RECONFIG_FAIL", None, _FAILED, FailureClass.NEVER_STARTED, "its nodes could not be set up"),
    SlurmState("DEADLINE", "DL", _FAILED, FailureClass.NEVER_STARTED, "could not meet its deadline"),
    SlurmState("CANCELLED", "CA", RunState.CANCELLED, FailureClass.CANCELLED, "was cancelled"),
    SlurmState("REVOKED", "RV", RunState.CANCELLED, FailureClass.CANCELLED, "was started by another cluster"),
)

#: All states, by name and by short code.
STATES = {key: state for state in _STATES for key in (state.word, state.code) if key}


def read_state(word: str) -> SlurmState:
    """Return the state that squeue, sacct or scontrol print as ``word``.

    Accepts names, short codes, ``CANCELLED by 1000``, and names truncated with ``+`` in a column of
    fixed width. Other words give an UNKNOWN state.
    """
    shown = word.strip()
    head = shown.upper().partition(" ")[0]
    if head in STATES:
        return STATES[head]
    if head.endswith("+"):
        begin = head.removesuffix("+")
        matches = {state.word: state for state in _STATES if begin and state.word.startswith(begin)}
        if begin in STATES:
            return STATES[begin]
        if len(matches) == 1:
            return next(iter(matches.values()))
    return SlurmState("UNKNOWN", None, RunState.UNKNOWN, None, f"Slurm reports the unknown state {shown!r}")


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
        state = next((state for state, why in END_REASONS.items() if notice["why"] == why.pattern), None)
        if state or notice["kind"] == "JOB":
            found = state or found or "CANCELLED"
    return read_state(found) if found else None


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
#: squeue of 24.11 and later shows this reason for 53; 22.05 shows only NonZeroExitCode.
_NO_OUTPUT_REASON = f"RaisedSignal:{_NO_OUTPUT_MARK}("
#: Exit code with which a batch script reports that it could not write end.json (EX_IOERR of sysexits.h).
EXIT_UNWRITABLE = 74
#: Explanation of a job whose output could not be opened.
NO_OUTPUT = "Slurm could not open the job's output; its folder must exist on the nodes and be writable"


@dataclass
class _Attempt:
    """Rows of sacct for one attempt of a job, or of a component of a heterogeneous job, and its steps."""

    job: AccountingRow
    steps: list[AccountingRow] = field(default_factory=list)

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
        return rows_end and self.job.ended is not None and self.job.name != _PROVISIONAL_NAME

    @property
    def started(self) -> datetime | None:
        """Start time. None if the job got no nodes: sacct may then show the time of the cancellation."""
        return self.job.started if self.job.hosts else None


def queue_statuses(rows: Sequence[QueueRow]) -> dict[str, JobStatus]:
    """Return the status of each job by job id, from the rows of squeue."""
    jobs: dict[str, list[QueueRow]] = {}
    for row in rows:
        jobs.setdefault(row.key.job, []).append(row)
    return {job: classify_queue(its_rows) for job, its_rows in jobs.items()}


def classify(rows: Sequence[AccountingRow]) -> JobStatus | None:
    """Return the status of one job from ``sacct --duplicates``, or None if the job's own row is missing."""
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
    requeued = f"requeued by Slurm {count(restarts, 'time')}" if restarts else ""
    return JobStatus(
        state=state,
        failure_class=failure_class,
        reason="; ".join(filter(None, (reason, requeued))),
        exit_code=128 + number if number else _exit_code(gravest.job, steps),
        started=_earliest(a.started for a in last),
        ended=max(filter(None, (a.job.ended for a in last)), default=None) if state.ended else None,
        hosts=",".join(a.job.hosts for a in last if a.job.hosts),
        restarts=restarts,
        stuck=state is RunState.QUEUED and will_not_start(gravest.job.reason),
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
    hosts = ",".join(r.hosts for r in rows if r.hosts)
    failure_class, reason = slurm_state.failure_class, _why_in_queue(slurm_state, row.reason)
    if state is RunState.FAILED and row.reason.startswith(_NO_OUTPUT_REASON):
        failure_class, reason = FailureClass.NEVER_STARTED, f"{NO_OUTPUT} ({row.reason})"
    return JobStatus(
        state=state,
        failure_class=failure_class,
        reason=reason,
        # Without hosts, the time is an estimate or the time of the cancellation.
        started=_earliest(r.starts for r in rows) if hosts else None,
        hosts=hosts,
        stuck=state is RunState.QUEUED and will_not_start(row.reason),
    )


def _why_in_queue(slurm_state: SlurmState, reason: str) -> str:
    """Return the explanation of a state in squeue and of Slurm's reason for it."""
    if slurm_state.state is RunState.COMPLETED or slurm_state.word == "RUNNING":
        return ""
    if slurm_state.state is RunState.QUEUED:
        return describe_wait(reason, meaning=slurm_state.meaning)
    return f"{slurm_state.meaning} ({reason})" if reason else slurm_state.meaning


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
            waits = describe_wait(gravest.job.reason, meaning=slurm_state.meaning)
            return slurm_state.failure_class, waits
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
        return FailureClass.NEVER_STARTED, f"FAILED (0:53): {NO_OUTPUT}"
    if attempt.started is None:
        return FailureClass.NEVER_STARTED, "FAILED before it started"
    if number := _signal(job, steps):
        killed = next((step for step in steps if not step.exit_code and step.signal), None)
        victim = f"step {_name(killed)}" if killed and not job.signal else "the script"
        return FailureClass.KILLED, f"FAILED: {victim} was ended by {signal_name(number)}"
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
    """Describe the failed steps of a completed job, or ``""`` if there are none."""
    states = [(step, read_state(step.state)) for step in steps]
    bad = [
        f"step {_name(step)} says {state.word}" for step, state in states if state.state is RunState.FAILED
    ]
    return f"the job says COMPLETED, but {'; '.join(bad)}" if bad else ""


def _name(step: AccountingRow) -> str:
    return f"{step.key.step} ({step.name})"


def _signal(job: AccountingRow, steps: Sequence[AccountingRow]) -> int | None:
    """Return the signal that ended the script, else, if no rank failed, the signal that ended a step."""
    ranks = [] if _worst_rank(job, steps) else [step.signal for step in steps if not step.exit_code]
    for number in [job.signal, *ranks]:
        if number and number not in (_OOM_MARK, _NO_OUTPUT_MARK):
            return number
    return None


def _worst_rank(job: AccountingRow, steps: Sequence[AccountingRow]) -> int:
    """Return the highest exit code of the steps that srun started, or 0 if all succeeded.

    DerivedExitCode of sacct stays 0 if the record of the step arrived after the record of the job.
    """
    started_by_srun = [step for step in steps if (step.key.step or "").isdigit()]
    return max(code or 0 for code in (job.derived_exit_code, *(s.exit_code for s in started_by_srun)))


def _exit_code(job: AccountingRow, steps: Sequence[AccountingRow]) -> int | None:
    """Return the exit code of an ended job, which is never 0 for a failed job."""
    state = read_state(job.state).state
    if state is RunState.COMPLETED:
        return job.exit_code
    if state is not RunState.FAILED:
        return None
    # Slurm itself sets the exit code of a job that lost a node (1 on 24.11 and later, 0 before), and of a job
    # that reached its time limit (15 or 0, depending on which process ends first).
    by_slurm = read_state(job.state).failure_class in (FailureClass.NODE_FAILURE, FailureClass.TIME_LIMIT)
    return _worst_rank(job, steps) or (None if by_slurm else job.exit_code) or None


def _earliest(times: Iterable[datetime | None]) -> datetime | None:
    return min((time for time in times if time is not None), default=None)


def job_outcome(
    folder: RunFolder, cell: Cell, status: JobStatus, end: EndNote, rows: Sequence[AccountingRow] = ()
) -> Outcome:
    """Determine how a run ended whose Slurm job has ended; ``rows`` are the job's rows in sacct."""
    if status.state is RunState.COMPLETED:
        missing = missing_results(folder, cell)
        if missing:
            reason = joined(f"{missing}, although Slurm says COMPLETED", status.reason)
            return Outcome(RunState.FAILED, reason, FailureClass.BAD_EXIT, 0)
        return Outcome(RunState.COMPLETED, status.reason, None, 0)
    # sacct subtracts 128 from codes above 128; end.json contains the exact code.
    exit_code = end.exit_code or status.exit_code
    if status.failure_class not in (FailureClass.BAD_EXIT, FailureClass.KILLED, None):
        reason = with_workload_error(folder, status.reason)
        return Outcome(status.state, reason, status.failure_class, exit_code)
    if status.failure_class is FailureClass.BAD_EXIT and _lacks_output(folder, status, end):
        return Outcome(status.state, joined(NO_OUTPUT, status.reason), FailureClass.NEVER_STARTED)
    killed = killed_rank(folder, cell.launcher)
    exited = "" if killed else exited_rank(folder, cell.launcher)
    failure_class = FailureClass.KILLED if killed else status.failure_class
    if exited:  # the exit code of this rank is the cause; srun ended the other ranks with signals
        failure_class = FailureClass.BAD_EXIT
    why = joined(killed, nccl_error(folder)) if killed else error_line(folder)
    why = why or exited or _unwritable_folder(end, rows)
    by_slurm = status.reason.replace(f"exit code {status.exit_code} or {exit_code}", f"exit code {exit_code}")
    return Outcome(
        status.state, joined(wrong_ranks_of(folder, cell), why, by_slurm), failure_class, exit_code
    )


def _lacks_output(folder: RunFolder, status: JobStatus, end: EndNote) -> bool:
    """Return True if a failed job has no output files, which Slurm creates before it starts the script.

    Without them, the script did not run. The exit code is then 1 (sacct of Slurm 20.11) or unknown (squeue).
    """
    if end.exit_code is not None or status.exit_code not in (1, None):
        return False
    try:  # Unlike a test for one file, a listing is not answered from an outdated cache of NFS.
        names = {path.name for path in folder.path.iterdir()}
    except OSError:
        return False
    return not names & {folder.out.name, folder.err.name}


def end_of_last_start(folder: RunFolder, status: JobStatus) -> EndNote:
    """Return the content of end.json, or an empty note if the file is from before Slurm requeued the job."""
    end = EndNote.read(folder)
    if status.restarts and status.started and end.time and end.time <= status.started:
        return EndNote()
    return end


def _unwritable_folder(end: EndNote, rows: Sequence[AccountingRow]) -> str:
    """Return a reason if the job's exit code shows that it could not write end.json, or ``""`` otherwise."""
    codes = [row.exit_code for row in rows if row.key.step is None]
    if end.exit_code is None and EXIT_UNWRITABLE in codes[-1:]:
        return "the run's folder could not be written when the job ended: the disk is full or read-only"
    return ""


def killed_rank(folder: RunFolder, launcher: str) -> str:
    """Describe the rank that a signal killed, from the launcher's messages in job.err; return ``""`` if none.

    A killed rank logs no error, and sacct does not distinguish killed from aborted ranks.
    """
    text = "\n".join(log_tail(folder.err))
    before = _until_srun_ends_all(text)
    if found := search(TASK_KILLED, text if LOST_CONNECTION in text else before):
        host, tasks, name = found.groups()
        several = re.search(r"[-,]", tasks) is not None
        ranks = f"ranks {tasks} on {host} were" if several else f"rank {tasks} on {host} was"
        who = ranks if launcher == "srun" else f"the torchrun agent on {host} was"
        return f"{who} killed by {SIGNALS[name]}"
    return killed_by_torchrun(text)


def exited_rank(folder: RunFolder, launcher: str) -> str:
    """Describe the rank that exited first, from srun's messages in job.err, or ``""`` if there are none.

    When a rank fails, srun ends the other ranks with SIGTERM, and sacct shows only SIGTERM for the step.
    """
    found = search(TASK_EXITED, _until_srun_ends_all("\n".join(log_tail(folder.err))))
    if found is None:
        return ""
    host, tasks, code = found.groups()
    ranks = f"rank{'s' if re.search(r'[-,]', tasks) else ''} {tasks}"
    return f"{ranks if launcher == 'srun' else 'the torchrun agent'} on {host} exited with code {code}"


def _until_srun_ends_all(text: str) -> str:
    end = search(TASKS_ENDED, text)
    return text[: end.start()] if end else text
