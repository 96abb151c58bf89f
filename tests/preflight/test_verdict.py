"""The verdict on nodes: what a preflight measured, and what is said about it."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from bench.commands.preflight import findings, notes
from bench.preflight.verdict import Measured, assess


def measured(hosts: int = 4, **passes: list[list[float | None]]) -> Measured:
    """Return values of checks; the name ``matrix_product`` is that of the check matrix-product."""
    names = [f"n{i}" for i in range(1, hosts + 1)]
    return Measured(names, passes={name.replace("_", "-"): values for name, values in passes.items()})


def both_directions(hosts: int, slow: set[int], rate: float = 0.8e9) -> dict[tuple[int, int], float]:
    pairs = [pair for a, b in combinations(range(hosts), 2) for pair in ((a, b), (b, a))]
    return {(a, b): rate if b in slow else 1e9 for a, b in pairs}


def said(found: Measured) -> tuple[list[str], list[str]]:
    result = assess(found, threshold=0.9)
    return result["exclude"], [*findings(result), *notes(result)]


def without(*nodes: str, errors: dict[str, str] | None = None, hosts: int = 2) -> Measured:
    """Return values of which these nodes gave none: they did not answer, or ended with an error."""
    memory: list[float | None] = [None if f"n{i}" in (errors or {}) else 10e9 for i in range(1, hosts + 1)]
    found = measured(hosts, memory=[memory])
    found.silent += nodes
    found.errors |= errors or {}
    return found


ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
SLOW: list[float | None] = [13e9, 13.5e9, 10.4e9, 13e9]


@pytest.mark.parametrize(
    ("found", "excluded", "lines"),
    [
        pytest.param(
            measured(matrix_product=[SLOW, SLOW]),
            ["n3"],
            ["n3 is unfit: matrix product 10.4 GFLOP/s (80 % of the median, 13 GFLOP/s)"],
            id="slow both times",
        ),
        pytest.param(measured(2, memory=[[10e9, 8e9]]), ["n2"], [], id="the slower one of two"),
        pytest.param(measured(memory=[[8e9, 10e9, 8e9, 10e9]]), ["n1", "n3"], [], id="two of four"),
        pytest.param(
            without("n3"), ["n3"], ["n3 is unfit: it did not start, or stopped answering"], id="silent"
        ),
        pytest.param(
            measured(3, gpu_errors=[[0, 2, 0]], pcie_width=[[16, 16, 8]], gpus=[[4, 4, 4]]),
            ["n2", "n3"],
            [
                "n2 is unfit: GPU memory errors: 2",
                "n3 is unfit: PCIe width 8 lanes (50 % of the median, 16 lanes)",
            ],
            id="a GPU with errors, or without its lanes",
        ),
        pytest.param(
            measured(3, memory=[[10e9, None, 10e9]], gpu_errors=[[None, 0, 0]]), [], [], id="not measured"
        ),
        pytest.param(
            without(hosts=3, errors={"n2": ECC}),
            ["n2"],
            [f"n2 is unfit: it could not be measured: {ECC}"],
            id="an error",
        ),
    ],
)
def test_nodes_are_unfit_by_their_own_values(found, excluded, lines):
    unfit, shown = said(found)
    assert (unfit, shown[: len(lines)]) == (excluded, lines)


def test_a_node_that_was_slow_only_once_is_fit():
    slow: list[float | None] = [13e9, 13e9, 10.4e9, 13e9]
    fine: list[float | None] = [13e9, 13e9, 12.9e9, 13e9]
    excluded, lines = said(measured(matrix_product=[slow, fine]))
    assert (excluded, lines) == (
        [],
        ["0 of 6 pairs of nodes exchanged messages; the links between the other pairs are unknown"],
    )
    shown = assess(measured(matrix_product=[slow, fine]), threshold=0.9)["nodes"][2]
    assert (shown["fit"], shown["value"]) == (True, 12.9e9), "the value with which the node passed"


def test_the_threshold_is_a_part_of_the_median():
    found = measured(memory=[[10e9, 10e9, 8e9, 10e9]])
    assert assess(found, threshold=0.75)["exclude"] == []


def test_a_node_that_sends_slowly_is_unfit_and_its_links_are_not_listed():
    found = measured(4)
    found.exchange = both_directions(4, {2})
    found.again = {pair: rate for pair, rate in found.exchange.items() if 2 in pair}
    result = assess(found, threshold=0.9)
    assert (result["exclude"], result["links"]) == (["n3"], [])
    assert list(findings(result)) == ["n3 is unfit: exchange 800 MB/s (80 % of the median, 1 GB/s)"]


def test_a_slow_link_blames_neither_of_its_nodes():
    found = measured(4)
    found.exchange = both_directions(4, set()) | {(0, 1): 0.5e9}
    found.again = {(0, 1): 0.55e9, (1, 0): 1e9}
    result = assess(found, threshold=0.9)
    assert result["exclude"] == []
    slow = {"nodes": ["n1", "n2"], "fit": False, "value": 0.55e9, "median": 1e9, "reason": None}
    assert result["links"] == [slow]
    assert list(findings(result)) == [
        "the link between n1 and n2 is slow: 550 MB/s, the median is 1 GB/s; avoid one of these nodes"
    ]


def test_two_nodes_cannot_tell_which_of_them_sends_slowly():
    found = measured(2)
    found.exchange = found.again = {(0, 1): 0.8e9, (1, 0): 1e9}
    excluded, lines = said(found)
    assert excluded == []
    assert lines == [
        "n1 and n2 exchange 800 MB/s in one direction, and 1 GB/s in the other; check a third node together"
        " with them to find out which node is slow",
        "two nodes: the rate of their exchange cannot be compared with that of other pairs",
    ]


WHY = "the exchange did not end in 30 s"


def test_a_link_over_which_nothing_was_exchanged_is_named_and_neither_of_its_nodes_is_unfit():
    found = measured(4)
    found.exchange = {pair: 1e9 for pair in both_directions(4, set()) if {*pair} != {0, 1}}
    found.failures = {(0, 1): WHY}
    result = assess(found, threshold=0.9)
    assert result["exclude"] == []
    assert list(findings(result)) == [f"n1 and n2 exchanged no messages: {WHY}; avoid one of these nodes"]


def test_of_two_nodes_whose_exchange_hangs_none_is_blamed():
    found = measured(2)
    found.failures = {(0, 1): WHY}
    result = assess(found, threshold=0.9)
    assert (result["exclude"], len(result["links"])) == ([], 1)
    assert list(findings(result)) == [
        f"n1 and n2 exchanged no messages: {WHY}; check a third node together with them to find out which"
        " node is faulty"
    ]


def test_a_node_without_any_exchange_is_unfit_if_its_partners_reach_others():
    found = measured(4)
    found.exchange = {pair: 1e9 for pair in both_directions(4, set()) if 1 not in pair}
    found.failures = {(0, 1): WHY, (1, 2): WHY}
    result = assess(found, threshold=0.9)
    assert (result["exclude"], result["links"]) == (["n2"], [])
    assert list(findings(result)) == [f"n2 is unfit: it exchanged messages with no other node: {WHY}"]


def test_a_pair_that_was_not_tried_blames_nobody_and_is_unknown():
    found = measured(4)
    found.exchange = {pair: 1e9 for pair in both_directions(4, set()) if 1 not in pair}
    excluded, lines = said(found)
    assert (excluded, lines) == (
        [],
        ["3 of 6 pairs of nodes exchanged messages; the links between the other pairs are unknown"],
    )


def test_if_nothing_can_be_exchanged_one_line_says_so():
    found = measured(3)
    found.failures = {(0, 1): "n1: no such device", (1, 2): WHY, (0, 2): WHY}
    result = assess(found, threshold=0.9)
    assert (result["exclude"], len(result["links"])) == ([], 3)
    assert list(findings(result)) == [
        "no pair of nodes exchanged messages; the first pair, n1 and n2: n1: no such device"
    ]


def test_a_single_node_is_fit_and_the_missing_comparison_is_named():
    assert said(measured(1, memory=[[10e9]])) == ([], ["one node: there is nothing to compare it with"])


def test_a_node_shows_its_first_failed_check_else_its_lowest_one():
    found = measured(3, matrix_product=[[10e9, 10e9, 8e9]], memory=[[9.5e9, 10e9, 10e9]])
    nodes: list[dict[str, Any]] = assess(found, threshold=0.9)["nodes"]
    assert [(node["node"], node["fit"], node["check"]) for node in nodes] == [
        ("n1", True, "memory"),
        ("n2", True, "matrix-product"),
        ("n3", False, "matrix-product"),
    ]
    assert (nodes[2]["value"], nodes[2]["median"]) == (8e9, 10e9)
