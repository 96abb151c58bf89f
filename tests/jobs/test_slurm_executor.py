"""The Slurm executor on a real cluster: interruptions, rejections, and all ways in which a run can end."""

import json
import sys

from tests.cluster.bed import Cluster
from tests.cluster.containers import wait_for
from tests.jobs.slurm_studies import (
    MEASURE,
    await_child,
    lines,
    plan_study,
    run_id,
    scripted_study,
    with_sbatch,
)
from tests.matrices import command, matrix, slurm


def test_bench_waits_for_an_orphaned_sbatch_and_finds_its_job(scripted, running_cluster, tmp_path):
    study = scripted(MEASURE, MEASURE, MEASURE)
    until = f'until [ "$1" != --parsable ] || [ -e {tmp_path}/go ]; do sleep 0.1; done'
    slow = with_sbatch(study, tmp_path, f'{until}\nexec {{sbatch}} "$@"\n')
    killed = slow.start("submit", "STUDY")
    wait_for((study.folder / "ledger.jsonl").exists, what="the intent")
    await_child(killed)
    killed.kill()
    killed.wait()
    killed.stderr.close()
    again = study.start("submit", "STUDY")
    waits = (line for line in lines(again.stderr) if line.endswith("waiting until it ends"))
    assert next(waits)  # sbatch holds the lock
    (tmp_path / "go").touch()
    said = again.communicate(timeout=280)[1]
    assert again.returncode == 0, said
    assert study.planned.runs[0].run_id not in said  # its job was found, not made again
    assert study.jobs_per_run() == {run_id(i): 1 for i in (1, 2, 3)}


def test_a_rejected_job_stops_the_submission_and_the_next_continues_with_it(scripted, running_cluster):
    study = scripted(*([f'until [ -e "$1/../../../go" ]; do sleep 0.2; done; {MEASURE}'] * 4))
    order = [run.run_id for run in study.planned.runs]
    running_cluster.run(["scancel", "--user=root"])  # a job of another test that ends now would make room
    wait_for(lambda: not _queued(running_cluster), what="the end of earlier jobs")
    with running_cluster.limited(MaxSubmitJobs=2):
        done = study.bench("submit", "STUDY")
        assert done.returncode == 2
        assert done.stderr == (
            "4 jobs: 4 runs, at most 0.1333 node-hours, no GPU\n"
            f"[1/4] {order[0]} submitted as job {study.record(order[0]).job_id}\n"
            f"[2/4] {order[1]} submitted as job {study.record(order[1]).job_id}\n"
            f"error: {order[2]} was refused: sbatch: AssocMaxSubmitJobLimit\n"
            "Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size "
            "and/or time limits) (2 of 4 runs are submitted); run `bench submit` again when some jobs have "
            "ended, or use --max-queued or --wait\n"
        )
        shown = study.status()
        assert [shown[run].state for run in order[2:]] == ["planned", "planned"]
        # --wait continues when there is room.
        (study.folder / "go").touch()
        done = study.bench("submit", "STUDY", "--wait")
        assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-2] == "study scripted: 4 completed"
    assert {run.attempt for run in study.status().values()} == {1}
    assert study.jobs_per_run() == dict.fromkeys(order, 1)


def _queued(cluster: Cluster) -> int:
    return len(cluster.run(["squeue", "-h", "-t", "PD,R,CG", "-o", "%A"]).stdout.split())


def test_too_many_nodes_are_an_error_before_and_after_smaller_runs(running_cluster, tmp_path):
    text = matrix(cluster=slurm(), axes={"nodes": [1, 8], "tasks_per_node": [1]}, workload=command("true"))
    study = plan_study(tmp_path / "eight", text, running_cluster.environment)
    refusal = (
        "error: the largest cell, n8x1-gloo-srun-b4, is not accepted: sbatch --test-only: allocation failure: "
        "Requested node configuration is not available (partition l40s has 4 nodes, and the job needs 8); "
        "nothing was submitted; correct the matrix's cluster section and plan it again (`sinfo -s` lists "
        "partitions, `sacctmgr show assoc where user=$USER` accounts and QOS), or leave out that size (--only)"
    )
    done = study.bench("submit", "STUDY")
    assert (done.returncode, done.stderr.splitlines()[1:]) == (2, [refusal])
    assert not (study.folder / "ledger.jsonl").exists()
    done = study.bench("submit", "STUDY", "--only", "nodes=1", "--wait")
    assert done.returncode == 0, done.stderr
    done = study.bench("submit", "STUDY")
    assert (done.returncode, done.stderr.splitlines()[1:]) == (2, [refusal])
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
        assert said[-3:-1] == [
            f"`bench cancel {study.folder}` removes them from the queue; then correct the matrix",
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
    assert done.stderr.splitlines()[-2] == "study scripted: 3 completed"
    assert study.jobs_per_run() == {run_id(i): 1 for i in (1, 2, 3)}


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
    assert study.jobs_per_run() == {}
    assert not (folder / "ledger.jsonl").exists()


HALTED = "the study was cancelled: no more runs are started; `bench submit` starts the remaining runs"


def test_a_cancelled_study_stops_a_waiting_submission_and_the_next_continues(cluster, tmp_path):
    study = scripted_study(tmp_path, [f"sleep 60; {MEASURE}"] * 3, cluster.environment)
    with study.start("submit", "STUDY", "--wait", "--max-queued", "1") as waiting:
        assert waiting.stderr is not None
        said = lines(waiting.stderr)
        assert "2 runs held back until other runs end" in said
        assert study.bench("cancel", "STUDY").stdout == "1 run cancelled\n"
        assert list(said)[:-1] == [HALTED, "study scripted: 2 planned, 1 cancelled"]
    assert waiting.returncode == 1
    assert sum(study.jobs_per_run().values()) == 1
    again = study.bench("submit", "STUDY", "--max-queued", "2")
    assert again.returncode == 0, again.stderr
    assert again.stderr.splitlines()[-2] == "study scripted: 1 planned, 2 queued"


def test_a_running_submission_stops(cluster, tmp_path):
    study = scripted_study(tmp_path, ["sleep 60"], cluster.environment, repeats=300)
    with study.start("submit", "STUDY") as submission:
        assert submission.stderr is not None
        said = lines(submission.stderr)
        assert next(said).startswith("300 jobs: ")
        assert next(said).startswith("[1/300] ")
        cancelled = study.bench("cancel", "STUDY")
        assert cancelled.returncode == 0, cancelled.stderr
        last = list(said)[-3:]
    assert submission.returncode == 1
    assert last[0] == HALTED
    states = [run.state for run in study.status().values()]
    assert set(states) == {"planned", "cancelled"}
    assert cancelled.stdout == f"{states.count('cancelled')} runs cancelled\n"
