"""Errors of the workload, each of which carries its failure."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

import torch

from ..errors import BenchError
from ..finding import with_remedies
from ..measure.failures import Failure, OutOfMemory, RankFailed, write_failures
from ..measure.nccl_errors import nccl_error
from ..measure.peers import broken_group, raised, symptom_of

_ALLOCATOR = re.compile(
    r"can't allocate memory|out of memory|ENOMEM|Cannot allocate memory"
    r"|(CUBLAS|CUDNN|CUSPARSE|CUSOLVER|CUFFT)_STATUS_\w*ALLOC(ATION)?_FAILED",
    re.IGNORECASE,
)
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


class CollectiveError(WorkloadError):
    """An error that occurs on all ranks; only rank 0 prints it."""


def report(found: Sequence[Failure], *, hint: str = "") -> None:
    """Keep failures in the run's folder, and print each as an error; ``hint`` says where the log has more.

    They are printed in one call, so that lines of different ranks do not mix.
    """
    write_failures(found)
    lines = ["; ".join(filter(None, (with_remedies([one]), hint))) for one in found]
    sys.stderr.write("".join(f"bench: error: {line}\n" for line in lines))
    sys.stderr.flush()


def failure_from(error: BaseException, *, timeout_s: float) -> Failure:
    """Return the failure that any error means on its own."""
    return known_failure(error, timeout_s=timeout_s) or raised(error)


def known_failure(error: BaseException, *, timeout_s: float) -> Failure | None:
    """Return an expected failure, or None for any other error."""
    if isinstance(error, WorkloadError):
        return error.failures[0]
    if isinstance(error, BenchError):
        return RankFailed(text=error.message, remedy=error.remedy)
    text, nccl = str(error), nccl_error(str(error))
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
