"""Messages of Slurm that are parsed because no command prints their content in a machine-readable form.

Every wording names the releases that print it. Releases in parentheses were not run; their wording is from
the source code, and the tests quote it.
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
#: failed; 25.05 and later print ``DUE to SIGNAL ...`` and ``DUE TO TASK FAILURE`` for these. Before 20.11,
#: the node was missing.
ENDED = (
    Wording(
        r"\*\*\* (?P<kind>JOB|STEP) (?P<job>\d+)\S* (?:ON \S+ )?CANCELLED AT \S+"
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
    Wording(r"Detected \d+ oom-kill event\(s\) in (?:StepId=|step )(?P<job>\d+)\.", "20.11, 22.05"),
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


def match_start(wordings: Sequence[Wording], line: str) -> re.Match[str] | None:
    """Return the match of the first wording that matches the start of a line."""
    return next((found for wording in wordings if (found := re.match(wording.pattern, line))), None)


def search(wordings: Sequence[Wording], text: str) -> re.Match[str] | None:
    """Return the match of the first wording that occurs in a text."""
    return next((found for wording in wordings if (found := re.search(wording.pattern, text))), None)


def step_daemon_message(line: str) -> str:
    """Return the message in a line of slurmstepd without the prefix; empty for any other line."""
    start = match_start(STEP_DAEMON, line)
    return line[start.end() :] if start else ""
