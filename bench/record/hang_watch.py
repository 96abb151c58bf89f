"""Detect a training loop that hangs; name the ranks that the others wait for, and their current line of code.

Every few seconds each rank posts its state to the store. If nothing has moved for a while, the first rank
that is alive compares the states of all ranks. A stall causes a warning, because the training may only be
slow. If the process then ends, the same message is printed as the cause.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from bench.measure.exchange import StoreExchange
from bench.measure.peers import join_names
from bench.measure.torch_internals import count_collectives

#: Interval at which a rank posts its state.
INTERVAL_S = 5.0
#: Time without progress after which a stall is examined. The time doubles whenever the loop moves again.
PATIENCE_S = 30.0
#: Number of missed intervals after which a rank counts as silent.
_MAX_MISSED = 3
#: The maximum length of a line of code in a message.
_MAX_CODE = 80
_LIBRARIES = tuple(
    {f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_BENCH = f"{Path(__file__).resolve().parents[1]}{os.sep}"


class Progress(NamedTuple):
    """The progress of a loop: its complete steps, whether steps are still counted, and whether it pauses."""

    steps: int
    counting: bool
    paused: bool


@dataclass(frozen=True)
class State:
    """The state of a rank, as posted to the store.

    ``beat`` increases as long as the process is alive. ``collectives`` is the number of collectives called on
    the default process group; None if unknown. ``where`` is the current line of code; empty while the loop
    moves. ``counting`` is false after the last window, when steps are no longer counted.
    """

    beat: int
    steps: int
    collectives: int | None
    where: str
    paused: bool
    counting: bool = True


@dataclass(frozen=True)
class Stall:
    """A stall: the ranks that are behind the others, and the ranks that no longer post their state.

    ``by_collectives`` is true if the ranks in ``behind`` have called fewer collectives than the others, and
    false if they have taken fewer steps. ``step`` is the current step of the ranks ahead, counted from 1;
    None if they no longer count steps.
    """

    behind: list[int]
    silent: list[int]
    by_collectives: bool
    step: int | None

    @property
    def late(self) -> list[int]:
        """All ranks that the others may be waiting for."""
        return sorted(self.behind + self.silent)


def find_stall(states: Mapping[int, State], world_size: int) -> Stall:
    """Compare the states of all ranks that are alive to find the ranks that the others wait for."""
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


def describe_stall(stall: Stall, states: Mapping[int, State], hosts: Sequence[str], *, idle_s: float) -> str:
    """Return a one-line description of a stall that has lasted ``idle_s`` so far."""
    begin = f"nothing has moved for {idle_s:.0f} s"
    parts = []
    if stall.behind:
        step = "a step after the recorded ones" if stall.step is None else f"step {stall.step}"
        missed = f"a collective of {step}" if stall.by_collectives else step
        names = join_names([_describe_rank(rank, states[rank], hosts) for rank in stall.behind])
        parts.append(f"{names} did not come to {missed}")
    if stall.silent:
        names = join_names([_rank_name(rank, hosts) for rank in stall.silent])
        parts.append(
            f"nothing is heard from {names}: stuck in C code, stopped or killed, or its host was lost?"
        )
    if parts:
        return f"{begin}: {'; '.join(parts)}"
    first = min(states)
    return f"{begin}, and no rank is behind another: {_describe_rank(first, states[first], hosts)}"


def _describe_rank(rank: int, state: State, hosts: Sequence[str]) -> str:
    pause = "in recorder.pause(), " if state.paused else ""
    where = f"{pause}at {state.where}" if state.where else "moving on"
    return f"{_rank_name(rank, hosts)} ({where})"


def _rank_name(rank: int, hosts: Sequence[str]) -> str:
    return f"rank {rank} on {hosts[rank]}" if rank < len(hosts) else f"rank {rank}"


def line_of(thread: int) -> str:
    """Return the line of user code that a thread runs, such as ``train.py:38 in main: time.sleep(600)``."""
    innermost = frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename.startswith(("<", _BENCH, *_LIBRARIES)):
        frame = frame.f_back
    found = frame or innermost
    if found is None:
        return ""
    path, number = found.f_code.co_filename, found.f_lineno
    code = " ".join(linecache.getline(path, number).split())
    shown = code if len(code) <= _MAX_CODE else f"{code[:_MAX_CODE]}..."
    place = f"{Path(path).name}:{number} in {found.f_code.co_name}"
    return f"{place}: {shown}" if shown else place


class _LastState(NamedTuple):
    """A rank's last state, the time when this rank first read it, and whether its beat has ever increased."""

    state: State | None
    since: float
    grew: bool


class HangWatch:
    """Watches, from a background thread, the training loop of the thread that creates the object.

    Args:
        progress: a function that returns the loop's progress.
        exchange: the store, used by the background thread only.
        on_stall: called on the first rank that is alive, with a description of the stall and whether the
            stall is surprising. It is not surprising if the late ranks are in a pause.
        on_deadline: called with the description of the stall shortly before ``deadline_s``.
        deadline_s: the time-out of collectives if reaching it aborts the process without a message.
    """

    def __init__(
        self,
        progress: Callable[[], Progress],
        exchange: StoreExchange,
        *,
        on_stall: Callable[[str, bool], None],
        on_deadline: Callable[[str], None],
        deadline_s: float | None = None,
    ) -> None:
        self._progress = progress
        self._exchange = exchange
        self._on_stall = on_stall
        self._on_deadline = on_deadline
        self._thread = threading.get_ident()
        self._beat = 0
        self._state: State | None = None
        self._moved_at = time.monotonic()
        self._patience_s = PATIENCE_S
        self._last_states: dict[int, _LastState] = {}  # read since this rank stopped moving
        self._deadline_s = None if deadline_s is None else deadline_s - 2 * INTERVAL_S
        self._has_warned = False
        self._stop = threading.Event()
        #: The description of the current stall; None while the loop moves.
        self.reason: str | None = None
        threading.Thread(target=self._run, name="bench-hang-watch", daemon=True).start()

    def stop(self) -> None:
        """Stop watching."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._post_state()
            if not self._stop.is_set():
                self._check()
            self._stop.wait(INTERVAL_S)

    def _post_state(self) -> None:
        progress, calls, before = self._progress(), count_collectives(), self._state
        is_moving = before is None or (progress.steps, calls) != (before.steps, before.collectives)
        if is_moving:
            self._moved_at = time.monotonic()
            if self._has_warned:
                self._patience_s *= 2  # the training was only slow
            self.reason, self._has_warned = None, False
            self._last_states.clear()
        where = "" if is_moving else line_of(self._thread)
        self._beat += 1
        self._state = State(self._beat, progress.steps, calls, where, progress.paused, progress.counting)
        if not self._exchange.post("beat", asdict(self._state)):
            self._stop.set()  # the store is lost, so no rank can read the state

    def _check(self) -> None:
        """If this rank has not moved for a long time, find the ranks that the others wait for."""
        idle_s = time.monotonic() - self._moved_at
        if idle_s < self._patience_s - _MAX_MISSED * INTERVAL_S:
            return
        if any(self._is_alive(rank) is not False for rank in range(self._exchange.rank)):
            self.reason = None  # a lower rank is alive and reports the stall
            return
        alive = [self._is_alive(rank) for rank in range(self._exchange.world_size)]
        if idle_s < self._patience_s or None in alive:
            return
        states = {rank: self._last_states[rank].state for rank, lives in enumerate(alive) if lives}
        self._report({rank: state for rank, state in states.items() if state is not None}, idle_s)

    def _report(self, states: dict[int, State], idle_s: float) -> None:
        stall = find_stall(states, self._exchange.world_size)
        if not stall.late and not self._progress().counting:
            return  # the recording has ended, and no rank waits
        hosts = [one["facts"]["host"] for one in self._exchange.read_all("facts") or []]
        self.reason = describe_stall(stall, states, hosts, idle_s=idle_s)
        if not self._has_warned:
            self._has_warned = True
            paused = not stall.silent and all(states[rank].paused for rank in stall.late)
            self._on_stall(self.reason, bool(stall.late) and not paused)
        if self._deadline_s is not None and idle_s > self._deadline_s:
            self._deadline_s = None
            self._on_deadline(self.reason)

    def _is_alive(self, rank: int) -> bool | None:
        """Return whether a rank's beat has increased recently; None if it is too early to know."""
        if rank == self._exchange.rank:
            self._last_states[rank] = _LastState(self._state, 0.0, True)
            return True
        content, now = self._exchange.read("beat", rank), time.monotonic()
        state = None if content is None else State(**content)
        last = self._last_states.get(rank)
        if last is None:
            self._last_states[rank] = last = _LastState(state, now, False)
        elif state is not None and (last.state is None or state.beat > last.state.beat):
            self._last_states[rank] = last = _LastState(state, now, True)
        if now - last.since > _MAX_MISSED * INTERVAL_S:
            return False
        return True if last.grew else None
