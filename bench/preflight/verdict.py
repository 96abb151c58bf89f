"""Decide which nodes and links are slow or unfit, and pair the nodes whose links are measured.

A node is unfit if one of its checks is below the threshold times the median of all nodes, or reports
errors. Checks that fail are measured again, and only a node that fails both times is unfit. With an even
number of nodes, the median is the higher of the two middle values, because a fault only makes a node
slower.

For the exchanges, every group of nodes is halved in each round, and each node of one half exchanges with the
nodes of the other half, one after another (recursive halving). The first round halves the whole set, the
second round halves its halves, and so on. After ceil(log2(N)) rounds, every two nodes have met once. One
more round then measures slow links again, and slow nodes with fast partners. The total is at most 2 log2(N)
rounds.

An exchange is as fast as the slower of its two nodes. A node that is slow with its best partners is a slow
node. Two nodes that are fast with others, but slow together, have a slow link between them.

A pair contains the numbers of two nodes, from 0. This module needs no torch, so that
`make campaign-preflight` can simulate many cases.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_high
from typing import Any

Pair = tuple[int, int]
#: Pairs that exchange at the same time: every node is in at most one of them.
Step = list[Pair]

#: Maximum time of all exchanges; time of a single exchange, and its minimum with many nodes.
EXCHANGES_S = 60.0
_EXCHANGE_S, _MIN_EXCHANGE_S = 0.3, 0.1
#: Total duration of an exchange as a multiple of its measured part; the first messages are not measured.
_OVERHEAD = 1.4
#: Partners of a slow node in the round that measures slow pairs again.
PARTNERS_AGAIN = 3
#: Maximum number of steps in the round that measures slow pairs again.
STEPS_AGAIN = 12


def most_rounds(nodes: int) -> int:
    """Return the maximum number of rounds of exchanges between all nodes, 2 log2(N)."""
    return math.floor(2 * math.log2(nodes)) if nodes > 1 else 0


def exchange_s(nodes: int) -> float:
    """Return the time for which two nodes exchange messages."""
    return max(_MIN_EXCHANGE_S, min(_EXCHANGE_S, EXCHANGES_S / nodes))


def most_steps(nodes: int) -> int:
    """Return how many steps (exchanges at the same time) fit into :data:`EXCHANGES_S`."""
    return max(nodes.bit_length(), int(EXCHANGES_S / (exchange_s(nodes) * _OVERHEAD)))


def halving_rounds(nodes: int, *, max_steps: int) -> list[list[Step]]:
    """Return the rounds of exchanges, each a list of steps: pairs of nodes that exchange at the same time.

    If there are more than ``max_steps``, the longest rounds are shortened, so that pairs are left out evenly.
    """
    groups, levels = [list(range(nodes))], []
    while any(len(group) > 1 for group in groups):
        halves = [(group[: -(-len(group) // 2)], group[-(-len(group) // 2) :]) for group in groups]
        levels.append(halves)
        groups = [half for pair in halves for half in pair if half]
    lengths = [max(len(left) for left, _ in halves) for halves in levels]
    limit = _longest(lengths, max_steps)
    return [
        [_step(halves, shift) for shift in _spread(length, limit)]
        for halves, length in zip(levels, lengths, strict=True)
    ]


def _longest(lengths: Sequence[int], max_steps: int) -> int:
    """Return the length to which longer rounds are shortened, for at most ``max_steps`` steps in total."""
    limit = max(lengths, default=0)
    while limit > 1 and sum(min(length, limit) for length in lengths) > max_steps:
        limit -= 1
    return limit


def _spread(length: int, limit: int) -> list[int]:
    """Return at most ``limit`` of the numbers below ``length``, at equal distances."""
    kept = min(length, limit)
    return [place * length // kept for place in range(kept)]


def _step(halves: Iterable[tuple[list[int], list[int]]], shift: int) -> Step:
    """Pair each node of a left half with the node ``shift`` places further in the right half, if any."""
    step = []
    for left, right in halves:
        if shift < len(left):
            partners = ((node, (place + shift) % len(left)) for place, node in enumerate(left))
            step += [(node, right[other]) for node, other in partners if other < len(right)]
    return step


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
        """Return the rate of each node with its best partners, or None for a node that exchanged with none.

        A second measurement replaces the first one if it is higher.
        """
        first, again = self._with_best_partners(self.first), self._with_best_partners(self.again)
        both = zip(first, again, strict=True)
        return [max((rate for rate in pair if rate is not None), default=None) for pair in both]

    def _with_best_partners(self, rates: Mapping[Pair, float]) -> list[float | None]:
        """Return the upper quartile of each node's rates. It is high if a quarter of the partners is fast."""
        by_node: list[list[float]] = [[] for _ in range(self.nodes)]
        for (a, b), rate in rates.items():
            by_node[a].append(rate)
            by_node[b].append(rate)
        return [sorted(own, reverse=True)[(len(own) - 1) // 4] if own else None for own in by_node]


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


def pairs_again(verdict: Verdict) -> list[Step]:
    """Return the steps that measure slow links again, and slow nodes with fast partners."""
    slow = set(verdict.slow_nodes)
    rated = [node for node, rate in enumerate(verdict.rates) if rate is not None and node not in slow]
    fast = sorted(rated, key=lambda node: -(verdict.rates[node] or 0.0))
    wanted = []
    for place, node in enumerate(verdict.slow_nodes):
        # Different slow nodes begin with different partners, so that they can exchange at the same time.
        partners = [fast[(place + i) % len(fast)] for i in range(min(PARTNERS_AGAIN, len(fast)))]
        wanted += [(min(node, partner), max(node, partner)) for partner in partners]
    return _steps_of([*wanted, *verdict.slow_links])[:STEPS_AGAIN]


def _steps_of(pairs: Iterable[Pair]) -> list[Step]:
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
    map (receiver, sender) to bytes/s. ``rounds`` is the number of rounds of exchanges.
    """

    hosts: list[str]
    silent: list[str] = field(default_factory=list)
    passes: dict[str, list[list[float | None]]] = field(default_factory=dict)
    exchange: dict[Pair, float] = field(default_factory=dict)
    again: dict[Pair, float] = field(default_factory=dict)
    rounds: int = 0

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
        "rounds": measured.rounds,
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
