"""A new scheduler is one file, one template and one entry, and the engine submits exactly once with it too."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.common import run_program, write_program
from tests.matrices import command, matrix
from tests.project.test_extending import changed_files, copy_program

#: ``qq``, a queue of this machine, with the scheduler for it and the template of its scripts.
PARTS = Path(__file__).with_name("new_scheduler")
SCHEDULER, TEMPLATE = ((PARTS / name).read_text() for name in ("scheduler", "qq.sh.j2"))
#: Import bench, and fork for each line of words; a child is `bench WORDS`, with a session of its own.
SERVER = """\
import json, os, sys
from bench.cli import app
for line in sys.stdin:
    words, out, err = json.loads(line)
    if not (child := os.fork()):
        os.setsid()
        for number, path in enumerate((os.devnull, out, err)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
        app(words, prog_name="bench")
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
ENTRY = '    "qq": SchedulerSpec(template="qq.sh.j2", keys=frozenset({"partition"}), queues=True),\n'


class Copy:
    """A copy of the program, of which one call at a time runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        words = [sys.executable, "-c", SERVER]
        self.server = subprocess.Popen(words, cwd=folder, stdin=-1, stdout=-1, text=True)

    def start(self, *words: str) -> int:
        """Start `bench WORDS` and return its process id."""
        outputs = [str(self.folder / name) for name in ("out", "err")]
        print(json.dumps([words, *outputs]), file=self.server.stdin, flush=True)
        return int(self.server.stdout.readline())

    def wait(self) -> int:
        return int(self.server.stdout.readline())

    def bench(self, *words: str) -> subprocess.CompletedProcess[str]:
        self.start(*words)
        outputs = ((self.folder / name) for name in ("out", "err"))
        return subprocess.CompletedProcess(words, self.wait(), *(path.read_text() for path in outputs))


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Copy]:
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
    write_program(program, f"#!{sys.executable} -I\n{(PARTS / 'qq').read_text()}")
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = Copy(tmp_path)
    yield made
    made.server.communicate()
    run_program([program, "cancel", *(str(job["id"]) for job in jobs(tmp_path))])


def jobs(folder: Path) -> list[dict[str, object]]:
    return json.loads(run_program([folder / "bin/qq", "list"], check=True).stdout)


def planned(copy: Copy, body: str, *, repeats: int) -> None:
    words = ["bash", "-c", f'echo "$1" >>{copy.folder}/lines; {body}', "bash", "{run_dir}"]
    cluster, axes = {"executor": "qq", "partition": "short"}, {"tasks_per_node": [1]}
    text = matrix("own", cluster=cluster, axes=axes, workload=command(words), repeats=repeats)
    (copy.folder / "own.yaml").write_text(text)
    done = copy.bench("plan", "own")
    assert done.returncode == 0, done.stderr
    assert "ignored" not in done.stdout + done.stderr


def states(copy: Copy) -> dict[str, str]:
    runs = json.loads(copy.bench("status", "own", "--json").stdout)["runs"]
    return {run["run_id"]: run["state"] for run in runs}


def test_a_new_scheduler_is_one_file_of_at_most_350_lines_one_template_and_one_entry(copy):
    assert SCHEDULER.count("\n") <= 350
    assert "slurm" not in SCHEDULER + TEMPLATE + ENTRY
    planned(
        copy, f"until [ -e {copy.folder}/go ]; do sleep 0.05; done; exit $(cat {copy.folder}/go)", repeats=6
    )
    assert copy.bench("submit", "own", "--dry-run").stdout.startswith("qq submit own.")
    full = copy.bench("submit", "own")
    assert full.returncode == 2
    assert "qq: the queue is full (4 of 6 runs are submitted)" in full.stderr
    first = next(iter(states(copy)))
    assert copy.bench("cancel", "own", "--only", first).stdout == "1 run cancelled\n"
    (copy.folder / "go").write_text("0")
    done = copy.bench("submit", "own", "--wait")
    assert done.stderr.splitlines()[-2] == "study own: 6 completed", done.stderr
    assert len(jobs(copy.folder)) == 7
    verified = copy.bench("verify", "own")
    assert verified.returncode == 0
    assert "0 of 6 runs pass; 6 measured in part, without a failed check" in verified.stdout.splitlines()


def test_six_kills_of_submit_and_cancel_start_no_run_twice_and_lose_none(copy):
    planned(copy, "sleep 0.5", repeats=8)
    ledger, dice = copy.folder / "results/own/ledger.jsonl", random.Random(42)
    for number in range(6):
        size = ledger.stat().st_size if ledger.exists() else 0
        process = copy.start("cancel" if number % 4 == 3 else "submit", "own")
        if number % 3:  # most moments are before the first line
            until = time.monotonic() + dice.uniform(1, 3)
            while not (ledger.exists() and ledger.stat().st_size > size) and time.monotonic() < until:
                time.sleep(0.002)
        time.sleep(dice.uniform(0, 0.2))
        # In every other case, the qq that it called is killed with it.
        (os.killpg if number % 2 else os.kill)(process, signal.SIGKILL)
        copy.wait()
    done = copy.bench("submit", "own", "--wait")
    assert done.returncode == 0, done.stderr
    assert set(states(copy).values()) == {"completed"}
    starts = Counter((copy.folder / "lines").read_text().splitlines())
    assert set(starts.values()) == {1}
    found = jobs(copy.folder)
    assert len({job["name"] for job in found}) == len(found)
    # As many jobs as runs have ended well; the others were cancelled, or had been given up before they began.
    assert Counter(job["state"] for job in found if job.get("code", 0) == 0)["done"] == 8
    assert {job["code"] for job in found if job["state"] == "done"} <= {0, 1}
    assert len({Path(folder).parent for folder in starts}) == 8
