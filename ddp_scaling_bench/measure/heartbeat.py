"""The place of each rank in its loop, in the run's folder, so that `bench` can say where a run hung.

The training only counts its steps. About once a second, a thread writes the count to ``heartbeat.RANK.json``.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from ..files import read_json
from .launch import Launch

#: Files of the ranks, in the run's folder.
HEARTBEATS = "heartbeat.{}.json"
#: What a rank does: it waits for data, is between these and its step, is in the step, has stopped its clock
#: (for validation, or between two loops), or has closed its recorder.
DATA, LOOP, STEP, PAUSED, CLOSED = "data", "loop", "step", "paused", "closed"
#: A file has at least this size, so that a later content covers an earlier one.
_SIZE = 256
#: Maximum time for which the end of a recording waits for the thread, which a file system can block.
_LAST_WRITE_S = 1.0


def interval_s(ranks: int) -> float:
    """Return the time between two writes of a rank: many ranks must not load the file system."""
    return 1.0 if ranks <= 64 else 10.0


@dataclass(frozen=True)
class Beat:
    """The place of a rank: how many steps it completed, and what it did since.

    Attributes:
        time, first_time: the end of the last step and the start of the first one, by the rank's clock.
        changed: the time at which this was written, by the clock of the file system.
    """

    rank: int
    host: str
    completed: int
    stage: str
    time: float
    first_time: float
    changed: float

    @property
    def step(self) -> int:
        """The number of steps that have begun."""
        return self.completed + (self.stage == STEP)


_WRITTEN = [one.name for one in fields(Beat) if one.name != "changed"]


def read_beats(folder: Path) -> Iterator[Beat]:
    """Yield the places of the ranks of a run; damaged files are left out."""
    for path in folder.glob(HEARTBEATS.format("*")):
        with suppress(ArithmeticError, LookupError, OSError, TypeError, ValueError):
            content = read_json(path) or {}
            place = int(content["rank"]), str(content["host"]), int(content["completed"])
            times = float(content["time"]), float(content["first_time"]), path.stat().st_mtime
            if all(map(math.isfinite, times)):
                yield Beat(*place, str(content["stage"]), *times)


class Heartbeat:
    """The place of this rank, and the thread that writes it."""

    def __init__(self) -> None:
        #: The number of steps that have ended, and what the rank does since; the recorder sets this.
        self.completed, self.stage = 0, LOOP
        self._time = self._first_time = 0.0
        self._thread: threading.Thread | None = None

    def step_ended(self) -> None:
        """Count a step."""
        self.completed += 1
        self.stage, self._time = LOOP, time.time()

    def start(self, env: Mapping[str, str], launch: Launch, host: str) -> None:
        """Begin to write if this is a run of `bench`; the first step begins now."""
        self._time = self._first_time = time.time()
        if folder := env.get("BENCH_RUN_DIR"):
            self._process, self._ends = os.getpid(), threading.Event()
            path, pause_s = f"{folder}/{HEARTBEATS.format(launch.rank)}", interval_s(launch.world_size)
            given = path, launch.rank, host, pause_s
            thread = threading.Thread(target=self._write, args=given, name="heartbeat", daemon=True)
            with suppress(RuntimeError):  # the limit on threads is reached
                thread.start()
                self._thread = thread

    def close(self, *, left: bool) -> None:
        """Write the last place and end the thread; ``left`` is true if the rank left its loop in order."""
        if left:
            self.stage = CLOSED
        if self._thread is not None and self._process == os.getpid():  # a forked child has no such thread
            self._ends.set()
            self._thread.join(_LAST_WRITE_S)

    def _write(self, path: str, rank: int, host: str, pause_s: float) -> None:
        """Write the place in place: a rename each second would load the servers of a file system."""
        written, is_last = None, False
        while not is_last:
            is_last = self._ends.wait(pause_s if written else 0.0)
            place = self.completed, self.stage
            if place != written:
                written, values = place, (rank, host, *place, self._time, self._first_time)
                content = json.dumps(dict(zip(_WRITTEN, values, strict=True))).ljust(_SIZE)
                with suppress(OSError), open(path, "wb", 0, opener=_without_truncation) as file:
                    file.write(f"{content}\n".encode())


def _without_truncation(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_TRUNC, 0o644)
