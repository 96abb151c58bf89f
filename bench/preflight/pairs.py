"""Measure the rates at which pairs of nodes exchange messages.

An all-reduce over a ring is as fast as its slowest link, and does not show which link is the slowest.
Exchanges between two nodes, in both directions at once, show a single slow node or link.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

#: Fraction of a message that is sent untimed first, and its minimum size in bytes. Connections then reach
#: full speed, and traffic shapers use up their credit of some 100 KiB.
_UNTIMED_PART, _MIN_UNTIMED = 8, 2**19
_HELLO_WORDS = 8


def exchange_steps(
    steps: Sequence[Sequence[tuple[int, int]]],
    me: int,
    device: torch.device,
    *,
    count: int,
    deadline: float,
) -> dict[int, float]:
    """Exchange ``count`` bytes with this rank's partner in each step; return bytes/s received, by partner.

    A step contains the pairs of ranks that exchange messages at the same time; a rank is in at most one
    pair. All ranks must pass the same steps. After ``deadline`` (of :func:`time.monotonic`), no
    exchange starts; with a first message, the partners agree whether their exchange starts.
    """
    buffers = _Buffers(count, device)
    rates: dict[int, float] = {}
    for step in steps:
        partner = next((b if a == me else a for a, b in step if me in (a, b)), None)
        if partner is not None and buffers.agree(partner, time.monotonic() < deadline):
            rates[partner] = buffers.rate(partner)
    return rates


class _Buffers:
    """Memory for the messages of one rank."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._device = device
        self._sent = torch.empty(count, dtype=torch.uint8, device=device)
        self._received = torch.empty_like(self._sent)

    def agree(self, partner: int, value: bool) -> bool:
        """Return True if both partners pass True."""
        mine = torch.full((_HELLO_WORDS,), int(value), dtype=torch.int64, device=self._device)
        theirs = torch.zeros_like(mine)
        self._swap(mine, theirs, partner)
        return value and bool(theirs[0].item())

    def rate(self, partner: int) -> float:
        """Send and receive at the same time; return the bytes/s received."""
        count = self._sent.numel()
        untimed = min(count, max(_MIN_UNTIMED, count // _UNTIMED_PART))
        self._swap(self._sent[:untimed], self._received[:untimed], partner)
        self.agree(partner, True)  # a fast receiver waits for the slow one, so that both begin together
        began = time.perf_counter()
        # The partner sends its message after this agreement. Therefore the time is never too short, even if
        # this process is delayed, and the highest of several rates is the most accurate.
        self.agree(partner, True)
        return count / (self._swap(self._sent, self._received, partner) - began)

    def _swap(self, sent: torch.Tensor, received: torch.Tensor, partner: int) -> float:
        """Exchange messages; return the time (of the performance counter) at which ``received`` arrived."""
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, received, partner), dist.P2POp(dist.isend, sent, partner)]
        )
        works[0].wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        arrived = time.perf_counter()
        for work in works[1:]:
            work.wait()
        return arrived
