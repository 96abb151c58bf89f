"""Ends of commands with the recorder: after the last window, in a hang, and without a step."""

import json
import os
import re
import threading
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from bench.jobs.contract import Status
from bench.jobs.end import end_of
from bench.jobs.heartbeats import stalled_ranks
from bench.study.found import read_findings
from bench.study.ledger import FailureClass, RunState
from bench.study.reasons import CompletedBut, TimeLimit
from ddp_scaling_bench import Recorder
from ddp_scaling_bench.checksums import write_sums
from ddp_scaling_bench.files import write_json
from ddp_scaling_bench.measure.failures import FAILURES, HostRank, LeftRank, LostConnection
from ddp_scaling_bench.run_folder import RunFolder
from tests.analysis.studies import make_cell
from tests.cluster.containers import wait_for
from tests.common import run_program
from tests.jobs.slurm_studies import Study, plan_study
from tests.matrices import matrix, slurm

LENGTHS = {"warmup_steps": 3, "steps_per_epoch": 10, "attribution_steps": 3, "epochs": 2}
BUILT_IN = make_cell(2, batch=4)
COMMAND = replace(BUILT_IN, planned_epochs=None, workload=LENGTHS)
ENDED = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
NOTES = {
    name: {"exit_code": code, "by": name, "time": ENDED.isoformat()}
    for name, code in {"limit": 143, "exit": 1, "measured": 0, "term": 143}.items()
}
LIMIT, AFTER = "the time limit was reached", "all windows are complete; afterwards: "
ODD_STEP = Status(job_id="7", state=RunState.COMPLETED, reasons=(CompletedBut(),))
FAILED = {"state": RunState.FAILED, "reasons": (TimeLimit(),)}
TIMEOUT = Status(job_id="7", failure_class=FailureClass.TIME_LIMIT, ended=ENDED, **FAILED)


@pytest.mark.parametrize(
    ("rows", "by", "status", "cell", "state", "reason"),
    [
        (["10,1", "10,1"], "limit", None, COMMAND, "completed", AFTER + LIMIT),
        (["10,1", "10,1"], "term", TIMEOUT, COMMAND, "completed", AFTER + LIMIT),
        (["10,1", "10,1"], "exit", None, COMMAND, "completed", AFTER + "exit code 1"),
        (["10,1", "10,1"], "measured", ODD_STEP, COMMAND, "completed", ""),
        (["10,1", "10,1"], "measured", None, COMMAND, "completed", ""),
        (["10,1", "10,1"], "term", None, COMMAND, "cancelled", "stopped by a signal (SIGTERM)"),
        (["10,1", "4,1"], "exit", None, COMMAND, "failed", "exit code 1"),
        (["10,1"], "limit", None, COMMAND, "failed", LIMIT),
        (["10,1", "10,nan"], "exit", None, COMMAND, "failed", "exit code 1"),
        (["10,1", "10,1"], "exit", None, BUILT_IN, "failed", "exit code 1"),
    ],
)
def test_a_run_counts_after_its_last_window(tmp_path, rows, by, status, cell, state, reason):
    folder = RunFolder(tmp_path)
    for path in (folder.metrics_csv, folder.ranks_csv, folder.steps_csv):
        path.write_text("\n".join(["steps,train_loss", *rows, ""]))
    write_sums(folder)
    write_json(folder.end, NOTES[by])
    end = end_of(folder, cell, status)
    assert (str(end.state), "; ".join(one.message for one in end.reasons)) == (state, reason)
    folder.metrics_csv.write_text("damaged")
    assert end_of(folder, cell, status).state != "completed"


STEP, LOOP = (12, "step"), (12, "loop")
IN_13 = ", the others are in step 13"
HANG, LATE = "stalled-ranks", "time-limit"


@pytest.mark.parametrize(
    ("places", "age_s", "reason", "cause"),
    [
        ([STEP, LOOP], 30, f"rank 1 on n1 has ended step 12{IN_13}", HANG),
        ([STEP, (12, "data")], 30, f"rank 1 on n1 waits for data after step 12{IN_13}", HANG),
        ([STEP, None], 30, f"rank 1 has begun no step{IN_13}", HANG),
        ([STEP, (9, "closed")], 30, f"rank 1 on n1 closed its recorder after 9 steps{IN_13}", HANG),
        ([STEP, *[LOOP] * 3, *[STEP] * 4], 30, f"ranks 1-3 on n1 have ended step 12{IN_13}", HANG),
        ([STEP, (12, "paused")], 30, f"rank 1 on n1 has stopped its clock after step 12{IN_13}", LATE),
        ([STEP, STEP], 30, "all ranks are in step 13", LATE),
        ([STEP, LOOP], 9, "", LATE),
        ([(1, "step"), (1, "loop")], 60, "", LATE),  # the first step took 5 s
        ([STEP, *[LOOP] * 64], 15, "", LATE),  # many ranks write every ten seconds
        ([(12, "closed")] * 2, 30, "", LATE),
        ([], 30, "", LATE),
    ],
)
def test_a_time_limit_names_the_ranks_that_hung(tmp_path, places, age_s, reason, cause):
    folder = leave_places(tmp_path, places, age_s)
    folder.err.write_text(
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-02 DUE TO TIME LIMIT ***\n"
    )
    end = end_of(folder, replace(COMMAND, world_size=len(places) or 2), TIMEOUT)
    said = f"no step since 03:03:{65 - age_s} UTC: {reason}"
    assert [one.message for one in end.reasons] == [said, LIMIT][not reason :]
    assert [*read_findings([one.as_json() for one in end.reasons])] == [*end.reasons]
    assert (end.cause.cause, "time_limit" in end.cause.remedy) == (cause, cause == LATE)


def leave_places(path: Path, places: list[tuple[int, str] | None], age_s: float) -> RunFolder:
    """Write the heartbeats of ranks; their first step took 5 s, and further ones 0.1 s."""
    for rank, place in enumerate(places):
        if place:
            beat, times = {"rank": rank, "host": "n1"}, {"first_time": 0, "time": 4.9 + 0.1 * place[0]}
            file = path / f"heartbeat.{rank}.json"
            write_json(file, {**beat, **times, "completed": place[0], "stage": place[1]})
            os.utime(file, (0, ENDED.timestamp() - age_s))
    (path / "heartbeat.99.json").write_text("{")
    return RunFolder(path)


LEFT, ENDED_FIRST = (LeftRank(1, "n2", 20),), HostRank(1, "n2")


@pytest.mark.parametrize(
    ("known", "place", "expected"),
    [
        ({"left": LEFT}, (20, "closed"), "rank 1 on n2 left the loop after 20 steps: it"),
        ({"ended": ENDED_FIRST}, (20, "closed"), "rank 1 on n1 closed its recorder after 20 steps"),
        ({"absent": (ENDED_FIRST,)}, (15, "step"), "no report from rank 1 on n2: it ended or was killed"),
    ],
)
def test_a_lost_connection_names_the_rank_that_left_the_loop(tmp_path, known, place, expected):
    folder = leave_places(tmp_path, [(20, "step"), place], 60)
    write_json(tmp_path / FAILURES.format(0), {"time": 1.0, "findings": [LostConnection(**known).as_json()]})
    closed = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1\n"
    folder.err.write_text(closed)
    write_json(folder.end, NOTES["exit"])
    end = end_of(folder, COMMAND, None)
    assert expected in end.reasons[0].message
    assert ("equally many steps" in end.cause.remedy) is ("absent" not in known)


def test_one_thread_writes_the_place_of_a_rank(tmp_path, monkeypatch):
    def place() -> tuple[int, str]:
        content = json.loads((tmp_path / "heartbeat.0.json").read_text())
        return content["completed"], content["stage"]

    before = threading.active_count()
    monkeypatch.setenv("BENCH_RUN_DIR", str(tmp_path))
    recorder = Recorder(warmup_steps=3, steps_per_epoch=4, attribution_steps=1, epochs=1)
    for number, _ in enumerate(recorder.batches([torch.ones(1)] * 20)):
        with recorder.step(update=number % 2 == 1):
            pass
    wait_for(lambda: place() == (10, "paused"), what="the place between two loops")
    assert (recorder.done, threading.active_count()) == (True, before + 1)
    if (child := os.fork()) == 0:
        os._exit(threading.active_count() - 1)
    assert os.waitpid(child, 0)[1] == 0
    recorder.close()
    assert (place(), threading.active_count()) == ((10, "closed"), before)


NO_STEP = """\
import sys, torch
from ddp_scaling_bench import Recorder
recorder = Recorder(torch.nn.Linear(1, 1))
for batch in recorder.batches([torch.ones(1)] * 3):
    continue
"""


@pytest.mark.parametrize(
    ("rest", "reason"),
    [
        ("", "the training took no step"),
        ("sys.exit('no such file: a.pt')", "exit code 1"),
        ("raise ValueError('planted')", "ValueError: planted"),
    ],
)
def test_a_training_without_a_step_is_named_unless_it_failed(server, tmp_path, rest, reason):
    folder, script = RunFolder(tmp_path), tmp_path / "train.py"
    script.write_text(NO_STEP + rest)
    done = server.start(tmp_path, [{"BENCH_RUN_DIR": str(tmp_path)}], "script", [str(script)]).finish()
    folder.err.write_text(done.err[0])
    write_json(folder.end, {"exit_code": done.codes[0], "by": "exit"})
    assert end_of(folder, COMMAND, None).reasons[0].message == reason


#: Rank 1 hangs, or leaves the loop, or all train until they are stopped. A rank that loses the one that hung ends
#: at once: gloo's threads can abort it while Python ends. Rank 1 is a fork, which saves an import of torch; without DDP,
#: there is no import of its compiler.
TRAIN = """\
import os, sys, time, torch, torch.distributed as dist
from ddp_scaling_bench import Recorder
torch.set_num_threads(1)
rank = "0" if os.fork() else "1"
os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2")
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
with Recorder(model) as recorder:
    for number, batch in enumerate(recorder.batches(iter(lambda: torch.ones(2, 4), None))):
        if dist.get_rank() == 1 and number == 12:
            if sys.argv[1] == "hang": time.sleep(10_000)
            if sys.argv[1] == "leave": break
        with recorder.step():
            try:
                model(batch).sum().backward()
                dist.all_reduce(model.weight.grad)
            except RuntimeError:
                if sys.argv[1] == "hang": os._exit(1)
                raise
            time.sleep(0.05)
"""
SAID = {
    "hang": (r"no step since \S+ UTC: rank 1 on \S+ has ended step 12, the others are in step 13;.*", HANG),
    "leave": (
        r"rank 0 on \S+: lost the con.*: rank 1 on \S+ left the loop after 12 steps: it.*",
        "lost-connection",
    ),
    "on": (f"{AFTER}.* time limit.*", None),
}
HERE = {"executor": "local", "time_limit": "5m"}, ["leave"]
THERE = slurm(exclusive=False, time_limit="5m", env={"GLOO_SOCKET_IFNAME": "eth0"}), ["hang", "on"]


def hangs(folder: RunFolder) -> bool:
    """Return whether its ranks have hung after step 12 for long enough."""
    found = stalled_ranks(folder, 2, limited=datetime.now(UTC))
    return found is not None and "step 12" in found.message


def end_in_time(study: Study) -> None:
    """Let the runs of a study reach their time limit once one hangs and the other has been measured."""
    runs = {run.cell_id.rpartition(".")[2]: run.run_id for run in study.planned.runs}
    wait_for(lambda: hangs(study.attempt(runs["hang"])), what="ranks that hang")
    wait_for(study.attempt(runs["on"]).sums.exists, what="the last window")
    for run_id in runs.values():
        words = ["scontrol", "update", f"JobId={study.record(run_id).job_id}", "EndTime=now+1"]
        run_program(words, env={**os.environ, **study.environment}, check=True)


@pytest.mark.slow
@pytest.mark.parametrize(("cluster", "words"), [HERE, pytest.param(*THERE, marks=pytest.mark.cluster)])
def test_ranks_that_hang_leave_or_train_on_are_named(request, tmp_path, monkeypatch, cluster, words):
    is_here = cluster["executor"] == "local"
    environment = {} if is_here else request.getfixturevalue("running_cluster").environment
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN)
    commands = [{"name": word, "run": f"python train.py {word}"} for word in words]
    axes = {"nodes": [1], "tasks_per_node": [2], "launcher": ["own"], "command": commands}
    workload = {"device": "cpu", "metrics": "recorder", **LENGTHS}
    study = plan_study(tmp_path, matrix(cluster=cluster, axes=axes, workload=workload), environment)
    assert study.bench("submit", "STUDY").returncode == is_here
    if not is_here:
        end_in_time(study)
        study.bench("submit", "STUDY", "--wait")
    for run in study.planned.runs:
        word = run.cell_id.rpartition(".")[2] if len(words) > 1 else words[0]
        record, (reason, cause) = study.record(run.run_id), SAID[word]
        assert re.fullmatch(reason, record.reason), record.reason
        assert (record.state, record.cause) == ("failed" if cause else "completed", cause)
        assert not cause or "--time" not in study.bench("doctor", f"{study.folder}/runs/{run.run_id}").stdout
