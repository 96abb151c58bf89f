"""Interpret the reasons for which Slurm jobs wait.

Slurm prints one reason per waiting job. Most reasons disappear without any action, when other jobs end or a
time is reached. A job with one of the other reasons does not start until somebody changes it or the cluster.

Source: https://slurm.schedmd.com/job_reason_codes.html and the table of names in Slurm's job_state_reason.c,
releases 20.11 to 26.05. For some held jobs, squeue prints a sentence with underscores instead of a name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class _Obstacle:
    """Reasons (a regular expression) that do not end by themselves, with their meaning and remedy."""

    reasons: str
    meaning: str
    remedy: str


_TOO_MUCH = "request fewer nodes, ranks or cores, or choose another"

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
        "the partition does not allow this number of nodes, or nodes that it requires are down",
        "choose other axes.nodes or another cluster.partition (`scontrol show partition` shows the limits)",
    ),
    _Obstacle(
        "PartitionConfig",
        "it exceeds a limit of the partition",
        "compare the matrix with `scontrol show partition`, or choose another cluster.partition",
    ),
    _Obstacle(
        "AssocMaxWall\\w+",
        "its time limit exceeds that of the account",
        "lower cluster.time_limit, or choose another cluster.account",
    ),
    _Obstacle(
        "QOSMaxWall\\w+",
        "its time limit exceeds that of the QOS",
        "lower cluster.time_limit, or choose another cluster.qos",
    ),
    _Obstacle(
        r"AssocMax\w+MinutesPerJob\w*",
        "its resources, multiplied by its time limit, exceed the account's limit for one job",
        f"lower cluster.time_limit, {_TOO_MUCH} cluster.account",
    ),
    _Obstacle(
        r"QOSMax\w+MinutesPerJob\w*",
        "its resources, multiplied by its time limit, exceed the limit of the QOS for one job",
        f"lower cluster.time_limit, {_TOO_MUCH} cluster.qos",
    ),
    _Obstacle(
        r"AssocMax\w+Per(?:Job|Node)(?:Limit)?",
        "it requests more than the account allows for one job",
        f"{_TOO_MUCH} cluster.account",
    ),
    _Obstacle(
        r"QOSMax\w+Per(?:Job|Node)(?:Limit)?",
        "it requests more than the QOS allows for one job",
        f"{_TOO_MUCH} cluster.qos",
    ),
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
