"""The workload's way in: arguments, exit codes, and one line for each foreseen failure.

:func:`main` can be called in a forked child of a process that has imported this module, which
then pays for importing torch once: nothing here depends on how the process was started, only
on its environment variables.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

import torch._dynamo  # noqa: F401 - DDP needs it, compiled or not: import it where a parent can share it
import torch.distributed as dist

from bench.errors import BenchError
from bench.measure.environment import host_name
from bench.workload.arguments import parse_arguments
from bench.workload.failures import CollectiveError, WorkloadError, named, reason
from bench.workload.rank import run
from bench.workload.rendezvous import JoinError, OtherRankError

#: Errors of this process: their frames hold the process group, whose end may wait for a lost rank.
_ABANDONED: list[BaseException] = []


def main(argv: Sequence[str] | None = None) -> int:
    """Run the workload and return its exit code: 0, 1 (it failed) or 2 (bad arguments).

    Foreseen failures are one line on stderr that begins with ``bench: error:``; others keep
    their traceback. After a failure, communication that never completed may still be pending:
    a caller that has nothing else to do ends the process with :func:`os._exit`.
    """
    try:
        request = parse_arguments(sys.argv[1:] if argv is None else argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    except BenchError as error:
        _complain(str(error))
        return error.exit_code
    try:
        run(request)
    except OtherRankError:
        return 1
    except JoinError as error:
        print(f"bench: {error}", flush=True)
        _complain(str(error))
        return 1
    except CollectiveError as error:
        _ABANDONED.append(error)
        if dist.get_rank() == 0:
            _complain(str(error))
        return 1
    except Exception as error:
        _ABANDONED.append(error)
        timeout_s = request.options.join_timeout
        words = named(error, timeout_s=timeout_s)
        if reason(error, timeout_s=timeout_s) is None:
            traceback.print_exc()
            words = f"unforeseen {words}; see the traceback above"
        _complain(words if isinstance(error, WorkloadError) else f"{_who()}{words}")
        return 1
    return 0


def _complain(words: str) -> None:
    """Write all lines at once, so that those of several ranks do not mix."""
    sys.stderr.write("".join(f"bench: error: {line}\n" for line in words.splitlines()))
    sys.stderr.flush()


def _who() -> str:
    return f"rank {dist.get_rank()} on {host_name(os.environ)}: " if dist.is_initialized() else ""
