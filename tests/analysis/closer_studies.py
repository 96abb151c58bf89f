"""Write probes.json and ranks.csv with known properties for made-up studies."""

import csv
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pandas as pd

from analysis.checks.fabric import ring_time
from bench.matrix.cell import Cell
from bench.study.checksums import write_sums
from bench.study.layout import RunFolder, StudyFolder
from bench.study.records import RANKS_COLUMNS

#: The sweep's message sizes (bytes), and the fabric that its times are computed from.
SIZES = [4096 * 4**power for power in range(8)]
ALPHA, BETA = 25e-6, 1 / 5e9


def with_probes(path: Path, cells: Iterable[Cell]) -> None:
    """Write probes.json of three repeats of each cell."""
    for cell in cells:
        times = {size: ring_time(size, cell.world_size, ALPHA, BETA) for size in SIZES}
        sizes = [{"bytes": size, "buckets": 0, "times_s": [[time]] * 3} for size, time in times.items()]
        content = {"schema": 1, "world_size": cell.world_size, "all_reduce": {"sizes": sizes}}
        for repeat in (1, 2, 3):
            folder = StudyFolder(path).attempt(f"{cell.cell_id}-r{repeat}", 1)
            folder.probes.write_text(json.dumps(content))
            if folder.sums.exists():
                write_sums(folder)


def write_ranks(path: Path, *, late: Callable[[str, int], float], host: Callable[[int], str]) -> None:
    """Write ranks.csv of every run: 10 ms of work, plus that of ``late``, and the others' waiting."""
    for file in path.glob("runs/*/attempt-1/ranks.csv"):
        run = file.parts[-3]
        ranks = int(pd.read_csv(file)["rank"].max()) + 1
        extra = [late(run, rank) for rank in range(ranks)]
        with file.open("w", newline="", encoding="utf-8") as target:
            writer = csv.DictWriter(target, RANKS_COLUMNS, restval="")
            writer.writeheader()
            for rank, more in enumerate(extra):
                wait = max(extra) - more
                row = {"epoch": 0, "rank": rank, "host": host(rank), "steps": 50, "optimizer_time_sec": 0.001}
                row |= {"step_time_sec": 0.012 + max(extra), "comm_exposed_time_sec": 0.002 + wait}
                row |= {"data_load_time_sec": 0.001, "forward_time_sec": 0.003, "other_time_sec": 0}
                row |= {"backward_time_sec": 0.005 + more, "comm_wait_time_sec": wait}
                writer.writerow(row)
        write_sums(RunFolder(file.parent))
