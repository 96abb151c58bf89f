"""Read NCCL's errors in the message of an exception, or in a log.

torch reports an error of NCCL in several lines (torch/csrc/distributed/c10d/NCCLUtils.cpp)::

    NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, invalid usage, NCCL version 2.28.9
    ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
    Last error:
    Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 60

Only the last line says what went wrong. NCCL before 2.13 has no last error, and it can be empty. If an
operation that has already been started fails or takes too long, torch's watchdog logs the error and aborts
the process, without an exception in Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..text import printable

_LAST_ERROR = "Last error:"
#: The names of ncclResult_t in nccl.h, as torch prints them.
_KIND = re.compile(r"\b(nccl(?:\w{1,40}Error|Invalid(?:Argument|Usage)|Timeout)): ?(.*)")
_VERSION = re.compile(r"\bNCCL version (\d[\w.]*)")
_TIMEOUT = re.compile(
    r"\[(?:PG [^\]]{1,100} )?Rank (\d+)\] (Watchdog caught collective operation timeout: .{1,500} before"
    r" timing out)\b"
)
#: torch prints the kind and the last error in the lines after its first line. With several ranks, lines of
#: other ranks can be between these lines.
_LINES = 40
_REMOTE = "ncclRemoteError"
#: Maximum number of characters of a last error.
_LONGEST = 500


@dataclass(frozen=True)
class NcclError:
    """An error of NCCL, or with the kind ``""`` a time-out, whose ``last`` is the watchdog's message."""

    kind: str
    last: str
    version: str = ""

    @property
    def is_remote(self) -> bool:
        """True if another process ended or the network failed."""
        return self.kind == _REMOTE

    @property
    def is_effect(self) -> bool:
        """True if another error of the run is probably the cause: a lost connection, or a time-out."""
        return self.kind in ("", _REMOTE)

    def __str__(self) -> str:
        return f"NCCL {self.version}: {self.last}" if self.version else f"NCCL: {self.last}"


def nccl_error(text: str) -> NcclError | None:
    """Return the error of NCCL in the message of an exception, or None if the message contains none."""
    return next(_errors([*map(printable, text.splitlines())]), None)


def logged_nccl_errors(lines: Sequence[str]) -> list[NcclError]:
    """Return the errors and time-outs of NCCL in a log, those first that are no effect of another one."""
    shown = [*map(printable, lines)]  # without the colours that some launchers add
    late = [NcclError("", f"rank {one[1]}: {one[2]}") for one in map(_TIMEOUT.search, shown) if one]
    return sorted([*_errors(shown), *late], key=lambda one: one.is_effect)


def _errors(lines: Sequence[str]) -> Iterator[NcclError]:
    for index, line in enumerate(lines):
        if match := _KIND.search(line):
            last = _last_error(lines[index : index + 1 + _LINES], line[: match.start()])
            versions = _VERSION.findall(" ".join(lines[max(0, index - _LINES) : index + 1]))
            if last or versions:
                kind = f"{match[1]}: {match[2]}".rstrip(": .")
                yield NcclError(match[1], last or kind, versions[-1] if versions else "")


def _last_error(lines: Sequence[str], prefix: str) -> str:
    """Return the last error below the first of the lines with its ``prefix`` (of a rank), or ``""``."""
    same = (line for line in lines if line.startswith(prefix.rstrip()) and line != lines[0])
    title, *below = [line.removeprefix(prefix).strip() for line in same] or [""]
    found = next((line for line in below if line != _LAST_ERROR), "") if title == _LAST_ERROR else ""
    return "" if found.startswith(("Exception raised from", "Traceback (")) else found[:_LONGEST]
