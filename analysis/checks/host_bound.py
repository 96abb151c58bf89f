"""Find the ranks whose host is the limit: it launches work on the GPU more slowly than the GPU executes it.

Host and device run at the same time, so a step takes as long as the slower of the two. The host is the limit
if the step is as long as the host's own work (``host_time_sec``): loading data and launching. If the device
is the limit, the host gets further ahead of it in each step (``launch_lead_time_sec``), until the queue is
full. A rank that waits for a slower host waits on its device, so its own host is ahead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from analysis.data.columns import grouped
from analysis.data.load import RankOfRun
from analysis.stats.decompose import mean

#: The host is the limit if loading and launching take at least this fraction of a step,
_WORKS_FROM = 0.95
#: and if it gets ahead of the device by at most this fraction of a step in each step.
_AHEAD_UP_TO = 0.02


@dataclass(frozen=True)
class HostBound:
    """A rank whose host is the limit, with means over the epochs, in seconds per step."""

    run_id: str
    cell_id: str
    rank: int
    host: str
    launch_s: float
    load_s: float
    step_s: float


def host_bound(ranks: Iterable[RankOfRun]) -> list[HostBound]:
    """Return the ranks whose host is the limit because of its launches, and not because of loading data.

    A rank of which a time is unknown is none of them.
    """
    found = []
    for own in grouped(ranks, lambda row: (row.run_id, row.rank)).values():
        first, launch_s, host_s, ahead_s, step_s = (
            own[0],
            mean(row.launch_time_sec for row in own),
            mean(row.host_time_sec for row in own),
            mean(row.launch_lead_time_sec for row in own),
            mean(row.window_time_sec / row.steps if row.steps else math.nan for row in own),
        )
        load_s = round(host_s - launch_s, 9)
        works = host_s >= _WORKS_FROM * step_s and launch_s >= load_s
        if works and ahead_s <= _AHEAD_UP_TO * step_s:
            where = (first.run_id, first.cell_id, first.rank, first.host)
            found.append(HostBound(*where, launch_s, load_s, step_s))
    return found
