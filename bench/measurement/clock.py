"""Clocks that stamp a training step: the host's, and CUDA's events.

A step is stamped first and read later, because reading a CUDA event waits for the device.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Stamps now; tells the seconds between two stamps later."""

    is_host: bool

    def stamp(self) -> Any:
        """Return a mark of this moment (on the device's own timeline, where there is one)."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two stamps; only after :meth:`settle`."""

    def settle(self) -> None:
        """Wait until every stamp so far can be read."""


class HostClock:
    """The host's monotonic clock: right where work is done by the time a call returns."""

    is_host = True

    def stamp(self) -> float:
        """Return seconds since some fixed moment."""
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        """Return the seconds between two stamps."""
        return end - begin

    def settle(self) -> None:
        """Do nothing: a host's stamp can be read at once."""


class CudaClock:
    """Events on the current stream: right where calls return before the device has done the work.

    An idle device stamps an event when it arrives, so waiting of the host (for data, say)
    shows in the differences as well, as long as the device had caught up before.
    """

    is_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stamp(self) -> torch.cuda.Event:
        """Return an event that was just put on the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the seconds between two events (CUDA resolves about half a microsecond)."""
        return float(begin.elapsed_time(end)) / 1e3

    def settle(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)


def clock_for(device: torch.device) -> Clock:
    """Return the clock that is right for work on ``device``."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
