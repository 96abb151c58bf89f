"""Why a run failed, in one line where the reason is foreseen."""

from __future__ import annotations

import re

import torch

from bench.errors import BenchError
from bench.measure.peers import Symptom, error_line, symptom_of

_ALLOCATOR = re.compile(r"can't allocate memory|out of memory|ENOMEM|Cannot allocate memory", re.IGNORECASE)


class WorkloadError(BenchError):
    """The run cannot go on; the exit code is 1."""

    exit_code = 1


class SetupError(WorkloadError):
    """Something that this rank needs is missing or wrong; other ranks may find the same."""


class BrokenError(WorkloadError):
    """Communication broke, and the other ranks told more than the error itself."""


class CollectiveError(WorkloadError):
    """The same reason on every rank: rank 0 says it for all."""


def named(error: BaseException, *, timeout_s: float) -> str:
    """Return :func:`reason`, or for what nobody foresaw its type and the first line of its text."""
    known = reason(error, timeout_s=timeout_s)
    if known is not None:
        return known
    return error_line(error)


def reason(error: BaseException, *, timeout_s: float) -> str | None:
    """Return one line that says why a run failed; None for what nobody foresaw.

    Args:
        error: what was raised.
        timeout_s: the time-out of collectives, named where one ran into it.
    """
    if isinstance(error, BenchError):
        return str(error)
    text = str(error)
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and _ALLOCATOR.search(text)
    ):
        first = (text.strip() or "no memory left").splitlines()[0].rstrip(".")
        return f"out of memory: {first}; lower the batch per rank, or set --activation-checkpointing true"
    symptom = symptom_of(error)
    if symptom is Symptom.LOST:
        return "lost the connection to another rank: it ended first, and its own message says why"
    if symptom is Symptom.TIMED_OUT:
        return (
            f"a collective did not complete in {timeout_s:g} s: a rank hangs or was lost;"
            " see the other ranks' messages, or raise --join-timeout"
        )
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return None
