"""The causes of a slow step: each is a class with a rule that turns facts of one run into claims.

A rule claims a share of the step only if the time of the cause was measured: as seconds of its own, or as the
excess of a part of the step. docs/why.md describes the causes. A subclass of :class:`Cause` adds a cause.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from analysis.causes.divide import COMPUTING, LEAST_SHARE, LOST, Claim, Parts
from analysis.causes.evidence import STARVED_FROM, NodeFacts, RunFacts
from analysis.checks.slow_ranks import HostBound, Straggler
from analysis.data.columns import part_title
from analysis.stats.decompose import mean
from bench.study.findings import Disturbance, ForeignJob, StudyRun, by_reason
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.measure.findings import ranks_named
from ddp_scaling_bench.records import SampledStep, SlowCall
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
#: The parts that are longer if ranks wait for a core.
_WAITING = (*COMPUTING, "other", "data")


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
    late: Sequence[Straggler] = ()
    reference: Reference | None = None
    comm_s: float = math.nan
    ring_bytes_per_s: float = math.nan
    much: frozenset[str] = frozenset()
    slow_hosts: Sequence[HostBound] = ()
    slow_host: int | None = None
    run_id: str = ""
    factor: float = 1.0

    @property
    def relative_parts(self) -> Parts:
        """Each part's fraction of the mean step of the cell."""
        return {part: self.factor * value for part, value in self.parts.items()}

    @property
    def jobs(self) -> list[Disturbance]:
        """The other jobs on the nodes of the run."""
        return [one for one in self.facts.disturbed if isinstance(one, StudyRun | ForeignJob)]

    @property
    def extra_collectives(self) -> float:
        """The collectives per step beyond those that DDP needs; NaN if unknown."""
        return self.facts.collectives - self.facts.sync_passes * self.facts.expected_collectives

    @property
    def waited_more(self) -> float:
        """Fraction of the step for which the ranks waited longer for a core than at the baseline's rate.

        It is 0 if the runs of the cell waited for a smaller fraction of the step than the baseline, and NaN
        if the waits were not measured. Waits of the baseline that were not measured are 0.
        """
        wait, base = self.facts.cpu_wait, self.reference
        if base is None or not known(wait) or not known(base.cpu_wait):
            return wait
        return wait - base.rate * base.cpu_wait / self.factor if base.waits_more else 0.0


#: The causes by their names in causes.csv, in `bench doctor --json` and in docs/why.md, in the order in which
#: they take their shares.
CAUSES: dict[str, Cause] = {}


class Cause:
    """A cause in words, and the rule that finds it in a run. Each subclass is one cause.

    Attributes:
        remedy: what to change, unless the evidence has remedies of its own.
        part: the part of the step, if it is always the same.
        excess_of: the parts of the step of which this cause explains what other causes leave.
        warnings: the warnings in logs (bench/doctor/catalogue/slow.toml) that show the cause.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    meaning: ClassVar[str]
    remedy: ClassVar[str]
    part: ClassVar[str] = ""
    excess_of: ClassVar[tuple[str, ...]] = ()
    warnings: ClassVar[Collection[str]] = ()

    def __init_subclass__(cls, *, name: str) -> None:
        cls.name = name
        CAUSES[name] = cls()

    def rule(self, run: RunEvidence) -> Iterator[Claim]:
        """Yield the claims of which the time was measured, and those that only name the cause."""
        yield from ()

    def reasons(self, run: RunEvidence) -> Iterator[Finding]:
        """Yield facts that say why the parts in ``excess_of`` are longer."""
        yield from ()

    def excess(self, run: RunEvidence) -> Iterator[Claim]:
        """Yield what other causes leave of some parts of the step, or of their excess over the baseline."""
        base = run.reference
        if base and not base.parts:
            return
        rate = {part: base.parts.get(part, 0.0) / run.factor if base else 0.0 for part in self.excess_of}
        more = {part: run.parts[part] - rate[part] for part in self.excess_of if part in run.parts}
        if base is None:
            more = {part: value for part, value in more.items() if part in LOST and part in run.much}
        if sum(more.values()) > 0:
            longer = tuple(
                LongerPart(
                    part=part,
                    seconds=run.parts[part] * run.step_s,
                    base_seconds=rate[part] * run.step_s if base else None,
                )
                for part, value in sorted(more.items(), key=lambda one: -one[1])
                if value > 0
            )
            evidence = (Longer(parts=longer), *self.reasons(run))
            yield Claim(self.name, evidence, self.excess_of, math.inf)


def claims_of(run: RunEvidence) -> list[Claim]:
    """Return the causes of one run, in the order in which :func:`divide` gives them their shares.

    What the causes with times of their own leave of a part is claimed last.
    """
    claims: list[Claim] = []
    for cause in CAUSES.values():
        claims += cause.rule(run)
        lines = [line for name, line in run.facts.warnings.items() if name in cause.warnings]
        claims += [Claim(cause.name, (line,), timeless=True) for line in lines]
        claims += cause.excess(run)
    return sorted(claims, key=lambda claim: math.isinf(claim.share))


def clocks_of(runs: Mapping[str, RunFacts]) -> dict[str, float]:
    """Return the clock (MHz) of each run of which it is known."""
    return {run_id: facts.mhz for run_id, facts in runs.items() if facts.mhz > 0}


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


class LateRanks(Cause, name="late-rank"):
    """Ranks for which the others wait; the cause of their delay may be another one."""

    title = "late ranks"
    meaning = (
        "One rank, or all ranks of one node, take longer in a part of the step, and all others wait for "
        "them; or different ranks are late in different steps."
    )
    remedy = SAME_WORK
    part = "wait"
    excess_of = ("wait",)  # different ranks are late in different steps

    def rule(self, run: RunEvidence) -> Iterator[Claim]:
        """Yield the late ranks or nodes. Their delays overlap: all shares together are the largest delay."""
        groups: dict[tuple[str, int | None], Straggler] = {}
        for late in run.late:
            key = (late.host, None if late.of_node else late.rank)
            groups[key] = max(late, groups.get(key, late), key=lambda one: one.share)
        total = sum(late.share for late in groups.values())
        worst = max((late.share for late in groups.values()), default=0.0)
        for (node, rank), late in groups.items():
            cause, why = self._why(run, late)
            part_share = min(late.part_share, 1.0)
            shown = Late(rank=rank, node=node, excess_s=late.excess_s, part=late.part, part_share=part_share)
            outside = late.part == "other"
            claim = Claim(
                cause,
                (shown, *why, *([WaitCounts()] if outside else ())),
                ("wait" if run.parts.get("wait") else "transfer", late.part, *COMPUTING, "other"),
                late.share / total * worst,
                node=node,
                # A node lacks CPU time whichever rank runs on it.
                rank=None if cause == "cpu-starved" else rank,
                part=late.part,
                counted=outside and bool(why),
            )
            if outside:
                # The shares are means over the ranks: the late rank works here while the others wait.
                own = claim.share / late.ranks
                yield replace(claim, pools=("other", *claim.pools), share=own)
                claim = replace(claim, share=claim.share - own)
            yield claim

    def _why(self, run: RunEvidence, late: Straggler) -> tuple[str, Sequence[Finding]]:
        """Return the cause of a late rank, and the evidence for it."""
        lines = self._calls(run, late)
        if late.part == "other":
            return "outside-timers", lines
        if late.samples > 1:
            return "late-rank", [MoreSamples(ratio=late.samples)]
        own = run.facts.nodes.get(late.host, NodeFacts())
        others = [node.taken for name, node in run.facts.nodes.items() if name != late.host]
        lost = own.taken > 0 and all(own.taken > 1.5 * other for other in others)
        # If all nodes lack CPU time, TooLittleCpu yields it.
        lost = lost and (late.whole_node or bool(others) or not own.waited)
        if lost and late.whole_node:
            jobs = [one for one in run.jobs if one.subject in ((late.host,), ())]
            return "cpu-starved", by_reason(jobs) if jobs else own.evidence
        if late.part in COMPUTING:
            if (ratio := self._clock_ratio(run.facts, late)) < LOW_CLOCK:
                return "late-rank", [LowClock(ratio=ratio)]
            if late.rank == run.slow_host and run.slow_hosts:
                return "host-bound", [host_limits(run)]
            # The node's other ranks are not late, so only a rank that computes slower in all parts may lack
            # CPU time.
            if lost and not late.one_part:
                lines = [*own.evidence, *lines]
        place: dict[bool | None, list[Finding]] = {True: [WholeNode()], None: [RankOrNode()], False: []}
        return "late-rank", [*place[late.of_node], *lines]

    def _clock_ratio(self, facts: RunFacts, late: Straggler) -> float:
        """Return the clock of the rank's GPU or node over the median of the other clocks; NaN if unknown."""
        cores = {name: node.freq_mhz for name, node in facts.nodes.items() if known(node.freq_mhz)}
        of_device: list[tuple[Mapping[Any, float], Any]] = [(facts.clock_mhz, late.rank), (cores, late.host)]
        for clocks, own in of_device:
            others = [mhz for name, mhz in clocks.items() if name != own]
            if own in clocks and others:
                return clocks[own] / float(np.median(others))
        return math.nan

    def _calls(self, run: RunEvidence, late: Straggler) -> list[Finding]:
        """Return the late rank's call with the most extra time, if that is at least 30 % of the excess."""
        part = {"data": "data_load", "other": None}.get(late.part, late.part)
        spent_s: dict[tuple[str, int, str], dict[bool, list[float]]] = {}
        for step in run.facts.calls:
            for call in [one for one in step.slow_calls if one.part == part]:
                times_s = spent_s.setdefault((call.path, call.line, call.function), {True: [], False: []})
                times_s[step.rank == late.rank].append(call.seconds)
        more_s = {
            call: sum(times_s[True]) - float(np.median(times_s[False] or [0.0]))
            for call, times_s in spent_s.items()
            if times_s[True]
        }
        slowest = max(more_s, key=more_s.__getitem__, default=None)
        if slowest is None or more_s[slowest] < 0.3 * late.share * run.step_s:
            return []
        path, line, function = slowest
        return [SlowerCall(function=function, path=path, line=line, excess_s=more_s[slowest])]


# -- CPU ------------------------------------------------------------------------------


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


class TooLittleCpu(Cause, name="cpu-starved"):
    """Waits for cores, other jobs on the nodes, fewer threads, and warnings about the CPU."""

    title = "too little CPU"
    meaning = (
        "The ranks get less CPU time than they need: they share cores, a quota stops them, or foreign "
        "processes or other jobs use their cores."
    )
    remedy = (
        "Give each rank its own cores (cluster.cpus_per_task, --cpu-bind in srun_options, OMP_NUM_THREADS), "
        "use whole nodes (exclusive: true), raise the CPU quota, and run one job at a time (max_running: 1; "
        "then bench submit --retry-disturbed)."
    )
    warnings = ("slow-too-many-workers", "slow-one-thread")

    def rule(self, run: RunEvidence) -> Iterator[Claim]:
        """Yield waits of all nodes, other jobs, and fewer threads; of single nodes, LateRanks yields them."""
        if not run.jobs and self._starved_everywhere(run):
            stated = [one for node in run.facts.nodes.values() for one in node.evidence[:1]]
            evidence = (*stated[:_MOST], *self._wait(run))
            yield Claim(self.name, evidence, _WAITING, run.waited_more, counted=True)
        late = {late.host for late in run.late}
        jobs = [one for one in run.jobs if not late & {*one.subject}]
        if jobs and run.waited_more != 0:
            nodes = {node for one in jobs for node in one.subject}
            evidence = (*by_reason(jobs), *self._wait(run))
            node = nodes.pop() if len(nodes) == 1 else ""
            pools = (*_WAITING, "wait")
            yield Claim(self.name, evidence, pools, run.waited_more, node=node, counted=True)
        own, base = run.facts.threads, run.reference.facts.threads if run.reference else ()
        if own and base and max(own) < min(base):
            yield Claim(self.name, (FewerThreads(threads=own[0], base_threads=base[0]),))

    def _starved_everywhere(self, run: RunEvidence) -> bool:
        """Return whether all nodes lack CPU time, and more than at the baseline.

        Waits that were measured on all nodes count even if some ranks of a node are late.
        """
        nodes = list(run.facts.nodes.values())
        everywhere = all(one.waited for one in nodes)
        late = any(one.part != "other" and (one.whole_node or not everywhere) for one in run.late)
        if not nodes or late or not all(one.starved > 0 or one.waited for one in nodes):
            return False
        if known(run.waited_more):
            return run.waited_more >= STARVED_FROM
        # The waits were not measured, but a quota or the number of threads was.
        base = run.reference.facts.nodes.values() if run.reference else ()
        more = mean(one.starved for one in nodes) - max((one.starved for one in base), default=0.0)
        return more >= STARVED_FROM

    def _wait(self, run: RunEvidence) -> Iterator[Finding]:
        """Yield the time for which the ranks waited for a core, if it was measured."""
        wait, base = run.facts.cpu_wait, run.reference
        if known(wait):
            found = WaitedForCore(share=wait, seconds=wait * run.step_s)
            if base and known(base.cpu_wait):
                base_s = base.rate * base.cpu_wait * run.step_s / run.factor
                found = replace(found, base_share=base.cpu_wait, base_seconds=base_s)
            yield found


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


def host_limits(run: RunEvidence) -> HostLimits:
    """Return the ranks whose host is the limit, which the run must have."""
    most = max(run.slow_hosts, key=lambda one: one.launch_s)
    ranks = tuple(one.rank for one in run.slow_hosts)
    return HostLimits(ranks=ranks, launch_s=most.launch_s, load_s=most.load_s, step_s=most.step_s)


class SlowHost(Cause, name="host-bound"):
    """The excess of the computation, in which the GPU waits for its host."""

    title = "slow host"
    meaning = "The host launches work more slowly than the GPU executes it, so the GPU waits for the host."
    remedy = (
        "Give each launch more work: a larger batch per rank, torch.compile, CUDA graphs (mode "
        "reduce-overhead); or use a host with faster or less loaded cores."
    )
    excess_of = COMPUTING

    def rule(self, run: RunEvidence) -> Iterator[Claim]:
        """Yield the slow hosts."""
        if self._is_limit(run):
            yield Claim(self.name, (host_limits(run),), rank=run.slow_host)

    def excess(self, run: RunEvidence) -> Iterator[Claim]:
        """Yield the excess of the computation if hosts are the limit."""
        if self._is_limit(run):
            yield from (replace(claim, rank=run.slow_host) for claim in super().excess(run))

    def reasons(self, run: RunEvidence) -> Iterator[Finding]:
        """Yield the slow hosts."""
        yield host_limits(run)

    def _is_limit(self, run: RunEvidence) -> bool:
        """Return whether hosts are the limit. If the rank is late, too, LateRanks yields it."""
        late = [one.rank for one in run.late if one.part in COMPUTING]
        return bool(run.slow_hosts) and run.slow_host not in late


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


class LongerComputation(Cause, name="computation"):
    """Recompilations, what settings and warnings show, and computation that takes longer per sample."""

    title = "longer computation"
    meaning = (
        "Forward, backward or the optimizer takes longer per sample than at the baseline, or torch.compile "
        "compiles again while the training runs."
    )
    remedy = "Profile this part at both sizes, and compare shapes, precision, and the threads per rank."
    excess_of = COMPUTING
    warnings = (
        "slow-gradient-strides",
        "slow-find-unused-parameters",
        "slow-recompilations",
        "slow-allocator-retries",
    )

    def rule(self, run: RunEvidence) -> Iterator[Claim]:
        """Yield recompilations and what settings show."""
        facts, share = run.facts, run.facts.compile_share
        if facts.recompilations > 0:
            spent_s = share * run.step_s if known(share) else None
            evidence = (Compilations(per_step=facts.recompilations, seconds=spent_s),)
            pools = ("forward", "backward", "other")
            yield Claim(self.name, evidence, pools, share, counted=True, timeless=True)
        if facts.searches_for_nothing:
            yield Claim(self.name, (NeedlessSearch(),), timeless=True)
        if facts.retries > 0:
            yield Claim(self.name, (RetriesPerStep(per_step=facts.retries),), timeless=True)

    def reasons(self, run: RunEvidence) -> Iterator[Finding]:
        """Yield low clocks, and a smaller batch unless ranks lacked CPU time, which has the same effect."""
        if not (base := run.reference):
            return
        own_mhz, base_mhz = run.facts.mhz, base.facts.mhz
        ratio = own_mhz / base_mhz if base_mhz > 0 else math.nan
        if ratio < LOW_CLOCK:
            yield LowClock(mhz=own_mhz, base_mhz=base_mhz, ratio=ratio)
        lacked = any(node.lacked_cpu for facts in (run.facts, base.facts) for node in facts.nodes.values())
        if base.batch < 1 and not lacked:
            yield SmallerBatch(ratio=base.batch)


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


def slowest_calls(calls: Iterable[SlowCall], *, rank: int | None = None) -> Iterator[Finding]:
    """Yield the slowest calls with file and line, if there are any."""
    slowest = sorted(calls, key=lambda call: -call.seconds)
    lines = {(call.path, call.line): call for call in reversed(slowest)}
    shown = tuple(sorted(lines.values(), key=lambda call: -call.seconds)[:_MOST])
    if shown:
        yield SlowestCalls(rank=rank, calls=shown)


class DataLoading(Cause, name="data-loading"):
    """The time of loading data, with the calls in it."""

    title = "data loading"
    meaning = "The step waits for the next batch."
    remedy = (
        "Use more workers (num_workers) and prefetching, cache or decode the data beforehand, and read it "
        "from a faster file system."
    )
    part = "data"
    excess_of = ("data",)

    def reasons(self, run: RunEvidence) -> Iterator[Finding]:
        """Yield the slowest calls."""
        calls = [call for step in run.facts.calls for call in step.slow_calls if call.part == "data_load"]
        yield from slowest_calls(calls)


#: Prefixes of calls of torch.distributed in the user's code, which communicate in addition to DDP, and the
#: beginnings of the names of its functions that do not communicate.
_COLLECTIVES = ("torch.distributed.", "dist.")
_LOCAL_CALLS = ("get_", "is_")
#: Calls that wait for the device, and thereby for the communication that it executes.
_WAITING_CALLS = ("Tensor.item", "Tensor.cpu", "Tensor.tolist", "Tensor.numpy", "cuda.synchronize")
#: Calls that every training loop makes outside of the timers: they are not a cause of lost time.
_OF_TRAINING = ("Optimizer.zero_grad", "Module.zero_grad")


def collectives_outside(step: SampledStep) -> list[SlowCall]:
    """Return the collectives that no timer covers, and the calls there that wait for the device."""

    def communicates(call: SlowCall) -> bool:
        local = call.function.rpartition(".")[2].startswith(_LOCAL_CALLS)
        return call.function.startswith(_COLLECTIVES) and not local

    outside = [call for call in step.slow_calls if call.part is None]
    return [call for call in outside if communicates(call) or call.function.startswith(_WAITING_CALLS)]


def seconds_of(calls: Iterable[SlowCall]) -> float:
    """Return the sum of the calls' times."""
    return sum(call.seconds for call in calls)


class CallsOutsideTimers(Finding, kind="calls-outside-timers"):
    """The time of all calls outside of the timers, mean over the ranks with a sampled step."""

    seconds: float
    ranks: int

    def _message(self) -> str:
        spent = f"take {seconds(self.seconds)} in a sampled step"
        return f"calls outside all timers {spent}, mean over {count(self.ranks, 'rank')}"


class OutsideTimers(Cause, name="outside-timers"):
    """The calls outside of all timers, and the other time there.

    The calls take equally long in each step, but collectives do not: these get the rest (Communication is
    the last cause).
    """

    title = "time outside all timers"
    meaning = (
        "The script does other work in the step, such as checkpoints, logging or synchronisation with the "
        "device."
    )
    remedy = (
        "Do such work less often or outside of the step: checkpoint and log every N steps, call .item() "
        "rarely, write files in the background."
    )
    part = "other"
    excess_of = ("other",)

    def rule(self, run: RunEvidence) -> Iterator[Claim]:
        """Yield the calls with their time in the sampled step."""
        if any(late.part == "other" for late in run.late):
            return
        of_others = (
            *_COLLECTIVES,
            *_OF_TRAINING,
            *(_WAITING_CALLS if run.extra_collectives > _EXTRA else ()),
        )
        found = [
            [one for one in step.slow_calls if one.part is None and not one.function.startswith(of_others)]
            for step in run.facts.calls
        ]
        # The whole sampled step may be slow for other reasons, so its calls are compared with a usual step.
        spent_s = float(np.mean([seconds_of(calls) for calls in found])) if found else 0.0
        share = spent_s / run.step_s
        most = max((sum(call.calls for call in step.slow_calls) for step in run.facts.calls), default=0)
        if share >= LEAST_SHARE and spent_s >= _LEAST_SAMPLED_S + _PROFILED_CALL_S * most:
            step, calls = max(zip(run.facts.calls, found, strict=True), key=lambda one: seconds_of(one[1]))
            evidence = (
                CallsOutsideTimers(seconds=spent_s, ranks=len(found)),
                *slowest_calls(calls, rank=step.rank if len(found) > 1 else None),
            )
            # In one step, a call can take long by chance. Its time is certain if other steps lose it, too.
            counted = run.parts.get("other", 0.0) >= max(LEAST_SHARE, share / 2)
            yield Claim(self.name, evidence, ("other",), share, counted=counted)


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


class Communication(Cause, name="communication"):
    """A network that is slow for all nodes, communication of the script, and all other exposed time."""

    title = "exposed communication"
    meaning = (
        "The ranks communicate for longer than computation hides: the network is slow, the script "
        "communicates more often than DDP needs to, or gradients are large for this batch."
    )
    remedy = (
        "Communicate less per sample: a larger batch per rank, accumulation under model.no_sync(), gradients "
        "in bf16; or hide more of it: other buckets (bucket_cap_mb)."
    )
    part = "transfer"
    excess_of = ("transfer",)
    warnings = ("slow-nccl-socket", "slow-no-peer-access")

    def rule(self, run: RunEvidence) -> Iterator[Claim]:
        """Yield a slow network, passes that synchronise needlessly, and collectives of the user's code."""
        facts, fitted = run.facts, run.ring_bytes_per_s
        if fitted < SLOW_FABRIC * facts.nominal_bytes_per_s:
            nominal = facts.nominal_bytes_per_s
            slow = SlowAllReduces(fitted_gbit_s=fitted * 8e-9, nominal_gbit_s=nominal * 8e-9)
            yield Claim(self.name, (slow,), ("transfer", "wait"), self._saved(run, fitted / nominal))
        if facts.sync_passes > 1 + _EXTRA:
            passes = SynchronisingPasses(per_step=facts.sync_passes)
            yield Claim(self.name, (passes,), ("transfer",), timeless=True)
        if run.extra_collectives > _EXTRA:
            needed = facts.sync_passes * facts.expected_collectives
            evidence: list[Finding] = [ManyCollectives(per_step=facts.collectives, needed=needed)]
            calls = [collectives_outside(step) for step in facts.calls]
            share = float(np.mean([*map(seconds_of, calls)])) / run.step_s if any(calls) else math.nan
            evidence += slowest_calls(max(calls, key=seconds_of, default=[]))
            yield Claim(self.name, tuple(evidence), ("other",), share, counted=known(share), timeless=True)

    def _saved(self, run: RunEvidence, ratio: float) -> float:
        """Return the exposed communication that a network ``1 / ratio`` times as fast would save.

        All communication then takes ``ratio`` times as long. Computation still hides as much of it as before,
        so the exposed part loses all of the saved time. If the total is unknown, the hidden part is taken
        as 0.
        """
        total = run.comm_s / run.step_s if run.comm_s > 0 else 0.0
        exposed = run.parts.get("transfer", 0.0) + run.parts.get("wait", 0.0)
        return min(exposed, (1 - ratio) * max(total, exposed))
