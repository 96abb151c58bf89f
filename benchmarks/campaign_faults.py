"""Cause each kind of fault, and check what `bench status`, `verify` and `report` say about it.

    python benchmarks/campaign_faults.py [--slurm SUITE|RELEASE] [FAULT ...]

The script needs root to start a test cluster. The faults take longer than in the tests: runs reach real time
limits, Slurm itself detects the loss of a node, and the controller is down for half a minute. The script
prints one line per fault with the state, failure class and reason that `bench status` reports. It exits with
1 if one of the three commands reports anything unexpected, or if a job is missing or exists twice.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from clusters import DAEMONS, add_release_option, own_cluster

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.cluster.bed import Cluster
from tests.cluster.containers import ClusterError, wait_for
from tests.jobs.fault_studies import FAULTS, Scene, differences, fault_study
from tests.jobs.slurm_studies import MEASURE, Study, lines, scripted_study

OUTAGE_S = 30.0
JOBS = 6


def run_faults(cluster: Cluster, folder: Path, names: Sequence[str]) -> list[str]:
    """Cause the faults one after another; return a text for each unexpected output of a command."""
    study = fault_study(folder, names, cluster.environment)
    took = {}
    with cluster.configured(SlurmdTimeout="10"):
        for name in names:
            began = time.perf_counter()
            study.submit(name)
            FAULTS[name].strike(Scene(cluster, study, name))
            study.await_ends(name)
            took[name] = time.perf_counter() - began
    wrong = differences(study, names)
    for name, run in study.status().items():
        why = f"{run['reason']} [{run['cause']}]" if run["cause"] else run["reason"]
        _row(name, run["state"], run["failure_class"] or "", why, took[name])
    return wrong


def run_outage(cluster: Cluster, folder: Path, name: str) -> list[str]:
    """Stop or freeze a daemon while `bench submit --wait` runs, and call `bench status` meanwhile.

    ``name`` is a key of ``DAEMONS``. Returns a text for each problem.
    """
    study = scripted_study(folder, [f"sleep 2; {MEASURE}"] * JOBS, cluster.environment, name=name.split()[0])
    began = time.perf_counter()
    submission = study.start("submit", "STUDY", "--wait")
    next(lines(submission.stderr))
    with DAEMONS[name](cluster):
        until = time.monotonic() + OUTAGE_S
        asked = time.perf_counter()
        shown = study.bench("status", "STUDY")
        answer_s = time.perf_counter() - asked
        time.sleep(max(0.0, until - time.monotonic()))
    try:
        said = submission.communicate(timeout=240)[1]
    except subprocess.TimeoutExpired:
        submission.kill()
        return [f"{name}: bench submit --wait hangs"]
    took = time.perf_counter() - began
    jobs = study.jobs_per_run()
    states = {str(record.state) for record in study.status().values()}
    answer = shown.stderr.strip().splitlines()[-1] if shown.returncode else "answered"
    told = "; ".join(line for line in said.splitlines() if "waiting" in line) or "continued"
    _row(
        name,
        ", ".join(states),
        "",
        f"status after {answer_s:.1f} s: {answer}; submit: {told}",
        took,
    )
    wrong = [f"{name}: {run} has {jobs[run]} jobs" for run in study.planned.records() if jobs[run] != 1]
    if submission.returncode or states != {"completed"}:
        wrong.append(f"{name}: submit ended with {submission.returncode}, runs are {states}: {said}")
    return [*wrong, *_unaccounted(study, name)]


def _unaccounted(study: Study, name: str) -> list[str]:
    """Call `bench status` until each run has a sacct_summary.txt; return a problem after 90 s."""
    # A run whose submission was interrupted by the outage has a second attempt.
    records = study.planned.records().values()
    summaries = [study.planned.run_folder(record).sacct_summary for record in records]
    try:
        wait_for(
            lambda: bool(study.status()) and all(path.exists() for path in summaries),
            what="sacct_summary.txt of all runs",
        )
    except ClusterError as late:
        return [f"{name}: {late}"]
    return []


def _row(name: str, state: str, failure_class: str, reason: str, took_s: float) -> None:
    print(f"| {name} | {state} | {failure_class} | {reason} | {took_s:.0f} s |", flush=True)


def main() -> int:
    """Run the campaign on a fresh cluster."""
    known = [*FAULTS, *DAEMONS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "faults", nargs="*", metavar="FAULT", help=f"cause only these faults: {', '.join(map(repr, known))}"
    )
    add_release_option(parser)
    given = parser.parse_args()
    chosen = given.faults or known
    if unknown := sorted(set(chosen) - set(known)):
        parser.error(f"unknown faults: {', '.join(unknown)}")
    print("| fault | state | class | reason | time |\n|---|---|---|---|---|")
    with own_cluster(slurm=given.slurm) as (cluster, folder):
        faults = [name for name in FAULTS if name in chosen]
        wrong = run_faults(cluster, folder / "faults", faults) if faults else []
        for number, name in enumerate(name for name in DAEMONS if name in chosen):
            wrong += run_outage(cluster, folder / f"outage{number}", name)
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
