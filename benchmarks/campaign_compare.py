"""Count the false alarms and detections of `bench compare` in simulated pairs of studies.

    python benchmarks/campaign_compare.py [--studies 1000] [--seed 1]

A is the study before a change, B the study after it; all runs have log-normal noise of 2 %. A false alarm is
a comparison that calls an unchanged cell faster or slower. A detection is a changed cell with the right
verdict. The results do not depend on the machine.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from analysis.compare.comparison import Verdict, judge
from analysis.stats.estimate import LogMoments, paired, unpaired

#: Noise of each run, relative to its throughput.
NOISE = 0.02
#: Noise that both runs of a pair share, because they run one after the other in one allocation.
SHARED_NOISE = 0.10


def moments(logs: np.ndarray) -> LogMoments:
    """Return the count, mean and variance of each row of ``logs``: a row per cell, a column per run."""
    return LogMoments(np.full(len(logs), float(logs.shape[1])), logs.mean(axis=1), logs.var(axis=1, ddof=1))


def simulate(
    random: np.random.Generator, *, cells: int, runs: int, changed: int, change: float, design: str
) -> np.ndarray:
    """Simulate one comparison and return the verdict of each cell.

    In B, the throughput of the first ``changed`` cells is higher by the share ``change``. ``design`` is
    ``separate`` (A and B are two studies), ``pairs`` (their runs alternate in one allocation whose speed
    varies over time) or ``unpaired`` (runs as for ``pairs``, but judged as if A and B were separate).
    """
    truth = np.zeros((cells, 1))
    truth[:changed] = math.log1p(change)
    hours = 0.0 if design == "separate" else random.normal(0.0, SHARED_NOISE, (cells, runs))
    a = hours + random.normal(0.0, NOISE, (cells, runs))
    b = hours + truth + random.normal(0.0, NOISE, (cells, runs))
    contrast = paired(moments(b - a)) if design == "pairs" else unpaired(moments(a), moments(b))
    return judge(contrast)["verdict"].to_numpy()


def main() -> None:
    """Print one line for each combination of design, number of cells, number of runs and change."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    random = np.random.default_rng(arguments.seed)
    print(
        f"{arguments.studies} comparisons per line, seed {arguments.seed}; changed: number of changed cells"
    )
    print("design    cells  runs   change  changed  false alarms  found")
    cases = [("separate", cells, runs) for cells in (1, 4, 12) for runs in (3, 6, 10)]
    cases += [("pairs", 4, 6), ("unpaired", 4, 6)]
    for design, cells, runs in cases:
        for changed, change in dict.fromkeys([(0, 0.0), (1, 0.05), (1, -0.05), (cells, 0.05)]):
            verdicts = np.array(
                [
                    simulate(random, cells=cells, runs=runs, changed=changed, change=change, design=design)
                    for _ in range(arguments.studies)
                ]
            )
            called = np.isin(verdicts, [str(Verdict.FASTER), str(Verdict.SLOWER)])
            alarms = called[:, changed:].any(axis=1).mean() if changed < cells else math.nan
            right = str(Verdict.FASTER if change > 0 else Verdict.SLOWER)
            found = (verdicts[:, :changed] == right).mean() if changed else math.nan
            print(
                f"{design:9} {cells:5} {runs:5} {change:+8.0%} {changed:8} "
                f"{_percent(alarms):>13} {_percent(found):>6}"
            )


def _percent(share: float) -> str:
    return "" if math.isnan(share) else f"{share:.1%}"


if __name__ == "__main__":
    main()
