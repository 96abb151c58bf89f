"""Exchanges that hang, and processes that NCCL's watchdog aborts, in real processes over gloo."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.commands.preflight import findings
from tests.workload.conftest import srun_env

FOUR = {f"n{number}": 1 for number in range(1, 5)}


@pytest.fixture
def verdict(run_ranks):
    """Return the result and the measured values of a preflight with planted faults."""

    def of(fault: str) -> tuple[dict[str, Any], dict[str, Any]]:
        done = run_ranks(environments=srun_env(FOUR), target=f"tests.preflight.programs:{fault}").succeeded()
        return [json.loads((done.folder / f"{name}.json").read_text()) for name in ("result", "measured")]

    return of


def test_pairs_that_hang_are_named_and_the_others_are_measured(verdict):
    result, measured = verdict("two_broken_links")
    assert [(link["nodes"], link["value"]) for link in result["links"]] == [
        (["n1", "n2"], None),
        (["n3", "n4"], None),
    ]
    assert list(findings(result)) == [
        "n1 and n2 exchanged no messages: the exchange did not end in 1.5 s; avoid one of these nodes",
        "n3 and n4 exchanged no messages: n4: the process ended by SIGABRT; avoid one of these nodes",
    ]
    assert (result["exclude"], result["pairs"]) == ([], 2)
    assert [pair[:2] for pair in measured["exchange"]] == [[1, 2], [2, 1], [0, 3], [3, 0]]
    assert [pair[:2] for pair in measured["failures"]] == [[0, 1], [2, 3]]


def test_a_node_whose_exchanges_all_hang_is_unfit_even_if_it_writes_the_result(verdict):
    result, _ = verdict("first_node_is_isolated")
    assert (result["exclude"], result["links"]) == (["n1"], [])
    assert list(findings(result)) == [
        "n1 is unfit: it exchanged messages with no other node: the exchange did not end in 1.5 s"
    ]
    assert result["pairs"] == 2
