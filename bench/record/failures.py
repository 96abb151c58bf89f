"""The last words of a process that is asked to end: SIGTERM, as time limits and scancel send it.

A rank whose collective hangs sits in C++, where Python runs no handler. Python's own part of a
handler, in C, still writes the signal's number to a descriptor; a thread reads it there, has the last words
said, and lets the process die of the signal as it would have done without us.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import torch

from bench.measure.environment import RankFacts
from bench.measure.exchange import StoreExchange
from bench.measure.peers import Symptom, error_line, symptom_of
from bench.record.hang_watch import Progress, Watch, timeout_s
from bench.record.session import Session

#: How long last words may take. Slurm waits 30 s before it kills, and torchrun as long.
GRACE_S = 4.0
_QUIT = b"\0"


class Ending:
    """Calls ``last_words`` once when SIGTERM comes; a handler of the program's own stays and decides.

    Without effect outside of the main thread, and where another user of
    :func:`signal.set_wakeup_fd` was first.
    """

    def __init__(self, last_words: Callable[[], None]) -> None:
        self._last_words = last_words
        self._ears, self._bell = socket.socketpair()
        self._bell.setblocking(False)
        self._pid = os.getpid()
        self._was_default = False
        self._mask: set[int] = set()
        self._is_spoken = threading.Lock()
        self._listens = threading.current_thread() is threading.main_thread() and self._install()
        if self._listens:
            os.register_at_fork(
                before=self._forking, after_in_parent=self._has_forked, after_in_child=self._was_forked
            )
            self._listener = threading.Thread(target=self._listen, name="bench-ending", daemon=True)
            self._listener.start()
        else:
            self._close()

    def withdraw(self) -> None:
        """Leave the process as it was."""
        if not self._listens or os.getpid() != self._pid:
            return
        self._listens = False
        is_restored = self._restore()
        with suppress(BlockingIOError):  # full of other signals, after the one that ended the listening
            self._bell.send(_QUIT)
        self._listener.join(GRACE_S)
        if is_restored and not self._listener.is_alive():
            self._close()

    def _close(self) -> None:
        self._ears.close()
        self._bell.close()

    def _install(self) -> bool:
        handler = signal.getsignal(signal.SIGTERM)
        if handler in (None, signal.SIG_IGN):
            return False
        former = signal.set_wakeup_fd(self._bell.fileno(), warn_on_full_buffer=False)
        if former != -1:
            signal.set_wakeup_fd(former)
            return False
        if handler is signal.SIG_DFL:
            self._was_default = True
            signal.signal(signal.SIGTERM, self._noted)
        return True

    def _noted(self, number: int, frame: FrameType | None) -> None:
        """End the process from the main thread, where that can, and nobody listens any more."""
        self._end()

    def _restore(self) -> bool:
        """Take the bell off, if this thread may; return whether nothing rings it any more."""
        if threading.current_thread() is not threading.main_thread():
            return False
        former = signal.set_wakeup_fd(-1)
        if former not in (self._bell.fileno(), -1):
            signal.set_wakeup_fd(former)  # another library's, by now
        if self._is_ours():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return True

    def _is_ours(self) -> bool:
        return self._was_default and signal.getsignal(signal.SIGTERM) == self._noted

    def _forking(self) -> None:
        """Keep signals away from a child that is not yet itself: it would ring its parent's bell."""
        if self._listens:
            self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _has_forked(self) -> None:
        if self._listens:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _was_forked(self) -> None:
        if self._listens:
            self._listens = False
            self._restore()
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _listen(self) -> None:
        while self._listens:
            rung = self._ears.recv(64)
            if not rung or not self._listens:
                break
            if signal.SIGTERM in rung:
                self._end()
                break

    def _end(self) -> None:
        if not self._is_spoken.acquire(blocking=False):
            return  # the other thread is about to end the process
        self._speak()
        if self._is_ours():
            _die(signal.SIGTERM)

    def _speak(self) -> None:
        """Say the last words in a bounded time: what they need may hang, too."""
        speaker = threading.Thread(target=self._last_words, daemon=True)
        speaker.start()
        speaker.join(GRACE_S)
        for stream in (sys.stdout, sys.stderr):
            with suppress(RuntimeError, ValueError, OSError):  # the signal came while it was written to
                stream.flush()


def _die(number: signal.Signals) -> None:
    """Die of a signal, as a process does that never handled it; any thread may do so."""
    library: Any = ctypes.CDLL(None)
    library.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    library.signal.restype = ctypes.c_void_p
    library.signal(int(number), None)  # SIG_DFL is the null pointer
    os.kill(os.getpid(), number)


# What stands beside a loop in case it does not end well: the reason in words, and the windows on disk.


class Guard:
    """Watches one rank's loop from its first step to its end.

    Args:
        session: this rank among all others.
        device: where the model computes.
        progress: tells how far the loop is.
    """

    def __init__(
        self,
        session: Session,
        *,
        device: torch.device,
        progress: Callable[[], Progress],
    ) -> None:
        self._session = session
        self._exchange = session.exchange
        self._timeout_s = timeout_s(device)
        self._watch: Watch | None = None
        if isinstance(self._exchange, StoreExchange) and session.place.world_size > 1:
            self._watch = Watch(
                progress,
                self._exchange.apart(),
                rank=session.place.rank,
                world_size=session.place.world_size,
                listener=self,
                # NCCL's own watchdog aborts the process; gloo raises, and there is time for words.
                deadline_s=self._timeout_s if session.backend == "nccl" else None,
            )
        self._ending = Ending(self._last_words)

    def withdraw(self) -> None:
        """Watch no longer, and leave the process as it was."""
        if self._watch is not None:
            self._watch.stop()
        self._ending.withdraw()

    # -- what the watch tells -------------------------------------------------------------

    def stalled(self, words: str, *, is_surprising: bool) -> None:
        """Write what is whole, and warn: the training may be slow, and nothing else."""
        self._session.look()
        if is_surprising:
            self._session.warn(words)

    def overdue(self, words: str) -> None:
        """Say why, while there is time."""
        self._say(words)

    # -- how it ends ----------------------------------------------------------------------

    def explain(self, error: BaseException) -> None:
        """Say why the program fails, and tell the other ranks, or say what they tell."""
        facts = self._facts()
        if not isinstance(self._exchange, StoreExchange) or len(facts) < 2:
            return
        peers, symptom = self._exchange.peers(facts), symptom_of(error)
        if symptom is None:
            words = error_line(error)
            peers.tell(words)
            self._say(f"{words}; see the traceback above")
            return
        seen = None if self._watch is None else self._watch.reason
        if seen is not None and symptom is Symptom.TIMED_OUT:
            limit = "its time-out" if self._timeout_s is None else f"{self._timeout_s:g} s"
            self._say(f"a collective did not complete in {limit}: {seen}")
            return
        longer = "raise the time-out of init_process_group"
        told = peers.explain(symptom, timeout_s=self._timeout_s, longer=longer)
        if told is not None:
            self._say(told)

    def _last_words(self) -> None:
        """Say what was waited for, and have every window written that is whole on all ranks."""
        if self._watch is not None and self._watch.reason is not None:
            self._say(self._watch.reason)
        self._session.look(is_last=True)

    def _facts(self) -> list[RankFacts]:
        contents = self._exchange.read("facts")
        return [] if contents is None else [RankFacts(**one["facts"]) for one in contents]

    def _say(self, words: str) -> None:
        place = self._session.place
        who = f"rank {place.rank} on {self._session.host}"
        print(f"bench: error: {who}: {words}", file=sys.stderr, flush=True)
