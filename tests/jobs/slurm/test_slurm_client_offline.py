"""The client without a working Slurm: its commands are missing, or replaced by small scripts on PATH."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from bench.errors import BenchError
from bench.jobs.slurm.client import (
    BatchJob,
    Slurm,
    SlurmMissingError,
    SlurmRefusedError,
    SlurmUnavailableError,
    SubmissionUncertainError,
    literal_pattern,
)
from tests.common import raised, write_program


class Commands:
    """A PATH with scripts in place of Slurm's commands; each records its arguments and environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "bin"
        self.path.mkdir()

    def add(self, name: str, *, out: str = "", err: str = "", code: int = 0, sleep_s: float = 0) -> None:
        script = self.path / name
        write_program(
            script,
            f"#!{sys.executable}\n"
            "import json, os, sys, time\n"
            f"with open({str(self.folder / f'{name}.calls')!r}, 'a') as file:\n"
            "    file.write(json.dumps([sys.argv[1:], dict(os.environ)]) + '\\n')\n"
            f"time.sleep({sleep_s})\n"
            f"sys.stdout.write({out!r})\n"
            f"sys.stderr.write({err!r})\n"
            f"sys.exit({code}) if {code} >= 0 else os.kill(os.getpid(), {-code})\n",
        )

    def calls(self, name: str) -> list[list[str]]:
        return [call[0] for call in self._calls(name)]

    def environments(self, name: str) -> list[dict[str, str]]:
        return [call[1] for call in self._calls(name)]

    def _calls(self, name: str) -> list[tuple[list[str], dict[str, str]]]:
        return [json.loads(line) for line in (self.folder / f"{name}.calls").read_text().splitlines()]

    def slurm(self, *, timeout_s: float = 30, **environment: str) -> Slurm:
        full = {"PATH": str(self.path), **environment}
        return Slurm(timeout_s=timeout_s, submit_timeout_s=timeout_s, environment=full)


@pytest.fixture
def commands(tmp_path):
    return Commands(tmp_path)


def submit(slurm: Slurm, place: Path, **more):
    script = place / "a script's name.sbatch"
    script.write_text("#!/bin/bash\n")
    names = {"job_name": "study.run.1", "output": place / "job.out", "error": place / "job.err"}
    return slurm.submit(BatchJob(script=script, **names, **more))


def test_without_slurm_every_method_names_the_missing_command_and_a_remedy(commands):
    slurm = commands.slurm()
    for call in (
        slurm.queue,
        lambda: slurm.queue(["1"]),
        lambda: slurm.accounting(["1"]),
        lambda: slurm.cancel(["1"]),
        slurm.nodes,
        lambda: slurm.test_only(Path("x")),
        lambda: submit(slurm, commands.folder),
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
    for call, words in ((slurm.queue, message), (lost.nodes, f"SLURM_CONF={conf}: the file does not exist")):
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
        slurm.queue()
    assert raised(SubmissionUncertainError, submit, slurm, commands.folder) == (
        "sbatch: no answer within 0.5 s; the job may have been accepted: look for a job named study.run.1"
    )


@pytest.mark.parametrize(
    ("message", "code", "error", "full"),
    [
        # Recorded on 22.05.8; the source code of 20.11 to 26.05, with 23.02, 23.11, 25.05 and 25.11, has the
        # same texts (common/slurm_errno.c).
        ("Invalid account or account/partition combination specified", 1, SlurmRefusedError, False),
        ("Unable to contact slurm controller (connect failure)", 1, SlurmUnavailableError, False),
        ("Socket timed out on send/recv operation", 1, SubmissionUncertainError, False),
        ("Zero Bytes were transmitted or received", 1, SubmissionUncertainError, False),
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
        ("", -9, SubmissionUncertainError, False),
        ("", 0, SubmissionUncertainError, False),
    ],
)
def test_messages_of_sbatch_distinguish_refused_unavailable_and_uncertain(
    commands, message, code, error, full
):
    commands.add(
        "sbatch", err=f"sbatch: error: Batch job submission failed: {message}\n" if message else "", code=code
    )
    with pytest.raises(BenchError) as caught:
        submit(commands.slurm(), commands.folder)
    assert type(caught.value) is error
    assert message in str(caught.value)
    assert getattr(caught.value, "queue_is_full", False) is full


def test_a_job_id_counts_even_if_sbatch_fails_afterwards(commands):
    commands.add("sbatch", out="4711\n", err="sbatch: warning: a plugin fell over\n", code=1)
    assert submit(commands.slurm(), commands.folder) == "4711"


def test_sbatch_gets_literal_paths_and_the_arguments_of_the_script(commands):
    commands.add("sbatch", out="4711;alpha\n")
    folder = commands.folder / "100% a'; echo foo"
    folder.mkdir()
    job_id = submit(commands.slurm(), folder, arguments=["first one", "--second"], options=["--hold"])
    assert job_id == "4711"
    doubled = str(folder).replace("%", "%%")
    assert commands.calls("sbatch") == [
        [
            "--parsable",
            "--job-name=study.run.1",
            f"--output={doubled}/job.out",
            f"--error={doubled}/job.err",
            "--hold",
            f"{folder}/a script's name.sbatch",
            "first one",
            "--second",
        ]
    ]


def test_a_path_with_a_backslash_is_an_error():
    assert raised(BenchError, literal_pattern, Path("/scratch/back\\slash/job.out")) == (
        "/scratch/back\\slash/job.out: Slurm cannot write its output to a path with a backslash; "
        "choose another folder for results"
    )


def test_a_job_does_not_inherit_the_allocation_that_bench_runs_in(commands):
    commands.add("sbatch", out="1\n")
    passed = {"SLURM_CONF": os.devnull, "SBATCH_QOS": "long", "X": "y"}
    outside = {"SLURM_MEM_PER_CPU": "1", "SLURM_JOB_ID": "7", **passed}
    slurm = commands.slurm(**outside)
    submit(slurm, commands.folder)
    (inherited,) = commands.environments("sbatch")
    assert {k: inherited[k] for k in outside if k in inherited} == passed
    assert slurm.sbatch_variables() == {"SBATCH_QOS": "long"}


def test_all_jobs_share_one_call_unless_their_list_is_too_long(commands):
    commands.add("sacct")
    commands.add("squeue")
    commands.add("scancel")
    slurm = commands.slurm()
    slurm.accounting([str(number) for number in range(10_000)])
    slurm.queue([str(number) for number in range(10_000)])
    assert [len(commands.calls(name)) for name in ("sacct", "squeue")] == [1, 1]

    ids = [str(number) for number in range(100_000_000, 100_030_000)]
    slurm.accounting([*ids, ids[0]])
    lists = [call[-1].removeprefix("--jobs=").split(",") for call in commands.calls("sacct")[1:]]
    assert len(lists) == 3
    assert [job for chunk in lists for job in chunk] == ids
    slurm.cancel(ids[:3])
    assert commands.calls("scancel") == [ids[:3]]


def test_missing_accounting_is_reported_with_the_message_of_slurm(commands):
    commands.add("sacct", err="Slurm accounting storage is disabled\n", code=1)
    with pytest.raises(SlurmUnavailableError) as caught:
        commands.slurm().accounting(["1"])
    assert str(caught.value) == "sacct: Slurm accounting storage is disabled"
    assert (caught.value.command, caught.value.output) == ("sacct", "Slurm accounting storage is disabled")


def test_a_job_that_slurm_no_longer_knows_has_no_row(commands):
    commands.add("squeue", err="slurm_load_jobs error: Invalid job id specified\n", code=1)
    assert commands.slurm().queue(["99999"]) == []


def test_cancelling_an_ended_job_is_ignored_and_a_denied_request_is_an_error(commands):
    ended = "scancel: error: Kill job error on job id 1: Invalid job id specified\n"
    commands.add("scancel", err=ended, code=1)
    commands.slurm().cancel(["1"])
    denied = "scancel: error: Kill job error on job id 2: Access/permission denied\n"
    commands.add("scancel", err=ended + denied, code=1)
    with pytest.raises(SlurmRefusedError) as caught:
        commands.slurm().cancel(["1", "2"])
    assert str(caught.value) == "scancel: Kill job error on job id 2: Access/permission denied"
