"""The ranks of a run: their hosts, cores, quotas, threads, variables, and the differences between ranks."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from ..cores import cpu_groups, cpu_quota, read_text
from ..finding import Recorded
from ..units import number_ranges
from ..variables import SLURM, is_shown, without_users
from .findings import CoresOfNodes, SharedCores, ThreadsDiffer, ThreadsOfNodes, UnequalNodes
from .node import active_ports, host_name

_K = TypeVar("_K")
_V = TypeVar("_V")


@dataclass(frozen=True)
class RankFacts:
    """One rank, its host, and the cores that it may run on.

    ``machine`` identifies the running kernel, which several hosts of a test cluster can share. ``infiniband``
    lists the devices with an active port. ``node_cores`` are those of the host, and ``quota`` is the smallest
    quota (in cores) of the rank's control groups. ``threads`` is the number of compute threads set for
    the rank, or None for an equal share of the cores.
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
    """One host, its ranks in ascending order, the number of cores that they may use, and those of each."""

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
    """Return the facts of this process; ``threads`` are in use, by default those that ``env`` requests."""
    return RankFacts(
        rank=rank,
        local_rank=local_rank,
        host=host_name(env),
        machine=_machine(),
        core_ids=sorted(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
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


def local_ranks(facts: Sequence[RankFacts]) -> list[int]:
    """Return the place of each rank on its host.

    If ranks of a host claim the same place, as processes that the program itself starts do without
    ``LOCAL_RANK``, they are numbered in the order of the ranks.
    """
    claimed = [(one.host, one.local_rank) for one in facts]
    if len(set(claimed)) == len(facts):
        return [one.local_rank for one in facts]
    seen: Counter[str] = Counter()
    places = []
    for one in facts:
        places.append(seen[one.host])
        seen[one.host] += 1
    return places


def hosts_of(facts: Sequence[RankFacts]) -> list[Host]:
    """Group ranks, which are in order, by their host, in the order of the hosts' first ranks."""
    return [
        Host(
            host=host,
            ranks=[one.rank for one in ranks],
            cores=len(_core_ids(ranks)),
            affinity=[number_ranges(one.core_ids) for one in ranks],
            cpu_model=ranks[0].cpu_model,
            memory_bytes=ranks[0].memory_bytes,
        )
        for host, ranks in grouped((one.host, one) for one in facts).items()
    ]


def _core_ids(facts: Sequence[RankFacts]) -> list[int]:
    return sorted(set().union(*(one.core_ids for one in facts)))


def threads_per_rank(me: RankFacts, facts: Sequence[RankFacts]) -> int:
    """Return the number of a rank's compute threads, by default an equal share of its host's ranks' cores."""
    if me.threads is not None:
        return me.threads
    here = [one for one in facts if one.host == me.host]
    return max(1, len(_core_ids(here)) // len(here))


def cores_of_nodes(facts: Sequence[RankFacts]) -> list[dict[str, Any]]:
    """Return the value of ``cores`` in env.json, with one entry per node."""
    return [
        {
            "node": host,
            "cores": ranks[0].node_cores,
            "quota": _quota(ranks),
            "threads_per_rank": [threads_per_rank(one, facts) for one in ranks],
        }
        for host, ranks in grouped((one.host, one) for one in facts).items()
    ]


def core_facts(facts: Sequence[RankFacts]) -> list[Recorded]:
    """Compare the cores and threads of all ranks."""
    found: list[Recorded] = [*_shared_cores(facts)]
    nodes = grouped((one.host, one) for one in facts).items()
    sizes = {host: _distinct(len(one.core_ids) for one in ranks) for host, ranks in nodes}
    cores = grouped(((own[0].node_cores, sizes[host], _quota(own)), host) for host, own in nodes)
    if len(cores) > 1:
        unequal = tuple(CoresOfNodes(tuple(hosts), *own) for own, hosts in cores.items())
        found.append(UnequalNodes(nodes=unequal))
    threads = grouped((_distinct(threads_per_rank(one, facts) for one in own), host) for host, own in nodes)
    if len({number for own in threads for number in own}) > 1:
        different = tuple(ThreadsOfNodes(tuple(hosts), own) for own, hosts in threads.items())
        found.append(ThreadsDiffer(nodes=different))
    return found


def _shared_cores(facts: Sequence[RankFacts]) -> Iterator[SharedCores]:
    machines = []
    for ranks in grouped((one.machine, one) for one in facts).values():
        threads, cores = sum(threads_per_rank(one, facts) for one in ranks), tuple(_core_ids(ranks))
        if threads > len(cores):
            machines.append(((len(ranks), threads, cores), tuple(dict.fromkeys(one.host for one in ranks))))
    for (number, threads, cores), hosts in grouped(machines).items():
        sizes: dict[str, Any] = {"ranks": number, "threads": threads, "cores": len(cores)}
        yield SharedCores(
            **sizes, core_ids=cores, machines=tuple(hosts), at_most=len(cores) // number or None
        )


def _distinct(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(numbers)))


def _quota(facts: Sequence[RankFacts]) -> float | None:
    return min((one.quota for one in facts if one.quota is not None), default=None)


def grouped(pairs: Iterable[tuple[_K, _V]]) -> dict[_K, list[_V]]:
    """Return the values of each key, in the order of the keys' first values."""
    groups: dict[_K, list[_V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def infiniband_devices(root: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Return the InfiniBand and RoCE devices with an active port."""
    return list(dict.fromkeys(port.parts[-3] for port in active_ports(root)))


@cache
def _machine() -> str:
    return read_text(Path("/proc/sys/kernel/random/boot_id")) or socket.gethostname()


@cache
def cpu_model() -> str | None:
    """Return the name of this host's processors, or None if the kernel does not report it."""
    lines = read_text(Path("/proc/cpuinfo")).splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None)


def kept_variables(env: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return ``env`` and ``slurm`` of env.json: the variables that are shown."""
    kept = {name: without_users(env[name]) for name in sorted(env) if is_shown(name)}
    return {"env": kept, "slurm": {name: env[name] for name in sorted(env) if SLURM.fullmatch(name)}}
