"""Measure the coverage of the report's intervals with simulated studies.

    python benchmarks/campaign_statistics.py [--studies 1000] [--seed 1]

Coverage is the share of intervals that contain the true value. The first table is about the 95 % intervals of
the efficiency; runs and steps have noise. If an interval contains 0.8, the report states how many runs should
decide whether the efficiency is above 0.8; the second table shows how often they do. The third shows how
often recommended sizes are right, the last whether P is calibrated. The results do not depend on the machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# The tests define the simulated studies.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.analysis.decisions import CURVES, calibration, simulate
from tests.analysis.stats.test_estimates import TRUTH, decided, simulated

#: Relative noise of a run and of a step.
NOISES = ((0.02, 0.1), (0.005, 0.3), (0.08, 0.05))


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


def decisions(studies: int, *, seed: int) -> None:
    """Print how many runs should decide whether an efficiency is above 0.8, and how often they decide it."""
    print("efficiency  run-to-run noise  runs  decided")
    for efficiency, noise in ((0.9, 0.02), (0.85, 0.05), (0.75, 0.05), (0.85, 0.1), (0.95, 0.2)):
        runs, share = decided(efficiency, noise, studies=studies, seed=seed)
        print(f"{efficiency:10}  {noise:16.0%}  {runs:4}  {share:.1%}")


def recommendations(studies: int, *, seed: int) -> None:
    """Print how often recommended sizes are right, by curve; docs/decision.md explains the numbers."""
    print("curve                      studies  recommended  wrong  clear  right")
    found = simulate(studies, seed=seed)
    for curve in CURVES:
        print(
            f"{curve:25}  {found.studies[curve]:7}  {found.recommended[curve]:11}  {found.wrong[curve]:5}  "
            f"{found.clear[curve]:5}  {found.right[curve]:5}"
        )
    wrong = found.wrong.total() / max(found.recommended.total(), 1)
    right = found.right.total() / max(found.clear.total(), 1)
    print(f"wrong {wrong:.2%} of the recommended sizes; right {right:.1%} of the clear studies")


def probabilities(sizes: int, *, seed: int) -> None:
    """Print the calibration of P: of each tenth, the mean P and the share of truly efficient sizes."""
    print("sizes  mean P  truly efficient")
    for number, p, share in calibration(sizes, seed=seed):
        print(f"{number:5}  {p:6.3f}  {share:15.3f}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    efficiencies(asked.studies, seed=asked.seed)
    print()
    decisions(asked.studies, seed=asked.seed)
    print()
    recommendations(2 * asked.studies, seed=asked.seed)
    print()
    probabilities(3 * asked.studies, seed=asked.seed + 1)


if __name__ == "__main__":
    main()
