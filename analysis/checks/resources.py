"""Find series whose sizes ran on different hardware, because their resources depend on the size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.checks.nodes import Environments
from analysis.text import one_line
from bench.matrix.cell import Cell
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.units import clauses, listed, names


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a series (GPUs, or nodes on device cpu) that run at one place, in words."""

    place: str
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{listed([*map(str, self.sizes)], limit=8)} on {self.place}"


class SpansPartitions(Finding, kind="spans-partitions"):
    """Sizes of one series that run on several partitions or GPU types."""

    heading = "Several partitions in one series"
    remedy = "Compare sizes within a partition, or measure one size on both of them."
    places: tuple[Sizes, ...]

    def _message(self) -> str:
        places = clauses([*map(str, self.places)])
        return (
            f"The sizes of a series run on several partitions or GPU types: {places} "
            f"({names(self.subject)}). If their hardware differs, efficiencies contain this difference."
        )


def spans_partitions(cells: Sequence[Cell], envs: Environments) -> Iterator[SpansPartitions]:
    """Yield a finding for each set of sizes and places that a series spans.

    Partition and GPU are those of the runs, or before the first run those of the plan.
    """
    ran: dict[str, dict[str, None]] = {}
    on_gpus = {cell.cell_id for cell in cells if cell.device == "cuda"}
    for cell_id, env in envs:
        slurm = env.get("slurm")
        partition = slurm.get("SLURM_JOB_PARTITION") if isinstance(slurm, dict) else None
        gpu = env.get("device_name") if cell_id in on_gpus else None
        ran.setdefault(cell_id, {})[_place(partition, gpu)] = None
    series: dict[str, dict[str, set[int]]] = {}
    subjects: dict[str, list[str]] = {}
    for cell in sorted(cells, key=lambda one: one.size):
        planned = _place(cell.resources.partition, cell.resources.gpu_type)
        for member in cell.series:
            for place in ran.get(cell.cell_id, ()) if ran else (planned,):
                series.setdefault(member.series, {}).setdefault(place, set()).add(cell.size)
                subjects.setdefault(member.series, []).append(cell.cell_id)
    found: dict[tuple[Sizes, ...], dict[str, None]] = {}
    for name, places in series.items():
        if len(places) > 1:
            spans = tuple(Sizes(place=place, sizes=tuple(sorted(sizes))) for place, sizes in places.items())
            found.setdefault(spans, {}).update(dict.fromkeys(subjects[name]))
    for spans, cell_ids in found.items():
        yield SpansPartitions(subject=tuple(cell_ids), places=spans)


def _place(partition: Any, gpu: Any) -> str:
    """Return a partition and a GPU type in words."""
    where = f"partition {one_line(partition, limit=60)}" if partition else "the default partition"
    return f"{where} with {one_line(gpu, limit=60)}" if gpu else where
