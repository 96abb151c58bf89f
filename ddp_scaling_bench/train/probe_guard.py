"""End all ranks in order after an error in a probe: the measurement is complete, so no run fails by it.

An error on one rank leaves the others in a collective that never completes. The rank therefore posts its
reason in the store in which the ranks met. A thread of each rank looks for it, and all processes end with
exit code 0: neither gloo nor NCCL can be used any more, nor ended.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from ..measure.failures import HostRank
from ..measure.peers import REPORTS_TIMEOUT_S, broken_group, symptom_of
from ..measure.torch_internals import Symptom, group_error
from .failures import TIMEOUT_OPTION, failure_from
from .session import Session

_POLL_S = 0.1
#: Errors of a store that has ended with its rank.
_STORE_ERRORS = (dist.DistError, RuntimeError)


def reason_of(error: BaseException, session: Session) -> str:
    """Return an error of this rank in words."""
    failure = failure_from(error, timeout_s=session.options.join_timeout)
    return f"{HostRank(session.launch.rank, session.me.host)}: {failure.message}"


def run_guarded(
    session: Session, probe: Callable[[], None], *, keep: Callable[[str], None], end: Callable[[], None]
) -> None:
    """Run ``probe``, then ``keep(reason)`` once on every rank; the reason is empty without an error.

    If several ranks have probed and one has failed, all processes end here, after ``end()``.
    """
    if session.launch.world_size == 1:
        try:
            probe()
        except Exception as error:
            return keep(reason_of(error, session))
        return keep("")
    guard = _Guard(session, keep, end)
    threading.Thread(target=guard.watch, daemon=True, name="bench-probes").start()
    try:
        probe()
    except Exception as error:
        guard.leave(reason_of(error, session), is_effect=symptom_of(error) is not None)
    guard.done.set()
    return keep("")


class _Guard:
    def __init__(self, session: Session, keep: Callable[[str], None], end: Callable[[], None]) -> None:
        self._session, self._keep, self._end = session, keep, end
        # A client of its own, because a call of another thread that waits would block this one's.
        store = session.joined.store
        self._store = PrefixStore("probes", store.clone() if hasattr(store, "clone") else store)
        self._leaving = threading.Lock()
        self.done = threading.Event()

    def watch(self) -> None:
        """Leave if another rank has posted a reason, or if NCCL has failed."""
        uses_nccl, option = self._session.cell.backend == "nccl", TIMEOUT_OPTION
        while not self.done.wait(_POLL_S):
            with suppress(*_STORE_ERRORS):
                if self._store.check(["reason"]):
                    self.leave("", is_effect=True)
            found = (uses_nccl and group_error()) or Symptom.NONE
            if found is not Symptom.NONE:
                lost = broken_group(found, timeout_s=self._session.options.join_timeout, option=option)
                self.leave(lost.message, is_effect=True)

    def leave(self, own: str, *, is_effect: bool) -> None:
        """End this process with the first reason of any rank; an effect of another error waits for that."""
        with self._leaving:  # never released: the process ends here
            if self.done.is_set():
                return
            try:
                self._keep(self._first_reason(own, REPORTS_TIMEOUT_S if is_effect else 0.0))
                self._wait_for_others()
                self._end()
            except Exception:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)

    def _first_reason(self, own: str, wait_s: float) -> str:
        deadline = time.monotonic() + wait_s
        with suppress(*_STORE_ERRORS):
            while not self._store.check(["reason"]) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            own = self._store.compare_set("reason", "", own).decode()
        return own or "another rank failed, and its reason is lost"

    def _wait_for_others(self) -> None:
        """Keep rank 0, which may serve the store, until the other ranks have read the reason."""
        session, deadline = self._session, time.monotonic() + 2 * REPORTS_TIMEOUT_S
        with suppress(*_STORE_ERRORS):
            left = self._store.add("left", 1)
            while session.is_first and left < session.launch.world_size and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                left = self._store.add("left", 0)
