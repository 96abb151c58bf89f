"""A second process returns the same result, whatever happens to it."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from analysis.processes import in_background, share
from tests.analysis import studies

#: More bytes than a pipe holds: the second process waits until they are read.
LARGE = 5 << 20


def test_the_work_and_work_within_it_run_in_another_process_and_errors_are_raised_here():
    pid, inner, content = in_background(lambda: (os.getpid(), in_background(os.getpid)(), b"x" * LARGE))()
    assert pid == inner != os.getpid()
    assert len(content) == LARGE
    with pytest.raises(ZeroDivisionError):
        in_background(lambda: 1 / 0)()


@pytest.mark.parametrize("size", [LARGE, 0], ids=["while it sends", "before it sends"])
def test_a_process_that_is_killed_is_replaced_by_this_one(tmp_path, size):
    first, note = os.getpid(), tmp_path / "pid"

    def work() -> tuple[int, bytes]:
        if os.getpid() != first:
            note.write_text(str(os.getpid()))
            if not size:
                os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid(), b"x" * size

    finish = in_background(work)
    while not (note.exists() and note.read_text()):
        time.sleep(0.01)
    if size:
        child = int(note.read_text())
        while "pipe" not in Path(f"/proc/{child}/wchan").read_text() and _state(child) != "S":
            time.sleep(0.01)
        os.kill(child, signal.SIGKILL)
    assert finish()[0] == first


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_two_processes_share_tasks_and_each_is_done_once(tmp_path):
    first, done = os.getpid(), tmp_path / "done"

    def task(number: int) -> int:
        with open(done, "a") as file:
            file.write(f"{number} {os.getpid()}\n")
        while os.getpid() == first and len({line.split()[1] for line in done.read_text().splitlines()}) < 2:
            time.sleep(0.01)  # until the other process has begun
        return number

    assert share([partial(task, number) for number in range(20)])() == [*range(20)]
    numbers = [int(line.split()[0]) for line in done.read_text().splitlines()]
    assert sorted(numbers) == [*range(20)]


def test_the_tasks_of_a_process_that_is_killed_are_done_by_this_one(tmp_path):
    first, note = os.getpid(), tmp_path / "pid"

    def task(number: int) -> tuple[int, int]:
        if os.getpid() != first:
            note.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        return number, os.getpid()

    finish = share([partial(task, number) for number in range(5)])
    while not note.exists():
        time.sleep(0.01)
    assert finish() == [(number, first) for number in range(5)]


def test_a_second_process_ends_with_the_first_one():
    program = (
        "import os, signal\n"
        "from analysis.processes import in_background\n"
        f"in_background(lambda: b'x' * {LARGE})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    # The pipe of the output is closed only if no process has it any more.
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, cwd=Path(__file__).parents[2])
    assert done.returncode == -signal.SIGKILL


def test_files_that_were_changed_are_found_by_both_processes(tmp_path, monkeypatch):
    from analysis.data import load

    path = studies.finished(tmp_path / "s", studies.strong(sizes=(1, 2)), repeats=2)
    runs = [run.run_id for run in load.load_study(path).runs]
    for run in (runs[0], runs[-1]):
        with (path / f"runs/{run}/attempt-1/metrics.csv").open("a") as file:
            file.write("\n")
    monkeypatch.setattr(load, "_MANY", 2)
    found = load.load_study(path)
    damaged = [run.run_id for run in found.runs if "is not as the run wrote it" in run.reason]
    assert damaged == [runs[0], runs[-1]]
    assert all((run.values_folder is None) == (run.run_id in damaged) for run in found.runs)
