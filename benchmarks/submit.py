"""Compare the time of `bench submit` with that of a bare loop, which only calls sbatch for each script.

The script needs root to start a test cluster. `bench submit` and the bare loop take turns: each submits the
same trivial scripts to the same controller. The jobs do not start, so that no running job disturbs the
measurement. `bench submit` also writes to the ledger (the study's record of submissions) before and after
each sbatch. The result is the difference per job.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from clusters import own_cluster

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.cluster.bed import Cluster
from tests.jobs.slurm_studies import Study, scripted_study

JOBS = 200
ROUNDS = 3


def bare_loop(study: Study, environment: Mapping[str, str]) -> float:
    """Submit all scripts of a study by calling sbatch only; return the time in seconds."""
    scripts = sorted((study.folder / "scripts").iterdir())
    began = time.perf_counter()
    for script in scripts:
        command = ["sbatch", "--parsable", "--output=/dev/null", str(script)]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def measure(cluster: Cluster, folder: Path) -> None:
    """Submit in turns with the bare loop and with `bench submit`, and print the median times."""
    environment = {**os.environ, **cluster.environment}
    held = [f"#SBATCH --begin=now+1day\ntrue # {i}" for i in range(JOBS)]
    ours, bare = [], []
    for turn in range(ROUNDS):
        study = scripted_study(folder / str(turn), held, cluster.environment, name=f"many{turn}")
        bare.append(bare_loop(study, environment))
        cluster.clear()
        began = time.perf_counter()
        done = study.bench_process("submit", "STUDY")
        ours.append(time.perf_counter() - began)
        assert done.returncode == 0, done.stderr
        cluster.clear()
    more = statistics.median(a - b for a, b in zip(ours, bare, strict=True))
    print(
        f"{JOBS} jobs: bench submit {statistics.median(ours):.2f} s, bare loop of sbatch "
        f"{statistics.median(bare):.2f} s; {more:.2f} s more, {1000 * more / JOBS:.1f} ms per job "
        f"(median of {ROUNDS} interleaved rounds, including the start of Python)"
    )


if __name__ == "__main__":
    with own_cluster(exit_code=0) as (own, scratch):
        measure(own, scratch)
