"""The errors a user can meet: each says where, what, what was allowed and what to do.

A :class:`BenchError` is a user's (or a machine's) mistake and becomes a message and
an exit code in ``bench.cli``; anything else that escapes is a defect of ours.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class BenchError(Exception):
    """A mistake that the user can mend; printed without a traceback.

    ``exit_code`` is 2 (bad input) unless a subclass says otherwise.
    """

    exit_code = 2

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


@dataclass(frozen=True, order=True)
class Problem:
    """One thing that is wrong in one place of an input file."""

    path: str
    line: int | None
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}" if self.line else self.path
        text = f"{place}: {self.message}"
        return f"{text}; {self.remedy}" if self.remedy else text


class InputError(BenchError):
    """All problems of an input file at once, in the order of its lines."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        assert problems, "an error without a problem"
        self.problems = sorted(problems, key=lambda p: (p.path, p.line or math.inf))
        super().__init__("\n".join(str(p) for p in self.problems))


def missing_file(path: Path, *, what: str, remedy: str) -> BenchError:
    """Return the error for a file that is not there, or is not a file."""
    kind = "is a directory" if path.is_dir() else "is no regular file" if path.exists() else "does not exist"
    return BenchError(f"{path}: {what} {kind}", remedy=remedy)


class UnwritableError(BenchError):
    """A file or folder of results cannot be written: the disk is full, read-only, or another's."""


_REMEDIES = {
    errno.ENOSPC: "free some space there, then type it again",
    errno.EDQUOT: "free some space there, then type it again",
    errno.EROFS: "make it writable, then type it again",
    errno.EACCES: "make it writable, then type it again",
}


def unwritable(path: Path, error: OSError) -> UnwritableError:
    """Return the error for a file that cannot be written, with what mends it."""
    what = f"{path}: cannot be written: {error.strerror}"
    return UnwritableError(what, remedy=_REMEDIES.get(error.errno or 0, ""))
