"""The CPU quota of this process and the time for which it was throttled, from its control groups.

Slurm, container runtimes and systemd can set a quota on any group above a process. All apply, so every
group from the process's own up to the mount is read.

Source: the kernel's Documentation/admin-guide/cgroup-v2.rst, and scheduler/sched-bwc.rst for version 1.
"""

from __future__ import annotations

from pathlib import Path

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
        # In a container, the path can be one that its mount does not show.
        own = root / names[0].lstrip("/") if names and ".." not in names[0] else root
        groups += [group for group in (own, *own.parents) if group.is_relative_to(root) and group.is_dir()]
    return groups


def cpu_quota(groups: list[Path]) -> float | None:
    """Return the smallest quota of the groups in cores; None if there is none."""
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


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
