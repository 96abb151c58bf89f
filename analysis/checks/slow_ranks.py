"""Detect and describe late ranks (stragglers), slow nodes and hosts, and unequal samples or windows of ranks.

Useful time is a rank's step without exposed communication
(:attr:`analysis.data.load.RankOfRun.useful_s`). A late rank has more useful time than the others. The others
spend the difference waiting, which counts as exposed communication. Stragglers are therefore detected by
useful time, so that they are not mistaken for slow communication. The typical useful time is the lower median
over the ranks, so up to half of the ranks (one node of two) can be late.

Nodes are only compared with the other nodes of the same run: runs differ for reasons that no node causes.
All functions read ranks.csv of at most :data:`analysis.stats.measured.MAX_RANKS_FILES` runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from statistics import median, median_low
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy import special

from analysis.checks.assessment import CheckedStudy, check
from analysis.data.columns import RunRow, distinct, first_of_cells, grouped, part_title
from analysis.data.load import RankOfRun
from analysis.stats.decompose import USEFUL_PARTS, mean
from analysis.stats.estimate import MIN_RUNS
from analysis.stats.measured import ranks_sample
from bench.matrix.schedulers import SCHEDULERS
from ddp_scaling_bench.finding import Finding, Severity
from ddp_scaling_bench.units import (
    MISSING,
    clauses,
    count,
    known,
    listed,
    names,
    seconds,
    short_name,
    short_percent,
)

#: A rank is late if its useful time exceeds the typical one by this share of the step, in every epoch. If
#: most of the excess is outside all timers, the mean over the epochs and more than half of them are enough:
#: some epochs can lack work that a rank does every N steps.
LATE_FROM = 0.05
#: Ranks that wait for each other have equal steps. If their steps differ by more than this factor, a rank has
#: stopped its clock alone (it paused the recorder), and the ranks cannot be compared.
COMPARABLE_STEPS = 1.1
#: Minimum ratio of a slow node's useful time to that of the other nodes.
SLOW_NODE = 1.03
#: Probability of reporting a slow node in a study without one, if the noise is normal on logarithms and
#: independent between nodes and runs. The limit is 1 %; the difference allows for noise with heavier tails.
SLOW_NODE_LEVEL = 0.005
#: Numbers of samples count as equal if they differ by at most this fraction.
SAMPLES_APART = 0.02
#: The windows of two ranks are equally long if they differ by at most this many steps, or by this fraction.
WINDOW_STEPS, WINDOWS_APART = 2, 0.1
#: Maximum number of cells with means of ranks and nodes.
MAX_CELLS = 2
_MAX_DESCRIBED = 2
#: The host is the limit if loading and launching take at least this fraction of a step, and if it gets ahead
#: of the device by at most this fraction of a step in each step.
_WORKS_FROM, _AHEAD_UP_TO = 0.95, 0.02
#: An excess is in one part of the step if that part has this fraction of it.
_WHOLE_EXCESS = 0.9

# -- samples and windows --------------------------------------------------------------


class UnevenSamples(Finding, kind="unequal-samples"):
    """Cells in which ``rank`` processes ``ratio`` times the samples of ``other_rank``."""

    heading = "Unequal samples"
    remedy = "Split the data evenly, for example with DistributedSampler."
    severity: Severity = "error"
    rank: int
    other_rank: int
    ratio: float

    def _message(self) -> str:
        return (
            f"Rank {self.rank} processes {self.ratio:.3g} times the samples of rank {self.other_rank} "
            f"({names(self.subject)}): the load balance measures this split of the data."
        )


def unequal_samples(ranks: Iterable[RankOfRun]) -> list[tuple[RankOfRun, RankOfRun, float]]:
    """Return the ranks with the most and the fewest samples, and their ratio, if they differ by over 2 %."""
    found = []
    for own in grouped((row for row in ranks if known(row.samples)), _run).values():
        by_rank = grouped(own, lambda row: row.rank).values()
        totals = [(sum(row.samples for row in rows), rows[0]) for rows in by_rank]
        (most, first), (least, last) = (choose(totals, key=itemgetter(0)) for choose in (max, min))
        found.append((first, last, most / max(least, 1e-9)))
    return [one for one in found if one[2] > 1 + SAMPLES_APART]


_run = attrgetter("run_id")


def _cells_of(ranks: Iterable[RankOfRun]) -> set[str]:
    return {row.cell_id for row in ranks}


@check(
    "samples",
    least_ranks=2,
    possible=lambda about: _cells_of(row for row in about.rank_rows if known(row.samples)),
)
def _uneven_samples(about: CheckedStudy) -> Iterator[UnevenSamples]:
    if odd := unequal_samples(about.rank_rows):
        most, least, ratio = max(odd, key=itemgetter(2))
        cells = distinct(first.cell_id for first, _, _ in odd)
        yield UnevenSamples(subject=cells, rank=most.rank, other_rank=least.rank, ratio=ratio)


class PausedRank(Finding, kind="unequal-windows"):
    """Runs in which a rank stopped its clock alone: the seconds of both ranks' windows."""

    heading = "A rank paused alone"
    remedy = (
        "Pause all ranks: call the recorder's pause() on each rank, with a barrier at the end of the "
        "pause (docs/recorder.md)."
    )
    severity: Severity = "error"
    rank: int
    other_rank: int
    seconds: tuple[float, float]
    runs: tuple[str, ...] = ()

    def _message(self) -> str:
        short, long = map(seconds, self.seconds)
        return (
            f"For the same steps, rank {self.rank} measured {short} and rank {self.other_rank} {long} "
            f"({names(self.subject)}): rank {self.rank} stopped its clock, for example to evaluate or write "
            "a checkpoint, and the others waited for it."
        )


def unequal_windows(ranks: Iterable[RankOfRun]) -> list[tuple[RankOfRun, RankOfRun]]:
    """Return the ranks with the shortest and the longest throughput window, where they differ.

    The difference is more than :data:`WINDOW_STEPS` steps and more than :data:`WINDOWS_APART` of the shorter
    window, and a longer pause of the shorter one explains at least half of it. Ranks that train together need
    equally long for a window, except for about one step. If a pause makes the window of a rank far shorter,
    the others have waited for it. Without a pause, a descheduled step can make the difference.

    The result has the epoch with the largest difference of each run, the largest difference first.
    """
    found: dict[str, tuple[float, RankOfRun, RankOfRun]] = {}
    timed = [row for row in ranks if row.window_time_sec > 0 and row.steps > 0]
    for (run_id, _), own in grouped(timed, lambda row: (row.run_id, row.epoch)).items():
        short, long = (choose(own, key=lambda row: row.window_time_sec) for choose in (min, max))
        more_s = long.window_time_sec - short.window_time_sec
        paused_s = short.paused_time_sec - long.paused_time_sec
        allowed = max(WINDOW_STEPS / short.steps, WINDOWS_APART)
        is_odd = allowed * short.window_time_sec < more_s <= 2 * paused_s
        if is_odd and (run_id not in found or more_s > found[run_id][0]):
            found[run_id] = (more_s, short, long)
    return [(short, long) for _, short, long in sorted(found.values(), key=lambda one: -one[0])]


@check(
    "windows",
    least_ranks=2,
    possible=lambda about: _cells_of(
        row for row in about.rank_rows if known(row.window_time_sec) and known(row.steps)
    ),
)
def _paused_ranks(about: CheckedStudy) -> Iterator[PausedRank]:
    if odd := unequal_windows(about.rank_rows):
        rank, other = odd[0]
        yield PausedRank(
            subject=distinct(short.cell_id for short, _ in odd),
            rank=rank.rank,
            other_rank=other.rank,
            seconds=(rank.window_time_sec, other.window_time_sec),
            runs=tuple(short.run_id for short, _ in odd),
        )


# -- late ranks -----------------------------------------------------------------------


def _beyond_typical(values: Sequence[float]) -> list[float]:
    """Return values minus their lower median; unknown values are NaN."""
    typical = median_low([value for value in values if known(value)] or [math.nan])
    return [value - typical for value in values]


@dataclass(frozen=True, slots=True)
class Straggler:
    """A late rank of a run, or the means over the runs of a cell in which it is late.

    Attributes:
        ranks: number of ranks of the run, late or not.
        host_ranks: number of those on the rank's host.
        excess_s: useful time beyond the typical one, per step.
        share: this excess as a fraction of the step.
        part: part of the step with most of the excess.
        part_share: fraction of the excess in this part.
        late_in: number of the cell's ``runs`` in which the rank is late.
        whole_node: true if all ranks of the node are late.
        of_node: true if the node is at fault, not the rank; None if the study does not distinguish them, and
            in the results of :func:`stragglers`.
        samples: its samples divided by those of the rank with the fewest; 1 if all are equal.
        one_part: true if the excess is in one part of the computation only.
    """

    run_id: str
    cell_id: str
    rank: int
    host: str
    ranks: int
    host_ranks: int
    excess_s: float
    share: float
    part: str
    part_share: float
    late_in: int = 1
    runs: int = 1
    whole_node: bool = False
    of_node: bool | None = None
    samples: float = 1.0
    one_part: bool = False


def stragglers(ranks: Iterable[RankOfRun]) -> list[Straggler]:
    """Return the late ranks of each run (see :data:`LATE_FROM`); without an attribution window, none."""
    timed = [row for row in ranks if known(row.useful_s)]
    return [late for own in grouped(timed, _run).values() for late in _late_in(own)]


def _late_in(run: Sequence[RankOfRun]) -> Iterator[Straggler]:
    #: By rank, in the epochs in which the ranks can be compared: its row, the longest step, and the excess as
    #: a share of this step.
    by_rank: dict[int, list[tuple[RankOfRun, float, float]]] = {}
    for own in grouped(run, lambda row: row.epoch).values():
        steps_s = [row.step_time_sec for row in own]
        if 0 < max(steps_s) <= COMPARABLE_STEPS * min(steps_s):
            beyond_s = _beyond_typical([row.useful_s for row in own])
            for row, more_s in zip(own, beyond_s, strict=True):
                by_rank.setdefault(row.rank, []).append((row, max(steps_s), more_s / max(steps_s)))
    hosts = Counter(epochs[0][0].host for epochs in by_rank.values())
    # The excess is that of the means over the epochs: a rank may be faster than the others in some of them.
    excesses_s, *parts = (
        _beyond_typical([mean(getattr(row, name) for row, _, _ in epochs) for epochs in by_rank.values()])
        for name in ("useful_s", *USEFUL_PARTS.values())
    )
    for (rank, epochs), excess_s, *of_parts in zip(by_rank.items(), excesses_s, *parts, strict=True):
        share = excess_s / mean(longest_s for _, longest_s, _ in epochs)
        most_s, part = max(
            zip(of_parts, USEFUL_PARTS, strict=True), key=lambda one: one[0] if known(one[0]) else -math.inf
        )
        part_share = most_s / excess_s if excess_s else math.inf
        late_in = sum(one >= LATE_FROM for *_, one in epochs) / len(epochs)
        now_and_then = part == "other" and part_share >= 0.5 and share >= LATE_FROM and late_in > 0.5
        if late_in == 1 or now_and_then:
            row = epochs[0][0]
            about = (row.run_id, row.cell_id, rank, row.host, len(by_rank), hosts[row.host])
            yield Straggler(*about, excess_s, share, part, part_share)


def _late_ranks(found: Iterable[Straggler], runs: Iterable[RunRow]) -> list[Straggler]:
    """Return the ranks that are late in more than half of their cell's ``runs``, longest excess first."""
    amounts = Counter(run.cell_id for run in runs)
    ranks = []
    for own in grouped(found, lambda one: (one.cell_id, one.rank, one.host)).values():
        means: dict[str, Any] = {
            name: mean(getattr(one, name) for one in own) for name in ("excess_s", "share", "part_share")
        }
        late = replace(own[0], late_in=len(own), runs=amounts[own[0].cell_id], **means)
        ranks.append(replace(late, host_ranks=max(one.host_ranks for one in own)))
    return sorted((one for one in ranks if 2 * one.late_in > one.runs), key=lambda one: -one.excess_s)


@dataclass(frozen=True, kw_only=True)
class LateNode:
    """A node with late ranks, described by the cell in which they cause the longest wait.

    Attributes:
        ranks: number of ranks on the node; ``late`` of them are late, and ``rank`` is the latest one.
        excess_s: useful time of the late ranks beyond the typical one, per step; ``share`` is this as a
            fraction of the step, and ``part_share`` the fraction of the excess in ``part`` of the step.
        late_in: the number of the cell's ``runs`` in which the latest rank is late.
        more_cells: the number of other cells in which ranks of the node are late.
    """

    host: str
    ranks: int
    rank: int
    late: int
    excess_s: float
    share: float
    part: str
    part_share: float
    cell: str
    late_in: int
    runs: int
    more_cells: int = 0

    def __str__(self) -> str:
        on = f"on {short_name(self.host)}"
        if self.late == 1:
            who = f"rank {self.rank} {on} takes"
        elif self.late < self.ranks:
            who = f"{self.late} of the {self.ranks} ranks {on} take"
        else:
            who = f"all {self.ranks} ranks {on} take"
        is_whole = _WHOLE_EXCESS <= self.part_share <= 1 / _WHOLE_EXCESS
        where = "in" if is_whole else "mostly in" if self.part_share >= 0.5 else "in several parts, most in"
        likewise = f", and likewise in {count(self.more_cells, 'more cell')}" if self.more_cells else ""
        return (
            f"{who} {seconds(self.excess_s)} per step longer than the others ({short_percent(self.share)} of "
            f"the step, {where} {part_title(self.part)}), in {self.late_in} of {count(self.runs, 'run')} of "
            f"{short_name(self.cell)}{likewise}"
        )


class LateRanks(Finding, kind="straggler"):
    """Late ranks.

    Attributes:
        nodes: all nodes with late ranks, longest wait first; the first ones are described by ``late``.
    """

    heading = "Late ranks"
    nodes: tuple[str, ...]
    late: tuple[LateNode, ...]

    def _message(self) -> str:
        more = len(self.nodes) - len(self.late)
        others = f"; and likewise on {count(more, 'more node')}" if more else ""
        return (
            f"On average, {clauses([*map(str, self.late)])}{others}. The others wait for these ranks; such "
            "waiting is not slow communication."
        )


def late_nodes_of(found: Sequence[Straggler], runs: Iterable[RunRow]) -> Iterator[LateRanks]:
    """Yield the finding about the late nodes, longest wait first; ``runs`` are those that were read.

    The first nodes are described by their late ranks in the cell in which they cause the longest wait.
    """
    if ranks := _late_ranks(found, runs):
        nodes = grouped(ranks, lambda one: one.host)
        late = tuple(_late_node(own) for own in [*nodes.values()][:_MAX_DESCRIBED])
        yield LateRanks(subject=distinct(one.cell_id for one in ranks), nodes=tuple(nodes), late=late)


def _late_node(late: Sequence[Straggler]) -> LateNode:
    """Describe a node by its late ranks in all cells, which are sorted by their excess."""
    cells = grouped(late, lambda one: one.cell_id)
    first, worst = late[0], cells[late[0].cell_id]
    return LateNode(
        host=first.host,
        ranks=first.host_ranks,
        rank=first.rank,
        late=len(worst),
        excess_s=mean(one.excess_s for one in worst),
        share=mean(one.share for one in worst),
        part=first.part,
        part_share=mean(one.part_share for one in worst if one.part == first.part),
        cell=first.cell_id,
        late_in=first.late_in,
        runs=first.runs,
        more_cells=len(cells) - 1,
    )


# -- slow nodes -----------------------------------------------------------------------


@dataclass(frozen=True)
class SlowNode:
    """A slow node: the number of its runs, and its mean excess over the other nodes."""

    host: str
    runs: int
    excess: float


class SlowNodes(Finding, kind="slow-node"):
    """Nodes that are slow over all their runs; the largest cell needs ``needed`` other nodes."""

    heading = "Slow node"
    slow: tuple[SlowNode, ...]
    advice: Literal["advice-named", "advice-few", "advice-enough"]
    needed: int

    def _message(self) -> str:
        slow = [
            f"{short_name(one.host)} by {short_percent(one.excess)} in {count(one.runs, 'run')}"
            for one in self.slow
        ]
        these, them = ("this node", "it") if len(self.slow) == 1 else ("these nodes", "them")
        remain = f"{count(self.needed, 'other node')} remain for the largest cell"
        advice = {
            "advice-named": f"Have {these} checked. The matrix names its nodes, so none can be left out.",
            "advice-few": f"Have {these} checked. Leave {them} out (exclude) only if {remain}.",
            "advice-enough": f"Leave {these} out (exclude) or have {them} checked.",
        }
        return f"Slower than the other nodes of the same runs: {listed(slow)}. {advice[self.advice]}"


def slow_nodes_of(ranks: Sequence[RankOfRun]) -> list[SlowNode]:
    """Return the nodes that are slower than the other nodes of the same runs, the slowest first.

    A node's time in a run is the median useful time over its ranks and epochs. Its excess is the ratio of
    this time to the median of the run's other nodes, minus 1. A node is slow if it took part in three runs or
    more, its mean excess is above 3 %, and Student's t of its mean log ratio is significant at
    :data:`SLOW_NODE_LEVEL`, divided by the number of nodes. The standard deviation is that of the node or of
    all nodes, whichever is larger: three runs do not determine a standard deviation.

    Runs whose ranks process different numbers of samples are left out. Nodes with different numbers of ranks
    are not compared with each other, because their times differ by design.
    """
    uneven = {first.run_id for first, _, _ in unequal_samples(ranks)}
    ratios = _log_ratios(row for row in ranks if row.useful_s > 0 and row.run_id not in uneven)
    hosts = grouped(ratios, lambda one: one[0])
    logs = {host: np.array([ratio for _, ratio, _ in own]) for host, own in hosts.items()}
    beyond_mean = {host: len(own) - 1 for host, own in hosts.items()}
    pooled = sum(float(own.var()) * len(own) for own in logs.values()) / max(sum(beyond_mean.values()), 1)
    # Of the ratios of k nodes in a run, k - 1 are independent.
    freedom = sum(beyond_mean[host] * mean(one[2] for one in own) for host, own in hosts.items())
    enough = {host: own for host, own in logs.items() if len(own) >= MIN_RUNS}
    quantile = float(special.stdtrit(max(freedom, 1.0), 1 - SLOW_NODE_LEVEL / max(len(enough), 1)))
    found = []
    for host, own in enough.items():
        error = math.sqrt(max(own.var(ddof=1), pooled) / len(own))
        if own.mean() > max(math.log(SLOW_NODE), quantile * error):
            found.append(SlowNode(host, len(own), math.expm1(own.mean())))
    return sorted(found, key=lambda node: -node.excess)


def _log_ratios(ranks: Iterable[RankOfRun]) -> Iterator[tuple[str, float, float]]:
    """Yield host and log of its useful time over the other hosts' median in a run, if as many ranks each.

    The third value is the share of these ratios that are independent: (k - 1) / k of k hosts.
    """
    for run in grouped(ranks, _run).values():
        hosts = grouped(run, lambda row: row.host)
        times = [
            (host, median(row.useful_s for row in own), len({row.rank for row in own}))
            for host, own in hosts.items()
        ]
        for alike in grouped(times, lambda one: one[2]).values():
            for place, (host, time_s, _) in enumerate(alike if len(alike) > 1 else ()):
                others_s = median(other_s for _, other_s, _ in alike[:place] + alike[place + 1 :])
                yield host, math.log(time_s / others_s), 1 - 1 / len(alike)


@check(
    "late-ranks",
    least_ranks=2,
    possible=lambda about: _cells_of(row for row in about.rank_rows if known(row.forward_time_sec)),
)
def _late_and_slow(about: CheckedStudy) -> Iterator[Finding]:
    yield from late_nodes_of(stragglers(about.rank_rows), about.sample)
    if slow := slow_nodes_of(about.rank_rows):
        hosts, plan = {node.host for node in slow}, about.study.plan
        scheduler = SCHEDULERS.get(str(plan.get("executor")))
        largest = max(cell.nodes for cell in about.study.planned)
        advice: Any = "advice-enough"
        if scheduler is None or "exclude" not in scheduler.keys or plan.get("nodelist"):
            advice = "advice-named"
        elif len({row.host for row in about.rank_rows} - hosts) < largest:
            advice = "advice-few"
        cells = distinct(row.cell_id for row in about.rank_rows if row.host in hosts)
        yield SlowNodes(subject=cells, slow=tuple(slow), advice=advice, needed=largest)


# -- slow hosts -----------------------------------------------------------------------


@dataclass(frozen=True)
class HostBound:
    """A rank whose host is the limit, with means over the epochs, in seconds per step."""

    run_id: str
    rank: int
    launch_s: float
    load_s: float
    step_s: float


def host_bound(ranks: Iterable[RankOfRun]) -> Iterator[HostBound]:
    """Yield the ranks whose host is the limit because of its launches, and not because of loading data.

    Host and device run at the same time, so a step takes as long as the slower of the two. The host is the
    limit if the step is as long as the host's own work (``host_time_sec``): loading data and launching. If
    the device is the limit, the host gets further ahead of it in each step (``launch_lead_time_sec``), until
    the queue is full. A rank that waits for a slower host waits on its device, so its own host is ahead. A
    rank of which a time is unknown is not returned.
    """
    for own in grouped(ranks, lambda row: (row.run_id, row.rank)).values():
        launch_s, host_s, ahead_s, step_s = (
            mean(row.launch_time_sec for row in own),
            mean(row.host_time_sec for row in own),
            mean(row.launch_lead_time_sec for row in own),
            mean(row.window_time_sec / row.steps if row.steps else math.nan for row in own),
        )
        load_s = round(host_s - launch_s, 9)
        works = host_s >= _WORKS_FROM * step_s and launch_s >= load_s
        if works and ahead_s <= _AHEAD_UP_TO * step_s:
            yield HostBound(own[0].run_id, own[0].rank, launch_s, load_s, step_s)


# -- means of ranks and nodes ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MeanTimes:
    """Means over the epochs and runs of a cell, of a rank or of all ranks of a host, in seconds per step.

    Attributes:
        rank: None for a host.
        ranks: number of ranks.
        n: number of runs.
        beyond: excess over the typical useful time of the run, as a share of the step.
        late: whether the rank, or one of the host's ranks, is late in more than half of the cell's runs.
        rest: work outside ``data`` and ``compute``; the three add up to ``useful``.
    """

    cell_id: str
    host: str
    rank: int | None
    ranks: int
    n: int
    beyond: float
    late: bool
    data: float
    compute: float
    rest: float
    useful: float
    transfer: float
    wait: float
    step: float


class RankMeans(NamedTuple):
    """Mean times of the ranks and of the nodes of some cells; in a cell, the slowest node is first."""

    by_rank: list[MeanTimes]
    by_host: list[MeanTimes]


def rank_means(about: CheckedStudy) -> RankMeans | None:
    """Return the mean times of ranks and nodes over epochs and runs; None if no run has ranks.csv.

    The cells are those with the lowest load balance, the lowest first.
    """
    wide = [row for row in first_of_cells(about.measured) if row.gpus > 1 and known(row.load_balance)]
    # Rounded, so that cells with equal load balance are in the order of the table.
    cells = [row.cell_id for row in sorted(wide, key=lambda row: round(row.load_balance, 9))[:MAX_CELLS]]
    sample = ranks_sample(run for run in about.runs if run.cell_id in cells)
    ranks = [row for row in about.study.ranks_of([run.run_id for run in sample]) if known(row.useful_s)]
    late = {(one.cell_id, one.host, one.rank) for one in _late_ranks(stragglers(ranks), sample)}
    means = RankMeans([], [])
    for cell in cells:
        own = [row for row in ranks if row.cell_id == cell]
        means.by_rank.extend(_means(own, late, lambda row: (row.host, row.rank)))
        hosts = _means(own, late, lambda row: (row.host, None))
        means.by_host.extend(sorted(hosts, key=lambda host: -host.beyond))
    return means if ranks else None


def _means(
    ranks: Sequence[RankOfRun],
    late: set[tuple[str, str, int]],
    key: Callable[[RankOfRun], tuple[str, int | None]],
) -> Iterator[MeanTimes]:
    """Yield the means of a cell. ``beyond`` is computed within each run, then averaged over runs."""
    beyond: dict[tuple[str, int | None], list[float]] = {}
    for run in grouped(ranks, _run).values():
        parts = grouped(run, key)
        step_s = max(mean(row.step_time_sec for row in own) for own in parts.values())
        excesses_s = _beyond_typical([mean(row.useful_s for row in own) for own in parts.values()])
        for part, excess_s in zip(parts, excesses_s, strict=True):
            beyond.setdefault(part, []).append(excess_s / step_s)
    for (host, rank), own in sorted(grouped(ranks, key).items()):
        amounts = (len({row.rank for row in own}), len(beyond[host, rank]))
        is_late = any((row.cell_id, host, row.rank) in late for row in own)
        about = (own[0].cell_id, host or MISSING, rank, *amounts, mean(beyond[host, rank]), is_late)
        yield MeanTimes(*about, *map(mean, zip(*map(_times, own), strict=True)))


def _times(row: RankOfRun) -> tuple[float, ...]:
    """Return the times of :class:`MeanTimes`, in their order."""
    data, compute = row.data_load_time_sec, row.forward_time_sec + row.backward_time_sec
    wait, exposed = row.comm_wait_time_sec, row.comm_exposed_time_sec
    rest = row.useful_s - sum(filter(known, (data, compute)))
    transfer = exposed - wait if known(wait) else exposed
    return data, compute, rest, row.useful_s, transfer, wait, row.step_time_sec


def nodes_table(means: RankMeans) -> dict[str, list[Any]]:
    """Return the columns of nodes.csv: the least balanced cell first, in each cell the slowest host first."""
    times = ("useful", "data", "compute", "wait", "transfer", "step")
    names = {name: name for name in ("cell_id", "host", "ranks", "n")}
    names |= {f"{name}_sec": name for name in times} | {"beyond_usual": "beyond"}
    return {column: [getattr(node, name) for node in means.by_host] for column, name in names.items()}
