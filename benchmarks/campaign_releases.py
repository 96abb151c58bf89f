"""Run the tests of the cluster and the fault campaign on several Slurm releases, and write docs/clusters.md.

    python benchmarks/campaign_releases.py [--slurm SUITE ...] [TEST ...]

Without TEST, all tests that are marked ``cluster`` run. Each release replaces its row of the table in
docs/clusters.md as soon as it is done. A suite that the Debian mirror does not have keeps its row. The script
exits with 1 if a test or a fault failed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from campaign_faults import DAEMONS, FAULTS

from tests.cluster.containers import ClusterError
from tests.cluster.releases import INSTALLED, SUITES, Release, find_release, other_suites

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/clusters.md"
HEAD = "| suite | Slurm | date | tests | passed | failed | skipped | faults as expected |"


@dataclass(frozen=True)
class Row:
    """Results of one release, as a row of the table."""

    suite: str
    version: str
    tests: str
    passed: int
    failed: int
    skipped: int
    faults: str

    def __str__(self) -> str:
        cells = (
            *(self.suite, self.version, time.strftime("%Y-%m-%d"), self.tests),
            *(self.passed, self.failed, self.skipped, self.faults),
        )
        return f"| {' | '.join(map(str, cells))} |"


def run_release(suite: str, release: Release, tests: Sequence[str]) -> Row:
    """Run the tests and the fault campaign on one release."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "cluster"]
        command += [f"--slurm={release.name}", f"--junitxml={results}", *(tests or ["tests"])]
        command += ["-n3", "--dist=loadscope"]
        subprocess.run(command, cwd=ROOT, check=False)
        suites = ElementTree.parse(results).getroot().iter("testsuite")  # noqa: S314 (written by pytest)
        counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
        for found in suites:
            for key in counts:
                counts[key] += int(found.get(key, 0))
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    name = ", ".join(Path(test).stem.removeprefix("test_") for test in tests) or "all of the cluster"
    return Row(suite, release.version, name, passed, failed, counts["skipped"], _run_faults(release))


def _run_faults(release: Release) -> str:
    """Run the fault campaign; return how many of all faults ended as expected."""
    command = [sys.executable, "benchmarks/campaign_faults.py", f"--slurm={release.name}"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, flush=True)
    lines = done.stdout.splitlines()
    faults = [line for line in lines if line.startswith("| ") and not line.startswith("| fault |")]
    wrong = {line.split(":")[1] for line in lines if line.startswith("WRONG: ")}
    return f"{len(faults) - len(wrong)} of {len(FAULTS) + len(DAEMONS)}"


def write_row(page: str, row: Row) -> str:
    """Return the page with the row in its table, in place of an earlier row of the suite."""
    head, rule, rows = page.partition(HEAD)
    assert rule, f"{PAGE} has no table of releases"
    table = re.match(r"\n\|[-|]+\|\n((?:\|.*\n)*)", rows)
    assert table is not None
    kept = {line.split(" | ")[0].strip("| "): line for line in table[1].splitlines()}
    kept[row.suite] = str(row)
    ordered = sorted(kept, key=lambda suite: SUITES.index(suite) if suite in SUITES else len(SUITES))
    lines = "".join(f"{kept[suite]}\n" for suite in ordered)
    return f"{head}{rule}\n{'|---' * 8}|\n{lines}{rows[table.end() :]}"


def main() -> int:
    """Test each release, one after another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tests", nargs="*", metavar="TEST", help="test files (default: all cluster tests)")
    parser.add_argument("--slurm", action="append", metavar="SUITE", help=f"default: {', '.join(SUITES)}")
    given = parser.parse_args()
    failed = False
    for suite in given.slurm or SUITES:
        try:
            release = find_release(suite if suite in other_suites() else INSTALLED.name)
        except ClusterError as error:
            print(f"{suite}: not run: {error}")
            continue
        print(f"== {suite}: Slurm {release.version}", flush=True)
        row = run_release(suite, release, given.tests)
        PAGE.write_text(write_row(PAGE.read_text(), row))
        print(row)
        failed = failed or row.failed > 0 or len(set(row.faults.split(" of "))) > 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
