"""Detect and describe late ranks (stragglers) and slow nodes, which make all other ranks wait.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import median, median_low
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
from scipy import special

from analysis.data.load import RankOfRun, Study
from analysis.stats.columns import RunRow, ScalingRow, distinct, first_of_cells, grouped, part_title
from analysis.stats.decompose import USEFUL_PARTS, mean
from analysis.stats.estimate import MIN_RUNS
from analysis.stats.measured import ranks_sample
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.units import (
    MISSING,
    clauses,
    count,
    known,
    listed,
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
#: Maximum number of cells that :func:`least_balanced_cells` returns.
MAX_CELLS = 2
_MAX_DESCRIBED = 2

#: An excess is in one part of the step if that part has this fraction of it.
_WHOLE_EXCESS = 0.9
#: The columns of report/nodes.csv with times, in seconds per step.
_NODE_TIMES = ("useful", "data", "compute", "wait", "transfer", "step")


def _by_run(ranks: Iterable[RankOfRun]) -> dict[str, list[RankOfRun]]:
    return grouped(ranks, lambda row: row.run_id)


def _beyond_typical(values: Sequence[float]) -> list[float]:
    """Return values minus their lower median; unknown values are NaN."""
    typical = median_low([value for value in values if known(value)] or [math.nan])
    return [value - typical for value in values]


@dataclass(frozen=True, slots=True)
class Straggler:
    """A late rank of a run.

    Attributes:
        ranks: number of ranks of the run, late or not.
        host_ranks: number of those on the rank's host.
        excess_s: useful time beyond the typical one, per step.
        share: this excess as a fraction of the step.
        part: part of the step with most of the excess.
        part_share: fraction of the excess in this part.
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


class _Timed(NamedTuple):
    """A rank in an epoch: the longest step of the ranks, and its excess as a fraction of this step."""

    row: RankOfRun
    longest_s: float
    share: float


def stragglers(ranks: Iterable[RankOfRun]) -> list[Straggler]:
    """Return the late ranks of each run (see :data:`LATE_FROM`); without an attribution window, none."""
    timed = [row for row in ranks if known(row.useful_s)]
    return [late for own in _by_run(timed).values() for late in _late_in(own)]


def _late_in(run: Sequence[RankOfRun]) -> Iterator[Straggler]:
    by_rank = grouped(_compared(run), lambda one: one.row.rank).values()
    hosts = Counter(own[0].row.host for own in by_rank)
    # The excess is that of the means over the epochs: a rank may be faster than the others in some of them.
    excesses_s, *parts = (
        _beyond_typical([mean(getattr(one.row, name) for one in own) for own in by_rank])
        for name in ("useful_s", *USEFUL_PARTS.values())
    )
    for own, excess_s, *of_parts in zip(by_rank, excesses_s, *parts, strict=True):
        share = excess_s / mean(one.longest_s for one in own)
        most_s, part = max(
            zip(of_parts, USEFUL_PARTS, strict=True), key=lambda one: one[0] if known(one[0]) else -math.inf
        )
        part_share = most_s / excess_s if excess_s else math.inf
        late_in = sum(one.share >= LATE_FROM for one in own) / len(own)
        now_and_then = part == "other" and part_share >= 0.5 and share >= LATE_FROM and late_in > 0.5
        if late_in == 1 or now_and_then:
            row, of_host = own[0].row, hosts[own[0].row.host]
            about = (row.run_id, row.cell_id, row.rank, row.host, len(by_rank), of_host)
            yield Straggler(*about, excess_s, share, part, part_share)


def _compared(run: Sequence[RankOfRun]) -> Iterator[_Timed]:
    """Yield the ranks of the epochs in which the ranks of a run can be compared."""
    for own in grouped(run, lambda row: row.epoch).values():
        steps_s = [row.step_time_sec for row in own]
        if 0 < max(steps_s) <= COMPARABLE_STEPS * min(steps_s):
            beyond_s = _beyond_typical([row.useful_s for row in own])
            for row, more_s in zip(own, beyond_s, strict=True):
                yield _Timed(row, max(steps_s), more_s / max(steps_s))


class _LateRank(NamedTuple):
    """A late rank of a cell: means over its runs, and the number of these runs and of all runs."""

    mean: Straggler
    late_in: int
    runs: int


@dataclass(frozen=True)
class SlowNode:
    """A slow node: the number of its runs, and its mean excess over the other nodes."""

    host: str
    runs: int
    excess: float


Extent = Literal["whole", "most", "several"]


@dataclass(frozen=True, kw_only=True)
class LatePart:
    """Ranks of one node that are late in the same part of the step.

    Attributes:
        ranks: the number of ranks of the node.
        rank: the late rank, if it is the only one.
        late: the number of late ranks; None if all ranks of the node are late.
        excess_s: useful time beyond the typical one, per step; ``share`` is this as a fraction of the step.
        extent: how much of the excess is in ``part``.
    """

    host: str
    ranks: int
    rank: int | None = None
    late: int | None = None
    excess_s: float
    share: float
    part: str
    extent: Extent

    def __str__(self) -> str:
        on = f"on {short_name(self.host)}"
        if self.rank is not None:
            who = f"rank {self.rank} {on} takes"
        elif self.late is not None:
            who = f"{self.late} of the {self.ranks} ranks {on} take"
        else:
            who = f"all {self.ranks} ranks {on} take"
        where = {"whole": "in", "most": "mostly in", "several": "in several parts, most in"}[self.extent]
        return (
            f"{who} {seconds(self.excess_s)} per step longer than the others ({short_percent(self.share)} of "
            f"the step, {where} {part_title(self.part)})"
        )


@dataclass(frozen=True, kw_only=True)
class LateNode:
    """A node with late ranks, described by the cell in which they cause the longest wait.

    Attributes:
        late_in: the number of the cell's ``runs`` in which a rank is late; two if the ranks differ.
        more_cells: the number of other cells in which ranks of the node are late.
    """

    cell: str
    parts: tuple[LatePart, ...]
    late_in: tuple[int, ...]
    runs: int
    more_cells: int | None = None

    def __str__(self) -> str:
        late_in = " to ".join(map(str, self.late_in))
        likewise = f", and likewise in {count(self.more_cells, 'more cell')}" if self.more_cells else ""
        where = f"in {late_in} of {count(self.runs, 'run')} of {short_name(self.cell)}{likewise}"
        return f"{clauses([*map(str, self.parts)])}, {where}"


class NodeAdvice(StrEnum):
    """What to do about slow nodes."""

    NAMED = "advice-named"
    FEW = "advice-few"
    ENOUGH = "advice-enough"


class SlowNodes(Finding, kind="slow-node"):
    """Nodes that are slow over all their runs.

    Attributes:
        excess: by node, the ratio of its useful time to that of the other nodes, minus 1.
        hosts: the number of these nodes.
        needed: the number of other nodes that the largest cell needs.
    """

    heading = "Slow node"
    excess: Mapping[str, float] = field(default_factory=dict)
    slow: tuple[SlowNode, ...] = ()
    hosts: int | None = None
    advice: NodeAdvice | None = None
    needed: int | None = None

    def _message(self) -> str:
        slow = [
            f"{short_name(one.host)} by {short_percent(one.excess)} in {count(one.runs, 'run')}"
            for one in self.slow
        ]
        return f"Slower than the other nodes of the same runs: {listed(slow)}. {self._what_to_do()}"

    def _what_to_do(self) -> str:
        these, them = ("this node", "it") if self.hosts == 1 else ("these nodes", "them")
        match self.advice:
            case NodeAdvice.NAMED:
                return f"Have {these} checked. The matrix names its nodes, so none can be left out."
            case NodeAdvice.FEW:
                remain = f"{count(self.needed or 0, 'other node')} remain for the largest cell"
                return f"Have {these} checked. Leave {them} out (exclude) only if {remain}."
        return f"Leave {these} out (exclude) or have {them} checked."


class LateRanks(SlowNodes, kind="straggler"):
    """Late ranks, and the slow nodes if ranks on one of them are late.

    Attributes:
        nodes: all nodes with late ranks, longest wait first; the first ones are described by ``late``.
        more: the number of nodes that are not described.
    """

    heading = "Late ranks"
    nodes: tuple[str, ...]
    late: tuple[LateNode, ...]
    more: int | None = None

    def _message(self) -> str:
        others = f"; and likewise on {count(self.more, 'more node')}" if self.more else ""
        text = (
            f"On average, {clauses([*map(str, self.late)])}{others}. The others wait for these ranks; such "
            "waiting is not slow communication."
        )
        return f"{text} {super()._message()}" if self.slow else text


def late_nodes_of(found: Sequence[Straggler], cells: Iterable[str]) -> LateRanks | None:
    """Return the finding about the late nodes, longest wait first; None if no node is late.

    The first nodes are described by their late ranks in the cell in which they cause the longest wait.
    ``cells`` is the ``cell_id`` of each run that was read.
    """
    ranks = _late_ranks(found, cells)
    if not ranks:
        return None
    nodes = grouped(ranks, lambda one: one.mean.host)
    late = tuple(_late_node(own) for own in [*nodes.values()][:_MAX_DESCRIBED])
    subject = distinct(one.mean.cell_id for one in ranks)
    return LateRanks(subject=subject, nodes=tuple(nodes), late=late, more=len(nodes) - len(late) or None)


def _late_ranks(found: Iterable[Straggler], cells: Iterable[str]) -> list[_LateRank]:
    """Return the ranks that are late in more than half of the runs of their cell, longest excess first."""
    runs = Counter(cells)
    ranks = [
        _LateRank(
            replace(
                own[0],
                excess_s=mean(one.excess_s for one in own),
                share=mean(one.share for one in own),
                part_share=mean(one.part_share for one in own),
                host_ranks=max(one.host_ranks for one in own),
            ),
            len(own),
            runs[own[0].cell_id],
        )
        for own in grouped(found, lambda one: (one.cell_id, one.rank, one.host)).values()
    ]
    late = [one for one in ranks if 2 * one.late_in > one.runs]
    return sorted(late, key=lambda one: -one.mean.excess_s)


def _late_node(late: Sequence[_LateRank]) -> LateNode:
    """Describe a node by its late ranks in all cells, which are sorted by their excess."""
    cells = grouped(late, lambda one: one.mean.cell_id)
    cell, worst = next(iter(cells.items()))
    # Ranks that are late in different parts of the step have different reasons.
    parts = grouped([one.mean for one in worst], lambda one: one.part)
    late_in = [one.late_in for one in worst]
    return LateNode(
        cell=cell,
        parts=tuple(_late_part(own) for own in parts.values()),
        late_in=tuple(sorted({min(late_in), max(late_in)})),
        runs=worst[0].runs,
        more_cells=len(cells) - 1 or None,
    )


def _late_part(late: Sequence[Straggler]) -> LatePart:
    """Describe the ranks of one node and cell that are late in the same part of the step."""
    first = late[0]
    return LatePart(
        host=first.host,
        ranks=first.host_ranks,
        rank=first.rank if len(late) == 1 else None,
        late=len(late) if 1 < len(late) < first.host_ranks else None,
        excess_s=mean(one.excess_s for one in late),
        share=mean(one.share for one in late),
        part=first.part,
        extent=extent(mean(one.part_share for one in late)),
    )


def extent(share: float) -> Extent:
    """Return whether the part of the step with the largest ``share`` of an excess has all or most of it."""
    if _WHOLE_EXCESS <= share <= 1 / _WHOLE_EXCESS:
        return "whole"
    return "most" if share >= 0.5 else "several"


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
    uneven = {one.run_id for one in unequal_samples(ranks)}
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
    for run in _by_run(ranks).values():
        hosts = grouped(run, lambda row: row.host)
        times = [
            (host, median(row.useful_s for row in own), len({row.rank for row in own}))
            for host, own in hosts.items()
        ]
        for alike in grouped(times, lambda one: one[2]).values():
            for place, (host, time_s, _) in enumerate(alike if len(alike) > 1 else ()):
                others_s = median(other_s for _, other_s, _ in alike[:place] + alike[place + 1 :])
                yield host, math.log(time_s / others_s), 1 - 1 / len(alike)


class UnequalSamples(NamedTuple):
    """A run in which one rank processes more samples than another; ``most`` and ``least`` are ranks."""

    run_id: str
    cell_id: str
    most: int
    least: int
    ratio: float


def unequal_samples(ranks: Iterable[RankOfRun]) -> list[UnequalSamples]:
    """Return the runs in which one rank processes more samples than another, by more than 2 %."""
    found = []
    for run_id, own in _by_run(row for row in ranks if known(row.samples)).items():
        by_rank = grouped(own, lambda row: row.rank).items()
        totals = {rank: sum(row.samples for row in rows) for rank, rows in by_rank}
        most, least = (choose(totals, key=totals.__getitem__) for choose in (max, min))
        ratio = totals[most] / max(totals[least], 1e-9)
        found.append(UnequalSamples(run_id, own[0].cell_id, most, least, ratio))
    return [one for one in found if one.ratio > 1 + SAMPLES_APART]


class UnequalWindows(NamedTuple):
    """The ranks with the shortest and the longest throughput window in an epoch of a run."""

    shortest: RankOfRun
    longest: RankOfRun

    @property
    def more_s(self) -> float:
        """The difference in seconds."""
        return self.longest.window_time_sec - self.shortest.window_time_sec

    @property
    def paused_s(self) -> float:
        """The time for which the clock of the shortest window's rank stood longer than the other one's."""
        return self.shortest.paused_time_sec - self.longest.paused_time_sec


def unequal_windows(ranks: Iterable[RankOfRun]) -> list[UnequalWindows]:
    """Return the runs in which the throughput window of one rank is longer than that of another one.

    The difference is more than :data:`WINDOW_STEPS` steps and more than :data:`WINDOWS_APART` of the shorter
    window, and a longer pause of the shorter one explains at least half of it. Ranks that train together need
    equally long for a window, except for about one step. If a pause makes the window of a rank far shorter,
    the others have waited for it. Without a pause, a descheduled step can make the difference.

    The result has the epoch with the largest difference of each run, the largest difference first.
    """
    found: dict[str, UnequalWindows] = {}
    timed = [row for row in ranks if row.window_time_sec > 0 and row.steps > 0]
    for (run_id, _), own in grouped(timed, lambda row: (row.run_id, row.epoch)).items():
        own.sort(key=lambda row: row.window_time_sec)
        one = UnequalWindows(own[0], own[-1])
        allowed = max(WINDOW_STEPS / one.shortest.steps, WINDOWS_APART)
        if allowed * one.shortest.window_time_sec < one.more_s <= 2 * one.paused_s:
            found[run_id] = max(one, found.get(run_id, one), key=lambda windows: windows.more_s)
    return sorted(found.values(), key=lambda one: -one.more_s)


@dataclass(frozen=True, slots=True)
class MeanTimes:
    """Means over the epochs and runs of a cell, of a rank or of all ranks of a host, in seconds per step.

    Attributes:
        rank: None for a host.
        ranks: number of ranks.
        n: number of runs.
        rest: work outside ``data`` and ``compute``; the three add up to ``useful``.
        beyond: excess over the typical useful time of the run, as a share of the step.
        late: whether the rank, or one of the host's ranks, is late in more than half of the cell's runs.
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


def least_balanced_cells(rows: Sequence[ScalingRow]) -> list[str]:
    """Return the measured multi-rank cells with the lowest load balance, the lowest first."""
    wide = [row for row in first_of_cells(rows) if row.n and row.gpus > 1 and known(row.load_balance)]
    # Rounded, so that cells with equal load balance are in the order of the table.
    return [row.cell_id for row in sorted(wide, key=lambda row: round(row.load_balance, 9))[:MAX_CELLS]]


def rank_means(study: Study, cells: Sequence[str], runs: Iterable[RunRow]) -> RankMeans | None:
    """Return the mean times of ranks and nodes over epochs and runs; None if no run has ranks.csv.

    ``cells`` are the ids in the order of the result.
    """
    sample = ranks_sample(run for run in runs if run.cell_id in cells)
    ranks = [row for row in study.ranks_of([run.run_id for run in sample]) if known(row.useful_s)]
    if not ranks:
        return None
    late = _late_ranks(stragglers(ranks), [run.cell_id for run in sample])
    keys = {(one.mean.cell_id, one.mean.host, one.mean.rank) for one in late}
    means = RankMeans([], [])
    for cell in cells:
        own = [row for row in ranks if row.cell_id == cell]
        means.by_rank.extend(_means(own, keys, lambda row: (row.host, row.rank)))
        hosts = _means(own, keys, lambda row: (row.host, None))
        means.by_host.extend(sorted(hosts, key=lambda host: -host.beyond))
    return means


def _means(
    ranks: Sequence[RankOfRun],
    late: set[tuple[str, str, int]],
    key: Callable[[RankOfRun], tuple[str, int | None]],
) -> Iterator[MeanTimes]:
    """Yield the means of a cell. ``beyond`` is computed within each run, then averaged over runs."""
    beyond: dict[tuple[str, int | None], list[float]] = {}
    for run in _by_run(ranks).values():
        parts = grouped(run, key)
        step_s = max(mean(row.step_time_sec for row in own) for own in parts.values())
        excesses_s = _beyond_typical([mean(row.useful_s for row in own) for own in parts.values()])
        for part, excess_s in zip(parts, excesses_s, strict=True):
            beyond.setdefault(part, []).append(excess_s / step_s)
    for (host, rank), own in sorted(grouped(ranks, key).items()):
        amounts = (len({row.rank for row in own}), len(beyond[host, rank]))
        times = map(mean, zip(*map(_times, own), strict=True))
        is_late = any((row.cell_id, host, row.rank) in late for row in own)
        about = (own[0].cell_id, host or MISSING, rank, *amounts)
        yield MeanTimes(*about, mean(beyond[host, rank]), is_late, *times)


def _times(row: RankOfRun) -> tuple[float, ...]:
    """Return the times of :class:`MeanTimes`, in their order."""
    data, compute = row.data_load_time_sec, row.forward_time_sec + row.backward_time_sec
    wait, exposed = row.comm_wait_time_sec, row.comm_exposed_time_sec
    rest = row.useful_s - sum(filter(known, (data, compute)))
    transfer = exposed - wait if known(wait) else exposed
    return data, compute, rest, row.useful_s, transfer, wait, row.step_time_sec


def nodes_table(means: RankMeans) -> pd.DataFrame:
    """Return the content of nodes.csv: the least balanced cell first, in each cell the slowest host first."""
    names = {name: name for name in ("cell_id", "host", "ranks", "n")}
    names |= {f"{name}_sec": name for name in _NODE_TIMES} | {"beyond_usual": "beyond"}
    return pd.DataFrame(
        {column: [getattr(node, name) for node in means.by_host] for column, name in names.items()}
    )
