"""Start runs, and wait for a place in the queue, for Slurm, or for all runs."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from ..errors import BenchError, UnavailableError
from ..jobs.scheduler import QueueFullError, Scheduler, passed_variables
from ..matrix.cell import Run
from ..study.ledger import HaltWatch, RunRecord, RunState
from ..units import count, human_duration
from .console import say, say_once, show_progress

T = TypeVar("T")

POLL_S = 3.0
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


def start_runs(
    scheduler: Scheduler,
    runs: Sequence[Run],
    *,
    seen: Mapping[str, RunRecord],
    halt: HaltWatch,
    max_queued: int | None = None,
) -> list[Run]:
    """Start ``runs`` and show the progress; return the runs not started because of ``max_queued``.

    ``seen`` are the records by which ``runs`` were chosen.

    Raises:
        HaltedError: the study was cancelled; the remaining runs are not started.
        BenchError: see :meth:`bench.jobs.scheduler.Scheduler.submit`, or a variable is not set.
    """
    passed_variables(scheduler.study)
    with show_progress(len(runs)) as callbacks:

        def started(run: Run) -> None:
            # Called while the study is locked: no job can be submitted between a cancel and this check.
            if halt.halted():
                raise HaltedError
            callbacks.on_start(run)

        guarded = replace(callbacks, on_start=started)
        return scheduler.submit(runs, seen=seen, max_queued=max_queued, callbacks=guarded)


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
    """Wait for the end of all runs of a study, and start the remaining runs when the queue accepts them.

    If Slurm is unreachable, waiting continues as long as ``patience`` allows. For runs that Slurm does not
    know, waiting ends after :data:`UNKNOWN_WAIT_S`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        remaining: Sequence[Run],
        *,
        before: Mapping[str, RunRecord],
        halt: HaltWatch,
        patience: Patience,
        max_queued: int | None = None,
    ) -> None:
        """``before`` contains the records by which the runs were chosen, before the submission began."""
        self._scheduler, self._halt, self._max_queued = scheduler, halt, max_queued
        self._patience = patience
        # Includes runs that may have been submitted. Runs that have no job are started again.
        self._wanted = list(remaining)
        self._attempts = {run_id: _last_begun(record) for run_id, record in before.items()}
        self._active_when_full, self._retry_at = math.inf, 0.0
        self._last_known = time.monotonic()
        self._said: set[str] = set()

    def until_over(self) -> dict[str, RunRecord]:
        """Wait until no run is in progress or left to start; return the final record of each run."""
        for turn in itertools.count():
            if turn:
                time.sleep(POLL_S)
            try:
                records = self._scheduler.poll()
                active = [record for record in records.values() if record.state.active]
                remaining = self._remaining(records)
                if active:  # otherwise there was nothing to ask Slurm about
                    self._patience.answered()
                if remaining and self._has_room(len(active)):
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

    def _remaining(self, records: Mapping[str, RunRecord]) -> list[Run]:
        """Return the runs that are still to be submitted, or none if the study was cancelled."""
        if self._halt.halted():
            return []
        return [run for run in self._wanted if self._is_unsubmitted(records[run.run_id])]

    def _is_unsubmitted(self, record: RunRecord) -> bool:
        """Return whether a run has had no new attempt since the submission began."""
        return record.state is RunState.PLANNED or record.attempt == self._attempts[record.run_id]

    def _has_room(self, active: int) -> bool:
        if self._max_queued is not None and active >= self._max_queued:
            return False
        return active < self._active_when_full or time.monotonic() > self._retry_at

    def _start(self, remaining: Sequence[Run], *, seen: Mapping[str, RunRecord], active: int) -> None:
        try:
            start_runs(self._scheduler, remaining, seen=seen, halt=self._halt, max_queued=self._max_queued)
        except QueueFullError as full:
            say_once(self._said, f"{full.message}: waiting until the queue accepts jobs")
            self._active_when_full, self._retry_at = active, time.monotonic() + FULL_WAIT_S
        except HaltedError:
            pass  # the next iteration of the loop detects the cancellation, too

    def _is_over(self, remaining: Sequence[Run], active: Sequence[RunRecord]) -> bool:
        if remaining or any(record.state is not RunState.UNKNOWN for record in active):
            self._last_known = time.monotonic()
            return False
        return not active or time.monotonic() - self._last_known > UNKNOWN_WAIT_S


def _last_begun(record: RunRecord) -> int:
    """Return the number of the last attempt that became a job, ignoring rejected attempts."""
    return record.attempt - (record.state is RunState.PLANNED and record.attempt > 0)


def say_stuck(said: set[str], records: Iterable[RunRecord]) -> None:
    """Print a line for each new reason for which Slurm will not start queued runs, with the remedy."""
    stuck: dict[str, list[str]] = {}
    for record in records:
        if record.details.get("stuck"):
            stuck.setdefault(record.reason, []).append(record.run_id)
    for reason in sorted(stuck.keys() - said):
        said.add(reason)
        first, *others = stuck[reason]
        more = f" and {count(len(others), 'other run')}" if others else ""
        say(f"{first}{more} {reason}")
