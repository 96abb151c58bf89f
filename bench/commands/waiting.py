"""Progress of long work: a bar on a terminal, plain lines elsewhere; always on stderr."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from bench.commands.common import say
from bench.errors import BenchError
from bench.executors.base import Executor, QueueFullError, Watch
from bench.matrix.cell import Run
from bench.slurm.client import SlurmUnavailableError
from bench.study.ledger import HaltWatch, RunRecord, RunState
from bench.units import human_duration


class _Lines:
    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self._since = 0.0

    def started(self, run: Run) -> None:
        self._since = time.monotonic()

    def ended(self, run: Run, record: RunRecord) -> None:
        self.done += 1
        say(f"[{self.done}/{self.total}] {self.words(run, record)}")

    def words(self, run: Run, record: RunRecord) -> str:
        if record.state is RunState.QUEUED:
            return f"{run.run_id} is job {record.job_id}"
        took = human_duration(time.monotonic() - self._since)
        if record.state is RunState.COMPLETED:
            return f"{run.run_id} completed in {took}"
        return f"{run.run_id} {record.state} after {took}: {record.reason}"


class _Bar(_Lines):
    def __init__(self, total: int, bar: Any, task: Any) -> None:
        super().__init__(total)
        self._bar = bar
        self._task = task

    def started(self, run: Run) -> None:
        super().started(run)
        self._bar.update(self._task, description=run.run_id)

    def ended(self, run: Run, record: RunRecord) -> None:
        self.done += 1
        self._bar.advance(self._task)
        if record.state not in (RunState.COMPLETED, RunState.QUEUED):
            self._bar.console.print(self.words(run, record), markup=False, highlight=False)


@contextmanager
def watch_runs(total: int) -> Iterator[Watch]:
    """Yield the watch that shows ``total`` runs as they start and end."""
    if not sys.stderr.isatty():
        lines = _Lines(total)
        yield Watch(started=lines.started, ended=lines.ended, said=say)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = [
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    ]
    with Progress(*columns, console=Console(stderr=True)) as bar:
        shown = _Bar(total, bar, bar.add_task("", total=total))
        yield Watch(
            started=shown.started,
            ended=shown.ended,
            said=lambda words: bar.console.print(words, markup=False),
        )


# Starting runs and staying with them: how `bench submit` waits for room, for Slurm, for the end.

T = TypeVar("T")

POLL_S = 3.0
#: Runs of which Slurm knows nothing are not waited for longer than this.
UNKNOWN_WAIT_S = 60.0
#: After a full queue we try again when a job of ours has ended, or after this time.
FULL_WAIT_S = 30.0


class HaltedError(BenchError):
    """The whole study was cancelled since the submission was typed."""

    exit_code = 1

    def __init__(self) -> None:
        super().__init__(
            "the study was cancelled meanwhile: nothing more of it is started",
            remedy="`bench submit` goes on with it",
        )


def begin(
    executor: Executor, runs: Sequence[Run], *, halt: HaltWatch, max_queued: int | None = None
) -> list[Run]:
    """Start ``runs`` and show that; return those that ``max_queued`` holds back.

    Raises:
        HaltedError: the study is cancelled; what was not started by then is not.
        BenchError: as :meth:`bench.executors.base.Executor.submit` does.
    """
    with watch_runs(len(runs)) as watch:

        def started(run: Run) -> None:
            # Within the study's lock: a `bench cancel` has either seen our job, or its halt is seen here.
            if halt.halted():
                raise HaltedError
            watch.started(run)

        return executor.submit(runs, max_queued=max_queued, watch=replace(watch, started=started))


class Waiting:
    """A stay until nothing of the study is under way, in which what is left starts as room appears.

    Slurm's absence is waited out, too. What nobody knows anything of is not waited for.
    """

    def __init__(
        self,
        executor: Executor,
        left: Sequence[Run],
        *,
        before: Mapping[str, RunRecord],
        halt: HaltWatch,
        max_queued: int | None = None,
    ) -> None:
        """``before`` are the records as they were before the runs ``left`` were to be started."""
        self._executor, self._halt, self._max_queued = executor, halt, max_queued
        # All of them to the end: a job whose answer was lost, and of which nothing came, is started again.
        self._wanted = list(left)
        self._attempts = {run_id: _begun(record) for run_id, record in before.items()}
        self._full_with, self._full_until = math.inf, 0.0  # how many of ours were in a full queue
        self._known_until = time.monotonic()
        self._told: set[str] = set()

    def until_over(self) -> dict[str, RunRecord]:
        """Return every run's record when all is over."""
        for turn in itertools.count():
            if turn:
                time.sleep(POLL_S)
            try:
                records = self._executor.refresh()
                active = [record for record in records.values() if record.state.active]
                left = self._left(records)
                if left and self._has_room(len(active)):
                    self._start(left, active=len(active))
                    continue
            except SlurmUnavailableError as absent:
                if absent.permanent:
                    raise
                say_once(self._told, f"{absent.message}: waiting for Slurm")
                continue
            for record in active:
                point_out_stuck(self._told, record)
            if self._is_over(left, active):
                return records
        raise AssertionError("count() has no end")

    def _left(self, records: Mapping[str, RunRecord]) -> list[Run]:
        """Return the runs that are still to be submitted: none of a study that is cancelled."""
        if self._halt.halted():
            return []
        return [run for run in self._wanted if self._is_left(records[run.run_id])]

    def _is_left(self, record: RunRecord) -> bool:
        """Whether a run was not submitted since; it may have been, and failed, before Slurm went away."""
        return record.state is RunState.PLANNED or record.attempt == self._attempts[record.run_id]

    def _has_room(self, active: int) -> bool:
        if self._max_queued is not None and active >= self._max_queued:
            return False
        return active < self._full_with or time.monotonic() > self._full_until

    def _start(self, left: Sequence[Run], *, active: int) -> None:
        try:
            begin(self._executor, left, halt=self._halt, max_queued=self._max_queued)
        except QueueFullError as full:
            say_once(self._told, f"{full.message}: waiting for room")
            self._full_with, self._full_until = active, time.monotonic() + FULL_WAIT_S
        except HaltedError:
            pass  # from now on nothing is left

    def _is_over(self, left: Sequence[Run], active: Sequence[RunRecord]) -> bool:
        if left or any(record.state is not RunState.UNKNOWN for record in active):
            self._known_until = time.monotonic()
            return False
        return not active or time.monotonic() - self._known_until > UNKNOWN_WAIT_S


def when_slurm_answers(ask: Callable[[], T], *, wait: bool = True) -> T:
    """Return what ``ask`` returns; where Slurm cannot be asked now, ask again until it can.

    Raises:
        SlurmUnavailableError: it never can be here, or there is no ``wait``.
    """
    told: set[str] = set()
    while True:
        try:
            return ask()
        except SlurmUnavailableError as absent:
            if not wait or absent.permanent:
                raise
            say_once(told, f"{absent.message}: waiting for Slurm")
            time.sleep(POLL_S)


def _begun(record: RunRecord) -> int:
    """Return the last attempt that became a job: one that was refused is made again under its number."""
    return record.attempt - (record.state is RunState.PLANNED and record.attempt > 0)


def point_out_stuck(told: set[str], record: RunRecord) -> None:
    """Say, once, that a job waits for a person."""
    if record.details.get("stuck"):
        say_once(told, f"{record.run_id} does not start by itself: {record.reason}")


def say_once(told: set[str], words: str) -> None:
    """Say what is not among what was ``told``."""
    if words not in told:
        told.add(words)
        say(words)
