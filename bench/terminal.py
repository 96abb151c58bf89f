"""Keep the standard streams safe: streams that can break, and text without control characters.

:mod:`bench.commands.console` prints all texts with :func:`~ddp_scaling_bench.text.printable`.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress

from ddp_scaling_bench.errors import BenchError

#: Exit code of a command whose reader has closed the pipe: 128 + SIGPIPE, as for other programs in a shell.
EXIT_BROKEN_PIPE = 141


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
