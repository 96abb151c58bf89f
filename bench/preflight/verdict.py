"""Decide which nodes are unfit from what a preflight job measured.

A node is unfit if one of its checks is below the threshold times the median of all nodes, or reports
errors. Checks that fail are measured again, and only a node that fails both times is unfit. With an even
number of nodes, the median is the higher of the two middle values, because a fault only makes a node
slower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_high
from typing import Any

from bench.preflight.pairing import Pair, Rates, confirmed, judge

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
#: Checks that count what a fit node does not have.
FAULTS = ("gpu-slowdown", "gpu-errors")
#: The check of nodes that did not start, or stopped answering.
ANSWERED = "answered"

Values = Sequence[float | None]


@dataclass
class Measured:
    """The values of all nodes, as far as they were measured.

    ``hosts`` are the nodes that joined. ``passes`` contains, for each time a check was made, its values by
    node. ``silent`` are nodes that did not join or stopped answering. ``exchange`` and ``again`` map
    (receiver, sender) to bytes/s. ``rounds`` is the number of rounds of exchanges.
    """

    hosts: list[str]
    silent: list[str] = field(default_factory=list)
    passes: dict[str, list[list[float | None]]] = field(default_factory=dict)
    exchange: dict[Pair, float] = field(default_factory=dict)
    again: dict[Pair, float] = field(default_factory=dict)
    rounds: int = 0

    @property
    def rates(self) -> Rates:
        """The rates of the pairs: those of their slower directions."""
        return Rates(len(self.hosts), slower_directions(self.exchange), slower_directions(self.again))

    def as_json(self) -> dict[str, Any]:
        """Return what was measured as a JSON object."""
        directed = {
            name: [[*pair, round(rate)] for pair, rate in getattr(self, name).items()]
            for name in ("exchange", "again")
        }
        return {**vars(self), **directed}


def slower_directions(directed: Mapping[Pair, float]) -> dict[Pair, float]:
    """Return the rate of each pair from those of its two directions: the lower one."""
    rates: dict[Pair, float] = {}
    for (a, b), rate in directed.items():
        pair = (min(a, b), max(a, b))
        rates[pair] = min(rate, rates.get(pair, rate))
    return rates


def failing(passes: Sequence[Values], *, check: str, threshold: float) -> list[int]:
    """Return the nodes that fail a check in all passes in which they were measured."""
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

    ``check``, ``value`` and ``median`` of a node are those of its first failed check, else of the check in
    which it is lowest.
    """
    made = {check: passes for check, passes in measured.passes.items() if check != "gpus" or _best(passes)[1]}
    columns = {check: _best(passes) for check, passes in made.items()}
    failed = {check: failing(passes, check=check, threshold=threshold) for check, passes in made.items()}
    exchange = confirmed(measured.rates, judge(measured.rates, threshold=threshold))
    if measured.exchange:
        columns["exchange"], failed["exchange"] = (exchange.rates, exchange.median), exchange.slow_nodes
    nodes = [
        _node(host, [_check(name, columns[name], place, place in failed[name]) for name in _order(columns)])
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
    """Return the values of the pass with the highest median, which was disturbed least, and that median."""
    best = max(passes, key=lambda values: _median(values) or 0.0)
    return best, _median(best)


def _order(columns: Mapping[str, Any]) -> list[str]:
    return [name for name in (*RATES, *FAULTS) if name in columns]


def _check(name: str, column: tuple[Values, float | None], place: int, fails: bool) -> dict[str, Any]:
    values, median = column
    return _result(name, values[place], median, fails=fails)


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
