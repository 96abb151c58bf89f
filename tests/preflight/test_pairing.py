"""Pairs of nodes: a ring, one retest of the suspects, and the rates of the pairs name what is slow."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import combinations

import pytest

from bench.preflight.verdict import Pair, Rates, Step, Verdict, confirmed, judge, pairs_again, ring_steps

THRESHOLD = 0.9


def pairs_of(steps: list[Step]) -> list[Pair]:
    return [pair for step in steps for pair in step]


def find(nodes: int, rate: dict[Pair, float], *, second: dict[Pair, float] | None = None) -> Verdict:
    """Return the verdict on a network in which every pair has a rate; ``second`` are the rates measured again."""
    first = {pair: rate[pair] for pair in pairs_of(ring_steps(nodes))}
    alone = Rates(nodes, first, {})
    again = pairs_again(alone, judge(alone, threshold=THRESHOLD))
    rates = Rates(nodes, first, {pair: (second or rate)[pair] for pair in pairs_of(again)})
    return confirmed(rates, judge(rates, threshold=THRESHOLD))


def network(nodes: int, *, slow: Iterable[int] = (), links: Iterable[Pair] = ()) -> dict[Pair, float]:
    """Return the rates of all pairs: 1, or 0.8 with a slow node or over a slow link."""
    rates = {}
    for pair in combinations(range(nodes), 2):
        rates[pair] = 0.8 if pair in links or not {*slow}.isdisjoint(pair) else 1.0
    return rates


@pytest.mark.parametrize("nodes", [*range(3, 40), 1024])
def test_every_node_meets_the_next_and_the_previous_one_in_two_or_three_steps(nodes):
    steps = ring_steps(nodes)
    assert sorted(pairs_of(steps)) == sorted(tuple(sorted((i, (i + 1) % nodes))) for i in range(nodes))
    assert len(steps) == 2 + nodes % 2
    for step in steps:
        both = [node for pair in step for node in pair]
        assert len(both) == len(set(both))


def test_one_node_has_no_partner_and_two_have_one_link():
    assert (ring_steps(1), ring_steps(2)) == ([], [[(0, 1)]])


@pytest.mark.parametrize("nodes", [1, 2])
def test_one_or_two_nodes_cannot_be_compared(nodes):
    assert find(nodes, network(nodes, slow={0})) == Verdict([None] * nodes, None, [], [])


@pytest.mark.parametrize("nodes", [3, 4, 5, 7, 8, 12, 33])
def test_every_slow_node_is_found_and_no_other(nodes):
    for node in range(nodes):
        verdict = find(nodes, network(nodes, slow={node}))
        assert (verdict.slow_nodes, verdict.slow_links) == ([node], [])


@pytest.mark.parametrize("nodes", [3, 4, 5, 7, 8, 12])
def test_every_slow_link_of_the_ring_is_found_and_no_node_is_blamed(nodes):
    for link in pairs_of(ring_steps(nodes)):
        verdict = find(nodes, network(nodes, links=[link]))
        assert (verdict.slow_nodes, verdict.slow_links) == ([], [link])


def test_a_node_between_two_slow_links_is_not_blamed():
    verdict = find(8, network(8, links=[(2, 3), (3, 4)]))
    assert (verdict.slow_nodes, sorted(verdict.slow_links)) == ([], [(2, 3), (3, 4)])


@pytest.mark.parametrize("nodes", [6, 7, 8, 13])
def test_two_slow_nodes_are_found_and_a_node_between_them_is_not_blamed(nodes):
    for slow in combinations(range(nodes), 2):
        verdict = find(nodes, network(nodes, slow=slow))
        assert (verdict.slow_nodes, verdict.slow_links) == (list(slow), [])


def test_a_node_that_is_fast_when_measured_again_is_not_blamed():
    verdict = find(8, network(8, slow={3}), second=network(8))
    assert (verdict.slow_nodes, verdict.slow_links) == ([], [])


def test_a_link_that_is_fast_when_measured_again_is_not_blamed():
    assert find(8, network(8, links=[(2, 3)]), second=network(8)).slow_links == []


def test_what_could_not_be_measured_again_is_not_blamed():
    rates = Rates(4, network(4, slow={1}), {})
    assert judge(rates, threshold=THRESHOLD).slow_nodes == [1]
    assert confirmed(rates, judge(rates, threshold=THRESHOLD)).slow_nodes == []


def test_slow_nodes_are_measured_again_with_fast_nodes_that_are_not_their_neighbours():
    rate = network(8, slow={0, 3})
    rates = Rates(8, {pair: rate[pair] for pair in pairs_of(ring_steps(8))}, {})
    again = pairs_of(pairs_again(rates, judge(rates, threshold=THRESHOLD)))
    assert sorted(set(again) & set(rates.first)) == [(0, 1), (0, 7), (2, 3), (3, 4)], "their own links"
    for pair in set(again) - set(rates.first):
        assert len({0, 3} & set(pair)) == 1


def test_failed_exchanges_are_tried_again_and_a_node_without_success_gets_another_partner():
    ring = pairs_of(ring_steps(8))
    first = {pair: 1.0 for pair in ring if 3 not in pair and pair != (5, 6)}
    rates = Rates(8, first, {}, [(2, 3), (3, 4), (5, 6)])
    again = set(pairs_of(pairs_again(rates, judge(rates, threshold=THRESHOLD))))
    assert {(2, 3), (3, 4), (5, 6)} < again
    [other] = again - set(ring)
    assert 3 in other
    assert judge(rates, threshold=THRESHOLD).isolated == [3]


def test_without_any_exchange_nothing_is_tried_again():
    rates = Rates(3, {}, {}, [(0, 1), (1, 2), (0, 2)])
    assert pairs_again(rates, judge(rates, threshold=THRESHOLD)) == []


def test_noise_of_some_per_cent_blames_nobody():
    dice = random.Random(4)
    for _ in range(200):
        nodes = dice.randint(3, 40)
        rates = {pair: dice.gauss(1, 0.02) for pair in combinations(range(nodes), 2)}
        again = {pair: dice.gauss(1, 0.02) for pair in rates}
        verdict = find(nodes, rates, second=again)
        assert (verdict.slow_nodes, verdict.slow_links) == ([], [])
