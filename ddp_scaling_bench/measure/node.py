"""The state of a node before and after a window: processes, throttling, clocks, network.

This module does not import torch, so that it starts quickly before and after a command. Sources: the kernel's
Documentation/ABI/testing/sysfs-class-net-statistics, sysfs-class-infiniband; proc(5), netdevice(7).

A process that ended during a window is counted if its parent still runs and has waited for it. The parent's
/proc/PID/stat then contains the child's time, in ticks of usually 10 ms. Process 1 and Slurm's daemons
inherit the processes of any job, so the times of their ended children are not counted. Kernel threads are
not counted either, because they can work for the job, for example for its network.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ..cores import PROC, cpu_groups, read_text
from ..units import now as utc_now

#: Names for the columns of /proc/net/dev that are kept.
_DEV_COLUMNS = {0: "rx_bytes", 8: "tx_bytes"}
#: InfiniBand counts words of four bytes. Counters of 32 bits stop at the largest number.
_BYTES_PER_WORD, _FULL = 4, 2**32 - 1
#: Types of interfaces (include/uapi/linux/if_arp.h) that can end at a cable. Tunnels have other types.
_ETHERNET, _IP_OVER_INFINIBAND = 1, 32
#: The request of ioctl for the addresses of all interfaces, and the size of each (struct ifreq).
_SIOCGIFCONF, _IFREQ_BYTES, _MOST_ADDRESSES = 0x8912, 40, 1024
_SYS = Path("/sys")
#: Largest time for reading clocks. Some kernels wait 10 ms for each core that has been idle.
_CLOCKS_S = 0.002
_TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")
#: The flag PF_KTHREAD in field 9 of /proc/PID/stat.
_KERNEL_THREAD = 0x00200000
_INIT = 1
_SLURM_DAEMONS = ("slurmd", "slurmstepd")
#: Target of /proc/self/ns/pid in the initial PID namespace (PROC_PID_INIT_INO in include/linux/proc_ns.h).
_FIRST_NAMESPACE = "pid:[4026531836]"
#: Variables that identify a job in the environment of its processes.
_JOB_VARIABLES = ("SLURM_JOB_ID", "BENCH_SSH_JOB")


def host_name(env: Mapping[str, str]) -> str:
    """Return Slurm's name of this host if Slurm started the process, else the host's own name."""
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def interface_with(address: str) -> str | None:
    """Return the network interface that has an IP address, or None if none has it."""
    for line in read_text(PROC / "net/if_inet6").splitlines():
        digits, *_, name = line.split()
        if str(ipaddress.IPv6Address(int(digits, 16))) == address:
            return name
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        found = array("B", bytes(_MOST_ADDRESSES * _IFREQ_BYTES))
        request = struct.pack("iP", len(found), found.buffer_info()[0])
        size, _ = struct.unpack("iP", fcntl.ioctl(probe, _SIOCGIFCONF, request))
        for name, own in struct.iter_unpack("16s4x4s16x", found.tobytes()[:size]):
            if socket.inet_ntoa(own) == address:
                return str(name.partition(b"\0")[0].decode().partition(":")[0])  # eth0:1 is eth0's
    return None


def active_ports(root: Path) -> list[Path]:
    """Return the folders of the active InfiniBand and RoCE ports (ABI/stable/sysfs-class-infiniband)."""
    return [one.parent for one in sorted(root.glob("*/ports/*/state")) if "ACTIVE" in read_text(one)]


def _throttled_s(groups: Sequence[Path]) -> dict[str, float]:
    """Return, by path, the seconds for which each group has been throttled, if the group reports them."""
    scales = {"throttled_usec": 1e-6, "throttled_time": 1e-9}
    words = ((group, line.split()) for group in groups for line in read_text(group / "cpu.stat").splitlines())
    return {str(group): int(word[1]) * scales[word[0]] for group, word in words if word[0] in scales}


class Network:
    """Read the counters of one node; ``sys`` and ``proc`` are the mounts of sysfs and procfs.

    The links of a node are the interfaces through which bytes leave the node, each byte through one of them.
    Bonds, bridges and VLANs use other interfaces (``lower_*`` in sysfs), which count the same bytes. Virtual
    interfaces, such as a veth pair, are links only if no interface belongs to a device, as in a container.
    IP over InfiniBand is left out if the InfiniBand port counts. The port of a RoCE device counts RDMA only,
    so its Ethernet interface counts, too.
    """

    def __init__(self, env: Mapping[str, str], *, proc: Path, sys: Path) -> None:
        self._counters = proc / "net/dev"
        self._links = sys / "class/net"
        self._ports = active_ports(sys / "class/infiniband")
        self._counting = [port for port in self._ports if (port / "counters/port_xmit_data").exists()]
        is_fabric = any("InfiniBand" in read_text(port / "link_layer") for port in self._counting)
        self._types = (_ETHERNET,) if is_fabric else (_ETHERNET, _IP_OVER_INFINIBAND)
        self._kind = cache(self._read_kind)
        # gloo and NCCL accept lists and patterns; only a plain name identifies the interface.
        self._named = [env.get(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")]

    def sample(self) -> dict[str, Any]:
        """Return the counters as they are now, and the names of the links (None if they are unknown)."""
        counts = self.counts()
        interfaces = counts["interfaces"]
        others = [name for name in interfaces if name != "lo"]
        links: list[str] | None
        if self._shows(interfaces):
            ends = [name for name in others if self._kind(name)[0]]
            links = [name for name in ends if self._kind(name)[1]] or ends
        else:
            moved = [name for name in others if interfaces[name]["tx_bytes"]]
            links = moved if len(moved) == 1 else None
        return {**counts, "links": links}

    def counts(self) -> dict[str, Any]:
        """Return the counters of the interfaces and of the InfiniBand ports as they are now."""
        return {"infiniband": self._infiniband(), "interfaces": self._interfaces()}

    def change(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
        """Return the changes between two samples; the interface in use is named by gloo's or NCCL's variable.

        Without such a name, it is the interface that moved the most bytes.
        """
        changes, ports = (
            {
                name: {key: increase(now, before[kind].get(name, {}).get(key)) for key, now in counts.items()}
                for name, counts in after[kind].items()
            }
            for kind in ("interfaces", "infiniband")
        )
        moved = {name: (one["rx_bytes"] or 0) + (one["tx_bytes"] or 0) for name, one in changes.items()}
        named = next((name for name in self._named if name in changes), None)
        name = named or max(
            moved, key=lambda name: (name != "lo" and moved[name] > 0, moved[name]), default=None
        )
        rate = _number(self._links / name / "speed") if name and self._shows(after["interfaces"]) else None
        return {
            "interface": name,
            "rate_mbit_s": rate if rate and rate > 0 else None,
            **dict.fromkeys((*_DEV_COLUMNS.values(), "crc_errors")),
            **(changes[name] if name else {}),
            "infiniband": ports or None,
            "sent": _sent(before["links"], after["links"], changes, ports),
        }

    def _interfaces(self) -> dict[str, dict[str, int | None]]:
        lines = (line.partition(":") for line in read_text(self._counters).splitlines()[2:])
        counts = {name.strip(): rest.split() for name, _, rest in lines}
        found: dict[str, dict[str, int | None]] = {
            name: {key: int(numbers[place]) for place, key in _DEV_COLUMNS.items()}
            for name, numbers in counts.items()
            if len(numbers) > max(_DEV_COLUMNS)
        }
        if self._shows(found):
            for name, counters in found.items():
                counters["crc_errors"] = _number(self._links / name / "statistics/rx_crc_errors")
        return found

    def _read_kind(self, name: str) -> tuple[bool, bool]:
        """Return whether an interface can be a link, and whether it belongs to a device."""
        link = self._links / name
        is_end = _number(link / "type") in self._types and not any(link.glob("lower_*"))
        return is_end, (link / "device").exists()

    def _shows(self, names: Mapping[str, Any]) -> bool:
        """Return whether /sys shows this network namespace, and is not the mount of another namespace."""
        try:
            return {path.name for path in self._links.iterdir() if path.is_dir()} == set(names)
        except OSError:
            return False

    def _infiniband(self) -> dict[str, dict[str, int | None]]:
        found: dict[str, dict[str, int | None]] = {}
        for port in self._ports:
            counted = {"symbol_error": _number(port / "counters/symbol_error")}
            if port in self._counting:
                words = _number(port / "counters/port_xmit_data")
                counted["tx_bytes"] = None if words in (None, _FULL) else words * _BYTES_PER_WORD
            found[f"{port.parts[-3]}/{port.name}"] = counted
        return found


def _sent(
    before: list[str] | None, after: list[str] | None, interfaces: Mapping[str, Any], ports: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the bytes that the links (``before``, ``after``) and the loopback sent between two samples."""
    because = None
    counted = {name: interfaces[name]["tx_bytes"] for name in after or ()}
    counted |= {port: one["tx_bytes"] for port, one in ports.items() if "tx_bytes" in one}
    if before is None or after is None:
        because = "/sys does not show which interfaces leave the node"
    elif set(before) != set(after):
        because = "an interface appeared or disappeared"
    elif None in counted.values():
        because = "a counter was reset, is too short, or cannot be read"
    return {
        "links": list(counted),
        "link_bytes": None if because else sum(size or 0 for size in counted.values()),
        "loopback_bytes": interfaces.get("lo", {}).get("tx_bytes"),
        "unknown_because": because,
    }


def increase(after: float | None, before: float | None) -> Any:
    """Return the change of a counter, or None if a value is unknown or the counter was reset."""
    return None if after is None or before is None or after < before else round(after - before, 6)


def later(value: float | None, after: float | None, before: float | None) -> Any:
    """Return ``value`` plus the change of a counter, or None if either is unknown."""
    if value is None or after is None or before is None or after < before:
        return None
    return after if value == before else value + after - before


def _number(path: Path) -> int | None:
    text = read_text(path)
    return int(text) if text.removeprefix("-").isdigit() else None


@dataclass(frozen=True)
class NodeSample:
    """The counters of a node at one moment; only :class:`Node` interprets them."""

    time: str
    snapshot: Snapshot
    throttled_s: dict[str, float]
    network: dict[str, Any]

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> NodeSample:
        """Create a sample from JSON with the content of :func:`dataclasses.asdict`.

        Raises:
            KeyError, TypeError, ValueError: the content is not a sample.
        """
        processes, is_complete, machine_ns = content["snapshot"]
        known = {int(pid): Process(*values) for pid, values in processes.items()}
        return cls(**{**content, "snapshot": Snapshot(known, is_complete, machine_ns)})


class Node:
    """Sample the node on which this process runs. "The job" is the job to which this process belongs."""

    def __init__(
        self, env: Mapping[str, str], *, proc: Path = PROC, sys: Path = _SYS, pid: int | None = None
    ) -> None:
        self.name = host_name(env)
        self._sys = sys
        self._processes = Processes(env, proc=proc, pid=pid)
        self._groups = cpu_groups(proc)
        self._network = Network(env, proc=proc, sys=sys)

    def sample(self) -> NodeSample:
        """Read all counters as they are now."""
        throttled_s = _throttled_s(self._groups)
        return NodeSample(utc_now(), self._processes.snapshot(), throttled_s, self._network.sample())

    def counts(self) -> dict[str, Any]:
        """Return the counters of the network alone, for :meth:`leave_out`."""
        return self._network.counts()

    def leave_out(self, sample: NodeSample, begin: Mapping[str, Any], end: Mapping[str, Any]) -> None:
        """Change an earlier sample so that what was counted from ``begin`` to ``end`` does not count."""
        for kind, own in begin.items():
            for name, counters in own.items():
                values, now = sample.network[kind].get(name, {}), end[kind].get(name, {})
                for key, then in counters.items():
                    values[key] = later(values.get(key), now.get(key), then)

    def conditions(self, before: NodeSample, after: NodeSample) -> dict[str, Any]:
        """Return the node's entry in conditions.json: changes between two samples, and the state now."""
        both = before.throttled_s.keys() & after.throttled_s.keys()
        throttled = (round(after.throttled_s[one] - before.throttled_s[one], 6) for one in both)
        foreign = self._processes.foreign_cpu_s(before.snapshot, after.snapshot)
        return {
            "node": self.name,
            "foreign_cpu_s": None if foreign is None else round(foreign, 6),
            "throttled_s": max(throttled, default=None),  # of any group
            "freq_mhz": self._clock_mhz(),
            "net": self._network.change(before.network, after.network),
        }

    def _clock_mhz(self) -> float | None:
        """Return the mean clock of this process's cores, or of the first few cores if reading takes long."""
        deadline, clocks = time.monotonic() + _CLOCKS_S, []
        for core in sorted(os.sched_getaffinity(0)):
            clocks.append(_number(self._sys / f"devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq"))
            if clocks[-1] is None or time.monotonic() > deadline:
                break
        known = [khz for khz in clocks if khz is not None]
        return round(sum(known) / len(known) / 1e3, 1) if known == clocks else None


class Process(NamedTuple):
    """One process: its start in ticks since boot, its CPU time, and the CPU time of its ended children."""

    started: int
    parent: int
    own_ns: int
    children_ns: int
    is_kernel_thread: bool
    name: str


class Snapshot(NamedTuple):
    """The visible processes by id, whether these are all (see hidepid), and the CPU time of the machine."""

    processes: dict[int, Process]
    is_complete: bool
    machine_ns: int | None


class Processes:
    """Measure the CPU time of processes outside of the job that ``pid`` belongs to.

    The job's processes are the tree of the launcher (of ``pid`` without a launcher), the processes in the
    job's cgroup (Slurm's ``job_ID``), and the processes with the job's id in their environment.
    """

    def __init__(self, env: Mapping[str, str], *, proc: Path = PROC, pid: int | None = None) -> None:
        self._proc = str(proc)
        self._pid = os.getpid() if pid is None else pid
        self._is_launched = "LOCAL_RANK" in env or "SLURM_PROCID" in env
        self._marks = {f"{name}={env[name]}".encode() for name in _JOB_VARIABLES if env.get(name)}
        self._cgroup = f"job_{env['SLURM_JOB_ID']}".encode() if "SLURM_JOB_ID" in env else None
        self._in_job: dict[tuple[int, int], bool] = {}

    def snapshot(self) -> Snapshot:
        """Read the processes as they are now."""
        processes, is_complete = {}, True
        for name in os.listdir(self._proc):  # noqa: PTH208 (a thousand Path objects take a millisecond)
            try:
                if name.isdigit():
                    processes[int(name)] = _parse_stat(self._read(f"{name}/stat"))
            except PermissionError:
                is_complete = False
            except (OSError, ValueError, IndexError):  # it has just ended
                continue
        return Snapshot(processes, is_complete and _INIT in processes, self._machine_ns())

    def foreign_cpu_s(self, before: Snapshot, after: Snapshot) -> float | None:
        """Return the CPU time (s) of processes outside of the job between two snapshots, or None if unknown.

        If not all processes are visible, it is the CPU time of the machine, including kernel threads, minus
        that of the job.
        """
        processes, used = after.processes, _used_ns(before.processes, after.processes)
        owned = {pid for pid in used if self._owns(pid, processes)}
        if before.is_complete and after.is_complete:
            # The job's ancestors wait for its end, such as a shell and `bench submit`.
            waiting = _ancestors(self._pid, processes)
            foreign = sum(
                (0 if pid in waiting else own) + children
                for pid, (own, children) in used.items()
                if pid not in owned and not processes[pid].is_kernel_thread
            )
        elif before.machine_ns is not None and after.machine_ns is not None:
            foreign = after.machine_ns - before.machine_ns - sum(sum(used[pid]) for pid in owned)
        else:
            return None
        return max(0, foreign) / 1e9

    def _owns(self, pid: int, processes: Mapping[int, Process]) -> bool:
        """Return whether a process belongs to the job."""
        key = (pid, processes[pid].started)
        if key not in self._in_job:
            self._in_job[key] = (
                self._root(processes) in (pid, *_ancestors(pid, processes))
                or self._cgroup in self._text(f"{pid}/cgroup").replace(b"\n", b"/").split(b"/")
                or not self._marks.isdisjoint(self._text(f"{pid}/environ").split(b"\0"))
            )
        return self._in_job[key]

    def _root(self, processes: Mapping[int, Process]) -> int:
        """Return the launcher of the job."""
        above = [pid for pid in _ancestors(self._pid, processes) if pid != _INIT]
        launcher = above[0] if above and self._is_launched else self._pid
        return next((pid for pid in above if processes[pid].name == "slurmstepd"), launcher)

    def _read(self, name: str) -> bytes:
        with open(f"{self._proc}/{name}", "rb", buffering=0) as file:
            return file.read()

    def _text(self, name: str) -> bytes:
        with suppress(OSError):
            return self._read(name)
        return b""

    def _machine_ns(self) -> int | None:
        """Return the time of all processors in user and system mode, or None inside a container."""
        with suppress(OSError, ValueError):
            if str(Path(self._proc, "self/ns/pid").readlink()) == _FIRST_NAMESPACE:
                return sum(map(int, self._read("stat").split(None, 4)[1:4])) * _TICK_NS
        return None


def _parse_stat(content: bytes) -> Process:
    head, _, tail = content.rpartition(b") ")  # the name can contain spaces and parentheses
    fields = tail.split(None, 20)
    user, system, of_children, system_of_children = (int(ticks) * _TICK_NS for ticks in fields[11:15])
    return Process(
        started=int(fields[19]),
        parent=int(fields[1]),
        own_ns=user + system,
        children_ns=of_children + system_of_children,
        is_kernel_thread=bool(int(fields[6]) & _KERNEL_THREAD),
        name=head.partition(b"(")[2].decode(errors="replace"),
    )


def _ancestors(pid: int, processes: Mapping[int, Process]) -> list[int]:
    """Return the parent of a process, the parent's parent, and so on."""
    found: list[int] = []
    while (process := processes.get(pid)) is not None and process.parent in processes:
        pid = process.parent
        if pid in found:  # ids were reused while the processes were listed
            break
        found.append(pid)
    return found


def _used_ns(before: Mapping[int, Process], after: Mapping[int, Process]) -> dict[int, tuple[int, int]]:
    """Return the CPU time of each process and of its ended children; idle processes are left out.

    When a parent waits for its ended child, the kernel adds the child's whole time to the parent's. The part
    of this time before the first snapshot is subtracted from the nearest ancestor that still runs.
    """
    alive = {pid for pid, then in before.items() if pid in after and after[pid].started == then.started}
    earlier: Counter[int] = Counter()
    for pid in before.keys() - alive:
        for heir in [above for above in _ancestors(pid, before) if above in alive][:1]:
            earlier[heir] += before[pid].own_ns + before[pid].children_ns
    used = {}
    for pid, now in after.items():
        then = before[pid] if pid in alive else now._replace(own_ns=0, children_ns=0)
        inherits = pid == _INIT or now.name in _SLURM_DAEMONS
        children = 0 if inherits else max(0, now.children_ns - then.children_ns - earlier[pid])
        own = now.own_ns - then.own_ns
        if own > 0 or children > 0:
            used[pid] = (own, children)
    return used
