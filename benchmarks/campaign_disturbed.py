"""Disturb real runs on the test cluster, and check that exactly these runs are called disturbed.

    python benchmarks/campaign_disturbed.py [--draws N] [--studies N] [--seed N] [PART ...]

The script needs root to start a test cluster. The parts are:

``overlap``: runs and foreign jobs that share nodes. The jobs that run.json names as disturbing each run must
be those that sacct shows beside it. The results must contain exactly the undisturbed runs. With
``exclusive: true``, no run may be disturbed.

``foreign``: draws (random trials) of three runs of a training that sleeps instead of computing. During one
run, a process that is not of the job uses a fifth to all of a core of one node. The run, the node and the
time must be named.

``healthy``: studies of nine runs of this training that nothing disturbs. No cause of lost time may be named.

The script exits with 1 if an overlap is missed or invented, if fewer than 37 of 40 foreign processes are
found, if more than 2 of 108 healthy runs are called disturbed (both limits scale with the number of draws or
studies), or if more than 2 % of the healthy studies have a cause.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from clusters import own_cluster

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.causes.table import named, study_causes
from analysis.data.load import load_study
from bench.jobs.slurm.parsing import expand_hosts
from bench.study.records import METRICS_COLUMNS
from tests.cluster.bed import Cluster, missing
from tests.cluster.containers import wait_for
from tests.jobs.slurm_studies import Study, plan_study

PARTS = ("overlap", "foreign", "healthy")
NODES = ("n1", "n2", "n3", "n4")
#: Required number of found foreign processes of 40, and allowed number of disturbed runs of 12 studies.
FOUND, OF_DRAWS = 37, 40
DISTURBED, OF_STUDIES = 2, 12
#: Allowed fraction of healthy studies with a cause.
EXPLAINED = 0.02
_JOB = re.compile(r"job (\d+)")

OVERLAPPING = """\
study: overlap
cluster:
  executor: slurm
  partition: l40s
  account: users
  time_limit: 5m
  cpus_per_task: 1
  exclusive: {exclusive}
axes: {{nodes: [1], tasks_per_node: [1], backend: [gloo]}}
scaling: [{{mode: weak, per_gpu_batch: [{batches}]}}]
workload: {{device: cpu, model: mlp, epochs: 1}}
repeats: 4
"""
SLEEPING = """\
study: {name}
cluster:
  executor: slurm
  partition: l40s
  account: users
  cpus_per_task: 1
  mem: 600M
  time_limit: 10m
{nodelist}  env: {{GLOO_SOCKET_IFNAME: eth0}}
max_running: 1
axes: {{nodes: [{nodes}], tasks_per_node: [1], backend: [gloo]}}
scaling: [{{mode: weak, per_gpu_batch: [16]}}]
workload:
  device: cpu
  steps_per_epoch: 20
  epochs: 1
  warmup_steps: 3
  attribution_steps: 3
  command: [{python}, {training}, none, "{{per_gpu_batch}}"]
repeats: 3
"""
TRAINING = Path(__file__).resolve().parents[1] / "tests/jobs/sleeping_training.py"
#: A process that uses a fraction of a core until its input ends; it then prints the CPU time that it got.
BURNER = """\
import os, select, sys, time
os.setpriority(os.PRIO_PROCESS, 0, -15)
load = float(sys.argv[1])
while True:
    start = time.process_time()
    while time.process_time() - start < load / 10: pass
    if select.select([sys.stdin], [], [], (1 - load) / 10)[0]: break
print(time.process_time())
"""


# -- overlap --------------------------------------------------------------------------


def overlapping_study(folder: Path, cluster: Cluster, *, exclusive: bool, cells: int) -> Study:
    """Plan a study of short scripts. Each cell runs on one node, which ``exclusive`` reserves for it."""
    batches = ", ".join(str(batch) for batch in range(1, cells + 1))
    matrix = OVERLAPPING.format(exclusive=str(exclusive).lower(), batches=batches)
    study = plan_study(folder, matrix, cluster.environment)
    values = {"epoch": 0, "steps": 10, "samples": 100, "throughput_samples_per_sec": 10}
    row = ",".join(str(values.get(name, "")) for name in METRICS_COLUMNS)
    for number, script in enumerate(sorted((study.folder / "scripts").glob("n1x1*.sbatch"))):
        node = NODES[number % len(NODES)]
        script.write_text(
            f"#!/bin/bash\n#SBATCH --mem=100M --nodelist={node}{' --exclusive' if exclusive else ''}\n"
            f"sleep $((RANDOM % 4 + 1)).$((RANDOM % 10))\n"
            f"printf '%s\\n' {','.join(METRICS_COLUMNS)} {row} >\"$1/metrics.csv\"\n"
        )
    return study


def check_overlaps(cluster: Cluster, folder: Path, dice: random.Random, *, exclusive: bool) -> list[str]:
    """Run a study beside foreign jobs; return a text for each wrong run or cell."""
    study = overlapping_study(folder, cluster, exclusive=exclusive, cells=6)
    submission = study.start("submit", "STUDY", "--wait")
    while submission.poll() is None:
        options = ["--account=users", "--partition=l40s", "--output=/dev/null", "--mem=100M"]
        place = f"--nodelist={dice.choice(NODES)}"
        cluster.run(["sbatch", *options, place, f"--wrap=sleep {dice.uniform(0, 3):.1f}"])
        time.sleep(dice.uniform(1, 4))
    study.bench("status", "STUDY")
    runs = {run.run_id: study.run_json(run.run_id) for run in study.planned.runs}
    expected = overlaps_in_sacct(cluster, [str(run["job_id"]) for run in runs.values()])
    wrong, disturbed, pairs = [], dict.fromkeys(runs, False), 0
    for run_id, run in runs.items():
        found = {job for one in run["disturbed"] for job in _JOB.findall(one["value"])}
        wanted = expected[str(run["job_id"])]
        disturbed[run_id], pairs = bool(found), pairs + len(wanted)
        if found != wanted:
            wrong.append(f"{run_id}: sacct shows {sorted(wanted)} beside it, run.json names {sorted(found)}")
    wrong += wrong_cells(study, disturbed)
    print(
        f"overlap, exclusive {str(exclusive).lower()}: {len(runs)} runs, {pairs} overlaps in sacct, "
        f"{sum(disturbed.values())} runs disturbed, {len(wrong)} wrong",
        flush=True,
    )
    if exclusive and any(disturbed.values()):
        wrong.append("exclusive: true, but runs are disturbed")
    return wrong


def overlaps_in_sacct(cluster: Cluster, ours: Sequence[str]) -> dict[str, set[str]]:
    """Return, from sacct instead of bench's records, the jobs that shared a node with each of ``ours``."""
    command = ["sacct", "-nPXa", "--starttime=now-2hours", "--format=JobID,Start,End,NodeList"]
    wait_for(
        lambda: (
            not {"Unknown"} & set(re.split(r"[|\n]", cluster.run([*command, "-j", ",".join(ours)]).stdout))
        ),
        what="the end times of the study's jobs in sacct",
    )
    jobs = {}
    for line in cluster.run(command).stdout.splitlines():
        job, start, end, nodes = line.split("|")
        if start not in ("Unknown", "None"):
            jobs[job] = (start, "9999" if end == "Unknown" else end, set(expand_hosts(nodes)))
    found = {}
    for own in ours:
        start, end, nodes = jobs[own]
        found[own] = {
            job
            for job, other in jobs.items()
            if job != own and nodes & other[2] and other[0] < end and other[1] > start
        }
    return found


def wrong_cells(study: Study, disturbed: dict[str, bool]) -> list[str]:
    """Return a text for each cell that does not use its undisturbed runs (or all, if all are disturbed)."""
    done = study.bench("report", "STUDY")
    assert done.returncode == 0, done.stderr
    marks: dict[str, list[bool]] = {}
    for run in study.planned.runs:
        marks.setdefault(run.cell_id, []).append(disturbed[run.run_id])
    wrong = []
    with (study.folder / "report/scaling.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            own = marks[row["cell_id"]]
            kept = len(own) if all(own) else own.count(False)
            if (int(row["n"]), int(row["n_disturbed"])) != (kept, sum(own)):
                wrong.append(f"{row['cell_id']}: n {row['n']}, n_disturbed {row['n_disturbed']}; marks {own}")
    return wrong


# -- foreign processes ----------------------------------------------------------------


def sleeping_study(
    folder: Path, cluster: Cluster, *, name: str, nodes: Sequence[int], on: Sequence[str] = ()
) -> Study:
    """Plan three repeats of a training that sleeps, on each number of ``nodes``, one run at a time.

    All runs use the nodes in ``on``, if it names any.
    """
    words = {"python": json.dumps(sys.executable), "training": json.dumps(str(TRAINING))}
    sizes = ", ".join(map(str, nodes))
    nodelist = f'  nodelist: "{",".join(on)}"\n' if on else ""
    matrix = SLEEPING.format(name=name, nodes=sizes, nodelist=nodelist, **words)
    return plan_study(folder, matrix, cluster.environment)


@contextmanager
def burning(cluster: Cluster, node: str, load: float) -> Iterator[list[float]]:
    """Use a fraction ``load`` of a core of a node, in a process that is not of any job.

    Afterwards, the yielded list contains the CPU seconds of the process; a busy machine may give it fewer.
    """
    command = cluster.command_on_node(node, [sys.executable, "-c", BURNER, str(load)], cwd=Path("/"))
    used: list[float] = []
    # Killing the command would leave the process on the node, so its input is closed.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield used
    finally:
        used.append(float(process.communicate(timeout=300)[0] or "nan"))


@dataclass(frozen=True)
class Draw:
    """Outcome of a random trial of the part ``foreign``; ``false`` counts other runs called disturbed."""

    found: bool
    false: int
    words: str


def draw_foreign(cluster: Cluster, folder: Path, dice: random.Random, number: int) -> Draw:
    """Disturb one of three runs on one of two nodes."""
    pair = dice.choice([("n1", "n2"), ("n3", "n4")])
    study = sleeping_study(folder, cluster, name=f"foreign{number}", nodes=[2], on=pair)
    runs = [run.run_id for run in sorted(study.planned.runs, key=lambda run: run.order)]
    place, node, load = dice.randrange(3), dice.choice(pair), dice.uniform(0.2, 1)
    submission = study.start("submit", "STUDY", "--wait")

    def job_is(*states: str) -> bool:
        record = study.planned.records()[runs[place]]
        if record.job_id is None:
            return False
        shown = cluster.run(["squeue", "-h", "--states=all", "-o", "%T", "-j", record.job_id], check=False)
        return shown.stdout.strip() in states

    wait_for(lambda: job_is("RUNNING"), what="the run to disturb", timeout_s=1200)
    began = datetime.now(UTC)
    with burning(cluster, node, load) as used:
        wait_for(lambda: job_is("COMPLETING", "COMPLETED", "FAILED"), what="its end", timeout_s=600)
    ended = datetime.now(UTC)
    submission.communicate(timeout=1200)
    contents = [study.run_json(run) for run in runs]
    right = [one for one in contents[place].get("disturbed") or () if _is_right(one, node, began, ended)]
    false = sum(bool(run.get("disturbed")) for run in contents[:place] + contents[place + 1 :])
    states = {run["state"] for run in contents}
    said = right[0]["value"] if right else contents[place].get("disturbed")
    got = used[0] / (ended - began).total_seconds()
    words = f"run {place + 1} of 3 on {node} with {load:.0%} of a core (it got {got:.0%}): {said}, {states}"
    return Draw(bool(right), false, words)


def _is_right(entry: dict[str, Any], node: str, began: datetime, ended: datetime) -> bool:
    """Return True if an entry names the node, and a time while the foreign process ran."""
    if entry["reason"] != "foreign-cpu" or entry["node"] != node:
        return False
    start, end = (datetime.fromisoformat(entry[name]) for name in ("start", "end"))
    slack = timedelta(seconds=2)
    return began - slack <= start < end <= ended + slack


def run_foreign(cluster: Cluster, folder: Path, dice: random.Random, draws: int) -> list[str]:
    """Print the result of each random trial; return a text if too few disturbed runs are found."""
    found = false = 0
    for number in range(1, draws + 1):
        draw = draw_foreign(cluster, folder / f"draw{number}", dice, number)
        found, false = found + draw.found, false + draw.false
        print(f"foreign {number}: {'found' if draw.found else 'MISSED'}: {draw.words}", flush=True)
    others = 2 * draws
    print(f"foreign: {found} of {draws} found; {false} of {others} other runs wrongly reported", flush=True)
    return [f"foreign: only {found} of {draws} found"] if found * OF_DRAWS < FOUND * draws else []


def run_healthy(cluster: Cluster, folder: Path, studies: int) -> list[str]:
    """Run studies that nothing disturbs; return a text if too many are called disturbed or have a cause."""
    disturbed = runs = explained = 0
    wrong = []
    for number in range(1, studies + 1):
        study = sleeping_study(folder / str(number), cluster, name=f"healthy{number}", nodes=[1, 2, 4])
        study.bench("submit", "STUDY", "--wait")
        contents = [study.run_json(run.run_id) for run in study.planned.runs]
        entries = [one for run in contents for one in run.get("disturbed") or ()]
        causes = named(study_causes(load_study(study.folder), also_invalid=True))
        runs, explained = runs + len(contents), explained + bool(len(causes))
        disturbed += sum(bool(run.get("disturbed")) for run in contents)
        odd = [run for run in contents if run["state"] != "completed" or "disturbed" not in run]
        known = len(contents) - len(odd)
        wrong += [f"healthy {number}: {run['state']}: {run.get('reason') or 'no conditions'}" for run in odd]
        print(f"healthy {number}: {known} runs completed with conditions; {entries or 'none'}", flush=True)
        for row in causes:
            print(f"    named: {row}", flush=True)
    print(
        f"healthy: {disturbed} of {runs} runs called disturbed; {explained} of {studies} studies have a cause"
    )
    if disturbed > DISTURBED * max(1.0, studies / OF_STUDIES):
        wrong.append(f"healthy: {disturbed} runs called disturbed")
    if explained > EXPLAINED * studies:
        wrong.append(f"healthy: {explained} studies have a cause")
    return wrong


def main() -> int:
    """Run the chosen parts on a fresh cluster."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"only these parts: {', '.join(PARTS)}")
    parser.add_argument("--draws", type=int, default=OF_DRAWS, help="number of foreign processes")
    parser.add_argument("--studies", type=int, default=OF_STUDIES, help="number of healthy studies")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    parts = given.parts or PARTS
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"unknown parts: {', '.join(unknown)}")
    if lacking := missing():
        print(f"not run: {lacking}")
        return 1
    dice, wrong = random.Random(given.seed), []
    with own_cluster() as (cluster, folder):
        if "overlap" in parts:
            for exclusive in (False, True):
                wrong += check_overlaps(cluster, folder / f"overlap{exclusive}", dice, exclusive=exclusive)
        if "foreign" in parts:
            wrong += run_foreign(cluster, folder, dice, given.draws)
        if "healthy" in parts:
            wrong += run_healthy(cluster, folder / "healthy", given.studies)
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
