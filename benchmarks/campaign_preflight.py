"""Check that `bench preflight` finds bad nodes on the test cluster, and bad nodes and links in simulations.

The script needs root to start a test cluster, with control groups of version 1. All nodes have a quota of 20
% of a core and a link of 283 Mbit/s; a bad node has 16 % or 226 Mbit/s, drawn at random. Simulated nodes and
links have 80 % of the normal rate when they are bad; the rates of healthy nodes, and each measurement, vary
by 2 % (standard deviation). The script exits with 1 if a limit is exceeded: of 30 cases, at least 28 must be
found, and at most one may blame a healthy node.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from clusters import own_cluster

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.preflight.verdict import (
    Pair,
    Rates,
    confirmed,
    judge,
    pairs_again,
    ring_steps,
)
from tests.cluster.bed import Cluster, missing
from tests.cluster.configuration import Options

MATRIX = """\
study: preflight
cluster: {{executor: slurm, partition: l40s, account: users, time_limit: 5m, cpus_per_task: 1}}
axes: {{nodes: [{nodes}], tasks_per_node: [1], backend: [gloo]}}
scaling: [{{mode: weak, per_gpu_batch: [8]}}]
workload: {{device: cpu, model: mlp, epochs: 1}}
"""
THRESHOLD = 0.9
#: Noise of healthy nodes and of a measurement, and the relative rate of bad nodes and links.
NOISE, BAD = 0.02, 0.8


@dataclass
class Score:
    """Outcomes of the draws (random trials) on one cluster."""

    draws: int = 0
    found: int = 0
    blamed: int = 0
    seconds: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        slowest = max(self.seconds, default=0.0)
        found = f"{self.found} of {self.draws} found, a healthy node blamed in {self.blamed}"
        return f"{found}; at most {slowest:.0f} s"


def draw(cluster: Cluster, folder: Path, dice: random.Random, *, bad: int, score: Score) -> None:
    """Make ``bad`` random nodes slow, call `bench preflight`, and add the outcome to ``score``."""
    cluster.quota(0.2)
    cluster.link("283mbit")
    nodes = sorted(dice.sample(cluster.nodes, bad))
    faults = {node: dice.choice(["quota", "link"]) for node in nodes}
    for node, fault in faults.items():
        if fault == "quota":
            cluster.quota(0.16, nodes=[node])
        else:
            cluster.link("226mbit", nodes=[node])
    began = time.perf_counter()
    matrix = folder / "matrix.yaml"
    matrix.write_text(MATRIX.format(nodes=len(cluster.nodes)))
    command = [sys.executable, "-m", "bench", "preflight", str(matrix), "--json"]
    done = cluster.run(command, check=False, cwd=folder, timeout_s=600)
    score.seconds.append(time.perf_counter() - began)
    score.draws += 1
    unfit = json.loads(done.stdout)["exclude"] if done.returncode in (0, 1) else []
    score.found += set(nodes) <= set(unfit)
    score.blamed += not set(unfit) <= set(nodes)
    right = "ok" if unfit == nodes else "WRONG"
    print(f"{right}: bad {faults}, unfit {unfit}, {score.seconds[-1]:.0f} s", flush=True)
    if done.returncode not in (0, 1):
        print(done.stderr, flush=True)


def on_cluster(nodes: int, draws: int, dice: random.Random, *, bad: int) -> Score:
    """Return the outcomes of ``draws`` cases on a cluster of ``nodes`` nodes."""
    score = Score()
    if draws:
        with own_cluster(Options(nodes=nodes, accounting=False)) as (cluster, folder):
            for _ in range(draws):
                draw(cluster, folder, dice, bad=bad, score=score)
        print(f"{nodes} nodes, {bad} bad: {score}", flush=True)
    return score


class Simulation:
    """Simulated networks. The noise is a table, because drawing it would take most of the time."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._noise = [dice.gauss(1, NOISE) for _ in range(1_000_003)]

    def case(self, nodes: int, kind: str) -> tuple[bool, bool]:
        """Return two flags: fault found, something healthy blamed."""
        dice = self._dice
        speeds = [dice.gauss(1, NOISE) for _ in range(nodes)]
        bad = set(dice.sample(range(nodes), {"node": 1, "two nodes": 2}.get(kind, 0)))
        for node in bad:
            speeds[node] *= BAD
        pairs = [pair for step in ring_steps(nodes) for pair in step]
        links = {dice.choice(pairs)} if kind == "link" else set()
        first = self._measured(pairs, speeds, links)
        alone = Rates(nodes, first, {})
        again = pairs_again(alone, judge(alone, threshold=THRESHOLD))
        second = self._measured([pair for step in again for pair in step], speeds, links)
        rates = Rates(nodes, first, second)
        verdict = confirmed(rates, judge(rates, threshold=THRESHOLD))
        slow = set(verdict.slow_nodes), set(verdict.slow_links)
        found = bad <= slow[0] and links <= slow[1]
        return found, not (slow[0] <= bad and slow[1] <= links)

    def _measured(self, pairs: list[Pair], speeds: list[float], links: set[Pair]) -> dict[Pair, float]:
        noise, place = self._noise, self._dice.randrange(len(self._noise))
        rates = {}
        for number, pair in enumerate(pairs, place):
            a, b = speeds[pair[0]], speeds[pair[1]]
            rates[pair] = (a if a < b else b) * noise[number % 1_000_003]
        return rates | {link: rates[link] * BAD for link in links & rates.keys()}


def simulate(draws: int, dice: random.Random) -> bool:
    """Simulate networks of 3 to 1,024 nodes (at least 6 if two are bad); return whether all limits hold."""
    simulation, counts = Simulation(dice), Counter[tuple[str, str]]()
    began = time.perf_counter()
    for number in range(draws):
        kind = ("none", "node", "two nodes", "link")[number % 4]
        smallest = 6 if kind == "two nodes" else 3
        nodes = round(math.exp(dice.uniform(math.log(smallest), math.log(1024))))
        found, blamed = simulation.case(nodes, kind)
        counts[kind, "draws"] += 1
        counts[kind, "found"] += found
        counts[kind, "blamed"] += blamed
    print(f"{draws} simulated draws in {time.perf_counter() - began:.0f} s")
    for kind in ("none", "node", "two nodes", "link"):
        total = counts[kind, "draws"]
        print(
            f"  {kind}: {counts[kind, 'found']} of {total} found, something healthy blamed in"
            f" {counts[kind, 'blamed']}"
        )
    wrong = sum(
        counts[kind, "draws"] - counts[kind, "found"] for kind in ("none", "node", "two nodes", "link")
    )
    blamed = sum(number for (_, name), number in counts.items() if name == "blamed")
    return wrong <= draws / 100 and blamed <= draws / 100


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=30, help="random trials with 4 nodes, 1 of them bad")
    parser.add_argument("--two", type=int, default=10, help="random trials with 6 nodes, 2 of them bad")
    parser.add_argument("--eight", type=int, default=10, help="random trials with 8 nodes, 1 of them bad")
    parser.add_argument("--simulated", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    dice = random.Random(options.seed)
    fine = simulate(options.simulated, dice) if options.simulated else True
    if (lacking := missing()) and options.draws + options.two + options.eight:
        print(f"not run: {lacking}")
        return 1
    one = on_cluster(4, options.draws, dice, bad=1)
    two = on_cluster(6, options.two, dice, bad=2)
    eight = on_cluster(8, options.eight, dice, bad=1)
    fine = fine and one.found >= one.draws * 28 / 30 and one.blamed <= max(1, one.draws / 30)
    for score in (two, eight):
        fine = fine and score.found >= score.draws * 28 / 30 and score.blamed <= 1
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
