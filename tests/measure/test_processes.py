"""The CPU time of processes outside of the job, with invented and with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.measure.node import Job, ProcessTable, ancestors, foreign_cpu_s

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
