"""Exchange of values and errors between ranks, by collectives or through torch's store.

The built-in workload uses collectives. In a user's loop, ranks can take different numbers of steps, and an
additional collective could then hang the run. The store cannot hang the run: each rank writes its own keys,
and rank 0 reads the records of all ranks.

When one rank ends, is killed or hangs, communication breaks on all other ranks. The store usually still
answers for a moment. Every failing rank reports its error in the store. Ranks that only lost a connection
read which rank failed first, or which ranks reported nothing.
"""

from __future__ import annotations

import enum
import itertools
import json
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from ..errors import BenchError
from .failures import Failure, HostRank, LateCollective, LostConnection, RaisedError
from .nccl_errors import NcclError, nccl_error
from .ranks import RankFacts
from .torch_internals import group_store

_POLL_S = 0.05
_exchanges = itertools.count()


class Collectives:
    """Reductions of plain numbers over all ranks of the default process group."""

    def __init__(self, device: torch.device, backend: str) -> None:
        self._device = device if backend == "nccl" else torch.device("cpu")
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def barrier(self) -> None:
        """Wait for every rank."""
        dist.all_reduce(self._tensor([0.0]))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def maxima(self, values: Sequence[float]) -> list[float]:
        """Return the elementwise maxima over the ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def minima(self, values: Sequence[float]) -> list[float]:
        """Return the elementwise minima over the ranks."""
        return self._reduce(values, dist.ReduceOp.MIN)

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return the elementwise sums over the ranks."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def rows(self, values: Sequence[float]) -> list[list[float]]:
        """Return every rank's values in the order of the ranks; all ranks must pass equally many values."""
        own = self._tensor(values)
        gathered = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(gathered, own)
        return [row.tolist() for row in gathered]

    def objects(self, value: Any) -> list[Any]:
        """Return every rank's object in the order of the ranks."""
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value)
        return gathered

    def gathered(self, value: Any) -> list[Any] | None:
        """Return every rank's object in the order of the ranks on rank 0, and None on the other ranks."""
        gathered: list[Any] | None = None if self.rank else [None] * self.world_size
        dist.gather_object(value, gathered)
        return gathered

    def _reduce(self, values: Sequence[float], operation: Any) -> list[float]:
        reduced = self._tensor(values)
        dist.all_reduce(reduced, op=operation)
        return [float(value) for value in reduced.tolist()]

    def _tensor(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._device)


class StoreExchange:
    """Read and write records, by name and rank, in the store of the default process group.

    Without a process group, the store is local to this process.

    Raises:
        BenchError: this release of torch does not give access to the store.
    """

    def __init__(self) -> None:
        if dist.is_initialized():
            store: Store = _store_of_group()
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        else:
            store, self.rank, self.world_size = HashStore(), 0, 1
        # Separate keys: the store of torchrun's agent outlives a restart of the ranks, and a program can have
        # two recorders.
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = PrefixStore(f"bench-recorder/{restart}/{next(_exchanges)}", store)

    def post(self, name: str, content: Any) -> None:
        """Write this rank's record ``name``, unless the store can no longer be reached."""
        with suppress(dist.DistError, RuntimeError):
            self.store.set(f"{name}/{self.rank}", json.dumps(content))

    def read(self, name: str, rank: int) -> Any | None:
        """Return the record ``name`` of one rank, or None if it is missing."""
        found = self._get([f"{name}/{rank}"])
        return None if found is None else found[0]

    def read_all(self, name: str) -> list[Any] | None:
        """Return the record ``name`` of every rank in the order of the ranks, or None if one is missing."""
        return self._get([f"{name}/{rank}" for rank in range(self.world_size)])

    def _get(self, keys: list[str]) -> list[Any] | None:
        try:
            return [json.loads(self.store.get(key)) for key in keys] if self.store.check(keys) else None
        except (dist.DistError, RuntimeError):
            return None

    def wait_for_all(self, name: str, *, timeout_s: float) -> list[int]:
        """Wait until every rank has posted ``name``, and return the ranks still missing at the time-out."""
        deadline = time.monotonic() + timeout_s
        while self.read_all(name) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return [rank for rank in range(self.world_size) if self.read(name, rank) is None]


def _store_of_group() -> Store:
    store = group_store()
    if store is None:
        raise BenchError(
            f"torch {torch.__version__} does not give access to the store of the process group, which the"
            " recorder needs",
            remedy="use a release of torch from the table in docs/measuring.md",
        )
    return store


_PEER_LOST = re.compile(
    r"connection (closed|reset|was closed) by (remote )?peer|remote process exited|socket closed|broken pipe"
    r"|failed to recv, got 0 bytes|\[.*gloo/transport/.*\].*(read|write)(v)? error|Connection refused",
    re.IGNORECASE,
)
_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
# "Application timeout caused pair closure" is also a message of gloo, although the text does not name gloo.
_GLOO_OR_NCCL = re.compile(r"gloo|nccl|c10d|store|pair closure", re.IGNORECASE)

#: Time that a failing rank waits for the reports of other ranks, which probably fail at the same time.
REPORTS_TIMEOUT_S = 2.0


class Symptom(enum.Enum):
    """The error that a rank sees when communication breaks; such an error seldom names the cause."""

    LOST = enum.auto()
    TIMED_OUT = enum.auto()


def symptom_of(error: BaseException) -> Symptom | None:
    """Classify an error of broken communication; return None for any other error.

    An error of NCCL is no time-out of a collective, which torch's watchdog reports without an exception. A
    time-out in NCCL's own words means that NCCL cannot connect to another rank.
    """
    text = str(error)
    if isinstance(error, dist.DistError) and (of_nccl := nccl_error(text)):
        return Symptom.LOST if of_nccl.is_remote or _PEER_LOST.search(of_nccl.last) else None
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _GLOO_OR_NCCL.search(text)):
        if _PEER_LOST.search(text):
            return Symptom.LOST
        if _TIMED_OUT.search(text):
            return Symptom.TIMED_OUT
    return None


def nccl_of(error: BaseException) -> NcclError | None:
    """Return NCCL's own error in the message of an exception, or None."""
    return nccl_error(str(error))


def raised(error: BaseException) -> RaisedError:
    """Return the failure of an error that nobody expects, with NCCL's last error or the first line."""
    lines = str(error).strip().splitlines()
    nccl = nccl_of(error)
    return RaisedError(error=type(error).__name__, text=lines[0] if lines and not nccl else "", nccl=nccl)


def error_line(error: BaseException) -> str:
    """Format an error in one line."""
    return raised(error).message


def broken_group(
    symptom: Symptom, *, timeout_s: float | None, option: str, **known: Any
) -> LostConnection | LateCollective:
    """Return the failure of a rank that sees ``symptom``, with what is known of its cause.

    ``timeout_s`` is the time-out of collectives, or None if it is unknown; ``option`` sets it.
    """
    if symptom is Symptom.LOST:
        return LostConnection(**known)
    return LateCollective(timeout_s=timeout_s, option=option, **known)


@dataclass
class _Reports:
    """The first failure that another rank reported; ``silent`` lists the ranks that reported nothing."""

    first: int | None = None
    said: str = ""
    silent: list[int] = field(default_factory=list)
    store_is_lost: bool = False


class Peers:
    """The other ranks of a run, reached through the store in which all ranks met.

    ``rank_0_serves`` is true if rank 0 serves the store; the store then ends with rank 0. Otherwise
    torchrun's agent serves the store.
    """

    def __init__(self, store: Store, rank: int, facts: Sequence[RankFacts], *, rank_0_serves: bool) -> None:
        self._store = PrefixStore("failed", store)
        self._rank = rank
        self._facts = facts
        self._rank_0_serves = rank_0_serves

    def report(self, cause: str) -> None:
        """Report to the other ranks why this rank fails."""
        content = json.dumps([self._rank, cause]) + "\n"
        self._with_timeout(lambda _: self._store.append("causes", content))  # type: ignore[attr-defined]

    def explain(self, symptom: Symptom, *, timeout_s: float | None, option: str) -> Failure | None:
        """Return the failure with the cause of broken communication, or None if no rank knows the cause.

        The arguments are those of :func:`broken_group`.
        """
        reports = self._with_timeout(self._collect)
        known: dict[str, Any] = {}
        if reports.first is not None:
            known = {"first": self.name_of(reports.first), "said": reports.said}
        elif reports.store_is_lost and self._rank_0_serves:
            known = {"ended": self.name_of(0)}
        elif reports.silent:
            known = {"absent": tuple(map(self.name_of, reports.silent))}
        if not known:
            return None
        own = (self.name_of(self._rank),)
        return broken_group(symptom, timeout_s=timeout_s, option=option, failed=own, **known)

    def name_of(self, rank: int) -> HostRank:
        """Return the rank with its host."""
        return HostRank(rank, self._facts[rank].host)

    def _with_timeout(self, use_store: Callable[[_Reports], object]) -> _Reports:
        """Run ``use_store`` in a thread with a time limit, because the store's server can hang."""
        reports = _Reports()

        def target() -> None:
            try:
                use_store(reports)
            except (dist.DistError, RuntimeError):
                reports.store_is_lost = True

        thread = threading.Thread(target=target, daemon=True)
        try:
            thread.start()
            thread.join(2 * REPORTS_TIMEOUT_S)
        except RuntimeError:  # at exit, Python 3.12 starts no thread; the store then limits each operation
            self._store.set_timeout(timedelta(seconds=REPORTS_TIMEOUT_S))
            target()
        return reports

    def _collect(self, reports: _Reports) -> None:
        store, world_size = self._store, len(self._facts)
        store.append("came", f"{self._rank}\n")  # type: ignore[attr-defined]
        count = store.add("count", 1)
        deadline = time.monotonic() + REPORTS_TIMEOUT_S
        while count < world_size and not store.check(["causes"]) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            count = store.add("count", 0)
        if store.check(["causes"]):
            reports.first, reports.said = json.loads(store.get("causes").splitlines()[0])
        present = {int(line) for line in store.get("came").split()}
        reports.silent = [one.rank for one in self._facts if one.rank not in present]
        self._wait_for_readers()

    def _wait_for_readers(self) -> None:
        """Keep rank 0 (often the store's server) alive until the other failing ranks have read the store."""
        read = self._store.add("read", 1)
        deadline = time.monotonic() + REPORTS_TIMEOUT_S / 2
        while self._rank == 0 and read < self._store.add("count", 0) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            read = self._store.add("read", 0)
