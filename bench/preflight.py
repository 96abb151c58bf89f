"""`bench preflight`: plan a study of one run that measures nodes, and judge its measurements.

The run's command is :mod:`ddp_scaling_bench.train.nodecheck`. A rate is compared with the median of all
nodes. Disturbances only lower a rate, so the better one of its two measurements counts. With an even number
of nodes, the median is the higher of the two middle values, because a fault only makes a node slower.

An exchange is as fast as the slower of its two nodes. The rate of a node is therefore its rate with its
fastest partner. Two nodes that are fast with others, but slow together, have a slow link between them.
"""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_high
from typing import Annotated, Any

from pydantic import BeforeValidator, TypeAdapter

from ddp_scaling_bench.errors import BenchError

from .matrix.cell import Resources
from .matrix.field_types import at_size
from .plan import Plan, make_plan

#: The file of the measurements in the run's folder; its columns: ``COLUMNS`` of that module.
ROWS = "nodecheck.csv"
#: Time limit of the run.
TIME_LIMIT = "10m"
#: The checks of a node with the units of their values.
CHECKS = {"compute": "FLOP/s", "memory": "B/s", "exchange": "B/s"}


class UndecidedError(BenchError):
    """The nodes could not be checked, or not compared."""

    exit_code = 3


def plan_nodecheck(plan: Plan, name: str, *, nodes: int | None = None) -> Plan:
    """Return the plan of a study ``name`` that checks nodes of the cluster of ``plan``.

    The run has as many ranks per node as the largest cell, and its number of nodes unless ``nodes`` is given.
    """
    cluster, device = plan.matrix.cluster, plan.matrix.workload.device
    largest = max(plan.cells, key=lambda cell: (cell.nodes, cell.world_size))
    per_node, nodes = min(largest.ranks_per_node), nodes or largest.nodes
    size = nodes * per_node if device == "cuda" else nodes
    section = plan.document.content.get("cluster") or {}
    of_size = {key: at_size(value, size) for key, value in section.items() if key in Resources._fields}
    content = {
        "study": name,
        "cluster": section | of_size | {"time_limit": TIME_LIMIT},
        "axes": {
            "nodes": [nodes],
            plan.matrix.size_axis: [per_node],
            "backend": ["nccl" if device == "cuda" else "gloo"],
            "launcher": [cluster.scheduler.launchers[0]],
        },
        "scaling": [{"mode": "weak", "per_gpu_batch": [1]}],
        "workload": {
            "device": device,
            "command": f"python -m ddp_scaling_bench.train.nodecheck {{run_dir}}/{ROWS} --device {device}",
            "metrics": "none",
        },
        "repeats": 1,
    }
    site = Path(plan.document.site.path) if plan.document.site else None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "preflight.yaml")
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return make_plan(path, site=site)


@dataclass(frozen=True)
class Measurement:
    """A row of :data:`ROWS`; ``value`` is None if there is a ``reason``."""

    check: str
    node: str
    rank: str
    partner: str
    value: Annotated[float | None, BeforeValidator(lambda text: text or None)]
    reason: str


_MEASUREMENTS = TypeAdapter(list[Measurement])


def read_measurements(path: Path) -> list[Measurement]:
    """Read the measurements of a run.

    Raises:
        UndecidedError: the file is missing or broken.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            every = csv.DictReader(file)
            rows = [{name: row[name] for name in every.fieldnames or ()} for row in every]
            rows = [row for row in rows if row["reason"] is not None]  # cut at a kill
        return _MEASUREMENTS.validate_python(rows)
    except (OSError, ValueError, KeyError, csv.Error) as error:
        raise UndecidedError(f"{path}: no measurements can be read: {error}") from None


@dataclass
class NodeResult:
    """The values of a node by check, and why the node is unfit, if it is."""

    node: str
    values: dict[str, float]
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class BadLink:
    """A link that is slow, or over which nothing could be exchanged (``value`` is None)."""

    nodes: tuple[str, str]
    value: float | None
    reason: str

    def __str__(self) -> str:
        a, b = self.nodes
        if self.value is None:
            return f"{a} and {b} exchanged no messages: {self.reason}; avoid one of these nodes"
        return f"the link between {a} and {b} is slow: {self.reason}; avoid one of these nodes"


@dataclass(frozen=True)
class Verdict:
    """The nodes of a run, their medians by check, the bad links, and the pairs that exchanged messages."""

    nodes: list[NodeResult]
    medians: dict[str, float]
    links: list[BadLink]
    pairs: int

    @property
    def unfit(self) -> list[str]:
        """The nodes to exclude."""
        return [result.node for result in self.nodes if result.failures]

    def findings(self) -> Iterator[str]:
        """Yield a line for each failure of a node, and for each bad link."""
        for result in self.nodes:
            yield from (f"{result.node} is unfit: {failure}" for failure in result.failures)
        yield from map(str, self.links)

    def as_json(self) -> dict[str, Any]:
        """Return the verdict for programs; values are in FLOP/s and bytes/s."""
        return {
            "nodes": [
                {"node": one.node, "fit": not one.failures, **one.values, "failures": one.failures}
                for one in self.nodes
            ],
            "links": [{"nodes": one.nodes, "value": one.value, "reason": one.reason} for one in self.links],
            "exclude": self.unfit,
            "medians": self.medians,
            "pairs": self.pairs,
        }

    def limits(self) -> Iterator[str]:
        """Yield what these measurements cannot show."""
        measured = len([result for result in self.nodes if result.values])
        if measured == 1:
            yield "one node: there is nothing to compare it with"
        if measured == 2:
            yield "two nodes: the rate of their exchange cannot be compared with that of other pairs"
        pairs = measured * (measured - 1) // 2
        if measured > 2 and self.pairs < pairs:
            known = f"{self.pairs} of {pairs} pairs of nodes exchanged messages"
            yield f"{known}; the links between the other pairs are unknown"


def judge(rows: Sequence[Measurement], *, threshold: float) -> Verdict:
    """Judge nodes and links: a rate below ``threshold`` times the median of all nodes is too low.

    Raises:
        UndecidedError: most nodes could not be measured.
    """
    best, reasons = _best(rows)
    names = list(dict.fromkeys(name for row in rows for name in (row.node, row.partner) if name))
    pairs = {frozenset((a, b)): rate for (check, a, _, b), rate in best.items() if check == "exchange"}
    nodes = [NodeResult(name, _values(name, best, pairs)) for name in names]
    medians = {
        check: median_high(known)
        for check in CHECKS
        if (known := [result.values[check] for result in nodes if check in result.values])
    }
    for result in nodes:
        for (check, node, rank, _), reason in reasons.items():
            if node == result.node and check != "exchange":
                result.failures.append(f"rank {rank} could not be measured ({check}): {reason}")
        for check, value in result.values.items():
            if value < threshold * medians[check]:
                median = rate_text(medians[check], check)
                result.failures.append(f"{check} {cell_text(value, medians[check], check)} of {median}")
    lost = [result.node for result in nodes if not result.values]
    if 2 * len(lost) > len(nodes) or not nodes:
        why = next(iter(reasons.values()), "the file has no rows")
        raise UndecidedError(f"{len(lost)} of {len(nodes)} nodes could not be measured: {why}")
    slow = {result.node for result in nodes if result.failures}
    links = [*_slow_links(nodes, slow, pairs, threshold), *_broken_links(nodes, reasons)]
    return Verdict(nodes, medians, links, len(pairs))


Key = tuple[str, str, str, str]


def _best(rows: Iterable[Measurement]) -> tuple[dict[Key, float], dict[Key, str]]:
    """Return the better value of each measurement, and the reasons of those that have no value.

    A rank that stopped answering has a reason even if it had answered before.
    """
    best: dict[Key, float] = {}
    reasons: dict[Key, str] = {}
    for row in rows:
        key = (row.check, row.node, row.rank, row.partner)
        if row.value is None:
            reasons[key] = row.reason
        elif row.check != "answered":
            best[key] = max(row.value, best.get(key, 0.0))
    return best, {key: reason for key, reason in reasons.items() if key not in best}


def _values(name: str, best: dict[Key, float], pairs: dict[frozenset[str], float]) -> dict[str, float]:
    """Return the values of a node: those of its slowest rank, and its rate with its fastest partner."""
    values = {}
    for check in ("compute", "memory"):
        of_ranks = [rate for key, rate in best.items() if key[:2] == (check, name)]
        if of_ranks:
            values[check] = min(of_ranks)
    if rates := [rate for pair, rate in pairs.items() if name in pair]:
        values["exchange"] = max(rates)
    return values


def _slow_links(
    nodes: Sequence[NodeResult], slow: set[str], pairs: dict[frozenset[str], float], threshold: float
) -> Iterator[BadLink]:
    rates = {result.node: result.values.get("exchange", 0.0) for result in nodes}
    for pair, rate in pairs.items():
        usual = min(rates[node] for node in pair)
        if slow.isdisjoint(pair) and rate < threshold * usual:
            a, b = sorted(pair)
            compared = f"{rate_text(rate, 'exchange')}, with others at least {rate_text(usual, 'exchange')}"
            yield BadLink((a, b), rate, compared)


def _broken_links(nodes: Sequence[NodeResult], reasons: dict[Key, str]) -> Iterator[BadLink]:
    """Yield the links without a success; mark a node as unfit if it failed with two nodes that work."""
    failed = {
        (node, partner): why for (check, node, _, partner), why in reasons.items() if check == "exchange"
    }
    working = {result.node for result in nodes if "exchange" in result.values}
    isolated = set()
    for result in nodes:
        mine = {other: why for pair, why in failed.items() if result.node in pair for other in pair}
        mine.pop(result.node, None)
        if result.node not in working and len(working & mine.keys()) > 1:
            isolated.add(result.node)
            result.failures.append(f"it exchanged messages with no other node: {next(iter(mine.values()))}")
    for pair, why in failed.items():
        if isolated.isdisjoint(pair):
            yield BadLink(pair, None, why)


_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (0.0, "k"))


def rate_text(value: float, check: str) -> str:
    """Format a value, such as ``13.3 GFLOP/s``."""
    limit, prefix = next(one for one in _PREFIXES if value >= one[0])
    return f"{value / (limit or 1e3):.3g} {prefix}{CHECKS[check]}"


def cell_text(value: float, median: float, check: str) -> str:
    """Format a value with its percentage of the median: ``13.3 GFLOP/s (99 %)``."""
    return f"{rate_text(value, check)} ({100 * value / median:.0f} %)"
