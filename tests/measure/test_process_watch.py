"""The ranks that a command starts are counted from the environment of its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.measure.process_watch import ProcessWatch
from bench.study.files import write_json
from bench.study.processes import RANKS_SEEN, started_ranks
from tests.workload.conftest import wait_for

#: Start N processes as torchrun does. Each executes the remaining words, or train.py.
LAUNCHER = """\
import os, subprocess, sys, uuid
count, *words = sys.argv[1:]
run_id = str(uuid.uuid4())
own = {"TORCHELASTIC_RUN_ID": run_id} if "launcher.py" in sys.argv[0] else {}
for rank in range(int(count)):
    env = {"RANK": str(rank), "WORLD_SIZE": count, "LOCAL_RANK": str(rank)} | own
    subprocess.Popen(words or [sys.executable, "train.py"], env=os.environ | env)
for rank in range(int(count)):
    os.wait()
"""
#: A rank that has loaded torch, as far as /proc shows. It forks two helpers.
TRAIN = """\
import mmap, os, time
with open("libtorch_cpu.so", "rb") as file:
    loaded = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
if os.fork() and os.fork():
    open(f"ready.{os.getpid()}", "w").close()
time.sleep(60)
"""
RANK = f"{sys.executable} train.py"
LAUNCH = f"{sys.executable} launcher.py"
#: A launcher that sets no variable but RANK, WORLD_SIZE and LOCAL_RANK.
PLAIN_LAUNCH = f"{sys.executable} plain.py"


@contextmanager
def running(folder: Path, commands: list[str], trainings: int):
    """Start ``commands`` as the tasks of one step, and wait until ``trainings`` ranks run."""
    (folder / "launcher.py").write_text(LAUNCHER)
    (folder / "plain.py").write_text(LAUNCHER)
    (folder / "train.py").write_text(TRAIN)
    (folder / "libtorch_cpu.so").write_bytes(b"x")
    (folder / "run.sh").write_text(f"{LAUNCH} 2\n")
    started = []
    try:
        for rank, command in enumerate(commands):
            own = {"RANK": str(rank), "WORLD_SIZE": str(len(commands)), "LOCAL_RANK": str(rank)}
            env = os.environ | own | {"BENCH_RUN_DIR": str(folder), "SLURM_STEP_ID": "0"}
            words = ["bash", "-c", command]
            started.append(subprocess.Popen(words, env=env, cwd=folder, start_new_session=True))
        wait_for(lambda: len(list(folder.glob("ready.*"))) >= trainings, "the start of the ranks")
        yield
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


ORDINARY = {
    "train": ([f"{RANK}; true"] * 2, 2),
    "exec": ([f"exec {RANK}"] * 3, 3),
    "env": ([f"env X=1 {RANK}"] * 2, 2),
    "another-variable": ([f"LOCAL_RANK=0 {RANK}"] * 2, 2),
    "pipe": ([f"{RANK} 2>&1 | cat"] * 2, 2),
    "launcher-of-one-rank": ([f"{LAUNCH} 1"], 1),
    "monitor-with-a-rank": ([f"RANK=0 WORLD_SIZE=1 sleep 60 & {RANK}; true"] * 2, 2),
}
NESTED = {
    "launcher": ([f"{LAUNCH} 2"] * 2, 4),
    "script": (["bash run.sh"] * 2, 4),
    "cleared": ([f"env -i PATH=$PATH {LAUNCH} 2; true"] * 2, 4),
    "twice": ([f"{LAUNCH} 2 & {LAUNCH} 2"], 4),
    "launcher-within-torch": ([f"{RANK} & {LAUNCH} 1"] * 2, 4),
    "orphaned-launchers": ([f"({LAUNCH} 2 &); sleep 60"] * 2, 4),
    "mpirun": ([f"for i in 0 1; do OMPI_COMM_WORLD_RANK=$i {RANK} & done; wait"], 2),
    "srun": ([f"for i in 0 1; do SLURM_STEP_ID=7 SLURM_PROCID=$i {RANK} & done; wait"] * 2, 4),
    "two-trainings": ([f"{RANK} & {RANK} & wait"] * 2, 4),
    "second-one-in-the-background": ([f"({RANK} &); {RANK}; true"] * 2, 4),
    "its-own-world": ([f"{PLAIN_LAUNCH} 2"] * 2, 4),
}


def count(folder: Path, planned: int):
    """Look twice at the processes of a run, and compare them with the plan."""
    watch = ProcessWatch(str(folder))
    watch.look(1.0)
    watch.look(2.0)
    write_json(folder / RANKS_SEEN.format("n1"), {"schema": 1, "ranks": watch.ranks()})
    return started_ranks(folder, planned)


@pytest.mark.parametrize("name", ORDINARY)
def test_ranks_with_helpers_are_counted_once(tmp_path, name):
    commands, trainings = ORDINARY[name]
    with running(tmp_path, commands, trainings):
        started = count(tmp_path, len(commands))
    assert (started.as_planned, started.error) == (True, "")
    assert sorted((one.rank, one.world_size) for one in started.seen) == [
        (rank, len(commands)) for rank in range(len(commands))
    ]


@pytest.mark.parametrize("name", NESTED)
def test_a_launcher_within_a_task_is_found(tmp_path, name):
    commands, trainings = NESTED[name]
    with running(tmp_path, commands, trainings):
        started = count(tmp_path, len(commands))
    assert started.as_planned is False
    assert len(started.seen) == trainings


def seen_on(folder: Path, node: str, *ranks: tuple[int, int, float, float, int]) -> None:
    """Write the ranks of a node: rank, world size, first and last time, and the task."""
    keys = ("rank", "world_size", "first", "last", "task")
    rows = [dict(zip(keys, rank, strict=True)) | {"pid": 50 + i} for i, rank in enumerate(ranks)]
    content = {"schema": 1, "ranks": [row | {"command": "python a.py"} for row in rows]}
    write_json(folder / RANKS_SEEN.format(node), content)


def test_ranks_that_follow_each_other_are_no_doubles_and_a_missing_rank_is_not_judged(tmp_path):
    assert started_ranks(tmp_path, 2).as_planned is None
    seen_on(tmp_path, "n1", (0, 2, 1.0, 5.0, 7), (0, 2, 6.0, 9.0, 7))
    assert started_ranks(tmp_path, 2).as_planned is None
    seen_on(tmp_path, "n2", (1, 2, 1.0, 9.0, 7))
    assert started_ranks(tmp_path, 2).as_planned is True


@pytest.mark.parametrize(
    ("n1", "n2", "example"),
    [
        # at the same time
        ([(0, 2, 1.0, 5.0, 7), (0, 2, 4.0, 9.0, 7)], [(1, 2, 1.0, 9.0, 7)], "50 0 n1, 51 0 n1"),
        # one after the other, of two tasks or on two nodes
        ([(0, 2, 1.0, 5.0, 7), (0, 2, 6.0, 9.0, 8)], [(1, 2, 1.0, 9.0, 7)], "50 0 n1, 51 0 n1"),
        ([(0, 2, 1.0, 5.0, 7)], [(1, 2, 1.0, 9.0, 7), (0, 2, 10.0, 11.0, 7)], "50 0 n1, 51 0 n2"),
        # both ranks by one task
        ([(0, 2, 1.0, 5.0, 7), (1, 2, 1.0, 5.0, 7)], [], "50 0 n1, 51 1 n1"),
        ([(0, 2, 1.0, 5.0, 7)], [(0, 1, 1.0, 9.0, 7)], "50 0 of 1 n2"),
    ],
)
def test_other_ranks_than_planned_are_named(tmp_path, n1, n2, example):
    seen_on(tmp_path, "n1", *n1)
    seen_on(tmp_path, "n2", *n2)
    started = started_ranks(tmp_path, 2)
    assert started.as_planned is False
    ranks = []
    for one in example.split(", "):
        pid, *rank, node = one.split()
        ranks.append(f"rank {' '.join(rank)} is `python a.py` (process {pid} on {node})")
    assert started.error == (
        f"the command started other ranks than planned: {started.found} instead of 2; {', and '.join(ranks)}. Let "
        "the command start one training process, without a launcher: bench starts the command once per rank. "
        "Unset RANK and WORLD_SIZE for helpers"
    )


REPLACE = """\
open("ready.1", "w").close()
while not os.path.exists("go"):
    time.sleep(0.02)
os.execve("/bin/sleep", ["sleep", "60"], {"PATH": "/bin"})
"""


def test_a_rank_that_replaces_its_environment_is_not_judged(tmp_path):
    (tmp_path / "replace.py").write_text(TRAIN.split("if os.fork")[0] + REPLACE)
    command = f"exec {sys.executable} replace.py"
    watch = ProcessWatch(str(tmp_path))
    with running(tmp_path, [command], 1):
        watch.look(1.0)
        assert len(watch.ranks()) == 1
        (tmp_path / "go").touch()
        wait_for(lambda: [watch.look(2.0), watch.ranks()][1] == [], "the end of the rank")


def test_processes_of_another_run_are_not_counted(tmp_path):
    with running(tmp_path, [RANK], 1):
        watch = ProcessWatch(str(tmp_path / "other"))
        watch.look(1.0)
    assert watch.ranks() == []


def test_the_watch_ends_with_the_process_that_it_is_given(tmp_path):
    words = [sys.executable, "-P", "-m", "ddp_scaling_bench.start", "measure.process_watch", str(tmp_path)]
    with running(tmp_path, [RANK], 1):
        first = subprocess.Popen(["sleep", "60"])
        watch = subprocess.Popen([*words, str(first.pid)])
        wait_for(lambda: list(tmp_path.glob("processes.*.json")), "a file")
        first.kill()
        first.wait()
        assert watch.wait(timeout=60) == 0
    assert started_ranks(tmp_path, 1).as_planned is True
