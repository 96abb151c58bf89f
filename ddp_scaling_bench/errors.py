"""Errors for users: the place, the mistake, the allowed values and the remedy.

``bench.cli`` turns a :class:`BenchError`, or an error that :func:`inaccessible` describes, into a message
and an exit code. Any other exception is a defect of this program.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class BenchError(Exception):
    """An error that the user can fix; it is printed without a traceback."""

    #: The exit code that `bench` returns for this error; 2 means bad input.
    exit_code = 2

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


class UnavailableError(BenchError):
    """A scheduler cannot be reached. Callers retry, or use other sources."""

    exit_code = 1
    scheduler = "the scheduler"
    #: True if retrying is useless.
    permanent = False
    #: True if this machine lacks the scheduler or its configuration.
    missing = False


@dataclass(frozen=True, order=True)
class Problem:
    """A mistake at a line of an input file."""

    path: str
    line: int | None
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}" if self.line else self.path
        text = f"{place}: {self.message}"
        return f"{text}; {self.remedy}" if self.remedy else text


class InputError(BenchError):
    """One or more problems in input files; the message lists the first of them by line."""

    #: Maximum number of problems in the message.
    MOST = 50

    def __init__(self, problems: Sequence[Problem]) -> None:
        assert problems, "an error without a problem"
        self.problems = sorted(problems, key=lambda p: (p.path, p.line or math.inf))
        lines = [str(problem) for problem in self.problems[: self.MOST]]
        if (more := len(self.problems) - self.MOST) > 0:
            lines.append(f"and {more} more problems")
        super().__init__("\n".join(lines))


def missing_file(path: Path, *, what: str, remedy: str) -> BenchError:
    """Return the error for a path that does not exist or is not a file."""
    other = "is not a regular file" if path.exists() else "does not exist"
    kind = "is a directory" if path.is_dir() else other
    return BenchError(f"{path}: {what} {kind}", remedy=remedy)


class UnwritableError(BenchError):
    """A file cannot be written: the disk is full or read-only, or permission is denied."""


_REMEDIES = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space there and repeat the command")
_REMEDIES |= dict.fromkeys((errno.EROFS, errno.EACCES), "make it writable and repeat the command")
_REMEDIES |= dict.fromkeys((errno.ENOTDIR, errno.EEXIST, errno.ENOENT), "check the folders of this path")
_REMEDIES |= {errno.EISDIR: "give the name of a file"}


def unwritable(path: Path, error: OSError) -> UnwritableError:
    """Return the error for a file that cannot be written."""
    what = f"{path}: cannot be written: {error.strerror}"
    return UnwritableError(what, remedy=_REMEDIES.get(error.errno or 0, ""))


#: The number of the error for a file that is a FIFO, a socket or a device.
NOT_REGULAR = errno.ESPIPE

_ACCESS_REMEDIES = {
    **dict.fromkeys(
        (errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.EFBIG, NOT_REGULAR),
        "replace it by the original file",
    ),
    errno.EACCES: "check the permissions of this path and of the folders above it",
    errno.ENAMETOOLONG: "give a shorter name",
    **dict.fromkeys((errno.EIO, errno.ESTALE), "repeat the command, or report the file system's error"),
}


def inaccessible(error: OSError) -> BenchError | None:
    """Return the error for a path that cannot be accessed, or None if ``error`` has another cause."""
    remedy = _ACCESS_REMEDIES.get(error.errno or 0, "")
    path = error.filename if remedy else None
    return BenchError(f"{path}: {error.strerror}", remedy=remedy) if path else None
