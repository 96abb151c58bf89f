"""Messages of Slurm that are parsed because no command prints their content in a machine-readable form.

Each name stands for the wordings of one message, as regular expressions. Releases 20.11 to 26.05 print a
wording, unless a comment names other releases. The releases 23.02, 23.11, 25.05 and 25.11 were not run; their
wording is from the source code, and the tests quote it. Most error messages consist of the command's name, in
some cases the failed operation, and a text from Slurm's table of errors (common/slurm_errno.c).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

#: The start of a message of slurmstepd in a job's standard error. Newer releases print the time instead of
#: the program's name, in the format that the site configures (LogTimeFormat).
STEP_DAEMON = (
    r"slurmstepd\S*: error: ",  # 20.11 to 24.11
    r"\[.{1,100}?\] error: ",  # 23.11, 24.11 with LogTimeFormat=...,format_stderr; 25.05 to 26.05
    r"\w{3} +\d+ [\d:.]+ +\d+ \S+ +0x\w+: error: ",  # 20.11 to 24.11 with LogTimeFormat=thread_id
)
#: Slurm ends a job or a step. ``why`` is missing for scancel and for steps that srun ends after a task has
#: failed; in these cases, 25.05 and later print ``DUE to SIGNAL ...`` and ``DUE TO TASK FAILURE``.
ENDED = (
    r"\*\*\* (?P<kind>JOB|STEP) (?P<job>\d+)\S* ON \S+ CANCELLED AT \S+"
    r"(?: DUE TO (?P<why>[A-Z]+(?: [A-Z]+)*))?",
)
#: The state that sacct shows, by the value of ``why``.
END_REASONS = {
    "TIME LIMIT": "TIMEOUT",
    "PREEMPTION": "PREEMPTED",
    "NODE FAILURE": "NODE_FAIL",
    "JOB REQUEUE": "REQUEUED",
}
#: The kernel killed processes of a step, because it exceeded its memory limit.
OUT_OF_MEMORY = (
    r"Detected \d+ oom-kill event\(s\) in StepId=(?P<job>\d+)\.",  # 20.11, 22.05
    r"Detected \d+ oom_kill events? in StepId=(?P<job>\d+)\.",  # 23.02 to 26.05
)
#: The estimate of ``sbatch --test-only``.
EXPECTED_START = (
    r"Job \d+ to start at (?P<start>\S+) using \d+ processors on (?:nodes )?\S+",  # 20.11 to 24.11
    # 25.05 to 26.05: the word `a` is Slurm's; sbatch -M also prints the cluster.
    r"Job \d+ to start at (?P<start>\S+)(?: on cluster \S+)? a using \d+ processors on nodes \S+",
)
#: sbatch: a limit on the number of queued jobs is reached. A later attempt succeeds once jobs have ended.
QUEUE_FULL = (
    r"(?:Assoc|QOS)\w*(?:Max|Grp)Submit\w*",
    # MaxJobCount is reached. sbatch prints the first text and repeats the request for two minutes; with
    # --test-only, it prints the second text. 26.05 prints the other texts.
    r"Slurm temporarily unable to accept job|Resource temporarily unavailable",
    r"Slurm job queue full|MaxJobCount limit reached",
)
#: Slurm's commands are installed, but the configuration of a cluster is missing.
UNCONFIGURED = (
    r"Could not establish a configuration source|Unable to process (?:slurm\.conf|configuration) file",
)
#: The controller is busy or restarting. The operating system's words follow some messages.
TEMPORARY = (r"Unable to contact slurm controller|timed out|Connection (?:refused|reset)",)
#: The answer to a request was lost, so slurmctld may have accepted it.
UNCERTAIN = (r"timed out|Zero Bytes were transmitted|Unexpected message received|Connection reset",)
#: The request did not reach the controller, or was not authenticated.
UNREACHABLE = (
    *UNCONFIGURED,
    r"Unable to contact slurm controller|Unable to establish controller|Connection refused",
    r"Munge encode failed|authentication (?:error|credential)|Slurm backup controller in standby",
)
#: squeue and scancel: the job has ended, and the controller may have forgotten it.
NO_SUCH_JOB = (r"Invalid job id specified|Job/step already completing or completed",)
#: ``sbatch --test-only``: the job can never run, or its nodes are down or drained. Without --test-only,
#: sbatch accepts both kinds, and the jobs wait. Some sites reject the first kind.
NOT_NOW = (r"Requested node configuration is not available|Required node not available",)
#: sacct: the cluster has no accounting.
NO_ACCOUNTING = (r"Slurm accounting storage is disabled",)
#: A line of ``sacctmgr show configuration``: users may not see the jobs of others.
PRIVATE_JOBS = (r"(?im)^\s*PrivateData\s*=.*\b(?:jobs|all)\b",)
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
TASK_EXITED = (r"srun: error: (\S+): tasks? (\S+): Exited with exit code (\d+)",)
TASK_KILLED = (rf"srun: error: (\S+): tasks? (\S+): ({'|'.join(SIGNALS)})",)
#: srun ends the other tasks because one has failed.
TASKS_ENDED = (r"srun: .*Terminating StepId|srun: Job step aborted|srun: Force Terminated",)


def match_start(wordings: Sequence[str], line: str) -> re.Match[str] | None:
    """Return the match of the first wording that matches the start of a line."""
    return next((found for wording in wordings if (found := re.match(wording, line))), None)


def search(wordings: Sequence[str], text: str) -> re.Match[str] | None:
    """Return the match of the first wording that occurs in a text."""
    return next((found for wording in wordings if (found := re.search(wording, text))), None)


def step_daemon_message(line: str) -> str:
    """Return the message in a line of slurmstepd without the prefix, or ``""`` for any other line."""
    start = match_start(STEP_DAEMON, line)
    return line[start.end() :] if start else ""
