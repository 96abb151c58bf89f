"""Connect the nodes of a preflight job, and measure the rates at which pairs of them exchange messages.

Each node runs one process. Rank 0 announces the tasks in the store, in which all nodes also post their
results. A node that is lost therefore costs its own results only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from bench.preflight.pairing import Step
from bench.workload.launch import Launch

#: Time for which rank 0 waits for nodes that have not joined.
JOIN_S = 60.0
#: The first exchanges, which show how much to send in the others.
FIRST_BYTES = 4 * 2**20
MAX_BYTES = 256 * 2**20
#: Part of a message that is sent untimed, so that connections are up to speed and shapers have no credit
#: left.
_UNTIMED_PART = 8
_HELLO_BYTES = 64


class Meeting:
    """The nodes that joined: their ``ranks``, and their ``names`` by rank."""

    def __init__(self, launch: Launch, host: str) -> None:
        self.rank = launch.rank
        self._store = _open_store(launch)
        self._tasks = 0
        self._store.set(f"host/{self.rank}", host)
        if self.rank == 0:
            names = self._joined(launch.world_size)
            self._store.set("joined", json.dumps(names))
        self._store.wait(["joined"], timedelta(seconds=2 * JOIN_S))
        found = json.loads(self._store.get("joined"))
        self.names: dict[int, str] = {int(rank): name for rank, name in found.items()}
        self.ranks = sorted(self.names)

    def _joined(self, world_size: int) -> dict[int, str]:
        keys = {rank: f"host/{rank}" for rank in range(world_size)}
        try:
            self._store.wait(list(keys.values()), timedelta(seconds=JOIN_S))
        except (dist.DistError, RuntimeError):
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        return {rank: self._store.get(key).decode() for rank, key in keys.items()}

    @property
    def place(self) -> int:
        """The number of this node among those that joined, from 0."""
        return self.ranks.index(self.rank)

    def connect(self, backend: str) -> None:
        """Create the process group of the nodes that joined."""
        dist.init_process_group(
            backend,
            store=PrefixStore("group", self._store),
            rank=self.place,
            world_size=len(self.ranks),
            timeout=timedelta(seconds=60),
        )

    def announce(self, task: Mapping[str, Any]) -> None:
        """Let all nodes perform a task (rank 0)."""
        self._store.set(f"task/{self._tasks + 1}", json.dumps(task))

    def next_task(self, *, timeout_s: float) -> dict[str, Any]:
        """Wait for the next task that rank 0 announces."""
        self._tasks += 1
        key = f"task/{self._tasks}"
        self._store.wait([key], timedelta(seconds=timeout_s))
        task: dict[str, Any] = json.loads(self._store.get(key))
        return task

    def post(self, result: Any) -> None:
        """Post this node's result of the current task."""
        self._store.set(f"result/{self._tasks}/{self.rank}", json.dumps(result))

    def results(self, *, timeout_s: float) -> list[Any | None]:
        """Return the results of the current task by node; None for a node that posted none (rank 0)."""
        keys = [f"result/{self._tasks}/{rank}" for rank in self.ranks]
        try:
            self._store.wait(keys, timedelta(seconds=timeout_s))
            return [json.loads(value) for value in self._store.multi_get(keys)]
        except (dist.DistError, RuntimeError):
            return [json.loads(self._store.get(key)) if self._store.check([key]) else None for key in keys]


def _open_store(launch: Launch) -> Store:
    if launch.world_size == 1:
        return HashStore()
    return TCPStore(
        launch.address,
        launch.port,
        launch.world_size,
        is_master=launch.rank == 0,
        timeout=timedelta(seconds=JOIN_S),
        wait_for_workers=False,
    )


def exchange_steps(
    steps: Sequence[Step], me: int, device: torch.device, *, count: int, deadline: float
) -> dict[int, float]:
    """Exchange ``count`` bytes with this node's partner in each step; return bytes/s received, by partner.

    All nodes must pass the same steps. After ``deadline`` (of :func:`time.monotonic`), no exchange starts:
    both partners compare their times in the first message of an exchange.
    """
    buffers = _Buffers(count, device)
    rates: dict[int, float] = {}
    for step in steps:
        partner = _partner(step, me)
        if partner is None or partner in rates:
            continue
        if not buffers.agree(partner, time.monotonic() < deadline):
            continue
        rates[partner] = buffers.rate(partner)
    return rates


def _partner(step: Step, me: int) -> int | None:
    return next((b if a == me else a for a, b in step if me in (a, b)), None)


class _Buffers:
    """Memory for the messages of one task."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._device = device
        self._sent = torch.ones(count, dtype=torch.uint8, device=device)
        self._received = torch.zeros_like(self._sent)
        self._untimed = max(1, count // _UNTIMED_PART)

    def agree(self, partner: int, value: bool) -> bool:
        """Return True if both partners pass True."""
        mine = torch.full((_HELLO_BYTES,), int(value), dtype=torch.uint8, device=self._device)
        theirs = torch.zeros_like(mine)
        self._swap(mine, theirs, partner)
        return value and bool(theirs[0].item())

    def rate(self, partner: int) -> float:
        """Send and receive at the same time; return the bytes/s received."""
        self._swap(self._sent[: self._untimed], self._received[: self._untimed], partner)
        return self._sent.numel() / self._swap(self._sent, self._received, partner)

    def _swap(self, sent: torch.Tensor, received: torch.Tensor, partner: int) -> float:
        """Exchange messages; return the seconds until this node's message has arrived."""
        began = time.perf_counter()
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, received, partner), dist.P2POp(dist.isend, sent, partner)]
        )
        works[0].wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - began
        for work in works[1:]:
            work.wait()
        return seconds
