"""The sentences about facts."""

from __future__ import annotations

import pytest

from bench.facts import Fact
from bench.study.before_facts import facts_of_env
from bench.words import sentence, words


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        (
            "unequal-nodes",
            {
                "nodes": [
                    {"hosts": ["n1", "n2"], "cores": 64, "cores_per_rank": [2], "quota": None},
                    {"hosts": ["n3"], "cores": 64, "cores_per_rank": [1, 2], "quota": 1.5},
                ]
            },
            "n1, n2: 64 cores, 2 per rank, no quota; n3: 64 cores, 1 or 2 per rank, a quota of 1.5 cores",
        ),
        (
            "option-ignored",
            {"option": "pin_memory", "device": "CPU"},
            "option 'pin_memory' has no effect on a CPU device",
        ),
        ("of a later version", {"steps": 3, "hosts": ["n1"]}, "steps 3, hosts ['n1']"),
    ],
)
def test_a_fact_is_written_in_the_first_words_whose_values_are_known(kind, values, expected):
    assert words(Fact(kind, values=values)) == expected
    assert sentence(Fact(kind, values=values)) == f"{kind}: {expected}"


def test_facts_are_read_as_they_were_written_and_others_are_left_out():
    fact = Fact("loss-not-finite", ("loss",), {"epoch": 1, "ranks": [1]})
    broken = [None, {"kind": 3}, {**fact.as_json(), "severity": "fatal"}, {**fact.as_json(), "values": []}]
    assert facts_of_env({"facts": [*broken, fact.as_json()]}) == [fact]
    assert [facts_of_env(env) for env in (None, [], {"facts": 3, "warnings": {"a": 1}})] == [[], [], []]


@pytest.mark.parametrize(
    ("written", "kind", "values"),
    [
        (
            "shared-cores: 8 threads of 2 ranks share 4 cores (0-3) on each of n1, n2: set cpus_per_task",
            "shared-cores",
            {"ranks": 2, "threads": 8, "cores": 4, "machines": [["n1"], ["n2"]]},
        ),
        ("the step time was not yet stable after 10 warm-up steps", "not-stable", {"steps": 10}),
        ("no window was recorded: a rank took fewer than 6 steps", "no-window", {}),
        ("unequal-nodes: n1: 8 cores", "unequal-nodes", {}),
        ("option 'pin_memory' has no effect on a CPU device", "older-warning", {}),
    ],
)
def test_the_sentences_of_older_versions_are_facts(written, kind, values):
    (fact,) = facts_of_env({"warnings": [written]})
    assert (fact.kind, {**fact.values} | {"text": ""}) == (kind, {**values, "text": ""})
    assert sentence(fact).endswith(written)
