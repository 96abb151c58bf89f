"""Measure the coverage of the report's intervals with simulated studies.

    python benchmarks/campaign_statistics.py [--studies 1000] [--predictions 500] [--seed 1]

Coverage is the share of intervals that contain the true value. The first table is about the 95 % intervals of
the efficiency; runs and steps have noise. If an interval contains 0.8, the report states how many runs should
decide whether the efficiency is above 0.8; the second table shows how often they do. The third table is about
the 90 % prediction intervals at twice the largest size, for a ring all-reduce with random constants. It
compares the report's intervals, which span all plausible laws, with the intervals of the chosen law alone.
The results do not depend on the machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pandas as pd

# The tests define the simulated studies.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from analysis.stats.law_fit import LawFit, fit_laws
from tests.analysis.stats.test_laws_simulated import SIZES, ring_truth

from tests.analysis.stats.test_coverage_simulated import TRUTH, decided, simulated

#: Relative noise of a run and of a step.
NOISES = ((0.02, 0.1), (0.005, 0.3), (0.08, 0.05))
#: The simulated communication: its code for ``ring_truth``, and its name in the table.
KINDS = {
    "ab": "latency and bandwidth",
    "a": "latency alone",
    "b": "bandwidth alone",
    "sab": "an eighth of both",
    "abo": "partly hidden",
    "sabo": "an eighth, partly hidden",
}


def efficiencies(studies: int, *, seed: int) -> None:
    """Print the coverage of the 95 % intervals of the efficiency for each noise and number of runs."""
    print("run noise  step noise  runs  coverage of the intervals")
    for run_noise, step_noise in NOISES:
        for runs in (3, 4, 5, 6, 10):
            rows = simulated(
                runs, seed=seed + runs, run_noise=run_noise, step_noise=step_noise, studies=studies
            )
            own = rows[rows["gpus"] > 1]
            truth = own["gpus"].map(TRUTH)
            held = own["efficiency_low"].le(truth) & own["efficiency_high"].ge(truth)
            print(f"{run_noise:9.1%}  {step_noise:10.1%}  {runs:4}  {held.mean():.1%}")


def predictions(studies: int, *, seed: int) -> None:
    """Print the coverage of the 90 % prediction intervals at twice the largest size."""
    print("cover: coverage of the report's intervals; one law: coverage of the chosen law's intervals")
    print("width: median of high / low; no prediction: share of studies without one")
    print("mode    communication              runs  cover  one law  width  no prediction")
    for mode in ("strong", "weak"):
        for kind, words in KINDS.items():
            for n in (1, 3, 5):
                print(f"{mode:7} {words:25}  {n:4}  {predicted(mode, kind, n=n, studies=studies, seed=seed)}")


def predicted(mode: str, kind: str, *, n: int, studies: int, seed: int) -> str:
    """Simulate ``n`` runs per size in each study, and format a row of the third table."""
    draw = np.random.default_rng(seed)
    target = 2 * int(SIZES[-1])
    held, alone, widths = 0, 0, []
    for _ in range(studies):
        truth = ring_truth(mode, kind, draw)
        times = np.array([truth(size) for size in np.repeat(SIZES, n)])
        noisy = times * np.exp(draw.normal(0, 0.02, len(times)))
        found = fit_laws(pd.DataFrame({"gpus": np.repeat(SIZES, n), "step_time_sec": noisy}), mode=mode)
        if not isinstance(found, LawFit):
            continue
        row = found.predict([target], 0.90).iloc[0]
        low, high = found.chosen.interval(np.array([float(target)]), level=0.90)
        held += bool(row["low"] <= truth(target) <= row["high"])
        alone += bool(low[0] <= truth(target) <= high[0])
        widths.append(row["high"] / row["low"])
    fitted = max(len(widths), 1)
    width = float(np.median(widths)) if widths else float("nan")
    return f"{held / fitted:5.1%}  {alone / fitted:7.1%}  {width:5.2f}  {1 - len(widths) / studies:.1%}"


def decisions(studies: int, *, seed: int) -> None:
    """Print how many runs should decide whether an efficiency is above 0.8, and how often they decide it."""
    print("efficiency  run-to-run noise  runs  decided")
    for efficiency, noise in ((0.9, 0.02), (0.85, 0.05), (0.75, 0.05), (0.85, 0.1), (0.95, 0.2)):
        runs, share = decided(efficiency, noise, studies=studies, seed=seed)
        print(f"{efficiency:10}  {noise:16.0%}  {runs:4}  {share:.1%}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", type=int, default=1000)
    parser.add_argument("--predictions", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    efficiencies(asked.studies, seed=asked.seed)
    print()
    decisions(asked.studies, seed=asked.seed)
    print()
    predictions(asked.predictions, seed=asked.seed)


if __name__ == "__main__":
    main()
