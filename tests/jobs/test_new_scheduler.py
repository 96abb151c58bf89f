"""A new scheduler is one file, one template and one entry, and the engine submits exactly once with it too."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.common import run_program, write_program
from tests.matrices import command, matrix
from tests.project.test_extending import changed_files, copy_program

#: A queue of this machine, as `at` is: ``qq submit NAME SCRIPT FOLDER``, ``qq list``, ``qq cancel ID ...``. Its
#: state is a file that a lock protects; queued jobs are started by whoever calls it, and by jobs that end.
QQ = """\
#!{python} -I
import fcntl, json, os, signal, subprocess, sys, time
from contextlib import contextmanager

HOME, LIMIT, SLOTS = {home!r}, 4, 2

@contextmanager
def queue():
    with open(HOME + "/lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            jobs = json.load(open(HOME + "/jobs"))
        except FileNotFoundError:
            jobs = []
        yield jobs
        with open(HOME + "/new", "w") as file:
            json.dump(jobs, file)
        os.replace(HOME + "/new", HOME + "/jobs")

def count(jobs, *states):
    return sum(job["state"] in states for job in jobs)

def alive(job):
    try:
        return open(f"/proc/{{job['pid']}}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

def start_queued(jobs):
    for job in jobs:
        if job["state"] == "running" and not alive(job):
            job["state"] = "cancelled"
    for job in [job for job in jobs if job["state"] == "queued"][: SLOTS - count(jobs, "running")]:
        subprocess.Popen([*{me!r}, "run", str(job["id"])], start_new_session=True, stdin=subprocess.DEVNULL,
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

def submit(name, script, folder):
    with queue() as jobs:
        if count(jobs, "queued", "running") >= LIMIT:
            print("qq: the queue is full", file=sys.stderr)
            return 3
        job = {{"id": len(jobs) + 1, "name": name, "script": script, "folder": folder, "state": "queued"}}
        jobs.append(job)
    with queue() as jobs:
        start_queued(jobs)
    time.sleep(0.03)
    print(job["id"], flush=True)

def run(number):
    with queue() as jobs:
        job = jobs[int(number) - 1]
        if job["state"] != "queued" or count(jobs, "running") >= SLOTS:
            return
        job.update(state="running", pid=os.getpid(), started=time.time())
    with open(job["folder"] + "/job.out", "w") as out, open(job["folder"] + "/job.err", "w") as err:
        env = {{**os.environ, "QQ_JOB": number}}
        code = subprocess.call(["bash", job["script"], job["folder"]], stdout=out, stderr=err, env=env)
    with queue() as jobs:
        jobs[int(number) - 1].update(state="done", code=code, ended=time.time())
        start_queued(jobs)

def show():
    with queue() as jobs:
        start_queued(jobs)
        print(json.dumps(jobs))

def cancel(*numbers):
    with queue() as jobs:
        for job in (jobs[int(number) - 1] for number in numbers):
            if job["state"] == "running":
                os.killpg(job["pid"], signal.SIGKILL)
            if job["state"] in ("queued", "running"):
                job["state"] = "cancelled"
        start_queued(jobs)
    time.sleep(0.03)

sys.exit({{"submit": submit, "run": run, "list": show, "cancel": cancel}}[sys.argv[1]](*sys.argv[2:]))
"""
SCHEDULER = '''
"""The scheduler qq, a queue of this machine."""

import json
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from ddp_scaling_bench.errors import UnavailableError

from ..study.ledger import FailureClass, RunState
from .contract import Job, RefusedError, Scheduler, Status, UncertainError

_STATES = {
    "queued": RunState.QUEUED,
    "running": RunState.RUNNING,
    "done": RunState.COMPLETED,
    "cancelled": RunState.CANCELLED,
}


class FullError(RefusedError):
    """The queue is full."""

    queue_is_full = True


class Queue(Scheduler):
    """Start, watch and cancel jobs with qq."""

    poll_s = 0.2

    def submit(self, job: Job) -> str:
        done = self._call(*self._words(job))
        if done.returncode == 3:
            raise FullError(done.stderr.strip())
        if not done.stdout.strip().isdecimal():
            raise UncertainError(f"qq: no answer ({done.stderr.strip()})")
        return done.stdout.strip()

    def poll(self, jobs: Mapping[str, str]) -> dict[str, Status]:
        return {one["name"]: _status(one) for one in json.loads(self._call("list").stdout) if one["name"] in jobs}

    def cancel(self, ids: Sequence[str]) -> None:
        self._call("cancel", *ids)

    def words(self, job: Job) -> str:
        return shlex.join(["qq", *self._words(job)])

    def _words(self, job: Job) -> list[str]:
        return ["submit", job.name, str(job.script.absolute()), str(job.folder.path.absolute())]

    def _call(self, *words: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(["qq", *words], capture_output=True, text=True, pass_fds=self.held)
        except OSError as error:
            raise UnavailableError(f"qq: {error.strerror}") from None


def _status(job: dict) -> Status:
    state, code = _STATES[job["state"]], job.get("code")
    failure_class = FailureClass.CANCELLED if state is RunState.CANCELLED else None
    if code:
        state, failure_class = RunState.FAILED, FailureClass.BAD_EXIT
    started, ended = (
        datetime.fromtimestamp(job[name], UTC) if name in job else None for name in ("started", "ended")
    )
    return Status(
        job_id=str(job["id"]),
        state=state,
        failure_class=failure_class,
        exit_code=code,
        started=started,
        ended=ended,
    )


SCHEDULER = Queue
'''
TEMPLATE = """#!/bin/bash
cell={{ cell_id }}
run_dir=$1
{% include "gate.j2" %}
claim_folder "$run_dir" "$QQ_JOB" 0
python={{ python }}
{% include "program.j2" %}
"${command[@]}"
code=$?
printf '{"exit_code": %d}' "$code" >"$run_dir/end.json"
exit "$code"
"""
ENTRY = '    "qq": SchedulerSpec(template="qq.sh.j2", keys=frozenset({"partition"}), queues=True),\n'


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the program with the new scheduler and without Slurm's; qq is on PATH."""
    copy_program(tmp_path)
    entries = tmp_path / "bench/matrix/schedulers.py"
    entries.write_text(entries.read_text().replace('    "ssh": ', f'{ENTRY}    "ssh": '))
    (tmp_path / "bench/jobs/qq.py").write_text(SCHEDULER)
    (tmp_path / "slurm_templates/qq.sh.j2").write_text(TEMPLATE)
    assert changed_files(tmp_path) == [
        *("bench/jobs/qq.py", "bench/matrix/schedulers.py", "slurm_templates/qq.sh.j2")
    ]
    for name in ("client", "scheduler"):
        (tmp_path / f"bench/jobs/slurm/{name}.py").unlink()
    (tmp_path / "home").mkdir()
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/qq"
    me = [sys.executable, "-I", str(program)]
    write_program(program, QQ.format(python=sys.executable, home=str(tmp_path / "home"), me=me))
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield tmp_path
    run_program([program, "cancel", *(str(job["id"]) for job in jobs(tmp_path))])


def jobs(copy: Path) -> list[dict[str, object]]:
    return json.loads(run_program([copy / "bin/qq", "list"], check=True).stdout)


def bench(copy: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_program([sys.executable, "-m", "bench", *words], cwd=copy)


def planned(copy: Path, body: str, *, repeats: int) -> None:
    words = ["bash", "-c", f'echo "$1" >>{copy}/lines; {body}', "bash", "{run_dir}"]
    cluster, axes = {"executor": "qq", "partition": "short"}, {"tasks_per_node": [1]}
    text = matrix("own", cluster=cluster, axes=axes, workload=command(words), repeats=repeats)
    (copy / "own.yaml").write_text(text)
    done = bench(copy, "plan", "own")
    assert done.returncode == 0, done.stderr
    assert "ignored" not in done.stdout + done.stderr


def states(copy: Path) -> dict[str, str]:
    runs = json.loads(bench(copy, "status", "own", "--json").stdout)["runs"]
    return {run["run_id"]: run["state"] for run in runs}


def test_a_new_scheduler_is_one_file_of_at_most_350_lines_one_template_and_one_entry(copy):
    assert SCHEDULER.count("\n") <= 350
    assert "slurm" not in SCHEDULER + TEMPLATE + ENTRY
    planned(copy, f"until [ -e {copy}/go ]; do sleep 0.05; done; exit $(cat {copy}/go)", repeats=6)
    assert bench(copy, "submit", "own", "--dry-run").stdout.startswith("qq submit own.")
    full = bench(copy, "submit", "own")
    assert full.returncode == 2
    assert "qq: the queue is full (4 of 6 runs are submitted)" in full.stderr
    first = next(iter(states(copy)))
    assert bench(copy, "cancel", "own", "--only", first).stdout == "1 run cancelled\n"
    (copy / "go").write_text("0")
    done = bench(copy, "submit", "own", "--wait")
    assert done.stderr.splitlines()[-1] == "study own: 6 completed", done.stderr
    assert len(jobs(copy)) == 7
    verified = bench(copy, "verify", "own")
    assert verified.returncode == 0
    assert "6 of 6 runs pass" in verified.stdout.splitlines()


def test_eight_kills_of_submit_and_cancel_start_no_run_twice_and_lose_none(copy):
    planned(copy, "sleep 0.5", repeats=12)
    ledger, dice = copy / "results/own/ledger.jsonl", random.Random(42)
    for number in range(8):
        size = ledger.stat().st_size if ledger.exists() else 0
        process = subprocess.Popen(
            [sys.executable, "-m", "bench", "cancel" if number % 4 == 3 else "submit", "own"],
            cwd=copy,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if number % 3:  # most moments are those of the import of modules, in which nothing happens
            until = time.monotonic() + dice.uniform(1, 3)
            while not (ledger.exists() and ledger.stat().st_size > size) and time.monotonic() < until:
                time.sleep(0.002)
            time.sleep(dice.uniform(0, 0.2))
        else:
            time.sleep(dice.uniform(0, 2))
        # In every other case, the qq that it called is killed with it.
        (os.killpg if number % 2 else os.kill)(process.pid, signal.SIGKILL)
        process.wait()
    done = bench(copy, "submit", "own", "--wait")
    assert done.returncode == 0, done.stderr
    assert set(states(copy).values()) == {"completed"}
    starts = Counter((copy / "lines").read_text().splitlines())
    assert set(starts.values()) == {1}
    found = jobs(copy)
    assert len({job["name"] for job in found}) == len(found)
    # As many jobs as runs have ended well; the others were cancelled, or had been given up before they began.
    assert Counter(job["state"] for job in found if job.get("code", 0) == 0)["done"] == 12
    assert {job["code"] for job in found if job["state"] == "done"} <= {0, 1}
    assert len({Path(folder).parent for folder in starts}) == 12
