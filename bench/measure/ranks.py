"""The ranks of a run: their hosts, cores, quotas, threads, variables, and the differences between ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import psutil

from ..cores import cpu_groups, cpu_quota
from ..finding import Recorded
from ..units import number_ranges
from ..variables import SLURM, is_shown, without_users
from .findings import CoresOfNodes, SharedCores, ThreadsDiffer, ThreadsOfNodes, UnequalNodes
from .node import host_name

_Nodes = TypeVar("_Nodes", CoresOfNodes, ThreadsOfNodes)


@dataclass(frozen=True)
class RankFacts:
    """One rank, its host, and the cores that it may run on.

    ``machine`` identifies the running kernel. Several hosts of a test cluster can share one machine, and the
    machine's cores must not be counted twice. ``infiniband`` lists the InfiniBand devices with an active
    port. ``node_cores`` is the number of cores of the host, and ``quota`` the smallest quota (in cores)
    of the rank's control groups, or None without a quota. ``threads`` is the number of compute threads
    that is set for the rank, or None for an equal share of the cores.
    """

    rank: int
    local_rank: int
    host: str
    machine: str
    core_ids: list[int] = field(repr=False)
    memory_bytes: int
    cpu_model: str | None
    infiniband: list[str] = field(default_factory=list, repr=False)
    node_cores: int | None = None
    quota: float | None = None
    threads: int | None = None


@dataclass(frozen=True)
class Host:
    """One host and its ranks in ascending order.

    ``cores`` is the number of cores that the ranks may use, and ``affinity`` contains the cores of each rank,
    in the order of ``ranks`` and in Linux's notation (``0-6,64-70``).
    """

    host: str
    ranks: list[int]
    cores: int
    affinity: list[str]
    cpu_model: str | None
    memory_bytes: int

    def as_json(self) -> dict[str, Any]:
        """Return the host's entry in env.json."""
        return {**asdict(self), "ranks_here": len(self.ranks)}


def own_facts(rank: int, local_rank: int, env: Mapping[str, str], *, threads: int | None = None) -> RankFacts:
    """Return the facts of this process, such as its rank, host, cores and quota.

    ``threads`` is the number of threads in use, by default the number that ``env`` requests.
    """
    return RankFacts(
        rank=rank,
        local_rank=local_rank,
        host=host_name(env),
        machine=_machine(),
        core_ids=sorted(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        cpu_model=cpu_model(),
        infiniband=infiniband_devices(),
        node_cores=os.cpu_count(),
        quota=cpu_quota(cpu_groups()),
        threads=requested_threads(env) if threads is None else threads,
    )


def requested_threads(env: Mapping[str, str]) -> int | None:
    """Return ``BENCH_THREADS_PER_RANK`` if set, else ``OMP_NUM_THREADS``, else None.

    torchrun sets ``OMP_NUM_THREADS=1`` for two or more processes, but srun sets nothing. A plan that compares
    launchers therefore sets ``BENCH_THREADS_PER_RANK``.
    """
    for name in ("BENCH_THREADS_PER_RANK", "OMP_NUM_THREADS"):
        first = env.get(name, "").split(",")[0].strip()
        if first.isdigit() and int(first) > 0:
            return int(first)
    return None


def hosts_of(facts: Sequence[RankFacts]) -> list[Host]:
    """Group ranks by their host, in the order of the hosts' first ranks."""
    return [
        Host(
            group[0].host,
            [one.rank for one in group],
            len(_core_ids(group)),
            [number_ranges(one.core_ids) for one in group],
            group[0].cpu_model,
            group[0].memory_bytes,
        )
        for group in _grouped(facts, lambda one: one.host)
    ]


def _core_ids(facts: Sequence[RankFacts]) -> list[int]:
    return sorted(set().union(*(one.core_ids for one in facts)))


def threads_per_rank(me: RankFacts, facts: Sequence[RankFacts]) -> int:
    """Return the number of compute threads of a rank, by default an equal share of its host's cores.

    Only the cores that the host's ranks may use are shared. The rule is the same under every launcher.
    """
    if me.threads is not None:
        return me.threads
    here = [one for one in facts if one.host == me.host]
    return max(1, len(_core_ids(here)) // len(here))


def cores_of_nodes(facts: Sequence[RankFacts]) -> list[dict[str, Any]]:
    """Return the value of ``cores`` in env.json, with one entry per node.

    ``cores`` is the number of cores of the node, and ``quota`` the smallest quota (in cores) of its ranks.
    """
    return [
        {
            "node": group[0].host,
            "cores": group[0].node_cores,
            "quota": _quota(group),
            "threads_per_rank": [threads_per_rank(one, facts) for one in group],
        }
        for group in _grouped(facts, lambda one: one.host)
    ]


def core_facts(facts: Sequence[RankFacts]) -> list[Recorded]:
    """Compare the cores and threads of all ranks."""
    found: list[Recorded] = [*_shared_cores(facts)]
    nodes = _grouped(facts, lambda one: one.host)
    cores = _alike(map(_cores_of, nodes))
    if len(cores) > 1:
        found.append(UnequalNodes(nodes=cores))
    if len({threads_per_rank(one, facts) for one in facts}) > 1:
        threads = [(node[0].host, _distinct(threads_per_rank(one, facts) for one in node)) for node in nodes]
        of_nodes = _alike(ThreadsOfNodes(hosts=(host,), threads=own) for host, own in threads)
        found.append(ThreadsDiffer(nodes=of_nodes))
    return found


def _shared_cores(facts: Sequence[RankFacts]) -> Iterator[SharedCores]:
    alike: dict[tuple[int, int, tuple[int, ...]], list[tuple[str, ...]]] = {}
    machines = _grouped(facts, lambda one: one.machine)
    for machine in machines:
        threads = sum(threads_per_rank(one, facts) for one in machine)
        cores = tuple(_core_ids(machine))
        if threads > len(cores):
            hosts = tuple(dict.fromkeys(one.host for one in machine))
            alike.setdefault((len(machine), threads, cores), []).append(hosts)
    for (ranks, threads, cores), hosts_of_machines in alike.items():
        yield SharedCores(
            ranks=ranks,
            threads=threads,
            cores=len(cores),
            core_ids=cores,
            machines=tuple(hosts_of_machines),
            at_most=len(cores) // ranks or None,
        )


def _cores_of(node: Sequence[RankFacts]) -> CoresOfNodes:
    one, per_rank = node[0], _distinct(len(rank.core_ids) for rank in node)
    return CoresOfNodes(hosts=(one.host,), cores=one.node_cores, cores_per_rank=per_rank, quota=_quota(node))


def _distinct(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(numbers)))


def _quota(facts: Sequence[RankFacts]) -> float | None:
    return min((one.quota for one in facts if one.quota is not None), default=None)


def _grouped(facts: Sequence[RankFacts], key: Callable[[RankFacts], str]) -> list[list[RankFacts]]:
    """Group ranks by ``key``, in the order of the groups' first ranks."""
    groups: dict[str, list[RankFacts]] = {}
    for one in sorted(facts, key=lambda facts: facts.rank):
        groups.setdefault(key(one), []).append(one)
    return list(groups.values())


def _alike(nodes: Iterable[_Nodes]) -> tuple[_Nodes, ...]:
    """Join the hosts of nodes that do not differ otherwise."""
    hosts: dict[_Nodes, list[str]] = {}
    for node in nodes:
        hosts.setdefault(replace(node, hosts=()), []).extend(node.hosts)
    return tuple(replace(node, hosts=tuple(own)) for node, own in hosts.items())


def infiniband_devices(root: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Return the InfiniBand and RoCE devices that have a port in state ACTIVE.

    Source: the kernel's Documentation/ABI/stable/sysfs-class-infiniband.
    """
    found = []
    for state in sorted(root.glob("*/ports/*/state")):
        name = state.parts[-4]
        try:
            active = "ACTIVE" in state.read_text(encoding="ascii", errors="replace")
        except OSError:
            continue
        if active and name not in found:
            found.append(name)
    return found


@cache
def _machine() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


@cache
def cpu_model() -> str | None:
    """Return the name of this host's processors, or None if the kernel does not report it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None)


def kept_variables(env: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return ``env`` and ``slurm`` of env.json: the variables that are shown."""
    kept = {name: without_users(env[name]) for name in sorted(env) if is_shown(name)}
    return {"env": kept, "slurm": {name: env[name] for name in sorted(env) if SLURM.fullmatch(name)}}
