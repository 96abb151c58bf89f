"""The same work for each of many runs: one after another, or many at once where their files answer slowly."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

#: After so many it is known how the files answer.
FIRST = 32
#: A shared file system lets a thread wait at nearly every operation, a local disk seldom.
WAITS_EACH = 2
AT_ONCE = 8


def each(work: Callable[..., None], todo: Sequence[tuple[Any, ...]]) -> None:
    """Call ``work`` with each tuple of arguments, in order; where it waits often, from several threads.

    On a shared file system a run's dozen operations take milliseconds, and many at once take hardly
    longer than one. On a local disk threads would only get into each other's way.

    Raises:
        Exception: the first that ``work`` raised; what is not begun then is left out.
    """
    before = _waits()
    for arguments in todo[:FIRST]:
        work(*arguments)
    rest = todo[FIRST:]
    if _waits() - before > WAITS_EACH * FIRST:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda arguments: work(*arguments), rest))
        return
    for arguments in rest:
        work(*arguments)


def _waits() -> int:
    """Return how often this thread has given up the processor by itself: it waited for something."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
