"""Print texts, tables, JSON, diagnostics and the progress of runs.

Commands print only with this module. Texts lose their control characters, and in JSON these are escaped.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ddp_scaling_bench.text import one_line, printable
from ddp_scaling_bench.units import human_duration
from ddp_scaling_bench.variables import without_users

from ..jobs.engine import Callbacks
from ..matrix.cell import Cell, Run, labelled_commands, shown_command
from ..study.ledger import Record, RunState

if TYPE_CHECKING:
    from rich.text import Text

#: The maximum number of rows of a long table without ``--all``.
SHOWN_ROWS = 60


def print_json(content: Any) -> None:
    """Print JSON on standard output, without users of URLs; unprintable characters are escaped."""
    text = without_users(json.dumps(content, ensure_ascii=False, indent=1))
    shown = (one if one.isprintable() or one == "\n" else json.dumps(one)[1:-1] for one in text)
    sys.stdout.write("".join(shown) + "\n")


def show(text: object = "") -> None:
    """Print a text and a newline on standard output."""
    sys.stdout.write(f"{printable(str(text))}\n")


def say(text: str) -> None:
    """Print a diagnostic line on standard error."""
    sys.stderr.write(f"{printable(text)}\n")
    sys.stderr.flush()


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    right: Iterable[str] = (),
    hidden: int = 0,
) -> None:
    """Print a table; a line below the headings is drawn only on a terminal. Rich markup has no effect.

    ``right`` contains the names of the right-aligned columns. ``hidden`` is the number of rows that the
    table does not contain, but would with ``--all``.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    terminal = sys.stdout.isatty()
    console = Console(
        file=sys.stdout, highlight=False, soft_wrap=not terminal, width=None if terminal else 10_000
    )
    table = Table(
        title=_cell(title),
        title_justify="left",
        box=box.SIMPLE_HEAD if terminal else None,
        pad_edge=False,
    )
    for name in columns:
        table.add_column(_cell(name), justify="right" if name in set(right) else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row))
    console.print(table)
    if hidden:
        show(f"... and {hidden} more rows (--all lists them)")


def _cell(value: object) -> Text:
    from rich.text import Text

    return Text("" if value is None else one_line(str(value)))


def print_commands(cells: Iterable[Cell]) -> None:
    """Print a line for each command that has a name or differs between cells."""
    for command in labelled_commands(cells):
        show(f"command {command.label}: {shown_command(command.words)}")


class _Lines:
    """Show progress as one line per run."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self._since = 0.0

    def started(self, run: Run) -> None:
        self._since = time.monotonic()

    def ended(self, run: Run, record: Record) -> None:
        self.done += 1
        say(f"[{self.done}/{self.total}] {self.outcome(run, record)}")

    def outcome(self, run: Run, record: Record) -> str:
        if record.state is RunState.QUEUED:
            return f"{run.run_id} submitted as job {record.job_id}"
        took = human_duration(time.monotonic() - self._since)
        if record.state is RunState.COMPLETED:
            return f"{run.run_id} completed in {took}"
        return f"{run.run_id} {record.state} after {took}: {record.reason}"


class _Bar(_Lines):
    """Show progress as a bar, and a line for each run that did not complete."""

    def __init__(self, total: int, bar: Any) -> None:
        super().__init__(total)
        self._bar = bar
        self._task = bar.add_task("", total=total)

    def started(self, run: Run) -> None:
        super().started(run)
        self._bar.update(self._task, description=one_line(run.run_id))

    def ended(self, run: Run, record: Record) -> None:
        self._bar.advance(self._task)
        if record.state not in (RunState.COMPLETED, RunState.QUEUED):
            self._bar.console.print(printable(self.outcome(run, record)), markup=False, highlight=False)


@contextmanager
def show_progress(total: int) -> Iterator[Callbacks]:
    """Yield callbacks that show the progress of ``total`` runs on standard error."""
    if not sys.stderr.isatty():
        lines = _Lines(total)
        yield Callbacks(on_start=lines.started, on_end=lines.ended, on_message=say)
        return
    from rich import progress
    from rich.console import Console

    columns = [
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.description}", markup=False),
    ]
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        shown = _Bar(total, bar)
        yield Callbacks(
            on_start=shown.started,
            on_end=shown.ended,
            on_message=lambda text: bar.console.print(printable(text), markup=False, highlight=False),
        )
