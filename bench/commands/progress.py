"""Progress of long work: a bar on a terminal, plain lines elsewhere; always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.commands.common import say
from bench.executors.base import Watch
from bench.ledger import RunRecord, RunState
from bench.matrix.cell import Run
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
