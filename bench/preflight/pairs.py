"""Measure the rate at which a pair of nodes exchanges messages.

An all-reduce over a ring is as fast as its slowest link, and does not show which link is the slowest.
Exchanges between two nodes, in both directions at once, show a single slow node or link. Each pair has its
own process group, so a pair that hangs stops no other pair.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from ..measure.step_parts import clock_for

#: Fraction of the messages that is sent untimed first, and its minimum size in bytes. Connections then reach
#: full speed, and traffic shapers use up their credit of some 100 KiB.
_UNTIMED_PART, _MIN_UNTIMED = 8, 2**19
#: Largest message. A rate that needs more bytes is measured with several messages, and not with more memory.
MAX_MESSAGE = 256 * 2**20
_HELLO_WORDS = 8


def exchange_rate(
    store: Store, place: int, device: torch.device, *, backend: str, count: int, timeout_s: float
) -> float:
    """Exchange ``count`` bytes with the partner; return the bytes/s received.

    After an exception, this process cannot exchange messages again.
    ``place`` is 0 or 1, the rank of this process in the pair. Both call this function with the same values
    and a store that no other pair uses.
    """
    dist.init_process_group(
        backend,
        store=store,
        rank=place,
        world_size=2,
        timeout=timedelta(seconds=timeout_s),
        # The communicator is then created now. Otherwise NCCL would also connect a ring for collectives.
        device_id=device if backend == "nccl" else None,
    )
    rate = Exchange(1 - place, device, count).rate()
    dist.destroy_process_group()  # not after an error, because it can hang then
    return rate


class Exchange:
    """Messages of two nodes in both directions at once."""

    def __init__(self, partner: int, device: torch.device, count: int) -> None:
        self._partner = partner
        self._clock = clock_for(device)
        self._count = count
        self._sent = torch.empty(min(count, MAX_MESSAGE), dtype=torch.uint8, device=device)
        self._received = torch.empty_like(self._sent)
        self._hello = [torch.zeros(_HELLO_WORDS, dtype=torch.int64, device=device) for _ in range(2)]

    def rate(self) -> float:
        """Exchange the messages; return the bytes/s received.

        On a GPU, all messages and stamps are queued while the untimed messages are sent, so the time contains
        no launch and no synchronisation.
        """
        self._greet()
        self._clock.synchronize()  # the connection exists
        self._send(min(self._count, max(_MIN_UNTIMED, self._count // _UNTIMED_PART)))
        self._greet()  # a fast receiver waits for the slow one, so that both begin together
        begin = self._clock.stamp()
        # The partner sends its messages after this greeting. Therefore the time is never too short, even if
        # this process is delayed, and the highest of several rates is the most accurate.
        self._greet()
        end = self._send(self._count)
        self._greet()  # both have received everything before one of them closes its connection
        self._clock.synchronize()
        return self._count / self._clock.seconds(begin, end)

    def _greet(self) -> None:
        self._swap(*self._hello)

    def _send(self, count: int) -> object:
        """Exchange ``count`` bytes; return the stamp of the arrival of the last message."""
        arrived = None
        while count:
            part = min(count, self._sent.numel())
            arrived = self._swap(self._sent[:part], self._received[:part])
            count -= part
        return arrived

    def _swap(self, sent: torch.Tensor, received: torch.Tensor) -> object:
        """Exchange messages; return the stamp of the arrival of ``received``."""
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, received, self._partner), dist.P2POp(dist.isend, sent, self._partner)]
        )
        # With gloo, wait() blocks the host. With NCCL, the GPU's stream waits, for both directions at once.
        works[0].wait()
        arrived = self._clock.stamp()
        for work in works[1:]:
            work.wait()
        return arrived
