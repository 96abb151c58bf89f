"""What a rank does, from the run's cell.json, and the state of the rank after all ranks have joined."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..cell_json import REMEDY, CellFile, read_cell
from ..errors import BenchError
from ..measure.exchange import Met
from ..measure.launch import Launch
from ..measure.ranks import Host, RankFacts
from ..run_folder import RunFolder
from ..units import join_names
from .options import OPTIONS, TrainOptions, read_options


def read_task(folder: RunFolder) -> tuple[CellFile, TrainOptions]:
    """Read the cell.json of a run, and return its content and its options of the training.

    Raises:
        BenchError: the file cannot be read, or values are missing, invalid or contradict each other.
    """
    cell, place = read_cell(folder.path), str(folder.cell)
    if missing := [name for name in OPTIONS if name not in cell.workload]:
        raise BenchError(f"{place}: workload has no {join_names(missing)}", remedy=REMEDY)
    options = read_options(cell.workload, backend=cell.backend, place=place)
    if cell.backend not in ("nccl", "gloo"):
        raise BenchError(f"{place}: backend is {cell.backend!r}", remedy="it must be nccl or gloo")
    if cell.per_gpu_batch < 1:
        raise BenchError(f"{place}: per_gpu_batch is {cell.per_gpu_batch}", remedy="it must be 1 or more")
    return cell, options


@dataclass(frozen=True)
class Session:
    """One rank of a run: its cell, options, launch, peers and device."""

    folder: RunFolder
    cell: CellFile
    options: TrainOptions
    launch: Launch
    joined: Met
    me: RankFacts
    device: torch.device

    @property
    def is_first(self) -> bool:
        """True on rank 0."""
        return self.launch.rank == 0

    @property
    def host(self) -> Host:
        """This rank's host, with all of its ranks."""
        return next(host for host in self.joined.hosts if host.host == self.me.host)

    def say(self, line: str) -> None:
        """Print a line on rank 0."""
        if self.is_first:
            print(line, flush=True)
