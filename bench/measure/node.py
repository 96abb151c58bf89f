"""The state of a node before and after a window: processes, throttling, clocks, network.

This module imports neither torch nor psutil, so that it starts quickly before and after a command. Sources:
the kernel's Documentation/ABI/testing/sysfs-class-net-statistics, sysfs-class-infiniband; proc(5).

A process that ended during a window is counted if its parent still runs and has waited for it. The parent's
/proc/PID/stat then contains the child's time, in ticks of usually 10 ms. Process 1 and Slurm's daemons
inherit the processes of any job, so the times of their ended children are not counted. Kernel threads are
not counted either, because they can work for the job, for example for its network.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..cores import PROC, cpu_groups, read_text
from ..units import now as utc_now

#: Maximum number of interfaces whose files in /sys are read. Those that moved the most bytes are chosen.
_MOST_INTERFACES = 8
#: Names for the columns of /proc/net/dev that are kept.
_DEV_COLUMNS = {0: "rx_bytes", 8: "tx_bytes"}
#: Largest time for reading InfiniBand counters, each of which can be a request to the device.
_INFINIBAND_S = 0.004
#: InfiniBand counts words of four bytes. Counters of 32 bits stop at the largest number.
_BYTES_PER_WORD, _FULL = 4, 2**32 - 1
#: Types of interfaces (include/uapi/linux/if_arp.h) that can end at a cable. Tunnels have other types.
_ETHERNET, _IP_OVER_INFINIBAND = 1, 32
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


def throttled_s(groups: list[Path]) -> dict[str, float]:
    """Return, by path, the seconds for which each group has been throttled, if the group reports them."""
    found = {}
    for group in groups:
        for line in read_text(group / "cpu.stat").splitlines():
            name, _, value = line.partition(" ")
            scale = {"throttled_usec": 1e-6, "throttled_time": 1e-9}.get(name)
            if scale is not None and value.strip().isdigit():
                found[str(group)] = int(value) * scale
    return found


class Network:
    """Read the counters of one node; ``sys`` and ``proc`` are the mounts of sysfs and procfs.

    The links of a node are the interfaces through which bytes leave the node, each byte through one of them.
    Bonds, bridges and VLANs use other interfaces (``lower_*`` in sysfs), which count the same bytes. Virtual
    interfaces, such as a veth pair, are links only if no interface belongs to a device, as in a container.
    IP over InfiniBand is left out if the InfiniBand port counts. The port of a RoCE device counts RDMA only,
    so its Ethernet interface counts, too.
    """

    def __init__(self, env: Mapping[str, str], *, proc: Path, sys: Path) -> None:
        self._proc = proc
        self._links = sys / "class/net"
        self._ports = [
            state.parent
            for state in sorted((sys / "class/infiniband").glob("*/ports/*/state"))
            if "ACTIVE" in read_text(state)
        ]
        self._counting = [port for port in self._ports if (port / "counters/port_xmit_data").exists()]
        self._is_fabric = any("InfiniBand" in read_text(port / "link_layer") for port in self._counting)
        self._kinds: dict[str, tuple[bool, bool]] = {}
        # gloo and NCCL accept lists and patterns; only a plain name identifies the interface.
        names = (env.get("GLOO_SOCKET_IFNAME"), env.get("NCCL_SOCKET_IFNAME"))
        self._named = [name for name in names if name]

    def sample(self) -> dict[str, Any]:
        """Return the counters as they are now."""
        infiniband, interfaces = self._infiniband(), self._interfaces()
        return {"interfaces": interfaces, "infiniband": infiniband, "links": self._find_links(interfaces)}

    def change(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
        """Return the changes between two samples, for the interface in use.

        The interface in use is the interface that gloo's or NCCL's variable names, else the interface that
        moved the most bytes.
        """
        changes = {
            name: _change(before["interfaces"].get(name, {}), counters)
            for name, counters in after["interfaces"].items()
        }
        name = self._in_use(changes)
        ports = {
            port: _change(before["infiniband"].get(port, {}), counted)
            for port, counted in after["infiniband"].items()
        }
        counters = dict.fromkeys((*_DEV_COLUMNS.values(), "crc_errors")) | (changes[name] if name else {})
        return {
            "interface": name,
            "rate_mbit_s": self._rate(name, list(after["interfaces"])),
            **counters,
            "infiniband": ports or None,
            "sent": _sent(before["links"], after["links"], changes, ports),
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
        for line in read_text(self._proc / "net/dev").splitlines()[2:]:
            name, _, rest = line.partition(":")
            numbers = rest.split()
            if len(numbers) > max(_DEV_COLUMNS):
                found[name.strip()] = {key: int(numbers[i]) for i, key in _DEV_COLUMNS.items()}
        if self._is_own(list(found)):
            busiest = sorted(found, key=lambda name: -(found[name]["rx_bytes"] or 0))
            for name in [name for name in busiest if name != "lo"][:_MOST_INTERFACES]:
                found[name]["crc_errors"] = _number(self._links / name / "statistics/rx_crc_errors")
        return found

    def _find_links(self, counters: Mapping[str, Mapping[str, int | None]]) -> list[str] | None:
        """Return the names of the links, or None if they are unknown."""
        others = [name for name in counters if name != "lo"]
        if not self._is_own(list(counters)):
            moved = [name for name in others if counters[name]["tx_bytes"]]
            return moved if len(moved) == 1 else None
        for name in others:
            if name not in self._kinds:
                self._kinds[name] = self._kind(self._links / name)
        ends = [name for name in others if self._kinds[name][0]]
        return [name for name in ends if self._kinds[name][1]] or ends

    def _kind(self, link: Path) -> tuple[bool, bool]:
        """Return whether an interface can be a link, and whether it belongs to a device."""
        kinds = (_ETHERNET,) if self._is_fabric else (_ETHERNET, _IP_OVER_INFINIBAND)
        is_end = _number(link / "type") in kinds and not any(link.glob("lower_*"))
        return is_end, (link / "device").exists()

    def _is_own(self, names: list[str]) -> bool:
        """Return whether /sys shows this network namespace, and is not the mount of another namespace."""
        try:
            return {path.name for path in self._links.iterdir() if path.is_dir()} == set(names)
        except OSError:
            return False

    def _rate(self, name: str | None, names: list[str]) -> int | None:
        rate = _number(self._links / name / "speed") if name and self._is_own(names) else None
        return rate if rate is not None and rate > 0 else None

    def _infiniband(self) -> dict[str, dict[str, int | None]]:
        deadline = time.monotonic() + _INFINIBAND_S
        found: dict[str, dict[str, int | None]] = {}
        for port in self._ports:
            is_late = time.monotonic() > deadline
            counted = {"symbol_error": None if is_late else _number(port / "counters/symbol_error")}
            if port in self._counting:
                words = None if is_late else _number(port / "counters/port_xmit_data")
                counted["tx_bytes"] = None if words in (None, _FULL) else words * _BYTES_PER_WORD
            found[f"{port.parts[-3]}/{port.name}"] = counted
        return found


def _sent(
    before: list[str] | None,
    after: list[str] | None,
    interfaces: Mapping[str, Mapping[str, int | None]],
    ports: Mapping[str, Mapping[str, int | None]],
) -> dict[str, Any]:
    """Return the bytes that the links and the loopback interface sent between two samples.

    ``before`` and ``after`` are the links at both samples. An unknown number is None, with the reason.
    """
    because = None
    counted = {name: interfaces[name]["tx_bytes"] for name in after or ()}
    counted |= {port: one["tx_bytes"] for port, one in ports.items() if "tx_bytes" in one}
    if before is None or after is None:
        because = "/sys does not show which interfaces leave the node"
    elif set(before) != set(after):
        because = "an interface appeared or disappeared"
    elif None in counted.values():
        because = "a counter was reset, is too short, or was not read in time"
    known = [size for size in counted.values() if size is not None]
    return {
        "links": list(counted),
        "link_bytes": None if because else sum(known),
        "loopback_bytes": interfaces.get("lo", {}).get("tx_bytes"),
        "unknown_because": because,
    }


def _change(before: Mapping[str, int | None], after: Mapping[str, int | None]) -> dict[str, int | None]:
    """Return the increase of each counter, or None if a value is missing or the counter was reset."""
    found: dict[str, int | None] = {}
    for name, now in after.items():
        then = before.get(name)
        found[name] = None if now is None or then is None or now < then else now - then
    return found


def _number(path: Path) -> int | None:
    text = read_text(path)
    return int(text) if text.removeprefix("-").isdigit() else None


def host_name(env: Mapping[str, str]) -> str:
    """Return Slurm's name of this host if Slurm started the process, else the host's own name."""
    return env.get("SLURMD_NODENAME") or socket.gethostname()


@dataclass(frozen=True)
class NodeSample:
    """The counters of a node at one moment; only :class:`Node` interprets them."""

    time: str
    snapshot: Snapshot
    throttled_s: dict[str, float]
    network: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Return the sample as values for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> NodeSample:
        """Create a sample from JSON with the content of :meth:`as_json`.

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
            "freq_mhz": self._clock_mhz(),
            "net": self._network.change(before.network, after.network),
        }

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


class Process(NamedTuple):
    """One process: its start in ticks since boot, its CPU time, and the CPU time of its ended children."""

    started: int
    parent: int
    own_ns: int
    children_ns: int
    is_kernel_thread: bool
    name: str


class Snapshot(NamedTuple):
    """The visible processes by id, and the CPU time of all processes of the machine (None if unknown).

    ``is_complete`` is false if this process cannot see all other processes (mount option hidepid).
    """

    processes: dict[int, Process]
    is_complete: bool
    machine_ns: int | None


def cpu_clock_ns(pid: int) -> int | None:
    """Return the CPU clock of a process, or None if the process has ended. Any process may read the clock.

    Source: the encoding of clockid_t in the kernel's include/linux/posix-timers_types.h.
    """
    try:
        return time.clock_gettime_ns((~pid << 3) | 2)
    except OSError:
        return None


class ProcessTable:
    """Take snapshots of all processes.

    Reading the CPU clock of a process is much faster than reading its stat file, which also contains the CPU
    time of ended children. The file is read again only if the clock has changed: a process that has not run
    has not waited for children either.
    """

    def __init__(self, proc: Path = PROC, *, clock: Callable[[int], int | None] = cpu_clock_ns) -> None:
        self._proc = str(proc)
        self._clock = clock
        self._known: dict[int, tuple[int | None, Process]] = {}

    def snapshot(self) -> Snapshot:
        """Read the processes as they are now."""
        known, found, is_complete = self._known, {}, True
        for name in os.listdir(self._proc):  # noqa: PTH208 (a thousand Path objects take a millisecond)
            if not name.isdigit():
                continue
            pid = int(name)
            clock = self._clock(pid)
            entry = known.get(pid)
            if entry is None or clock is None or entry[0] != clock:
                try:
                    entry = (clock, _parse_stat(self._read(f"{name}/stat"), own_ns=clock))
                except PermissionError:
                    is_complete = False
                    continue
                except (OSError, ValueError, IndexError):  # it has just ended
                    continue
            found[pid] = entry
        self._known = found
        processes = {pid: process for pid, (_, process) in found.items()}
        return Snapshot(processes, is_complete and _INIT in processes, self._machine_ns())

    def text(self, name: str) -> bytes:
        """Return the content of a file below /proc, or ``b""`` if it cannot be read."""
        try:
            return self._read(name)
        except OSError:
            return b""

    def _read(self, name: str) -> bytes:
        descriptor = os.open(f"{self._proc}/{name}", os.O_RDONLY)
        try:
            blocks = []
            while block := os.read(descriptor, 65536):
                blocks.append(block)
                if len(block) < 4096:
                    break
            return b"".join(blocks)
        finally:
            os.close(descriptor)

    def _machine_ns(self) -> int | None:
        """Return the time of all processors in user and system mode, or None inside a container."""
        try:
            if str(Path(self._proc, "self/ns/pid").readlink()) != _FIRST_NAMESPACE:
                return None
            user, nice, system = self.text("stat").split(None, 4)[1:4]
            return (int(user) + int(nice) + int(system)) * _TICK_NS
        except (OSError, ValueError):
            return None


def _parse_stat(content: bytes, *, own_ns: int | None) -> Process:
    """Parse /proc/PID/stat. ``own_ns`` is the time of the CPU clock; the file's time is less precise.

    The name in parentheses can contain spaces and parentheses.
    """
    head, _, tail = content.rpartition(b") ")
    fields = tail.split(None, 20)
    if own_ns is None:
        own_ns = (int(fields[11]) + int(fields[12])) * _TICK_NS
    children_ns = (int(fields[13]) + int(fields[14])) * _TICK_NS
    is_kernel_thread = bool(int(fields[6]) & _KERNEL_THREAD)
    name = head.partition(b"(")[2].decode(errors="replace")
    return Process(int(fields[19]), int(fields[1]), own_ns, children_ns, is_kernel_thread, name)


class Job:
    """Recognise the processes of the job that ``pid`` belongs to.

    These are the tree of the launcher, the processes in the job's cgroup (Slurm's ``job_ID``), and the
    processes with the job's id in their environment. If no launcher started ``pid``, the tree of ``pid``
    replaces the launcher's tree.
    """

    def __init__(self, table: ProcessTable, env: Mapping[str, str], *, pid: int | None = None) -> None:
        self._table = table
        self._pid = os.getpid() if pid is None else pid
        self._is_launched = "LOCAL_RANK" in env or "SLURM_PROCID" in env
        marks = [f"{name}={env[name]}" for name in _JOB_VARIABLES if env.get(name)]
        self._mark = re.compile(rb"(?:^|\0)(?:%s)(?:\0|$)" % b"|".join(re.escape(m.encode()) for m in marks))
        self._cgroup = re.compile(rb"/job_%s(?:/|$)" % re.escape(env.get("SLURM_JOB_ID", "").encode()), re.M)
        self._has_marks = bool(marks)
        self._in_cgroup = "SLURM_JOB_ID" in env
        self._answers: dict[tuple[int, int], bool] = {}

    def owns(self, pid: int, processes: Mapping[int, Process]) -> bool:
        """Return whether a process of ``processes`` belongs to the job."""
        key = (pid, processes[pid].started)
        if key not in self._answers:
            self._answers[key] = self._recognise(pid, processes)
        return self._answers[key]

    def _recognise(self, pid: int, processes: Mapping[int, Process]) -> bool:
        if self._root(processes) in (pid, *ancestors(pid, processes)):
            return True
        if self._in_cgroup and self._cgroup.search(self._table.text(f"{pid}/cgroup")):
            return True
        return self._has_marks and bool(self._mark.search(self._table.text(f"{pid}/environ")))

    def _root(self, processes: Mapping[int, Process]) -> int:
        above = [pid for pid in ancestors(self._pid, processes) if pid != _INIT]
        for pid in above:
            if processes[pid].name == "slurmstepd":
                return pid
        return above[0] if above and self._is_launched else self._pid

    def waiting(self, processes: Mapping[int, Process]) -> set[int]:
        """Return the ancestors of the job, which wait for its end, such as a shell and `bench submit`."""
        return set(ancestors(self._pid, processes))


def ancestors(pid: int, processes: Mapping[int, Process]) -> list[int]:
    """Return the parent of a process, the parent's parent, and so on."""
    found: list[int] = []
    while (process := processes.get(pid)) is not None and process.parent in processes:
        pid = process.parent
        if pid in found:  # ids were reused while the processes were listed
            break
        found.append(pid)
    return found


def foreign_cpu_s(before: Snapshot, after: Snapshot, job: Job) -> float | None:
    """Return the CPU time in seconds of processes outside of the job between two snapshots.

    If not all processes are visible, the result is the CPU time of the machine, including kernel threads,
    minus that of the job. The result is None if the machine's time is unknown, too.
    """
    processes = after.processes
    used = _used_ns(before.processes, processes)
    owned = {pid for pid in used if job.owns(pid, processes)}
    if before.is_complete and after.is_complete:
        waiting = job.waiting(processes)
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


def _used_ns(before: Mapping[int, Process], after: Mapping[int, Process]) -> dict[int, tuple[int, int]]:
    """Return the CPU time of each process and of its ended children; idle processes are left out.

    When a parent waits for its ended child, the kernel adds the child's whole time to the parent's. The part
    of this time before the first snapshot is subtracted.
    """
    earlier = _ns_of_ended(before, after)
    used = {}
    for pid, now in after.items():
        then = before.get(pid)
        if then is now:
            continue
        is_same = then is not None and then.started == now.started
        own_before, children_before = (then.own_ns, then.children_ns) if then and is_same else (0, 0)
        inherits = pid == _INIT or now.name in _SLURM_DAEMONS
        children = 0 if inherits else max(0, now.children_ns - children_before - earlier[pid])
        own = now.own_ns - own_before
        if own > 0 or children > 0:
            used[pid] = (own, children)
    return used


def _ns_of_ended(before: Mapping[int, Process], after: Mapping[int, Process]) -> Counter[int]:
    """Return the CPU time, at the first snapshot, of the processes that ended before the second snapshot.

    The times are summed by the nearest ancestor that still runs.
    """
    found: Counter[int] = Counter()

    def survives(pid: int) -> bool:
        now = after.get(pid)
        return now is not None and now.started == before[pid].started

    for pid, process in before.items():
        if not survives(pid):
            heir = next((above for above in ancestors(pid, before) if survives(above)), None)
            if heir is not None:
                found[heir] += process.own_ns + process.children_ns
    return found
