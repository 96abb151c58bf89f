"""Watch which ranks a command starts on this node, while a process of it runs.

::

    python -P -m ddp_scaling_bench.start measure.process_watch RUN_FOLDER PID

The processes of a run have the run's folder in their environment (BENCH_RUN_DIR), or descend from such a
process. A *rank* is one of them that has loaded torch's libraries and whose environment sets RANK and
WORLD_SIZE. A helper that a rank starts, such as a worker of a loader, inherits these variables and is no
rank. A process with other variables than the torch process above it is a rank of its own, and the process
above it is a launcher, such as a torchrun within the command.

:mod:`bench.study.processes` compares the ranks with the plan. The environment of a process is the one that it
was started with: ranks that a program forks or spawns, and that set RANK themselves, are not visible.
"""

from __future__ import annotations

import os
import select
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UnwritableError
from ..study.files import write_json
from ..study.processes import RANKS_SEEN
from ..terminal import one_line
from ..variables import without_users
from .node import host_name

#: The first and the last interval between two looks at the processes of the node.
_FIRST_S, _LAST_S = 0.1, 1.0
#: The longest time between two writes of the file, which contains when each rank was last seen.
_WRITE_S = 60.0
#: A process that does not belong to the run is read again for this time: a forked process still has the
#: environment of its parent.
_FOREIGN_S = 5.0
#: A process with other values of these variables was started by a launcher.
_LAUNCH = (
    *("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID", "SLURM_PROCID"),
    *("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
)
_TORCH = b"/libtorch"
_MOST_CHARACTERS = 200

#: Process id and start time of a process, in the unit of /proc/PID/stat.
_Key = tuple[int, int]


@dataclass
class _TorchProcess:
    """A process that loaded torch, and the first and last time it was seen."""

    above: _Key | None
    """The nearest torch process above it."""
    is_orphan: bool
    """It had loaded torch when it was first seen, and its parent does not belong to the run."""
    task: int
    """The highest process above it with RANK and WORLD_SIZE, or itself: bench started it for one rank."""
    started: float
    first: float
    last: float
    words: bytes = b""
    """The content of ``cmdline``."""
    launch: tuple[str | None, ...] = ()
    """The values of ``_LAUNCH``."""

    @property
    def numbers(self) -> tuple[int, int] | None:
        """RANK and WORLD_SIZE."""
        rank, world_size = (value or "" for value in self.launch[:2])
        return (int(rank), int(world_size)) if rank.isdigit() and world_size.isdigit() else None


class ProcessWatch:
    """Collect the ranks of one run on this node; call :meth:`look` repeatedly."""

    def __init__(self, run_dir: str, *, proc: Path = Path("/proc")) -> None:
        self._mark = b"BENCH_RUN_DIR=" + os.fsencode(run_dir)
        self._proc = proc
        self._booted = 0.0
        self._unread: set[int] = set()  # the processes that a look has still to read
        self._foreign: dict[int, float] = {}  # process ids, with the time of the first look
        self._parents: dict[int, int] = {}  # the living processes of the run, with their first parents
        self._with_rank: set[int] = set()  # those of them with RANK and WORLD_SIZE
        self._keys: dict[int, _Key] = {}  # those of them that loaded torch
        self._torch: dict[_Key, _TorchProcess] = {}  # also those that ended

    def look(self, now: float, *, since_boot: float | None = None) -> bool:
        """Look at all processes; return whether a rank started or ended.

        ``now`` is the time since 1970, ``since_boot`` that since the start of the machine (seconds).
        """
        self._booted = now - (time.clock_gettime(time.CLOCK_BOOTTIME) if since_boot is None else since_boot)
        pids = {int(path.name) for path in self._proc.iterdir() if path.name.isdigit()} - {os.getpid()}
        before = set(self._keys.values())
        self._foreign = {pid: since for pid, since in self._foreign.items() if pid in pids}
        self._parents = {pid: parent for pid, parent in self._parents.items() if pid in pids}
        self._with_rank &= pids
        self._keys = {pid: key for pid, key in self._keys.items() if pid in pids}
        self._unread = {pid for pid in pids if now - self._foreign.get(pid, now) <= _FOREIGN_S}
        for pid in sorted(self._unread):
            if pid in self._unread:
                self._read(pid, now)
        return set(self._keys.values()) != before

    def ranks(self) -> list[dict[str, Any]]:
        """Return the ranks that have been seen, with their commands and times in seconds since 1970."""
        found = [(key[0], self._torch[key]) for key in self._ranks()]
        return [
            {
                "rank": numbers[0],
                "world_size": numbers[1],
                "pid": pid,
                "task": process.task,
                "command": _command(process.words),
                "first": process.first,
                "last": process.last,
            }
            for pid, process in found
            if (numbers := process.numbers)
        ]

    def _ranks(self) -> list[_Key]:
        known = {key: one for key, one in self._torch.items() if one.numbers}
        ranks = {
            key
            for key, one in known.items()
            if one.above not in known or known[one.above].launch != one.launch
        }
        launchers = {above for key in ranks for above in self._above(key)}
        # A launcher can give one of its ranks the variables that it has itself.
        ranks |= {key for key, one in known.items() if one.above in launchers}
        ranks -= launchers
        # A helper of a rank can outlive it, and be seen for the first time afterwards.
        for key in [key for key in ranks if known[key].is_orphan]:
            alike = [known[other] for other in ranks if known[other].launch == known[key].launch]
            if any(known[key].started <= other.last < known[key].first for other in alike):
                ranks.discard(key)
        return [key for key in known if key in ranks]

    def _above(self, key: _Key) -> Iterator[_Key]:
        """Yield the torch processes above a process, nearest first."""
        while (process := self._torch.get(key)) is not None and process.above is not None:
            key = process.above
            yield key

    def _read(self, pid: int, now: float) -> None:
        folder = self._proc / str(pid)
        self._unread.discard(pid)
        try:
            words = (folder / "environ").read_bytes().split(b"\0")
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            command = (folder / "cmdline").read_bytes()
        except OSError:  # it ended, or it belongs to another user
            return
        parent, key = int(fields[1]), (pid, int(fields[19]))
        if parent in self._unread:  # its id is higher if the ids started again from 1 in between
            self._read(parent, now)
        if self._mark not in words and pid not in self._parents and parent not in self._parents:
            self._foreign.setdefault(pid, now)
            return
        self._foreign.pop(pid, None)
        is_new = pid not in self._parents
        parent = self._parents.setdefault(pid, parent)
        env = dict(word.split(b"=", 1) for word in words if b"=" in word)
        if b"RANK" in env and b"WORLD_SIZE" in env:
            self._with_rank.add(pid)
        process = self._torch.get(key)
        # The command and the environment of a process that has just ended are empty.
        if process is None or (command and process.words != command):
            # Between fork and exec, a process has the libraries and the command of its parent.
            if not _contains(folder / "maps", _TORCH):
                self._torch.pop(key, None)
                self._keys.pop(pid, None)
                return
            if process is None:
                process = self._torch[key] = self._new(key, parent, now, is_new=is_new)
                self._keys[pid] = key
            process.words = command
        if env:
            values = (env.get(name.encode()) for name in _LAUNCH)
            process.launch = tuple(None if value is None else os.fsdecode(value) for value in values)
        process.last = now

    def _new(self, key: _Key, parent: int, now: float, *, is_new: bool) -> _TorchProcess:
        """Return a process that has just been found, with the processes above it."""
        above, task, at = None, key[0], parent
        seen: set[int] = set()
        while at in self._parents and at not in seen:
            seen.add(at)
            above = above or self._keys.get(at)
            task = at if at in self._with_rank else task
            at = self._parents[at]
        started = self._booted + key[1] / os.sysconf("SC_CLK_TCK")
        return _TorchProcess(above, is_new and parent not in self._parents, task, started, now, now)


def _contains(path: Path, part: bytes) -> bool:
    try:
        return part in path.read_bytes()
    except OSError:
        return False


def _command(content: bytes) -> str:
    """Return a command line, the content of ``cmdline``, without users of URLs."""
    words = [os.fsdecode(word) for word in content.split(b"\0")[:-1]]
    text = one_line(without_users(shlex.join(words)))
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"


def main() -> int:
    """Watch until the process that the second argument names has ended."""
    run_dir, pid = sys.argv[1], int(sys.argv[2])
    path = Path(run_dir) / RANKS_SEEN.format(host_name(os.environ))
    watch, wait_s, written = ProcessWatch(run_dir), _FIRST_S, -_WRITE_S
    try:
        handle = os.pidfd_open(pid)
    except OSError:  # it has ended, or the kernel is older than 5.3
        return 0
    is_alive = True
    while is_alive:
        changed = watch.look(time.time())
        is_alive = not select.select([handle], [], [], wait_s)[0]
        if changed or not is_alive or time.monotonic() - written > _WRITE_S:
            written = time.monotonic()
            try:
                write_json(path, {"schema": 1, "ranks": watch.ranks()})
            except UnwritableError:
                return 1
        wait_s = min(_LAST_S, wait_s * 1.2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
