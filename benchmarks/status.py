"""Measure the time of `bench status` for a study of 2,000 runs.

The script needs root to start a test cluster. `bench submit` submits 2,000 held jobs. `bench status` is
measured three times: while all jobs are queued, after all have ended, and once more without any change.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from clusters import own_cluster

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.cluster.bed import Cluster
from tests.cluster.configuration import Options
from tests.cluster.containers import wait_for
from tests.jobs.slurm_studies import MEASURE, Study, scripted_study

#: Script of every tenth run, which fails, so that `bench status` also diagnoses failures.
FAILING = "echo 'RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB' >&2; exit 1"


def time_status(study: Study, what: str) -> None:
    """Run `bench status`; print its time and the number of runs per state."""
    began = time.perf_counter()
    shown = study.bench_process("status", "STUDY", "--json")
    took = time.perf_counter() - began
    states = json.loads(shown.stdout)["counts"]
    counts = ", ".join(f"{count} {state}" for state, count in states.items() if count)
    print(f"{what}: {took:.2f} s; {counts}", flush=True)


def measure(cluster: Cluster, folder: Path, *, runs: int) -> None:
    """Submit ``runs`` jobs, and print the time of `bench status` at each of the three moments."""
    bodies = [f"#SBATCH --hold\n{body}" for body in [MEASURE] * 9 + [FAILING]]
    study = scripted_study(folder, bodies, cluster.environment, repeats=runs // 10)
    began = time.perf_counter()
    done = study.bench_process("submit", "STUDY")
    assert done.returncode == 0, done.stderr
    print(f"{runs} jobs submitted in {time.perf_counter() - began:.0f} s")
    time_status(study, "all queued")
    cluster.run(["scontrol", "release", *study.job_ids()], timeout_s=300)
    _await_accounting(cluster, runs)
    time_status(study, "all ended since the last status")
    time_status(study, "no change since the last status")


def _await_accounting(cluster: Cluster, runs: int) -> None:
    """Wait until sacct reports that all jobs and their steps have ended."""

    def all_there() -> bool:
        shown = cluster.run(["sacct", "-nP", "--starttime=now-2hours", "-o", "state,end"], timeout_s=300)
        ended = [line for line in shown.stdout.split() if line.startswith(("COMPLETED|2", "FAILED|2"))]
        return len(ended) >= 2 * runs

    wait_for(all_there, what="the end of all jobs in sacct", timeout_s=1200)


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    options = Options(cpus=64, memory_mb=64_000, settings={"MinJobAge": "3600"})
    with own_cluster(options, exit_code=0) as (own, scratch):
        measure(own, scratch / "study", runs=count)
