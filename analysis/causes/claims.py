"""Claim causes for one run: each rule turns facts of the run into a cause with its evidence.

A rule claims a share of the step only if the time of the cause was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from analysis.causes.catalogue import OF_WARNINGS
from analysis.causes.divide import COMPUTING, LEAST_SHARE, Claim, Parts
from analysis.causes.evidence import (
    NodeFacts,
    RunFacts,
    calls_outside,
    collectives_outside,
    seconds_of,
)
from analysis.checks.host_bound import HostBound
from analysis.checks.slow_ranks import Straggler
from analysis.stats.columns import part_title
from bench.study.findings import Disturbance, ForeignJob, StudyRun, by_reason
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.measure.findings import ranks_named
from ddp_scaling_bench.records import SlowCall
from ddp_scaling_bench.units import clauses, count, seconds, short_name, short_percent

#: Data loading is a cause if it takes at least this fraction of the step.
MUCH_LOADING = 0.08
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
        cause: late-rank or late-node.
        alternative: late-node if the study does not distinguish the rank from its node; else empty.
        samples: its samples divided by those of the rank with the fewest; 1 if all are equal.
        one_part: true if the excess is in one part of the computation only.
    """

    whole_node: bool
    cause: str
    alternative: str = ""
    samples: float = 1.0
    one_part: bool = False


@dataclass(frozen=True)
class RunEvidence:
    """Everything that the rules know about one run.

    Attributes:
        parts: each part's fraction of the step; their sum is 1.
        step_s: seconds per step.
        factor: ``step_s`` divided by the mean over the runs of the cell.
        reference: the facts of a run of the baseline; None for the baseline itself.
        smaller_batch: the batch per rank divided by that of the baseline; 1 if it is the same.
        comm_s: total communication per step, hidden or not, in seconds; NaN if unknown.
        ring_bytes_per_s: fitted rate of the network; NaN if unknown.
        loading: true if data loading is one of the causes of the run's cell.
        slow_hosts: the ranks whose host is the limit.
        slow_host: the rank whose host is the limit in most runs of the cell, if it is one rank only.
    """

    parts: Parts
    step_s: float
    facts: RunFacts = field(default_factory=RunFacts)
    late: Sequence[LateRank] = ()
    reference: RunFacts | None = None
    smaller_batch: float = 1.0
    comm_s: float = math.nan
    ring_bytes_per_s: float = math.nan
    loading: bool = False
    slow_hosts: Sequence[HostBound] = ()
    slow_host: int | None = None
    run_id: str = ""
    factor: float = 1.0


def claims_of(run: RunEvidence) -> list[Claim]:
    """Return the causes of one run; those with a share are in the order that ``divide`` expects."""
    # The calls of _outside take equally long in each step, but collectives do not: they get the rest.
    rules = (
        *(_late, _starved, _clocks, _recompilation, _loading, _slow_fabric, _outside, _extra_communication),
        *(_host_bound, _disturbed, _warned, _fewer_threads, _smaller_share),
    )
    return [claim for rule in rules for claim in rule(run)]


# -- late ranks and nodes -------------------------------------------------------------


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


def _late(run: RunEvidence) -> Iterator[Claim]:
    """Yield the late ranks or nodes. Their delays overlap, so all shares together equal the largest delay."""
    groups: dict[tuple[str, int | None], LateRank] = {}
    for late in run.late:
        key = (late.host, None if late.whole_node and late.cause == "late-node" else late.rank)
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
    cause, alternative, why = _why_late(run, late)
    part_share = min(late.part_share, 1.0)
    shown = Late(rank=rank, node=node, excess_s=late.excess_s, part=late.part, part_share=part_share)
    evidence = (shown, *why)
    outside = cause == "outside-timers"
    return Claim(
        cause,
        (*evidence, WaitCounts()) if outside else evidence,
        ("wait", late.part, *COMPUTING, "other", "transfer"),
        share,
        node=node,
        # A node lacks CPU time whichever rank runs on it.
        rank=None if cause in ("cpu-starved", "overlap") else rank,
        part=late.part,
        alternative=alternative,
        counted=outside and bool(why),
    )


def _why_late(run: RunEvidence, late: LateRank) -> tuple[str, str, Sequence[Finding]]:
    """Return the cause of a late rank, its alternative, and the evidence for it."""
    lines = _calls_of_late(run, late)
    if late.part == "other":
        return "outside-timers", "", lines
    if late.samples > 1:
        return "late-rank", "", [MoreSamples(ratio=late.samples)]
    own = run.facts.nodes.get(late.host, NodeFacts())
    others = [node.taken for name, node in run.facts.nodes.items() if name != late.host]
    lost = own.taken > 0 and all(own.taken > 1.5 * other for other in others)
    lost = lost and (late.whole_node or bool(others) or not own.waited)  # else see _starved
    if lost and late.whole_node:
        jobs = [one for one in _jobs(run.facts) if one.subject in ((late.host,), ())]
        return ("overlap", "", by_reason(jobs)) if jobs else ("cpu-starved", "", own.evidence)
    ratio = _clock_ratio(run.facts, late)
    if ratio < LOW_CLOCK and late.part in COMPUTING:
        return "clocks", "", [LowClock(ratio=ratio)]
    if late.part in COMPUTING and late.rank == run.slow_host and run.slow_hosts:
        return "host-bound", "", [_host_limits(run)]
    # The node's other ranks are not late, so only a rank that computes slower in all parts may lack CPU time.
    if lost and late.part in COMPUTING and not late.one_part:
        return late.cause, "cpu-starved", [*own.evidence, *lines]
    return late.cause, late.alternative, lines


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
    """The share of the step for which the ranks waited for a core, here and at the baseline."""

    share: float
    base_share: float | None = None

    def _message(self) -> str:
        text = f"the ranks waited for a core in {short_percent(self.share)} of the step"
        return (
            text if self.base_share is None else f"{text} ({short_percent(self.base_share)} at the baseline)"
        )


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
    known = [one for node in nodes for one in node.evidence[:1]]
    evidence = (*known[:_MOST], *_about_wait(run))
    yield Claim("cpu-starved", evidence, _WAITING, _mean_wait(run.facts), counted=True)


def _about_wait(run: RunEvidence) -> Iterator[Finding]:
    """Yield the time for which the ranks waited for a core, if it was measured."""
    wait = _mean_wait(run.facts)
    if math.isfinite(wait):
        base = _mean_wait(run.reference) if run.reference else math.nan
        yield WaitedForCore(share=wait, base_share=base if math.isfinite(base) else None)


def _mean_wait(facts: RunFacts) -> float:
    """Return the fraction of the step for which the ranks waited for a core; NaN if it was not measured."""
    return float(np.mean([node.wait for node in facts.nodes.values()])) if facts.nodes else math.nan


def _clocks(run: RunEvidence) -> Iterator[Claim]:
    """Yield clocks that are lower than at the baseline."""
    if run.reference is None:
        return
    own, base = _mean_clock(run.facts), _mean_clock(run.reference)
    ratio = own / base if base > 0 else math.nan
    if ratio < LOW_CLOCK:
        yield Claim("clocks", (LowClock(mhz=own, base_mhz=base, ratio=ratio),))


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
    """Yield ``host-bound`` without a share: the time of the GPU's work alone is not known.

    If the rank is late, too, :func:`_late` yields it, with the time for which the others wait.
    """
    late = [one.rank for one in run.late if one.part in COMPUTING]
    if run.slow_hosts and run.slow_host not in late:
        yield Claim("host-bound", (_host_limits(run),), rank=run.slow_host)


def _fewer_threads(run: RunEvidence) -> Iterator[Claim]:
    base = run.reference.threads if run.reference else ()
    if run.facts.threads and base and max(run.facts.threads) < min(base):
        fewer = FewerThreads(threads=run.facts.threads[0], base_threads=base[0])
        yield Claim("cpu-starved", (fewer,))


def _disturbed(run: RunEvidence) -> Iterator[Claim]:
    """Yield other jobs on the nodes. The share is the time for which the ranks waited for a core."""
    late = {late.host for late in run.late}
    jobs = [one for one in _jobs(run.facts) if not late & {*one.subject}]
    if jobs:
        nodes = {node for one in jobs for node in one.subject}
        evidence = (*by_reason(jobs), *_about_wait(run))
        share = _mean_wait(run.facts)
        node = nodes.pop() if len(nodes) == 1 else ""
        yield Claim("overlap", evidence, (*_WAITING, "wait"), share, node=node, counted=True)


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


class Loading(Finding, kind="loading"):
    """The time of loading data, per step and as a share of the step."""

    seconds: float
    share: float

    def _message(self) -> str:
        return f"loading data takes {seconds(self.seconds)} per step ({short_percent(self.share)})"


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


class RetriesPerStep(Finding, kind="allocator-retries"):
    """Retries of the allocator per step of the rank with the most."""

    per_step: float

    def _message(self) -> str:
        return f"{self.per_step:#.2g} retries of the allocator per step"


class SmallerBatch(Finding, kind="smaller-batch"):
    """A smaller batch per rank than at the baseline."""

    ratio: float

    def _message(self) -> str:
        return f"the batch per rank is {short_percent(self.ratio)} of that of the baseline"


def _recompilation(run: RunEvidence) -> Iterator[Claim]:
    facts = run.facts
    if not facts.recompilations > 0:
        return
    share = facts.compile_share
    spent_s = share * run.step_s if math.isfinite(share) else None
    evidence = (Compilations(per_step=facts.recompilations, seconds=spent_s),)
    pools = ("forward", "backward", "other")
    yield Claim("recompilation", evidence, pools, share, counted=True, timeless=True)


def _loading(run: RunEvidence) -> Iterator[Claim]:
    if run.loading:
        share = run.parts.get("data", 0.0)
        calls = [call for step in run.facts.calls for call in step.slow_calls if call.part == "data_load"]
        evidence = (Loading(seconds=share * run.step_s, share=share), *_slowest(calls))
        yield Claim("data-loading", evidence, ("data",), share, part="data")


def _outside(run: RunEvidence) -> Iterator[Claim]:
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
        yield Claim("outside-timers", evidence, ("other",), share, part="other", counted=counted)


def _slowest(calls: Iterable[SlowCall], *, rank: int | None = None) -> Iterator[Finding]:
    """Yield the slowest calls with file and line, if there are any."""
    slowest = sorted(calls, key=lambda call: -call.seconds)
    lines = {(call.path, call.line): call for call in reversed(slowest)}
    shown = tuple(sorted(lines.values(), key=lambda call: -call.seconds)[:_MOST])
    if shown:
        yield SlowestCalls(rank=rank, calls=shown)


def _warned(run: RunEvidence) -> Iterator[Claim]:
    """Yield the causes that only a setting or a warning in the log shows."""
    facts = run.facts
    found: dict[str, Finding] = {}
    if facts.searches_for_nothing:
        found["unused-parameters"] = NeedlessSearch()
    if facts.retries > 0:
        found["memory-pressure"] = RetriesPerStep(per_step=facts.retries)
    for name, line in facts.warnings.items():
        if name in OF_WARNINGS:
            found.setdefault(OF_WARNINGS[name], line)
    if facts.recompilations > 0:
        found.pop("recompilation", None)
    for cause, shown in found.items():
        yield Claim(cause, (shown,), timeless=True)


def _smaller_share(run: RunEvidence) -> Iterator[Claim]:
    """Yield ``smaller-share``, unless the run or its baseline lacked CPU time, which has the same effect."""
    facts = [run.facts, *([run.reference] if run.reference else [])]
    lacked = any(node.lacked_cpu for one in facts for node in one.nodes.values())
    if run.smaller_batch < 1 and not lacked:
        yield Claim("smaller-share", (SmallerBatch(ratio=run.smaller_batch),))


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


class SynchronisingPasses(Finding, kind="synchronising-passes"):
    """Backward passes per step that synchronise gradients."""

    per_step: float

    def _message(self) -> str:
        return f"{self.per_step:#.2g} backward passes per step synchronise gradients, but one is enough"


class ManyCollectives(Finding, kind="collectives"):
    """Collectives per step, and the number that DDP needs."""

    per_step: float
    needed: float

    def _message(self) -> str:
        return f"{self.per_step:#.2g} collectives per step, but DDP needs {self.needed:#.2g}"


def _saved(run: RunEvidence, ratio: float) -> float:
    """Return the exposed communication that a network ``1 / ratio`` times as fast would save.

    All communication then takes ``ratio`` times as long. Computation still hides as much of it as before, so
    the exposed part loses all of the saved time. If the total is unknown, the hidden part is taken as 0.
    """
    total = run.comm_s / run.step_s if run.comm_s > 0 else 0.0
    exposed = sum(run.parts.get(part, 0.0) for part in _COMMUNICATION)
    return min(exposed, (1 - ratio) * max(total, exposed))


def _slow_fabric(run: RunEvidence) -> Iterator[Claim]:
    """Yield a network that is slow for all nodes."""
    nominal, fitted = run.facts.nominal_bytes_per_s, run.ring_bytes_per_s
    if fitted < SLOW_FABRIC * nominal:
        evidence = (SlowAllReduces(fitted_gbit_s=fitted * 8e-9, nominal_gbit_s=nominal * 8e-9),)
        yield Claim("slow-fabric", evidence, _COMMUNICATION, _saved(run, fitted / nominal), part="transfer")


def _extra_collectives(run: RunEvidence) -> float:
    """Return the collectives per step beyond those that DDP needs; NaN if unknown."""
    facts = run.facts
    return facts.collectives - facts.sync_passes * facts.expected_collectives


def _extra_communication(run: RunEvidence) -> Iterator[Claim]:
    """Yield synchronising passes beyond the one needed per step, and collectives of the user's code."""
    facts = run.facts
    if facts.sync_passes > 1 + _EXTRA:
        passes = SynchronisingPasses(per_step=facts.sync_passes)
        yield Claim("extra-communication", (passes,), part="transfer", timeless=True)
    if not _extra_collectives(run) > _EXTRA:
        return
    needed = facts.sync_passes * facts.expected_collectives
    collectives = ManyCollectives(per_step=facts.collectives, needed=needed)
    claim = Claim("extra-communication", (collectives,), part="other", timeless=True)
    calls = [collectives_outside(step, waiting=True) for step in facts.calls]
    shares = [seconds_of(own) / run.step_s for own in calls]
    if sum(shares) > 0:
        evidence = (collectives, *_slowest(max(calls, key=seconds_of)))
        share = float(np.mean(shares))
        claim = replace(claim, evidence=evidence, pools=("other",), share=share, counted=True)
    yield claim
