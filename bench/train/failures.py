"""Errors of the workload, each of which carries its failure."""

from __future__ import annotations

import re

import torch

from ..errors import BenchError
from ..finding import with_remedies
from ..measure.exchange import broken_group, error_line, nccl_of, symptom_of
from ..measure.failures import Failure, OutOfMemory, RankFailed

_ALLOCATOR = re.compile(r"can't allocate memory|out of memory|ENOMEM|Cannot allocate memory", re.IGNORECASE)
#: The option that sets the time-out of collectives.
TIMEOUT_OPTION = "workload.join_timeout"


class WorkloadError(BenchError):
    """An error that ends the run with exit code 1; its failures are classes, or a text with a remedy."""

    exit_code = 1

    def __init__(self, *found: Failure | str, remedy: str = "") -> None:
        typed = (one if isinstance(one, Failure) else RankFailed(text=one, remedy=remedy) for one in found)
        self.failures = [*typed]
        super().__init__("\n".join(with_remedies([one]) for one in self.failures))


class SetupError(WorkloadError):
    """This rank lacks data, memory or a device; other ranks can have the same problem."""


class BrokenError(WorkloadError):
    """Communication broke, and another rank reported the cause."""


class CollectiveError(WorkloadError):
    """An error that occurs on all ranks; only rank 0 prints it."""


def describe_error(error: BaseException, *, timeout_s: float) -> str:
    """Describe any error in one line, with the remedy of an expected failure."""
    found = known_failure(error, timeout_s=timeout_s)
    return with_remedies([found]) if found else error_line(error)


def known_failure(error: BaseException, *, timeout_s: float) -> Failure | None:
    """Return an expected failure, or None for any other error."""
    if isinstance(error, WorkloadError):
        return error.failures[0]
    if isinstance(error, BenchError):
        return RankFailed(text=error.message, remedy=error.remedy)
    text, nccl = str(error), nccl_of(error)
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and _ALLOCATOR.search(text)
    ):
        lines = text.strip().splitlines()
        return OutOfMemory(text=lines[0].rstrip(".") if lines and not nccl else "", nccl=nccl)
    if symptom := symptom_of(error):
        return broken_group(symptom, timeout_s=timeout_s, option=TIMEOUT_OPTION, nccl=nccl)
    if isinstance(error, OSError) and error.strerror:
        return RankFailed(text=f"{error.filename}: {error.strerror}" if error.filename else error.strerror)
    return None
