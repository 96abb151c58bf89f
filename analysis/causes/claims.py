"""The causes of a slow step: each has a rule that turns facts of one run into claims with evidence.

A rule claims a share of the step only if the time of the cause was measured: as seconds of its own, or as the
excess of a part of the step. docs/why.md describes the causes. A cause is added here: its findings, its rule,
and its entry in :data:`CAUSES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from analysis.causes.divide import COMPUTING, LEAST_SHARE, LOST, Claim, Parts
from analysis.causes.evidence import (
    OF_WARNINGS,
    STARVED_FROM,
    NodeFacts,
    RunFacts,
    calls_outside,
    collectives_outside,
    seconds_of,
)
from analysis.checks.host_bound import HostBound
from analysis.checks.slow_ranks import Straggler
from analysis.data.columns import part_title
from analysis.stats.decompose import mean
from bench.study.findings import Disturbance, ForeignJob, StudyRun, by_reason
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.measure.findings import ranks_named
from ddp_scaling_bench.records import SlowCall
from ddp_scaling_bench.units import clauses, count, known, seconds, short_name, short_percent

#: At the baseline, a part that is lost at any size is a cause if it takes at least this fraction of the step.
MUCH = 0.08
#: Clocks below this fraction of the reference are low.
LOW_CLOCK = 0.95
#: The network is slow if its fitted rate is below this fraction of the interface's nominal rate.
SLOW_FABRIC = 0.3
#: More collectives or passes per step than needed are reported if the surplus exceeds this number.
_EXTRA = 0.5
#: In a sampled step, the profiler itself takes 0.1 to 0.2 ms and up to 20 microseconds per call. Calls that
#: take less time than this are no cause.
_LEAST_SAMPLED_S, _PROFILED_CALL_S = 0.001, 20e-6
#: Maximum number of calls, and of nodes that lack CPU time, in the evidence of a cause.
_MOST = 3
_COMMUNICATION = ("transfer", "wait")
#: The parts that are longer if ranks wait for a core.
_WAITING = (*COMPUTING, "other", "data")


@dataclass(frozen=True)
class LateRank(Straggler):
    """A late rank of the run (see :data:`analysis.checks.slow_ranks.LATE_FROM`).

    Attributes:
        whole_node: true if all ranks of the node are late.
        of_node: true if the node is at fault, not the rank; None if the study does not distinguish them.
        samples: its samples divided by those of the rank with the fewest; 1 if all are equal.
        one_part: true if the excess is in one part of the computation only.
    """

    whole_node: bool
    of_node: bool | None
    samples: float = 1.0
    one_part: bool = False


@dataclass(frozen=True)
class Reference:
    """The baseline of a size.

    Attributes:
        facts: the facts of a run of the baseline.
        parts: the parts of the step at the rate of the baseline, as fractions of the cell's step.
        cpu_wait: the fraction of the baseline's step for which its ranks wait for a core; NaN if unknown.
        waits_more: false if the ranks of this size wait for a smaller fraction of their step than that.
        batch: the batch per rank divided by that of the baseline.
    """

    facts: RunFacts = field(default_factory=RunFacts)
    parts: Parts = field(default_factory=dict)
    cpu_wait: float = math.nan
    waits_more: bool = True
    batch: float = 1.0

    @property
    def rate(self) -> float:
        """The step at the rate of the baseline, as a fraction of the cell's step: E."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class RunEvidence:
    """Everything that the rules know about one run.

    Attributes:
        parts: each part's fraction of the step; their sum is 1.
        step_s: seconds per step.
        factor: ``step_s`` divided by the mean over the runs of the cell.
        reference: the baseline; None for the baseline itself.
        comm_s: total communication per step, hidden or not, in seconds; NaN if unknown.
        ring_bytes_per_s: fitted rate of the network; NaN if unknown.
        much: the parts that are causes at the baseline (see :data:`MUCH`).
        slow_hosts: the ranks whose host is the limit.
        slow_host: the rank whose host is the limit in most runs of the cell, if it is one rank only.
    """

    parts: Parts
    step_s: float
    facts: RunFacts = field(default_factory=RunFacts)
    late: Sequence[LateRank] = ()
    reference: Reference | None = None
    comm_s: float = math.nan
    ring_bytes_per_s: float = math.nan
    much: frozenset[str] = frozenset()
    slow_hosts: Sequence[HostBound] = ()
    slow_host: int | None = None
    run_id: str = ""
    factor: float = 1.0


def claims_of(run: RunEvidence) -> list[Claim]:
    """Return the causes of one run, in the order in which :func:`divide` gives them their shares.

    What the causes with times of their own leave of a part is claimed last.
    """
    claims = [claim for cause in CAUSES.values() for claim in cause.rule(run)]
    return sorted(claims, key=lambda claim: math.isinf(claim.share))


# -- parts of the step ----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LongerPart:
    """The time of a part per step, and at the rate of the baseline; None for the baseline itself."""

    part: str
    seconds: float
    base_seconds: float | None = None

    def __str__(self) -> str:
        base = "" if self.base_seconds is None else f" ({seconds(self.base_seconds)} at the baseline's rate)"
        return f"{part_title(self.part)} takes {seconds(self.seconds)} per step{base}"


class Longer(Finding, kind="longer"):
    """Parts of the step that take time, or more time than at the rate of the baseline; the longest first."""

    parts: tuple[LongerPart, ...]

    def _message(self) -> str:
        return clauses([*map(str, self.parts)])


def _excess(run: RunEvidence, cause: str, parts: Sequence[str], *why: Finding) -> Iterator[Claim]:
    """Yield what other causes leave of some parts of the step, or of their excess over the baseline."""
    base = run.reference
    if base and not base.parts:
        return
    more = {
        part: run.parts[part] - (base.parts.get(part, 0.0) / run.factor if base else 0.0)
        for part in parts
        if part in run.parts
    }
    if base is None:
        more = {part: value for part, value in more.items() if part in LOST and part in run.much}
    if sum(more.values()) > 0:
        longer = tuple(
            LongerPart(
                part=part,
                seconds=run.parts[part] * run.step_s,
                base_seconds=base.parts.get(part, 0.0) * run.step_s / run.factor if base else None,
            )
            for part, value in sorted(more.items(), key=lambda one: -one[1])
            if value > 0
        )
        yield Claim(cause, (Longer(parts=longer), *why), tuple(parts), math.inf)


# -- late ranks and nodes -------------------------------------------------------------


SAME_WORK = (
    "Give all ranks the same work: equal samples and lengths, and no work on one rank within the step."
)


class Late(Finding, kind="late"):
    """A late rank, or all ranks of a late node, with the part of the step that has most of the excess."""

    rank: int | None = None
    node: str
    excess_s: float
    part: str
    part_share: float

    def _message(self) -> str:
        who = short_name(self.node) if self.rank is None else f"rank {self.rank} on {short_name(self.node)}"
        return (
            f"{who} takes {seconds(self.excess_s)} per step longer than the others, "
            f"{short_percent(self.part_share)} of it in {part_title(self.part)}"
        )


class WholeNode(Finding, kind="whole-node"):
    """A node that is at fault, not its ranks."""

    message = "all its ranks are late, whichever they are"
    remedy = "Leave this node out (bench submit, cluster.exclude) or have it checked: bench preflight."


class RankOrNode(Finding, kind="rank-or-node"):
    """A late rank that is alone on its node in all runs."""

    message = "the runs do not show whether the rank or its node is late"
    remedy = f"If it is the rank: {SAME_WORK} If it is the node: {WholeNode.remedy}"


class WaitCounts(Finding, kind="wait-counts"):
    """The wait for a late rank is part of the cause."""

    message = "the others wait for it, and this wait counts"


class SlowerCall(Finding, kind="slower-call"):
    """A call that takes longer on the late rank."""

    function: str
    path: str
    line: int
    excess_s: float

    def _message(self) -> str:
        call = f"{short_name(self.function)} at {self.path}:{self.line}"
        return f"{call} takes {seconds(self.excess_s)} longer there, in a sampled step"


class MoreSamples(Finding, kind="more-samples"):
    """A late rank with more samples than the others."""

    ratio: float

    def _message(self) -> str:
        return f"it processes {self.ratio:#.2g} times the samples of the rank with the fewest"


class LowClock(Finding, kind="low-clock"):
    """A clock that is lower than that of the other ranks, or (in MHz) than that at the baseline."""

    ratio: float
    mhz: float | None = None
    base_mhz: float | None = None

    def _message(self) -> str:
        ratio = short_percent(self.ratio)
        if self.mhz is None:
            return f"its clock is {ratio} of that of the others"
        return f"the clock is {self.mhz:.0f} MHz, but {self.base_mhz:.0f} MHz at the baseline ({ratio})"

    remedy = "Check power limit, temperature and application clocks of this device (nvidia-smi -q)."


def _late(run: RunEvidence) -> Iterator[Claim]:
    """Yield the late ranks or nodes. Their delays overlap, so all shares together equal the largest delay."""
    groups: dict[tuple[str, int | None], LateRank] = {}
    for late in run.late:
        key = (late.host, None if late.of_node else late.rank)
        groups[key] = max(late, groups.get(key, late), key=lambda one: one.share)
    total = sum(late.share for late in groups.values())
    worst = max((late.share for late in groups.values()), default=0.0)
    for (node, rank), late in groups.items():
        claim = _about_late(run, late, node=node, rank=rank, share=late.share / total * worst)
        if late.part == "other" and claim.share:
            # The shares are means over the ranks: the late rank works in this part while the others wait.
            own = claim.share / late.ranks
            yield replace(claim, pools=("other", *claim.pools), share=own)
            yield replace(claim, share=claim.share - own)
        else:
            yield claim


def _about_late(run: RunEvidence, late: LateRank, *, node: str, rank: int | None, share: float) -> Claim:
    cause, why = _why_late(run, late)
    part_share = min(late.part_share, 1.0)
    shown = Late(rank=rank, node=node, excess_s=late.excess_s, part=late.part, part_share=part_share)
    evidence = (shown, *why)
    outside = cause == "outside-timers"
    return Claim(
        cause,
        (*evidence, WaitCounts()) if outside else evidence,
        (*(("wait",) if run.parts.get("wait") else ("transfer",)), late.part, *COMPUTING, "other"),
        share,
        node=node,
        # A node lacks CPU time whichever rank runs on it.
        rank=None if cause == "cpu-starved" else rank,
        part=late.part,
        counted=outside and bool(why),
    )


def _why_late(run: RunEvidence, late: LateRank) -> tuple[str, Sequence[Finding]]:
    """Return the cause of a late rank, and the evidence for it."""
    lines = _calls_of_late(run, late)
    if late.part == "other":
        return "outside-timers", lines
    if late.samples > 1:
        return "late-rank", [MoreSamples(ratio=late.samples)]
    own = run.facts.nodes.get(late.host, NodeFacts())
    others = [node.taken for name, node in run.facts.nodes.items() if name != late.host]
    lost = own.taken > 0 and all(own.taken > 1.5 * other for other in others)
    lost = lost and (late.whole_node or bool(others) or not own.waited)  # else see _starved
    if lost and late.whole_node:
        jobs = [one for one in _jobs(run.facts) if one.subject in ((late.host,), ())]
        return "cpu-starved", by_reason(jobs) if jobs else own.evidence
    ratio = _clock_ratio(run.facts, late)
    if ratio < LOW_CLOCK and late.part in COMPUTING:
        return "late-rank", [LowClock(ratio=ratio)]
    if late.part in COMPUTING and late.rank == run.slow_host and run.slow_hosts:
        return "host-bound", [_host_limits(run)]
    # The node's other ranks are not late, so only a rank that computes slower in all parts may lack CPU time.
    if lost and late.part in COMPUTING and not late.one_part:
        lines = [*own.evidence, *lines]
    place: dict[bool | None, list[Finding]] = {True: [WholeNode()], None: [RankOrNode()], False: []}
    return "late-rank", [*place[late.of_node], *lines]


def _waiting(run: RunEvidence) -> Iterator[Claim]:
    """Yield late ranks, and the waiting for ranks that are late in some steps only."""
    yield from _late(run)
    yield from _excess(run, "late-rank", ("wait",))


def _clock_ratio(facts: RunFacts, late: LateRank) -> float:
    """Return the clock of a late rank's GPU or node over the median of the other clocks; NaN if unknown."""
    by_rank = [value for rank, value in facts.clock_mhz.items() if rank != late.rank]
    by_node = [node.freq_mhz for name, node in facts.nodes.items() if name != late.host]
    own = facts.clock_mhz.get(late.rank, math.nan)
    if math.isfinite(own) and by_rank:
        return own / float(np.median(by_rank))
    own = facts.nodes.get(late.host, NodeFacts()).freq_mhz
    return own / float(np.median(by_node)) if math.isfinite(own) and by_node else math.nan


def _calls_of_late(run: RunEvidence, late: LateRank) -> list[Finding]:
    """Return the late rank's call with the most extra time, if that is at least 30 % of the excess."""
    own: dict[tuple[str, int, str], float] = {}
    others: dict[tuple[str, int, str], list[float]] = {}
    part = {"data": "data_load", "other": None}.get(late.part, late.part)
    for step in run.facts.calls:
        for call in [one for one in step.slow_calls if one.part == part]:
            key = (call.path, call.line, call.function)
            if step.rank == late.rank:
                own[key] = own.get(key, 0.0) + call.seconds
            else:
                others.setdefault(key, []).append(call.seconds)
    more = {key: spent - float(np.median(others.get(key, [0.0]))) for key, spent in own.items()}
    slowest = max(more, key=lambda one: more[one], default=None)
    if slowest is None or more[slowest] < 0.3 * late.share * run.step_s:
        return []
    path, line, function = slowest
    return [SlowerCall(function=function, path=path, line=line, excess_s=more[slowest])]


# -- CPU and clocks -------------------------------------------------------------------


class WaitedForCore(Finding, kind="waited-for-core"):
    """The time for which the ranks waited for a core, and the time at the rate of the baseline.

    The shares are fractions of the step, and of that of the baseline.
    """

    share: float
    seconds: float
    base_share: float | None = None
    base_seconds: float | None = None

    def _message(self) -> str:
        text = (
            f"the ranks waited for a core for {seconds(self.seconds)} per step ({short_percent(self.share)})"
        )
        if self.base_share is None or self.base_seconds is None:
            return text
        base = short_percent(self.base_share)
        return f"{text}, at the baseline's rate for {seconds(self.base_seconds)} ({base} of its step)"


class FewerThreads(Finding, kind="fewer-threads"):
    """Ranks with fewer threads than those of the baseline."""

    threads: int
    base_threads: int

    def _message(self) -> str:
        return f"{count(self.threads, 'thread')} per rank, but {self.base_threads} at the baseline"


def _starved(run: RunEvidence) -> Iterator[Claim]:
    """Yield ``cpu-starved`` if all nodes lack CPU time; if only some do, :func:`_late` yields it.

    Waits that were measured on all nodes count even if some ranks of a node are late.
    """
    nodes = list(run.facts.nodes.values())
    everywhere = all(one.waited for one in nodes)
    late = any(one.part != "other" and (one.whole_node or not everywhere) for one in run.late)
    if not nodes or late or _jobs(run.facts) or not all(one.starved > 0 or one.waited for one in nodes):
        return
    share, base = _waited_more(run), run.reference.facts.nodes.values() if run.reference else ()
    more = share
    if not known(share):  # the waits were not measured, but a quota or the number of threads was
        more = mean(one.starved for one in nodes) - max((one.starved for one in base), default=0.0)
    if more >= STARVED_FROM:
        stated = [one for node in nodes for one in node.evidence[:1]]
        evidence = (*stated[:_MOST], *_about_wait(run))
        yield Claim("cpu-starved", evidence, _WAITING, share, counted=True)


def _waited_more(run: RunEvidence) -> float:
    """Return for which fraction of the step the ranks waited longer for a core than at the baseline's rate.

    It is 0 if the runs of the cell waited for a smaller fraction of the step than the baseline, and NaN if
    the waits were not measured. Waits of the baseline that were not measured are 0.
    """
    wait, base = mean_wait(run.facts), run.reference
    if base is None or not known(wait) or not known(base.cpu_wait):
        return wait
    return wait - base.rate * base.cpu_wait / run.factor if base.waits_more else 0.0


def _about_wait(run: RunEvidence) -> Iterator[Finding]:
    """Yield the time for which the ranks waited for a core, if it was measured."""
    wait = mean_wait(run.facts)
    if known(wait):
        base = run.reference.cpu_wait if run.reference else math.nan
        base_s = run.reference.rate * base * run.step_s / run.factor if run.reference else math.nan
        times = (base, base_s) if known(base) else (None, None)
        spent_s = wait * run.step_s
        yield WaitedForCore(share=wait, seconds=spent_s, base_share=times[0], base_seconds=times[1])


def mean_wait(facts: RunFacts) -> float:
    """Return the fraction of the step for which the ranks waited for a core; NaN if it was not measured."""
    return float(np.mean([node.wait for node in facts.nodes.values()])) if facts.nodes else math.nan


def clocks_of(runs: Mapping[str, RunFacts]) -> dict[str, float]:
    """Return the clock (MHz) of each run of which it is known."""
    return {run_id: mhz for run_id, facts in runs.items() if (mhz := _mean_clock(facts)) > 0}


def _mean_clock(facts: RunFacts) -> float:
    """Return the lowest clock of the GPUs, else the mean of the nodes' cores; NaN if unknown."""
    if facts.clock_mhz:
        return min(facts.clock_mhz.values())
    known = [node.freq_mhz for node in facts.nodes.values() if math.isfinite(node.freq_mhz)]
    return float(np.mean(known)) if known else math.nan


class HostLimits(Finding, kind="host-limits"):
    """Ranks whose host is the limit; the times are those of the rank with the longest launches."""

    ranks: tuple[int, ...]
    launch_s: float
    load_s: float
    step_s: float

    def _message(self) -> str:
        launching = f"of a step of {seconds(self.step_s)}, it launches for {seconds(self.launch_s)}"
        loading = f" and loads data for {seconds(self.load_s)}" if self.load_s else ""
        return f"the host is the limit on {ranks_named(self.ranks)}: {launching}{loading}"


def _host_limits(run: RunEvidence) -> HostLimits:
    most = max(run.slow_hosts, key=lambda one: one.launch_s)
    ranks = tuple(one.rank for one in run.slow_hosts)
    return HostLimits(ranks=ranks, launch_s=most.launch_s, load_s=most.load_s, step_s=most.step_s)


def _host_bound(run: RunEvidence) -> Iterator[Claim]:
    """Yield the excess of the computation, in which the GPU waits for its host.

    If the rank is late, too, :func:`_late` yields it, with the time for which the others wait.
    """
    late = [one.rank for one in run.late if one.part in COMPUTING]
    if run.slow_hosts and run.slow_host not in late:
        limits = _host_limits(run)
        yield Claim("host-bound", (limits,), rank=run.slow_host)
        for claim in _excess(run, "host-bound", COMPUTING, limits):
            yield replace(claim, rank=run.slow_host)


def _lacks_cpu(run: RunEvidence) -> Iterator[Claim]:
    """Yield waits for cores, other jobs on the nodes, fewer threads, and warnings about the CPU."""
    yield from _starved(run)
    late = {late.host for late in run.late}
    jobs = [one for one in _jobs(run.facts) if not late & {*one.subject}]
    share = _waited_more(run)
    if jobs and share != 0:
        nodes = {node for one in jobs for node in one.subject}
        evidence = (*by_reason(jobs), *_about_wait(run))
        node = nodes.pop() if len(nodes) == 1 else ""
        yield Claim("cpu-starved", evidence, (*_WAITING, "wait"), share, node=node, counted=True)
    base = run.reference.facts.threads if run.reference else ()
    if run.facts.threads and base and max(run.facts.threads) < min(base):
        yield Claim("cpu-starved", (FewerThreads(threads=run.facts.threads[0], base_threads=base[0]),))
    yield from _warned(run, "cpu-starved")


def _jobs(facts: RunFacts) -> list[Disturbance]:
    return [one for one in facts.disturbed if isinstance(one, StudyRun | ForeignJob)]


# -- the user's code ------------------------------------------------------------------


class Compilations(Finding, kind="compilations"):
    """Compilations per step, and their time per step if it is known."""

    per_step: float
    seconds: float | None

    def _message(self) -> str:
        spent = "" if self.seconds is None else f", {seconds(self.seconds)} per step"
        return f"torch.compile compiles {self.per_step:#.2g} times per step{spent}"

    remedy = (
        "Keep shapes constant (drop_last=True, padding) or mark them dynamic; TORCH_LOGS=recompiles names "
        "the guard that fails."
    )


class CallsOutsideTimers(Finding, kind="calls-outside-timers"):
    """The time of all calls outside of the timers, mean over the ranks with a sampled step."""

    seconds: float
    ranks: int

    def _message(self) -> str:
        spent = f"take {seconds(self.seconds)} in a sampled step"
        return f"calls outside all timers {spent}, mean over {count(self.ranks, 'rank')}"


class SlowestCalls(Finding, kind="calls"):
    """The slowest calls of a step, with file and line."""

    rank: int | None = None
    calls: tuple[SlowCall, ...]

    def _message(self) -> str:
        calls = clauses(
            [
                f"{short_name(call.function)} at {call.path}:{call.line} ({seconds(call.seconds)})"
                for call in self.calls
            ]
        )
        return calls if self.rank is None else f"on rank {self.rank}: {calls}"


class NeedlessSearch(Finding, kind="needless-search"):
    """A search for unused parameters, of which there are none."""

    message = "find_unused_parameters=True, but no parameter is unused"
    remedy = "Construct DDP with find_unused_parameters=False."


class RetriesPerStep(Finding, kind="allocator-retries"):
    """Retries of the allocator per step of the rank with the most."""

    per_step: float

    def _message(self) -> str:
        return f"{self.per_step:#.2g} retries of the allocator per step"

    remedy = "Lower the batch per rank a little, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."


class SmallerBatch(Finding, kind="smaller-batch"):
    """A smaller batch per rank than at the baseline."""

    ratio: float

    def _message(self) -> str:
        return f"the batch per rank is {short_percent(self.ratio)} of that of the baseline"

    remedy = (
        "Use a larger batch per rank, or fewer ranks: fixed costs of a step are spread over fewer samples."
    )


def _computation(run: RunEvidence) -> Iterator[Claim]:
    """Yield recompilations, what settings and warnings show, and computation that takes longer per sample."""
    facts = run.facts
    if facts.recompilations > 0:
        share = facts.compile_share
        spent_s = share * run.step_s if math.isfinite(share) else None
        evidence = (Compilations(per_step=facts.recompilations, seconds=spent_s),)
        pools = ("forward", "backward", "other")
        yield Claim("computation", evidence, pools, share, counted=True, timeless=True)
    if facts.searches_for_nothing:
        yield Claim("computation", (NeedlessSearch(),), timeless=True)
    if facts.retries > 0:
        yield Claim("computation", (RetriesPerStep(per_step=facts.retries),), timeless=True)
    yield from _warned(run, "computation")
    if run.reference:
        yield from _excess(run, "computation", COMPUTING, *_why_longer(run, run.reference))


def _why_longer(run: RunEvidence, base: Reference) -> Iterator[Finding]:
    """Yield low clocks, and a smaller batch unless ranks lacked CPU time, which has the same effect."""
    own_mhz, base_mhz = _mean_clock(run.facts), _mean_clock(base.facts)
    ratio = own_mhz / base_mhz if base_mhz > 0 else math.nan
    if ratio < LOW_CLOCK:
        yield LowClock(mhz=own_mhz, base_mhz=base_mhz, ratio=ratio)
    lacked = any(node.lacked_cpu for facts in (run.facts, base.facts) for node in facts.nodes.values())
    if base.batch < 1 and not lacked:
        yield SmallerBatch(ratio=base.batch)


def _loading(run: RunEvidence) -> Iterator[Claim]:
    calls = [call for step in run.facts.calls for call in step.slow_calls if call.part == "data_load"]
    yield from _excess(run, "data-loading", ("data",), *_slowest(calls))


def _outside(run: RunEvidence) -> Iterator[Claim]:
    """Yield the calls outside of all timers, and the other time there."""
    yield from _calls_outside(run)
    yield from _excess(run, "outside-timers", ("other",))


def _calls_outside(run: RunEvidence) -> Iterator[Claim]:
    """Yield the calls outside of all timers, with their time in the sampled step."""
    if any(late.part == "other" for late in run.late):
        return
    extra = _extra_collectives(run) > _EXTRA
    taken = {id(call) for step in run.facts.calls for call in collectives_outside(step, waiting=extra)}
    found = [[call for call in calls_outside(step) if id(call) not in taken] for step in run.facts.calls]
    # The whole sampled step may be slow for other reasons, so its calls are compared with a usual step.
    spent_s = float(np.mean([seconds_of(calls) for calls in found])) if found else 0.0
    share = spent_s / run.step_s
    counts = [sum(call.calls for call in step.slow_calls) for step in run.facts.calls]
    if share >= LEAST_SHARE and spent_s >= _LEAST_SAMPLED_S + _PROFILED_CALL_S * max(counts, default=0):
        step, calls = max(zip(run.facts.calls, found, strict=True), key=lambda one: seconds_of(one[1]))
        evidence = (
            CallsOutsideTimers(seconds=spent_s, ranks=len(found)),
            *_slowest(calls, rank=step.rank if len(found) > 1 else None),
        )
        # In a single step, a call can take long by chance. Its time is certain if other steps lose it, too.
        counted = run.parts.get("other", 0.0) >= max(LEAST_SHARE, share / 2)
        yield Claim("outside-timers", evidence, ("other",), share, counted=counted)


def _slowest(calls: Iterable[SlowCall], *, rank: int | None = None) -> Iterator[Finding]:
    """Yield the slowest calls with file and line, if there are any."""
    slowest = sorted(calls, key=lambda call: -call.seconds)
    lines = {(call.path, call.line): call for call in reversed(slowest)}
    shown = tuple(sorted(lines.values(), key=lambda call: -call.seconds)[:_MOST])
    if shown:
        yield SlowestCalls(rank=rank, calls=shown)


def _warned(run: RunEvidence, cause: str) -> Iterator[Claim]:
    """Yield the warnings in the log that show a cause."""
    for name, line in run.facts.warnings.items():
        if OF_WARNINGS[name] == cause:
            yield Claim(cause, (line,), timeless=True)


# -- communication --------------------------------------------------------------------


class SlowAllReduces(Finding, kind="slow-all-reduces"):
    """All-reduces that are slower than the nominal rate of the interface."""

    fitted_gbit_s: float
    nominal_gbit_s: float

    def _message(self) -> str:
        return (
            f"the fitted rate of all-reduces is {self.fitted_gbit_s:#.3g} Gbit/s, but the nominal rate is "
            f"{self.nominal_gbit_s:#.3g} Gbit/s"
        )

    remedy = (
        "Use the fast interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, NCCL_IB_HCA), and compare the "
        "measured rate with its nominal rate: bench preflight."
    )


_COMMUNICATE_LESS = (
    "Accumulate gradients under model.no_sync(), and reduce metrics every N steps instead of every step."
)


class SynchronisingPasses(Finding, kind="synchronising-passes"):
    """Backward passes per step that synchronise gradients."""

    per_step: float

    def _message(self) -> str:
        return f"{self.per_step:#.2g} backward passes per step synchronise gradients, but one is enough"

    remedy = _COMMUNICATE_LESS


class ManyCollectives(Finding, kind="collectives"):
    """Collectives per step, and the number that DDP needs."""

    per_step: float
    needed: float

    def _message(self) -> str:
        return f"{self.per_step:#.2g} collectives per step, but DDP needs {self.needed:#.2g}"

    remedy = _COMMUNICATE_LESS


def _saved(run: RunEvidence, ratio: float) -> float:
    """Return the exposed communication that a network ``1 / ratio`` times as fast would save.

    All communication then takes ``ratio`` times as long. Computation still hides as much of it as before, so
    the exposed part loses all of the saved time. If the total is unknown, the hidden part is taken as 0.
    """
    total = run.comm_s / run.step_s if run.comm_s > 0 else 0.0
    exposed = sum(run.parts.get(part, 0.0) for part in _COMMUNICATION)
    return min(exposed, (1 - ratio) * max(total, exposed))


def _communication(run: RunEvidence) -> Iterator[Claim]:
    """Yield a network that is slow for all nodes, communication of the script, and all other exposed time."""
    yield from _warned(run, "communication")
    nominal, fitted = run.facts.nominal_bytes_per_s, run.ring_bytes_per_s
    if fitted < SLOW_FABRIC * nominal:
        evidence = (SlowAllReduces(fitted_gbit_s=fitted * 8e-9, nominal_gbit_s=nominal * 8e-9),)
        yield Claim("communication", evidence, _COMMUNICATION, _saved(run, fitted / nominal))
    yield from _extra_communication(run)
    yield from _excess(run, "communication", ("transfer",))


def _extra_collectives(run: RunEvidence) -> float:
    """Return the collectives per step beyond those that DDP needs; NaN if unknown."""
    facts = run.facts
    return facts.collectives - facts.sync_passes * facts.expected_collectives


def _extra_communication(run: RunEvidence) -> Iterator[Claim]:
    """Yield synchronising passes beyond the one needed per step, and collectives of the user's code."""
    facts = run.facts
    if facts.sync_passes > 1 + _EXTRA:
        passes = SynchronisingPasses(per_step=facts.sync_passes)
        yield Claim("communication", (passes,), ("transfer",), timeless=True)
    if not _extra_collectives(run) > _EXTRA:
        return
    needed = facts.sync_passes * facts.expected_collectives
    collectives = ManyCollectives(per_step=facts.collectives, needed=needed)
    claim = Claim("communication", (collectives,), ("other",), timeless=True)
    calls = [collectives_outside(step, waiting=True) for step in facts.calls]
    shares = [seconds_of(own) / run.step_s for own in calls]
    if sum(shares) > 0:
        evidence = (collectives, *_slowest(max(calls, key=seconds_of)))
        share = float(np.mean(shares))
        claim = replace(claim, evidence=evidence, share=share, counted=True)
    yield claim


# -- all causes -----------------------------------------------------------------------


@dataclass(frozen=True)
class Cause:
    """A cause in words, and the rule that finds it in a run.

    Attributes:
        remedy: what to change, unless the evidence has remedies of its own.
        part: the part of the step, if it is always the same.
    """

    title: str
    meaning: str
    remedy: str
    rule: Callable[[RunEvidence], Iterable[Claim]]
    part: str = ""


#: By the name in causes.csv, in `bench doctor --json` and in docs/why.md; in the order in which they take
#: their shares. Calls outside the timers take equally long in each step, but collectives do not: they get
#: the rest.
CAUSES = {
    "late-rank": Cause(
        "late ranks",
        "One rank, or all ranks of one node, take longer in a part of the step, and all others wait for "
        "them; or different ranks are late in different steps.",
        SAME_WORK,
        _waiting,
        "wait",
    ),
    "cpu-starved": Cause(
        "too little CPU",
        "The ranks get less CPU time than they need: they share cores, a quota stops them, or foreign "
        "processes or other jobs use their cores.",
        "Give each rank its own cores (cluster.cpus_per_task, --cpu-bind in srun_options, OMP_NUM_THREADS), "
        "use whole nodes (exclusive: true), raise the CPU quota, and run one job at a time (max_running: 1; "
        "then bench submit --retry-disturbed).",
        _lacks_cpu,
    ),
    "host-bound": Cause(
        "slow host",
        "The host launches work more slowly than the GPU executes it, so the GPU waits for the host.",
        "Give each launch more work: a larger batch per rank, torch.compile, CUDA graphs (mode "
        "reduce-overhead); or use a host with faster or less loaded cores.",
        _host_bound,
    ),
    "computation": Cause(
        "longer computation",
        "Forward, backward or the optimizer takes longer per sample than at the baseline, or torch.compile "
        "compiles again while the training runs.",
        "Profile this part at both sizes, and compare shapes, precision, and the threads per rank.",
        _computation,
    ),
    "data-loading": Cause(
        "data loading",
        "The step waits for the next batch.",
        "Use more workers (num_workers) and prefetching, cache or decode the data beforehand, and read it "
        "from a faster file system.",
        _loading,
        "data",
    ),
    "outside-timers": Cause(
        "time outside all timers",
        "The script does other work in the step, such as checkpoints, logging or synchronisation with the "
        "device.",
        "Do such work less often or outside of the step: checkpoint and log every N steps, call .item() "
        "rarely, write files in the background.",
        _outside,
        "other",
    ),
    "communication": Cause(
        "exposed communication",
        "The ranks communicate for longer than computation hides: the network is slow, the script "
        "communicates more often than DDP needs to, or gradients are large for this batch.",
        "Communicate less per sample: a larger batch per rank, accumulation under model.no_sync(), gradients "
        "in bf16; or hide more of it: other buckets (bucket_cap_mb).",
        _communication,
        "transfer",
    ),
}
