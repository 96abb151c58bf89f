"""One rank's part of a recording: each rank posts its records to the store, and rank 0 writes the files."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace

import torch
import torch.distributed as dist
from torch import nn

from ..cell_json import CellFile
from ..finding import with_remedies
from ..measure.environment import device_of
from ..measure.exchange import Met, StoreExchange
from ..measure.failures import HostRank, OtherSize, write_failures
from ..measure.findings import NoWindow, RankUnfinished, StepsDiffer
from ..measure.launch import Launch, LaunchError, launch_from
from ..measure.peers import LEFT, Peers, raised, symptom_of
from ..measure.ranks import RankFacts, own_facts
from ..measure.results import Window
from ..measure.torch_internals import collective_timeout_s
from ..measure.transport import backend_for, read_traces, release_nccl_log
from ..run_folder import RunFolder
from ..train.strategies import Parts, Strategy
from .settings import Lengths, RecorderError, make_folder, recording_folder
from .writer import Recording, RunWriter


def launch_of(env: Mapping[str, str], group: tuple[int, int] | None, cell: CellFile | None = None) -> Launch:
    """Detect how this process was launched; ``group`` is (rank, world size) in the process group, if any.

    Raises:
        RecorderError: several processes were started without a process group, or the group's size is not
            that of the run's ``cell``, if it is known.
    """
    planned = cell.world_size if cell is not None and cell.launcher == "own" else 0
    try:
        launch = launch_from(env, own=planned > 0)
    except LaunchError:  # of variables that this program may not use
        launch = Launch("single", 0, 0, 1)
    if group is not None:
        rank, size = group
        if cell is not None and size != cell.world_size:
            raise RecorderError(OtherSize(started=size, planned=cell.world_size, launcher=cell.launcher))
        return replace(launch, rank=rank, world_size=size)
    if launch.world_size == 1 < planned:
        raise RecorderError(OtherSize(started=1, planned=planned, launcher="own"))
    if launch.world_size > 1:
        raise RecorderError(
            "the first step came before torch.distributed was set up, in a job of "
            f"{launch.world_size} processes",
            remedy="call torch.distributed.init_process_group before the recorder's first step",
        )
    return launch


class Session(Recording):
    """One rank of a recording, from its first step on.

    Raises:
        RecorderError: several processes run without a process group, or the folder cannot be created.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None,
        device: torch.device,
        lengths: Lengths,
        cell: CellFile | None,
        met: Met | None,
    ) -> None:
        group = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
        launch = met.launch if met else launch_of(os.environ, group, cell)
        planned = cell.backend if cell else "none"
        backend = planned if group is None else backend_for(device)
        super().__init__(launch, StoreExchange(met), backend, device, lengths, met)
        self.is_rare = cell is not None and cell.workload.get("exchange") == "rare"
        self.model_parallel = 1 if cell is None else int(cell.workload.get("model_parallel", 1))
        self._timeout_s = collective_timeout_s(device)
        self._meetings: int | None = 0  # None after a time-out
        self._folder = None
        if self.launch.rank == 0:
            self._folder = RunFolder(recording_folder(run_dir, os.environ)) if met else make_folder(run_dir)
        #: Writes the files on rank 0.
        self.writer = None if self._folder is None else RunWriter(self, self._folder)
        rank, local_rank = self.launch.rank, self.launch.local_rank
        facts = own_facts(rank, local_rank, os.environ, threads=torch.get_num_threads())
        #: True on one rank of each node: the first that comes here.
        self.reads_node = met.is_first_on_host if met else self.exchange.count(f"node/{facts.host}", 1) == 1
        own = device_of(device, facts.host)
        record = {"facts": asdict(facts), "device": own.name, "identity": own.identity}
        self.exchange.post("facts", record)

    def watch(self, model: nn.Module | None, strategy: tuple[Strategy | None, Parts]) -> None:
        """On rank 0, note which model is trained, and its strategy."""
        if self.writer is not None:
            self.writer.watch(model, *strategy)

    def flush(self, number: int, *, timeout_s: float) -> None:
        """On rank 0, wait for the windows of epoch ``number`` of all ranks, and write them."""
        if self.writer is not None:
            self.exchange.wait_for_all(f"window/{number}", timeout_s=timeout_s if number else 0.0)
            self.writer.write()

    def post(self, number: int, window: Window, *, early: bool = False) -> None:
        """Send this rank's window of epoch ``number`` to the store; in epoch 1, also the transport in use.

        ``early`` is true before the attribution window, so that the throughput is kept if that never ends.
        """
        self.exchange.post(f"{'early' if early else 'window'}/{number}", asdict(window))
        if number == 1 and not early and dist.is_initialized():
            traces = read_traces(self.backend, env=os.environ, rank=self.launch.rank)
            self.exchange.post("transport", traces)

    def explain(self, error: Exception) -> None:
        """Print and report this rank's error; if communication broke, print the cause that others report."""
        contents = self.exchange.read_all("facts") or []
        if len(contents) < 2:
            return
        facts = [RankFacts(**one["facts"]) for one in contents]
        option = "the time-out of init_process_group"
        peers = Peers(self.exchange.store, self.launch, facts, timeout_s=self._timeout_s, option=option)
        own = HostRank(self.launch.rank, facts[self.launch.rank].host)
        failure = peers.failure_of(error, replace(raised(error), failed=(own,)))
        if failure is not None:
            write_failures([failure], self.launch.rank)
            hint = "" if symptom_of(error) else "see the traceback above"
            text = "; ".join(filter(None, (with_remedies([failure]), hint)))
            print(f"bench: error: {text}", file=sys.stderr, flush=True)

    def meet(self, *, timeout_s: float) -> None:
        """Wait until all ranks have called this equally often; after a time-out, never wait again."""
        if self._meetings is None:
            return
        self._meetings += 1
        self.exchange.post(name := f"meeting/{self._meetings}", True)
        if self.exchange.wait_for_all(name, timeout_s=timeout_s):
            self._meetings = None

    def finish(self, posted: int, steps: int, *, timeout_s: float) -> None:
        """Report that this rank ended after ``posted`` windows; rank 0 waits and writes the last records."""
        self.exchange.post("closed", posted)
        if timeout_s:  # after an exception, NCCL's warnings are still needed
            self.exchange.post(LEFT, steps)
            release_nccl_log(os.environ, self._folder)
        writer = self.writer
        if writer is None:
            return
        late = self.exchange.wait_for_all("closed", timeout_s=timeout_s)
        writer.write(is_last=True)
        if late and timeout_s:
            writer.add(RankUnfinished(ranks=tuple(late), timeout_s=timeout_s))
        counts = self.exchange.read_all("closed")
        if counts and len(set(counts)) > 1:
            most, fewest = max(counts), min(counts)
            most_rank, fewest_rank = counts.index(most), counts.index(fewest)
            writer.add(StepsDiffer(most_rank=most_rank, fewest_rank=fewest_rank, most=most, fewest=fewest))
        if not writer.epochs:
            if steps or not timeout_s:  # without a step, that is the failure
                writer.add(NoWindow(steps=self.warmup_steps + 1))
        elif timeout_s and (fewer := writer.fewer_windows()):  # else an exception ended the training
            writer.add(fewer)
