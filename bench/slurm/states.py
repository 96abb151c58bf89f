"""Map the states of Slurm jobs to states of runs.

Sources: https://slurm.schedmd.com/job_state_codes.html (base states and flags, 20.11 to 25.x) and
the state tables of squeue(1) and sacct(1), which print a flag instead of the base state if one is set.

:func:`state_from_notices` reads the notices of slurmstepd on the job's standard error. Without
accounting, Slurm forgets a job some minutes after its end (MinJobAge); then the notices are the only source.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bench.study.ledger import FailureClass, RunState


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
    # A job in one of these two states waits for a person, so a command that waits for it would never end.
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
    SlurmState("PREEMPTED", "PR", _FAILED, FailureClass.PREEMPTED, "had to make room for another job"),
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

#: Reasons for which a pending job does not start until a person changes something.
_STUCK = re.compile(
    r"JobHeld(?:User|Admin)|JobHoldMaxRequeue|DependencyNeverSatisfied|BadConstraints|Invalid(?:Account|QOS)"
    r"|AccountNotAllowed|QOSNotAllowed|PartitionNodeLimit|PartitionTimeLimit|MaxMemPerLimit"
    r"|(?:Assoc|QOS)Max\w+Per(?:Job|Node)(?:Limit)?|ReservationDeleted|requeued[ _](?:in[ _])?held"
)


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


def is_stuck(reason: str) -> bool:
    """Return True if a job that is pending for ``reason`` cannot start until a person acts."""
    return _STUCK.search(reason) is not None


# The notices of Slurm 20.11 to 25.x, for example:
# slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T18:26:34 DUE TO TIME LIMIT ***
# slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-21T18:26:34 DUE TO PREEMPTION ***
# slurmstepd: error: Detected 1 oom_kill event in StepId=7.batch. ...
_NOTICE = re.compile(
    r"^slurmstepd\S*: error: \*\*\* (?P<kind>JOB|STEP) (?P<job>\d+)\S* (?:ON \S+ )?CANCELLED AT \S+"
    r"(?: DUE TO (?P<why>[A-Z ]+))?"
)
_MEMORY = re.compile(
    r"^slurmstepd\S*: error: Detected \d+ oom[_-]kill event(?:\(s\)|s)? in (?:StepId=|step )(\d+)\."
)
#: The state that sacct shows, by the reason in the notice.
_NOTICE_STATES = {
    "TIME LIMIT": "TIMEOUT",
    "PREEMPTION": "PREEMPTED",
    "NODE FAILURE": "NODE_FAIL",
    "JOB REQUEUE": "REQUEUED",
}


def state_from_notices(text: str, *, job_id: str) -> SlurmState | None:
    """Return the state in which Slurm ended a job, according to the notices in its standard error.

    Returns None if there is no notice. A notice about a step counts only if it gives a reason, because
    srun also ends steps on its own. Out of memory takes precedence, because it causes the notices that
    follow it.
    """
    found: str | None = None
    for line in text.splitlines():
        if (memory := _MEMORY.match(line)) and memory[1] == job_id:
            return read_state("OUT_OF_MEMORY")
        notice = _NOTICE.match(line)
        if notice is None or notice["job"] != job_id:
            continue
        why = (notice["why"] or "").strip()
        state = next((state for reason, state in _NOTICE_STATES.items() if why.startswith(reason)), None)
        if state or notice["kind"] == "JOB":
            found = state or found or "CANCELLED"
    return read_state(found) if found else None
