"""Start the chosen runs of a study, and wait for the scheduler, for room in its queue, and for the ends."""

from __future__ import annotations

import itertools
import math
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ddp_scaling_bench.errors import BenchError, UnavailableError
from ddp_scaling_bench.units import count

from ..matrix.cell import Run
from ..package import ensure_package
from ..study.ledger import FailureClass, Record, RunState
from .commands import passed_variables
from .engine import Callbacks, Engine, QueueFullError, may_start

#: The time between two tries while the scheduler does not answer.
RETRY_S = 3.0
#: The longest pause between two polls, if the scheduler asks for no longer one.
LONGEST_PAUSE_S = 3.0
#: The maximum number of seconds to wait for runs that the scheduler does not know.
UNKNOWN_WAIT_S = 60.0
#: The maximum number of seconds between two tries while the queue is full. A job that ends causes a
#: try at once.
FULL_WAIT_S = 30.0


class HaltedError(BenchError):
    """The study was cancelled after the submission began."""

    exit_code = 1

    def __init__(self) -> None:
        super().__init__(
            "the study was cancelled: no more runs are started",
            remedy="`bench submit` starts the remaining runs",
        )


class Submission:
    """Start runs of a study until it is cancelled.

    A ``bench cancel`` counts from the creation of this object, so create it before the runs are chosen.

    While the scheduler does not answer, a submission that waits tries again without limit, unless the
    scheduler's commands are missing. A missing configuration also ends it, unless the scheduler has answered
    before: on some clusters, Slurm's controller provides the configuration, so it is missing while the
    controller is down.
    """

    def __init__(
        self, engine: Engine, callbacks: Callbacks, *, max_queued: int | None = None, pack: bool = False
    ) -> None:
        self.engine, self.callbacks = engine, callbacks
        self._max_queued, self._pack = max_queued, pack
        self._ledger, self._created = engine.study.ledger, engine.study.ledger.size
        self._has_answered = False
        self._said: set[str] = set()
        self._started: set[str] = set()

    @property
    def halted(self) -> bool:
        """True if the whole study has been cancelled since the creation of this object."""
        return bool(self._ledger.events("halted", self._created))

    @property
    def one_by_one(self) -> bool:
        """True if the scheduler has no queue, so that this command must wait to start each run."""
        return self.engine.scheduler.slots is not None

    def records(self, *, wait: bool) -> dict[str, Record]:
        """Return the present record of each run; with ``wait``, wait until the scheduler answers."""
        had_outage = False
        while True:
            try:
                records = self.engine.poll()
            except UnavailableError as absent:
                if not wait:
                    raise
                had_outage = True
                self._wait_for_scheduler(absent)
            else:  # if no run is active, there was nothing to ask the scheduler about
                self._has_answered |= had_outage or any(record.state.active for record in records.values())
                return records

    def start(self, runs: Sequence[Run], *, seen: Mapping[str, Record]) -> list[Run]:
        """Start ``runs``; return the runs for which there is no room now.

        ``seen`` are the records by which ``runs`` were chosen.

        Raises:
            HaltedError: the study was cancelled; the remaining runs are not started.
            BenchError: see :meth:`bench.jobs.engine.Engine.submit`, or a variable is not set.
        """
        passed_variables(self.engine.study)
        ensure_package(self.engine.study)

        def started(run: Run) -> None:
            # Called while the study is locked: no job can be submitted between a cancel and this check.
            if self.halted:
                raise HaltedError
            self._started.add(run.run_id)
            self.callbacks.on_start(run)

        callbacks = replace(self.callbacks, on_start=started)
        if self.one_by_one:
            callbacks = replace(callbacks, on_end=lambda run, record: None)
        left = self.engine.submit(
            runs, seen=seen, callbacks=callbacks, max_queued=self._max_queued, pack=self._pack
        )
        self._has_answered = True
        return left

    def say_stuck(self, records: Iterable[Record]) -> bool:
        """Print each new reason for which the scheduler will not start queued runs; return True if any."""
        stuck: dict[str, list[str]] = {}
        for record in records:
            if record.stuck:
                stuck.setdefault(record.reason, []).append(record.run_id)
        for reason, (first, *others) in sorted(stuck.items()):
            more = f" and {count(len(others), 'other run')}" if others else ""
            self._say_once(f"{first}{more} {reason}", key=reason)
        return bool(stuck)

    def finish(self, runs: Sequence[Run], *, seen: Mapping[str, Record]) -> dict[str, Record]:
        """Start ``runs`` when there is room, wait until no run is in progress; return the final records.

        Waiting for runs that the scheduler does not know ends after :data:`UNKNOWN_WAIT_S`. With a scheduler
        without a queue, Ctrl-C cancels the runs that this submission has started.
        """
        # A run that has no job yet, or whose submission was refused, is started again.
        before = {name: replace(record, attempt=_last_begun(record)) for name, record in seen.items()}
        if not self.one_by_one:
            return self._finish(runs, before)
        with _signals_interrupt():
            try:
                return self._finish(runs, before)
            except KeyboardInterrupt:
                study = self.engine.study
                now = study.records()
                begun = {name for name in self._started if now[name].attempt > before[name].attempt}
                own = [run for run in study.runs if run.run_id in begun]
                self.engine.cancel(own, with_submit=True)
                raise

    def _finish(self, runs: Sequence[Run], before: Mapping[str, Record]) -> dict[str, Record]:
        took_s, room, unshown = 0.0, _Room(self.engine, self._max_queued), list(runs)
        for turn in itertools.count():
            if turn:  # with many runs, longer: reading the ledger is not to disturb a run on this machine
                time.sleep(max(self.engine.scheduler.poll_s, min(40 * took_s, LONGEST_PAUSE_S)))
            began = time.monotonic()
            records = self.records(wait=True)
            took_s = time.monotonic() - began
            active = [record for record in records.values() if record.state.active]
            if self.one_by_one:
                unshown = self._show_ends(unshown, records, before)
            remaining = [run for run in runs if may_start(records[run.run_id], before[run.run_id])]
            if self.halted:
                remaining = []
            busy = sum(record.state.active or record.ending for record in records.values())
            if remaining and room.is_free(busy):
                try:
                    self._start_some(remaining, seen=records)
                except QueueFullError as full:
                    self._say_once(f"{full.message}: waiting until the queue accepts jobs")
                    room.is_full(len(active) + len(remaining) - len(full.left))
                except UnavailableError as absent:
                    self._wait_for_scheduler(absent)
                continue
            self.say_stuck(active)
            if room.is_over(remaining, active):
                return records
        raise AssertionError("count() has no end")

    def _start_some(self, remaining: Sequence[Run], *, seen: Mapping[str, Record]) -> None:
        try:
            left = self.start(remaining, seen=seen)
        except HaltedError:
            return  # the next turn detects the cancellation, too
        if left and not self.one_by_one:
            text = f"{count(len(left), 'run')} held back until other runs end"
            self._say_once(text, key="held back")

    def _show_ends(
        self, runs: Sequence[Run], records: Mapping[str, Record], before: Mapping[str, Record]
    ) -> list[Run]:
        """Show those of ``runs`` that have ended; return the others."""
        others = []
        for run in runs:
            record = records[run.run_id]
            if not record.state.ended or record.attempt <= before[run.run_id].attempt:
                others.append(run)
                continue
            self.callbacks.on_end(run, record)
            if record.failure_class is FailureClass.NEVER_STARTED:  # the next one would not start either
                what = f"{run.run_id} did not start: {record.reason}"
                raise BenchError(what, remedy="fix the problem, then run `bench submit --retry-failed`")
        return others

    def _wait_for_scheduler(self, absent: UnavailableError) -> None:
        """Say why the scheduler is unreachable and sleep; raise the error if waiting is useless."""
        if absent.permanent or (absent.missing and not self._has_answered):
            raise absent
        self._say_once(f"{absent.message}: waiting for {absent.scheduler}")
        time.sleep(RETRY_S)

    def _say_once(self, text: str, *, key: str = "") -> None:
        if (key or text) not in self._said:
            self._said.add(key or text)
            self.callbacks.on_message(text)


class _Room:
    """Room for more jobs, and whether waiting for it, or for the active jobs, is over."""

    def __init__(self, engine: Engine, max_queued: int | None) -> None:
        limits = [limit for limit in (max_queued, engine.scheduler.slots) if limit is not None]
        self._limit = min(limits, default=math.inf)
        self._active_when_full, self._retry_at = math.inf, 0.0
        self._last_known = time.monotonic()

    def is_full(self, active: int) -> None:
        """Record that the scheduler's limit was reached while ``active`` jobs were there."""
        self._active_when_full, self._retry_at = active, time.monotonic() + FULL_WAIT_S

    def is_free(self, active: int) -> bool:
        """Return whether another job may be submitted beside ``active`` jobs."""
        if active >= self._limit:
            return False
        return active < self._active_when_full or time.monotonic() > self._retry_at

    def is_over(self, remaining: Sequence[Run], active: Sequence[Record]) -> bool:
        """Return whether there is nothing more to start, and no run is in progress or known any more."""
        may_start_more = remaining and (not active or self.is_free(len(active)))
        if may_start_more or any(record.state is not RunState.UNKNOWN for record in active):
            self._last_known = time.monotonic()
            return False
        return not active or time.monotonic() - self._last_known > UNKNOWN_WAIT_S


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP like Ctrl-C."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGHUP) if is_main else ()
    previous = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _last_begun(record: Record) -> int:
    """Return the number of the last attempt that became a job, ignoring rejected attempts."""
    return record.attempt - (record.state is RunState.PLANNED and record.attempt > 0)
