"""Decide which nodes and links are slow or unfit, and pair the nodes whose links are measured.

A node is unfit if one of its checks is below the threshold times the median of all nodes, or reports
errors. Checks that fail are measured again, and only a node that fails both times is unfit. With an even
number of nodes, the median is the higher of the two middle values, because a fault only makes a node
slower.

The nodes form a ring, and each node exchanges messages with the next one. An exchange is as fast as the
slower of its two nodes, so a node is as fast as its best exchange. Suspects are then measured once more: slow
links, and slow nodes with a node that is known to be fast. A node that is still slow is a slow node. Two
nodes that are fast with others, but slow together, have a slow link between them.

A pair contains the numbers of two nodes, from 0. This module needs no torch, so that
`make campaign-preflight` can simulate many cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_high
from typing import Any

Pair = tuple[int, int]
#: Pairs that exchange at the same time: every node is in at most one of them.
Step = list[Pair]


def ring_steps(nodes: int) -> list[Step]:
    """Pair each node with the next, and the last with the first, in steps with one pair per node at most."""
    pairs = [(node, node + 1) for node in range(nodes - 1)] + [(0, nodes - 1)] * (nodes > 2)
    return steps_of(pairs)


def steps_of(pairs: Iterable[Pair]) -> list[Step]:
    """Distribute pairs over few steps, in each of which a node has at most one partner."""
    steps: list[tuple[Step, set[int]]] = []
    for pair in pairs:
        for step, busy in steps:
            if busy.isdisjoint(pair):
                step.append(pair)
                busy.update(pair)
                break
        else:
            steps.append(([pair], set(pair)))
    return [step for step, _ in steps]


@dataclass(frozen=True)
class Rates:
    """Rates of pairs in bytes/s; ``again`` contains the rates of pairs that were measured again."""

    nodes: int
    first: Mapping[Pair, float]
    again: Mapping[Pair, float]

    def best(self, pair: Pair) -> float:
        """Return the higher rate of a pair, because disturbances only lower a rate."""
        return max(self.first.get(pair, 0.0), self.again.get(pair, 0.0))

    def of_nodes(self) -> list[float | None]:
        """Return the rate of each node with its best partner, or None for a node that exchanged with none."""
        best: list[float | None] = [None] * self.nodes
        for pair, rate in (*self.first.items(), *self.again.items()):
            for node in pair:
                best[node] = max(rate, best[node] or 0.0)
        return best


@dataclass(frozen=True)
class Verdict:
    """Rates of the nodes, their median, the slow nodes, and the slow links between other nodes.

    Everything is None or empty for fewer than three nodes: of two nodes, either could be slow.
    """

    rates: list[float | None]
    median: float | None
    slow_nodes: list[int]
    slow_links: list[Pair]


def judge(rates: Rates, *, threshold: float) -> Verdict:
    """Return the rates of the nodes, their median, and the slow nodes and links.

    A node is slow below ``threshold`` x median, and a link below ``threshold`` x the rate of its slower node.
    The median is the higher of the two middle values, because half of the nodes may be slow.
    """
    of_nodes = rates.of_nodes()
    known = [rate for rate in of_nodes if rate is not None]
    if rates.nodes < 3 or not known:
        return Verdict([None] * rates.nodes, None, [], [])
    median = median_high(known)
    slow = [node for node, rate in enumerate(of_nodes) if rate is not None and rate < threshold * median]
    links = list(_slow_links(rates, of_nodes, set(slow), threshold))
    return Verdict(of_nodes, median, slow, links)


def _slow_links(
    rates: Rates, of_nodes: Sequence[float | None], slow: set[int], threshold: float
) -> Iterator[Pair]:
    for pair, rate in rates.first.items():
        a, b = pair
        if a in slow or b in slow:
            continue
        limit = threshold * min(of_nodes[a] or 0.0, of_nodes[b] or 0.0)
        if rate < limit and rates.again.get(pair, 0.0) < limit:
            yield pair


def confirmed(rates: Rates, verdict: Verdict) -> Verdict:
    """Return the verdict without nodes and links that were measured only once."""
    measured = {node for pair in rates.again for node in pair}
    nodes = [node for node in verdict.slow_nodes if node in measured]
    links = [pair for pair in verdict.slow_links if pair in rates.again]
    return Verdict(verdict.rates, verdict.median, nodes, links)


def pairs_again(rates: Rates, verdict: Verdict) -> list[Step]:
    """Return the steps that measure slow links, links of slow nodes, and slow nodes with fast ones."""
    slow = set(verdict.slow_nodes)
    rated = [node for node, rate in enumerate(verdict.rates) if rate is not None and node not in slow]
    fast = sorted(rated, key=lambda node: -(verdict.rates[node] or 0.0))
    links = [pair for pair in rates.first if not slow.isdisjoint(pair)] + verdict.slow_links
    wanted = []
    for place, node in enumerate(verdict.slow_nodes):
        # A partner that is not its neighbour shows whether the node is slow, or its links. Slow nodes get
        # different partners where possible, so that they can exchange at the same time.
        pairs = [(min(node, one), max(node, one)) for one in fast]
        pairs = [pair for pair in pairs if pair not in rates.first] or pairs
        wanted.append(pairs[place % len(pairs)])
    return steps_of(dict.fromkeys([*wanted, *links]))


DEFAULT_THRESHOLD = 0.9
#: Checks of rates and sizes, with their units: a node is unfit if its value is too far below the median.
RATES = {
    "gpus": "GPUs",
    "matrix-product": "FLOP/s",
    "memory": "B/s",
    "gpu-clock": "Hz",
    "pcie-width": "lanes",
    "exchange": "B/s",
}
#: Checks that count faults, of which a fit node has none.
FAULTS = ("gpu-slowdown", "gpu-errors")
#: The check of nodes that did not start, or stopped answering.
ANSWERED = "answered"

Values = Sequence[float | None]


@dataclass
class Measured:
    """The values of all nodes, as far as they were measured.

    ``hosts`` are the nodes that joined. ``passes`` maps each check to its passes; a pass is a list of
    values by node. ``silent`` are nodes that did not join or stopped answering. ``exchange`` and ``again``
    map (receiver, sender) to bytes/s.
    """

    hosts: list[str]
    silent: list[str] = field(default_factory=list)
    passes: dict[str, list[list[float | None]]] = field(default_factory=dict)
    exchange: dict[Pair, float] = field(default_factory=dict)
    again: dict[Pair, float] = field(default_factory=dict)

    @property
    def rates(self) -> Rates:
        """The rate of each pair, in the slower of its two directions."""
        return Rates(len(self.hosts), slower_directions(self.exchange), slower_directions(self.again))

    def as_json(self) -> dict[str, Any]:
        """Return what was measured as a JSON object."""
        directed = {
            name: [[*pair, round(rate)] for pair, rate in getattr(self, name).items()]
            for name in ("exchange", "again")
        }
        return {**vars(self), **directed}


def slower_directions(directed: Mapping[Pair, float]) -> dict[Pair, float]:
    """Return the rate of each pair: the lower one of the rates of its two directions."""
    rates: dict[Pair, float] = {}
    for (a, b), rate in directed.items():
        pair = (min(a, b), max(a, b))
        rates[pair] = min(rate, rates.get(pair, rate))
    return rates


def failing(passes: Sequence[Values], *, check: str, threshold: float) -> list[int]:
    """Return the nodes that fail a check each time they are measured."""
    verdicts = [[_fails(check, value, values, threshold) for value in values] for values in passes]
    by_node = [[one for one in of_node if one is not None] for of_node in zip(*verdicts, strict=True)]
    return [node for node, results in enumerate(by_node) if results and all(results)]


def _fails(check: str, value: float | None, values: Values, threshold: float) -> bool | None:
    if value is None:
        return None
    if check in FAULTS:
        return value > 0
    median = _median(values)
    return median is not None and value < threshold * median


def _median(values: Values) -> float | None:
    known = [value for value in values if value is not None]
    return median_high(known) if known else None


def assess(measured: Measured, *, threshold: float) -> dict[str, Any]:
    """Return the nodes with their checks, the slow links, and the nodes to exclude, as a JSON object.

    For each node, ``check``, ``value`` and ``median`` describe its worst check: the one with the lowest ratio
    of value to median. If the node failed any checks, only the failed checks are considered.
    """
    made = {check: passes for check, passes in measured.passes.items() if check != "gpus" or _best(passes)[1]}
    columns = {check: _best(passes) for check, passes in made.items()}
    failed = {check: failing(passes, check=check, threshold=threshold) for check, passes in made.items()}
    exchange = confirmed(measured.rates, judge(measured.rates, threshold=threshold))
    if measured.exchange:
        columns["exchange"], failed["exchange"] = (exchange.rates, exchange.median), exchange.slow_nodes

    def result(check: str, place: int) -> dict[str, Any]:
        """Return a node's value, if possible from a measurement that the node passed."""
        passed = [one for one in made.get(check, ()) if _fails(check, one[place], one, threshold) is False]
        values, median = _best(passed) if passed else columns[check]
        return _result(check, values[place], median, fails=place in failed[check])

    nodes = [
        _node(host, [result(check, place) for check in (*RATES, *FAULTS) if check in columns])
        for place, host in enumerate(measured.hosts)
        if host not in measured.silent
    ]
    nodes += [_node(host, [_result(ANSWERED, None, None, fails=True)]) for host in measured.silent]
    rates = measured.rates
    links = [
        _link([measured.hosts[a], measured.hosts[b]], rates.best((a, b)), exchange.median)
        for a, b in exchange.slow_links
    ]
    if len(measured.hosts) == 2:
        links += _of_two(measured, threshold)
    return {
        "nodes": nodes,
        "links": links,
        "exclude": [node["node"] for node in nodes if not node["fit"]],
        "threshold": threshold,
        "pairs": len(rates.first),
    }


def _best(passes: Sequence[Values]) -> tuple[Values, float | None]:
    """Return the values and the median of the pass with the highest median, which was disturbed least."""
    best = max(passes, key=lambda values: _median(values) or 0.0)
    return best, _median(best)


def _result(check: str, value: float | None, median: float | None, *, fails: bool) -> dict[str, Any]:
    return {"check": check, "fit": not fails, "value": value, "median": median, "unit": RATES.get(check, "")}


def _node(host: str, checks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def rank(check: dict[str, Any]) -> tuple[bool, float]:
        known = check["value"] is not None and check["median"]
        return check["fit"], check["value"] / check["median"] if known else 1.0

    first = min(checks, key=rank, default=_result("", None, None, fails=False))
    shown = {name: first[name] for name in ("check", "value", "median")}
    return {"node": host, "fit": all(check["fit"] for check in checks), **shown, "checks": list(checks)}


def _link(nodes: Sequence[str], value: float, median: float | None) -> dict[str, Any]:
    return {"nodes": list(nodes), "fit": False, "value": value, "median": median}


def uneven_directions(directed: Mapping[Pair, float], *, threshold: float) -> bool:
    """Return True if two nodes exchange more slowly in one direction than in the other."""
    rates = list(directed.values())
    return len(rates) == 2 and min(rates) < threshold * max(rates)


def _of_two(measured: Measured, threshold: float) -> list[dict[str, Any]]:
    """Return the link between the only two nodes if one direction is slow."""
    both = [measured.exchange, measured.again]
    if not all(uneven_directions(directed, threshold=threshold) for directed in both):
        return []
    rates = measured.again.values()
    return [_link(measured.hosts, min(rates), max(rates))]
