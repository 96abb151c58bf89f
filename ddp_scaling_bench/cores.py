"""The cores that this process can use, and the CPU quotas that limit it.

Sources: the kernel's Documentation/admin-guide/cgroup-v2.rst and, for cgroup v1, scheduler/sched-bwc.rst.
Slurm, container runtimes and systemd can set a CPU quota on any control group above a process. All these
quotas apply, so every group from the process's own group up to the mount is read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

PROC, CPUS = Path("/proc"), Path("/sys/devices/system/cpu")
#: Maximum number of processes in :func:`sizes_up_to`.
MOST_PROCESSES = 16


def usable_cores() -> int:
    """Return the number of cores of this process: those that it may run on, at most its quota rounded up."""
    cores, quota = cores_of(os.sched_getaffinity(0)), cpu_quota(cpu_groups())
    return cores if quota is None else min(cores, math.ceil(quota))


def cores_of(cpus: Iterable[int], folder: Path = CPUS) -> int:
    """Return the number of cores of some hardware threads; without topology, each thread counts as a core."""
    return len({read_text(folder / f"cpu{cpu}/topology/thread_siblings_list") or cpu for cpu in cpus})


def sizes_up_to(most: int) -> list[int]:
    """Return 1, 2, 4, ... up to ``most``, at least [1] and at most ``MOST_PROCESSES``."""
    return [2**i for i in range(MOST_PROCESSES.bit_length()) if 2**i <= max(1, min(most, MOST_PROCESSES))]


def cpu_groups(proc: Path = PROC) -> list[Path]:
    """Return the control groups that can limit this process's CPU time, from its own group upwards."""
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
        # In a container, the container's mount possibly does not contain this path.
        own = root / names[0].lstrip("/") if names and ".." not in names[0] else root
        groups += [group for group in (own, *own.parents) if group.is_relative_to(root) and group.is_dir()]
    return groups


def cpu_quota(groups: list[Path]) -> float | None:
    """Return the smallest quota (in cores) of the groups, or None if no group has a quota."""
    quotas = [quota for group in groups if (quota := _quota(group)) is not None]
    return min(quotas, default=None)


def _quota(group: Path) -> float | None:
    of_version_1 = (read_text(group / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    text = read_text(group / "cpu.max") or " ".join(of_version_1)
    try:
        quota_us, period_us = (float(word) for word in text.split())
    except ValueError:  # "max", or no quota here
        return None
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None


def read_text(path: Path) -> str:
    """Return the stripped text of a small file; "" if it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
