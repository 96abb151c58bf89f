"""The terminal: streams that can break, and the names, widths, colours and wrapping of what `bench` prints.

Commands print only with this module. Texts lose their control characters, and in JSON these are escaped. On a
terminal, lines break between words.
"""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Literal, TextIO

from ddp_scaling_bench.errors import BenchError
from ddp_scaling_bench.text import one_line, printable
from ddp_scaling_bench.units import human_duration
from ddp_scaling_bench.variables import without_users

from .jobs.engine import Callbacks
from .matrix.cell import Cell, Run, labelled_commands, name_of, shown_command, value_text
from .study.ledger import Record, RunState
from .study.plan_json import PlannedStudy

if TYPE_CHECKING:
    from rich.text import Text

#: Exit code of a command whose reader has closed the pipe: 128 + SIGPIPE, as for other programs in a shell.
EXIT_BROKEN_PIPE = 141
#: The maximum number of rows of a long table without ``--all``.
SHOWN_ROWS = 60
#: The least width of the last column of a table; if a terminal has less, the table becomes a list.
LAST_COLUMN = 28
#: The colours of states in tables. Rich leaves them out with NO_COLOR, and without a terminal.
_STYLES = {
    RunState.COMPLETED: "green",
    RunState.RUNNING: "cyan",
    RunState.PLANNED: "dim",
    **dict.fromkeys((RunState.FAILED, RunState.UNKNOWN), "red"),
    **dict.fromkeys((RunState.QUEUED, RunState.CANCELLED), "yellow"),
}


class OutputError(BenchError):
    """Standard output is closed, full or broken."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output: cannot be written: {error.strerror}", remedy="redirect it")
        self.is_broken_pipe = error.errno == errno.EPIPE
        if self.is_broken_pipe:
            self.exit_code = EXIT_BROKEN_PIPE


class _Output(io.TextIOWrapper):
    """Standard output that raises :class:`OutputError`: libraries handle OSError in different ways."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise OutputError(error) from None

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise OutputError(error) from None


class _Diagnostics(io.TextIOWrapper):
    """Standard error that ignores its own failures, so that a command continues."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def open_streams() -> None:
    """Prepare the standard streams of the command line.

    A closed stream gets /dev/null, because the next file that is opened would get its number. Characters that
    the encoding of standard output lacks become ``?``.

    Raises:
        OutputError: standard output is closed.
    """
    is_closed = [stream is None for stream in (sys.stdin, sys.stdout, sys.stderr)]
    for number, closed in enumerate(is_closed):
        if closed:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_RDWR), number)
    if is_closed[2]:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (open until the end)
    elif isinstance(sys.stderr, io.TextIOWrapper):
        encoding = sys.stderr.encoding
        sys.stderr = _Diagnostics(
            sys.stderr.detach(), encoding=encoding, errors="backslashreplace", line_buffering=True
        )
    if is_closed[1]:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        raise OutputError(OSError(errno.EBADF, "it is closed"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        encoding, is_line_buffered = sys.stdout.encoding, sys.stdout.line_buffering
        sys.stdout = _Output(
            sys.stdout.detach(), encoding=encoding, errors="replace", line_buffering=is_line_buffered
        )


def discard_output() -> None:
    """Discard what standard output still holds, because Python would try to write it at its end."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def read_stdin() -> io.BufferedIOBase:
    """Return standard input as bytes; raise BenchError if it is closed."""
    if sys.stdin is None:
        raise BenchError("standard input is closed", remedy="give a file instead of -, or redirect it")
    return sys.stdin.buffer  # type: ignore[return-value]


def print_json(content: Any) -> None:
    """Print JSON on standard output, without users of URLs; unprintable characters are escaped."""
    text = without_users(json.dumps(content, ensure_ascii=False, indent=1))
    lines = (line if line.isprintable() else _escaped(line) for line in text.split("\n"))
    sys.stdout.write("\n".join(lines) + "\n")


def _escaped(line: str) -> str:
    return "".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in line)


def show(text: object = "", *, to_copy: bool = False) -> None:
    """Print a text and a newline on standard output; the lines of a text ``to_copy`` are not broken."""
    sys.stdout.write(f"{printable(str(text)) if to_copy else _wrapped(str(text), sys.stdout)}\n")


def say(text: str) -> None:
    """Print a diagnostic line on standard error, below what is printed on standard output so far."""
    with suppress(OutputError):  # raised again at the end of the command
        sys.stdout.flush()
    sys.stderr.write(f"{_wrapped(text, sys.stderr)}\n")
    sys.stderr.flush()


def _wrapped(text: str, stream: TextIO) -> str:
    """Return a printable text; for a terminal, its lines break between words and keep their indentation."""
    text = printable(text)
    if not stream.isatty():
        return text
    width, lines = _columns(stream), list[str]()
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip(" ")))
        # The terminal itself breaks a longer word, such as a path, which can then be copied.
        lines += textwrap.wrap(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return "\n".join(lines)


def _columns(stream: TextIO) -> int:
    """Return the columns of a terminal; shutil asks for those of a stream that :func:`open_streams` took."""
    with suppress(OSError, ValueError):
        return int(os.environ.get("COLUMNS", 0)) or os.get_terminal_size(stream.fileno()).columns or 80
    return 80


def short_names(planned: PlannedStudy) -> dict[str, str]:
    """Return the names of a study's cells and runs for a table, without what all of them have in common."""
    cells, names = planned.cells.values(), dict[str, str]()
    options = ("backend", "launcher", "per_gpu_batch")
    varying = [name for name in options if len({getattr(cell, name) for cell in cells}) > 1]
    for cell in cells:
        parts = [f"{'b' * (name == 'per_gpu_batch')}{getattr(cell, name)}" for name in varying]
        size = f"n{cell.nodes}x{value_text(cell.tasks_per_node)}"
        names[cell.cell_id] = name_of([size, *parts], cell.swept)
    is_repeated = any(run.repeat > 1 for run in planned.runs)
    for run in planned.runs:
        names[run.run_id] = f"{names[run.cell_id]}-r{run.repeat}" if is_repeated else names[run.cell_id]
    return names


def study_title(planned: PlannedStudy) -> str:
    """Return the title of a table of a study: its name, with what the names in the table leave out."""
    alike = [{getattr(cell, name) for cell in planned.cells.values()} for name in ("backend", "launcher")]
    common = ", ".join(next(iter(values)) for values in alike if len(values) == 1)
    return f"Study {planned.folder.name}{f' ({common})' * bool(common)}"


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    right: Iterable[str] = (),
    hidden: int = 0,
) -> None:
    """Print a table, or on a terminal that is too narrow for it, a list. Rich markup has no effect.

    Only the last column has lines, which break between words. ``right`` contains the names of the
    right-aligned columns. ``hidden`` is the number of rows that the table does not contain, but would with
    ``--all``.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    width = None if sys.stdout.isatty() else 10_000
    console = Console(file=sys.stdout, highlight=False, soft_wrap=width is not None, width=width)
    texts, right = [[*map(_cell, row)] for row in rows], {*right}
    longest = max((row[-1].cell_len for row in texts), default=0)
    for between_words in (" ", "\n"):
        table = Table(title=_cell(title), title_justify="left", pad_edge=False)
        table.box = None if width else box.SIMPLE_HEAD
        for place, name in enumerate(columns, 1):
            heading = name.replace(" ", between_words)
            justify: Literal["left", "right"] = "right" if name in right else "left"
            table.add_column(heading, justify=justify, overflow="fold", no_wrap=place < len(columns))
        for row in texts:
            table.add_row(*row)
        whole = console.measure(table, options=console.options.update(width=10_000)).maximum
        if whole - max(0, longest - LAST_COLUMN) <= console.width:
            console.print(table)
            break
    else:
        _print_list(title, columns, texts)
    if hidden:
        show(f"... and {hidden} more rows (--all lists them)")


def _print_list(title: str, columns: Sequence[str], rows: Iterable[Sequence[Text]]) -> None:
    """Print rows one below the other: the first cell, and indented, the others with their headings."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False)
    console.print(Text(title))
    for first, *others in rows:
        if first:
            console.print(Text("\n".join(textwrap.wrap(first.plain, console.width - 2)), style="bold"))
        named = zip(columns[1:], others, strict=True)
        parts = [Text(f"{name} " * (not cell.style)).append_text(cell) for name, cell in named if cell]
        console.print(Padding(Text(", ").join(parts), (0, 0, 0, 2), expand=False))


def _cell(value: object) -> Text:
    """Return a value as a cell of a table; states have their colours."""
    from rich.text import Text

    style = _STYLES.get(value, "") if isinstance(value, RunState) else ""
    return Text("" if value is None else one_line(str(value)), style=style)


def print_commands(cells: Iterable[Cell]) -> None:
    """Print a line for each command that has a name or differs between cells."""
    for command in labelled_commands(cells):
        show(f"command {command.label}: {shown_command(command.words)}")


class _Progress:
    """Print a line for each run; with a ``bar``, only for those that did not complete."""

    def __init__(self, total: int, bar: Any = None) -> None:
        self._total, self._done, self._since, self._bar = total, 0, 0.0, bar
        self._task = bar and bar.add_task("", total=total)

    def started(self, run: Run) -> None:
        self._since = time.monotonic()
        if self._bar:
            self._bar.update(self._task, description=one_line(run.run_id))

    def ended(self, run: Run, record: Record) -> None:
        self._done += 1
        took = human_duration(time.monotonic() - self._since)
        outcome = f"{record.state} after {took}: {record.why}"
        if is_well := record.state in (RunState.COMPLETED, RunState.QUEUED):
            is_queued = record.state is RunState.QUEUED
            outcome = f"submitted as job {record.job_id}" if is_queued else f"completed in {took}"
        if self._bar:
            self._bar.advance(self._task)
        if not (self._bar and is_well):
            self.say(f"[{self._done}/{self._total}] {run.run_id} {outcome}")

    def say(self, text: str) -> None:
        if self._bar:
            self._bar.console.print(printable(text), markup=False, highlight=False)
        else:
            say(text)


@contextmanager
def show_progress(total: int) -> Iterator[Callbacks]:
    """Yield callbacks that show the progress of ``total`` runs on standard error: as lines, or as a bar."""
    from rich import progress
    from rich.console import Console

    columns = (progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeElapsedColumn())
    run = progress.TextColumn("{task.description}", markup=False)
    bar = progress.Progress(*columns, progress.TimeRemainingColumn(), run, console=Console(stderr=True))
    with bar if sys.stderr.isatty() else nullcontext() as shown:
        of_runs = _Progress(total, shown)
        yield Callbacks(on_start=of_runs.started, on_end=of_runs.ended, on_message=of_runs.say)
