"""How ranks hand their records to rank 0: through torch's store, so that nobody ever waits in a collective.

A collective of ours between a user's collectives could hang a run whose ranks take different
numbers of steps. A key in the store cannot: each rank writes its own, rank 0 looks which are
complete, and only the end waits for the others, for a bounded time.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, distributed_c10d  # type: ignore[attr-defined]

from bench.measure.environment import RankFacts
from bench.measure.peers import Peers

_EVERY_S = 0.05
_numbers = itertools.count()


class Exchange(Protocol):
    """Records by name and rank."""

    @property
    def port(self) -> int | None:
        """Where the store listens; None where nothing does."""

    def post(self, name: str, content: Any) -> bool:
        """Hand over this rank's record called ``name``; return whether there is still a place for it."""

    def read(self, name: str) -> list[Any] | None:
        """Return every rank's record of that name, in the order of ranks; None unless all are there."""

    def present(self, name: str) -> list[int]:
        """Return the ranks whose record of that name is there."""

    def told(self, name: str, rank: int) -> Any | None:
        """Return one rank's record; None unless it is there."""


class LocalExchange:
    """One process by itself."""

    port: int | None = None

    def __init__(self) -> None:
        self._posted: dict[str, Any] = {}

    def post(self, name: str, content: Any) -> bool:
        """Keep the record."""
        self._posted[name] = content
        return True

    def read(self, name: str) -> list[Any] | None:
        """Return the record as a list of one."""
        return [self._posted[name]] if name in self._posted else None

    def present(self, name: str) -> list[int]:
        """Return rank 0, where it posted such a record."""
        return [0] if name in self._posted else []

    def told(self, name: str, rank: int) -> Any | None:
        """Return the record."""
        return self._posted.get(name)


class StoreExchange:
    """All ranks of the default process group, through the store in which they met."""

    def __init__(self) -> None:
        store: Store = distributed_c10d._get_default_store()
        # An agent's store outlives a restart of its ranks, and a program may record twice.
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = PrefixStore(f"bench-recorder/{restart}/{next(_numbers)}", store)
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        self.port: int | None = getattr(store, "port", None)

    def apart(self) -> StoreExchange:
        """Return the same over a connection of its own, where torch gives one, for another thread."""
        other = copy.copy(self)
        if hasattr(self._store, "clone"):  # since torch 2.5
            other._store = self._store.clone()
        return other

    def peers(self, facts: Sequence[RankFacts]) -> Peers:
        """Return the other ranks, as those to whom a failure is told."""
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("1", "true")
        return Peers(self._store, self._rank, facts, rank_0_serves=not by_agent)

    def post(self, name: str, content: Any) -> bool:
        """Put the record into the store; False where the store has gone with its host."""
        try:
            self._store.set(f"{name}/{self._rank}", json.dumps(content))
        except (dist.DistError, RuntimeError):
            return False
        return True

    def read(self, name: str) -> list[Any] | None:
        """Return every rank's record; None unless all are there."""
        keys = [f"{name}/{rank}" for rank in range(self._world_size)]
        try:
            return [json.loads(self._store.get(key)) for key in keys] if self._store.check(keys) else None
        except (dist.DistError, RuntimeError):
            return None

    def present(self, name: str) -> list[int]:
        """Return the ranks whose record is there."""
        try:
            return [rank for rank in range(self._world_size) if self._store.check([f"{name}/{rank}"])]
        except (dist.DistError, RuntimeError):
            return []

    def told(self, name: str, rank: int) -> Any | None:
        """Return one rank's record; None unless it is there."""
        key = f"{name}/{rank}"
        try:
            return json.loads(self._store.get(key)) if self._store.check([key]) else None
        except (dist.DistError, RuntimeError):
            return None


def wait_for_all(exchange: Exchange, name: str, *, world_size: int, timeout_s: float) -> list[int]:
    """Wait until every rank has posted ``name``; return the ranks that have not by then."""
    until = time.monotonic() + timeout_s
    while exchange.read(name) is None and time.monotonic() < until:
        time.sleep(_EVERY_S)
    there = set(exchange.present(name))
    return [rank for rank in range(world_size) if rank not in there]


# What ranks tell each other about measurements: small tensors, outside of every window.


class Collectives:
    """Reductions of plain numbers over all ranks of the default process group."""

    def __init__(self, device: torch.device, backend: str) -> None:
        self._device = device if backend == "nccl" else torch.device("cpu")
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def barrier(self) -> None:
        """Wait until every rank is here."""
        dist.all_reduce(self._tensor([0.0]))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def maxima(self, values: Sequence[float]) -> list[float]:
        """Return each place's largest value over the ranks."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def minima(self, values: Sequence[float]) -> list[float]:
        """Return each place's smallest value over the ranks."""
        return self._reduced(values, dist.ReduceOp.MIN)

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return each place's sum over the ranks."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def rows(self, values: Sequence[float]) -> list[list[float]]:
        """Return every rank's values (as many on each rank), in the order of the ranks."""
        own = self._tensor(values)
        gathered = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(gathered, own)
        return [row.tolist() for row in gathered]

    def objects(self, value: Any) -> list[Any]:
        """Return every rank's object, in the order of the ranks."""
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value)
        return gathered

    def _reduced(self, values: Sequence[float], operation: Any) -> list[float]:
        reduced = self._tensor(values)
        dist.all_reduce(reduced, op=operation)
        return [float(value) for value in reduced.tolist()]

    def _tensor(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._device)
