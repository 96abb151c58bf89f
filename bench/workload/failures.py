"""Errors of the workload, and their descriptions in one line."""

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
    """This rank lacks something that it needs; other ranks may lack the same."""


class BrokenError(WorkloadError):
    """Communication broke, and the other ranks know the cause."""


class CollectiveError(WorkloadError):
    """An error that all ranks have in common; rank 0 prints it."""


def describe_error(error: BaseException, *, timeout_s: float) -> str:
    """Return :func:`known_reason`, or else the error's type and the first line of its text."""
    return known_reason(error, timeout_s=timeout_s) or error_line(error)


def known_reason(error: BaseException, *, timeout_s: float) -> str | None:
    """Return the reason of an expected failure in one line; None for any other error.

    Args:
        error: the exception.
        timeout_s: the time-out of collectives, for the message about it.
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
        return "lost the connection to another rank: it ended first, see its own message"
    if symptom is Symptom.TIMED_OUT:
        return (
            f"a collective did not complete in {timeout_s:g} s: a rank hangs or was lost;"
            " see the other ranks' messages, or raise --join-timeout"
        )
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return None
