"""Report the cause and save complete windows when training hangs, fails or receives SIGTERM.

Every few seconds each rank posts its state to the store. If a rank makes no progress for a while, the first
rank that is alive compares the states of all ranks. It names the ranks that the others wait for, with their
current line of code. A stall first causes only a warning, because the training is possibly just slow. If the
process later ends during the stall, the same message is printed as the cause.
"""

from __future__ import annotations

import atexit
import ctypes
import linecache
import os
import signal
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from ..measure.exchange import Peers, StoreExchange, Symptom, error_line, symptom_of
from ..measure.ranks import RankFacts
from ..measure.torch_internals import collective_timeout_s, count_collectives
from ..units import join_names
from .session import Session

#: Interval at which a rank posts its state.
INTERVAL_S = 5.0
#: Time without progress after which a stall is examined. It doubles when the loop makes progress again.
PATIENCE_S = 30.0
#: Number of missed intervals after which a rank counts as silent.
_MAX_MISSED = 3
#: The maximum number of characters of a line of code in a message.
_MAX_CODE = 80
_LIBRARIES = tuple(
    {f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_BENCH = f"{Path(__file__).resolve().parents[1]}{os.sep}"


class Progress(NamedTuple):
    """A loop's progress: complete steps, whether steps are still counted, and whether the loop pauses."""

    steps: int
    counting: bool
    paused: bool


@dataclass(frozen=True)
class State:
    """The state of a rank, as posted to the store.

    ``beat`` increases as long as the process is alive. ``collectives`` is the number of collectives
    called on the default process group, or None if unknown. ``where`` is the current line of code, or
    ``""`` while the loop makes progress. ``counting`` is false after the last window, when steps are no
    longer counted.
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
    false if these ranks have taken fewer steps. ``step`` is the current step of the ranks ahead, counted from
    1, or None if the ranks ahead no longer count steps.
    """

    behind: list[int]
    silent: list[int]
    by_collectives: bool
    step: int | None

    @property
    def late(self) -> list[int]:
        """All ranks for which the others are possibly waiting."""
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
    begin = f"no progress for {idle_s:.0f} s"
    parts = []
    if stall.behind:
        step = "a step after the last recorded step" if stall.step is None else f"step {stall.step}"
        missed = f"a collective of {step}" if stall.by_collectives else step
        names = join_names([_describe_rank(rank, states[rank], hosts) for rank in stall.behind])
        parts.append(f"{names} did not reach {missed}")
    if stall.silent:
        names = join_names([_rank_name(rank, hosts) for rank in stall.silent])
        parts.append(f"no report from {names}: stuck in C code, stopped or killed, or the host was lost")
    if parts:
        return f"{begin}: {'; '.join(parts)}"
    first = min(states)
    return f"{begin}, and no rank is behind another: {_describe_rank(first, states[first], hosts)}"


def _describe_rank(rank: int, state: State, hosts: Sequence[str]) -> str:
    pause = "in recorder.pause(), " if state.paused else ""
    where = f"{pause}at {state.where}" if state.where else "making progress"
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
    """A rank's last state, when it was first read, and whether its ``beat`` (sign of life) ever increased."""

    state: State | None
    since: float
    grew: bool


class HangWatch:
    """Watch, from a background thread, the training loop of the thread that creates the object.

    Args:
        progress: a function that returns the loop's progress.
        exchange: the store, used by the background thread only.
        on_stall: called on the first rank that is alive, with a description of the stall. The second argument
            is False if the late ranks are known to be in a pause.
        on_deadline: called with the description of the stall shortly before ``deadline_s``.
        deadline_s: the time-out of collectives, given only if the time-out aborts the process without a
            message.
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
        #: The description of the current stall, or None while the loop makes progress.
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
        """If this rank has made no progress for a long time, find the ranks that the others wait for."""
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
        """Return whether a rank's beat has increased recently, or None if it is too early to know."""
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


#: Time limit of the SIGTERM handler. Slurm and torchrun send SIGKILL 30 s after SIGTERM.
GRACE_S = 4.0
_QUIT = b"\0"


class FailureReporter:
    """Report hangs and failures of the training loop on one rank, from its first step to its end."""

    def __init__(self, session: Session, progress: Callable[[], Progress]) -> None:
        self._session = session
        self._exchange = session.exchange
        self._timeout_s = collective_timeout_s(session.device)
        self._watch: HangWatch | None = None
        if self._exchange.world_size > 1:
            self._watch = HangWatch(
                progress,
                self._exchange.clone(),
                on_stall=self._warn_of_stall,
                on_deadline=self._print_error,
                # NCCL's watchdog aborts the process without a message, so the time-out must be anticipated.
                # gloo raises an exception, which is explained when it occurs.
                deadline_s=self._timeout_s if session.backend == "nccl" else None,
            )
        self._handler = SigtermHandler(self._handle_sigterm)

    def close(self) -> None:
        """Stop watching and restore the process's signal handling."""
        if self._watch is not None:
            self._watch.stop()
        self._handler.remove()

    def _warn_of_stall(self, message: str, is_surprising: bool) -> None:
        """Write complete windows and print a warning; the training is possibly only slow."""
        self._session.write()
        if is_surprising:
            self._session.warn(message)

    def explain(self, error: BaseException) -> None:
        """Print and report this rank's error; if communication broke, print the cause that others report."""
        contents = self._exchange.read_all("facts") or []
        if len(contents) < 2:
            return
        facts = [RankFacts(**one["facts"]) for one in contents]
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("1", "true")
        peers = Peers(self._exchange.store, self._exchange.rank, facts, rank_0_serves=not by_agent)
        symptom = symptom_of(error)
        if symptom is None:
            peers.report(error_line(error))
            self._print_error(f"{error_line(error)}; see the traceback above")
            return
        stall = None if self._watch is None else self._watch.reason
        if stall is not None and symptom is Symptom.TIMED_OUT:
            limit = "its time-out" if self._timeout_s is None else f"{self._timeout_s:g} s"
            self._print_error(f"a collective did not complete in {limit}: {stall}")
            return
        remedy = "raise the time-out of init_process_group"
        cause = peers.explain(symptom, timeout_s=self._timeout_s, remedy=remedy)
        if cause is not None:
            self._print_error(cause)

    def _handle_sigterm(self) -> None:
        """Print the cause if training had stalled, and write the windows that are complete on all ranks."""
        if self._watch is not None and self._watch.reason is not None:
            self._print_error(self._watch.reason)
        self._session.write(is_last=True)

    def _print_error(self, message: str) -> None:
        name = f"rank {self._session.launch.rank} on {self._session.host}"
        print(f"bench: error: {name}: {message}", file=sys.stderr, flush=True)


class SigtermHandler:
    """Call ``callback`` once on SIGTERM (sent by time limits and scancel), even if a collective hangs.

    Python cannot run signal handlers while a collective hangs in C++. However, Python's C code still writes
    the signal's number to the wake-up descriptor (:func:`signal.set_wakeup_fd`). A thread reads the number,
    calls ``callback``, and then lets SIGTERM end the process. If the program has its own handler for
    SIGTERM, that handler is kept and decides whether the process ends.

    The class has no effect outside of the main thread, or if the program already uses a wake-up descriptor.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._pid = os.getpid()
        self._was_default = False
        self._mask: set[int] = set()
        self._has_run = threading.Lock()
        self._is_active = threading.current_thread() is threading.main_thread() and self._install()
        if self._is_active:
            os.register_at_fork(
                before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._in_child
            )
            self._thread = threading.Thread(target=self._listen, name="bench-sigterm", daemon=True)
            self._thread.start()
            atexit.register(self._wait)
        else:
            self._close()

    def remove(self) -> None:
        """Restore the process's signal handling."""
        if not self._is_active or os.getpid() != self._pid:
            return
        self._is_active = False
        atexit.unregister(self._wait)
        is_restored = self._restore()
        with suppress(BlockingIOError):  # the pipe is full of signals that came after SIGTERM
            self._writer.send(_QUIT)
        self._thread.join(GRACE_S)
        if is_restored and not self._thread.is_alive():
            self._close()

    def _close(self) -> None:
        self._reader.close()
        self._writer.close()

    def _install(self) -> bool:
        handler = signal.getsignal(signal.SIGTERM)
        if handler in (None, signal.SIG_IGN):
            return False
        former = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if former != -1:
            signal.set_wakeup_fd(former)
            return False
        if handler is signal.SIG_DFL:
            self._was_default = True
            signal.signal(signal.SIGTERM, self._on_signal)
        return True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """End the process from the main thread, unless the listening thread is already ending it."""
        self._end()

    def _restore(self) -> bool:
        """Restore the wake-up descriptor and handler; return False outside of the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return False
        former = signal.set_wakeup_fd(-1)
        if former not in (self._writer.fileno(), -1):
            signal.set_wakeup_fd(former)  # another library has set its own descriptor since
        if self._is_installed():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return True

    def _is_installed(self) -> bool:
        return self._was_default and signal.getsignal(signal.SIGTERM) == self._on_signal

    def _before_fork(self) -> None:
        """Block SIGTERM during a fork; otherwise a SIGTERM to the new child would reach its parent."""
        if self._is_active:
            self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _after_fork(self) -> None:
        if self._is_active:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _in_child(self) -> None:
        if self._is_active:
            self._is_active = False
            self._restore()
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _listen(self) -> None:
        while self._is_active:
            numbers = self._reader.recv(64)
            if not numbers or not self._is_active:
                break
            if signal.SIGTERM in numbers:
                self._end()
                break

    def _end(self) -> None:
        if not self._has_run.acquire(blocking=False):
            return  # the other thread is about to end the process
        self._call_back()
        if self._is_installed():
            _die_of(signal.SIGTERM)

    def _wait(self) -> None:
        """Let a callback that has begun end: Python stops its thread when the main thread ends.

        The main thread ends meanwhile if SIGTERM also ends the rank with which it communicates.
        """
        if self._has_run.locked():
            self._thread.join(GRACE_S)

    def _call_back(self) -> None:
        """Run the callback with a time limit, because the callback can hang."""
        thread = threading.Thread(target=self._callback, daemon=True)
        thread.start()
        thread.join(GRACE_S)
        for stream in (sys.stdout, sys.stderr):
            with suppress(RuntimeError, ValueError, OSError):  # the signal interrupted a write
                stream.flush()


def _die_of(number: signal.Signals) -> None:
    """End the process by the default action of a signal, from any thread."""
    library: Any = ctypes.CDLL(None)
    library.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    library.signal.restype = ctypes.c_void_p
    library.signal(int(number), None)  # SIG_DFL is the null pointer
    os.kill(os.getpid(), number)
