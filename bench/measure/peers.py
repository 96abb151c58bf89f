"""How communication that broke looks on the ranks that were left, whoever called it."""

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
# "Application timeout caused pair closure" is gloo's too, and does not say so.
_GLOO_OR_NCCL = re.compile(r"gloo|nccl|c10d|store|pair closure", re.IGNORECASE)


class Symptom(enum.Enum):
    """How communication broke, which says little about why."""

    LOST = enum.auto()
    TIMED_OUT = enum.auto()


def symptom_of(error: BaseException) -> Symptom | None:
    """Return how communication broke; None for an error of another kind."""
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


# Who failed first, and who did not come: what ranks tell each other when their communication has broken.
#
# Communication that breaks shows on every rank but the one to blame: that one ended, was killed, or
# hangs. The store in which the ranks met still answers, for a moment at least. Each rank that fails
# leaves a word there, and those that only lost it read who was first, or from whom nothing is heard.

#: How long a rank listens for the others, who meet the same failure at about the same time.
LISTEN_S = 2.0
_EVERY_S = 0.05
#: How many ranks a message names.
_NAMED = 8


@dataclass
class _Heard:
    """What is known after listening; ``silent`` are the ranks from which nothing came."""

    cause: str = ""
    silent: list[int] = field(default_factory=list)
    store_is_gone: bool = False


class Peers:
    """The other ranks of a run, through the store in which all met.

    Args:
        store: where they met.
        rank: this rank.
        facts: all ranks with their hosts.
        rank_0_serves: whether the store ends with rank 0 (a launcher's agent may serve it instead).
    """

    def __init__(self, store: Store, rank: int, facts: Sequence[RankFacts], *, rank_0_serves: bool) -> None:
        self._store = PrefixStore("failed", store)
        self._rank = rank
        self._facts = facts
        self._rank_0_serves = rank_0_serves

    def tell(self, words: str) -> None:
        """Tell the others why this rank fails, which is a reason of its own."""
        content = json.dumps(f"{self.place(self._rank)} failed first: {words}") + "\n"
        self._bounded(lambda heard: self._store.append("causes", content))  # type: ignore[attr-defined]

    def explain(self, symptom: Symptom, *, timeout_s: float | None, longer: str) -> str | None:
        """Return why communication broke, as far as the others tell; None where they tell nothing.

        Args:
            symptom: how it broke.
            timeout_s: the time-out of collectives; None where it is not known.
            longer: how to raise it.
        """
        heard = self._bounded(self._listen)
        lost = symptom is Symptom.LOST
        limit = "its time-out" if timeout_s is None else f"{timeout_s:g} s"
        late = f"a collective did not complete in {limit}"
        what = "lost the connection to another rank" if lost else late
        if heard.cause:
            return f"{what}: {heard.cause}"
        if heard.store_is_gone and self._rank_0_serves:
            return f"{what}: {self.place(0)} has ended, and its own message says why"
        if not heard.silent:
            return None
        named = ", ".join(self.place(rank) for rank in heard.silent[:_NAMED])
        if len(heard.silent) > _NAMED:
            named += f" and {len(heard.silent) - _NAMED} more"
        if lost:
            return f"{what}: nothing was heard from {named}; killed, or its host was lost?"
        return f"{what}: {named} did not come; find out where it hangs, or {longer}"

    def place(self, rank: int) -> str:
        """Return ``rank 1 on n2``."""
        return f"rank {rank} on {self._facts[rank].host}"

    def _bounded(self, talk: Callable[[_Heard], object]) -> _Heard:
        """Talk through the store, for a bounded time: its host may hang as well."""
        heard = _Heard()

        def safely() -> None:
            try:
                talk(heard)
            except (dist.DistError, RuntimeError):
                heard.store_is_gone = True

        thread = threading.Thread(target=safely, daemon=True)
        thread.start()
        thread.join(2 * LISTEN_S)
        return heard

    def _listen(self, heard: _Heard) -> None:
        store, everyone = self._store, len(self._facts)
        store.append("came", f"{self._rank}\n")  # type: ignore[attr-defined]
        count = store.add("count", 1)
        until = time.monotonic() + LISTEN_S
        while count < everyone and not store.check(["causes"]) and time.monotonic() < until:
            time.sleep(_EVERY_S)
            count = store.add("count", 0)
        if store.check(["causes"]):
            heard.cause = json.loads(store.get("causes").splitlines()[0])
        came = {int(line) for line in store.get("came").split()}
        heard.silent = [one.rank for one in self._facts if one.rank not in came]
        self._wait_for_readers()

    def _wait_for_readers(self) -> None:
        """Let rank 0, which may serve the store, stay until those that came have read."""
        read = self._store.add("read", 1)
        until = time.monotonic() + LISTEN_S / 2
        while self._rank == 0 and read < self._store.add("count", 0) and time.monotonic() < until:
            time.sleep(_EVERY_S)
            read = self._store.add("read", 0)
