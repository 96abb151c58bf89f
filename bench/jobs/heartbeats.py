"""Find out from the heartbeats of a run's ranks whether they hung, and in which step."""

from __future__ import annotations

from collections import Counter
from datetime import datetime

from ddp_scaling_bench.measure.heartbeat import CLOSED, interval_s, read_beats
from ddp_scaling_bench.run_folder import RunFolder
from ddp_scaling_bench.units import number_ranges

from ..study.conditions import parse_moment
from ..study.reasons import RankStep, StalledRanks

#: Ranks hang if they do not go on for longer than this, and than this many mean steps.
_LEAST_S, _STEPS = 10.0, 20


def stalled_ranks(folder: RunFolder, ranks: int, *, limited: datetime | None) -> StalledRanks | None:
    """Return where ranks did not go on, or None if they did, or if it is not known.

    Args:
        folder: the folder of an attempt.
        ranks: the number of ranks.
        limited: when the run reached its time limit. None if ranks lost each other: the cause is then a rank
            that had closed its recorder, and the others did not wait for it for long.
    """
    beats = {beat.rank: beat for beat in read_beats(folder.path) if 0 <= beat.rank < ranks}
    running = [beat for beat in beats.values() if beat.stage != CLOSED]
    changed_s = max((beat.changed for beat in running), default=0.0)
    since = parse_moment(changed_s)
    if not running or since is None:
        return None
    known = {rank: (beat.step, beat.stage, beat.host) for rank, beat in beats.items()}
    places = [known.get(rank, (0, "", "")) for rank in range(ranks)]
    counts = Counter(place[:2] for place in places)
    others = max(counts, key=lambda place: (place[1] != CLOSED, counts[place], place))
    groups: dict[tuple[int, str, str], list[int]] = {}
    for rank, place in enumerate(places):
        if place[:2] != others:
            groups.setdefault(place, []).append(rank)
    named = ((number_ranges(group), *place) for place, group in groups.items())
    behind = tuple(RankStep(which, host, step, stage) for which, step, stage, host in named)
    if limited is None:
        is_stalled = any(one.stage == CLOSED and one.step < others[0] for one in behind)
    else:
        slowest_s = max((beat.time - beat.first_time) / max(beat.completed, 1) for beat in running)
        limit_s = max(_LEAST_S, _STEPS * slowest_s) + interval_s(ranks)
        is_stalled = limited.timestamp() - changed_s > limit_s
    if not is_stalled:
        return None
    return StalledRanks(
        since=f"{since:%H:%M:%S} UTC",
        behind=behind,
        others=others[0],
        stage=others[1],
        at_limit=limited is not None,
    )
