"""Measure the time of `bench status` for a study of 2,000 runs.

The script needs root to start a test cluster. It submits 2,000 scripts of one line with sbatch, under the job
names that `bench submit` would use, and records these jobs in the study's ledger. `bench status` is measured
three times: while all jobs are queued, after all have ended, and once more without any change. Wrappers of
Slurm's commands count the calls.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from clusters import Counted, own_cluster

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.study.ledger import now
from bench.study.run_json import new_attempt, write_run
from tests.cluster.bed import Cluster, missing
from tests.cluster.configuration import Options
from tests.cluster.containers import wait_for
from tests.jobs.slurm_studies import MEASURE, Study, scripted_study

RUNS = 2000
#: Script of every tenth run, which fails, so that `bench status` also diagnoses failures.
FAILING = "echo 'RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB' >&2; exit 1"
#: The ranks of a run write env.json. For runs without it, `bench status` writes one.
ENVIRONMENT = """echo '{"schema": 1}' >"$1/env.json"; """


def submit_bare(study: Study) -> None:
    """Submit all runs as held jobs, and write the ledger once at the end instead of for each job."""
    planned = study.planned
    events = []
    environment = {**os.environ, **study.environment}
    records = planned.records()
    for run in planned.runs:
        attempt = new_attempt(planned, run, records[run.run_id])
        folder = attempt.folder
        command = ["sbatch", "--parsable", "--hold", f"--job-name={attempt.job_name}"]
        command += [f"--output={folder.out}", f"--error={folder.err}"]
        command += [str(planned.script(run.cell_id)), str(folder.path)]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        job_id = done.stdout.strip().partition(";")[0]
        write_run(folder, {**attempt.describe(planned, submitted_at=now()), "job_id": job_id})
        common = {"run_id": run.run_id, "attempt": 1}
        events.append({"event": "intent", **common, "job_name": attempt.job_name, "refused": False})
        events.append({"event": "submitted", **common, "job_id": job_id})
    planned.ledger.append_all(events)


def time_status(counted: Counted, what: str) -> None:
    """Run `bench status`; print its time, its calls of Slurm's commands and the number of runs per state."""
    counted.calls()
    began = time.perf_counter()
    shown = counted.study.bench_process("status", "STUDY", "--json")
    took = time.perf_counter() - began
    states = json.loads(shown.stdout)["counts"]
    calls, in_slurm = counted.calls()
    counts = ", ".join(f"{count} {state}" for state, count in states.items() if count)
    said = ", ".join(f"{count} {name}" for name, count in calls.items()) or "none"
    print(f"{what}: {took:.2f} s, of which Slurm's commands {in_slurm:.2f} s: {said}; {counts}", flush=True)


def measure(cluster: Cluster, folder: Path, *, runs: int) -> None:
    """Submit ``runs`` jobs, and print the time of `bench status` at each of the three moments."""
    bodies = [ENVIRONMENT + body for body in [MEASURE] * 9 + [FAILING]]
    study = scripted_study(folder, bodies, cluster.environment, repeats=runs // 10)
    began = time.perf_counter()
    submit_bare(study)
    print(f"{runs} jobs submitted in {time.perf_counter() - began:.0f} s")
    counted = Counted.of(study, folder / "bin")
    time_status(counted, "all queued")
    cluster.run(["scontrol", "release", *_jobs(study)], timeout_s=300)
    _await_accounting(cluster, runs)
    time_status(counted, "all ended since the last status")
    time_status(counted, "no change since the last status")


def _jobs(study: Study) -> list[str]:
    return [str(record.job_id) for record in study.planned.records().values()]


def _await_accounting(cluster: Cluster, runs: int) -> None:
    """Wait until sacct reports that all jobs and their steps have ended."""

    def all_there() -> bool:
        shown = cluster.run(["sacct", "-nP", "--starttime=now-2hours", "-o", "state,end"], timeout_s=300)
        ended = [line for line in shown.stdout.split() if line.startswith(("COMPLETED|2", "FAILED|2"))]
        return len(ended) >= 2 * runs

    wait_for(all_there, what="the end of all jobs in sacct", timeout_s=1200)


def main() -> int:
    """Start a cluster, measure, and remove it."""
    if lacking := missing():
        print(f"not measured: {lacking}")
        return 0
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else RUNS
    options = Options(cpus=64, memory_mb=64_000, settings={"MinJobAge": "3600"})
    with own_cluster(options) as (cluster, folder):
        measure(cluster, folder / "study", runs=runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
