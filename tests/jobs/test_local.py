"""Execution on this machine: the scheduler with short scripts, and the command line with real ranks."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.jobs.contract import Job
from bench.jobs.local import LocalScheduler, process_id
from bench.study.ledger import Record, RunState
from bench.study.plan_json import PlannedStudy
from bench.study.run_json import next_attempt
from ddp_scaling_bench.cell_json import read_cell
from tests.cluster.containers import wait_for
from tests.commands.command_line import Command, answer, bench
from tests.common import run_program, write_program
from tests.matrices import BARE, command, matrix, planned_study, training

#: A process in a session of its own, as ranks are, which ignores SIGTERM.
STUBBORN = "(trap '' TERM; exec setsid sleep 4242) &"
BEGUN = 'touch "$run_dir/begun"'


def planned(folder: Path, ranks=(1, 2), *, steps=4, limit="2m", **cluster: Any) -> PlannedStudy:
    """Plan a study of tiny runs in a folder with an awkward name."""
    root = folder / "it's a folder"
    root.mkdir(exist_ok=True)
    cluster = {"executor": "local", "time_limit": limit, **cluster}
    workload = training(parameters="20k", **BARE | {"steps_per_epoch": steps, "epochs": 2, "val_steps": 1})
    text = matrix(cluster=cluster, axes={"tasks_per_node": [*ranks]}, workload=workload)
    return planned_study(root, text)


Jobs = Callable[..., tuple[LocalScheduler, Job]]


@pytest.fixture
def job_of(tmp_path: Path) -> Jobs:
    """Return a function that plans a job with a set-up line; check at the end that no process is left."""
    made: list[Job] = []

    def make(line: str, **options: Any) -> tuple[LocalScheduler, Job]:
        study = planned(tmp_path, ranks=[1], setup=[line], **options)
        attempt = next_attempt(study, study.runs[0], Record(run_id=study.runs[0].run_id))
        attempt.claim(study)
        script = study.script(attempt.cell.cell_id).absolute()
        made.append(Job(name=attempt.job_name, script=script, folder=attempt.folder))
        return LocalScheduler(study), made[-1]

    yield make
    for job in made:
        wait_for(lambda job=job: not named(job), what="the end of all processes")


def named(job: Job) -> list[str]:
    """Return the processes of a job."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if job.name in process.cmdline() or process.environ().get("BENCH_JOB") == job.name:
                found.append(str(process))
    return found


def state(scheduler: LocalScheduler, job: Job, job_id: str = "") -> str | None:
    """Return the state of a job: ``over`` if only its folder knows how it ended, None if it is not known."""
    status = scheduler.poll({job.name: job_id}).get(job.name)
    if status is None:
        return None
    return "over" if status.state is RunState.UNKNOWN and status.settled else str(status.state)


def end_of(job: Job) -> tuple[int, str | None, str]:
    end = json.loads(job.folder.end.read_text())
    return end["exit_code"], end["signal"], end["by"]


def test_a_job_is_found_by_its_id_and_by_its_name_until_it_has_ended(job_of):
    scheduler, job = job_of('while [ ! -e "$run_dir/go" ]; do sleep 0.1; done; exit 3')
    assert scheduler.poll({job.name: ""}) == {}
    job_id = scheduler.submit(job)
    wait_for(lambda: scheduler.living([job.name]) == {job.name: job_id}, what="the process")
    wait_for(job.folder.start.exists, what="the script")
    assert job.folder.start.read_text().split()[0] == job_id
    assert [state(scheduler, job, known) for known in (job_id, "")] == ["running", "running"]
    (job.folder.path / "go").touch()
    wait_for(lambda: state(scheduler, job, job_id) == "over", what="the end")
    assert state(scheduler, job) is None
    assert end_of(job) == (3, None, "exit")
    host, pid, start = job_id.split(":")
    assert state(scheduler, job, f"{host}:{os.getpid()}:{start}") == "over", "a reused process id"
    status = scheduler.poll({job.name: f"elsewhere:{pid}:{start}"})[job.name]
    assert (status.state, status.settled) == (RunState.UNKNOWN, False)
    assert status.reason == f"the run is process {pid} on elsewhere; run `bench status` there"
    assert status.owner == "host elsewhere"
    scheduler.cancel([job_id])  # nothing happens


@pytest.mark.parametrize(
    ("line", "by", "end"),
    [
        (f"{STUBBORN} {BEGUN}; sleep 4242", "term", (143, "TERM", "term")),
        (f"{STUBBORN} {BEGUN}; sleep 4242", "limit", (143, "TERM", "limit")),
        # Jobs that ignore the signal or were stopped are killed.
        (f"{BEGUN}; trap '' TERM; sleep 4242; sleep 4242", "term", (143, "TERM", "term")),
        (f"{BEGUN}; sleep 4242", "stop", (143, "TERM", "term")),
        # The ranks of a killed script may still train.
        (f"{STUBBORN} {BEGUN}; sleep 4242; sleep 4242", "kill", (137, "KILL", "kill")),
    ],
)
def test_a_job_that_is_ended_leaves_no_process(job_of, line, by, end):
    scheduler, job = job_of(line, limit="1s" if by == "limit" else "2m")
    job_id = scheduler.submit(job)
    wait_for((job.folder.path / "begun").exists, what="the job")
    if by in ("stop", "kill"):
        os.kill(int(job_id.split(":")[1]), signal.SIGSTOP if by == "stop" else signal.SIGKILL)
    if by == "kill":
        assert state(scheduler, job, job_id) == "running"
    if by in ("term", "stop"):
        started = time.monotonic()
        scheduler.cancel([job_id])
        assert time.monotonic() - started < 5, "the script, not `bench cancel`, waits for the end"
    wait_for(lambda: state(scheduler, job, job_id) == "over", what="the end")
    assert end_of(job) == end


#: Writes what rank 0 writes after some windows, given the number of lines.
SEAL = 'seq {} >"$run_dir/metrics.csv"; : >"$run_dir/SHA256SUMS"; '


@pytest.mark.parametrize(
    ("line", "end"),
    [
        (f"{SEAL.format(3)}{STUBBORN} sleep 4242", (0, "TERM", "measured")),
        (SEAL.format(3) + "sleep 6; exit 3", (3, None, "exit")),
        (SEAL.format(2) + "sleep 14; exit 4", (4, None, "exit")),  # a window is missing
    ],
)
def test_a_program_is_ended_10_s_after_its_last_window_if_it_does_not_end(job_of, line, end):
    scheduler, job = job_of(line, stop_after_measurement=True)
    job_id = scheduler.submit(job)
    wait_for(lambda: state(scheduler, job, job_id) == "over", what="the end")
    assert end_of(job) == end


def test_a_withdrawn_attempt_does_not_start(job_of):
    scheduler, job = job_of('touch "$run_dir/begun"')
    job.folder.start.write_text("bench 2026-01-01T00:00:00Z n1 0\n")
    job_id = scheduler.submit(job)
    wait_for(lambda: state(scheduler, job, job_id) == "over", what="the end")
    assert not job.folder.end.exists()
    assert not (job.folder.path / "begun").exists()


def test_an_orphan_of_a_run_is_found_by_its_environment(job_of):
    scheduler, job = job_of("exit")
    orphan = subprocess.Popen(["sleep", "4242"], env={**os.environ, "BENCH_JOB": job.name})
    try:
        assert scheduler.living([job.name]) == {job.name: process_id(orphan.pid)}
        scheduler.cancel([process_id(orphan.pid)])
        assert orphan.wait(60) == -signal.SIGTERM
    finally:
        orphan.kill()
        orphan.wait()


def states(study: PlannedStudy) -> dict[str, str]:
    done = bench("status", str(study.folder.path), "--json", cwd=Path.cwd())
    return {run["run_id"]: run["state"] for run in json.loads(done.stdout)["runs"]}


def commands(folder: Path, words: str, *, ranks: int = 1, repeats: int = 1, **cluster: Any) -> PlannedStudy:
    """Plan a study of a shell command: torchrun starts several ranks, a script a single process."""
    cluster = {"executor": "local", "time_limit": "2m", **cluster}
    axes = {"tasks_per_node": [ranks], "launcher": ["torchrun" if ranks > 1 else "own"]}
    workload = command(["bash", "-c", words, "bash", "{run_dir}"])
    text = matrix("own", cluster=cluster, axes=axes, workload=workload, repeats=repeats)
    return planned_study(folder, text)


def test_a_script_is_executed_by_hand(tmp_path):
    study = commands(tmp_path, 'touch "$1/done"')
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    script = study.script(study.runs[0].cell_id).absolute()
    done = run_program(["bash", script], env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("manual-*")
    assert (folder / "done").exists()
    assert run_program(["bash", script, folder], env=env).returncode == 1, "a second start in the folder"
    done = run_program(["bash", script, tmp_path / "new/folder"], env=env | {"BENCH_PYTHON": "nopython"})
    assert (done.returncode, (tmp_path / "new/folder/end.json").exists()) == (127, True)
    assert "there is no nopython: name the environment in cluster.setup" in done.stderr


def test_a_line_of_a_script_decides_what_runs(tmp_path):
    study = planned(tmp_path, ranks=[2], steps=4)
    script = study.script(study.runs[0].cell_id).absolute()
    text = script.read_text().replace('"steps_per_epoch": 4,', '"steps_per_epoch": 7,')
    script.write_text(text.replace("BENCH_PER_GPU_BATCH=4 ", "BENCH_PER_GPU_BATCH=8 "))
    write_program(tmp_path / "python", '#!/bin/bash\necho "$@"\n')
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = run_program(["bash", script, tmp_path / "by hand"], env=env, cwd=tmp_path)
    cell = read_cell(tmp_path / "by hand")
    assert (cell.workload["steps_per_epoch"], cell.per_gpu_batch, cell.world_size) == (7, 8, 2), done.stderr
    assert "ddp_scaling_bench.train" in done.stdout


def test_a_run_goes_on_without_its_bench_submit_and_is_not_started_again(tmp_path):
    study = commands(tmp_path, f'touch "$1/begun"; until [ -e {tmp_path}/go ]; do sleep 0.1; done', repeats=2)
    first, second = (run.run_id for run in study.runs)
    with Command("submit", str(study.folder.path)) as process:
        wait_for((study.folder.attempt(first, 1).path / "begun").exists, what="the first run")
        process.kill()
    assert states(study) == {first: "running", second: "planned"}
    (tmp_path / "go").touch()
    done = bench("submit", str(study.folder.path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert states(study) == {first: "completed", second: "completed"}
    assert [record.attempt for record in study.records().values()] == [1, 1]


def test_set_up_lines_and_variables_reach_the_program_literally(tmp_path):
    setup = ["export FROM_SETUP='a b'", "touch set-up-ran"]
    words = 'printf "%s|%s" "$FROM_SETUP" "$NCCL_DEBUG" >"$1/said"'
    study = commands(tmp_path, words, setup=setup, env={"NCCL_DEBUG": "$(touch planted) 'x"})
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = bench("submit", str(study.folder.path), cwd=tmp_path, **env)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "set-up-ran").exists()
    assert not (tmp_path / "planted").exists()
    folder = study.folder.attempt(study.runs[0].run_id, 1)
    assert (folder.path / "said").read_text() == "a b|$(touch planted) 'x"
    assert json.loads(folder.env.read_text())["env"]["NCCL_DEBUG"] == "$(touch planted) 'x"


def test_a_completed_run_whose_folder_was_deleted_is_started_again_and_a_deleted_script_is_an_error(tmp_path):
    (tmp_path / "m.yaml").write_text(
        matrix("gone", axes={"tasks_per_node": [1]}, workload=command("true", metrics="none"))
    )
    assert bench("plan", "m.yaml", cwd=tmp_path).returncode == 0
    assert bench("submit", "gone", cwd=tmp_path).returncode == 0
    study = tmp_path / "results/gone"
    shutil.rmtree(next((study / "runs").iterdir()))
    (run,) = answer("status", "gone", cwd=tmp_path)["runs"]
    assert (run["state"], run["reason"]) == (
        "failed",
        "the run's folder is missing: `bench submit --retry-failed` starts the run again",
    )
    assert bench("submit", "gone", "--retry-failed", cwd=tmp_path).returncode == 0
    (run,) = answer("status", "gone", cwd=tmp_path)["runs"]
    assert (run["state"], run["attempt"]) == ("completed", 2)
    shutil.rmtree(study / "runs")
    shutil.rmtree(study / "scripts")
    done = bench("submit", "gone", "--retry-failed", cwd=tmp_path)
    assert done.stderr.splitlines()[-1].endswith(
        "the script of its runs does not exist; plan the study again: bench plan m.yaml"
    )
