"""The state of a node before and after a window: processes, throttling, pressure, clocks, swap, network.

This module imports neither torch nor psutil, so that it starts quickly beside a command.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.measure.cgroup import cpu_groups, throttled_s
from bench.measure.network import Network
from bench.measure.processes import (
    PROC,
    Job,
    Process,
    ProcessTable,
    Snapshot,
    cpu_clock_ns,
    foreign_cpu_s,
)

_SYS = Path("/sys")
#: Largest time for reading clocks. Some kernels wait 10 ms for each core that has been idle.
_CLOCKS_S = 0.002
_PRESSURE = (("cpu", "some"), ("io", "some"), ("io", "full"), ("memory", "some"), ("memory", "full"))


def host_name(env: Mapping[str, str]) -> str:
    """Return Slurm's name of this host if Slurm started the process, else the host's own name."""
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def utc_now() -> str:
    """Return the current UTC time as ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True)
class NodeSample:
    """The counters of a node at one moment; only :class:`Node` interprets them."""

    time: str
    snapshot: Snapshot
    throttled_s: dict[str, float]
    pressure_us: dict[str, int]
    network: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Return the sample as values for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> NodeSample:
        """Create a sample from JSON with the content of :meth:`as_json`.

        Raises:
            KeyError, TypeError, ValueError: the content is not that of a sample.
        """
        processes, is_complete, machine_ns = content["snapshot"]
        known = {int(pid): Process(*values) for pid, values in processes.items()}
        return cls(**{**content, "snapshot": Snapshot(known, is_complete, machine_ns)})


class Node:
    """Samples the node that this process runs on; the job is the one that this process belongs to."""

    def __init__(
        self, env: Mapping[str, str], *, proc: Path = PROC, sys: Path = _SYS, pid: int | None = None
    ) -> None:
        self.name = host_name(env)
        self._proc, self._sys = proc, sys
        self._table = ProcessTable(proc, clock=cpu_clock_ns if proc == PROC else lambda pid: None)
        self._job = Job(self._table, env, pid=pid)
        self._groups = cpu_groups(proc)
        self._network = Network(env, proc=proc, sys=sys)

    def sample(self) -> NodeSample:
        """Read all counters as they are now."""
        return NodeSample(
            time=utc_now(),
            snapshot=self._table.snapshot(),
            throttled_s=throttled_s(self._groups),
            pressure_us=self._pressure(),
            network=self._network.sample(),
        )

    def conditions(self, before: NodeSample, after: NodeSample) -> dict[str, Any]:
        """Return the node's entry in conditions.json: changes between two samples, and the state now.

        ``throttled_s`` is that of the group with the largest time. A value that cannot be read is None.
        """
        throttled = [
            after.throttled_s[group] - since
            for group, since in before.throttled_s.items()
            if group in after.throttled_s
        ]
        foreign = foreign_cpu_s(before.snapshot, after.snapshot, self._job)
        return {
            "node": self.name,
            "foreign_cpu_s": None if foreign is None else round(foreign, 6),
            "throttled_s": round(max(throttled), 6) if throttled else None,
            "pressure": {
                f"{name}_s": (after.pressure_us[name] - since) / 1e6
                for name, since in before.pressure_us.items()
                if name in after.pressure_us
            }
            or None,
            "freq_mhz": self._clock_mhz(),
            "swap_bytes": self._swap_bytes(after.snapshot),
            "net": self._network.change(before.network, after.network),
        }

    def _pressure(self) -> dict[str, int]:
        """Return the time in µs during which processes of the node waited for a resource."""
        found = {}
        for resource in dict(_PRESSURE):
            for line in self._table.text(f"pressure/{resource}").decode(errors="replace").splitlines():
                kind, *values = line.split()
                total = dict(value.split("=", 1) for value in values).get("total", "")
                if (resource, kind) in _PRESSURE and total.isdigit():
                    found[f"{resource}_{kind}"] = int(total)
        return found

    def _clock_mhz(self) -> float | None:
        """Return the mean clock of this process's cores, or of the first ones if reading takes long."""
        deadline = time.monotonic() + _CLOCKS_S
        found = []
        for core in sorted(os.sched_getaffinity(0)):
            path = self._sys / f"devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq"
            try:
                found.append(int(path.read_text(encoding="ascii")) / 1e3)
            except (OSError, ValueError):
                return None
            if time.monotonic() > deadline:
                break
        return round(sum(found) / len(found), 1) if found else None

    def _swap_bytes(self, snapshot: Snapshot) -> int | None:
        """Return the swap space of the job's processes on this node."""
        used_kib = self._swap_in_use_kib()
        if not used_kib:
            return used_kib
        sizes = [self._kib(f"{pid}/status", b"VmSwap:") for pid in self._job.tree(snapshot.processes)]
        return 1024 * sum(size or 0 for size in sizes)

    def _swap_in_use_kib(self) -> int | None:
        total, free = self._kib("meminfo", b"SwapTotal:"), self._kib("meminfo", b"SwapFree:")
        return None if total is None or free is None else total - free

    def _kib(self, name: str, key: bytes) -> int | None:
        """Return a value in KiB from a file below /proc with lines such as ``VmSwap:  12 kB``."""
        for line in self._table.text(name).splitlines():
            if line.startswith(key):
                words = line.split()
                return int(words[1]) if len(words) > 1 and words[1].isdigit() else None
        return None
