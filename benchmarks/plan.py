"""Measure the time of planning: check and expand a matrix, render and write scripts and plan.json."""

from __future__ import annotations

import resource
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench.plan import make_plan, write_plan

ROUNDS = 5
MATRIX = """\
study: many
cluster: {{partition: gpu, account: project, gpu_type: a100, cpus_per_task: 8, time_limit: 20m,
          env: {{NCCL_SOCKET_IFNAME: "^docker,lo"}}, setup: ["module load cuda", "source env/bin/activate"]}}
axes:
  nodes: [1, 2, 4, 8, 16]
  gpus_per_node: [1, 2, 4, 8]
  backend: [nccl, gloo]
  launcher: [srun, torchrun]
  precision: [fp32, bf16]
  bucket_cap_mb: {buckets}
scaling: [{{mode: weak, per_gpu_batch: {batches}}}]
"""
#: For each number of cells, the values of ``bucket_cap_mb`` and ``per_gpu_batch`` that result in it.
SIZES = {
    960: ([5, 25, 100], [8, 16]),
    9600: ([1, 5, 10, 25, 50, 100], [1, 2, 4, 6, 8, 12, 16, 24, 32, 64]),
}


def measure(count: int, folder: Path) -> None:
    """Plan ``count`` cells several times; print the median time."""
    buckets, batches = SIZES[count]
    matrix = folder / "many.yaml"
    matrix.write_text(MATRIX.format(buckets=buckets, batches=batches))
    took = []
    for _ in range(ROUNDS):
        shutil.rmtree(folder / "results", ignore_errors=True)
        start = time.perf_counter()
        plan = make_plan(matrix)
        write_plan(plan, folder / "results")
        took.append(time.perf_counter() - start)
    assert len(plan.cells) == count, len(plan.cells)
    print(f"{count:>6} cells: {statistics.median(took):.3f} s (median of {ROUNDS} rounds)")


def main() -> int:
    """Print one line for each number of cells, then the peak memory."""
    with tempfile.TemporaryDirectory() as folder:
        for count in SIZES:
            measure(count, Path(folder))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory: {peak:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
