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

#: ``qq``, a queue of this machine, with the scheduler for it and the template of its scripts.
PARTS = Path(__file__).with_name("new_scheduler")
SCHEDULER, TEMPLATE = ((PARTS / name).read_text() for name in ("scheduler", "qq.sh.j2"))
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
    write_program(program, f"#!{sys.executable} -I\n{(PARTS / 'qq').read_text()}")
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
    assert done.stderr.splitlines()[-2] == "study own: 6 completed", done.stderr
    assert len(jobs(copy)) == 7
    verified = bench(copy, "verify", "own")
    assert verified.returncode == 0
    assert "0 of 6 runs pass; 6 measured in part, without a failed check" in verified.stdout.splitlines()


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
