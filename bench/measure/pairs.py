"""Measure the rates at which pairs of ranks exchange messages."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

#: Part of a message that is sent untimed, and its least size in bytes, so that connections are up to speed
#: and shapers (which have a credit of some 100 KiB) have none left.
_UNTIMED_PART, _MIN_UNTIMED = 8, 2**19
_HELLO_BYTES = 64


def exchange_steps(
    steps: Sequence[Sequence[tuple[int, int]]], me: int, device: torch.device, *, count: int, deadline: float
) -> dict[int, float]:
    """Exchange ``count`` bytes with this rank's partner in each step; return bytes/s received, by partner.

    A step contains the pairs of ranks that exchange at the same time; every rank is in at most one of them.
    All these ranks must pass the same steps. After ``deadline`` (of :func:`time.monotonic`), no exchange
    starts: both partners compare their times in the first message of an exchange.
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


def _partner(step: Sequence[tuple[int, int]], me: int) -> int | None:
    return next((b if a == me else a for a, b in step if me in (a, b)), None)


class _Buffers:
    """Memory for the messages of one task."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._device = device
        self._sent = torch.ones(count, dtype=torch.uint8, device=device)
        self._received = torch.zeros_like(self._sent)
        self._untimed = min(count, max(_MIN_UNTIMED, count // _UNTIMED_PART))

    def agree(self, partner: int, value: bool) -> bool:
        """Return True if both partners pass True."""
        mine = torch.full((_HELLO_BYTES,), int(value), dtype=torch.uint8, device=self._device)
        theirs = torch.zeros_like(mine)
        self._swap(mine, theirs, partner)
        return value and bool(theirs[0].item())

    def rate(self, partner: int) -> float:
        """Send and receive at the same time; return the bytes/s received."""
        self._swap(self._sent[: self._untimed], self._received[: self._untimed], partner)
        self.agree(partner, True)  # a fast receiver waits for the slow one, so that both begin together
        began = time.perf_counter()
        # The partner sends its message after this one. Therefore the time is never too short, even if this
        # process is delayed, and the highest of several rates is the best.
        self.agree(partner, True)
        return self._sent.numel() / (self._swap(self._sent, self._received, partner) - began)

    def _swap(self, sent: torch.Tensor, received: torch.Tensor, partner: int) -> float:
        """Exchange messages; return the time of the performance counter when this rank's has arrived."""
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
