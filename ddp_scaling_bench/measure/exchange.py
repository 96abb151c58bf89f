"""Exchange of values between ranks, through torch's store or by collectives.

The recorder uses the store. In a user's loop, ranks can take different numbers of steps, and an additional
collective could then hang the run. The store cannot hang the run: each rank writes its own keys, and rank 0
reads the records of all ranks. Between the windows, the built-in training uses collectives of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from ..errors import BenchError
from .launch import Launch
from .ranks import Host, RankFacts, hosts_of
from .torch_internals import group_store

_T = TypeVar("_T")
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
        data = pickle.dumps(value)  # torch's function for objects needs numpy
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        sizes = [int(row[0]) for row in self.rows([len(data)])]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self._device)
        padded[: len(data)] = own
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded)
        rows = (bytes(row[:size].tolist()) for row, size in zip(gathered, sizes, strict=True))
        return [pickle.loads(row) for row in rows]  # noqa: S301 - the ranks trust each other

    def _reduce(self, values: Sequence[float], operation: Any) -> list[float]:
        reduced = self._tensor(values)
        dist.all_reduce(reduced, op=operation)
        return [float(value) for value in reduced.tolist()]

    def _tensor(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._device)


@dataclass(frozen=True)
class Met:
    """All ranks of a run after they have met: this rank, the store, all ranks' facts, and the time (s)."""

    launch: Launch
    store: Store
    facts: list[RankFacts]
    seconds: float

    @property
    def hosts(self) -> list[Host]:
        """The hosts of the run, in the order of their first ranks."""
        return hosts_of(self.facts)

    @property
    def is_first_on_host(self) -> bool:
        """True on the first rank of a host."""
        return any(host.ranks[0] == self.launch.rank for host in self.hosts)


class StoreExchange:
    """Read and write records, by name and rank, in the store in which the ranks ``met``.

    By default, the store is that of the process group, or without a group, it is local to this process.

    Raises:
        BenchError: this release of torch does not give access to the store.
    """

    def __init__(self, met: Met | None = None) -> None:
        store: Store | None
        if met is not None:
            store, self.rank, self.world_size = met.store, met.launch.rank, met.launch.world_size
        elif dist.is_initialized():
            store, self.rank, self.world_size = group_store(), dist.get_rank(), dist.get_world_size()
        else:
            store, self.rank, self.world_size = HashStore(), 0, 1
        if store is None:
            raise BenchError(
                f"torch {torch.__version__} does not give access to the store of the process group, which the"
                " recorder needs",
                remedy="use a release of torch from the table in docs/measuring.md",
            )
        # Separate keys: the store of torchrun's agent outlives a restart of the ranks, and a program can have
        # two recorders.
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = PrefixStore(f"bench-recorder/{restart}/{next(_exchanges)}", store)

    def post(self, name: str, content: Any) -> None:
        """Write this rank's record ``name``, unless the store can no longer be reached."""
        self._ask(lambda: self.store.set(f"{name}/{self.rank}", json.dumps(content)), None)

    def read_each(self, name: str) -> list[Any | None]:
        """Return the record ``name`` of every rank in the order of the ranks, None for each missing one."""
        return [one and one[0] for one in map(self._get, ([key] for key in self._keys(name)))]

    def read_all(self, name: str) -> list[Any] | None:
        """Return the record ``name`` of every rank in the order of the ranks, or None if one is missing."""
        return self._get(self._keys(name))

    def has_all(self, name: str) -> bool:
        """Return whether every rank has posted ``name``."""
        return self._ask(lambda: self.store.check(self._keys(name)), otherwise=False)

    def count(self, name: str, more: int) -> int:
        """Add ``more`` to the counter ``name`` of all ranks; return the sum, or 0 without the store."""
        return self._ask(lambda: self.store.add(name, more), otherwise=0)

    def _keys(self, name: str) -> list[str]:
        return [f"{name}/{rank}" for rank in range(self.world_size)]

    def _get(self, keys: list[str]) -> list[Any] | None:
        found = self._ask(lambda: self.store.multi_get(keys) if self.store.check(keys) else None, None)
        return None if found is None else [*map(json.loads, found)]

    @staticmethod
    def _ask(question: Callable[[], _T], otherwise: _T) -> _T:
        """Return the answer of the store, or ``otherwise`` if it can no longer be reached."""
        try:
            return question()
        except (dist.DistError, RuntimeError):
            return otherwise

    def wait_for_all(self, name: str, *, timeout_s: float) -> list[int]:
        """Wait until every rank has posted ``name``, and return the ranks still missing at the time-out."""
        deadline = time.monotonic() + timeout_s
        while not (found := self.has_all(name)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return [] if found else [rank for rank, one in enumerate(self.read_each(name)) if one is None]
