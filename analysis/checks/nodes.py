"""Findings about cores, threads and nodes, from the env.json of the runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.data.environment import Crowd, crowds, positive
from analysis.stats.columns import ScalingRow, distinct, grouped
from analysis.text import one_line
from bench.study.conditions import objects
from bench.study.found import findings_of_env
from ddp_scaling_bench.finding import Finding, Severity
from ddp_scaling_bench.measure.findings import UnequalNodes
from ddp_scaling_bench.units import clauses, count, listed, names, short_name

#: The env.json of each run, with the run's cell.
Environments = Sequence[tuple[str, dict[str, Any]]]
#: The names of the nodes with each value of a fact.
Nodes = Mapping[str, tuple[str, ...]]


class CrowdedCores(Finding, kind="shared-cores"):
    """Cells whose ranks have more threads than cores; the numbers are those of the most crowded machine."""

    heading = "Ranks share cores"
    remedy = (
        "Use fewer ranks per node, fewer threads per rank (OMP_NUM_THREADS), or more cores per rank "
        "(cluster.cpus_per_task)."
    )
    severity: Severity = "error"
    ranks: int
    threads: int
    cores: int
    crowds: Mapping[str, Crowd]

    def _message(self) -> str:
        cells = [
            f"{short_name(cell)} ({one.threads} threads of {count(one.ranks, 'rank')} on "
            f"{count(one.cores, 'core')})"
            for cell, one in self.crowds.items()
        ]
        return f"{listed(cells, limit=4)}: times of such runs do not show scaling."


@dataclass(frozen=True, kw_only=True)
class ThreadsOfCell:
    """The different numbers of threads of a cell's ranks, and those of its baseline if they are others."""

    cell: str
    threads: tuple[int, ...]
    baseline: str | None = None
    baseline_threads: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.baseline is None:
            return f"{short_name(self.cell)} has ranks with {names(self.threads)}"
        own, base = (" or ".join(map(str, one)) for one in (self.threads, self.baseline_threads))
        baseline = f"but its baseline {short_name(self.baseline)} has {base}"
        return f"{short_name(self.cell)} has {own} per rank, {baseline}"


class UnequalThreads(Finding, kind="threads-differ"):
    """Cells whose ranks have different numbers of threads, or another number than the baseline."""

    heading = "Threads differ"
    remedy = "Set OMP_NUM_THREADS in cluster.env."
    severity: Severity = "error"
    threads_per_rank: Mapping[str, tuple[int, ...]]
    cells: tuple[ThreadsOfCell, ...]

    def _message(self) -> str:
        return f"Threads: {clauses([*map(str, self.cells)])}."


@dataclass(frozen=True, kw_only=True)
class DifferingFact:
    """One fact in which nodes differ: the nodes with each value; cores are those of ``ranks`` ranks."""

    processor: Nodes | None = None
    cores_of_node: Nodes | None = None
    quota: Nodes | None = None
    cores_of_ranks: Nodes | None = None
    ranks: int | None = None

    def __str__(self) -> str:
        titles = {
            "processor": self.processor,
            "cores of the node": self.cores_of_node,
            "quota of cores": self.quota,
            f"cores that {count(self.ranks or 0, 'rank')} may use": self.cores_of_ranks,
        }
        title, nodes_of = next((title, nodes) for title, nodes in titles.items() if nodes)
        values = [f"{value} ({names(nodes)})" for value, nodes in nodes_of.items()]
        return f"{title}: {listed(values, limit=4)}"


class DifferingNodes(Finding, kind="unequal-nodes"):
    """Nodes of a study that differ, as env.json shows, or else as the ranks of a run have ``seen``."""

    heading = "Unequal nodes"
    remedy = "Select one kind of node (cluster.constraint, cluster.partition)."
    facts: tuple[DifferingFact, ...] = ()
    seen: tuple[UnequalNodes, ...] = ()

    def _message(self) -> str:
        if self.facts:
            return f"The nodes differ in {clauses([*map(str, self.facts)])}."
        return f"The nodes differ: {clauses([one.message for one in self.seen])}."


def shared_cores(envs: Environments) -> Iterator[Finding]:
    """Yield the cells whose ranks share cores."""
    worst: dict[str, Crowd] = {}
    for cell, env in envs:
        if found := [*crowds(env), *([worst[cell]] if cell in worst else [])]:
            worst[cell] = max(found, key=lambda crowd: crowd.threads / crowd.cores)
    if worst:
        most = max(worst.values(), key=lambda crowd: crowd.threads / crowd.cores)
        yield CrowdedCores(
            subject=tuple(worst), ranks=most.ranks, threads=most.threads, cores=most.cores, crowds=worst
        )


def threads_of(env: dict[str, Any]) -> set[int]:
    """Return the numbers of threads that the ranks of a run have."""
    lists = [entry.get("threads_per_rank") for entry in objects(env.get("cores"))]
    own = [value for values in lists if isinstance(values, list) for value in values]
    return set(filter(None, map(positive, own or [env.get("threads_per_rank")])))


def unequal_threads(envs: Environments, rows: Sequence[ScalingRow]) -> Iterator[Finding]:
    """Yield the cells whose ranks have different numbers of threads, or another number than the baseline."""
    threads: dict[str, set[int]] = {}
    for cell, env in envs:
        threads.setdefault(cell, set()).update(threads_of(env))
    pairs = {row.cell_id: row.base.cell_id for row in rows if row.base}
    found: dict[str, ThreadsOfCell] = {}
    for cell, own in threads.items():
        reference, numbers = threads.get(pairs.get(cell, cell)) or own, tuple(sorted(own))
        if len(own) > 1:
            found[cell] = ThreadsOfCell(cell=cell, threads=numbers)
        elif own and own != reference:
            base = tuple(sorted(reference))
            found[cell] = ThreadsOfCell(
                cell=cell, threads=numbers, baseline=pairs[cell], baseline_threads=base
            )
    if found:
        by_cell = {cell: one.threads for cell, one in found.items()}
        yield UnequalThreads(subject=tuple(found), threads_per_rank=by_cell, cells=tuple(found.values()))


def facts_of_nodes(env: dict[str, Any]) -> Iterator[tuple[str, tuple[str, int], str]]:
    """Yield node, fact and value for the facts in which all nodes of a study should agree.

    A fact is a name and a number of ranks, which is 0 unless the fact depends on it.
    """
    for host in objects(env.get("hosts")):
        node = one_line(host.get("host"), limit=60)
        if isinstance(cpu := host.get("cpu_model"), str) and cpu:
            yield node, ("processor", 0), one_line(cpu, limit=60)
        ranks, cores = positive(host.get("ranks_here")), positive(host.get("cores"))
        if ranks and cores:
            yield node, ("cores_of_ranks", ranks), str(cores)
    for entry in objects(env.get("cores")):
        node, quota = one_line(entry.get("node"), limit=60), entry.get("quota")
        if node_cores := positive(entry.get("cores")):
            yield node, ("cores_of_node", 0), str(node_cores)
        yield node, ("quota", 0), f"{quota:g}" if isinstance(quota, int | float) else "none"


def unequal_nodes(envs: Environments) -> Iterator[Finding]:
    """Yield the facts in which the nodes of a study differ, with the nodes that have each value."""
    facts = [(cell, *fact) for cell, env in envs for fact in facts_of_nodes(env)]
    differing, odd = [], []
    for (name, ranks), own in grouped(facts, lambda one: one[2]).items():
        counts = Counter(value for *_, value in own)
        if len(counts) < 2:
            continue
        of_values = {value: [one for one in own if one[3] == value] for value, _ in counts.most_common()}
        nodes: Nodes = {value: distinct(node for _, node, *_ in same) for value, same in of_values.items()}
        differing.append(DifferingFact(**{name: nodes}, ranks=ranks or None))
        odd += [cell for cell, *_, value in own if value != next(iter(nodes))]
    if differing:
        yield DifferingNodes(subject=distinct(odd), facts=tuple(differing))
        return
    # The ranks compare more than these facts, such as the cores of each rank.
    warned = [(cell, one) for cell, env in envs for one in findings_of_env(env)]
    seen = [(cell, one) for cell, one in warned if isinstance(one, UnequalNodes)]
    if seen:
        every = [one for _, one in seen]
        different = tuple(one for place, one in enumerate(every) if one not in every[:place])
        yield DifferingNodes(subject=distinct(cell for cell, _ in seen), seen=different)
