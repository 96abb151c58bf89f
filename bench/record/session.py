"""This rank of a recording among all others, once its first step has begun."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

from bench.measure.hosts import device_of, own_facts
from bench.record.exchange import Exchange, LocalExchange, StoreExchange, wait_for_all
from bench.record.merging import Window
from bench.record.rank_files import Scribe
from bench.record.settings import Lengths, Place, RecorderError, place_of, recording_folder
from bench.record.transport import backend_for, own_traces
from bench.study.layout import RunFolder


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
