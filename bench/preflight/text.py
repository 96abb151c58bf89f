"""Format the result of a preflight for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_NAMES = {
    "gpus": "GPUs",
    "matrix-product": "matrix product",
    "memory": "memory",
    "exchange": "exchange",
    "gpu-clock": "GPU clock",
    "gpu-slowdown": "GPUs slowed down",
    "gpu-errors": "GPU memory errors",
    "pcie-width": "PCIe width",
    "answered": "answered",
}
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


def check_name(check: str) -> str:
    """Return the name of a check in words."""
    return _NAMES.get(check, check)


def value_text(check: Mapping[str, Any]) -> str:
    """Format the value of a check: ``13.3 GFLOP/s``; a dash if it was not measured."""
    return "-" if check["value"] is None else _with_unit(check["value"], check["unit"])


def _with_unit(value: float, unit: str) -> str:
    if "/" not in unit and unit != "Hz":
        return f"{value:g} {unit}".strip()
    factor, prefix = next(((f, p) for f, p in _PREFIXES if value >= f), (1e3, "k"))
    return f"{value / factor:.3g} {prefix}{unit}"


def cell_text(check: Mapping[str, Any]) -> str:
    """Format a check for a table: ``13.3 GFLOP/s (99 %)``, in per cent of the median."""
    text = value_text(check)
    if check["value"] is None or not check["median"]:
        return text
    return f"{text} ({100 * check['value'] / check['median']:.0f} %)"


def findings(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each failed check and each slow link."""
    for node in result["nodes"]:
        for check in node["checks"]:
            if not check["fit"]:
                yield f"{node['node']} is unfit: {_failure(check)}"
    for link in result["links"]:
        a, b = link["nodes"]
        rate = _with_unit(link["value"], "B/s")
        if len(result["nodes"]) == 2:
            other = _with_unit(link["median"], "B/s")
            what = f"{a} and {b} exchange {rate} in one direction, and {other} in the other"
            yield f"{what}; check a third node together with them to find out which one is slow"
        else:
            normal = _with_unit(link["median"], "B/s")
            what = f"the link between {a} and {b} is slow: {rate}, the median is {normal}"
            yield f"{what}; avoid one of the two"


def _failure(check: Mapping[str, Any]) -> str:
    name = check_name(check["check"])
    if check["value"] is None:
        return "it did not start, or stopped answering" if check["check"] == "answered" else f"no {name}"
    if not check["median"]:
        return f"{name}: {value_text(check)}"
    median = _with_unit(check["median"], check["unit"])
    return f"{name} {cell_text(check)} of the median, {median})".replace(") of", " of")


def notes(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield what limits the result: too few nodes, or pairs that did not exchange."""
    count = len([node for node in result["nodes"] if node["check"] != "answered"])
    if count == 1:
        yield "one node: there is nothing to compare it with"
    elif count == 2:
        yield "two nodes: the rate of their exchange cannot be compared with that of other pairs"
    pairs = count * (count - 1) // 2
    if count > 2 and result["pairs"] < pairs:
        known = f"{result['pairs']} of {pairs} pairs of nodes exchanged messages"
        yield f"{known}; links between the others are unknown"
