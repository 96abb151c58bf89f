"""Measure the times to load and to report a large study; compare loading with reading by pandas.

    python benchmarks/report.py

The script writes a finished study into a temporary folder. One process loads the study, another one writes
its report, so that the peak memory of each is known. For comparison, `pandas.read_csv` reads some of the
files one by one. Only the ratio of the times is comparable between machines.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The tests define the builder of finished studies.
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "analysis")]

CELLS, REPEATS, EPOCHS = 2000, 5, 10
#: Number of files to read with read_csv for comparison.
SAMPLE = 300
_MEASURE = """
import json, resource, sys, time
from pathlib import Path
path, what = Path(sys.argv[1]), sys.argv[2]
from analysis.data.load import load_study
from analysis.report.write import write_report
start = time.perf_counter()
size = len(load_study(path).epochs) if what == "load" else write_report(path).page.stat().st_size
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": seconds, "peak_bytes": peak, "size": size}))
"""


def build(path: Path) -> None:
    """Write the folder of an invented finished study in series of eight sizes."""
    import studies

    planned = []
    while len(planned) < CELLS:
        place = len(planned) // 8
        mode = "strong" if place % 2 else "weak"
        make = studies.strong if mode == "strong" else studies.weak
        sizes = (1, 2, 4, 8, 16, 32, 64, 128)
        planned += make(128 * (1 + place), sizes, per_node=4, swept={"bucket_cap_mb": place})
    options = {"repeats": REPEATS, "epochs": EPOCHS, "ranks_files": False}
    studies.finished(path, studies.merged(planned[:CELLS]), **options)


def measure(path: Path, what: str) -> dict[str, float]:
    """Run ``what``, ``load`` or ``report``, in a new process; return ``seconds``, ``peak_bytes``, ``size``.

    ``size`` is the number of rows loaded, or the bytes of the report's page.
    """
    command = [sys.executable, "-c", _MEASURE, str(path), what]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def one_by_one(path: Path) -> tuple[float, int]:
    """Read :data:`SAMPLE` files metrics.csv with pandas; return the seconds and the number of files read."""
    import pandas as pd

    files = sorted(path.glob("runs/*/attempt-1/metrics.csv"))
    chosen = files[:: len(files) // SAMPLE][:SAMPLE]
    pd.read_csv(chosen[0])
    start = time.perf_counter()
    pd.concat([pd.read_csv(file) for file in chosen])
    return time.perf_counter() - start, len(chosen)


def main() -> None:
    """Write a study, then print the times and peak memory of loading and reporting it."""
    with tempfile.TemporaryDirectory(prefix="bench-report-") as folder:
        path = Path(folder) / "large"
        start = time.perf_counter()
        build(path)
        runs = CELLS * REPEATS
        print(f"built {runs} runs x {EPOCHS} rows in {time.perf_counter() - start:.1f} s")
        measure(path, "load")  # the first reader fills the page cache
        load, report = measure(path, "load"), measure(path, "report")
        seconds, files = one_by_one(path)
    each = seconds / files * runs
    for what, result, size in (
        ("load", load, f"{load['size']:.0f} rows"),
        ("report", report, f"page {report['size'] / 1e6:.2f} MB"),
    ):
        print(f"{what:<7} {result['seconds']:6.2f} s  peak {result['peak_bytes'] / 2**20:5.0f} MiB  {size}")
    ratio = load["seconds"] / each
    print(f"one read_csv per file: {each:.1f} s (from {files} files); loading takes {ratio:.3f} times that")


if __name__ == "__main__":
    main()
