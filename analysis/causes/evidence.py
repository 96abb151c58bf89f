"""Read the facts that a run recorded about itself, from which its causes of lost time are derived.

The files are conditions.json, env.json and sampled_step.json of the run. Each file, and each value in it, may
be missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from analysis.data.environment import crowds, positive
from analysis.stats.decompose import mean
from analysis.text import one_line
from bench.study.conditions import cores_in_use, host_of_rank, objects, read_windows
from bench.study.findings import Disturbance, ForeignCpu
from bench.study.reasons import LogCause
from bench.study.run_json import read_sampled_step
from ddp_scaling_bench.files import read_json
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.known_strategies import STRATEGIES
from ddp_scaling_bench.records import SampledStep
from ddp_scaling_bench.run_folder import RunFolder
from ddp_scaling_bench.units import count, known, short_name, short_percent

#: Smaller fractions of missing CPU time are ignored.
STARVED_FROM = 0.05


class CpuQuota(Finding, kind="cpu-quota"):
    """Processes that a CPU quota stopped, for a ``share`` of the time."""

    node: str
    share: float

    def _message(self) -> str:
        stopped = f"a CPU quota stopped the processes on {short_name(self.node)}"
        return f"{stopped} for {short_percent(self.share)} of the time"


class FewCores(Finding, kind="few-cores"):
    """Ranks with more threads than cores."""

    node: str
    threads: int
    ranks: int
    cores: int

    def _message(self) -> str:
        threads = f"{self.threads} threads of {count(self.ranks, 'rank')}"
        return f"{threads} share {count(self.cores, 'core')} on {short_name(self.node)}"


class WarningLine(Finding, kind="log-line"):
    """A warning in a log; ``warning`` is its name, and ``change`` its remedy, in `bench doctor`."""

    warning: str
    path: str
    line: int | None
    text: str
    change: str = ""

    def _remedy(self) -> str:
        return self.change

    def _message(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True)
class NodeFacts:
    """CPU facts of one node in one run.

    Attributes:
        starved: fraction of the CPU time that the ranks did not get, because of a quota or because threads
            share cores; 0 without evidence. It is at most ``wait``.
        foreign: CPU time of foreign processes as a fraction of the cores in use. The node may have other
            cores for these processes, so this is not the time that the ranks lose.
        wait: fraction of the step for which the ranks waited for a core (mean over the node's ranks); NaN if
            it was not measured.
        spare: number of idle cores as a fraction of the cores in use; NaN if unknown.
        evidence: the facts about ``starved`` and ``foreign``.
        freq_mhz: mean clock of the cores; NaN if unknown.
    """

    starved: float = 0.0
    foreign: float = 0.0
    wait: float = math.nan
    spare: float = math.nan
    evidence: tuple[Finding, ...] = ()
    freq_mhz: float = math.nan

    @property
    def waited(self) -> bool:
        """True if the measured wait for cores is long enough to be a cause."""
        return self.wait >= STARVED_FROM

    @property
    def lacked_cpu(self) -> bool:
        """True if the ranks lacked CPU time, or possibly lacked it because their waits were not measured."""
        return self.starved > 0 or self.waited or (self.foreign > 0 and math.isnan(self.wait))

    @property
    def taken(self) -> float:
        """``starved``, or ``foreign`` if that is more and the node had too few idle cores for it."""
        crowded = self.waited or not self.foreign <= self.spare
        return max(self.starved, self.foreign if crowded else 0.0)


@dataclass(frozen=True)
class RunFacts:
    """The facts of one run; empty, None or NaN if they are not known.

    Attributes:
        nodes: the CPU facts of each node, by node name.
        clock_mhz: clock of each rank's GPU, by rank.
        threads: the different numbers of torch threads that ranks have.
        collectives: collectives per step of a rank (mean over the ranks).
        sync_passes: backward passes per step that synchronise gradients (mean over the ranks).
        expected_collectives: maximum number of collectives that DDP needs in a pass that synchronises.
        recompilations: compilations per step of a rank (mean over the ranks).
        compile_share: fraction of the windows' time that the recompilations took.
        retries: allocator retries per step of the rank with the most retries.
        searches_for_nothing: true if DDP searches for unused parameters and all parameters are used.
        warnings: the log's first warning of each kind, by its name in `bench doctor`.
        calls: the sampled step of each rank, with its slow calls.
        disturbed: what disturbed the run from outside.
        nominal_bytes_per_s: nominal rate of the slowest node's interface.
    """

    nodes: dict[str, NodeFacts] = field(default_factory=dict)
    clock_mhz: dict[int, float] = field(default_factory=dict)
    threads: tuple[int, ...] = ()
    collectives: float = math.nan
    sync_passes: float = math.nan
    expected_collectives: float = math.nan
    recompilations: float = math.nan
    compile_share: float = math.nan
    retries: float = math.nan
    searches_for_nothing: bool = False
    warnings: dict[str, Finding] = field(default_factory=dict)
    calls: tuple[SampledStep, ...] = ()
    disturbed: tuple[Disturbance, ...] = ()
    nominal_bytes_per_s: float = math.nan

    @property
    def cpu_wait(self) -> float:
        """Fraction of the step for which the ranks waited for a core; NaN if it was not measured."""
        return float(np.mean([node.wait for node in self.nodes.values()])) if self.nodes else math.nan

    @property
    def mhz(self) -> float:
        """The lowest clock of the GPUs, else the mean of the nodes' cores; NaN if unknown."""
        return min(self.clock_mhz.values(), default=mean(node.freq_mhz for node in self.nodes.values()))


def read_facts(
    attempt: str | Path,
    *,
    steps: float,
    step_s: float = math.nan,
    disturbed: Iterable[Disturbance] | None = None,
    warnings: Sequence[LogCause] | None = None,
) -> RunFacts:
    """Read the facts of the run in the folder ``attempt``.

    ``steps`` is the number of steps in all throughput windows, and ``step_s`` the seconds per step; NaN if
    unknown. ``warnings`` are those of the run's end.
    """
    folder = RunFolder(Path(attempt))
    windows = read_windows(folder) or []
    env = read_json(folder.env) or {}
    foreign = tuple(disturbed or ())
    nodes = [node for window in windows for node in window.nodes]
    ranks = [rank for window in windows for rank in window.ranks]
    windows_s = sum(window.seconds for window in windows)
    # Windows begin and end with samples, which are not measured.
    measured_s = steps * step_s if steps * step_s > 0 else windows_s
    compiled_s = _sums(ranks, "rank", "compile_s").values()
    ddp = _dict(env.get("ddp"))
    rates = [_number(_dict(node.get("net")).get("rate_mbit_s")) * 1e6 / 8 for node in nodes]
    return RunFacts(
        nodes=_nodes(nodes, env, foreign, windows_s=windows_s, waits=_waits(ranks, env, measured_s)),
        clock_mhz=_clocks(ranks),
        threads=tuple(sorted({n for one in objects(env.get("cores")) for n in _threads(one)})),
        collectives=_per_step(ranks, "collectives", steps),
        sync_passes=_per_step(ranks, "sync_passes", steps),
        expected_collectives=_expected(env),
        recompilations=_per_step(ranks, "recompilations", steps),
        compile_share=mean(compiled_s) / measured_s if measured_s > 0 else math.nan,
        retries=max(_sums(ranks, "rank", "allocator_retries").values(), default=math.nan) / steps,
        searches_for_nothing=ddp.get("find_unused_parameters") is True
        and ddp.get("unused_parameter_bytes") == 0,
        warnings={
            line.cause: WarningLine(
                warning=line.cause,
                path=one_line(line.path or "log", limit=80),
                line=line.line,
                text=one_line(line.evidence, limit=160),
                change=line.remedy,
            )
            for line in reversed(warnings or ())
        },
        calls=tuple(read_sampled_step(folder)),
        disturbed=foreign,
        nominal_bytes_per_s=min(rates) if rates and all(rate > 0 for rate in rates) else math.nan,
    )


def _nodes(
    entries: Sequence[Mapping[str, Any]],
    env: dict[str, Any],
    disturbed: Sequence[Disturbance],
    *,
    windows_s: float,
    waits: Mapping[str, float],
) -> dict[str, NodeFacts]:
    foreign = {
        node: one
        for one in disturbed
        for node in one.subject
        if isinstance(one, ForeignCpu) and (one.share or 0) > 0
    }
    lacking: dict[str, list[tuple[float, Finding]]] = {str(entry.get("node")): [] for entry in entries}
    for name, stopped_s in _sums(entries, "node", "throttled_s").items():
        share = _fraction(stopped_s, windows_s)
        lacking[str(name)].append((share, CpuQuota(node=str(name), share=share)))
    # Nodes that share a machine are containers: their crowd is a validity error, and no cause.
    for crowd in [one for one in crowds(env) if len(one.hosts) == 1]:
        name = crowd.hosts[0]
        few = FewCores(node=name, threads=crowd.threads, ranks=crowd.ranks, cores=crowd.cores)
        lacking.setdefault(name, []).append((1 - crowd.cores / crowd.threads, few))
    clocks = {str(entry.get("node")): _number(entry.get("freq_mhz")) for entry in entries}
    used = cores_in_use(env)
    total = {str(one.get("node")): positive(one.get("cores")) for one in objects(env.get("cores"))}
    facts = {}
    for name in dict.fromkeys([*lacking, *foreign, *waits]):
        wait, cores = waits.get(name, math.nan), total.get(name)
        # Threads that sleep or wait for the GPU do not wait for a core.
        shares = [(min(share, wait) if wait >= 0 else share, one) for share, one in lacking.get(name, [])]
        enough = [(share, one) for share, one in shares if share >= STARVED_FROM]
        facts[name] = NodeFacts(
            starved=max((share for share, _ in enough), default=0.0),
            foreign=foreign[name].share or 0.0 if name in foreign else 0.0,
            wait=wait,
            spare=max(cores / used[name] - 1, 0.0) if cores and name in used else math.nan,
            evidence=(*(one for _, one in enough), *([foreign[name]] if name in foreign else [])),
            freq_mhz=clocks.get(name, math.nan),
        )
    return facts


def _fraction(spent_s: float, seconds: float) -> float:
    return min(spent_s / seconds, 1.0) if seconds > 0 else 0.0


def _waits(ranks: Sequence[Mapping[str, Any]], env: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """Return the fraction of the time for which the ranks of each node waited for a core, if measured."""
    hosts, sums = host_of_rank(env), _sums(ranks, "rank", "cpu_wait_s", missing=math.nan)
    waits: dict[str, list[float]] = {}
    for rank, wait_s in sums.items():
        if rank in hosts:
            waits.setdefault(hosts[rank], []).append(wait_s)
    means = {host: float(np.mean(values)) for host, values in waits.items()}
    return {host: _fraction(wait_s, seconds) for host, wait_s in means.items() if math.isfinite(wait_s)}


def _clocks(ranks: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Return each rank's clock: the higher of its values before and after a window, mean over windows."""
    found: dict[int, list[float]] = {}
    for entry in ranks:
        samples = [_dict(_dict(entry.get("clocks")).get(name)).get("sm_mhz") for name in ("before", "after")]
        values = [value for value in map(_number, samples) if known(value)]
        if values and isinstance(rank := entry.get("rank"), int):
            found.setdefault(rank, []).append(max(values))
    return {rank: mean(values) for rank, values in found.items()}


def _expected(env: Mapping[str, Any]) -> float:
    """Return DDP's maximum number of collectives in a pass that synchronises gradients; NaN if unknown."""
    ddp, strategy = _dict(env.get("ddp")), STRATEGIES.get(str(env.get("strategy")))
    buckets = ddp.get("bucket_bytes")
    if not isinstance(buckets, list) or not buckets or (strategy and strategy.sharded):
        return math.nan
    search = 1 if ddp.get("find_unused_parameters") else 0
    # DDP broadcasts the buffers of each data type together.
    buffers = 2 if ddp.get("broadcast_buffers") and ddp.get("buffer_bytes") else 0
    return len(buckets) + search + buffers


# -- values of JSON -------------------------------------------------------------------


def _sums(
    entries: Iterable[Mapping[str, Any]], by: str, name: str, *, missing: float | None = None
) -> dict[Any, float]:
    """Return the sum over the windows of a value of each rank or node that has one, or of ``missing``."""
    sums: dict[Any, float] = {}
    for entry in entries:
        value = entry.get(name) if isinstance(entry.get(name), int | float) else missing
        if value is not None and isinstance(who := entry.get(by), int | str | None):
            sums[who] = sums.get(who, 0.0) + value
    return sums


def _per_step(ranks: Iterable[Mapping[str, Any]], name: str, steps: float) -> float:
    return mean(_sums(ranks, "rank", name).values()) / steps if steps > 0 else math.nan


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _threads(entry: Mapping[str, Any]) -> list[int]:
    values = entry.get("threads_per_rank")
    return [one for one in values if isinstance(one, int)] if isinstance(values, list) else []


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
