"""Start runs on this machine, over ssh or with Slurm, and determine how each run ended."""

from __future__ import annotations

from ..errors import BenchError
from ..study.plan_json import REPLAN, PlannedStudy
from .local import LocalExecutor
from .scheduler import SerialExecutor
from .slurm.pack_submission import PackExecutor
from .slurm.scheduler import SlurmExecutor
from .ssh import SshExecutor

Executor = SerialExecutor | SlurmExecutor
_EXECUTORS = {"local": LocalExecutor, "ssh": SshExecutor, "slurm": SlurmExecutor}


def executor_for(study: PlannedStudy, *, pack: bool = False) -> Executor:
    """Return the executor of the study's matrix; with ``pack``, one that submits one job for all runs."""
    if pack:
        return pack_executor(study)
    if study.executor not in _EXECUTORS:
        raise BenchError(f"executor {study.executor!r} is unknown", remedy=REPLAN)
    executor: Executor = _EXECUTORS[study.executor](study)
    return executor


def pack_executor(study: PlannedStudy) -> PackExecutor:
    """Return the executor that submits many runs as one job; raise BenchError for studies without Slurm."""
    if study.executor != "slurm":
        what = f"--pack submits many runs as one Slurm job, but the matrix's executor is {study.executor}"
        raise BenchError(
            what, remedy="omit --pack: without Slurm, runs are always executed one after another"
        )
    return PackExecutor(study)
