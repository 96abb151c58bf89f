"""Compute in a second process while this one goes on."""

from __future__ import annotations

import gc
import signal
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T]) -> Callable[[], T]:
    """Start ``work`` in a second process, which inherits this one's memory; return what returns its result.

    If the process cannot start or is killed, for example because the node lacks memory, or if ``work`` raises
    an error there, the returned function calls ``work`` itself; so it does in a second process. Call it once.
    The result must be picklable.
    """
    if current_process().daemon:
        return work
    context = get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    gc.freeze()  # a collection would write to all objects, and so copy the memory that both share
    try:
        with suppress(OSError), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads of Arrow exist, but do nothing
            context.Process(target=_send, args=(reader, writer, work), daemon=True).start()
    finally:
        writer.close()

    def finish() -> T:
        try:
            with reader, suppress(EOFError, OSError):
                return reader.recv()  # type: ignore[no-any-return]
        finally:
            gc.unfreeze()
        return work()

    return finish


def _send(reader: Connection, writer: Connection, work: Callable[[], object]) -> None:
    reader.close()  # if the first process is killed, writing fails, and this one ends, too
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the first one, and with it this one
    gc.disable()
    with suppress(Exception):  # the first process meets the same error, and says where
        writer.send(work())
