"""The conditions and resources of a rank and its node, sampled before and after a window, never in a step.

Each rank counts its own samples, collectives and clocks. One rank per node also samples the node. The values
travel to rank 0 as part of :class:`bench.measure.results.Window`.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from ..units import now as utc_now
from . import nvml
from .node import Node
from .nvml import Gpu, open_gpu
from .torch_internals import compilations, count_collectives


class Conditions:
    """Sample the conditions of one rank; ``reads_node`` is true on one rank per node.

    The first sample takes longest, so the constructor takes it before any window.
    """

    def __init__(self, device: torch.device, env: Mapping[str, str], *, reads_node: bool) -> None:
        self._device = device
        self._node = Node(env) if reads_node else None
        self.sample()

    def sample(self) -> None:
        """Take the sample before a window. This delays the rank, so call it outside of measured steps."""
        self._clocks = self._read_clocks()
        self._before = None if self._node is None else self._node.sample()
        self._began = utc_now()

    def start(self) -> None:
        """Read torch's counters, immediately before the first step of a window."""
        self._counters = self._read_counters()

    def stop(self, *, steps: int, sync_passes: int | None) -> dict[str, Any]:
        """End the window, read the counters again, and return this rank's part of conditions.json.

        ``start`` and ``end`` are the times of the two readings, which enclose the window. ``steps`` is the
        number of steps between the two readings. ``sync_passes`` is the number of the rank's backward passes
        in the window that synchronised gradients, or None if it is unknown.
        """
        counters, ended = self._read_counters(), utc_now()
        clocks = self._read_clocks()
        node = None
        if self._node is not None and self._before is not None:
            node = self._node.conditions(self._before, self._node.sample())
        return {
            "start": self._began,
            "end": ended,
            "steps": steps,
            "node": node,
            "rank": {
                "threads": torch.get_num_threads(),
                **{name: _difference(value, self._counters[name]) for name, value in counters.items()},
                "sync_passes": sync_passes,
                "clocks": None if clocks is None else {"before": self._clocks, "after": clocks},
            },
        }

    def add_loaded(self, found: dict[str, Any]) -> None:
        """Add the clocks of the GPU at this moment to the result of :meth:`stop`, while the GPU is busy.

        After a window the GPU idles, and some reasons for lower clocks are then gone.
        """
        if found["rank"]["clocks"] is not None:
            found["rank"]["clocks"]["loaded"] = self._read_clocks()

    def _read_counters(self) -> dict[str, float | None]:
        """Return the rank's counts of collectives, compilations, allocation retries, and its wait for a core.

        Values that are unknown are None.
        """
        compiled = compilations()
        return {
            "collectives": count_collectives(),
            "recompilations": None if compiled is None else compiled[0],
            "compile_s": None if compiled is None else compiled[1],
            "allocator_retries": allocator_retries(self._device),
            "cpu_wait_s": cpu_wait_s(),
        }

    def _read_clocks(self) -> dict[str, Any] | None:
        """Return the clocks of the rank's GPU, or None on a CPU."""
        return nvml.clocks(self._device.index) if self._device.type == "cuda" else None


def allocator_retries(device: torch.device) -> int | None:
    """Return how often the allocator of a GPU has freed its cache and tried again, or None if unknown."""
    if device.type != "cuda":
        return None
    retries: int | None = torch.cuda.memory_stats(device).get("num_alloc_retries")
    return retries


def cpu_wait_s(schedstat: Path = Path("/proc/thread-self/schedstat")) -> float | None:
    """Return the seconds for which this thread could run but waited for a core; None if they are unknown.

    Source: the kernel's Documentation/scheduler/sched-stats.rst. Kernels without schedstats write only zeros.
    """
    try:
        on_core_ns, waited_ns, _ = map(int, schedstat.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return None
    return waited_ns / 1e9 if on_core_ns else None


def _difference(after: float | None, before: float | None) -> float | None:
    """Return the change of a counter, or None if a value is unknown or the counter was reset."""
    if after is None or before is None or after < before:
        return None
    return round(after - before, 6)


def window_conditions(epoch: int, of_ranks: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Combine all ranks' parts into an entry of ``windows`` in conditions.json; None if a part is missing."""
    parts = [part for part in of_ranks if part is not None]
    if len(parts) < len(of_ranks):
        return None
    nodes = {part["node"]["node"]: part["node"] for part in parts if part["node"] is not None}
    return {
        "epoch": epoch,
        "start": min(part["start"] for part in parts),
        "end": max(part["end"] for part in parts),
        "nodes": list(nodes.values()),
        "ranks": [{"rank": rank, **part["rank"]} for rank, part in enumerate(parts)],
    }


@dataclass(frozen=True)
class Usage:
    """The resources that one rank measured in one window; a value that was not measured is None.

    One rank per host measures ``cpu_percent``, and one rank per GPU measures the other values.
    """

    cpu_percent: float | None = None
    gpu_percent: float | None = None
    energy_joules: float | None = None


class Meters:
    """Counters that are read before and after a window (a sequence of measured steps), never during it."""

    def __init__(self, device: torch.device, *, reads_host: bool, reads_device: bool) -> None:
        self._reads_host = reads_host
        self._gpu = _GpuCounters.open(device) if device.type == "cuda" and reads_device else None

    def start(self) -> None:
        """Begin a window."""
        if self._gpu is not None:
            self._gpu.reset()
        if self._reads_host:
            psutil.cpu_percent(interval=None)

    def stop(self) -> Usage:
        """End the window and return its usage."""
        return Usage(
            cpu_percent=psutil.cpu_percent(interval=None) if self._reads_host else None,
            gpu_percent=self._gpu.busy_percent() if self._gpu else None,
            energy_joules=self._gpu.joules() if self._gpu else None,
        )


def peak_memory_bytes(device: torch.device) -> int:
    """Return this rank's peak memory: the memory allocated on its GPU, or on a CPU the resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


#: Shortest window (s) of which the energy is given. The driver's counter advances every 0.1 s (H100), so the
#: energy of this window is correct within 10 %.
LEAST_ENERGY_S = 1.0


class _GpuCounters:
    """One GPU's energy counter, and the utilisation samples that the driver collects."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._joules: float | None = None
        self._began_us = 0

    @classmethod
    def open(cls, device: torch.device) -> _GpuCounters | None:
        """Return the device's counters, or None if nvidia-ml-py or the driver's library is missing."""
        gpu = open_gpu(torch.cuda.current_device() if device.index is None else device.index)
        return None if gpu is None else cls(gpu)

    def reset(self) -> None:
        self._joules = self._gpu.energy_joules()
        self._began_us = time.time_ns() // 1000

    def joules(self) -> float | None:
        """Return the energy in joules since :meth:`reset`, or None if that was too short a time ago."""
        seconds = time.time_ns() / 1e9 - self._began_us / 1e6
        now = self._gpu.energy_joules()
        if now is None or self._joules is None or seconds < LEAST_ENERGY_S:
            return None
        return now - self._joules

    def busy_percent(self) -> float | None:
        """Return the mean utilisation since :meth:`reset`, or None if the driver took no sample."""
        return self._gpu.busy_percent(self._began_us)
