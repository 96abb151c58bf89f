"""Entry point of the workload: arguments, exit codes, and one line for each expected failure.

The launch is detected from environment variables only.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

import torch.distributed as dist

from ..errors import BenchError
from ..measure.node import host_name
from ..measure.torch_internals import import_dynamo
from .failures import CollectiveError, WorkloadError, describe_error, known_reason
from .rank import run
from .rendezvous import JoinError, OtherRankError
from .session import parse_arguments

import_dynamo()

#: Keeps errors alive, because their frames hold the process group, whose destructor can wait for a lost rank.
_KEPT_ERRORS: list[BaseException] = []


def main(argv: Sequence[str] | None = None) -> int:
    """Run the workload and return its exit code: 0, 1 (the run failed) or 2 (bad arguments).

    An expected failure prints one line to stderr that begins with ``bench: error:``. Other failures print a
    traceback first. After a failure, a collective that never completes can still be pending, so the caller
    should end the process with :func:`os._exit`.
    """
    try:
        request = parse_arguments(sys.argv[1:] if argv is None else argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    except BenchError as error:
        _print_error(str(error))
        return error.exit_code
    try:
        run(request)
    except OtherRankError:
        return 1
    except JoinError as error:
        print(f"bench: {error}", flush=True)
        _print_error(str(error))
        return 1
    except CollectiveError as error:
        _KEPT_ERRORS.append(error)
        if dist.get_rank() == 0:
            _print_error(str(error))
        return 1
    except Exception as error:
        _KEPT_ERRORS.append(error)
        timeout_s = request.options.join_timeout
        text = describe_error(error, timeout_s=timeout_s)
        if known_reason(error, timeout_s=timeout_s) is None:
            traceback.print_exc()
            text = f"unexpected {text}; see the traceback above"
        if not isinstance(error, WorkloadError) and dist.is_initialized():
            text = f"rank {dist.get_rank()} on {host_name(os.environ)}: {text}"
        _print_error(text)
        return 1
    return 0


def _print_error(text: str) -> None:
    """Print every line of ``text`` as an error, in one call, so that lines of different ranks do not mix."""
    sys.stderr.write("".join(f"bench: error: {line}\n" for line in text.splitlines()))
    sys.stderr.flush()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # A normal exit would wait for collectives that a lost rank never completes. Even without a failure, a
    # normal exit takes a tenth of a second longer. All files are already closed.
    os._exit(code)
