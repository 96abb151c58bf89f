"""The client without a working Slurm: its commands are missing, or replaced by small scripts on PATH."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.errors import BenchError
from bench.jobs.contract import RefusedError, UncertainError
from bench.jobs.slurm.client import (
    Slurm,
    SlurmMissingError,
    SlurmRefusedError,
    SlurmUnavailableError,
    SlurmUncertainError,
    joined_lists,
)
from tests.common import raised
from tests.jobs.slurm.commands import Commands


@pytest.fixture
def commands(tmp_path):
    return Commands(tmp_path)


def submit(slurm: Slurm) -> str:
    return slurm.submit(["sbatch", "--parsable", "script"])


def test_without_slurm_every_method_names_the_missing_command_and_a_remedy(commands):
    slurm = commands.slurm()
    for call in (
        lambda: slurm.queue(["a"]),
        lambda: slurm.accounting("--jobs=1"),
        lambda: slurm.cancel(["1"]),
        slurm.nodes,
        lambda: slurm.test_only(Path("x")),
        lambda: submit(slurm),
    ):
        with pytest.raises(SlurmMissingError) as caught:
            call()
        assert caught.value.output == "command not found"
    assert str(caught.value) == (
        "sbatch: command not found; run this on a login node (perhaps after `module load slurm`), "
        "or set cluster.executor: local"
    )


def test_without_a_configuration_the_remedy_is_another_executor(commands):
    message = "Could not establish a configuration source"
    commands.add("squeue", err=f"squeue: fatal: {message}\n", code=1)
    # Slurm's commands look for a file that SLURM_CONF names for a minute, so they are not started.
    conf = commands.folder / "slurm.conf"
    commands.add("sinfo", sleep_s=60)
    slurm, lost = commands.slurm(), commands.slurm(SLURM_CONF=str(conf))
    for call, words in (
        (lambda: slurm.queue(["a"]), message),
        (lost.nodes, f"SLURM_CONF={conf}: the file does not exist"),
    ):
        with pytest.raises(SlurmMissingError) as caught:
            call()
        assert caught.value.exit_code == 2
        assert str(caught.value).endswith(
            f"{words}; run this on a login node (perhaps after `module load slurm`), or set cluster.executor: local"
        )


def test_a_query_without_an_answer_times_out_and_a_submission_is_uncertain(commands):
    commands.add("squeue", sleep_s=30)
    commands.add("sbatch", sleep_s=30)
    slurm = commands.slurm(timeout_s=0.5)
    with pytest.raises(SlurmUnavailableError, match=r"^squeue: no answer within 0\.5 s$"):
        slurm.queue(["a"])
    assert raised(SlurmUncertainError, submit, slurm) == (
        "sbatch: no answer within 0.5 s; "
        "run `bench submit` again in a minute; it looks for the job before it submits the run"
    )


@pytest.mark.parametrize(
    ("message", "code", "error", "full"),
    [
        # Recorded on 22.05.8; the source code of 20.11 to 26.05, with 23.02, 23.11, 25.05 and 25.11, has the
        # same texts (common/slurm_errno.c).
        ("Invalid account or account/partition combination specified", 1, SlurmRefusedError, False),
        ("Unable to contact slurm controller (connect failure)", 1, SlurmUnavailableError, False),
        ("Socket timed out on send/recv operation", 1, SlurmUncertainError, False),
        ("Zero Bytes were transmitted or received", 1, SlurmUncertainError, False),
        ("AssocMaxSubmitJobLimit", 1, SlurmRefusedError, True),
        ("QOSMaxSubmitJobPerUserLimit", 1, SlurmRefusedError, True),
        ("QOSMaxWallDurationPerJobLimit", 1, SlurmRefusedError, False),
        # MaxJobCount: recorded on 20.11; the source code of 22.05 to 25.11 is the same.
        ("Slurm temporarily unable to accept job, sleeping and retrying", 1, SlurmRefusedError, True),
        ("Resource temporarily unavailable", 1, SlurmRefusedError, True),
        # MaxJobCount of 26.05.
        ("MaxJobCount limit reached", 1, SlurmRefusedError, True),
        ("Slurm job queue full, sleeping and retrying", 1, SlurmRefusedError, True),
        ("Slurm backup controller in standby mode", 1, SlurmUnavailableError, False),
        ("Protocol authentication error", 1, SlurmUnavailableError, False),
        ("", 1, SlurmRefusedError, False),
        ("", -9, SlurmUncertainError, False),
        ("", 0, SlurmUncertainError, False),
    ],
)
def test_messages_of_sbatch_distinguish_refused_unavailable_and_uncertain(
    commands, message, code, error, full
):
    commands.add(
        "sbatch", err=f"sbatch: error: Batch job submission failed: {message}\n" if message else "", code=code
    )
    with pytest.raises(BenchError) as caught:
        submit(commands.slurm())
    assert type(caught.value) is error
    assert message in str(caught.value)
    assert getattr(caught.value, "queue_is_full", False) is full
    # bench.jobs.engine knows only the contract.
    assert isinstance(caught.value, RefusedError) == (error is SlurmRefusedError)
    assert isinstance(caught.value, UncertainError) == (error is SlurmUncertainError)


def test_a_job_id_counts_even_if_sbatch_fails_afterwards(commands):
    commands.add("sbatch", out="4711\n", err="sbatch: warning: a plugin fell over\n", code=1)
    assert submit(commands.slurm()) == "4711"


def test_a_job_does_not_inherit_the_allocation_that_bench_runs_in(commands):
    commands.add("sbatch", out="1\n")
    passed = {"SLURM_CONF": os.devnull, "SBATCH_QOS": "long", "X": "y"}
    outside = {"SLURM_MEM_PER_CPU": "1", "SLURM_JOB_ID": "7", **passed}
    slurm = commands.slurm(**outside)
    submit(slurm)
    (inherited,) = commands.environments("sbatch")
    assert {k: inherited[k] for k in outside if k in inherited} == passed
    assert slurm.sbatch_variables() == {"SBATCH_QOS": "long"}


def test_names_that_make_no_list_are_not_given_to_squeue(commands):
    commands.add("squeue")
    slurm = commands.slurm()
    for names in (["a"] * 10_000, ["a" * 100] * 2_000, ["a,b"]):
        slurm.queue(names)
    # It would be too long for an argument, or be split at a comma.
    assert [call[-1].split("=")[0] for call in commands.calls("squeue")] == ["--name", "--format", "--format"]


def test_jobs_share_a_list_unless_it_is_too_long(commands):
    commands.add("scancel")
    ids = [str(number) for number in range(100_000_000, 100_030_000)]
    lists = [text.split(",") for text in joined_lists([*ids, ids[0]])]
    assert len(lists) == 3
    assert [job for chunk in lists for job in chunk] == ids
    commands.slurm().cancel(ids[:3])
    assert commands.calls("scancel") == [ids[:3]]


def test_missing_accounting_is_reported_with_the_message_of_slurm(commands):
    commands.add("sacct", err="Slurm accounting storage is disabled\n", code=1)
    with pytest.raises(SlurmUnavailableError) as caught:
        commands.slurm().accounting("--jobs=1")
    assert str(caught.value) == "sacct: Slurm accounting storage is disabled"
    assert caught.value.output == "Slurm accounting storage is disabled"
    assert caught.value.permanent


def test_cancelling_an_ended_job_is_ignored_and_a_denied_request_is_an_error(commands):
    ended = "scancel: error: Kill job error on job id 1: Invalid job id specified\n"
    commands.add("scancel", err=ended, code=1)
    commands.slurm().cancel(["1"])
    denied = "scancel: error: Kill job error on job id 2: Access/permission denied\n"
    commands.add("scancel", err=ended + denied, code=1)
    with pytest.raises(SlurmRefusedError) as caught:
        commands.slurm().cancel(["1", "2"])
    assert str(caught.value) == "scancel: Kill job error on job id 2: Access/permission denied"
