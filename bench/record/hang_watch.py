"""Ranks that the others wait for: who they are, and where in their code, as each rank tells of itself."""

from __future__ import annotations

import enum
import linecache
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from bench.measure.exchange import Exchange

#: How many ranks a message names.
_NAMED = 8
#: How much of a line of code is shown.
_MOST = 80
_NOT_THE_USERS = tuple(
    {f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_OURS = f"{Path(__file__).resolve().parents[1]}{os.sep}"


@dataclass(frozen=True)
class State:
    """Where a rank is.

    ``steps`` are whole ones. ``collectives`` counts what it has called on the default process group;
    None where that does not tell. ``where`` is the line of code that it has been at; empty while
    it moves on. ``beat`` grows as long as the process lives. ``counting`` is false where all windows
    are recorded: its steps are counted no more.
    """

    beat: int
    steps: int
    collectives: int | None
    where: str
    paused: bool
    counting: bool = True


@dataclass(frozen=True)
class Stall:
    """Ranks behind the others, and ranks from which nothing is heard."""

    behind: list[int]
    silent: list[int]
    #: Whether those behind lack a collective (else a step).
    by_collectives: bool
    #: The step that those ahead are in, from 1; None where they count no more.
    step: int | None

    @property
    def late(self) -> list[int]:
        """All that the others may be waiting for."""
        return sorted(self.behind + self.silent)


def find_stall(states: Mapping[int, State], world_size: int) -> Stall:
    """Return who is behind, from the states of the ranks that were heard."""
    silent = [rank for rank in range(world_size) if rank not in states]
    steps = {rank: state.steps for rank, state in states.items()}
    calls = {rank: state.collectives for rank, state in states.items()}
    known = [count for count in calls.values() if count is not None]
    by_collectives = len(known) == len(calls) and len(set(known)) > 1
    counts = {rank: count or 0 for rank, count in calls.items()} if by_collectives else steps
    most = max(counts.values(), default=0)
    behind = [rank for rank, count in counts.items() if count < most]
    ahead = [rank for rank in counts if rank not in behind]
    counting = all(states[rank].counting for rank in ahead)
    step = max((steps[rank] for rank in ahead), default=0) + 1 if counting else None
    return Stall(behind, silent, by_collectives, step)


def words(stall: Stall, states: Mapping[int, State], hosts: Sequence[str], *, idle_s: float) -> str:
    """Return in one line what is known of a stall that has lasted ``idle_s`` so far."""
    begin = f"nothing has moved for {idle_s:.0f} s"
    parts = []
    if stall.behind:
        step = "a step after the recorded ones" if stall.step is None else f"step {stall.step}"
        what = f"a collective of {step}" if stall.by_collectives else step
        who = _listed([_told(rank, states[rank], hosts) for rank in stall.behind])
        parts.append(f"{who} did not come to {what}")
    if stall.silent:
        who = _listed([_place(rank, hosts) for rank in stall.silent])
        parts.append(
            f"nothing is heard from {who}: stuck in C code, stopped or killed, or its host was lost?"
        )
    if parts:
        return f"{begin}: {'; '.join(parts)}"
    first = min(states)
    return f"{begin}, and no rank is behind another: {_told(first, states[first], hosts)}"


def _told(rank: int, state: State, hosts: Sequence[str]) -> str:
    pause = "in recorder.pause(), " if state.paused else ""
    at = f"{pause}at {state.where}" if state.where else "moving on"
    return f"{_place(rank, hosts)} ({at})"


def _place(rank: int, hosts: Sequence[str]) -> str:
    return f"rank {rank} on {hosts[rank]}" if rank < len(hosts) else f"rank {rank}"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def line_of(thread: int) -> str:
    """Return where a thread is in the user's code: ``train.py:38 in main: time.sleep(600)``."""
    innermost = frame = sys._current_frames().get(thread)
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    found = frame or innermost
    if found is None:
        return ""
    path, number = found.f_code.co_filename, found.f_lineno
    text = " ".join(linecache.getline(path, number).split())
    shown = text if len(text) <= _MOST else f"{text[:_MOST]}..."
    place = f"{Path(path).name}:{number} in {found.f_code.co_name}"
    return f"{place}: {shown}" if shown else place


def _is_users(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return not path.startswith(("<", _OURS, *_NOT_THE_USERS))


# A thread beside the loop that notices when it stands still, and finds out whom it waits for.
#
# Every few seconds each rank notes in the store where it is: a few words, and nothing in between. Only a
# rank that has not moved for a while reads what the others say of themselves, and of those only the first
# that is alive. A training that is merely slow is told so in a warning and goes on; the same words become
# the reason only when the process ends.

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
