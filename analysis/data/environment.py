"""Summarise the software, hardware, hosts and gradient transport of a study's runs, from their env.json."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from analysis.data.columns import RunRow
from analysis.data.load import Study
from analysis.text import one_line
from bench.study.conditions import objects
from bench.study.found import findings_of_env
from ddp_scaling_bench.finding import Finding, Recorded
from ddp_scaling_bench.measure.findings import (
    NotStable,
    SeparateTrainings,
    SharedCores,
    ThreadsDiffer,
    UnequalNodes,
)
from ddp_scaling_bench.units import count, human_bytes, listed, whole

#: Maximum number of env.json files that are read. If more runs have started, those of a sample are read.
MAX_READ = 500
#: Findings of runs that a finding of :mod:`analysis.checks.assessment` replaces.
OWNED = (SharedCores, NotStable, UnequalNodes, ThreadsDiffer, SeparateTrainings)
_MAX_VALUES = 4
#: Maximum number of different findings of one kind.
_MAX_OF_KIND = 5
_MAX_HOSTS = 64
#: The facts taken from env.json, and from its ``transport``, with their titles.
FACTS = {
    "bench_version": "bench",
    "torch": "PyTorch",
    "python": "Python",
    "cuda": "CUDA",
    "nccl": "NCCL",
    "device_name": "Device",
    "backend": "Backend",
    "launcher": "Launcher",
    "strategy": "Strategy",
    "threads_per_rank": "Threads per rank",
    "parameters": "Parameters",
    "gradient_bytes": "Gradients",
}
TRANSPORT = {
    "interface": "Interface",
    "network": "Network",
    "algorithm": "Algorithm",
    "version": "Transport version",
    "gpudirect": "GPUDirect",
    "within_host": "Within a host",
    "not_read_because": "Transport not read",
}
_OTHER_TITLES = {"allocations": "Run", "hosts": "Hosts", "cpu": "CPU", "cores": "Cores per host"}
#: The variables of Slurm that neither differ between all runs nor repeat settings.
_OF_SLURM = ("SLURM_CLUSTER_NAME", "SLURM_CPUS_PER_TASK", "SLURM_JOB_PARTITION")


def fact_title(name: str) -> str:
    """Return the title of a fact of the environment."""
    return (FACTS | TRANSPORT | _OTHER_TITLES).get(name, name)


@dataclass(frozen=True)
class Host:
    """One host, described by texts, and the number of runs that used it."""

    name: str
    cpu: str
    cores: str
    memory: str
    runs: int


class OfRuns(NamedTuple):
    """A finding of runs, with the ids of these runs."""

    finding: Finding
    runs: list[str]


@dataclass
class Environment:
    """Summary of the runs' environments.

    Attributes:
        read: number of readable env.json files.
        asked: number of runs whose env.json was to be read: all started runs or a sample of them.
        started: number of started runs.
        facts: each fact with its value as text; values that differ between runs are listed with their number
            of runs.
        variables: name and value of each environment variable, in the form of ``facts``.
        hosts, hosts_left_out: the first hosts, and the number of further hosts.
        warnings: the warnings and errors of runs, and what `bench verify` shows, without those in OWNED. Of a
            kind, those with the most runs are kept.
        differing: the facts with several values.
        envs: content of the env.json files that were read, by run_id.
    """

    read: int = 0
    asked: int = 0
    started: int = 0
    facts: list[tuple[str, str]] = field(default_factory=list)
    variables: list[tuple[str, str]] = field(default_factory=list)
    hosts: list[Host] = field(default_factory=list)
    hosts_left_out: int = 0
    warnings: list[OfRuns] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    envs: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)

    @property
    def source(self) -> str:
        """Sentence about the number of env.json files that were read."""
        if self.asked < self.started:
            return f"From a sample: the env.json of {self.read:,} of {count(self.started, 'started run')}."
        rest = self.started - self.read
        others = f"; {count(rest, 'more started run')} left no readable env.json" if rest else ""
        return f"From the env.json of {count(self.read, 'run')}{others}."


def describe_environment(study: Study) -> Environment:
    """Return the environment of the study's runs, from every env.json or from a sample."""
    envs = sampled_envs(study)
    found = describe(envs)
    tried = _started(study)
    found.asked, found.started = len(sampled(study, tried)), len(tried)
    if allocations := _allocations(study):
        found.facts.append(("allocations", allocations))
    ends = {run_id: record.end for run_id, record in study.records.items() if record.end}
    without = ((run_id, one) for run_id, own in study.facts.items() if run_id not in envs for one in own)
    in_logs = ((run_id, one) for run_id, end in ends.items() for one in end.warnings or ())
    found.warnings = _grouped([*_findings(envs), *without, *in_logs])
    return found


def sampled_envs(study: Study) -> dict[str, dict[str, Any]]:
    """Return env.json of the started runs, or of a sample of them, by run_id."""
    return study.envs_of(run.run_id for run in sampled(study, _started(study)))


def _started(study: Study) -> list[RunRow]:
    return [run for run in study.runs if run.folder is not None]


def _findings(envs: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Finding]]:
    return ((run_id, one) for run_id, env in envs.items() for one in findings_of_env(env))


def _grouped(findings: Iterable[tuple[str, Finding]]) -> list[OfRuns]:
    """Group the findings to be shown by kind and text; those of the most runs come first."""
    found: dict[tuple[str, str, str], OfRuns] = {}
    for run_id, one in findings:
        is_shown = one.severity != "info" or (isinstance(one, Recorded) and one.verified)
        if is_shown and not isinstance(one, OWNED):
            found.setdefault((one.kind, one.heading, one.identity), OfRuns(one, [])).runs.append(run_id)
    of_kind: Counter[tuple[str, str]] = Counter()
    shown = []
    for (kind, heading, _), group in sorted(found.items(), key=lambda item: -len(item[1].runs)):
        of_kind[kind, heading] += 1
        shown += [group] if of_kind[kind, heading] <= _MAX_OF_KIND else []
    return shown


def describe(by_run: dict[str, dict[str, Any]]) -> Environment:
    """Return the environment of runs from their env.json, by run_id."""
    envs = list(by_run.values())
    found = Environment(read=len(envs), asked=len(envs), started=len(envs), envs=by_run)
    counts: dict[tuple[str, str], Counter[str]] = {}
    for env in envs:
        for kind, name, value in dict.fromkeys(facts_of_run(env)):
            counts.setdefault((kind, name), Counter())[value] += 1
    texts = {key: _with_counts(values, of=len(envs)) for key, values in counts.items()}
    names = [name for name in (*FACTS, *TRANSPORT) if ("environment", name) in texts]
    found.facts = [(name, texts["environment", name]) for name in names]
    found.differing = [name for name in names if len(counts["environment", name]) > 1]
    found.variables = sorted((name, text) for (kind, name), text in texts.items() if kind == "variable")
    _add_hosts(found, envs)
    return found


def _allocations(study: Study) -> str:
    """Describe how many runs had their own job, and how many shared an allocation."""
    runs = [run for run in study.runs if run.started_at is not None]
    own = sum(run.allocation == "job" for run in runs)
    packed = [run for run in runs if run.allocation == "pack"]
    jobs = listed([f"job {job}" for job in dict.fromkeys(run.job_id for run in packed)], limit=_MAX_VALUES)
    texts = [f"{count(len(packed), 'run')} one after another in the allocation of {jobs}"] if jobs else []
    texts += [f"{count(own, 'run')} with one job each"] if own else []
    return "; ".join(texts)


def sampled(study: Study, runs: Sequence[RunRow]) -> Sequence[RunRow]:
    """Return at most :data:`MAX_READ` of some runs, with at least one of each size, launcher and backend."""
    if len(runs) <= MAX_READ:
        return runs
    cells = (study.cells[run.cell_id] for run in runs)
    kinds = [(cell.nodes, cell.gpus_per_node, cell.launcher, cell.backend) for cell in cells]
    first = sorted({kind: place for place, kind in reversed([*enumerate(kinds)])}.values())[:MAX_READ]
    others = np.linspace(0, len(runs) - 1, MAX_READ - len(first)).astype(int)
    return [runs[place] for place in sorted({*first, *others.tolist()})]


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def value_of(mapping: dict[str, Any], key: str) -> str | None:
    """Return the fact ``key`` of env.json or of its ``transport`` as text; None if it is unknown."""
    value = mapping.get(key)
    if value is None or isinstance(value, (dict, list)):
        return None
    if key == "gradient_bytes" and isinstance(value, int):
        return human_bytes(value)
    if key == "parameters" and isinstance(value, int):
        return whole(value)
    return one_line(value, limit=120)


def facts_of_run(env: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield ``environment`` or ``variable``, name and value as text of each known fact of an env.json."""
    transport = env.get("transport")
    own = [(name, value_of(env, name)) for name in FACTS]
    own += [(name, value_of(transport, name)) for name in TRANSPORT if isinstance(transport, dict)]
    yield from (("environment", name, value) for name, value in own if value)
    for host in objects(env.get("hosts")):
        for name, key in (("hosts", "host"), ("cpu", "cpu_model"), ("cores", "cores")):
            if text := one_line(host.get(key), limit=80):
                yield "environment", name, text
    for section in ("env", "slurm"):
        variables = env.get(section)
        for name, value in variables.items() if isinstance(variables, dict) else ():
            if name in _OF_SLURM or not name.startswith("SLURM_"):
                yield "variable", one_line(name, limit=80), one_line(value, limit=160)


def _with_counts(counts: Counter[str], *, of: int) -> str:
    """Return the value of a fact; with the number of runs if not all have it."""
    if len(counts) == 1 and counts.total() == of:
        return next(iter(counts))
    shown = [f"{value} ({count(runs, 'run')})" for value, runs in counts.most_common()]
    return listed(shown, limit=_MAX_VALUES)


@dataclass(frozen=True)
class Crowd:
    """A machine (possibly split into several nodes) whose ranks have more threads than it has cores."""

    hosts: tuple[str, ...]
    ranks: int
    threads: int
    cores: int


def crowds(env: dict[str, Any]) -> list[Crowd]:
    """Return the machines whose cores are shared by threads of ranks, from the env.json of a run."""
    entries = {str(one.get("node")): one for one in objects(env.get("cores"))}
    hosts = {str(host.get("host")): host for host in objects(env.get("hosts"))}
    found = []
    for name in dict.fromkeys([*hosts, *entries]):
        host, entry = hosts.get(name, {}), entries.get(name, {})
        threads = list(filter(None, map(positive, _items(entry.get("threads_per_rank")))))
        threads = threads or [1] * (positive(host.get("ranks_here")) or 0)
        cores = positive(host.get("cores")) or positive(entry.get("cores"))
        if cores and sum(threads) > cores:
            found.append(Crowd((name,), len(threads), sum(threads), cores))
    for one in findings_of_env(env):
        if isinstance(one, SharedCores) and one.threads:
            found += [Crowd(tuple(hosts), one.ranks, one.threads, one.cores) for hosts in one.machines]
    return list(dict.fromkeys(found))


def positive(value: Any) -> int | None:
    """Return a value of env.json that is a positive integer; else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _add_hosts(found: Environment, envs: list[dict[str, Any]]) -> None:
    hosts: Counter[tuple[str, str, str, str]] = Counter()
    for env in envs:
        for host in objects(env.get("hosts")):
            memory = host.get("memory_bytes")
            key = (
                one_line(host.get("host"), limit=80),
                one_line(host.get("cpu_model"), limit=80),
                one_line(host.get("cores"), limit=10),
                human_bytes(memory) if isinstance(memory, (int, float)) else "",
            )
            hosts[key] += 1
    ordered = sorted(hosts.items(), key=lambda item: (_natural(item[0][0]), item[0]))
    found.hosts = [Host(*key, runs) for key, runs in ordered[:_MAX_HOSTS]]
    found.hosts_left_out = max(0, len(ordered) - _MAX_HOSTS)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders numbers within names by their value: n2 before n10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split("([0-9]+)", name)]
