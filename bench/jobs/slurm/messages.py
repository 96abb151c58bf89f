"""Messages of Slurm that are parsed because no command prints their content in a machine-readable form.

Every wording names the releases that print it. Releases in parentheses were not run; their wording is from
the source code, and the tests quote it. Most error messages consist of the command's name, in some cases the
failed operation, and a text from Slurm's table of errors (common/slurm_errno.c).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_EVERY = "20.11, 22.05, (23.02, 23.11), 24.11, (25.05, 25.11), 26.05"
_OLDER = "20.11, 22.05, (23.02, 23.11), 24.11"
_NEWER = "(25.05, 25.11), 26.05"


@dataclass(frozen=True)
class Wording:
    """A wording of a message as a regular expression, and the releases that print it."""

    pattern: str
    releases: str


#: The start of a message of slurmstepd in a job's standard error. Newer releases print the time instead of
#: the program's name, in the format that the site configures (LogTimeFormat).
STEP_DAEMON = (
    Wording(r"slurmstepd\S*: error: ", _OLDER),
    Wording(r"\[.{1,100}?\] error: ", f"(23.11), 24.11 with LogTimeFormat=...,format_stderr; {_NEWER}"),
    Wording(r"\w{3} +\d+ [\d:.]+ +\d+ \S+ +0x\w+: error: ", f"{_OLDER} with LogTimeFormat=thread_id"),
)
#: Slurm ends a job or a step. ``why`` is missing for scancel and for steps that srun ends after a task has
#: failed; in these cases, 25.05 and later print ``DUE to SIGNAL ...`` and ``DUE TO TASK FAILURE``.
ENDED = (
    Wording(
        r"\*\*\* (?P<kind>JOB|STEP) (?P<job>\d+)\S* ON \S+ CANCELLED AT \S+"
        r"(?: DUE TO (?P<why>[A-Z]+(?: [A-Z]+)*))?",
        _EVERY,
    ),
)
#: Values of ``why``, and the state that sacct shows.
END_REASONS = {
    "TIMEOUT": Wording("TIME LIMIT", _EVERY),
    "PREEMPTED": Wording("PREEMPTION", _EVERY),
    "NODE_FAIL": Wording("NODE FAILURE", _EVERY),
    "REQUEUED": Wording("JOB REQUEUE", _EVERY),
}
#: The kernel killed processes of a step, because it exceeded its memory limit.
OUT_OF_MEMORY = (
    Wording(r"Detected \d+ oom-kill event\(s\) in StepId=(?P<job>\d+)\.", "20.11, 22.05"),
    Wording(
        r"Detected \d+ oom_kill events? in StepId=(?P<job>\d+)\.",
        "(23.02, 23.11), 24.11, (25.05, 25.11), 26.05",
    ),
)
#: The estimate of ``sbatch --test-only``.
EXPECTED_START = (
    Wording(r"Job \d+ to start at (?P<start>\S+) using \d+ processors on (?:nodes )?\S+", _OLDER),
    # The word `a` is Slurm's; sbatch -M also prints the cluster.
    Wording(
        r"Job \d+ to start at (?P<start>\S+)(?: on cluster \S+)? a using \d+ processors on nodes \S+", _NEWER
    ),
)
#: sbatch: a limit on the number of queued jobs is reached. A later attempt succeeds once jobs have ended.
QUEUE_FULL = (
    Wording(r"(?:Assoc|QOS)\w*(?:Max|Grp)Submit\w*", _EVERY),
    # MaxJobCount is reached. sbatch prints the first text and repeats the request for two minutes; with
    # --test-only, it prints the second text.
    Wording(
        r"Slurm temporarily unable to accept job|Resource temporarily unavailable",
        "20.11, 22.05, (23.02, 23.11), 24.11, (25.05, 25.11)",
    ),
    Wording(r"Slurm job queue full|MaxJobCount limit reached", "26.05"),
)
#: Slurm's commands are installed, but the configuration of a cluster is missing.
UNCONFIGURED = (
    Wording(r"Could not establish a configuration source", _EVERY),
    Wording(r"Unable to process (?:slurm\.conf|configuration) file", _EVERY),
)
#: The controller is busy or restarting. The operating system's words follow some messages of 20.11 to 26.05.
TEMPORARY = (
    Wording(r"Unable to contact slurm controller|timed out", _EVERY),
    Wording(r"Connection (?:refused|reset)", _EVERY),
)
#: The answer to a request was lost, so slurmctld may have accepted it.
UNCERTAIN = (
    Wording(r"timed out|Zero Bytes were transmitted|Unexpected message received", _EVERY),
    Wording(r"Connection reset", _EVERY),
)
#: The request did not reach the controller, or was not authenticated.
UNREACHABLE = (
    *UNCONFIGURED,
    Wording(r"Unable to contact slurm controller|Unable to establish controller|Connection refused", _EVERY),
    Wording(r"Munge encode failed|authentication (?:error|credential)", _EVERY),
    Wording(r"Slurm backup controller in standby", _EVERY),
)
#: squeue and scancel: the job has ended, and the controller may have forgotten it.
NO_SUCH_JOB = (Wording(r"Invalid job id specified|Job/step already completing or completed", _EVERY),)
#: ``sbatch --test-only``: the job can never run, or its nodes are down or drained. Without --test-only,
#: sbatch accepts both kinds, and the jobs wait. Some sites reject the first kind.
NOT_NOW = (Wording(r"Requested node configuration is not available|Required node not available", _EVERY),)
#: sacct: the cluster has no accounting.
NO_ACCOUNTING = (Wording(r"Slurm accounting storage is disabled", _EVERY),)
#: A line of ``sacctmgr show configuration``: users may not see the jobs of others.
PRIVATE_JOBS = (Wording(r"(?im)^\s*PrivateData\s*=.*\b(?:jobs|all)\b", _EVERY),)
#: Names of signals, by the text that srun prints for a task that the signal ended.
SIGNALS = {
    "Killed": "SIGKILL",
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Illegal instruction": "SIGILL",
    "Floating point exception": "SIGFPE",
}
#: srun: a task exited, or a signal ended it.
TASK_EXITED = (Wording(r"srun: error: (\S+): tasks? (\S+): Exited with exit code (\d+)", _EVERY),)
TASK_KILLED = (Wording(rf"srun: error: (\S+): tasks? (\S+): ({'|'.join(SIGNALS)})", _EVERY),)
#: srun ends the other tasks because one has failed.
TASKS_ENDED = (Wording(r"srun: .*Terminating StepId|srun: Job step aborted|srun: Force Terminated", _EVERY),)


def match_start(wordings: Sequence[Wording], line: str) -> re.Match[str] | None:
    """Return the match of the first wording that matches the start of a line."""
    return next((found for wording in wordings if (found := re.match(wording.pattern, line))), None)


def search(wordings: Sequence[Wording], text: str) -> re.Match[str] | None:
    """Return the match of the first wording that occurs in a text."""
    return next((found for wording in wordings if (found := re.search(wording.pattern, text))), None)


def step_daemon_message(line: str) -> str:
    """Return the message in a line of slurmstepd without the prefix, or ``""`` for any other line."""
    start = match_start(STEP_DAEMON, line)
    return line[start.end() :] if start else ""
