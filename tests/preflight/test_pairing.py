"""Pairs of nodes: every two meet, in few rounds, and the rates of the pairs name what is slow."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from bench.preflight.verdict import (
    Pair,
    Rates,
    Step,
    Verdict,
    confirmed,
    halving_rounds,
    judge,
    most_rounds,
    pairs_again,
)

THRESHOLD = 0.9


def pairs_of(rounds: list[list[Step]]) -> list[Pair]:
    return [pair for steps in rounds for step in steps for pair in step]


def find(nodes: int, rate: dict[Pair, float], *, second: dict[Pair, float] | None = None) -> Verdict:
    """Return the verdict on a network in which every pair has a rate; ``second`` are the rates measured again."""
    pairs = pairs_of(halving_rounds(nodes, max_steps=600))
    first = {pair: rate[pair] for pair in pairs}
    again = pairs_again(judge(Rates(nodes, first, {}), threshold=THRESHOLD))
    rates = Rates(nodes, first, {pair: (second or rate)[pair] for step in again for pair in step})
    return confirmed(rates, judge(rates, threshold=THRESHOLD))


def network(nodes: int, *, slow: set[int] = frozenset(), link: Pair | None = None) -> dict[Pair, float]:  # type: ignore[assignment]
    """Return the rates of all pairs: 1, or 0.8 with a slow node or over a slow link."""
    rates = {}
    for pair in combinations(range(nodes), 2):
        rates[pair] = 0.8 if pair == link or not slow.isdisjoint(pair) else 1.0
    return rates


@pytest.mark.parametrize("nodes", [*range(2, 40), 63, 64, 65, 127, 150])
def test_every_two_nodes_meet_once(nodes):
    pairs = pairs_of(halving_rounds(nodes, max_steps=600))
    assert sorted(pairs) == list(combinations(range(nodes), 2))


@pytest.mark.parametrize("nodes", [*range(2, 40), 63, 64, 65, 511, 1023, 1024])
def test_one_more_round_makes_at_most_twice_the_logarithm(nodes):
    assert len(halving_rounds(nodes, max_steps=20)) + 1 <= most_rounds(nodes)


@pytest.mark.parametrize("nodes", [2, 3, 5, 8, 13, 100])
def test_a_node_is_in_one_pair_of_a_step_at_most(nodes):
    for step in (step for steps in halving_rounds(nodes, max_steps=600) for step in steps):
        both = [node for pair in step for node in pair]
        assert len(both) == len(set(both))


def test_with_too_many_nodes_the_long_rounds_are_shortened_and_everybody_has_many_partners():
    rounds = halving_rounds(1024, max_steps=100)
    assert sum(map(len, rounds)) <= 100
    partners = [0] * 1024
    for a, b in pairs_of(rounds):
        partners[a] += 1
        partners[b] += 1
    assert min(partners) >= 50


@pytest.mark.parametrize("nodes", [1, 2])
def test_one_or_two_nodes_cannot_be_compared(nodes):
    assert find(nodes, network(nodes, slow={0})) == Verdict([None] * nodes, None, [], [])


@pytest.mark.parametrize("nodes", [3, 4, 5, 7, 8, 12, 33])
def test_every_slow_node_is_found_and_no_other(nodes):
    for node in range(nodes):
        verdict = find(nodes, network(nodes, slow={node}))
        assert (verdict.slow_nodes, verdict.slow_links) == ([node], [])


@pytest.mark.parametrize("nodes", [3, 4, 5, 7, 8, 12])
def test_every_slow_link_is_found_and_no_node_is_blamed(nodes):
    for link in combinations(range(nodes), 2):
        verdict = find(nodes, network(nodes, link=link))
        assert (verdict.slow_nodes, verdict.slow_links) == ([], [link])


@pytest.mark.parametrize("nodes", [4, 5, 8, 13])
def test_two_slow_nodes_are_found_even_among_four(nodes):
    for slow in combinations(range(nodes), 2):
        assert find(nodes, network(nodes, slow=set(slow))).slow_nodes == list(slow)


def test_a_node_that_is_fast_when_measured_again_is_not_blamed():
    verdict = find(8, network(8, slow={3}), second=network(8))
    assert (verdict.slow_nodes, verdict.slow_links) == ([], [])


def test_a_link_that_is_fast_when_measured_again_is_not_blamed():
    assert find(8, network(8, link=(2, 5)), second=network(8)).slow_links == []


def test_what_could_not_be_measured_again_is_not_blamed():
    rates = Rates(4, network(4, slow={1}), {})
    assert judge(rates, threshold=THRESHOLD).slow_nodes == [1]
    assert confirmed(rates, judge(rates, threshold=THRESHOLD)).slow_nodes == []


def test_different_slow_nodes_are_measured_again_at_the_same_time():
    steps = pairs_again(judge(Rates(8, network(8, slow={0, 1}), {}), threshold=THRESHOLD))
    assert [len(step) for step in steps] == [2, 2, 2]


def test_noise_of_some_per_cent_blames_nobody():
    dice = random.Random(4)
    for _ in range(200):
        nodes = dice.randint(3, 40)
        rates = {pair: dice.gauss(1, 0.02) for pair in combinations(range(nodes), 2)}
        again = {pair: dice.gauss(1, 0.02) for pair in rates}
        verdict = find(nodes, rates, second=again)
        assert (verdict.slow_nodes, verdict.slow_links) == ([], [])
