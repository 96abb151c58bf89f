"""Compare the time of planning with that of a bare loop, which only formats and writes the same scripts.

Planning and the bare loop take turns in this process and write the same scripts to the same disk. Planning
also reads and checks the matrix, expands it, renders templates and writes
plan.json. The script prints the medians and their ratio; only the ratio is comparable between machines.
"""

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


def bare_loop(cells: list[dict[str, object]], template: str, folder: Path) -> None:
    """Write the script of each cell: the ``template`` (for ``str.format``), filled in with the cell."""
    folder.mkdir()
    for cell in cells:
        with open(folder / f"{cell['cell_id']}.sbatch", "w") as file:
            file.write(template.format(**cell))


def as_format(text: str, values: dict[str, object]) -> str:
    """Turn the script of one cell into a template of ``str.format`` with its ``values`` as fields."""
    text = text.replace("{", "{{").replace("}", "}}")
    text = text.replace(str(values["cell_id"]), "{cell_id}")
    for name, before in (("nodes", "--nodes="), ("tasks_per_node", "--ntasks-per-node=")):
        text = text.replace(f"{before}{values[name]}", f"{before}{{{name}}}")
    for option in ("backend", "per_gpu_batch", "bucket_cap_mb", "precision"):
        flag = f"--{option.replace('_', '-')} "
        text = text.replace(f"{flag}{values[option]}", f"{flag}{{{option}}}")
    return text.replace("WORLD_SIZE={world_size}", "WORLD_SIZE={{world_size}}")


def measure(count: int, folder: Path) -> None:
    """Plan ``count`` cells and run the bare loop in turns; print the median times and their ratio."""
    buckets, batches = SIZES[count]
    matrix = folder / "many.yaml"
    matrix.write_text(MATRIX.format(buckets=buckets, batches=batches))
    plan = make_plan(matrix)
    assert len(plan.cells) == count, len(plan.cells)
    cells = [{**cell.as_json(), **cell.workload} for cell in plan.cells]
    study = write_plan(plan, folder / "results")
    sample = next(cell for cell in cells if cell["launcher"] == "srun")
    template = as_format((study.scripts / f"{sample['cell_id']}.sbatch").read_text(), sample)
    ours, bare = [], []
    for _ in range(ROUNDS):
        shutil.rmtree(folder / "results")
        start = time.perf_counter()
        write_plan(make_plan(matrix), folder / "results")
        middle = time.perf_counter()
        bare_loop(cells, template, folder / "bare")
        end = time.perf_counter()
        shutil.rmtree(folder / "bare")
        ours.append(middle - start)
        bare.append(end - middle)
    ratio = statistics.median(a / b for a, b in zip(ours, bare, strict=True))
    print(
        f"{count:>6} cells: plan {statistics.median(ours):.3f} s, bare loop {statistics.median(bare):.3f} s, "
        f"ratio {ratio:.2f} (median of {ROUNDS} interleaved rounds)"
    )


def main() -> int:
    """Print one line for each number of cells, then the peak memory."""
    with tempfile.TemporaryDirectory() as folder:
        for count in SIZES:
            measure(count, Path(folder))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory: {peak:.0f} MB (of this process, for the plan and the bare loop together)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
