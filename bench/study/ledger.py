"""The ledger: what happened in a study, one JSON object a line, only ever appended to.

Each event names a run and an attempt. The state of a run is the fold of its events, so
nothing is lost when a process dies between two of them: the next reader sees an attempt
that was begun and not ended, and settles it.

Events: ``intent`` (about to be started, with the name that makes it findable),
``submitted`` (accepted; ``job_id``), ``started``, ``ended`` (``state``, ``reason``, ...),
``withdrawn`` (an intent of which nothing came), ``accounted`` (an ``ended`` once more, with what
Slurm's accounting adds when it answers at last; ``accounted`` false: it has yet to).
One event is of the study and names no run: ``halted`` (all of it was cancelled; a submission
that was typed before starts nothing more).
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from bench.errors import BenchError, unwritable


class RunState(StrEnum):
    """Where a run stands; every state of Slurm maps to one of these."""

    PLANNED = "planned"
    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen to the attempt."""
        return self in (RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED)

    @property
    def active(self) -> bool:
        """Whether the attempt still waits or runs, as far as is known."""
        return self in (RunState.QUEUED, RunState.RUNNING, RunState.UNKNOWN)


@dataclass
class RunRecord:
    """The latest attempt of one run, as the ledger tells it. ``attempt`` 0: none yet."""

    run_id: str
    attempt: int = 0
    state: RunState = RunState.PLANNED
    reason: str = ""
    failure_class: str | None = None
    exit_code: int | None = None
    cause: str | None = None
    job_id: str | None = None
    job_name: str | None = None
    details: dict[str, Any] = field(default_factory=dict)


def now() -> str:
    """Return the time in UTC as ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True)
class Ledger:
    """The events of one study."""

    path: Path

    def append(self, event: str, *, run_id: str, attempt: int, **details: Any) -> None:
        """Write one event durably: when this returns, it survives a crash.

        Raises:
            BenchError: the file cannot be written (full, read-only); nothing of it is left there.
        """
        self.append_all([{"event": event, "run_id": run_id, "attempt": attempt, **details}])

    def append_all(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Write events durably, in one go: all of them, or none. See :meth:`append`."""
        if not events:
            return
        time_utc = now()
        text = "".join(json.dumps({"time": time_utc, **event}) + "\n" for event in events)
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                _write_whole(descriptor, (self._mend_torn_end(descriptor) + text).encode())
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise unwritable(self.path, error) from None

    def halt(self) -> None:
        """Note that the whole study is being cancelled. See :class:`HaltWatch`, and :meth:`append`."""
        self.append_all([{"event": "halted"}])

    @staticmethod
    def _mend_torn_end(descriptor: int) -> str:
        """Return a line break where the last writer died in the middle of a line."""
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            return "\n"
        return ""

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events in order; a line that is not whole is skipped."""
        try:
            with self.path.open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    try:
                        event = json.loads(line)
                    except ValueError:
                        continue
                    if isinstance(event, dict) and "run_id" in event:
                        yield event
        except FileNotFoundError:
            return

    def attempts_of_job(self, job_id: str) -> list[tuple[str, int]]:
        """Return run and attempt of all that this job ran, older attempts included; a pack has many."""
        events = (event for event in self.events() if event["event"] == "submitted")
        return sorted({(e["run_id"], e["attempt"]) for e in events if e.get("job_id") == job_id})

    def records(self, run_ids: Iterable[str]) -> dict[str, RunRecord]:
        """Return the latest attempt of each run, in the order of ``run_ids``."""
        records = {run_id: RunRecord(run_id) for run_id in run_ids}
        for event in self.events():
            record = records.get(event["run_id"])
            if record is None or event["attempt"] < record.attempt:
                continue
            if event["attempt"] > record.attempt:
                record = records[record.run_id] = RunRecord(record.run_id, attempt=event["attempt"])
            _apply(record, event)
        return records


class HaltWatch:
    """Looks whether a study was halted since this was made; reads no more than what is new since."""

    def __init__(self, ledger: Ledger) -> None:
        self._path = ledger.path
        self._read_to = ledger.path.stat().st_size if ledger.path.exists() else 0
        self._halted = False

    def halted(self) -> bool:
        """Whether all of the study was cancelled meanwhile."""
        if self._halted or not self._path.exists():
            return self._halted
        with self._path.open("rb") as file:
            file.seek(self._read_to)
            whole, line_break, _ = file.read().rpartition(b"\n")
        self._read_to += len(whole) + len(line_break)
        self._halted = any(_event_of(line) == "halted" for line in whole.splitlines())
        return self._halted


def _event_of(line: bytes) -> str | None:
    try:
        event = json.loads(line)
    except ValueError:  # a torn line
        return None
    return event.get("event") if isinstance(event, dict) else None


def _write_whole(descriptor: int, content: bytes) -> None:
    """Append ``content``; on a disk that fills up on the way, take back what was written of it."""
    size = os.fstat(descriptor).st_size
    left = memoryview(content)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        os.ftruncate(descriptor, size)
        raise


def _apply(record: RunRecord, event: dict[str, Any]) -> None:
    kind = event["event"]
    extra = {k: v for k, v in event.items() if k not in ("event", "run_id", "attempt", "state", "reason")}
    record.details.update(extra)
    record.job_id = event.get("job_id", record.job_id)
    record.job_name = event.get("job_name", record.job_name)
    if kind in ("intent", "submitted"):
        record.state = RunState.QUEUED
    elif kind == "started":
        record.state, record.reason = RunState.RUNNING, ""
    elif kind in ("ended", "accounted"):
        record.state = RunState(event["state"])
        record.reason = event.get("reason", "")
        record.failure_class = event.get("failure_class")
        record.exit_code = event.get("exit_code")
        record.cause = event.get("cause")
    elif kind == "withdrawn":
        record.state = RunState.PLANNED
        record.reason = event.get("reason", "")


@contextmanager
def submit_lock(path: Path, *, wait_s: float = 0.0) -> Iterator[int]:
    """Hold the study's lock; yields its descriptor, which a child may inherit.

    The lock lives as long as any process holds the descriptor open: a child that
    outlives a killed harness still holds it, so nobody submits beside it.

    Raises:
        BenchError: another process holds it for longer than ``wait_s`` seconds, or it cannot be made.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise unwritable(path, error) from None
    try:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = os.pread(descriptor, 100, 0).decode(errors="replace").strip()
                    who = f" ({holder})" if holder else ""
                    raise BenchError(
                        f"{path.parent}: another `bench submit` is at work on this study{who}",
                        remedy="wait for it, or stop it first",
                    ) from None
                time.sleep(0.1)
        with suppress(OSError):  # a full disk: the lock is held all the same
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"pid {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)
