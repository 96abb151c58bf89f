"""Exchange of values between ranks: by collectives in the built-in workload, else through torch's store.

In a user's loop, ranks may take different numbers of steps. An additional collective could then hang the run.
The store cannot hang it: each rank writes its own keys, and rank 0 reads the records that all ranks wrote.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from bench.errors import BenchError
from bench.measure.torch_internals import group_store

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
    """Reads and writes records, by name and rank, in the store of the default process group.

    Without a process group, the store is local to this process. ``port`` is the store's TCP port; None if the
    store does not use TCP.

    Raises:
        BenchError: this release of torch does not give access to the store.
    """

    def __init__(self) -> None:
        if dist.is_initialized():
            store: Store = _store_of_group()
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        else:
            store, self.rank, self.world_size = HashStore(), 0, 1
        # The store of torchrun's agent outlives a restart of the ranks, and a program can have two recorders.
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = PrefixStore(f"bench-recorder/{restart}/{next(_exchanges)}", store)
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        self.port: int | None = getattr(store, "port", None)

    def clone(self) -> StoreExchange:
        """Return a copy for use in another thread, with its own connection if torch supports it."""
        other = copy.copy(self)
        if hasattr(self.store, "clone"):  # since torch 2.5
            other.store = self.store.clone()
        return other

    def post(self, name: str, content: Any) -> bool:
        """Write this rank's record; return False if the store can no longer be reached."""
        try:
            self.store.set(f"{name}/{self.rank}", json.dumps(content))
        except (dist.DistError, RuntimeError):
            return False
        return True

    def read(self, name: str, rank: int) -> Any | None:
        """Return one rank's record; None if it is missing."""
        found = self._get([f"{name}/{rank}"])
        return None if found is None else found[0]

    def read_all(self, name: str) -> list[Any] | None:
        """Return every rank's record in the order of the ranks; None if one is missing."""
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
