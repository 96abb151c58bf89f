"""The table of states is complete, and an unknown state is loud."""

from __future__ import annotations

import pytest

from bench.jobs.slurm.states import read_state
from bench.study.ledger import RunState

# https://slurm.schedmd.com/job_state_codes.html: base states and flags of releases 20.11 to 26.05.
BASE_STATES = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PENDING", "PREEMPTED", "RUNNING", "SUSPENDED", "TIMEOUT"),
)


def test_a_job_that_was_requeued_and_held_is_not_waited_for():
    assert read_state("REQUEUE_HOLD").state is RunState.FAILED
    assert read_state("SPECIAL_EXIT").state is RunState.FAILED


def test_states_are_read_as_the_commands_print_them():
    words = ["CANCELLED by 1000", "OUT_OF_MEMORY", " RUNNING "]
    assert [read_state(word).word for word in words] == ["CANCELLED", "OUT_OF_MEMORY", "RUNNING"]


@pytest.mark.parametrize("printed", ["HIBERNATING", "", "RE+"])
def test_an_unknown_state_says_so_with_slurms_word(printed):
    slurm_state = read_state(printed)
    assert slurm_state.state is RunState.UNKNOWN
    assert slurm_state.meaning == f"Slurm reports the unknown state {printed!r}"
