"""Rank 0's part: it puts the ranks' records together and writes the run's folder."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.errors import UnwritableError
from bench.measure.environment import RankFacts, device_of, oversubscription_warnings, own_facts, surroundings
from bench.measure.exchange import Exchange, LocalExchange, StoreExchange, wait_for_all
from bench.measure.results import RankPlace, Results, progress_line
from bench.measure.transport import (
    backend_for,
    configured_transport,
    own_traces,
    transport_in_use,
    users_variables,
)
from bench.measure.windows import Window, merge_windows
from bench.record.attribution import find_ddp
from bench.record.settings import Lengths, Place, RecorderError, place_of, recording_folder
from bench.study.files import write_json
from bench.study.layout import RunFolder


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
        backend: str,
    ) -> None:
        self._folder = folder
        self._exchange = exchange
        self._place = place
        self._lengths = lengths
        self._device = device
        self._backend = backend
        self._transport: dict[str, Any] | None = None  # once it is known to be in use
        self._sizes = _sizes(model)
        self._has_bare_model = model is not None and find_ddp(model) is None
        self._facts: list[RankFacts] = []
        self._places: list[RankPlace] = []
        self._results: Results | None = None
        self._samples_per_step: float | None = None
        self._warnings: list[str] = []
        self._lock = threading.RLock()  # a loop that stands still is looked after by another thread
        self.epochs = 0

    def look(self, *, is_last: bool = False) -> None:
        """Write what is complete by now; nothing is waited for.

        A disk that is full does not end the training; it is said once.

        Args:
            is_last: whether a rank's window counts whose attribution has not ended.
        """
        with self._lock:
            try:
                self._look(is_last)
            except UnwritableError as error:
                self._tell(f"what is measured is lost: {error}")

    def _look(self, is_last: bool) -> None:
        if not self._facts and not self._meet():
            return
        while (contents := self._windows_of(self.epochs + 1, is_last)) is not None:
            self._write([Window.from_json(content) for content in contents])
            self.epochs += 1
        if self._transport is None and (traces := self._exchange.read("transport")) is not None:
            self._transport, warning = transport_in_use(
                traces, self._facts, backend=self._backend, env=os.environ
            )
            if warning:
                self._tell(warning)
            self._write_environment()

    def _windows_of(self, epoch: int, is_last: bool) -> list[Any] | None:
        """Return every rank's window; None unless all are there."""
        contents = self._exchange.read(f"window/{epoch}")
        if contents is not None or not is_last:
            return contents
        ranks = range(self._place.world_size)
        either = [
            self._exchange.told(f"window/{epoch}", rank) or self._exchange.told(f"early/{epoch}", rank)
            for rank in ranks
        ]
        return None if None in either else either

    def warn(self, words: str) -> None:
        """Keep a warning for env.json, once, and print it."""
        with self._lock:
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
        self._places = [
            RankPlace(facts.rank, facts.local_rank, facts.host, one["device"], one["identity"])
            for facts, one in zip(self._facts, contents, strict=True)
        ]
        self._results = Results(self._folder, self._places)
        if self._place.world_size > 1 and self._has_bare_model:
            self._tell(
                "the recorder's model is not under DDP: exposed communication is not known, and backward may"
                " hold it; give Recorder what the loop calls"
            )
        for warning in oversubscription_warnings(self._facts):
            self.warn(warning)
        self._write_environment()
        return True

    def _write(self, windows: Sequence[Window]) -> None:
        assert self._results is not None
        record = merge_windows(self.epochs + 1, windows, self._places, on_gpus=self._device.type == "cuda")
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
        print(progress_line(record, self._lengths.epochs), flush=True)

    def _write_environment(self) -> None:
        env = users_variables(os.environ)
        found = surroundings(
            self._facts,
            env,
            backend=self._backend,
            world_size=self._place.world_size,
            launcher=self._place.launcher,
            seconds=None,
            device=self._device,
            threads=torch.get_num_threads(),
            transport=self._transport or configured_transport(self._backend, env),
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


class Session:
    """Takes this rank's records to rank 0, which writes them.

    Raises:
        RecorderError: several processes without a process group, or a folder that cannot be made.
    """

    def __init__(
        self,
        model: nn.Module | None,
        *,
        run_dir: str | os.PathLike[str] | None,
        device: torch.device,
        lengths: Lengths,
    ) -> None:
        group = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
        self.place: Place = place_of(os.environ, group)
        self.exchange: Exchange = LocalExchange() if group is None else StoreExchange()
        self.backend = None if group is None else backend_for(device)
        self._folder = _folder(run_dir) if self.place.rank == 0 else None
        self._scribe: Scribe | None = None
        if self._folder is not None:
            self._scribe = Scribe(
                self._folder,
                self.exchange,
                place=self.place,
                lengths=lengths,
                device=device,
                model=model,
                backend=self.backend or os.environ.get("BENCH_BACKEND", "none"),
            )
        facts = own_facts(self.place.rank, self.place.local_rank, os.environ)
        self.host = facts.host
        own = device_of(device, facts.host)
        record = {"facts": facts.as_json(), "device": own.name, "identity": own.identity}
        self.exchange.post("facts", record)

    def post(self, number: int, window: Window) -> None:
        """Hand over this rank's window of an epoch; with the first, what it can tell of the transport."""
        self.exchange.post(f"window/{number}", window.as_json())
        if number == 1 and self.backend is not None:
            traces = own_traces(
                self.backend,
                store_port=self.exchange.port,
                env=os.environ,
                rank=self.place.rank,
                folder=self._folder,
            )
            self.exchange.post("transport", traces)

    def post_early(self, number: int, window: Window) -> None:
        """Hand over the same before its attribution."""
        self.exchange.post(f"early/{number}", window.as_json())

    def look(self, *, is_last: bool = False) -> None:
        """Write what all ranks have handed over by now, where this is rank 0.

        Args:
            is_last: whether nothing more may come: what was handed over early counts, too.
        """
        if self._scribe is not None:
            self._scribe.look(is_last=is_last)

    def warn(self, words: str) -> None:
        """Keep a warning for env.json, where this is rank 0, and print it."""
        if self._scribe is not None:
            self._scribe.warn(words)
        else:
            print(f"bench: warning: {words}", flush=True)

    def finish(self, posted: int, *, warmup_steps: int, timeout_s: float) -> None:
        """Say that this rank has handed over all of its windows; rank 0 writes the rest.

        Args:
            posted: how many windows.
            warmup_steps: those before the first window.
            timeout_s: how long rank 0 waits for the others.
        """
        self.exchange.post("closed", posted)
        scribe = self._scribe
        if scribe is None:
            return
        late = wait_for_all(self.exchange, "closed", world_size=self.place.world_size, timeout_s=timeout_s)
        scribe.look(is_last=True)
        if late and timeout_s:
            ranks = ", ".join(map(str, late))
            scribe.warn(f"no end came from rank {ranks} in {timeout_s:g} s: what they recorded last is lost")
        counts = self.exchange.read("closed")
        if counts and len(set(counts)) > 1:
            most, fewest = max(counts), min(counts)
            told = f"rank {counts.index(most)} has {most}, rank {counts.index(fewest)} has {fewest}"
            scribe.warn(f"ranks took different numbers of steps ({told} epochs): what all have is kept")
        if not scribe.epochs:
            wanted = warmup_steps + 1
            scribe.warn(f"no window was recorded: there were fewer than {wanted} steps on some rank")


def _folder(run_dir: str | os.PathLike[str] | None) -> RunFolder:
    folder = RunFolder(recording_folder(run_dir, os.environ))
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecorderError(f"{folder.path}: cannot be made: {error.strerror}") from None
    print(f"bench: recording into {folder.path}", flush=True)
    return folder
