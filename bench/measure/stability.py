"""Whether a warm-up has warmed up."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

#: The first steps of all: DDP rebuilds its buckets in the second, allocators fill.
_UNLIKE_THE_REST = 2
#: How far the medians of the last steps and of those before them may be apart.
_STABLE_WITHIN = 0.10


def is_stable(times: Sequence[float]) -> bool:
    """Tell whether the medians of the later and the earlier half agree, without the first two steps."""
    kept = times[_UNLIKE_THE_REST:]
    half = len(kept) // 2
    if half < 1:
        return False
    earlier, later = median(kept[-2 * half : -half]), median(kept[-half:])
    return abs(later / earlier - 1) <= _STABLE_WITHIN
