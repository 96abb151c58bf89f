"""Start runs, and wait for a place in the queue, for Slurm, or for all runs."""

from __future__ import annotations

import itertools
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from ..errors import BenchError, UnavailableError
from ..jobs.commands import passed_variables
from ..jobs.engine import Callbacks, Engine, QueueFullError
from ..matrix.cell import Run
from ..study.ledger import FailureClass, Record, RunState
from ..study.plan_json import PlannedStudy
from ..units import count, human_duration
from .console import say, say_once

T = TypeVar("T")

POLL_S = 3.0
#: The longest pause between two polls, if the scheduler asks for no longer one.
LONGEST_PAUSE_S = 3.0
#: The maximum number of seconds to wait for runs that Slurm does not know.
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


class HaltWatch:
    """Detect that a study was cancelled after this object was created."""

    def __init__(self, planned: PlannedStudy) -> None:
        self._ledger, self._start = planned.ledger, planned.ledger.size

    def halted(self) -> bool:
        """Return True if the whole study has been cancelled."""
        return bool(self._ledger.events("halted", self._start))


def start_runs(
    engine: Engine,
    runs: Sequence[Run],
    *,
    seen: Mapping[str, Record],
    halt: HaltWatch,
    callbacks: Callbacks,
    max_queued: int | None = None,
    pack: bool = False,
) -> list[Run]:
    """Start ``runs``; return the runs for which there is no room now.

    ``seen`` are the records by which ``runs`` were chosen.

    Raises:
        HaltedError: the study was cancelled; the remaining runs are not started.
        BenchError: see :meth:`bench.jobs.engine.Engine.submit`, or a variable is not set.
    """
    passed_variables(engine.study)

    def started(run: Run) -> None:
        # Called while the study is locked: no job can be submitted between a cancel and this check.
        if halt.halted():
            raise HaltedError
        callbacks.on_start(run)

    guarded = replace(callbacks, on_start=started)
    return engine.submit(runs, seen=seen, callbacks=guarded, max_queued=max_queued, pack=pack)


@contextmanager
def signals_interrupt() -> Iterator[None]:
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


class Patience:
    """Wait while the scheduler is unreachable.

    :meth:`wait` raises the scheduler's error if an outage lasts longer than ``limit_s`` seconds (None: no
    limit), and at once if the scheduler's commands are missing. A missing configuration also raises the error
    at once, unless the scheduler has answered before: on some clusters, Slurm's controller provides the
    configuration, so it is missing while the controller is down.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self._limit_s = limit_s
        self._outage_began: float | None = None
        self._has_answered = False
        self._said: set[str] = set()

    def answered(self) -> None:
        """Record that Slurm has answered, so that the time limit of the next outage starts anew."""
        self._has_answered, self._outage_began = True, None

    def wait(self, absent: UnavailableError) -> None:
        """Report why Slurm is unreachable and sleep until the next try.

        Raises:
            UnavailableError: waiting is useless or has taken too long.
        """
        if absent.permanent or (absent.missing and not self._has_answered):
            raise absent
        now = time.monotonic()
        self._outage_began = now if self._outage_began is None else self._outage_began
        left_s = math.inf if self._limit_s is None else self._outage_began + self._limit_s - now
        if self._limit_s is not None and left_s <= 0:
            message = f"{absent.message} (waited for {human_duration(self._limit_s)}, see --patience)"
            raise UnavailableError(message, remedy=absent.remedy)
        say_once(self._said, f"{absent.message}: waiting for {absent.scheduler}")
        time.sleep(min(POLL_S, left_s))

    def until_answered(self, request: Callable[[], T]) -> T:
        """Return the result of ``request``, repeated while Slurm is unreachable."""
        while True:
            try:
                result = request()
            except UnavailableError as absent:
                self.wait(absent)
            else:
                if self._outage_began is not None:  # without an outage, the request may not have called Slurm
                    self.answered()
                return result


class Waiting:
    """Wait for the end of all runs of a study, and start the remaining runs when there is room for them.

    If the scheduler is unreachable, waiting continues as long as ``patience`` allows. For runs that the
    scheduler does not know, waiting ends after :data:`UNKNOWN_WAIT_S`. With a scheduler that starts only
    some jobs at once, Ctrl-C cancels the runs that this command has started.
    """

    def __init__(
        self,
        engine: Engine,
        remaining: Sequence[Run],
        *,
        before: Mapping[str, Record],
        halt: HaltWatch,
        patience: Patience,
        callbacks: Callbacks,
        max_queued: int | None = None,
        pack: bool = False,
    ) -> None:
        """``before`` contains the records by which the runs were chosen, before the submission began."""
        self._engine, self._halt, self._max_queued, self._pack = engine, halt, max_queued, pack
        self._started: set[str] = set()
        self._patience, self._callbacks = patience, callbacks
        # Includes runs that may have been submitted. Runs that have no job are started again.
        self._wanted = list(remaining)
        self._attempts = {run_id: _last_begun(record) for run_id, record in before.items()}
        self._active_when_full, self._retry_at = math.inf, 0.0
        self._last_known = time.monotonic()
        self._said: set[str] = set()
        self._shown: set[str] = set()

    def until_over(self) -> dict[str, Record]:
        """Wait until no run is in progress or left to start; return the final record of each run."""
        if self._engine.scheduler.slots is None:
            return self._until_over()
        with signals_interrupt():
            try:
                return self._until_over()
            except KeyboardInterrupt:
                begun = [run for run in self._engine.study.runs if run.run_id in self._begun()]
                self._engine.cancel(begun, reason="stopped by the user")
                raise

    def _begun(self) -> set[str]:
        """Return the runs of which this command has started an attempt."""
        records = self._engine.study.records()
        return {name for name in self._started if records[name].attempt > self._attempts[name]}

    def _until_over(self) -> dict[str, Record]:
        took_s = 0.0
        for turn in itertools.count():
            if turn:  # with many runs, longer: reading the ledger is not to disturb a run on this machine
                time.sleep(max(self._engine.scheduler.poll_s, min(40 * took_s, LONGEST_PAUSE_S)))
            began = time.monotonic()
            try:
                records = self._engine.poll()
                took_s = time.monotonic() - began
                active = [record for record in records.values() if record.state.active]
                self._show_ends(records)
                remaining = self._remaining(records)
                if active:  # otherwise there was nothing to ask the scheduler about
                    self._patience.answered()
                busy = sum(record.state.active or record.ending for record in records.values())
                if remaining and self._has_room(busy):
                    self._start(remaining, seen=records, active=len(active))
                    self._patience.answered()
                    continue
            except UnavailableError as absent:
                self._patience.wait(absent)
                continue
            say_stuck(self._said, active)
            if self._is_over(remaining, active):
                return records
        raise AssertionError("count() has no end")

    def _show_ends(self, records: Mapping[str, Record]) -> None:
        """With a scheduler that executes one run after another, show the runs that have ended."""
        if self._engine.scheduler.slots is None:
            return
        for run in self._wanted:
            record = records[run.run_id]
            if (
                record.state.ended
                and record.attempt > self._attempts[run.run_id]
                and run.run_id not in self._shown
            ):
                self._shown.add(run.run_id)
                self._callbacks.on_end(run, record)
                if record.failure_class is FailureClass.NEVER_STARTED:  # the next one would not start either
                    what = f"{run.run_id} did not start: {record.reason}"
                    raise BenchError(what, remedy="fix the problem, then run `bench submit --retry-failed`")

    def _remaining(self, records: Mapping[str, Record]) -> list[Run]:
        """Return the runs that are still to be submitted, or none if the study was cancelled."""
        if self._halt.halted():
            return []
        return [run for run in self._wanted if self._is_unsubmitted(records[run.run_id])]

    def _is_unsubmitted(self, record: Record) -> bool:
        """Return whether a run has had no new attempt since the submission began."""
        return record.state is RunState.PLANNED or record.attempt == self._attempts[record.run_id]

    def _has_room(self, active: int) -> bool:
        limits = [limit for limit in (self._max_queued, self._engine.scheduler.slots) if limit is not None]
        if limits and active >= min(limits):
            return False
        return active < self._active_when_full or time.monotonic() > self._retry_at

    def _start(self, remaining: Sequence[Run], *, seen: Mapping[str, Record], active: int) -> None:
        def started(run: Run) -> None:
            self._started.add(run.run_id)
            self._callbacks.on_start(run)

        callbacks = replace(self._callbacks, on_start=started)
        if self._engine.scheduler.slots is not None:
            callbacks = replace(callbacks, on_end=lambda run, record: None)
        try:
            start_runs(
                self._engine,
                remaining,
                seen=seen,
                halt=self._halt,
                callbacks=callbacks,
                max_queued=self._max_queued,
                pack=self._pack,
            )
        except QueueFullError as full:
            say_once(self._said, f"{full.message}: waiting until the queue accepts jobs")
            self._active_when_full, self._retry_at = active, time.monotonic() + FULL_WAIT_S
        except HaltedError:
            pass  # the next iteration of the loop detects the cancellation, too

    def _is_over(self, remaining: Sequence[Run], active: Sequence[Record]) -> bool:
        may_start = remaining and self._has_room(len(active))
        if may_start or any(record.state is not RunState.UNKNOWN for record in active):
            self._last_known = time.monotonic()
            return False
        return not active or time.monotonic() - self._last_known > UNKNOWN_WAIT_S


def _last_begun(record: Record) -> int:
    """Return the number of the last attempt that became a job, ignoring rejected attempts."""
    return record.attempt - (record.state is RunState.PLANNED and record.attempt > 0)


def say_stuck(said: set[str], records: Iterable[Record]) -> None:
    """Print a line for each new reason for which Slurm will not start queued runs, with the remedy."""
    stuck: dict[str, list[str]] = {}
    for record in records:
        if record.stuck:
            stuck.setdefault(record.reason, []).append(record.run_id)
    for reason in sorted(stuck.keys() - said):
        said.add(reason)
        first, *others = stuck[reason]
        more = f" and {count(len(others), 'other run')}" if others else ""
        say(f"{first}{more} {reason}")
