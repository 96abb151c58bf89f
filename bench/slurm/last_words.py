"""What Slurm writes into a job's own output when it ends it: all that is left where it has forgotten the job.

A site without accounting remembers a job for some minutes only (MinJobAge). The notices come
from slurmstepd, on standard error; their forms are those of 20.11 to 25.x:

    slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T18:26:34 DUE TO TIME LIMIT ***
    slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-21T18:26:34 DUE TO PREEMPTION ***
    slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T18:26:34 ***
    slurmstepd: error: Detected 1 oom_kill event in StepId=7.batch. ...
"""

from __future__ import annotations

import re

from bench.slurm.states import SlurmState, read_state

_NOTICE = re.compile(
    r"^slurmstepd\S*: error: \*\*\* (?P<kind>JOB|STEP) (?P<job>\d+)\S* (?:ON \S+ )?CANCELLED AT \S+"
    r"(?: DUE TO (?P<why>[A-Z ]+))?"
)
_MEMORY = re.compile(
    r"^slurmstepd\S*: error: Detected \d+ oom[_-]kill event(?:\(s\)|s)? in (?:StepId=|step )(\d+)\."
)
#: The state that sacct would show, by the notice's words.
_STATES = {
    "TIME LIMIT": "TIMEOUT",
    "PREEMPTION": "PREEMPTED",
    "NODE FAILURE": "NODE_FAIL",
    "JOB REQUEUE": "REQUEUED",
}


def last_words(text: str, *, job_id: str) -> SlurmState | None:
    """Return the state that a job's standard error tells of; None where Slurm did not end it.

    A notice about a step counts only with its reason: srun ends a step for reasons of its own.
    Memory that ran out is the cause of what came after it.
    """
    told: str | None = None
    for line in text.splitlines():
        if (memory := _MEMORY.match(line)) and memory[1] == job_id:
            return read_state("OUT_OF_MEMORY")
        notice = _NOTICE.match(line)
        if notice is None or notice["job"] != job_id:
            continue
        why = (notice["why"] or "").strip()
        state = next((state for words, state in _STATES.items() if why.startswith(words)), None)
        if state or notice["kind"] == "JOB":
            told = state or told or "CANCELLED"
    return read_state(told) if told else None
