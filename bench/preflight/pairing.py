"""Pair nodes for exchanges, and find slow nodes and slow links from the rates of the pairs.

In each round, every group of nodes is halved, and each node of one half exchanges with the nodes of the other
half, one after another (recursive halving). The first round halves the whole set, the second round halves its
halves, and so on. After ceil(log2(N)) rounds, every two nodes have met once. Pairs that were slow are then
paired again, slow nodes with fast partners, in one more round. The total is at most 2 log2(N) rounds.

An exchange is as fast as the slower of its two nodes. A node that is slow with its best partners is a slow
node. Two nodes that are fast with others, but slow together, have a slow link between them.

Nodes are numbers from 0. This module needs no torch, so that `make campaign-preflight` can simulate many
cases.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high

Pair = tuple[int, int]
#: Pairs that exchange at the same time: every node is in at most one of them.
Step = list[Pair]

#: Maximum time of all exchanges, and the time of one of them: shorter with many nodes.
EXCHANGES_S = 60.0
_EXCHANGE_S, _MIN_EXCHANGE_S = 0.3, 0.1
#: An exchange also needs time for its first messages.
_OVERHEAD = 1.4
#: Partners of a slow node in the round that measures slow pairs again.
PARTNERS_AGAIN = 3
#: Maximum number of steps in that round.
STEPS_AGAIN = 12


def most_rounds(nodes: int) -> int:
    """Return the maximum number of rounds, 2 log2(N)."""
    return math.floor(2 * math.log2(nodes)) if nodes > 1 else 0


def exchange_s(nodes: int) -> float:
    """Return the time for which two nodes exchange messages."""
    return max(_MIN_EXCHANGE_S, min(_EXCHANGE_S, EXCHANGES_S / nodes))


def most_steps(nodes: int) -> int:
    """Return the number of steps for which there is time."""
    return max(nodes.bit_length(), int(EXCHANGES_S / (exchange_s(nodes) * _OVERHEAD)))


def halving_rounds(nodes: int, *, max_steps: int) -> list[list[Step]]:
    """Return the rounds, each a list of steps. All pairs meet if ``max_steps`` allows it.

    Otherwise the rounds with the most steps are shortened, so that pairs are left out evenly.
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
    """Return the maximum length of a round, so that all rounds together have at most ``max_steps`` steps."""
    limit = max(lengths, default=0)
    while limit > 1 and sum(min(length, limit) for length in lengths) > max_steps:
        limit -= 1
    return limit


def _spread(length: int, limit: int) -> list[int]:
    """Return at most ``limit`` of the numbers below ``length``, at equal distances."""
    kept = min(length, limit)
    return [place * length // kept for place in range(kept)]


def _step(halves: Iterable[tuple[list[int], list[int]]], shift: int) -> Step:
    """Pair each node of a left half with one of the right half; with odd sizes, some have no partner."""
    step = []
    for left, right in halves:
        if shift < len(left):
            partners = ((node, (place + shift) % len(left)) for place, node in enumerate(left))
            step += [(node, right[other]) for node, other in partners if other < len(right)]
    return step


@dataclass(frozen=True)
class Rates:
    """Rates of pairs in bytes/s; ``again`` contains those that were measured once more."""

    nodes: int
    first: Mapping[Pair, float]
    again: Mapping[Pair, float]

    def best(self, pair: Pair) -> float:
        """Return the higher rate of a pair, because disturbances only lower a rate."""
        return max(self.first.get(pair, 0.0), self.again.get(pair, 0.0))

    def of_nodes(self) -> list[float | None]:
        """Return the rate of each node with its best partners; None for a node that exchanged with none.

        A second measurement replaces the first one if it is higher.
        """
        first, again = self._with_best_partners(self.first), self._with_best_partners(self.again)
        both = zip(first, again, strict=True)
        return [max((rate for rate in pair if rate is not None), default=None) for pair in both]

    def _with_best_partners(self, rates: Mapping[Pair, float]) -> list[float | None]:
        """Return the upper quartile of each node's rates: high if a quarter of its partners is fast."""
        by_node: list[list[float]] = [[] for _ in range(self.nodes)]
        for (a, b), rate in rates.items():
            by_node[a].append(rate)
            by_node[b].append(rate)
        return [sorted(own, reverse=True)[(len(own) - 1) // 4] if own else None for own in by_node]


@dataclass(frozen=True)
class Verdict:
    """Rates of the nodes, their median, the slow nodes, and the slow links between other nodes.

    Everything is None or empty for fewer than three nodes: of two nodes, either could be the slow one.
    """

    rates: list[float | None]
    median: float | None
    slow_nodes: list[int]
    slow_links: list[Pair]


def judge(rates: Rates, *, threshold: float) -> Verdict:
    """Return the nodes below ``threshold`` x median, and the links below ``threshold`` x both their nodes.

    With an even number of nodes, the median is the higher of the two middle values: half of the nodes may
    be slow.
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
    """Return the steps that measure slow pairs again: slow nodes with fast partners, and slow links."""
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
