"""The state of a node before and after a window: processes, throttling, pressure, clocks, swap, network.

This module imports neither torch nor psutil, so that it starts quickly beside a command. Sources: the
kernel's Documentation/ABI/testing/sysfs-class-net-statistics, sysfs-class-infiniband; proc(5);
Documentation/admin-guide/cgroup-v2.rst, and scheduler/sched-bwc.rst for version 1. Slurm, container runtimes
and systemd can set a CPU quota on any control group above a process. All these quotas apply, so every group
from the process's own up to the mount is read.
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

from bench.measure.processes import PROC, Job, Process, ProcessTable, Snapshot, cpu_clock_ns, foreign_cpu_s

_PROC = Path("/proc")


def cpu_groups(proc: Path = _PROC) -> list[Path]:
    """Return the folders of this process's groups that limit processors, from its own group upwards."""
    try:
        mounts = [line.split() for line in (proc / "self/mounts").read_text().splitlines()]
        entries = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    groups: list[Path] = []
    for _, mounted, kind, options, *_ in mounts:
        is_v1 = kind == "cgroup" and "cpu" in options.split(",")
        if not is_v1 and kind != "cgroup2":
            continue
        root = Path(mounted.replace("\\040", " "))
        controller = "cpu" if is_v1 else ""
        names = [path for _, controllers, path in entries if controller in controllers.split(",")]
        # In a container, the path can be one that the container's mount does not show.
        own = root / names[0].lstrip("/") if names and ".." not in names[0] else root
        groups += [group for group in (own, *own.parents) if group.is_relative_to(root) and group.is_dir()]
    return groups


def cpu_quota(groups: list[Path]) -> float | None:
    """Return the smallest quota of the groups in cores; None if no group has a quota."""
    quotas = [quota for group in groups if (quota := _quota(group)) is not None]
    return min(quotas, default=None)


def _quota(group: Path) -> float | None:
    of_version_1 = (_text(group / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    text = _text(group / "cpu.max") or " ".join(of_version_1)
    try:
        quota_us, period_us = (float(word) for word in text.split())
    except ValueError:  # "max", or no quota here
        return None
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None


def throttled_s(groups: list[Path]) -> dict[str, float]:
    """Return the seconds for which each group has been throttled, by its path; only groups that report it."""
    found = {}
    for group in groups:
        for line in _text(group / "cpu.stat").splitlines():
            name, _, value = line.partition(" ")
            scale = {"throttled_usec": 1e-6, "throttled_time": 1e-9}.get(name)
            if scale is not None and value.strip().isdigit():
                found[str(group)] = int(value) * scale
    return found


#: Number of interfaces whose files in /sys are read: the ones that have moved the largest numbers of bytes.
_MOST_INTERFACES = 8
#: Names of the columns of /proc/net/dev that are kept; its other columns are details of them.
_DEV_COLUMNS = {
    0: "rx_bytes",
    2: "rx_errors",
    3: "rx_drops",
    8: "tx_bytes",
    10: "tx_errors",
    11: "tx_drops",
}
_LINK_FILES = {"crc_errors": "statistics/rx_crc_errors", "carrier_changes": "carrier_changes"}
_PORT_COUNTERS = {
    "symbol_error": "symbol_error",
    "link_error_recovery": "link_error_recovery",
    "link_downed": "link_downed",
    "port_rcv_errors": "port_rcv_errors",
    "port_xmit_discards": "port_xmit_discards",
    "rcv_words": "port_rcv_data",
    "xmit_words": "port_xmit_data",
}
#: Largest time for reading InfiniBand counters, each of which can be a request to the device.
_INFINIBAND_S = 0.004


class Network:
    """Reads the counters of one node; ``sys`` and ``proc`` are the mounts of sysfs and procfs."""

    def __init__(self, env: Mapping[str, str], *, proc: Path, sys: Path) -> None:
        self._proc = proc
        self._links = sys / "class/net"
        self._ports = [
            state.parent
            for state in sorted((sys / "class/infiniband").glob("*/ports/*/state"))
            if "ACTIVE" in _text(state)
        ]
        # gloo and NCCL accept lists and patterns; only a plain name identifies the interface.
        names = (env.get("GLOO_SOCKET_IFNAME"), env.get("NCCL_SOCKET_IFNAME"))
        self._named = [name for name in names if name]

    def sample(self) -> dict[str, Any]:
        """Return the counters as they are now."""
        interfaces = self._interfaces()
        return {"interfaces": interfaces, "tcp": self._tcp(), "infiniband": self._infiniband()}

    def change(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
        """Return the changes between two samples, for the interface in use.

        The interface in use is the one that gloo's or NCCL's variable names, else the one that moved the
        largest number of bytes.
        """
        changes = {
            name: _change(before["interfaces"].get(name, {}), counters)
            for name, counters in after["interfaces"].items()
        }
        name = self._in_use(changes)
        ports = after["infiniband"]
        counters = dict.fromkeys((*_DEV_COLUMNS.values(), *_LINK_FILES)) | (changes[name] if name else {})
        return {
            "interface": name,
            "rate_mbit_s": self._rate(name, list(after["interfaces"])),
            **counters,
            **_change(before["tcp"], after["tcp"]),
            "infiniband": {
                port: {"rate": _text(self._port(port) / "rate") or None}
                | _in_bytes(_change(before["infiniband"].get(port, {}), counted))
                for port, counted in ports.items()
            }
            or None,
        }

    def _in_use(self, changes: Mapping[str, Mapping[str, Any]]) -> str | None:
        named = next((name for name in self._named if name in changes), None)
        if named is not None:
            return named

        def moved(name: str) -> tuple[bool, int]:
            one = changes[name]
            total = (one.get("rx_bytes") or 0) + (one.get("tx_bytes") or 0)
            return (name != "lo" and total > 0, total)

        return max(changes, key=moved, default=None)

    def _interfaces(self) -> dict[str, dict[str, int | None]]:
        found: dict[str, dict[str, int | None]] = {}
        for line in _text(self._proc / "net/dev").splitlines()[2:]:
            name, _, rest = line.partition(":")
            numbers = rest.split()
            if len(numbers) > max(_DEV_COLUMNS):
                found[name.strip()] = {key: int(numbers[i]) for i, key in _DEV_COLUMNS.items()}
        if self._is_own(list(found)):
            busiest = sorted(found, key=lambda name: -(found[name]["rx_bytes"] or 0))
            for name in [name for name in busiest if name != "lo"][:_MOST_INTERFACES]:
                link = self._links / name
                found[name] |= {key: _number(link / file) for key, file in _LINK_FILES.items()}
        return found

    def _is_own(self, names: list[str]) -> bool:
        """Return whether /sys shows this network namespace, and is not the mount of another namespace."""
        try:
            return {path.name for path in self._links.iterdir() if path.is_dir()} == set(names)
        except OSError:
            return False

    def _rate(self, name: str | None, names: list[str]) -> int | None:
        rate = _number(self._links / name / "speed") if name and self._is_own(names) else None
        return rate if rate is not None and rate > 0 else None

    def _tcp(self) -> dict[str, int | None]:
        counts: dict[str, int | None] = {"tcp_segments": None, "tcp_retransmissions": None}
        lines = [
            line.split() for line in _text(self._proc / "net/snmp").splitlines() if line.startswith("Tcp:")
        ]
        if len(lines) == 2:
            values = dict(zip(*lines, strict=False))
            for key, name in (("tcp_segments", "OutSegs"), ("tcp_retransmissions", "RetransSegs")):
                counts[key] = int(values[name]) if name in values else None
        return counts

    def _infiniband(self) -> dict[str, dict[str, int | None]]:
        deadline = time.monotonic() + _INFINIBAND_S
        found: dict[str, dict[str, int | None]] = {}
        for port in self._ports:
            counters = dict.fromkeys(_PORT_COUNTERS)
            for key, file in _PORT_COUNTERS.items():
                if time.monotonic() < deadline:
                    counters[key] = _number(port / "counters" / file)
            found[f"{port.parts[-3]}/{port.name}"] = counters
        return found

    def _port(self, name: str) -> Path:
        return next(port for port in self._ports if f"{port.parts[-3]}/{port.name}" == name)


def _change(before: Mapping[str, int | None], after: Mapping[str, int | None]) -> dict[str, int | None]:
    """Return the increase of each counter; None if a value is missing or the counter was reset."""
    found: dict[str, int | None] = {}
    for name, now in after.items():
        then = before.get(name)
        found[name] = None if now is None or then is None or now < then else now - then
    return found


def _in_bytes(counters: dict[str, int | None]) -> dict[str, int | None]:
    """Replace the data counters of an InfiniBand port, which count words of four bytes."""
    found = {name: value for name, value in counters.items() if not name.endswith("_words")}
    for name in ("rcv", "xmit"):
        words = counters.get(f"{name}_words")
        found[f"{name}_bytes"] = None if words is None else 4 * words
    return found


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.removeprefix("-").isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


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
    """Samples the node that this process runs on; "the job" is the one to which this process belongs."""

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

        ``throttled_s`` is the largest throttled time of any group. A value that cannot be
        read is None.
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
        """Return the mean clock of this process's cores, or of the first few cores if reading takes long."""
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
