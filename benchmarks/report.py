"""Measure the times to load and to report a large study, and the peak memory of both.

    python benchmarks/report.py

The script writes a finished study into a temporary folder. One process loads the study, another one writes
its report.
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


def main() -> None:
    """Write a study, then print the times and peak memory of loading and reporting it."""
    with tempfile.TemporaryDirectory(prefix="bench-report-") as folder:
        path = Path(folder) / "large"
        start = time.perf_counter()
        build(path)
        print(f"built {CELLS * REPEATS} runs x {EPOCHS} rows in {time.perf_counter() - start:.1f} s")
        measure(path, "load")  # the first reader fills the page cache
        load, report = measure(path, "load"), measure(path, "report")
    rows, page = f"{load['size']:.0f} rows", f"page {report['size'] / 1e6:.2f} MB"
    for what, result, size in (("load", load, rows), ("report", report, page)):
        print(f"{what:<7} {result['seconds']:6.2f} s  peak {result['peak_bytes'] / 2**20:5.0f} MiB  {size}")


if __name__ == "__main__":
    main()
