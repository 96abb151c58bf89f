"""The CPU time that processes of a node used between two moments, without those of the job.

A process that ended in between is counted if its parent still runs and has waited for the process: the
parent's /proc/PID/stat contains the time of ended children, in ticks of usually 10 ms. Process 1 and Slurm's
daemons inherit the processes of any job, so the times of their ended children are not counted. Kernel threads
are not counted either, because they can work for the job, for example for its network.

Source: proc(5), and the kernel's Documentation/filesystems/proc.rst.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
_TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")
#: The flag PF_KTHREAD in field 9 of /proc/PID/stat.
_KERNEL_THREAD = 0x00200000
_INIT = 1
_SLURM_DAEMONS = ("slurmd", "slurmstepd")
#: Link of /proc/self/ns/pid in the machine's first namespace (PROC_PID_INIT_INO in include/linux/proc_ns.h).
_FIRST_NAMESPACE = "pid:[4026531836]"
#: Variables that identify a job in the environment of its processes.
_JOB_VARIABLES = ("SLURM_JOB_ID", "BENCH_SSH_JOB")


class Process(NamedTuple):
    """One process: its start in ticks since boot, its CPU time, and the CPU time of its ended children."""

    started: int
    parent: int
    own_ns: int
    children_ns: int
    is_kernel_thread: bool
    name: str


class Snapshot(NamedTuple):
    """The visible processes by id, and the CPU time of all processes of the machine; None if unknown.

    ``is_complete`` is false if this process cannot see all other processes (mount option hidepid).
    """

    processes: dict[int, Process]
    is_complete: bool
    machine_ns: int | None


def cpu_clock_ns(pid: int) -> int | None:
    """Return the CPU clock of a process; None if the process has ended. Any process may read the clock.

    Source: the encoding of clockid_t in the kernel's include/linux/posix-timers_types.h.
    """
    try:
        return time.clock_gettime_ns((~pid << 3) | 2)
    except OSError:
        return None


class ProcessTable:
    """Takes snapshots of all processes.

    Reading the CPU clock of a process is much faster than reading its stat file. The file is read again only
    if the clock has changed, because a process that has not run has not waited for children either.
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
        """Return the content of a file below /proc; empty if it cannot be read."""
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
        """Return the time of all processors in user and system mode; None inside of a container."""
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
    """Recognises the processes of the job that ``pid`` belongs to.

    These are the tree of the launcher, the processes in the job's cgroup (Slurm's ``job_ID``), and those with
    the job's id in their environment. If no launcher started ``pid``, its own tree replaces the launcher's.
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

    def tree(self, processes: Mapping[int, Process]) -> set[int]:
        """Return the ids of the launcher's tree."""
        root = self._root(processes)
        return {pid for pid in processes if root in (pid, *ancestors(pid, processes))}

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
        """Return the processes above the job that wait for its end, such as a shell and `bench submit`."""
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

    If not all processes are visible, the result is the machine's CPU time without the job's; it then includes
    kernel threads. The result is None if the machine's time is unknown, too.
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

    A child's whole time is added to its parent's when the parent waits for it. The part before the first
    snapshot is subtracted.
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
    """Return the CPU time before the first snapshot of processes that ended before the second one.

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
