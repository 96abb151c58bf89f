"""Find checkpoints of an earlier run of the study that the training reads or replaces.

Such a training may have resumed, and then takes fewer steps than planned. A checkpoint is one of an earlier
run if it was written after that run's first step: downloads and caches of data come before it.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from ..files import read_json
from ..measure.findings import Resumed
from ..run_folder import RunFolder

_SUFFIXES = (
    *(".pt", ".pth", ".ckpt", ".safetensors", ".distcp"),
    *(".pkl", ".npz", ".npy", ".bin", ".h5", ".json"),
)
_WORDS, _CODE = ("checkpoint", "ckpt"), (".py", ".pyc", ".so")
_LOGS = (".txt", ".log", ".csv", ".out", ".err", ".yaml", ".toml")
#: Limits: depth of folders below the working folder, their entries, and other runs of the study.
_MOST_DEPTH, _MOST_ENTRIES, _MOST_RUNS = 3, 5000, 200

_opened: set[str] | None = None  # None: not collected, or no longer


def _note_open(event: str, args: tuple[Any, ...]) -> None:
    """Collect the checkpoints that this process opens for reading (a hook of :func:`sys.addaudithook`)."""
    if event == "open" and _opened is not None:
        with suppress(Exception):  # an error would reach the program
            path, mode, flags = os.fsdecode(args[0]), args[1], args[2]
            reads = flags & os.O_ACCMODE == os.O_RDONLY if mode is None else not {*mode} & {*"wax+"}
            if reads and len(_opened) < _MOST_ENTRIES and _may_be_state(os.path.relpath(path)):
                _opened.add(str(Path(path).absolute()))


def _collected() -> set[str]:
    """Return the collected paths, and collect no more."""
    global _opened
    opened, _opened = _opened or set(), None
    return opened


def _may_be_state(path: str) -> bool:
    """Return whether a file that is read can be a checkpoint: any but code and logs below this folder."""
    is_here = not path.startswith("..") and "/." not in f"/{path}"
    return _is_checkpoint(path) or (is_here and not path.endswith((*_CODE, *_LOGS)))


def _is_checkpoint(path: str) -> bool:
    lower = path.lower()
    return lower.endswith(_SUFFIXES) or (any(word in lower for word in _WORDS) and not lower.endswith(_CODE))


if "BENCH_RUN_DIR" in os.environ and os.environ.get("RANK", "0") == "0":
    _opened = set()
    sys.addaudithook(_note_open)
    os.register_at_fork(after_in_child=_collected)  # workers of a loader can open many files


class LeftFiles:
    """The checkpoints that earlier runs left, as they are at the first step of the run in ``folder``."""

    def __init__(self, folder: RunFolder) -> None:
        opened, self._root = _collected(), str(Path.cwd())
        self._before: dict[str, tuple[int, ...]] = {}
        start_s = math.inf
        with suppress(OSError, IndexError):  # without this file, it is no run of bench
            start_s = folder.start.stat().st_mtime
            study = f"{folder.path.absolute().parents[2]}/"
            found = {path for path in (*opened, *_checkpoints_in(self._root)) if not path.startswith(study)}
            states = {path: _state(path) for path in found}
            older = {path: state for path, state in states.items() if state and state[0] / 1e9 < start_s}
            firsts = islice(_first_steps(folder.path), _MOST_RUNS if older else 0)
            first_s = min(firsts, default=start_s)
            self._before = {path: state for path, state in older.items() if state[0] / 1e9 > first_s}
        # Code that is not Python's opens files unseen, but most file systems note a first access.
        self._read = sorted(path for path in self._before if path in opened or _accessed_s(path) >= start_s)

    def finding(self) -> Resumed | None:
        """Return which of them the training has read before its first step, or replaced by now."""
        changed = sorted(path for path, state in self._before.items() if _state(path) not in (state, ()))
        files = tuple(os.path.relpath(path, self._root) for path in self._read or changed)
        if self._read or not files:
            return Resumed(files=files) if files else None
        return Resumed(files=files, replaced=True, severity="info")


def _accessed_s(path: str) -> float:
    with suppress(OSError):
        return Path(path).stat().st_atime
    return 0.0


def _state(path: str) -> tuple[int, ...]:
    """Return time of change, inode and size of a file, or an empty tuple."""
    try:
        stat = Path(path).stat()
    except OSError:
        return ()
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


def _first_steps(attempt: Path) -> Iterator[float]:
    """Yield the times of the first steps of the study's other attempts, or else those of their starts."""
    for start in attempt.parents[1].glob("*/attempt-*/start"):
        if start.parent != attempt:
            beat = read_json(start.with_name("heartbeat.0.json")) or {}
            with suppress(OSError, TypeError, ValueError):
                yield float(beat.get("first_time") or start.stat().st_mtime)


def _checkpoints_in(root: str) -> Iterator[str]:
    """Yield the checkpoints in a folder, those of its upper folders first."""
    folders, left = [(root, 0)], _MOST_ENTRIES
    for folder, depth in folders:
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in islice(entries, left):
                left -= 1
                if entry.is_dir(follow_symlinks=False):
                    if depth < _MOST_DEPTH and not entry.name.startswith("."):
                        folders.append((entry.path, depth + 1))
                elif _is_checkpoint(entry.path[len(root) :]):
                    yield entry.path
