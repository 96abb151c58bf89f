"""Errors of the workload, and one-line descriptions of failures."""

from __future__ import annotations

import re

import torch

from ..errors import BenchError
from ..measure.exchange import Symptom, error_line, symptom_of, with_nccl_error
from ..measure.nccl_errors import LOST_CONNECTION, nccl_error

_ALLOCATOR = re.compile(r"can't allocate memory|out of memory|ENOMEM|Cannot allocate memory", re.IGNORECASE)


class WorkloadError(BenchError):
    """An error that ends the run with exit code 1."""

    exit_code = 1


class SetupError(WorkloadError):
    """This rank lacks data, memory or a device; other ranks can have the same problem."""


class BrokenError(WorkloadError):
    """Communication broke, and another rank reported the cause."""


class CollectiveError(WorkloadError):
    """An error that occurs on all ranks; only rank 0 prints it."""


def describe_error(error: BaseException, *, timeout_s: float) -> str:
    """Describe any error in one line: by :func:`known_reason`, else by :func:`error_line`."""
    return known_reason(error, timeout_s=timeout_s) or error_line(error)


def known_reason(error: BaseException, *, timeout_s: float) -> str | None:
    """Return the reason of an expected failure in one line, or None for any other error."""
    if isinstance(error, BenchError):
        return str(error)
    text = str(error)
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and _ALLOCATOR.search(text)
    ):
        first = str(nccl_error(text) or (text.strip() or "no memory left").splitlines()[0].rstrip("."))
        return f"out of memory: {first}; lower the batch per rank, or set --activation-checkpointing true"
    symptom = symptom_of(error)
    if symptom is not None:
        return with_nccl_error(describe_symptom(symptom, timeout_s=timeout_s), error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return None


def describe_symptom(symptom: Symptom, *, timeout_s: float) -> str:
    """Describe broken communication of which no rank knows the cause."""
    if symptom is Symptom.LOST:
        return f"{LOST_CONNECTION}: it ended first, see its own message"
    return (
        f"a collective did not complete in {timeout_s:g} s: a rank hangs or was lost;"
        " see the other ranks' messages, or raise --join-timeout"
    )
