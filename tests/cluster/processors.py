"""CPU quotas of the test cluster's machines: a control group (version 1) per machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tests.cluster.containers import ClusterError, Container

CPU_CGROUP = Path("/sys/fs/cgroup/cpu")
_PERIOD_US = 100_000
#: More than other processes of this machine have, so that they do not take the time that a quota allows.
_SHARES = 200_000


def limit_cpu(container: Container, cores: float | None, *, group: Path) -> None:
    """Limit all processes of a machine to ``cores`` (0.2: a fifth of a core); None removes the limit."""
    if not (CPU_CGROUP / "cpu.shares").is_file():
        raise ClusterError(f"no CPU quota can be set here: {CPU_CGROUP} is not mounted")
    group.mkdir(parents=True, exist_ok=True)
    (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
    (group / "cpu.cfs_quota_us").write_text("-1" if cores is None else str(round(cores * _PERIOD_US)))
    (group / "cpu.shares").write_text(str(_SHARES))
    (group.parent / "cpu.shares").write_text(str(_SHARES))
    for pid in _processes(container):
        with suppress(OSError):  # it has ended
            (group / "cgroup.procs").write_text(str(pid))


def _processes(container: Container) -> Iterator[int]:
    """Yield the processes of a machine, found by their process id namespace."""
    wanted = _namespace(container.init.pid)
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and _namespace(int(folder.name)) == wanted:
            yield int(folder.name)


def _namespace(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/ns/pid").readlink().name
    except OSError:
        return None
