"""Connect the nodes of a preflight job, and distribute tasks to them.

Each node runs one process. Rank 0 announces the tasks in the store, in which all nodes also post their
results. A node that is lost therefore costs its own results only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from bench.workload.launch import Launch

#: Time for which rank 0 waits for nodes that have not joined.
JOIN_S = 60.0
#: The first exchanges, which show how much to send in the others.
FIRST_BYTES = 4 * 2**20
MAX_BYTES = 256 * 2**20


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
