"""Measure how often `bench doctor` finds the cause of a real failure.

    python benchmarks/doctor_corpus.py FOLDER

The folder contains logs and ``index.csv`` with one row per log: ``file``, ``expected_cause``, ``also_accept``
(other causes that the log can justify, separated by ``|``) and ``evidence_line`` (the line that shows the
cause). The accuracy is the share of logs for which the doctor's first cause is expected or accepted. The
exit code is 1 if the accuracy is below ``--at-least``.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from bench.doctor import diagnose


def main() -> int:
    """Print each log with a wrong first cause, then the accuracy; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--at-least", type=float, default=0.95, help="minimum accuracy; below it, the exit code is 1"
    )
    options = parser.parse_args()
    with (options.folder / "index.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    exact = accepted = same_line = 0
    for row in rows:
        found = diagnose({row["file"]: options.folder / row["file"]})
        first = found.causes[0].cause if found.causes else "none"
        wanted = {row["expected_cause"], *row["also_accept"].split("|")}
        exact += first == row["expected_cause"]
        accepted += first in wanted
        shown = found.causes[0].evidence if found.causes else ""
        same_line += " ".join(row["evidence_line"].split())[:200] in " ".join(shown.split())
        if first not in wanted:
            print(f"MISS {row['file']}: {first}, expected {row['expected_cause']} ({row['also_accept']})")
            print(f"     {shown}")
    share = accepted / len(rows)
    print(
        f"first cause: expected in {exact}, expected or accepted in {accepted} of {len(rows)} ({share:.1%})"
    )
    print(f"the evidence is the line given in the index in {same_line} logs")
    return 0 if share >= options.at_least else 1


if __name__ == "__main__":
    raise SystemExit(main())
