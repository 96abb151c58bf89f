"""End a rank with the cause if NCCL fails while the rank waits for its GPU.

After an error or a time-out of NCCL, no exception reaches Python: the rank waits for its GPU until torch's
watchdog aborts the process (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp). The watchdog first prints the
error, then waits four times TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC, by default a minute. Therefore a thread
reads the state of the group, prints which rank failed first, and ends the process.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..measure.failures import Failure
from ..measure.torch_internals import Symptom, group_error
from .failures import report

#: One call of torch each second, which takes microseconds, is no load for the training.
POLL_S = 1.0
#: The variable with which torch's watchdog aborts a process after seconds. Four times the value is enough for
#: the other ranks' reports.
WATCHDOGS_WAIT = ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "2000")


@contextmanager
def watched_group(explain: Callable[[Symptom], Failure]) -> Iterator[None]:
    """While the context is active, end the process if NCCL fails; ``explain`` returns the failure."""
    done = threading.Event()
    thread = threading.Thread(target=_watch, args=(done, explain), daemon=True, name="bench-nccl-watch")
    thread.start()
    try:
        yield
    finally:
        done.set()


def _watch(done: threading.Event, explain: Callable[[Symptom], Failure]) -> None:
    while not done.wait(POLL_S):
        found = group_error()
        if found is None:
            return  # this release of torch does not report the state: the watchdog ends the process
        if found is Symptom.NONE:
            continue
        failure = explain(found)
        if done.is_set():  # an exception has reached the rank in the meantime
            return
        sys.stdout.flush()
        report([failure])
        os._exit(1)
