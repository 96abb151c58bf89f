"""Entry point of the built-in training: ``python -m ddp_scaling_bench.train``, once per rank.

``$BENCH_RUN_DIR/cell.json`` contains the options, and environment variables of the launcher the rank. Exit
codes are those of :func:`main`; each expected failure is one line.
"""

import os
import sys

from ..start import leave_out_working_folder

if __name__ == "__main__":
    leave_out_working_folder()  # before any other import

import traceback
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from ..errors import BenchError
from ..measure.failures import HostRank, RankFailed
from ..measure.node import host_name
from ..measure.peers import raised
from ..measure.torch_internals import import_dynamo
from ..run_folder import RunFolder
from .failures import CollectiveError, WorkloadError, known_failure, report
from .rank import run
from .rendezvous import JoinError, OtherRankError
from .session import read_task

import_dynamo()

#: Keeps errors alive, because their frames hold the process group, whose destructor can wait for a lost rank.
_KEPT_ERRORS: list[BaseException] = []


def main() -> int:
    """Run the training and return its exit code: 0, 1 (the run failed) or 2 (bad options).

    An expected failure prints one line to stderr that begins with ``bench: error:``. Other failures print a
    traceback first. After a failure, a collective that never completes can still be pending, so the caller
    should end the process with :func:`os._exit`.
    """
    try:
        folder = _run_folder()
        cell, options = read_task(folder)
    except BenchError as error:
        report([RankFailed(text=line) for line in str(error).splitlines()])
        return error.exit_code
    try:
        run(folder, cell, options)
    except Exception as error:
        _KEPT_ERRORS.append(error)
        _report_error(error, timeout_s=options.join_timeout)
        return 1
    return 0


def _report_error(error: Exception, *, timeout_s: float) -> None:
    """Report an error of the training, unless another rank reports it."""
    if isinstance(error, OtherRankError) or (isinstance(error, CollectiveError) and dist.get_rank()):
        return
    if isinstance(error, JoinError):
        print(f"bench: {error}", flush=True)
    if isinstance(error, WorkloadError):
        report(error.failures)
        return
    known = known_failure(error, timeout_s=timeout_s)
    if known is None:
        traceback.print_exc()
    failure = known or raised(error)
    if dist.is_initialized():
        failure = replace(failure, failed=(HostRank(dist.get_rank(), host_name(os.environ)),))
    report([failure], hint="" if known else "see the traceback above")


def _run_folder() -> RunFolder:
    if sys.argv[1:]:
        what = "the training has no arguments"
        raise BenchError(what, remedy="write its options below `workload` of a matrix: bench run MATRIX")
    if name := os.environ.get("BENCH_RUN_DIR"):
        return RunFolder(Path(name))
    remedy = "start the training with `bench run MATRIX`, or with a script of `bench plan`"
    raise BenchError("BENCH_RUN_DIR is not set", remedy=remedy)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A normal exit would wait for collectives that a lost rank never completes. Even without a failure, a
    # normal exit takes a tenth of a second longer. All files are already closed.
    os._exit(code)
