"""What CONTRIBUTING.md says about new parts: a new part is one file, and the rest of the program finds it."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = '''
"""One layer of weights."""

from torch import nn

from .spec import DataShape, ModelSpec


def build(options, shape):
    return nn.Linear(shape.inputs[0], shape.classes)


def sample(options):
    return DataShape((options.seq_len,), (), 3)


SPEC = ModelSpec("one-layer", "classes", build, sample, options=("seq_len",))
'''
MATRIX = """
study: own
cluster: {executor: local}
axes: {tasks_per_node: [1]}
scaling: [{mode: weak, per_gpu_batch: [2]}]
workload: {device: cpu, model: one-layer, seq_len: 5, steps_per_epoch: 2, epochs: 1, warmup_steps: 3,
           attribution_steps: 1, probe_steps: 0, sweep_time: 0}
repeats: 1
"""
SCHEDULER = '''
"""A queue, from which each poll executes the first job."""

import subprocess

from ...study.ledger import FailureClass, RunState, now
from ...study.run_json import new_attempt, write_run
from ..outcome import Outcome, process_outcome
from ..scheduler import Scheduler, settle


class Queue(Scheduler):
    def command_line(self, run):
        return f"enqueue {self.study.script(run.cell_id)}"

    def submit(self, runs, *, seen, callbacks, max_queued=None):
        for number, run in enumerate(runs, 1):
            attempt = new_attempt(self.study, run, seen[run.run_id])
            write_run(attempt.folder, self._describe(attempt, submitted_at=now()))
            identity = {"run_id": run.run_id, "attempt": attempt.number}
            self.study.ledger.append("submitted", **identity, job_id=str(number))
        return []

    def poll(self):
        records = self.study.records()
        for record in [record for record in records.values() if record.state is RunState.QUEUED][:1]:
            folder, cell = self.study.run_folder(record), self.study.cell_of(record.run_id)
            with folder.out.open("w") as out:
                code = subprocess.call(["bash", self.study.script(cell.cell_id), folder.path], stdout=out)
            settle(self.study, record, process_outcome(folder, cell, code), ended_at=now())
        return records

    def cancel(self, runs):
        records, cancelled = self.study.records(), Outcome(RunState.CANCELLED, "", FailureClass.CANCELLED)
        for run in runs:
            settle(self.study, records[run.run_id], cancelled, ended_at=now())
        return len(runs)


SCHEDULER = Queue
'''
TEMPLATE = """#!/bin/bash
cell={{ cell_id }}
run_dir=$1
python={{ python }}
{% include "program.j2" %}
exec "${command[@]:1}"  # without torchrun's --no-python
"""
ENTRY = '    "queue": SchedulerSpec("own.sh.j2", keys=frozenset({"partition"}), queues=True),\n'
QUEUED_MATRIX = """
study: own
cluster: {executor: queue, partition: short}
axes: {tasks_per_node: [1]}
scaling: [{mode: weak, per_gpu_batch: [2]}]
workload:
  device: cpu
  command: [sh, -c, "echo $1 samples/s", sh, "2{per_gpu_batch}"]
  metrics: {output: {throughput: "([0-9]+) samples/s"}}
repeats: 3
"""


@pytest.fixture
def copy(tmp_path) -> Path:
    """A copy of the program."""
    for name in ("bench", "analysis", "ddp_scaling_bench", "matrices", "slurm_templates"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def run(folder: Path, *words: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", "bench", *words], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_model_is_one_file(copy):
    (copy / "bench/workload/models/one_layer.py").write_text(MODEL)
    (copy / "own.yaml").write_text(MATRIX)
    assert '"one-layer"' in run(copy, "schema")
    run(copy, "run", "own")
    (env_json,) = copy.glob("results/own/runs/*/attempt-1/env.json")
    assert json.loads(env_json.read_text())["parameters"] == 5 * 3 + 3
    page = (copy / "results/own/report/index.html").read_text()
    assert "; model one-layer, on" in page


def changed_files(copy: Path) -> list[str]:
    """Return the files of the program that a copy of it adds or changes."""
    files = [path.relative_to(copy) for path in (copy / "bench").rglob("*.[pj]*") if path.suffix != ".pyc"]
    old = {path for path in files if (ROOT / path).is_file() and filecmp.cmp(copy / path, ROOT / path)}
    return sorted(map(str, {*files} - old))


def test_a_scheduler_is_one_folder_and_one_entry(copy):
    folder, entries = copy / "bench/jobs/queue", copy / "bench/matrix/schedulers.py"
    folder.mkdir()
    (folder / "scheduler.py").write_text(SCHEDULER)
    (folder / "own.sh.j2").write_text(TEMPLATE)
    entries.write_text(entries.read_text().replace('    "ssh": ', f'{ENTRY}    "ssh": '))
    assert changed_files(copy) == [
        *(f"bench/jobs/queue/{name}" for name in ("own.sh.j2", "scheduler.py")),
        "bench/matrix/schedulers.py",
    ]
    (copy / "own.yaml").write_text(QUEUED_MATRIX)
    assert "ignored" not in run(copy, "plan", "own")
    run(copy, "submit", "own")
    shown = run(copy, "status", "own", "--json")
    queued = [one["run_id"] for one in json.loads(shown)["runs"] if one["state"] == "queued"]
    assert len(queued) == 2
    assert "1 run cancelled" in run(copy, "cancel", "own", "--only", queued[0])
    states = [one["state"] for one in json.loads(run(copy, "status", "own", "--json"))["runs"]]
    assert sorted(states) == ["cancelled", "completed", "completed"]
    run(copy, "report", "own")
    header, row = (copy / "results/own/report/scaling.csv").read_text().splitlines()
    found = dict(zip(header.split(","), row.split(","), strict=True))
    assert (found["n"], float(found["throughput_samples_per_sec"])) == ("2", 22)
