"""Count the false alarms and the detections of "Slow node" in simulated studies; see docs/benchmarks.md.

Noise: in each run, the useful time of a node is exp(run + node-in-run). The first term is common to the nodes
of a run and has no effect. The second one is normal, independent between nodes and runs, with the given
standard deviation. In the rows "bursts", a node also takes 30 % longer in 5 % of its runs.
"""

from __future__ import annotations

import argparse

import numpy as np

from analysis.checks.slow_ranks import slow_nodes_of
from analysis.data.load import RankOfRun

#: Number of nodes, number of runs, standard deviation, bursts.
STUDIES = (
    *((nodes, runs, noise, False) for nodes in (2, 4, 16) for runs in (3, 9) for noise in (0.02, 0.1)),
    (64, 3, 0.05, False),
    *((nodes, runs, 0.02, True) for nodes in (2, 4) for runs in (3, 9)),
)
RANKS = 2


def simulated(
    draw: np.random.Generator, *, nodes: int, runs: int, noise: float, bursts: bool, slow: float = 1.0
) -> list[RankOfRun]:
    """Return rows of ranks.csv of runs on all nodes; the first node takes ``slow`` times as long."""
    factor = np.exp(draw.normal(0, noise, (runs, nodes)) + draw.normal(0, 0.1, (runs, 1)))
    if bursts:
        factor *= np.where(draw.random((runs, nodes)) < 0.05, 1.3, 1.0)
    factor[:, 0] *= slow
    return [
        RankOfRun(
            rank=place % nodes * RANKS + local,
            host=f"n{place % nodes}",
            samples=100.0,
            step_time_sec=0.1 * node_factor + 0.01,
            comm_exposed_time_sec=0.01,
            run_id=f"r{place // nodes}",
            cell_id="cell",
        )
        for place, node_factor in enumerate(factor.ravel())
        for local in range(RANKS)
    ]


def share(studies: int, *, seed: int, slow: float = 1.0, **design: object) -> float:
    """Return the share of studies that call a node slow; with ``slow`` above 1, only the slow node counts."""
    draw = np.random.default_rng(seed)
    found = 0
    for _ in range(studies):
        ranks = simulated(draw, slow=slow, **design)  # type: ignore[arg-type]
        hosts = [node.host for node in slow_nodes_of(ranks)]
        found += bool(hosts) if slow == 1 else "n0" in hosts
    return found / studies


def main() -> None:
    """Print one row for each combination of nodes, runs, noise and bursts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    print("nodes  runs  noise  bursts  false alarms  10 % slower  20 % slower")
    for nodes, runs, noise, bursts in STUDIES:
        design = {"nodes": nodes, "runs": runs, "noise": noise, "bursts": bursts}
        alarms = share(asked.studies, seed=asked.seed, **design)
        found = [share(asked.studies // 5, seed=asked.seed, slow=slow, **design) for slow in (1.1, 1.2)]
        shares = "  ".join(f"{value:11.1%}" for value in found)
        print(f"{nodes:5}  {runs:4}  {noise:5.0%}  {'yes' if bursts else 'no':6}  {alarms:12.1%}  {shares}")


if __name__ == "__main__":
    main()
