"""The same work for each of many runs: one after another, or many at once where their files answer slowly."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

#: After so many it is known how fast the files are.
FIRST = 32
#: A file system is slow where the work waits for it for more than this share of the time.
WAITING = 0.7
AT_ONCE = 8


def each(work: Callable[..., None], todo: Sequence[tuple[Any, ...]]) -> None:
    """Call ``work`` with each tuple of arguments, in order; where it mostly waits, from several threads.

    On a shared file system a run's dozen operations take milliseconds, and many at once take hardly
    longer than one. On a local disk threads would only get into each other's way.

    Raises:
        Exception: the first that ``work`` raised; what is not begun then is left out.
    """
    began, worked = time.perf_counter(), time.thread_time()
    for arguments in todo[:FIRST]:
        work(*arguments)
    took_s, worked_s = time.perf_counter() - began, time.thread_time() - worked
    rest = todo[FIRST:]
    if took_s - worked_s > WAITING * took_s:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda arguments: work(*arguments), rest))
        return
    for arguments in rest:
        work(*arguments)
