"""A thread beside the loop that notices when it stands still, and finds out whom it waits for.

Every few seconds each rank notes in the store where it is: a few words, and nothing in between. Only a
rank that has not moved for a while reads what the others say of themselves, and of those only the first
that is alive. A training that is merely slow is told so in a warning and goes on; the same words become
the reason only when the process ends.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from bench.record.exchange import Exchange
from bench.record.stall import State, find_stall, line_of, words

#: How often a rank says where it is.
EVERY_S = 5.0
#: How long nothing may move before it is looked into. Doubles with each stall that ends by itself.
PATIENCE_S = 30.0
#: A rank is silent when it has missed so many times.
_MISSED = 3


class Progress(NamedTuple):
    """How far a loop is: whole steps, whether more are counted, and whether it has asked for a pause."""

    steps: int
    counting: bool
    paused: bool


class _Voice(enum.Enum):
    """Whether a rank lives."""

    UNKNOWN = enum.auto()
    HEARD = enum.auto()
    SILENT = enum.auto()


class _Heard(NamedTuple):
    """What a rank said last, when that was new here, and whether it was the second thing at least."""

    state: State | None
    since: float
    grew: bool


class Listener(Protocol):
    """Who is told of a stall."""

    def stalled(self, words: str, *, is_surprising: bool) -> None:
        """Hear that nothing has moved for a while; not surprising where those waited for are in a pause."""

    def overdue(self, words: str) -> None:
        """Hear that the time-out of collectives is about to end the process."""


class Watch:
    """Watches the loop of the thread that makes it.

    Args:
        progress: tells how far the loop is; called from another thread.
        exchange: the ranks' store, for this thread only.
        rank: this rank.
        world_size: how many there are.
        listener: who is told of a stall, on the first rank that lives.
        deadline_s: when the stall is about to end the process; None where it does not without a word.
    """

    def __init__(
        self,
        progress: Callable[[], Progress],
        exchange: Exchange,
        *,
        rank: int,
        world_size: int,
        listener: Listener,
        deadline_s: float | None = None,
    ) -> None:
        self._progress = progress
        self._exchange = exchange
        self._rank = rank
        self._world_size = world_size
        self._listener = listener
        self._thread = threading.get_ident()
        self._beat = 0
        self._state: State | None = None
        self._moved = time.monotonic()
        self._patience_s = PATIENCE_S
        self._heard: dict[int, _Heard] = {}  # since this rank has stopped
        self._deadline_s = None if deadline_s is None else deadline_s - 2 * EVERY_S
        self._has_told = False
        self._stop = threading.Event()
        #: What is known of the stall that there is; None where the loop moves.
        self.reason: str | None = None
        threading.Thread(target=self._run, name="bench-watch", daemon=True).start()

    def stop(self) -> None:
        """Watch no longer."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._tell()
            if not self._stop.is_set():
                self._look()
            self._stop.wait(EVERY_S)

    def _tell(self) -> None:
        """Note where this rank is."""
        progress, calls, before = self._progress(), collectives(), self._state
        is_moving = before is None or (progress.steps, calls) != (before.steps, before.collectives)
        if is_moving:
            self._moved = time.monotonic()
            self._moves_on()
        where = "" if is_moving else line_of(self._thread)
        self._beat += 1
        self._state = State(self._beat, progress.steps, calls, where, progress.paused, progress.counting)
        if not self._exchange.post("beat", asdict(self._state)):
            self._stop.set()  # the store has gone: nobody listens

    def _moves_on(self) -> None:
        if self._has_told:
            self._patience_s *= 2  # it was slow, and nothing else
        self.reason, self._has_told = None, False
        self._heard.clear()

    def _look(self) -> None:
        """Find out whom the others wait for, where this rank has not moved for long."""
        idle_s = time.monotonic() - self._moved
        if idle_s < self._patience_s - _MISSED * EVERY_S:
            return
        if any(self._hear(rank) is not _Voice.SILENT for rank in range(self._rank)):
            self.reason = None  # a rank before this one speaks
            return
        voices = [self._hear(rank) for rank in range(self._world_size)]
        if idle_s < self._patience_s or _Voice.UNKNOWN in voices:
            return
        states = {rank: self._heard[rank].state for rank, one in enumerate(voices) if one is _Voice.HEARD}
        self._conclude({rank: state for rank, state in states.items() if state is not None}, idle_s)

    def _conclude(self, states: dict[int, State], idle_s: float) -> None:
        stall = find_stall(states, self._world_size)
        if not stall.late and not self._progress().counting:
            return  # nothing is counted any more, and nobody waits
        self.reason = words(stall, states, self._hosts(), idle_s=idle_s)
        if not self._has_told:
            self._has_told = True
            paused = not stall.silent and all(states[rank].paused for rank in stall.late)
            self._listener.stalled(self.reason, is_surprising=bool(stall.late) and not paused)
        if self._deadline_s is not None and idle_s > self._deadline_s:
            self._deadline_s = None
            self._listener.overdue(self.reason)

    def _hear(self, rank: int) -> _Voice:
        """Return whether a rank lives: one is known to when its beat has grown since it was first heard."""
        if rank == self._rank:
            self._heard[rank] = _Heard(self._state, 0.0, True)
            return _Voice.HEARD
        content, now = self._exchange.told("beat", rank), time.monotonic()
        state = None if content is None else State(**content)
        before = self._heard.get(rank)
        if before is None:
            self._heard[rank] = before = _Heard(state, now, False)
        elif state is not None and (before.state is None or state.beat > before.state.beat):
            self._heard[rank] = before = _Heard(state, now, True)
        if now - before.since > _MISSED * EVERY_S:
            return _Voice.SILENT
        return _Voice.HEARD if before.grew else _Voice.UNKNOWN

    def _hosts(self) -> list[str]:
        facts = self._exchange.read("facts")
        return [] if facts is None else [one["facts"]["host"] for one in facts]


def collectives() -> int | None:
    """Return how many collectives this rank has called on the default group; None where it is not told."""
    try:
        group = distributed_c10d._get_default_group()
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except (dist.DistError, RuntimeError, ValueError, AttributeError):
        return None


def timeout_s(device: torch.device) -> float | None:
    """Return the time-out of the collectives that serve ``device``; None where it is not told."""
    try:
        group = distributed_c10d._get_default_group()
        backend = group._get_backend(device)
        return float(backend.options._timeout.total_seconds())
    except (dist.DistError, RuntimeError, ValueError, AttributeError):
        return None
