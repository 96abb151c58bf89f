"""Decide which nodes and links are slow or unfit, and pair the nodes whose links are measured.

A node is unfit if one of its checks is below the threshold times the median of all nodes, or reports
errors. Checks that fail are measured again, and only a node that fails both times is unfit. With an even
number of nodes, the median is the higher of the two middle values, because a fault only makes a node
slower.

The nodes form a ring, and each node exchanges messages with the next one. An exchange is as fast as the
slower of its two nodes, so a node is as fast as its best exchange. Suspects are then measured once more: slow
links, and slow nodes with a node that is known to be fast. A node that is still slow is a slow node. Two
nodes that are fast with others, but slow together, have a slow link between them.

Exchanges that hang or fail are treated in the same way. A node is unfit if all its exchanges failed with
partners that exchanged messages with other nodes. Otherwise the link between the two nodes is broken.

A pair contains the numbers of two nodes, from 0. This module needs no torch, so that
`make campaign-preflight` can simulate many cases.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
    """Rates of pairs in bytes/s; ``again`` contains the rates of pairs that were measured again.

    ``failed`` are the pairs whose last exchange hung or failed.
    """

    nodes: int
    first: Mapping[Pair, float]
    again: Mapping[Pair, float]
    failed: Collection[Pair] = ()

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

    def without_success(self) -> list[int]:
        """Return the nodes all of whose exchanges failed."""
        tried = {node for pair in self.failed for node in pair}
        return sorted(node for node in tried if self.of_nodes()[node] is None)


@dataclass(frozen=True)
class Verdict:
    """Rates of the nodes, their median, the slow nodes, and the slow links between other nodes.

    ``isolated`` are the nodes that no partner could reach. Everything is None or empty for fewer than three
    nodes: of two nodes, either could be slow.
    """

    rates: list[float | None]
    median: float | None
    slow_nodes: list[int]
    slow_links: list[Pair]
    isolated: list[int] = field(default_factory=list)


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
    return Verdict(of_nodes, median, slow, links, list(_isolated(rates, of_nodes)))


def _isolated(rates: Rates, of_nodes: Sequence[float | None]) -> Iterator[int]:
    """Yield the nodes that at least two partners could not reach, although these reached other nodes."""
    for node in rates.without_success():
        partners = {one for pair in rates.failed if node in pair for one in pair} - {node}
        if len([one for one in partners if of_nodes[one] is not None]) >= 2:
            yield node


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
    return Verdict(verdict.rates, verdict.median, nodes, links, verdict.isolated)


def pairs_again(rates: Rates, verdict: Verdict) -> list[Step]:
    """Return the steps that measure slow links, links of slow nodes, and slow nodes with fast ones.

    Exchanges that failed are measured in the same way.
    """
    suspects = [*verdict.slow_nodes, *rates.without_success()]
    slow = set(verdict.slow_nodes)
    rated = [node for node, rate in enumerate(verdict.rates) if rate is not None and node not in slow]
    fast = sorted(rated, key=lambda node: -(verdict.rates[node] or 0.0))
    if not fast:
        return []  # nothing to compare with
    links = [pair for pair in rates.first if not slow.isdisjoint(pair)] + verdict.slow_links
    wanted = []
    for place, node in enumerate(suspects):
        # A partner that is not its neighbour shows whether the node is slow, or its links. Slow nodes get
        # different partners where possible, so that they can exchange at the same time.
        pairs = [(min(node, one), max(node, one)) for one in fast]
        pairs = [pair for pair in pairs if pair not in rates.first and pair not in rates.failed] or pairs
        wanted.append(pairs[place % len(pairs)])
    return steps_of(dict.fromkeys([*wanted, *links, *rates.failed]))


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
#: The check of nodes that did not start, stopped answering, or could not be measured.
ANSWERED = "answered"

Values = Sequence[float | None]


@dataclass
class Measured:
    """The values of all nodes, as far as they were measured.

    ``hosts`` are the nodes that joined. ``passes`` maps each check to its passes; a pass is a list of
    values by node. ``silent`` are nodes that did not join or stopped answering. ``errors`` maps nodes that
    could not be measured to the reason. ``exchange`` and ``again`` map (receiver, sender) to bytes/s.
    ``failures`` maps pairs whose last exchange hung or failed to the reason.
    """

    hosts: list[str]
    silent: list[str] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    passes: dict[str, list[list[float | None]]] = field(default_factory=dict)
    exchange: dict[Pair, float] = field(default_factory=dict)
    again: dict[Pair, float] = field(default_factory=dict)
    failures: dict[Pair, str] = field(default_factory=dict)

    @property
    def rates(self) -> Rates:
        """The rate of each pair, in the slower of its two directions."""
        first, again = slower_directions(self.exchange), slower_directions(self.again)
        return Rates(len(self.hosts), first, again, tuple(self.failures))

    def as_json(self) -> dict[str, Any]:
        """Return what was measured as a JSON object."""
        directed = {
            name: [[*pair, round(rate)] for pair, rate in getattr(self, name).items()]
            for name in ("exchange", "again")
        }
        return {**vars(self), **directed, "failures": [[*pair, why] for pair, why in self.failures.items()]}


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
    rates = measured.rates
    exchange = confirmed(rates, judge(rates, threshold=threshold))
    if measured.exchange or measured.failures:
        columns["exchange"] = exchange.rates, exchange.median
        failed["exchange"] = [*exchange.slow_nodes, *exchange.isolated]

    def result(check: str, place: int) -> dict[str, Any]:
        """Return a node's value, if possible from a measurement that the node passed."""
        passed = [one for one in made.get(check, ()) if _fails(check, one[place], one, threshold) is False]
        values, median = _best(passed) if passed else columns[check]
        found = _result(check, values[place], median, fails=place in failed[check])
        if check == "exchange" and place in exchange.isolated:
            reason = next(why for pair, why in measured.failures.items() if place in pair)
            return {**found, "reason": reason}
        return found

    nodes = []
    for place, host in enumerate(measured.hosts):
        if host not in measured.silent:
            results = [result(check, place) for check in (*RATES, *FAULTS) if check in columns]
            nodes.append(_node(host, [*_unmeasured(measured, host), *results]))
    nodes += [_node(host, [_result(ANSWERED, None, None, fails=True)]) for host in measured.silent]
    links = [*_bad_links(measured, exchange), *(_of_two(measured, threshold) if rates.nodes == 2 else ())]
    return {
        "nodes": nodes,
        "links": links,
        "exclude": [node["node"] for node in nodes if not node["fit"]],
        "threshold": threshold,
        "pairs": len({*rates.first, *rates.again}),
    }


def _unmeasured(measured: Measured, host: str) -> list[dict[str, Any]]:
    """Return the failed check of a node that could not be measured, else nothing."""
    if host not in measured.errors:
        return []
    return [{**_result(ANSWERED, None, None, fails=True), "reason": measured.errors[host]}]


def _bad_links(measured: Measured, verdict: Verdict) -> Iterator[dict[str, Any]]:
    """Yield the slow links, and the links over which nothing could be exchanged."""
    rates, hosts = measured.rates, measured.hosts
    for a, b in verdict.slow_links:
        yield _link([hosts[a], hosts[b]], rates.best((a, b)), verdict.median)
    for (a, b), reason in measured.failures.items():
        if not {a, b} & set(verdict.isolated):
            yield _link([hosts[a], hosts[b]], None, verdict.median, reason=reason)


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


def _link(
    nodes: Sequence[str], value: float | None, median: float | None, *, reason: str | None = None
) -> dict[str, Any]:
    return {"nodes": list(nodes), "fit": False, "value": value, "median": median, "reason": reason}


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
