"""Errors of other ranks: why communication broke.

When one rank ends, is killed or hangs, communication breaks on all other ranks. The store usually still
answers for a moment. Every failing rank reports its error in the store. Ranks that only lost a connection
read which rank failed first, or which ranks reported nothing.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ..finding import with_remedies
from .failures import Failure, HostRank, LateCollective, LeftRank, LostConnection, RaisedError
from .launch import Launch
from .nccl_errors import nccl_error
from .ranks import RankFacts
from .torch_internals import Symptom

_POLL_S = 0.05
_PEER_LOST = re.compile(
    r"connection (closed|reset|was closed) by (remote )?peer|remote process exited|socket closed|broken pipe"
    r"|failed to recv, got 0 bytes|\[.*gloo/transport/.*\].*(read|write)(v)? error|Connection refused",
    re.IGNORECASE,
)
_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
# "Application timeout caused pair closure" is also a message of gloo, although the text does not name gloo.
_GLOO_OR_NCCL = re.compile(r"gloo|nccl|c10d|store|pair closure", re.IGNORECASE)

#: Time that a failing rank waits for the reports of other ranks, which probably fail at the same time.
REPORTS_TIMEOUT_S = 2.0
#: Name of a record: a rank closed its recorder, after this number of steps.
LEFT = "left"


def symptom_of(error: BaseException) -> Symptom | None:
    """Classify an error of broken communication; return None for any other error.

    An error of NCCL is no time-out of a collective: torch's watchdog reports those without an exception.
    """
    text = str(error)
    if isinstance(error, dist.DistError) and (of_nccl := nccl_error(text)):
        return Symptom.LOST if of_nccl.is_remote or _PEER_LOST.search(of_nccl.last) else None
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _GLOO_OR_NCCL.search(text)):
        if _PEER_LOST.search(text):
            return Symptom.LOST
        if _TIMED_OUT.search(text):
            return Symptom.TIMED_OUT
    return None


def raised(error: BaseException) -> RaisedError:
    """Return the failure of an error that nobody expects, with NCCL's last error or the first line."""
    lines, nccl = str(error).strip().splitlines(), nccl_error(str(error))
    return RaisedError(error=type(error).__name__, text=lines[0] if lines and not nccl else "", nccl=nccl)


def broken_group(
    symptom: Symptom, *, timeout_s: float | None, option: str, **known: Any
) -> LostConnection | LateCollective:
    """Return the failure of a rank that sees ``symptom``, with what is known of its cause.

    ``timeout_s`` is the time-out of collectives, or None if it is unknown; ``option`` sets it.
    """
    if symptom is Symptom.LOST:
        return LostConnection(**known)
    return LateCollective(timeout_s=timeout_s, option=option, **known)


class Peers:
    """The other ranks of a run, reached through the store in which all ranks met.

    Args:
        store: the store, which ends with rank 0 unless torchrun's agent serves it.
        launch: this rank.
        facts: all ranks.
        timeout_s: the time-out of collectives, or None if it is unknown.
        option: the name of the option that sets this time-out.
    """

    def __init__(
        self,
        store: Store,
        launch: Launch,
        facts: Sequence[RankFacts],
        *,
        timeout_s: float | None,
        option: str,
    ) -> None:
        self._store, self._rank, self._facts = PrefixStore("failed", store), launch.rank, facts
        self._left = PrefixStore(LEFT, store)
        self._rank_0_serves = not launch.agent_store
        self._timeout_s, self._option = timeout_s, option

    def report(self, cause: str) -> None:
        """Report to the other ranks why this rank fails."""
        content = json.dumps([self._rank, cause]) + "\n"
        self._with_timeout(lambda _: self._store.append("causes", content))  # type: ignore[attr-defined]

    def failure_of(self, error: BaseException, own: Failure) -> Failure | None:
        """Tell the other ranks why this one fails, or learn from them why communication broke.

        ``own`` is the failure that ``error`` means on its own.

        Returns:
            ``own``, or the cause of broken communication; None if no rank knows it.
        """
        symptom = symptom_of(error)
        if symptom is None:
            self.report(with_remedies([replace(own, failed=())]))
            return own
        cause = self.explain(symptom)
        return None if cause is None else replace(cause, nccl=nccl_error(str(error)))

    def explain(self, symptom: Symptom) -> Failure | None:
        """Return the failure with the cause of broken communication, or None if no rank knows the cause."""
        known, own = dict(self._with_timeout(self._collect)), (self.name_of(self._rank),)
        if not known:
            return None
        return broken_group(symptom, timeout_s=self._timeout_s, option=self._option, failed=own, **known)

    def name_of(self, rank: int) -> HostRank:
        """Return the rank with its host."""
        return HostRank(rank, self._facts[rank].host)

    def _with_timeout(self, use_store: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Run ``use_store`` in a thread with a time limit, because the store's server can hang.

        Returns what is known of the cause, as arguments of :func:`broken_group`.
        """
        known: dict[str, Any] = {}

        def target() -> None:
            try:
                use_store(known)
            except (dist.DistError, RuntimeError):
                if self._rank_0_serves and "first" not in known:
                    known.clear()
                    known["ended"] = self.name_of(0)

        thread = threading.Thread(target=target, daemon=True)
        try:
            thread.start()
            thread.join(2 * REPORTS_TIMEOUT_S)
        except RuntimeError:  # at exit, Python 3.12 starts no thread; the store then limits each operation
            self._store.set_timeout(timedelta(seconds=REPORTS_TIMEOUT_S))
            target()
        return known

    def _collect(self, known: dict[str, Any]) -> None:
        store = self._store
        store.append("came", f"{self._rank}\n")  # type: ignore[attr-defined]
        deadline = time.monotonic() + REPORTS_TIMEOUT_S
        while not store.check(["causes"]) and time.monotonic() < deadline:
            if len(self._present()) == len(self._facts):
                break
            time.sleep(_POLL_S)
        if store.check(["causes"]):
            first, said = json.loads(store.get("causes").splitlines()[0])
            known.update(first=self.name_of(first), said=said)
        present = self._present()
        absent = [self.name_of(one.rank) for one in self._facts if one.rank not in present]
        if absent and "first" not in known:
            left = [one for one in absent if self._left.check([str(one.rank)])]
            steps = [int(self._left.get(str(one.rank))) for one in left]
            known["left"] = tuple(LeftRank(one.rank, one.host, n) for one, n in zip(left, steps, strict=True))
            known["absent"] = tuple(one for one in absent if one not in left)
        self._wait_for_readers()

    def _present(self) -> set[int]:
        """Return the ranks that have come here."""
        return {*map(int, self._store.get("came").split())}

    def _wait_for_readers(self) -> None:
        """Keep rank 0 (often the store's server) alive until the other failing ranks have read the store."""
        read = self._store.add("read", 1)
        deadline = time.monotonic() + REPORTS_TIMEOUT_S / 2
        while self._rank == 0 and read < len(self._present()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            read = self._store.add("read", 0)
