"""What a rank does, from the run's cell.json, and the state of the rank after all ranks have joined.

Only rank 0 prints messages and writes env.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..errors import BenchError
from ..finding import Recorded
from ..measure.environment import shared_environment
from ..measure.ranks import RankFacts
from ..measure.transport import configured_transport
from ..study.cell_json import REMEDY, CellFile, read_cell
from ..study.files import write_json
from ..study.layout import RunFolder
from ..units import join_names
from .options import OPTIONS, TrainOptions, read_options
from .rendezvous import Joined, Launch


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
    """One rank of a run: its cell, options, launch, peers, device, threads, and findings for env.json."""

    folder: RunFolder
    cell: CellFile
    options: TrainOptions
    launch: Launch
    joined: Joined
    me: RankFacts
    device: torch.device
    threads: int
    found: list[Recorded]

    @property
    def is_first(self) -> bool:
        """True on rank 0."""
        return self.launch.rank == 0

    def write_environment(
        self,
        env: Mapping[str, str],
        in_use: Mapping[str, str | None] | None = None,
        **known: Any,
    ) -> None:
        """Write env.json on rank 0.

        Args:
            env: the environment variables of rank 0.
            in_use: the transport in use, or None before any communication.
            known: the values that are known only after the model exists or has trained.
        """
        if not self.is_first:
            return
        cell, options = self.cell, self.options
        content = shared_environment(
            self.joined.facts,
            env,
            backend=cell.backend,
            world_size=self.launch.world_size,
            launcher=self.launch.launcher,
            join_s=self.joined.seconds,
            device=self.device,
            threads=self.threads,
            transport=in_use or configured_transport(cell.backend, env),
        )
        content |= {
            "workload": asdict(options),
            "strategy": options.strategy,
            "per_gpu_batch": cell.per_gpu_batch,
            "global_batch": cell.per_gpu_batch * self.launch.world_size * options.grad_accum,
            **dict.fromkeys(("parameters", "gradient_bytes", "flops")),
            **known,
            "facts": [one.as_json() for one in self.found],
        }
        write_json(self.folder.env, content)

    def add(self, finding: Recorded) -> None:
        """Add a finding to env.json, and print it on rank 0."""
        self.found.append(finding)
        self.say(f"bench: {finding.severity}: {finding}")

    def say(self, line: str) -> None:
        """Print a line on rank 0."""
        if self.is_first:
            print(line, flush=True)
