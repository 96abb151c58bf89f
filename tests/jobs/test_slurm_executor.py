"""The Slurm executor on a real cluster: interruptions, rejections, and all ways in which a run can end."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.jobs.scheduler import Callbacks
from bench.study.layout import RunFolder
from bench.study.ledger import submit_lock
from tests.cluster.bed import Cluster
from tests.cluster.containers import wait_for
from tests.common import write_program
from tests.jobs.slurm.statuses import job_statuses
from tests.jobs.slurm_studies import MEASURE, Study, await_child, lines, plan_study, run_id
from tests.matrices import command, matrix, slurm

# -- no run is submitted twice or lost ----------------------------------------------------------


def test_a_submission_killed_again_and_again_leaves_one_job_per_run(scripted):
    study = scripted(*([MEASURE] * 6))
    dice = random.Random(0)
    for _ in range(3):
        process = study.start("submit", "STUDY")
        said = lines(process.stderr)
        for _ in range(dice.randint(1, 2)):
            next(said, None)
        time.sleep(dice.uniform(0, 0.02))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stderr.close()
    done = study.bench("submit", "STUDY")
    assert done.returncode == 0, done.stderr
    assert study.jobs_per_run() == {run_id(i): 1 for i in range(1, 7)}


def test_bench_waits_for_an_orphaned_sbatch_and_finds_its_job(scripted, running_cluster):
    study = scripted(MEASURE, MEASURE, MEASURE)
    first, second, third = (run.run_id for run in study.planned.runs)
    assert study.bench("submit", "STUDY", "--wait", "--only", first).returncode == 0
    ledger = study.folder / "ledger.jsonl"
    size = ledger.stat().st_size
    with running_cluster.frozen_slurmctld():
        killed = study.start("submit", "STUDY")
        wait_for(lambda: ledger.stat().st_size > size, what="the intent")
        await_child(killed)  # its sbatch, which waits for an answer
        killed.kill()
        killed.wait()
        killed.stderr.close()
        again = study.start("submit", "STUDY")
        time.sleep(1)
    said = again.communicate(timeout=280)[1]
    assert again.returncode == 0, said
    assert second not in said  # its job was found, not made again
    assert study.jobs_per_run() == {first: 1, second: 1, third: 1}


def test_a_submission_reports_the_one_that_it_waits_for(scripted):
    study = scripted(MEASURE)
    with submit_lock(study.folder / "submit.lock"):
        waiting = study.start("submit", "STUDY")
        said = next(lines(waiting.stderr))
    assert waiting.communicate(timeout=280)[1].startswith(f"[1/1] {run_id(1)} submitted as job ")
    who = f"(pid {os.getpid()} on {os.uname().nodename})"
    assert (
        said
        == f"{study.folder}: another `bench submit` is running for this study {who}; waiting until it ends"
    )


def test_two_submissions_at_once_share_the_work(scripted):
    study = scripted(*([MEASURE] * 8))
    both = [study.start("submit", "STUDY") for _ in range(2)]
    said = [process.communicate(timeout=280)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert study.jobs_per_run() == {run_id(i): 1 for i in range(1, 9)}


def test_a_run_that_failed_after_it_was_chosen_is_not_submitted_again(scripted):
    study = scripted("exit 3", MEASURE)
    chosen = study.planned.records()
    study.bench("submit", "STUDY", "--wait")
    study.executor.submit(study.planned.runs, seen=chosen, callbacks=Callbacks())
    assert study.jobs_per_run() == {run_id(1): 1, run_id(2): 1}


def test_the_lost_answer_of_an_sbatch_is_looked_up(scripted, running_cluster):
    """bench and sbatch are killed while the request waits in the controller's socket."""
    study = scripted(MEASURE)
    with running_cluster.frozen_slurmctld():
        _write_intent(study)
        sbatch = subprocess.Popen(
            study.executor.command_line(study.planned.runs[0])
            .replace(".a2.", ".a1.")
            .replace("attempt-2", "attempt-1"),
            shell=True,
            env={**os.environ, **running_cluster.environment},
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        time.sleep(0.5)
        os.killpg(sbatch.pid, signal.SIGKILL)
        sbatch.wait()
        # It waits for the controller too; the answer must include the job.
        second = study.start("submit", "STUDY")
        time.sleep(1)
    assert second.wait(timeout=280) == 0
    second.stderr.close()
    assert study.jobs_per_run() == {run_id(1): 1}


def _write_intent(study: Study) -> None:
    """Create the files of a bench that was killed just before it called sbatch."""
    from bench.study.files import write_json
    from bench.study.run_json import new_attempt

    planned = study.planned
    run = planned.runs[0]
    attempt = new_attempt(planned, run, planned.records()[run.run_id])
    write_json(attempt.folder.run_json, attempt.describe(planned))
    planned.ledger.append("intent", run_id=run.run_id, attempt=1, job_name=attempt.job_name)


def test_an_intent_without_a_job_is_withdrawn_and_started_again(scripted):
    study = scripted(MEASURE)
    _write_intent(study)
    shown = study.status()[run_id(1)]
    assert (shown["state"], shown["reason"]) == (
        "planned",
        "sbatch was interrupted before Slurm accepted the job",
    )
    assert study.run_json(run_id(1))["state"] == "planned"
    assert study.bench("submit", "STUDY").returncode == 0
    assert study.status()[run_id(1)]["attempt"] == 2
    assert study.jobs_per_run() == {run_id(1): 1}


def test_a_rejected_job_stops_the_submission_and_the_next_continues_with_it(scripted, running_cluster):
    study = scripted(*([f'until [ -e "$1/../../../go" ]; do sleep 0.2; done; {MEASURE}'] * 4))
    order = [run.run_id for run in study.planned.runs]
    running_cluster.run(["scancel", "--user=root"])  # a job of another test that ends now would make room
    wait_for(lambda: not _queued(running_cluster), what="the end of earlier jobs")
    with running_cluster.limited(MaxSubmitJobs=2):
        done = study.bench("submit", "STUDY")
        assert done.returncode == 2
        assert done.stderr == (
            f"[1/4] {order[0]} submitted as job {study.run_json(order[0])['job_id']}\n"
            f"[2/4] {order[1]} submitted as job {study.run_json(order[1])['job_id']}\n"
            f"error: sbatch rejected {order[2]}: AssocMaxSubmitJobLimit\n"
            "Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size "
            "and/or time limits) (2 of 4 runs are submitted); run `bench submit` again when some jobs have "
            "ended, or use --max-queued or --wait\n"
        )
        shown = study.status()
        assert [shown[run]["state"] for run in order[2:]] == ["planned", "planned"]
        # --wait continues when there is room.
        (study.folder / "go").touch()
        done = study.bench("submit", "STUDY", "--wait")
        assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "study scripted: 4 completed"
    assert {run["attempt"] for run in study.status().values()} == {1}
    assert study.jobs_per_run() == dict.fromkeys(order, 1)


def _queued(cluster: Cluster) -> int:
    return len(cluster.run(["squeue", "-h", "-t", "PD,R,CG", "-o", "%A"]).stdout.split())


def test_a_cell_that_slurm_rejects_is_an_error_before_anything_is_submitted(scripted):
    study = scripted("#SBATCH --partition=nope\ntrue")
    done = study.bench("submit", "STUDY")
    assert done.returncode == 2
    assert done.stderr == (
        "error: Slurm does not accept the largest cell, n1x1-gloo-srun-b1: invalid partition specified: nope\n"
        "allocation failure: Invalid partition name specified; nothing was submitted; "
        "correct the matrix's cluster section and plan it again (`sinfo -s` lists partitions, "
        "`sacctmgr show assoc where user=$USER` accounts and QOS), or leave out that size (--only)\n"
    )
    assert not (study.folder / "ledger.jsonl").exists()


def test_too_many_nodes_are_an_error_before_and_after_smaller_runs(running_cluster, tmp_path):
    text = matrix(cluster=slurm(), axes={"nodes": [1, 8], "tasks_per_node": [1]}, workload=command("true"))
    study = plan_study(tmp_path / "eight", text, running_cluster.environment)
    refusal = (
        "error: Slurm does not accept the largest cell, n8x1-gloo-srun-b4: allocation failure: "
        "Requested node configuration is not available (partition l40s has 4 nodes, and the job needs 8); "
        "nothing was submitted; correct the matrix's cluster section and plan it again (`sinfo -s` lists "
        "partitions, `sacctmgr show assoc where user=$USER` accounts and QOS), or leave out that size (--only)"
    )
    done = study.bench("submit", "STUDY")
    assert (done.returncode, done.stderr.splitlines()) == (2, [refusal])
    assert not (study.folder / "ledger.jsonl").exists()
    done = study.bench("submit", "STUDY", "--only", "nodes=1", "--wait")
    assert done.returncode == 0, done.stderr
    done = study.bench("submit", "STUDY")
    assert (done.returncode, done.stderr.splitlines()) == (2, [refusal])
    assert list(study.jobs_per_run()) == ["n1x1-gloo-srun-b4-r1"]


def test_runs_that_slurm_accepts_but_never_starts_are_reported_with_the_remedy(running_cluster, tmp_path):
    cluster = slurm(qos="brief", time_limit="6m")
    axes = {"nodes": [1, 2], "tasks_per_node": [1]}
    text = matrix("slow", cluster=cluster, axes=axes, workload=command("true"))
    study = plan_study(tmp_path / "slow", text, running_cluster.environment)
    first, second = (f"n{nodes}x1-gloo-srun-b4-r1" for nodes in (1, 2))
    reason = (
        "will not start (QOSMaxWallDurationPerJobLimit): its time limit exceeds that of the QOS; "
        "lower cluster.time_limit, or choose another cluster.qos"
    )
    with running_cluster.qos("brief", MaxWall="1"):
        done = study.bench("submit", "STUDY")
        assert done.returncode == 0
        said = done.stderr.splitlines()
        assert {f"{run} and 1 other run {reason}" for run in (first, second)} & set(said), done.stderr
        assert said[-2:] == [
            "`bench cancel slow` removes them from the queue; then correct the matrix",
            "study slow: 2 queued",
        ]
        shown = study.bench("status", "STUDY").stdout
        assert shown.count(reason) == 2
        assert shown.splitlines()[-1] == "2 queued (2 will not start)"
        runs = json.loads(study.bench("status", "STUDY", "--json").stdout)["runs"]
        assert [run["will_not_start"] for run in runs] == [True, True]
        with study.start("submit", "STUDY", "--wait") as waiting:
            assert next(line for line in lines(waiting.stderr) if "will not start" in line).endswith(reason)
            assert study.bench("cancel", "STUDY").stdout == "2 runs cancelled\n"
        assert waiting.returncode == 1


def test_a_controller_that_is_down_is_an_error_and_loses_nothing(scripted, running_cluster):
    study = scripted(MEASURE, f"sleep 1; {MEASURE}", MEASURE)
    assert study.bench("submit", "STUDY", "--max-queued", "2").returncode == 0
    with running_cluster.without_slurmctld():
        waiting = study.start("submit", "STUDY", "--wait", "--max-queued", "3")
        others = [study.start(command, "STUDY") for command in ("status", "cancel")]
        for other in others:
            said = other.communicate(timeout=280)[1]
            assert other.returncode == 1, said
            assert "Unable to contact slurm controller (connect failure)" in said
            assert said.splitlines()[-1].endswith(
                "repeat the command when Slurm responds again (scontrol ping); nothing is lost"
            )
            assert "Traceback" not in said
    waiting.wait(timeout=280)
    waiting.stderr.close()
    done = study.bench("submit", "STUDY", "--wait")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "study scripted: 3 completed"
    assert study.jobs_per_run() == {run_id(i): 1 for i in (1, 2, 3)}


# -- settlement -----------------------------------------------------------------------------


def test_a_forgotten_job_is_settled_by_its_folder_or_is_unknown(scripted):
    study = scripted(MEASURE, "true")
    for i in (1, 2):
        _pretend_submitted(study, run_id(i), job_id=f"99990{i}")
    folder = RunFolder(study.folder / f"runs/{run_id(1)}/attempt-1")
    folder.end.write_text('{"exit_code": 9, "signal": null, "time": "2026-01-01T00:00:00Z"}')
    shown = study.status()
    assert (shown[run_id(1)]["state"], shown[run_id(1)]["exit_code"]) == ("failed", 9)
    assert study.run_json(run_id(1))["ended_at"] == "2026-01-01T00:00:00Z"
    assert (shown[run_id(2)]["state"], shown[run_id(2)]["reason"]) == (
        "unknown",
        "Slurm does not know job 999902; the run wrote no end.json. `bench cancel` marks the run as cancelled",
    )
    assert study.bench("cancel", "STUDY").stdout == "1 run cancelled\n"
    assert study.status()[run_id(2)]["state"] == "cancelled"


def _pretend_submitted(study: Study, name: str, *, job_id: str) -> None:
    planned = study.planned
    folder = planned.folder.attempt(name, 1)
    folder.path.mkdir(parents=True)
    planned.ledger.append("intent", run_id=name, attempt=1, job_name=f"x.{name}")
    planned.ledger.append("submitted", run_id=name, attempt=1, job_id=job_id)


def test_accounting_of_another_job_with_the_same_id_is_ignored(scripted, running_cluster):
    study = scripted("true")
    other = running_cluster.run(["sbatch", "--parsable", "-o/dev/null", "--wrap=exit 1"]).stdout.strip()
    wait_for(
        lambda: running_cluster.run(["sacct", "-nXj", other, "-o", "state"]).stdout.split() == ["FAILED"],
        what="another's job",
    )
    _pretend_submitted(study, run_id(1), job_id=other)
    # For some seconds after its end, sacct lacks the name of a job.
    wait_for(lambda: study.status()[run_id(1)]["state"] == "unknown", what="the other name")


# -- commands -------------------------------------------------------------------------------


def test_cancel_ends_this_studys_jobs_only(scripted):
    mine, other = scripted("sleep 60", "sleep 60", name="mine"), scripted("sleep 60", name="other")
    for study in (mine, other):
        assert study.bench("submit", "STUDY").returncode == 0
    assert mine.bench("cancel", "STUDY", "--only", "*-b1-*").stdout == "1 run cancelled\n"
    assert [mine.status()[run_id(i)]["state"] in ("queued", "running") for i in (1, 2)] == [False, True]
    assert mine.bench("cancel", "STUDY").stdout == "1 run cancelled\n"
    assert mine.bench("cancel", "STUDY").stdout == "0 runs cancelled\n"
    assert other.status()[run_id(1)]["state"] in ("queued", "running")
    cancelled = mine.run_json(run_id(1))
    assert (cancelled["state"], cancelled["failure_class"]) == ("cancelled", "cancelled")
    assert cancelled["reason"] == "cancelled by bench cancel"
    assert cancelled["ended_at"]


def test_max_queued_limits_the_queue(scripted):
    study = scripted(*(["sleep 60"] * 3))
    done = study.bench("submit", "STUDY", "--max-queued", "2")
    assert done.stderr.splitlines()[-2:] == [
        "1 run held back until the next `bench submit` (or use --wait)",
        "study scripted: 1 planned, 2 queued",
    ]
    assert sum(study.jobs_per_run().values()) == 2


def test_a_dry_run_prints_the_sbatch_commands(scripted):
    study = scripted(MEASURE)
    done = study.bench("submit", "STUDY", "--dry-run")
    folder, key = study.folder, study.planned.plan["key"]
    attempt = f"{folder}/runs/{run_id(1)}/attempt-1"
    assert done.stdout == (
        f"BENCH_PYTHON={sys.executable} "
        f"sbatch --parsable --job-name=scripted.{run_id(1)}.a1.{key} --output={attempt}/job.out "
        f"--error={attempt}/job.err {folder}/scripts/n1x1-gloo-srun-b1.sbatch {attempt}\n"
        "1 of 1 runs would be started\n"
    )
    shown = json.loads(study.bench("submit", "STUDY", "--dry-run", "--json").stdout)
    assert shown == {
        "study": "scripted",
        "planned": 1,
        "runs": [
            {
                "run_id": run_id(1),
                "cell_id": "n1x1-gloo-srun-b1",
                "command": done.stdout.splitlines()[0],
                "script": f"{folder}/scripts/n1x1-gloo-srun-b1.sbatch",
            }
        ],
    }
    assert study.bench("submit", "STUDY", "--json").stderr == (
        "error: --json requires --dry-run; `bench status --json` shows the states of runs\n"
    )
    assert study.jobs_per_run() == {}
    assert not (folder / "ledger.jsonl").exists()


def test_the_status_of_a_large_study_calls_squeue_once_and_sacct_twice(
    scripted, running_cluster, tmp_path, monkeypatch
):
    study = scripted(*([MEASURE] * 4))
    assert study.bench("submit", "STUDY").returncode == 0
    jobs = [str(record.job_id) for record in study.planned.records().values()]

    def settled() -> bool:
        found = job_statuses(study.executor.slurm.accounting(jobs))
        return len(found) == 4 and all(outcome.settled for outcome in found.values())

    # squeue can still show a job as completing when sacct has its end.
    wait_for(lambda: settled() and not _queued(running_cluster), what="the ends of all jobs")
    _count_calls(tmp_path / "bin", monkeypatch)
    shown = json.loads(study.bench("status", "STUDY", "--json").stdout)
    assert {run["state"] for run in shown["runs"]} == {"completed"}
    # sacct is asked for the jobs of the study, and for all jobs on their nodes.
    assert sorted((tmp_path / "bin/calls").read_text().split()) == ["sacct", "sacct", "squeue"]


def _count_calls(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put wrappers of Slurm's commands first in PATH, which record each call."""
    folder.mkdir()
    for name in ("squeue", "sacct", "scontrol", "sinfo"):
        wrapper = folder / name
        write_program(wrapper, f'#!/bin/sh\necho {name} >>"{folder}/calls"\nexec {shutil.which(name)} "$@"\n')
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
