"""Report the cause and save complete windows when training hangs, fails or receives SIGTERM."""

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

from bench.measure.peers import Peers, Symptom, error_line, symptom_of
from bench.measure.ranks import RankFacts
from bench.measure.torch_internals import collective_timeout_s
from bench.record.hang_watch import HangWatch, Progress
from bench.record.session import Session

#: Time limit of the SIGTERM handler. Slurm and torchrun send SIGKILL 30 s after SIGTERM.
GRACE_S = 4.0
_QUIT = b"\0"


class FailureReporter:
    """Reports hangs and failures of the training loop on one rank, from its first step to its end."""

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
        """Write complete windows and print a warning, because the training may only be slow."""
        self._session.write()
        if is_surprising:
            self._session.warn(message)

    def explain(self, error: BaseException) -> None:
        """Print why the program fails, and report the cause to the other ranks or read it from them."""
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
    """Calls ``callback`` once on SIGTERM (sent by time limits and scancel), even if a collective hangs.

    Python cannot run signal handlers while a collective hangs in C++. However, Python's C code still writes
    the signal's number to the wake-up descriptor (:func:`signal.set_wakeup_fd`). A thread reads it, calls
    ``callback``, and then lets SIGTERM end the process. If the program has its own handler for SIGTERM, that
    handler is kept and decides whether the process ends.

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
        else:
            self._close()

    def remove(self) -> None:
        """Restore the process's signal handling."""
        if not self._is_active or os.getpid() != self._pid:
            return
        self._is_active = False
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
        """Block SIGTERM during a fork, because a new child would still write to its parent's descriptor."""
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

    def _call_back(self) -> None:
        """Run the callback with a time limit, because it may hang as well."""
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
