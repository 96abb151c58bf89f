"""Client and polls without a working Slurm: its commands are missing, or replaced by small scripts on PATH."""

import json
import os
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bench.jobs.contract import Job, RefusedError, Status, UncertainError
from bench.jobs.slurm.client import (
    Slurm,
    SlurmMissingError,
    SlurmRefusedError,
    SlurmUnavailableError,
    SlurmUncertainError,
    joined_lists,
)
from bench.jobs.slurm.scheduler import SlurmScheduler
from bench.study.conditions import Occupation
from bench.study.plan_json import PlannedStudy
from ddp_scaling_bench.errors import BenchError
from ddp_scaling_bench.run_folder import RunFolder
from tests.common import raised, write_program
from tests.matrices import matrix, planned_study, slurm


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


def submit(slurm: Slurm) -> str:
    return slurm.submit(["sbatch", "--parsable", "script"])


def test_a_configuration_that_does_not_exist_is_an_error_at_once(commands):
    # Slurm's commands look for a file that SLURM_CONF names for a minute, so they are not started.
    conf = commands.folder / "slurm.conf"
    commands.add("sinfo", sleep_s=60)
    assert raised(SlurmMissingError, commands.slurm(SLURM_CONF=str(conf)).nodes) == (
        f"sinfo: SLURM_CONF={conf}: the file does not exist; "
        "run this on a login node (perhaps after `module load slurm`), or set cluster.executor: local"
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


def test_a_job_id_counts_even_if_sbatch_fails_and_the_job_does_not_inherit_the_allocation(commands):
    commands.add("sbatch", out="4711\n", err="sbatch: warning: a plugin fell over\n", code=1)
    passed = {"SLURM_CONF": os.devnull, "SBATCH_QOS": "long", "X": "y"}
    outside = {"SLURM_MEM_PER_CPU": "1", "SLURM_JOB_ID": "7", **passed}
    slurm = commands.slurm(**outside)
    assert submit(slurm) == "4711"
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


def test_jobs_are_cancelled_together_and_ended_ones_are_ignored_but_a_denied_request_is_an_error(commands):
    ids = [str(number) for number in range(100_000_000, 100_030_000)]
    lists = [text.split(",") for text in joined_lists([*ids, ids[0]])]
    assert (len(lists), [job for chunk in lists for job in chunk]) == (3, ids)
    ended = "scancel: error: Kill job error on job id 1: Invalid job id specified\n"
    commands.add("scancel", err=ended, code=1)
    commands.slurm().cancel(ids[:3])
    assert commands.calls("scancel") == [ids[:3]]
    denied = "Kill job error on job id 2: Access/permission denied"
    commands.add("scancel", err=f"{ended}scancel: error: {denied}\n", code=1)
    assert raised(SlurmRefusedError, commands.slurm().cancel, ["1", "2"]) == f"scancel: {denied}"


NAME = "study.r1.a1.key"


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> PlannedStudy:
    text = matrix("poll", cluster=slurm(env_from=["TOKEN"]), axes={"nodes": [1, 2], "tasks_per_node": [1]})
    return planned_study(tmp_path_factory.mktemp("study"), text)


@pytest.fixture
def scheduler(study, commands) -> SlurmScheduler:
    commands.add("squeue")
    commands.add("sacct")
    return SlurmScheduler(study, slurm=commands.slurm())


def queued(job: int, state: str, name: str = NAME, user: str = "root|0", reason: str = "None") -> str:
    return f"{job}|{state}|{reason}|2026-11-20T10:00:00|n1|{user}|{name}\n"


def accounted(job: str, state: str, name: str = NAME, user: str = "root|0", exits: str = "0:0") -> str:
    end = "Unknown" if state == "RUNNING" else "2026-11-20T10:01:00"
    return f"{job}|{state}|{exits}|||2026-11-20T10:00:00|{end}|00:01:00|n1||{user}|{name}\n"


def told(status: Status) -> tuple[str, str, str]:
    return status.job_id, str(status.state), status.reason


def test_squeue_is_asked_once_and_sacct_twice_for_all_jobs_of_a_large_study(scheduler, commands):
    assert scheduler.poll({f"job-{number}": str(number) for number in range(1, 301)}) == {}
    assert [len(commands.calls(name)) for name in ("squeue", "sacct")] == [1, 2]


def test_an_ended_job_is_settled_once_sacct_knows_its_end_and_one_that_only_sacct_has_is_unknown(
    scheduler, commands
):
    commands.add("squeue", out=queued(7, "FAILED", reason="NonZeroExitCode"))
    for rows in ("", accounted("7", "RUNNING"), accounted("7", "RUNNING", "allocation")):
        commands.add("sacct", out=rows)
        status = scheduler.poll({NAME: ""})[NAME]
        shown = ("7", "failed", "ended with a bad exit code (NonZeroExitCode)")
        assert (told(status), status.settled) == (shown, False)
    commands.add("sacct", out=accounted("7", "FAILED", exits="3:0"))
    status = scheduler.poll({NAME: ""})[NAME]
    assert (told(status), status.settled) == (("7", "failed", "FAILED: exit code 3"), True)
    commands.add("squeue")
    commands.add("sacct", out=accounted("7", "RUNNING"))
    status = scheduler.poll({NAME: "7"})[NAME]
    reason = "job 7 is not in the queue, but sacct says that it has not ended"
    assert (told(status), status.settled) == (("7", "unknown", reason), False)


def test_of_several_jobs_of_one_name_the_first_that_lives_counts_and_all_are_named(scheduler, commands):
    commands.add("squeue", out=queued(12, "RUNNING") + queued(9, "RUNNING") + queued(7, "FAILED"))
    status = scheduler.poll({NAME: "7"})[NAME]
    assert told(status) == ("9", "running", "another job has the same name: 7 (failed) and 12 (running)")
    commands.add("squeue")
    commands.add("sacct", out=accounted("7", "COMPLETED") + accounted("12", "FAILED", exits="1:0"))
    assert told(scheduler.poll({NAME: "7"})[NAME])[:2] == ("7", "completed")
    status = scheduler.poll({NAME: ""})[NAME]
    assert told(status) == (
        "12",
        "failed",
        "FAILED: exit code 1; another job has the same name: 7 (completed)",
    )


def job(study: PlannedStudy, folder: Path, **more: object) -> Job:
    script = study.script(next(iter(study.cells)))
    return replace(Job(name="study.run.1", script=script, folder=RunFolder(folder)), **more)


def test_sbatch_gets_the_jobs_to_wait_for_and_literal_paths_and_its_variables_are_named(
    study, scheduler, commands
):
    commands.add("sbatch", out="4711;alpha\n")
    folder = commands.folder / "100% a'; echo foo"
    one = job(study, folder, after=["5", "6"], options=["--nodes=2"])
    assert scheduler.submit(one) == "4711"
    ((*options, script, argument),) = commands.calls("sbatch")
    assert scheduler.check(study.runs) == []
    named = SlurmScheduler(study, slurm=commands.slurm(SBATCH_QOS="a b"))
    assert named.check(study.runs) == [
        "SBATCH_QOS='a b' in the environment overrides the scripts' #SBATCH lines"
    ]
    assert named.check([]) == []
    assert {"--nodes=2", "--export=ALL", "--dependency=afterany:5:6"} < {*options}
    assert f"--output={str(folder).replace('%', '%%')}/job.out" in options
    assert (script, argument) == (str(one.script.absolute()), str(folder))
    assert scheduler.words(one).endswith("/100% a'\"'\"'; echo foo'")
    assert raised(Exception, scheduler.submit, job(study, Path("/scratch/back\\slash"))) == (
        "/scratch/back\\slash/job.out: Slurm cannot write its output to a path with a backslash; "
        "choose another folder for results"
    )


def test_a_job_that_can_start_later_is_no_refusal(study, scheduler, commands):
    def sinfo(state: str, nodes: int = 2) -> str:
        return f"l40s*|up|infinite|{nodes}|{state}|8|gpu:l40s:4|1-infinite\n"

    one = job(study, commands.folder)
    commands.add("sbatch", err="allocation failure: Requested node configuration is not available", code=1)
    commands.add("sinfo", out=sinfo("drained"))
    says = "sbatch --test-only says: allocation failure: Requested node configuration is not available"
    assert scheduler.trial(one, nodes=2) == says
    for state, nodes, why in (
        ("idle", 2, ""),
        ("drained", 3, " (partition l40s has 2 nodes, and the job needs 3)"),
    ):
        commands.add("sinfo", out=sinfo(state))
        fresh = SlurmScheduler(study, slurm=commands.slurm())
        words = raised(RefusedError, fresh.trial, one, nodes=nodes)
        assert words.startswith(f"{says.replace(' says', '')}{why}; correct the matrix's cluster section")
    commands.add("sbatch", err="sbatch: Job 7 to start at 2026-11-20T17:13:29 using 2 processors on nodes n1")
    assert scheduler.trial(one, nodes=2) == ""


def test_private_data_are_never_taken_for_an_empty_node(scheduler, commands):
    start = datetime(2026, 11, 20, 10, 0, tzinfo=UTC)
    commands.add("sacct", out=accounted("5", "RUNNING") + accounted("6_[1-3]", "COMPLETED", "x", "ada|7"))
    commands.add("sacctmgr", out="PrivateData            = none\nPrivateData            = none\n")
    found = scheduler.others(["n1"], start, start)
    end = start + timedelta(minutes=1)
    assert found.jobs == [Occupation("5", ("n1",), start, None), Occupation("6_[1-3]", ("n1",), start, end)]
    assert found.unknown == ""
    commands.add(
        "sacctmgr", out="PrivateData            = none\nPrivateData            = accounts,jobs,users\n"
    )
    hidden = scheduler.others(["n1"], start, start)
    assert (hidden.jobs, hidden.unknown) == (found.jobs, "job data of other users are private (PrivateData)")
    commands.add("sacctmgr", err="sacctmgr: error: no permission", code=1)
    assert scheduler.others(["n1"], start, start).unknown.startswith("job data of other users may be private")
    (commands.path / "sacct").unlink()
    assert scheduler.others(["n1"], start, start) == ((), "sacct: command not found")
    assert scheduler.others([], start, start) == ([], "")
