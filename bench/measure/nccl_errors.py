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

from ..terminal import printable

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
    """An error of NCCL: its kind, NCCL's last error and its version; ``""`` if unknown.

    For a time-out of an operation, ``kind`` is ``""``, and ``last`` is the watchdog's message.
    """

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
    return next(_errors(_shown(text.splitlines())), None)


def logged_nccl_errors(lines: Sequence[str]) -> list[NcclError]:
    """Return the errors and time-outs of NCCL in a log, those first that are no effect of another one."""
    shown = _shown(lines)
    return sorted([*_errors(shown), *_time_outs(shown)], key=lambda one: one.is_effect)


def _shown(lines: Sequence[str]) -> list[str]:
    """Return the lines without the colours that some launchers add."""
    return [printable(line) for line in lines]


def _errors(lines: Sequence[str]) -> Iterator[NcclError]:
    for index, line in enumerate(lines):
        if match := _KIND.search(line):
            below = _of_same_rank(lines, index, line[: match.start()])
            last = _last_error(below)
            before = " ".join(lines[max(0, index - _LINES) : index + 1])
            versions = _VERSION.findall(before)
            if last or versions:
                kind = f"{match[1]}: {match[2]}".rstrip(": .")
                yield NcclError(match[1], last or kind, versions[-1] if versions else "")


def _time_outs(lines: Sequence[str]) -> Iterator[NcclError]:
    for line in lines:
        if match := _TIMEOUT.search(line):
            yield NcclError("", f"rank {match[1]}: {match[2]}")


def _of_same_rank(lines: Sequence[str], index: int, prefix: str) -> list[str]:
    """Return the lines below a line that have the same prefix (the name of a rank), without this prefix.

    The same line of another rank is left out.
    """
    below = [line for line in lines[index + 1 : index + 1 + _LINES] if line != lines[index]]
    return [line.removeprefix(prefix) for line in below if line.startswith(prefix.rstrip())]


def _last_error(below: Sequence[str]) -> str:
    """Return the last error in the lines below an error's kind, or ``""`` if NCCL reports none."""
    if not below or below[0].strip() != _LAST_ERROR:
        return ""
    found = next((line.strip() for line in below[1:] if line.strip() != _LAST_ERROR), "")
    return "" if found.startswith(("Exception raised from", "Traceback (")) else found[:_LONGEST]
