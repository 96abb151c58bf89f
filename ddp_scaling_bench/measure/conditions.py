"""The conditions and resources of a rank and its node, sampled before and after a window, never in a step.

Each rank counts its own samples, collectives and clocks. One rank per node also samples the node. The values
travel to rank 0 as part of :class:`ddp_scaling_bench.measure.results.Window`.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..cores import PROC, read_text
from ..units import now as utc_now
from . import nvml
from .node import Node, increase, later
from .torch_internals import compilations, count_collectives


class Conditions:
    """Sample the conditions of one rank; ``reads_node`` is true on one rank per node.

    The first sample takes longest, so the constructor takes it before any window.
    """

    def __init__(self, device: torch.device, env: Mapping[str, str], *, reads_node: bool) -> None:
        self._device = device
        self._node = Node(env) if reads_node else None
        self._counters = self._read_counters()
        self._paused: tuple[dict[str, Any], dict[str, Any] | None] | None = None
        self.sample()
        self._is_open = False

    def sample(self) -> None:
        """Take the sample before a window. This delays the rank, so call it outside of measured steps."""
        self._clocks = self.clocks()
        self._before = self._node and self._node.sample()
        self._began = utc_now()
        self._is_open = True

    def start(self) -> None:
        """Read torch's counters, immediately before the first step of a window."""
        self._counters = self._read_counters()

    def pause(self) -> None:
        """Stop counting, because the clock stops in a window or in the step before it."""
        if self._is_open:
            self._paused = self._read_counters(), self._node.counts() if self._node else None

    def resume(self) -> None:
        """Count again after :meth:`pause`: what was counted since then is left out."""
        if self._paused is None:
            return
        (counters, counts), self._paused = self._paused, None
        for name, value in self._read_counters().items():
            self._counters[name] = later(self._counters[name], value, counters[name])
        if self._node and self._before and counts:
            self._node.leave_out(self._before, counts, self._node.counts())

    def stop(self, *, steps: int, loaded: dict[str, Any] | None) -> dict[str, Any]:
        """End the window, read the counters again, and return this rank's part of conditions.json.

        ``steps`` is the number of steps between the two readings. ``loaded`` are the :meth:`clocks` while the
        GPU still worked. ``sync_passes``, the number of the rank's backward passes in the window that
        synchronised gradients, follows later.
        """
        self.resume()
        self._is_open = False
        counters, ended, clocks = self._read_counters(), utc_now(), self.clocks()
        known = {} if loaded is None else {"loaded": loaded}
        changes = {name: increase(value, self._counters[name]) for name, value in counters.items()}
        return {
            "start": self._began,
            "end": ended,
            "steps": steps,
            "node": self._before and self._node and self._node.conditions(self._before, self._node.sample()),
            "rank": {
                "threads": torch.get_num_threads(),
                **changes,
                "sync_passes": None,
                "clocks": clocks and {"before": self._clocks, "after": clocks, **known},
            },
        }

    def clocks(self) -> dict[str, Any] | None:
        """Return the clocks of the GPU at this moment, or None without one."""
        return nvml.clocks(self._device.index) if self._device.type == "cuda" else None

    def _read_counters(self) -> dict[str, float | None]:
        compiled, compile_s = compilations() or (None, None)
        return {
            "collectives": count_collectives(),
            "recompilations": compiled,
            "compile_s": compile_s,
            "allocator_retries": allocator_retries(self._device),
            "cpu_wait_s": cpu_wait_s(),
        }


def allocator_retries(device: torch.device) -> int | None:
    """Return how often the allocator of a GPU has freed its cache and tried again, or None if unknown."""
    return torch.cuda.memory_stats(device).get("num_alloc_retries") if device.type == "cuda" else None


def cpu_wait_s(schedstat: Path = Path("/proc/thread-self/schedstat")) -> float | None:
    """Return the seconds for which this thread could run but waited for a core; None if they are unknown.

    Source: the kernel's Documentation/scheduler/sched-stats.rst. Kernels without schedstats write only zeros.
    """
    with suppress(OSError, ValueError):
        on_core_ns, waited_ns, _ = map(int, schedstat.read_text(encoding="ascii").split())
        return waited_ns / 1e9 if on_core_ns else None
    return None


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
    """The host's and the GPU's resources in use during one window; a value that was not measured is None."""

    cpu_percent: float | None = None
    gpu_percent: float | None = None
    energy_joules: float | None = None


#: Shortest window (s) of which the energy is given, within 10 %: the counter advances every 0.1 s (H100).
LEAST_ENERGY_S = 1.0


class Meters:
    """Counters that are read before and after a window (a sequence of measured steps), never during it.

    Reading can take milliseconds, and ranks wait for each other. So the first reading is a step before the
    window, and the energy of the window is the mean power between the readings times the window's time.
    """

    def __init__(self, device: torch.device) -> None:
        gpu = None
        if device.type == "cuda":
            gpu = nvml.open_gpu(torch.cuda.current_device() if device.index is None else device.index)
        self._gpu = gpu or nvml.NO_GPU

    def read(self) -> None:
        """Read the counters before a window."""
        self._ticks = _cpu_ticks()
        self._joules, self._read_ns = self._gpu.energy_joules(), time.perf_counter_ns()

    def start(self) -> None:
        """Begin the window."""
        self._began_ns = time.time_ns()

    def stop(self, window_s: float) -> Usage:
        """Read the counters after a window of ``window_s``, and return its usage."""
        joules = increase(self._gpu.energy_joules(), self._joules)
        between_s = (time.perf_counter_ns() - self._read_ns) * 1e-9
        idle, total = map(increase, _cpu_ticks(), self._ticks)
        is_known = joules is not None and window_s >= LEAST_ENERGY_S
        return Usage(
            cpu_percent=None if idle is None or not total else round(100 * (1 - idle / total), 1),
            gpu_percent=self._gpu.busy_percent(self._began_ns // 1000),
            energy_joules=joules / between_s * window_s if is_known else None,
        )


def _cpu_ticks() -> tuple[int | None, int | None]:
    """Return the time since boot in which all processors idled (also for I/O), and the time in all."""
    try:
        # user nice system idle iowait irq softirq steal; user contains the time of guests
        times = [int(word) for word in read_text(PROC / "stat").split(None, 9)[1:9]]
        return times[3] + times[4], sum(times)
    except (ValueError, IndexError):
        return None, None


def peak_memory_bytes(device: torch.device) -> int:
    """Return this rank's peak memory: the memory allocated on its GPU, or on a CPU the resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
