"""Messages of slurmstepd in the output of a job that Slurm terminates.

They were recorded on the test cluster (whose slurmds are named slurmstepd-n1). 19.05 and earlier did not print
the node.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.jobs.slurm.states import state_from_notices

AT = "CANCELLED AT 2026-11-21T18:26:34"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (f"slurmstepd: error: *** JOB 7 ON n1 {AT} DUE TO TIME LIMIT ***", "TIMEOUT"),
        (f"slurmstepd: error: *** STEP 7.0 ON n1 {AT} DUE TO PREEMPTION ***", "PREEMPTED"),
        (f"slurmstepd: error: *** JOB 7 ON n1 {AT} DUE TO SIGNAL Terminated ***", "CANCELLED"),
        (
            f"slurmstepd: error: *** STEP 7.0 ON n1 {AT} DUE TO TIME LIMIT ***\n"
            f"slurmstepd: error: *** JOB 7 ON n1 {AT} ***",
            "TIMEOUT",
        ),
        (
            "slurmstepd: error: Detected 2 oom_kill events in StepId=7.0. Some\n"
            f"slurmstepd: error: *** JOB 7 ON n1 {AT} DUE TO TIME LIMIT ***",
            "OUT_OF_MEMORY",
        ),
    ],
)
def test_a_notice_of_slurm_tells_the_state_that_sacct_would_show(text, word):
    state = state_from_notices(
        f"ValueError: before\n{text}\nsrun: error: n1: task 0: Terminated\n", job_id="7"
    )
    assert state is not None
    assert state.word == word


RECORDED = [
    ("20.11", f"slurmstepd-n1: error: *** JOB 7 ON n1 {AT} ***", "CANCELLED"),
    (
        "20.11",
        "slurmstepd-n1: error: Detected 1 oom-kill event(s) in StepId=7.0 cgroup. Some of your processes may have "
        "been killed by the cgroup out-of-memory handler.",
        "OUT_OF_MEMORY",
    ),
    ("22.05", f"slurmstepd-n1: error: *** JOB 7 ON n1 {AT} DUE TO TIME LIMIT ***", "TIMEOUT"),
    (
        "24.11, LogTimeFormat=iso8601_ms,format_stderr",
        f"[2026-11-22T06:16:08.392] error: *** JOB 7 ON n1 {AT} DUE TO TIME LIMIT ***",
        "TIMEOUT",
    ),
    (
        "26.05",
        f"[2026-11-22T06:16:08.392] error: *** JOB 7 ON n1 {AT} DUE to SIGNAL Terminated ***",
        "CANCELLED",
    ),
    ("26.05", f"[2026-11-22T06:16:08.392] error: *** JOB 7 ON n1 {AT} DUE TO TIME LIMIT ***", "TIMEOUT"),
    (
        "26.05",
        "[2026-11-22T06:16:01.375] error: Detected 1 oom_kill event in StepId=7.batch. Some of the step tasks "
        "have been OOM Killed.",
        "OUT_OF_MEMORY",
    ),
    (
        "26.05, LogTimeFormat=thread_id",
        f"[Nov 22 13:51:23.174621    40 worker[6]    0x7f59bd4d26c0] error: *** JOB 7 ON n1 {AT} DUE TO TIME LIMIT ***",
        "TIMEOUT",
    ),
    ("26.05", f"[2026-11-22T06:16:04.315] error: *** STEP 7.0 ON n1 {AT} DUE TO TASK FAILURE ***", None),
    ("26.05", f"[2026-11-22T06:16:08.388] error: *** STEP 7.0 ON n1 {AT} DUE to SIGNAL Terminated ***", None),
]


@pytest.mark.parametrize(("release", "line", "word"), RECORDED)
def test_the_notices_of_each_release_are_read(release, line, word):
    state = state_from_notices(f"Traceback ...\n{line}\n", job_id="7")
    assert (state and state.word) == word


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"slurmstepd: error: *** STEP 7.0 ON n1 {AT} ***",  # srun ended it, because one task had
        f"slurmstepd: error: *** JOB 8 ON n1 {AT} DUE TO TIME LIMIT ***",  # another's, appended
        f"a log that quotes slurmstepd: error: *** JOB 7 ON n1 {AT} ***",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=70.0. Some",
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
    ],
)
def test_what_is_not_slurms_notice_about_this_job_says_nothing(text):
    assert state_from_notices(text, job_id="7") is None


@given(st.text())
def test_any_text_can_be_read(text):
    state_from_notices(text, job_id="7")
