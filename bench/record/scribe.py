"""Rank 0's part: it puts the ranks' records together and writes the run's folder."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from bench.errors import UnwritableError
from bench.layout import RunFolder, write_json
from bench.record.attribution import find_ddp
from bench.record.exchange import Exchange
from bench.record.merging import Seat, Window, merge
from bench.record.settings import Lengths, Place
from bench.workload.environment import surroundings
from bench.workload.hosts import RankFacts, crowded_machines
from bench.workload.results import EpochRecord, RankPlace, Results


class Scribe:
    """Writes env.json and the tables as the ranks' records come in."""

    def __init__(
        self,
        folder: RunFolder,
        exchange: Exchange,
        *,
        place: Place,
        lengths: Lengths,
        device: torch.device,
        model: nn.Module | None,
    ) -> None:
        self._folder = folder
        self._exchange = exchange
        self._place = place
        self._lengths = lengths
        self._device = device
        self._sizes = _sizes(model)
        self._has_bare_model = model is not None and find_ddp(model) is None
        self._facts: list[RankFacts] = []
        self._seats: list[Seat] = []
        self._results: Results | None = None
        self._samples_per_step: float | None = None
        self._warnings: list[str] = []
        self.epochs = 0

    def look(self) -> None:
        """Write what is complete by now; nothing is waited for.

        A disk that is full does not end the training; it is said once.
        """
        try:
            self._look()
        except UnwritableError as error:
            self._tell(f"what is measured is lost: {error}")

    def _look(self) -> None:
        if not self._facts and not self._meet():
            return
        while (contents := self._exchange.read(f"window/{self.epochs + 1}")) is not None:
            self._write([Window.from_json(content) for content in contents])
            self.epochs += 1

    def warn(self, words: str) -> None:
        """Keep a warning for env.json, once, and print it."""
        if words in self._warnings:
            return
        self._tell(words)
        if self._facts:
            try:
                self._write_environment()
            except UnwritableError as error:
                self._tell(f"what is measured is lost: {error}")

    def _tell(self, words: str) -> None:
        if words not in self._warnings:
            self._warnings.append(words)
            print(f"bench: warning: {words}", flush=True)

    def _meet(self) -> bool:
        contents = self._exchange.read("facts")
        if contents is None:
            return False
        self._facts = [RankFacts(**one["facts"]) for one in contents]
        self._seats = [Seat(one["facts"]["host"], one["identity"]) for one in contents]
        places = [
            RankPlace(facts.rank, facts.local_rank, facts.host, one["device"])
            for facts, one in zip(self._facts, contents, strict=True)
        ]
        self._results = Results(self._folder, places)
        if self._place.world_size > 1 and self._has_bare_model:
            self._tell(
                "the recorder's model is not under DDP: exposed communication is not known, and backward may"
                " hold it; give Recorder what the loop calls"
            )
        for ranks, cores in crowded_machines(self._facts):
            self.warn(f"{ranks} ranks share {cores} cores: adding ranks measures how cores are shared")
        self._write_environment()
        return True

    def _write(self, windows: Sequence[Window]) -> None:
        assert self._results is not None
        record = merge(self.epochs + 1, windows, self._seats, on_gpus=self._device.type == "cuda")
        self._results.add(record)
        if not all(window.stable for window in windows):
            steps = self._lengths.warmup_steps
            self.warn(f"the step time was not yet stable after {steps} warm-up steps")
        if jumps := [rank for rank, window in enumerate(windows) if window.clock_jumps]:
            ranks = ", ".join(map(str, jumps))
            self.warn(
                f"a host's clock was set in the attribution window (rank {ranks}): those steps do not count"
            )
        if record.samples is None:
            self.warn("the samples of a step are not known, so there is no throughput: use step(samples=...)")
        elif self._samples_per_step is None:
            self._samples_per_step = record.samples / len(record.step_s)
            self._write_environment()
        wrong = [rank for rank, window in enumerate(windows) if not _is_finite(window.loss)]
        if wrong:
            ranks = ", ".join(map(str, wrong))
            self.warn(f"the loss became NaN or infinite in epoch {record.epoch} on rank {ranks}")
        print(_line(record, self._lengths.epochs), flush=True)

    def _write_environment(self) -> None:
        env: Mapping[str, str] = os.environ
        found = surroundings(
            self._facts,
            env,
            backend=dist.get_backend() if dist.is_initialized() else env.get("BENCH_BACKEND", "none"),
            world_size=self._place.world_size,
            launcher=self._place.launcher,
            seconds=None,
            device=self._device,
            threads=torch.get_num_threads(),
        )
        batch = self._samples_per_step
        parameters, gradient_bytes = self._sizes
        write_json(
            self._folder.env,
            found
            | {
                "recorder": vars(self._lengths),
                "global_batch": round(batch) if batch is not None and batch == round(batch) else None,
                "parameters": parameters,
                "gradient_bytes": gradient_bytes,
                "warnings": self._warnings,
            },
        )


def _sizes(model: nn.Module | None) -> tuple[int | None, int | None]:
    """Return parameters, and bytes of their gradients; None where no model was given."""
    if model is None:
        return None, None
    trained = [p for p in model.parameters() if p.requires_grad]
    return sum(p.numel() for p in model.parameters()), sum(p.numel() * p.element_size() for p in trained)


def _is_finite(loss: float | None) -> bool:
    return loss is None or math.isfinite(loss)


def _line(record: EpochRecord, epochs: int | None) -> str:
    seconds = max(rank.window_s for rank in record.ranks)
    rate = "" if record.samples is None else f", {record.samples / seconds:.1f} samples/s"
    of = "" if epochs is None else f"/{epochs}"
    return f"bench: epoch {record.epoch}{of}: {len(record.step_s)} steps in {seconds:.3f} s{rate}"
