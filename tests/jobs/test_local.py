"""Execution on this machine, with real ranks and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.commands.options import pending
from bench.errors import BenchError
from bench.jobs.local.scheduler import LocalScheduler
from bench.jobs.scheduler import Callbacks
from bench.plan import make_plan, write_plan
from bench.study.layout import StudyFolder
from bench.study.plan_json import PlannedStudy, open_study
from bench.study.records import METRICS_COLUMNS, RANKS_COLUMNS, STEPS_COLUMNS
from bench.study.verify import verify_run
from tests.cluster.containers import wait_for
from tests.common import run_program
from tests.matrices import BARE, matrix, training


def planned(
    folder: Path, ranks=(1, 2), *, steps=4, epochs=2, repeats=1, limit="2m", **cluster: Any
) -> PlannedStudy:
    """Plan a study of tiny runs in a folder with an awkward name."""
    root = folder / "it's a folder"
    root.mkdir(exist_ok=True)
    path = root / "tiny.yaml"
    cluster = {"executor": "local", "time_limit": limit, **cluster}
    workload = training(
        parameters="20k", **BARE | {"steps_per_epoch": steps, "epochs": epochs, "val_steps": 1}
    )
    path.write_text(
        matrix(cluster=cluster, axes={"tasks_per_node": [*ranks]}, workload=workload, repeats=repeats)
    )
    return open_study(write_plan(make_plan(path), root / "results"))


def submitted(study: PlannedStudy, **options) -> None:
    executor = LocalScheduler(study)
    seen = executor.poll()
    executor.submit(pending(study.runs, seen, **options), seen=seen, callbacks=Callbacks())


def states(study: PlannedStudy) -> dict[str, str]:
    return {run_id: str(record.state) for run_id, record in LocalScheduler(study).poll().items()}


def harness(study: PlannedStudy) -> subprocess.Popen:
    """Start `bench submit`; its output goes to the file :func:`said`."""
    words = [sys.executable, "-m", "bench", "submit", str(study.folder.path)]
    with said(study).open("w") as output:
        return subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


def said(study: PlannedStudy) -> Path:
    return study.folder.path.parent / "said.txt"


def ranks_of(process: psutil.Process, *, count: int) -> list[psutil.Process]:
    """Return the rank processes of a harness (server, agent, ranks)."""
    try:
        agents = [child for server in process.children() for child in server.children()]
        ranks = [rank for agent in agents for rank in agent.children()]
    except psutil.NoSuchProcess:
        return []
    return ranks if len(ranks) == count else []


def test_every_run_completes_in_the_planned_order_and_leaves_all_files(tmp_path):
    study = planned(tmp_path)
    submitted(study)
    assert set(states(study).values()) == {"completed"}
    started = [event["run_id"] for event in study.ledger.events() if event["event"] == "started"]
    assert started == [run.run_id for run in study.runs]
    for run in study.runs:
        folder = study.folder.attempt(run.run_id, 1)
        names = {path.name for path in folder.path.iterdir()}
        assert names >= {"env.json", "end.json", "job.out", "job.err"}
        assert folder.metrics_csv.read_text().splitlines()[0] == ",".join(METRICS_COLUMNS)
        assert folder.ranks_csv.read_text().splitlines()[0] == ",".join(RANKS_COLUMNS)
        assert folder.steps_csv.read_text().splitlines()[0] == ",".join(STEPS_COLUMNS)
        verdict = verify_run(folder.path)
        assert verdict.passed, [str(check) for check in verdict.checks]
        content = json.loads(folder.run_json.read_text())
        described = [content[name] for name in ("study", "run_id", "repeat", "attempt")]
        assert described == ["tiny", run.run_id, run.repeat, 1]
        assert content["cell"]["world_size"] == study.cells[run.cell_id].world_size
        assert (content["state"], content["reason"], content["exit_code"]) == ("completed", "", 0)
        assert content["submitted_at"] <= content["started_at"] <= content["ended_at"]
    before = study.folder.ledger.read_bytes()
    submitted(study)
    assert study.folder.ledger.read_bytes() == before, "nothing is started again"
    # The script executed by hand has the same results.
    run = next(run for run in study.runs if "x2" in run.cell_id)
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    words = ["bash", study.script(run.cell_id), tmp_path / "by hand"]
    done = run_program(words, env=env)
    assert done.returncode == 0, done.stderr
    assert "2/2 ranks joined" in done.stdout
    ours = study.folder.attempt(run.run_id, 1).metrics_csv.read_text().splitlines()
    theirs = (tmp_path / "by hand" / "metrics.csv").read_text().splitlines()
    assert (theirs[0], len(theirs)) == (ours[0], len(ours))


def test_a_killed_rank_fails_its_run_with_the_reason_and_other_runs_continue(tmp_path):
    study = planned(tmp_path, ranks=[2], steps=400, epochs=50, repeats=2)
    process = harness(study)
    first = study.folder.attempt(study.runs[0].run_id, 1)
    try:
        wait_for(first.metrics_csv.exists, what="the first epoch")
        wait_for(lambda: ranks_of(psutil.Process(process.pid), count=2), what="both ranks")
        ranks = ranks_of(psutil.Process(process.pid), count=2)
        ranks[1].send_signal(signal.SIGKILL)
        wait_for(lambda: states(study)[study.runs[0].run_id] == "failed", what="the end")
        record = LocalScheduler(study).poll()[study.runs[0].run_id]
        assert "rank 1 was killed by SIGKILL" in record.reason
        rows = first.metrics_csv.read_text().splitlines()
        assert len(rows) > 1
        assert all(row.count(",") == len(METRICS_COLUMNS) - 1 for row in rows)
        wait_for(lambda: states(study)[study.runs[1].run_id] == "running", what="the next run")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=280)


def test_a_killed_harness_leaves_no_process_and_a_failed_run_with_the_reason(tmp_path):
    study = planned(tmp_path, ranks=[2], steps=400, epochs=50, repeats=2)
    process = harness(study)
    first, second = (run.run_id for run in study.runs)
    wait_for(study.folder.attempt(first, 1).metrics_csv.exists, what="the first epoch")
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 1 + 1 + 2, "the server, its agent, and as many ranks as asked for"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=280)
    assert alive == []
    record = LocalScheduler(study).poll()[first]
    assert (str(record.state), record.failure_class) == ("failed", "killed")
    assert record.reason == f"the `bench submit` process ({process.pid}) was killed during this run"
    content = json.loads(study.folder.attempt(first, 1).run_json.read_text())
    assert (content["state"], content["reason"]) == ("failed", record.reason)
    left = pending(study.runs, LocalScheduler(study).poll())
    assert [run.run_id for run in left] == [second]
    assert [run.run_id for run in pending(study.runs, study.records(), retry_failed=True)] == [first, second]


def test_a_study_is_submitted_once_and_continues_after_a_stop_with_the_remaining_runs(tmp_path):
    study = planned(tmp_path, ranks=[1], steps=200, epochs=5000, repeats=3)
    process = harness(study)
    first = study.folder.attempt(study.runs[0].run_id, 1)
    wait_for(first.metrics_csv.exists, what="the first epoch")
    with pytest.raises(BenchError) as caught:
        submitted(study)
    holder = f"pid {process.pid} on {os.uname().nodename}"
    assert str(caught.value) == (
        f"{study.folder.path}: another `bench submit` is running for this study ({holder}); "
        "wait until it ends, or stop it"
    )
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=280) == 130
    assert said(study).read_text().splitlines()[-1] == "stopped"
    record = study.records()[study.runs[0].run_id]
    assert (str(record.state), record.reason) == ("cancelled", "stopped by the user")
    assert [run.run_id for run in pending(study.runs, study.records())] == [run.run_id for run in study.runs]


def test_a_run_is_ended_at_its_time_limit_with_the_reason(tmp_path):
    study = planned(tmp_path, ranks=[2], steps=5000, epochs=1000, limit="1s")
    submitted(study)
    record = study.records()[study.runs[0].run_id]
    assert (str(record.state), record.failure_class) == ("failed", "time-limit")
    assert record.reason == "the time limit of 1 s was reached"


def test_retry_failed_makes_a_new_attempt_and_keeps_the_old_one(tmp_path):
    study = planned(tmp_path, ranks=[1])
    run_id, before = study.runs[0].run_id, study.records()
    study.ledger.append(
        "started", run_id=run_id, attempt=1, pid=2**22 - 1, pid_started=0.0, host=os.uname().nodename
    )
    study.folder.attempt(run_id, 1).path.mkdir(parents=True)
    assert states(study) == {run_id: "failed"}
    submitted(study)
    # A `bench submit` that chose its runs before this failure does not start the run again either.
    LocalScheduler(study).submit(study.runs, seen=before, callbacks=Callbacks())
    assert states(study) == {run_id: "failed"}
    assert study.records()[run_id].attempt == 1
    submitted(study, retry_failed=True)
    assert states(study) == {run_id: "completed"}
    assert study.records()[run_id].attempt == 2
    assert study.folder.attempt(run_id, 1).path.is_dir()


def test_set_up_lines_and_variables_reach_the_ranks_literally(tmp_path):
    setup = ["export FROM_SETUP='a b'", "touch set-up-ran"]
    study = planned(tmp_path, ranks=[1], setup=setup, env={"NCCL_DEBUG": "$(touch planted) 'x"})
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = run_program(
        [sys.executable, "-m", "bench", "submit", str(study.folder.path)], cwd=tmp_path, env=env
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "set-up-ran").exists()
    assert not (tmp_path / "planted").exists()
    content = json.loads(study.folder.attempt(study.runs[0].run_id, 1).env.read_text())
    assert content["env"]["NCCL_DEBUG"] == "$(touch planted) 'x"


def test_a_study_without_a_plan_is_refused(tmp_path):
    with pytest.raises(
        BenchError, match=r"plan\.json: the study's plan does not exist; give the folder of a study"
    ):
        open_study(StudyFolder(tmp_path))
    (tmp_path / "plan.json").write_text('{"cells": [{}], "runs": []}')
    with pytest.raises(BenchError, match=r"plan\.json: is not a plan that this version can read"):
        open_study(StudyFolder(tmp_path))
