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
from analysis.text import one_line
from bench.study.conditions import Window, cores_in_use, host_of_rank, objects, read_windows
from bench.study.findings import Disturbance, ForeignCpu
from bench.study.reasons import LogCause
from bench.study.run_json import read_sampled_step
from ddp_scaling_bench.files import read_json
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.known_strategies import STRATEGIES
from ddp_scaling_bench.records import SampledStep, SlowCall
from ddp_scaling_bench.run_folder import RunFolder
from ddp_scaling_bench.units import count, short_name, short_percent

#: Prefixes of calls of torch.distributed in the user's code, which communicate in addition to DDP, and the
#: beginnings of the names of its functions that do not communicate.
_COLLECTIVES = ("torch.distributed.", "dist.")
_LOCAL_CALLS = ("get_", "is_")
#: Calls that wait for the device, and thereby for the communication that it executes.
_WAITING_CALLS = ("Tensor.item", "Tensor.cpu", "Tensor.tolist", "Tensor.numpy", "cuda.synchronize")

#: Calls that every training loop makes outside of the timers: they are not a cause of lost time.
_OF_TRAINING = ("Optimizer.zero_grad", "Module.zero_grad")


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


#: The causes that warnings in logs (bench/doctor/catalogue/slow.toml) show.
OF_WARNINGS = {
    "slow-gradient-strides": "computation",
    "slow-find-unused-parameters": "computation",
    "slow-recompilations": "computation",
    "slow-allocator-retries": "computation",
    "slow-too-many-workers": "cpu-starved",
    "slow-one-thread": "cpu-starved",
    "slow-nccl-socket": "communication",
    "slow-no-peer-access": "communication",
}


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
        warnings: the log's first warning of each cause (named as by `bench doctor`).
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
    found = tuple(disturbed or ())
    ranks = [rank for window in windows for rank in window.ranks]
    # Windows begin and end with samples, which are not measured.
    seconds = steps * step_s if steps * step_s > 0 else sum(window.seconds for window in windows)
    compiled = _sum_by_rank(ranks, "compile_s")
    own = _dict(env.get("ddp"))
    return RunFacts(
        nodes=_nodes(windows, env, found, measured_s=seconds),
        clock_mhz=_clocks(ranks),
        threads=tuple(
            sorted({n for one in objects(env.get("cores")) for n in _numbers(one, "threads_per_rank")})
        ),
        collectives=_per_step(ranks, "collectives", steps),
        sync_passes=_per_step(ranks, "sync_passes", steps),
        expected_collectives=_expected(env),
        recompilations=_per_step(ranks, "recompilations", steps),
        compile_share=float(np.mean(compiled)) / seconds if compiled and seconds > 0 else math.nan,
        retries=max(_sum_by_rank(ranks, "allocator_retries"), default=math.nan) / steps,
        searches_for_nothing=own.get("find_unused_parameters") is True
        and own.get("unused_parameter_bytes") == 0,
        warnings=_warnings(warnings or ()),
        calls=tuple(read_sampled_step(folder)),
        disturbed=found,
        nominal_bytes_per_s=_nominal(windows),
    )


def _warnings(warnings: Sequence[LogCause]) -> dict[str, Finding]:
    return {
        one.cause: WarningLine(
            warning=one.cause,
            path=one_line(one.path or "log", limit=80),
            line=one.line,
            text=one_line(one.evidence, limit=160),
            change=one.remedy,
        )
        for one in reversed(warnings)
        if one.cause in OF_WARNINGS
    }


# -- CPU ------------------------------------------------------------------------------


def _nodes(
    windows: Sequence[Window], env: dict[str, Any], disturbed: Sequence[Disturbance], *, measured_s: float
) -> dict[str, NodeFacts]:
    found: dict[str, list[tuple[float, Finding]]] = {}
    foreign = {
        node: one
        for one in disturbed
        for node in one.subject
        if isinstance(one, ForeignCpu) and (one.share or 0) > 0
    }
    seconds = sum(window.seconds for window in windows)
    entries = [node for window in windows for node in window.nodes]
    throttled: dict[str, float] = {}
    for node in entries:
        name = str(node.get("node"))
        throttled[name] = throttled.get(name, 0.0) + _number(node, "throttled_s")
    for name, stopped in throttled.items():
        share = _part_of(stopped, seconds)
        found.setdefault(name, []).append((share, CpuQuota(node=name, share=share)))
    # Nodes that share a machine are containers: their crowd is a validity error, and no cause.
    for crowd in [one for one in crowds(env) if len(one.hosts) == 1]:
        name = crowd.hosts[0]
        few = FewCores(node=name, threads=crowd.threads, ranks=crowd.ranks, cores=crowd.cores)
        lacking = 1 - crowd.cores / crowd.threads
        found.setdefault(name, []).append((lacking, few))
    waits = _waits(windows, env, measured_s)
    spare = _spare_cores(env)
    clocks = {str(node.get("node")): _number(node, "freq_mhz", math.nan) for node in entries}
    facts = {}
    for name in dict.fromkeys([*clocks, *found, *foreign, *waits]):
        wait = waits.get(name, math.nan)
        # Threads that sleep or wait for the GPU do not wait for a core.
        shares = [(min(share, wait) if wait >= 0 else share, one) for share, one in found.get(name, [])]
        known = [(share, one) for share, one in shares if share >= STARVED_FROM]
        evidence = [one for _, one in known]
        evidence += [foreign[name]] if name in foreign else []
        facts[name] = NodeFacts(
            starved=max((share for share, _ in known), default=0.0),
            foreign=foreign[name].share or 0.0 if name in foreign else 0.0,
            wait=wait,
            spare=spare.get(name, math.nan),
            evidence=tuple(evidence),
            freq_mhz=clocks.get(name, math.nan),
        )
    return facts


def _part_of(spent_s: float, seconds: float) -> float:
    return min(spent_s / seconds, 1.0) if seconds > 0 else 0.0


def _waits(windows: Sequence[Window], env: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """Return the fraction of the time for which the ranks of each node waited for a core, if measured."""
    by_rank: dict[int, list[float]] = {}
    for rank in [rank for window in windows for rank in window.ranks]:
        if isinstance(rank.get("rank"), int):
            by_rank.setdefault(rank["rank"], []).append(_number(rank, "cpu_wait_s", math.nan))
    waits: dict[str, list[float]] = {}
    for number, host in host_of_rank(env).items():
        if number in by_rank:
            waits.setdefault(host, []).append(sum(by_rank[number]))
    means = {host: float(np.mean(values)) for host, values in waits.items()}
    return {host: _part_of(mean, seconds) for host, mean in means.items() if math.isfinite(mean)}


def _spare_cores(env: Mapping[str, Any]) -> dict[str, float]:
    """Return the number of idle cores of each node, as a fraction of the cores that its ranks use."""
    used = cores_in_use(env)
    total = {str(one.get("node")): positive(one.get("cores")) for one in objects(env.get("cores"))}
    return {name: max(cores / used[name] - 1, 0.0) for name, cores in total.items() if cores and name in used}


#: Smaller fractions of missing CPU time are ignored.
STARVED_FROM = 0.05


# -- ranks ----------------------------------------------------------------------------


def _clocks(ranks: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Return each rank's clock: the higher of its values before and after a window, mean over windows."""
    found: dict[int, list[float]] = {}
    for rank in ranks:
        samples = [_dict(_dict(rank.get("clocks")).get(name)) for name in ("before", "after")]
        values = [sample["sm_mhz"] for sample in samples if isinstance(sample.get("sm_mhz"), int | float)]
        if values and isinstance(rank.get("rank"), int):
            found.setdefault(rank["rank"], []).append(max(values))
    return {rank: float(np.mean(values)) for rank, values in found.items()}


def _sum_by_rank(ranks: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Return the sum over the windows for each rank that has a value."""
    sums: dict[Any, float] = {}
    for rank in ranks:
        if isinstance(rank.get(key), int | float) and isinstance(rank.get("rank"), int | None):
            sums[rank.get("rank")] = sums.get(rank.get("rank"), 0.0) + rank[key]
    return list(sums.values())


def _per_step(ranks: Sequence[Mapping[str, Any]], key: str, steps: float) -> float:
    sums = _sum_by_rank(ranks, key)
    return float(np.mean(sums)) / steps if sums and steps > 0 else math.nan


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


def _nominal(windows: Sequence[Window]) -> float:
    rates = [
        _number(_dict(node.get("net")), "rate_mbit_s", math.nan) * 1e6 / 8
        for window in windows
        for node in window.nodes
    ]
    known = [rate for rate in rates if rate > 0]
    return min(known) if known and len(known) == len(rates) else math.nan


# -- calls of the user's code ---------------------------------------------------------


def calls_outside(step: SampledStep) -> list[SlowCall]:
    """Return the calls that no timer covers, except communication and zero_grad; the slowest first."""
    usual = (*_COLLECTIVES, *_OF_TRAINING)
    return [call for call in step.slow_calls if call.part is None and not call.function.startswith(usual)]


def collectives_outside(step: SampledStep, *, waiting: bool) -> list[SlowCall]:
    """Return the collectives that no timer covers; with ``waiting``, also calls that wait for the device."""
    calls = [call for call in step.slow_calls if call.part is None]
    return [
        call
        for call in calls
        if _communicates(call) or (waiting and call.function.startswith(_WAITING_CALLS))
    ]


def _communicates(call: SlowCall) -> bool:
    local = call.function.rpartition(".")[2].startswith(_LOCAL_CALLS)
    return call.function.startswith(_COLLECTIVES) and not local


def seconds_of(calls: Iterable[SlowCall]) -> float:
    """Return the sum of the calls' times."""
    return sum(call.seconds for call in calls)


# -- values of JSON -------------------------------------------------------------------


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _numbers(entry: Mapping[str, Any], key: str) -> list[int]:
    values = entry.get(key)
    return [one for one in values if isinstance(one, int)] if isinstance(values, list) else []


def _number(entry: Mapping[str, Any], key: str, default: float = 0.0) -> float:
    value = entry.get(key)
    return float(value) if isinstance(value, int | float) else default
