"""Broken communication: its symptom on this rank, and its cause as reported by the other ranks.

Broken communication shows on every rank but the one at fault: that one ended, was killed or hangs. The
store in which the ranks met still answers, for a moment at least. Every failing rank reports there, and the
ranks that only lost the connection read who failed first, or which ranks are silent.
"""

from __future__ import annotations

import enum
import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from bench.measure.environment import RankFacts

_PEER_LOST = re.compile(
    r"connection (closed|reset|was closed) by (remote )?peer|remote process exited|socket closed|broken pipe"
    r"|failed to recv, got 0 bytes|\[.*gloo/transport/.*\].*(read|write)(v)? error|Connection refused",
    re.IGNORECASE,
)
_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
# "Application timeout caused pair closure" is gloo's message, too, although it does not name gloo.
_GLOO_OR_NCCL = re.compile(r"gloo|nccl|c10d|store|pair closure", re.IGNORECASE)

#: A rank waits so long for the reports of the others, who fail at about the same time.
REPORTS_TIMEOUT_S = 2.0
_POLL_S = 0.05
#: The most ranks that a message names.
_MAX_NAMED = 8


class Symptom(enum.Enum):
    """The way in which communication broke, which seldom names the cause."""

    LOST = enum.auto()
    TIMED_OUT = enum.auto()


def symptom_of(error: BaseException) -> Symptom | None:
    """Return the symptom of broken communication; None for an error of another kind."""
    text = str(error)
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _GLOO_OR_NCCL.search(text)):
        if _PEER_LOST.search(text):
            return Symptom.LOST
        if _TIMED_OUT.search(text):
            return Symptom.TIMED_OUT
    return None


def error_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def join_names(names: Sequence[str]) -> str:
    """Return the first eight names, and the number of the others."""
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


@dataclass
class _Reports:
    """The reports of the other ranks; ``silent`` lists the ranks that reported nothing."""

    cause: str = ""
    silent: list[int] = field(default_factory=list)
    store_is_lost: bool = False


class Peers:
    """The other ranks of a run, reached through the store in which all met.

    If ``rank_0_serves``, the store ends with rank 0; otherwise a launcher's agent serves it.
    """

    def __init__(self, store: Store, rank: int, facts: Sequence[RankFacts], *, rank_0_serves: bool) -> None:
        self._store = PrefixStore("failed", store)
        self._rank = rank
        self._facts = facts
        self._rank_0_serves = rank_0_serves

    def report(self, cause: str) -> None:
        """Report to the other ranks why this rank fails."""
        content = json.dumps(f"{self.name_of(self._rank)} failed first: {cause}") + "\n"
        self._with_timeout(lambda _: self._store.append("causes", content))  # type: ignore[attr-defined]

    def explain(self, symptom: Symptom, *, timeout_s: float | None, remedy: str) -> str | None:
        """Return the cause of broken communication; None if no rank knows it.

        ``timeout_s`` is the time-out of collectives, if it is known, and ``remedy`` the way to raise it.
        """
        reports = self._with_timeout(self._collect)
        is_lost = symptom is Symptom.LOST
        limit = "its time-out" if timeout_s is None else f"{timeout_s:g} s"
        late = f"a collective did not complete in {limit}"
        effect = "lost the connection to another rank" if is_lost else late
        if reports.cause:
            return f"{effect}: {reports.cause}"
        if reports.store_is_lost and self._rank_0_serves:
            return f"{effect}: {self.name_of(0)} has ended, and its own message says why"
        if not reports.silent:
            return None
        named = join_names([self.name_of(rank) for rank in reports.silent])
        if is_lost:
            return f"{effect}: nothing was heard from {named}; killed, or its host was lost?"
        return f"{effect}: {named} did not come; find out where it hangs, or {remedy}"

    def name_of(self, rank: int) -> str:
        """Return ``rank 1 on n2``."""
        return f"rank {rank} on {self._facts[rank].host}"

    def _with_timeout(self, use_store: Callable[[_Reports], object]) -> _Reports:
        """Use the store in a thread, for a limited time: its host may hang as well."""
        reports = _Reports()

        def target() -> None:
            try:
                use_store(reports)
            except (dist.DistError, RuntimeError):
                reports.store_is_lost = True

        thread = threading.Thread(target=target, daemon=True)
        thread.start()
        thread.join(2 * REPORTS_TIMEOUT_S)
        return reports

    def _collect(self, reports: _Reports) -> None:
        store, world_size = self._store, len(self._facts)
        store.append("came", f"{self._rank}\n")  # type: ignore[attr-defined]
        count = store.add("count", 1)
        deadline = time.monotonic() + REPORTS_TIMEOUT_S
        while count < world_size and not store.check(["causes"]) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            count = store.add("count", 0)
        if store.check(["causes"]):
            reports.cause = json.loads(store.get("causes").splitlines()[0])
        present = {int(line) for line in store.get("came").split()}
        reports.silent = [one.rank for one in self._facts if one.rank not in present]
        self._wait_for_readers()

    def _wait_for_readers(self) -> None:
        """Keep rank 0, which may serve the store, until the other reporting ranks have read."""
        read = self._store.add("read", 1)
        deadline = time.monotonic() + REPORTS_TIMEOUT_S / 2
        while self._rank == 0 and read < self._store.add("count", 0) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            read = self._store.add("read", 0)
