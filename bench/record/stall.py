"""Ranks that the others wait for: who they are, and where in their code, as each rank tells of itself."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

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
