"""The CPU time of processes outside of the job, with invented and with real processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.measure.node import Job, ProcessTable, ancestors, foreign_cpu_s
from bench.measure.process_watch import ProcessWatch
from bench.study.files import write_json
from bench.study.processes import RANKS_SEEN, started_ranks
from tests.train.conftest import wait_for

#: A process burns this much CPU time and then waits for its input to close.
BURNT_S = 0.2
BURN = (
    "import sys, time\n"
    f"while time.process_time() < {BURNT_S}: pass\n"
    "print('burnt', flush=True)\n"
    "sys.stdin.read()\n"
)
KERNEL_THREAD = 0x00200000


class FakeProc:
    """A folder like /proc, in which processes are invented."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.table = ProcessTable(folder, clock=lambda pid: None)
        self.add(1, 0, name="systemd")
        self.machine("mnt:[1]", 0)

    def machine(self, namespace: str, ticks: int) -> None:
        link = self.folder / "self/ns/pid"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(namespace)
        (self.folder / "stat").write_text(f"cpu  {ticks - 30} 10 20 5000 7 7 7 0 0 0\n")

    def add(
        self,
        pid: int,
        parent: int,
        ticks: int = 0,
        *,
        children: int = 0,
        name: str = "a (b) c",
        flags: int = 0,
        started: int = 5,
        **files: str,
    ) -> None:
        here = self.folder / str(pid)
        here.mkdir(exist_ok=True)
        stat = (
            f"{pid} ({name}) S {parent} 1 1 0 -1 {flags} 0 0 0 0 {ticks} 0 {children} 0 20 0 1 0 {started} 9"
        )
        (here / "stat").write_text(stat)
        for file, text in files.items():
            (here / file).write_text(text)

    def remove(self, pid: int) -> None:
        for path in (self.folder / str(pid)).iterdir():
            path.unlink()
        (self.folder / str(pid)).rmdir()

    def job(self, pid: int, **env: str) -> Job:
        return Job(self.table, env, pid=pid)


@pytest.fixture
def proc(tmp_path):
    return FakeProc(tmp_path)


def test_the_launchers_tree_is_the_job_and_what_stands_above_it_waits(proc):
    proc.add(10, 1, name="bash")
    proc.add(20, 10, name="torchrun")
    proc.add(30, 20)
    proc.add(31, 20)
    proc.add(40, 10, 100, name="another program of the shell")
    before = proc.table.snapshot()
    proc.add(10, 1, 5, name="bash")
    proc.add(20, 10, 7)
    proc.add(30, 20, 300)
    proc.add(31, 20, 300)
    proc.add(32, 31, 50, started=9)  # a worker of the data loader, which started in the window
    proc.add(40, 10, 125, name="another program of the shell")
    after = proc.table.snapshot()
    assert foreign_cpu_s(before, after, proc.job(30, LOCAL_RANK="0")) == 0.25
    # Without a launcher, the parent's other children are not the job's.
    assert foreign_cpu_s(before, after, proc.job(30)) == pytest.approx(0.25 + 3.0 + 0.5)


def test_slurms_step_is_the_root_of_the_job(proc):
    proc.add(5, 1, name="slurmstepd")
    proc.add(20, 5, name="torchrun")
    proc.add(21, 5, name="another task of the step")
    proc.add(30, 20)
    before = proc.table.snapshot()
    proc.add(21, 5, 90)
    assert foreign_cpu_s(before, proc.table.snapshot(), proc.job(30, LOCAL_RANK="0")) == 0.0


@pytest.mark.parametrize(
    ("files", "foreign_s"),
    [
        ({"cgroup": "0::/system.slice/slurmstepd.scope/job_77/step_0/user/task_0\n"}, 0.0),
        ({"cgroup": "4:memory:/slurm/uid_1/job_77\n1:name=systemd:/\n"}, 0.0),
        ({"cgroup": "0::/system.slice/slurmstepd.scope/job_770/step_0\n"}, 1.0),
        ({"environ": "PATH=/bin\0SLURM_JOB_ID=77\0HOME=/"}, 0.0),
        ({"environ": "PATH=/bin\0SLURM_JOB_ID=770\0"}, 1.0),
        ({"environ": "MY_SLURM_JOB_ID=77\0"}, 1.0),
        ({}, 1.0),
    ],
)
def test_other_processes_of_the_slurm_job_are_found_by_cgroup_or_environment(proc, files, foreign_s):
    proc.add(30, 1)
    proc.add(50, 1, **files)
    before = proc.table.snapshot()
    proc.add(50, 1, 100)
    assert foreign_cpu_s(before, proc.table.snapshot(), proc.job(30, SLURM_JOB_ID="77")) == foreign_s


def test_processes_that_began_or_ended_in_between_are_counted_once(proc):
    proc.add(30, 1)
    proc.add(60, 1, 1000, children=5000, name="make")
    proc.add(61, 60, 200, children=40)  # ends; its parent inherits 200 + 40 and what it used since
    proc.add(62, 61, 30)  # ends with it
    before = proc.table.snapshot()
    proc.remove(61)
    proc.remove(62)
    proc.add(60, 1, 1001, children=5000 + 270 + 80, name="make")
    proc.add(63, 60, 7, children=2, started=9)
    after = proc.table.snapshot()
    assert foreign_cpu_s(before, after, proc.job(30)) == pytest.approx(0.01 + 0.80 + 0.09)


def test_an_id_that_was_used_again_is_another_process(proc):
    proc.add(30, 1)
    proc.add(50, 1, 1000, started=5)
    before = proc.table.snapshot()
    proc.add(50, 1, 3, started=8)
    assert foreign_cpu_s(before, proc.table.snapshot(), proc.job(30)) == 0.03


def test_kernel_threads_and_inherited_children_are_not_counted(proc):
    proc.add(30, 1)
    proc.add(70, 1, name="kworker/0:1", flags=KERNEL_THREAD)
    proc.add(71, 1, name="slurmd")
    before = proc.table.snapshot()
    proc.add(1, 0, children=9000, name="systemd")
    proc.add(70, 1, 900, name="kworker/0:1", flags=KERNEL_THREAD)
    proc.add(71, 1, 4, children=8000, name="slurmd")
    assert foreign_cpu_s(before, proc.table.snapshot(), proc.job(30)) == 0.04


def test_hidden_processes_are_counted_only_if_the_node_owns_the_machine(proc):
    proc.add(30, 1)
    proc.remove(1)  # the mount option hidepid hides the processes of other users
    proc.machine("pid:[4026531836]", 1000)
    before = proc.table.snapshot()
    proc.add(30, 1, 100)
    proc.machine("pid:[4026531836]", 1000 + 100 + 60)
    after = proc.table.snapshot()
    assert foreign_cpu_s(before, after, proc.job(30)) == 0.6
    proc.machine("pid:[4026532999]", 2000)
    assert foreign_cpu_s(before, proc.table.snapshot(), proc.job(30)) is None


def test_a_real_busy_process_is_foreign_to_its_sibling_and_belongs_to_its_parent():
    table = ProcessTable()
    with busy() as sibling:
        before = table.snapshot()
        with busy() as child:
            after = table.snapshot()
    assert before.is_complete
    assert child not in before.processes
    # Without the other programs of this machine.
    family = {1, os.getpid(), sibling, child, *ancestors(os.getpid(), after.processes)}
    before, after = (
        shot._replace(processes={pid: one for pid, one in shot.processes.items() if pid in family})
        for shot in (before, after)
    )
    assert foreign_cpu_s(before, after, Job(table, {}, pid=sibling)) >= BURNT_S - 0.02  # two of its ticks
    assert foreign_cpu_s(before, after, Job(table, {})) == 0.0


@contextmanager
def busy() -> Iterator[int]:
    """Yield the id of a child process that has burnt CPU time and sleeps now."""
    child = subprocess.Popen([sys.executable, "-S", "-c", BURN], stdin=-1, stdout=-1)
    assert child.stdout is not None
    assert child.stdout.readline() == b"burnt\n"
    yield child.pid
    child.communicate()


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
    assert (started.as_planned, started.error) == (True, None)
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
    assert started.error is not None
    assert started.error.message == (
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
