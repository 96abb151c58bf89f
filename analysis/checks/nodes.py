"""Findings about cores, threads, nodes and partitions, from the env.json of the runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from analysis.checks.assessment import CheckedStudy, check
from analysis.data.columns import distinct, grouped
from analysis.data.environment import Crowd, crowds, positive
from analysis.text import one_line
from bench.study.conditions import objects
from bench.study.found import findings_of_env
from ddp_scaling_bench.finding import Finding, Severity
from ddp_scaling_bench.measure.findings import UnequalNodes
from ddp_scaling_bench.units import clauses, count, listed, names, short_name


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


def _has_cores(env: dict[str, Any]) -> bool:
    entries = [*objects(env.get("hosts")), *objects(env.get("cores"))]
    return any(positive(entry.get("cores")) for entry in entries)


@check("cores", possible=lambda about: about.cells_with(_has_cores))
def _shared_cores(about: CheckedStudy) -> Iterator[CrowdedCores]:
    found = [(run.cell_id, crowd) for run, env in about.envs for crowd in crowds(env)]
    if found:
        worst = {
            cell: max((crowd for _, crowd in own), key=_per_core)
            for cell, own in grouped(found, lambda one: one[0]).items()
        }
        most = max(worst.values(), key=_per_core)
        yield CrowdedCores(
            subject=tuple(worst), ranks=most.ranks, threads=most.threads, cores=most.cores, crowds=worst
        )


def _per_core(crowd: Crowd) -> float:
    return crowd.threads / crowd.cores


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
    cells: tuple[ThreadsOfCell, ...]

    def _message(self) -> str:
        return f"Threads: {clauses([*map(str, self.cells)])}."


def _threads_of(env: dict[str, Any]) -> set[int]:
    """Return the numbers of threads that the ranks of a run have."""
    lists = [entry.get("threads_per_rank") for entry in objects(env.get("cores"))]
    own = [value for values in lists if isinstance(values, list) for value in values]
    return set(filter(None, map(positive, own or [env.get("threads_per_rank")])))


@check("threads", possible=lambda about: about.cells_with(_threads_of))
def _unequal_threads(about: CheckedStudy) -> Iterator[UnequalThreads]:
    threads: dict[str, set[int]] = {}
    for run, env in about.envs:
        threads.setdefault(run.cell_id, set()).update(_threads_of(env))
    bases = {row.cell_id: row.base.cell_id for row in about.rows if row.base}
    found = []
    for cell, own in threads.items():
        base = threads.get(bases.get(cell, cell)) or own
        if len(own) > 1 or (own and own != base):
            other = base if len(own) == 1 else ()
            found.append(
                ThreadsOfCell(
                    cell=cell,
                    threads=tuple(sorted(own)),
                    baseline=bases[cell] if other else None,
                    baseline_threads=tuple(sorted(other)),
                )
            )
    if found:
        yield UnequalThreads(subject=tuple(one.cell for one in found), cells=tuple(found))


@dataclass(frozen=True, kw_only=True)
class DifferingFact:
    """One fact in which nodes differ: the nodes with each value; cores can be those of ``ranks`` ranks."""

    fact: str
    ranks: int = 0
    nodes: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        titles = {"cores_of_node": "cores of the node", "quota": "quota of cores"}
        title = f"cores that {count(self.ranks, 'rank')} may use" if self.ranks else self.fact
        values = [f"{value} ({names(nodes)})" for value, nodes in self.nodes.items()]
        return f"{titles.get(self.fact, title)}: {listed(values, limit=4)}"


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


def _facts_of_nodes(env: dict[str, Any]) -> Iterator[tuple[str, tuple[str, int], str]]:
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


@check("nodes", possible=lambda about: about.cells_with(lambda env: any(_facts_of_nodes(env))))
def unequal_nodes(about: CheckedStudy) -> Iterator[DifferingNodes]:
    """Yield the facts in which the nodes of a study differ, with the nodes that have each value."""
    facts = [(run.cell_id, *fact) for run, env in about.envs for fact in _facts_of_nodes(env)]
    differing, odd = [], []
    for (name, ranks), own in grouped(facts, lambda one: one[2]).items():
        values = [value for value, _ in Counter(value for *_, value in own).most_common()]
        if len(values) > 1:
            nodes = {value: distinct(node for _, node, _, other in own if other == value) for value in values}
            differing.append(DifferingFact(fact=name, ranks=ranks, nodes=nodes))
            odd += [cell for cell, *_, value in own if value != values[0]]
    if differing:
        yield DifferingNodes(subject=distinct(odd), facts=tuple(differing))
        return
    # The ranks compare more than these facts, such as the cores of each rank.
    warned = [(run.cell_id, one) for run, env in about.envs for one in findings_of_env(env)]
    if seen := [(cell, one) for cell, one in warned if isinstance(one, UnequalNodes)]:
        different = tuple({str(one): one for _, one in seen}.values())
        yield DifferingNodes(subject=distinct(cell for cell, _ in seen), seen=different)


class SpansPartitions(Finding, kind="spans-partitions"):
    """The sizes of a series (GPUs, or nodes on device cpu) on each partition or GPU type, in words."""

    heading = "Several partitions in one series"
    remedy = "Compare sizes within a partition, or measure one size on both of them."
    places: Mapping[str, tuple[int, ...]]

    def _message(self) -> str:
        places = [f"{listed([*map(str, own)], limit=8)} on {place}" for place, own in self.places.items()]
        return (
            f"The sizes of a series run on several partitions or GPU types: {clauses(places)} "
            f"({names(self.subject)}). If their hardware differs, efficiencies contain this difference."
        )


@check()
def spans_partitions(about: CheckedStudy) -> Iterator[SpansPartitions]:
    """Yield a finding for each set of sizes and places that a series spans.

    Partition and GPU are those of the runs, or before the first run those of the plan.
    """
    ran: dict[str, dict[str, None]] = {}
    cells = sorted(about.study.planned, key=lambda one: one.size)
    on_gpus = {cell.cell_id for cell in cells if cell.device == "cuda"}
    for run, env in about.envs:
        slurm = env.get("slurm")
        partition = slurm.get("SLURM_JOB_PARTITION") if isinstance(slurm, dict) else None
        gpu = env.get("device_name") if run.cell_id in on_gpus else None
        ran.setdefault(run.cell_id, {})[_place(partition, gpu)] = None
    found: dict[tuple[tuple[str, tuple[int, ...]], ...], list[str]] = {}
    members = [(member.series, cell) for cell in cells for member in cell.series]
    for own in grouped(members, lambda one: one[0]).values():
        places: dict[str, set[int]] = {}
        for _, cell in own:
            planned = _place(cell.resources.partition, cell.resources.gpu_type)
            for place in ran.get(cell.cell_id, ()) if ran else (planned,):
                places.setdefault(place, set()).add(cell.size)
        if len(places) > 1:
            spans = tuple((place, tuple(sorted(sizes))) for place, sizes in places.items())
            placed = [cell.cell_id for _, cell in own if not ran or cell.cell_id in ran]
            found.setdefault(spans, []).extend(placed)
    for spans, cell_ids in found.items():
        yield SpansPartitions(subject=distinct(cell_ids), places=dict(spans))


def _place(partition: Any, gpu: Any) -> str:
    """Return a partition and a GPU type in words."""
    where = f"partition {one_line(partition, limit=60)}" if partition else "the default partition"
    return f"{where} with {one_line(gpu, limit=60)}" if gpu else where
