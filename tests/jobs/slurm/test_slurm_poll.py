"""What a poll says of jobs, with small scripts in place of squeue and sacct."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bench.jobs.contract import Job, RefusedError, Status
from bench.jobs.slurm.client import SlurmUnavailableError
from bench.jobs.slurm.scheduler import SlurmScheduler
from bench.plan import make_plan, write_plan
from bench.study.conditions import Occupation
from bench.study.layout import RunFolder
from bench.study.plan_json import PlannedStudy, open_study
from tests.common import raised
from tests.jobs.slurm.commands import Commands
from tests.matrices import matrix, slurm

NAME, OTHER = "study.r1.a1.key", "study.r2.a1.key"
DISABLED, AWAY = "Slurm accounting storage is disabled", "Unable to connect to database"


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> PlannedStudy:
    folder = tmp_path_factory.mktemp("study")
    text = matrix("poll", cluster=slurm(env_from=["TOKEN"]), axes={"nodes": [1, 2], "tasks_per_node": [1]})
    (folder / "matrix.yaml").write_text(text)
    return open_study(write_plan(make_plan(folder / "matrix.yaml"), folder / "results"))


@pytest.fixture
def commands(tmp_path) -> Commands:
    return Commands(tmp_path)


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


def test_a_job_is_found_by_its_name_whatever_id_is_given(scheduler, commands):
    commands.add("squeue", out=queued(7, "RUNNING") + queued(8, "RUNNING", "somebody else's"))
    for job_id in ("", "7", "8", "70000"):
        assert told(scheduler.poll({NAME: job_id})[NAME]) == ("7", "running", "")
    assert commands.calls("squeue")[0][-1] == f"--name={NAME}"
    assert not (commands.folder / "sacct.calls").exists()


def test_an_ended_job_is_found_in_sacct_by_its_id_or_else_by_its_name(scheduler, commands):
    commands.add("sacct", out=accounted("7", "COMPLETED") + accounted("8", "FAILED", "other", exits="1:0"))
    for job_id in ("", "7", "8", "70000"):
        status = scheduler.poll({NAME: job_id})[NAME]
        assert (told(status), status.settled) == (("7", "completed", ""), True)
        assert status.summary.splitlines()[1].startswith("7 ")
    by_id, by_name = [call for call in commands.calls("sacct") if "--allusers" in call][-2:]
    assert by_id[-1] == "--jobs=70000"
    assert by_name[-1] == f"--name={NAME}"
    planned = datetime.fromtimestamp(scheduler.study.folder.planned_s, UTC) - timedelta(days=1)
    assert f"--starttime={planned:%Y-%m-%dT%H:%M:%S}" in by_name


def test_a_job_that_neither_knows_has_no_entry(scheduler):
    assert scheduler.poll({NAME: "7", OTHER: ""}) == {}
    assert scheduler.poll({}) == {}


def test_an_ended_job_is_settled_once_sacct_knows_its_end(scheduler, commands):
    commands.add("squeue", out=queued(7, "FAILED", reason="NonZeroExitCode"))
    for rows in ("", accounted("7", "RUNNING"), accounted("7", "RUNNING", "allocation")):
        commands.add("sacct", out=rows)
        status = scheduler.poll({NAME: ""})[NAME]
        shown = ("7", "failed", "ended with a bad exit code (NonZeroExitCode)")
        assert (told(status), status.settled) == (shown, False)
    commands.add("sacct", out=accounted("7", "FAILED", exits="3:0"))
    status = scheduler.poll({NAME: ""})[NAME]
    assert (told(status), status.settled) == (("7", "failed", "FAILED: exit code 3"), True)


@pytest.mark.parametrize(("words", "permanent"), [(DISABLED, True), (AWAY, False)])
def test_without_accounting_the_queue_counts_and_other_jobs_are_unknown(
    scheduler, commands, words, permanent
):
    commands.add("sacct", err=f"sacct: error: {words}\n", code=1)
    commands.add("squeue", out=queued(7, "COMPLETED"))
    found = scheduler.poll({NAME: "7", OTHER: "8", "third": ""})
    assert told(found[NAME]) == ("7", "completed", "")
    assert (found[NAME].accounting, found[NAME].settled) == (words, permanent)
    reason = f"squeue does not list job 8; sacct is unavailable ({words})"
    assert told(found[OTHER]) == ("8", "unknown", reason)
    assert (found[OTHER].accounting, found[OTHER].settled) == (words, False)
    assert found["third"].reason == f"squeue does not list a job named third; sacct is unavailable ({words})"


def test_a_job_that_sacct_believes_to_run_is_unknown(scheduler, commands):
    commands.add("sacct", out=accounted("7", "RUNNING"))
    status = scheduler.poll({NAME: "7"})[NAME]
    reason = "job 7 is not in the queue, but sacct says that it has not ended"
    assert (told(status), status.settled) == (("7", "unknown", reason), False)


def test_the_owner_of_another_users_job_is_named(scheduler, commands):
    commands.add("squeue", out=queued(7, "PENDING", user="ada|4711") + queued(8, "RUNNING", OTHER))
    found = scheduler.poll({NAME: "", OTHER: ""})
    assert (found[NAME].owner, found[OTHER].owner) == ("user ada", "")
    commands.add("squeue")
    commands.add("sacct", out=accounted("7", "COMPLETED", user="ada|4711"))
    assert scheduler.poll({NAME: ""})[NAME].owner == "user ada"


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


def test_a_running_pack_has_the_steps_of_its_runs(scheduler, commands):
    pack = "study.pack.a1.key"
    commands.add("squeue", out=queued(7, "RUNNING", pack))
    steps = accounted("7.0", "FAILED", "r1", "|", "3:0") + accounted("7.1", "RUNNING", "r2", "|")
    commands.add("sacct", out=accounted("7", "RUNNING", pack) + steps)
    status = scheduler.poll({pack: "7"})[pack]
    assert (str(status.state), status.settled) == ("running", False)
    first, second = status.steps["r1"], status.steps["r2"]
    assert (first.failure_class, first.exit_code, first.settled) == ("bad-exit", 3, True)
    assert (second.failure_class, second.exit_code, second.settled) == (None, None, False)
    commands.add("sacct", err=DISABLED, code=1)
    status = scheduler.poll({pack: "7"})[pack]
    assert (str(status.state), status.accounting, status.settled) == ("running", DISABLED, True)
    commands.add("squeue", out=queued(7, "PENDING", pack))
    assert scheduler.poll({pack: "7"})[pack].accounting == ""


def test_squeue_without_an_answer_is_an_error_with_its_words(scheduler, commands):
    commands.add("squeue", err="slurm_load_jobs error: Unable to contact slurm controller\n", code=1)
    for call in (lambda: scheduler.poll({NAME: ""}), lambda: scheduler.living([NAME])):
        with pytest.raises(SlurmUnavailableError) as caught:
            call()
        assert caught.value.message.endswith("Unable to contact slurm controller")


def test_living_jobs_are_those_that_are_queued_or_run(scheduler, commands):
    commands.add(
        "squeue", out=queued(7, "PENDING") + queued(8, "COMPLETED", OTHER) + queued(9, "RUNNING", "x")
    )
    assert scheduler.living([NAME, OTHER, "third"]) == {NAME: "7"}
    assert scheduler.living([]) == {}


def job(study: PlannedStudy, folder: Path, **more: object) -> Job:
    script = study.script(next(iter(study.cells)))
    return replace(Job(name="study.run.1", script=script, folder=RunFolder(folder)), **more)


def test_sbatch_gets_literal_paths_and_the_lock(study, scheduler, commands, monkeypatch):
    commands.add("sbatch", out="4711;alpha\n")
    folder = commands.folder / "100% a'; echo foo"
    one = job(study, folder, after=["5", "6"], options=["--nodes=2"])
    assert scheduler.submit(one) == "4711"
    doubled = str(folder).replace("%", "%%")
    assert commands.calls("sbatch") == [
        [
            *("--parsable", "--job-name=study.run.1"),
            f"--output={doubled}/job.out",
            f"--error={doubled}/job.err",
            *("--nodes=2", "--export=ALL", "--dependency=afterany:5:6"),
            *(str(one.script.absolute()), str(folder)),
        ]
    ]
    assert scheduler.words(one).startswith("BENCH_PYTHON=")
    assert scheduler.words(one).endswith("/100% a'\"'\"'; echo foo'")
    backslash = job(study, Path("/scratch/back\\slash"))
    assert raised(Exception, scheduler.submit, backslash) == (
        "/scratch/back\\slash/job.out: Slurm cannot write its output to a path with a backslash; "
        "choose another folder for results"
    )


def test_a_refusal_contains_the_words_of_sbatch(study, scheduler, commands):
    commands.add("sbatch", err="sbatch: error: Batch job submission failed: Invalid qos\n", code=1)
    one = job(study, commands.folder)
    assert raised(RefusedError, scheduler.submit, one) == "sbatch: Batch job submission failed: Invalid qos"


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


def test_variables_that_override_directives_are_named(study, commands):
    scheduler = SlurmScheduler(study, slurm=commands.slurm(SBATCH_QOS="a b"))
    assert scheduler.check(study.runs) == [
        "SBATCH_QOS='a b' in the environment overrides the scripts' #SBATCH lines"
    ]
    assert scheduler.check([]) == []


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
