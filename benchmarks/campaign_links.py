"""Measure links of a known rate with the default settings, and compare the bus bandwidth with the rate.

    python benchmarks/campaign_links.py [--draws N] [--seed N]

The script needs root to start a test cluster. Each draw (random trial) limits the links of all nodes to one
random rate, and runs a matrix of 1, 2 and 4 nodes with 1 and 2 ranks each, without any setting that protects
the runs from one another. It prints the smallest and largest ratio of bus bandwidth to rate over messages of
at least 4 MB, for each cell on several nodes. It exits with 1 if a run fails or if a ratio is not between
0.88 and 1.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from clusters import own_cluster

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.checks.fabric import LARGE_BYTES
from tests.cluster.bed import Cluster
from tests.jobs.slurm_studies import Study, plan_study

MATRIX = """\
study: links
cluster: {executor: slurm, partition: l40s, account: users, cpus_per_task: 1, time_limit: 10m}
axes: {nodes: [1, 2, 4], tasks_per_node: [1, 2], backend: [gloo]}
scaling: [{mode: weak, per_gpu_batch: [4]}]
workload: {device: cpu, model: mlp, parameters: 100k, steps_per_epoch: 5, epochs: 1, warmup_steps: 3}
repeats: 1
"""
LOWEST, HIGHEST = 0.88, 1.0
#: The range of the random rates.
RATES_MBIT_S = (100, 600)


def run_draw(cluster: Cluster, folder: Path, rate_mbit: int) -> list[str]:
    """Run the matrix over links of this rate and print a line per cell; return a text for each problem."""
    study = plan_study(folder, MATRIX, cluster.environment)
    with cluster.linked(f"{rate_mbit}mbit"):
        done = study.bench("submit", "STUDY", "--wait")
    if done.returncode:
        return [f"{rate_mbit} Mbit/s: bench submit --wait: {done.stderr.strip()}"]
    return _compared(study, rate_mbit)


def _compared(study: Study, rate_mbit: int) -> list[str]:
    """Print the ratios of each cell on several nodes; return a text for each cell that is out of range."""
    report = study.bench("report", "STUDY")
    if report.returncode:
        return [f"{rate_mbit} Mbit/s: bench report: {report.stderr.strip()}"]
    nodes = {cell_id: cell.nodes for cell_id, cell in study.planned.cells.items()}
    with (study.folder / "report/sweep.csv").open() as file:
        found = _ratios(csv.DictReader(file), nodes, rate_mbit * 1e6 / 8)
    wrong = []
    for cell, ratios in sorted(found.items()):
        low, high = min(ratios), max(ratios)
        print(f"| {rate_mbit} | {cell} | {len(ratios)} | {low:.3f} | {high:.3f} |", flush=True)
        if not LOWEST <= low <= high <= HIGHEST:
            wrong.append(f"{rate_mbit} Mbit/s, {cell}: bus bandwidth is {low:.3f} to {high:.3f} of the rate")
    missed = {cell for cell, count in nodes.items() if count > 1} - found.keys()
    return wrong + [f"{rate_mbit} Mbit/s, {cell}: no large message was measured" for cell in sorted(missed)]


def _ratios(
    rows: Iterable[Mapping[str, str]], nodes: Mapping[str, int], rate: float
) -> dict[str, list[float]]:
    """Return, by cell, the ratios of bus bandwidth to ``rate`` (bytes/s) for large messages between nodes."""
    found = defaultdict(list)
    for row in rows:
        if nodes[row["cell_id"]] > 1 and int(row["bytes"]) >= LARGE_BYTES:
            found[row["cell_id"]].append(float(row["busbw_bytes_per_sec"]) / rate)
    return found


def main() -> int:
    """Run the draws on a fresh cluster."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--seed", type=int, help="seed of the random rates (default: a new one in each call)")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    dice = random.Random(seed)
    print(f"seed {seed}\n\n| rate (Mbit/s) | cell | messages | lowest | highest |\n|---|---|---|---|---|")
    wrong = []
    with own_cluster() as (cluster, folder):
        for draw in range(given.draws):
            wrong += run_draw(cluster, folder / str(draw), dice.randint(*RATES_MBIT_S))
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
