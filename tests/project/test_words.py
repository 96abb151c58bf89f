"""The sentences about facts."""

from __future__ import annotations

from string import Formatter

import pytest

from bench.facts import Fact, facts_of_env
from bench.words import _words, sentence, words


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
            "n1 and n2: 64 cores, 2 per rank, no quota; n3: 64 cores, 1 or 2 per rank, a quota of 1.5",
        ),
        ("allocator-retries", {"per_step": 2.0}, "2.0 retries of the allocator per step"),
        ("of a later version", {"steps": 3, "hosts": ["n1"]}, "steps 3, hosts ['n1']"),
    ],
)
def test_a_fact_is_written_in_the_first_words_whose_values_are_known(kind, values, expected):
    assert words(Fact(kind, values=values)) == expected
    assert sentence(Fact(kind, values=values)) == f"{kind}: {expected}"


@pytest.mark.parametrize("value", [None, 7, 1.5, float("nan"), "x", [], [7], [None], {"a": 1}])
def test_values_of_another_type_are_written_as_they_are(value):
    for kind, texts in [(kind, texts) for kind, texts in _words().items() if "says" in texts]:
        names = {name for text in texts["says"] for _, name, _, _ in Formatter().parse(text) if name}
        written = words(Fact(kind, values=dict.fromkeys(names, value)))
        assert "{" not in written or "{'a': 1}" in written


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("of a later version", {"hosts": ["n1"] * 20_000}, f"hosts {str(['n1'] * 20)[:37]}..."),
        ("of a later version", dict.fromkeys(range(20_000), 0), "7 0 and 19992 more"),
        ("study-run", {"jobs": [*range(20_000)]}, "(job 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 19990 more)"),
        ("study-run", {"jobs": "n1"}, "jobs n1"),
        ("loss-not-finite", {"epoch": 1, "ranks": [0]}, "became NaN or infinite in epoch 1 on rank 0"),
        ("loss-not-finite", {"epoch": 1, "ranks": [0, 1, 5]}, "infinite in epoch 1 on ranks 0-1,5"),
        ("not-stable", {"steps": 1}, "not yet stable after 1 warm-up step"),
        ("clock-was-set", {"steps": 1}, "during 1 attribution step: left out"),
        ("unequal-nodes", {"nodes": [{"hosts": ["n1"], "cores": 1, "cores_per_rank": [1]}]}, "n1: 1 core, 1"),
    ],
)
def test_one_and_several_have_words_of_their_own_and_long_lists_are_shortened(kind, values, expected):
    assert expected in words(Fact(kind, values=values))


def test_facts_are_read_as_they_were_written_and_others_are_left_out():
    fact = Fact("loss-not-finite", ("loss",), {"epoch": 1, "ranks": [1]})
    broken = [None, {"kind": 3}, {**fact.as_json(), "severity": "fatal"}, {**fact.as_json(), "values": []}]
    assert facts_of_env({"facts": [*broken, fact.as_json()]}) == [fact]
    assert [facts_of_env(env) for env in (None, [], {"facts": 3, "warnings": {"a": 1}})] == [[], [], []]
