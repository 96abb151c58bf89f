"""Damage one file of a study at a time, thousands of times, and count what `bench` makes of it.

    python benchmarks/campaign_damage.py [--trials 3000] [--seed 1]

Exits with 1 if a damage changes a number silently, hangs, ends with a traceback or changes another study.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.damage.fuzzer import Fuzzer
from tests.damage.whole_studies import write_studies


def main() -> None:
    """Run the trials, print the counts and every bad trial."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    os.environ["BENCH_SITE"] = ""
    with tempfile.TemporaryDirectory(prefix="bench-damage-") as folder:
        fuzzer = Fuzzer(Path(folder), write_studies(Path(folder) / "studies"))
        fuzzer.run(arguments.trials, seed=arguments.seed)
    counts = ", ".join(f"{number} {outcome}" for outcome, number in sorted(fuzzer.counts.items()))
    print(f"{arguments.trials} trials, seed {arguments.seed}: {counts}")
    for trial in fuzzer.bad:
        print(f"{trial.outcome}: {trial.damage}\n  {trial.detail}")
    sys.exit(1 if fuzzer.bad else 0)


if __name__ == "__main__":
    main()
