"""Compute in a second process while this one goes on."""

from __future__ import annotations

import gc
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
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
    # A collection would write to all objects, and so copy the memory that both share. The objects stay
    # frozen: a command ends soon after.
    gc.freeze()
    try:
        with suppress(OSError), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads of Arrow exist, but do nothing
            context.Process(target=_send, args=(reader, writer, work), daemon=True).start()
    finally:
        writer.close()

    def finish() -> T:
        with reader, suppress(EOFError, OSError):
            return reader.recv()  # type: ignore[no-any-return]
        return work()

    return finish


def share(tasks: Sequence[Callable[[], T]]) -> Callable[[], list[T]]:
    """Start a second process that does one task after another; return what does the others here.

    The returned function returns the results of all tasks, which must be picklable. Call it once. There are
    at most 256 tasks.
    """
    reader, writer = os.pipe()
    os.write(writer, bytes(range(len(tasks))))  # each number is read by one of the processes
    os.close(writer)

    def work() -> dict[int, T]:
        return {number[0]: tasks[number[0]]() for number in iter(partial(os.read, reader, 1), b"")}

    others = in_background(work)

    def finish() -> list[T]:
        try:
            results = work() | others()
        finally:
            os.close(reader)
        # If the second process was killed, its tasks remain.
        return [results[number] if number in results else task() for number, task in enumerate(tasks)]

    return finish


def _send(reader: Connection, writer: Connection, work: Callable[[], object]) -> None:
    reader.close()  # if the first process is killed, writing fails, and this one ends, too
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the first one, and with it this one
    gc.disable()
    with suppress(Exception):  # the first process meets the same error, and says where
        writer.send(work())
