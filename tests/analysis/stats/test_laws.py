"""Scaling laws identify known curves, refuse short series and mark predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from scipy import optimize

from analysis.report.page import choice_facts
from analysis.stats.law_fit import LawFit, LawRun, Refusal, fit_law, fit_laws
from analysis.stats.law_forms import Fabric, laws_of
from bench.errors import BenchError
from tests.common import raised

SIZES = (1, 2, 4, 8, 16)


def runs_of(
    times: Sequence[float], *, sizes: Sequence[int] = SIZES, n: int = 3, noise: float = 0.0, seed: int = 1
) -> list[LawRun]:
    """Return n runs of each size, with multiplicative noise around the given times."""
    factors = np.exp(np.random.default_rng(seed).normal(0, noise, n * len(sizes)))
    return [LawRun(*own) for own in zip(np.repeat(sizes, n), np.repeat(times, n) * factors, strict=True)]


def fit(runs: list[LawRun], mode: str, **options: Any) -> LawFit:
    found = fit_laws(runs, mode=mode, **options)
    assert isinstance(found, LawFit), found
    return found


def refusal(runs: list[LawRun], mode: str) -> str:
    found = fit_laws(runs, mode=mode)
    assert isinstance(found, Refusal)
    return str(found)


def parameters(found: LawFit) -> dict[str, float]:
    chosen = found.chosen
    return {p.name: value for p, value in zip(chosen.law.parameters, chosen.theta, strict=True)}


@pytest.mark.parametrize(
    ("mode", "law", "curve", "expected"),
    [
        ("strong", "amdahl", lambda n: 0.8 * (0.06 + 0.94 / n), {"T₁": 0.8, "s": 0.06}),
        ("strong", "usl", lambda n: (1 + 0.04 * (n - 1) + 0.003 * n * (n - 1)) / n, {"σ": 0.04, "κ": 0.003}),
        ("strong", "power", lambda n: 0.5 * n**-0.8, {"T₁": 0.5, "p": 0.8}),
        ("weak", "usl", lambda n: 1 + 0.02 * (n - 1) + 0.004 * n * (n - 1), {"σ": 0.02, "κ": 0.004}),
        (
            *("weak", "ring", lambda n: 0.1 + 0.01 * (n - 1) + 0.05 * (n - 1) / n),
            {"c": 0.1, "a": 0.01, "b": 0.05},
        ),
        ("weak", "power", lambda n: 0.2 * n**0.3, {"T₁": 0.2, "p": 0.3}),
    ],
)
def test_a_known_law_is_chosen_with_its_parameters(
    mode: str, law: str, curve: Any, expected: dict[str, float]
) -> None:
    found = fit(runs_of([curve(n) for n in SIZES], n=4, noise=0.001), mode)
    assert found.chosen.law.name == law
    values = parameters(found)
    for name, value in expected.items():
        assert values[name] == pytest.approx(value, rel=0.1)
    (predicted,) = found.predict([32])
    assert predicted.step_time_sec == pytest.approx(curve(32), rel=0.02)
    assert predicted.low < curve(32) < predicted.high


def test_a_fit_is_the_least_squares_of_the_logarithms_over_runs() -> None:
    runs = runs_of([1, 0.53, 0.3, 0.18, 0.12], noise=0.05)
    chosen = next(f for f in fit(runs, "strong").laws if f.law.name == "amdahl")

    ranks, times = np.array([run[:2] for run in runs]).T

    def squares(theta: Any) -> float:
        curve = theta[0] * (theta[1] + (1 - theta[1]) / ranks)
        return float(((np.log(times) - np.log(curve)) ** 2).sum())

    best = optimize.minimize(
        squares, [1.0, 0.1], method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12}
    )
    assert chosen.theta == pytest.approx(best.x, rel=1e-4)
    n, k = len(runs), 3
    expected = n * math.log(best.fun / n) + 2 * k + 2 * k * (k + 1) / (n - k - 1)
    assert chosen.aicc == pytest.approx(expected, rel=1e-6)


def test_the_interval_of_a_parameter_covers_it() -> None:
    hits = 0
    for seed in range(100):
        runs = runs_of([0.05 + 0.95 / n for n in SIZES], noise=0.02, seed=seed)
        amdahl = fit_law(laws_of("strong")[0], *np.array([run[:2] for run in runs]).T)
        assert amdahl.law.name == "amdahl"
        hits += bool(amdahl.low[1] <= 0.05 <= amdahl.high[1])
    assert hits >= 88


def test_fewer_than_five_sizes_are_refused() -> None:
    told = refusal(runs_of([1, 0.5, 0.3, 0.2], sizes=(1, 2, 4, 8), n=10), "strong")
    assert told == (
        "4 sizes measured, and a law needs 5 or more: with fewer sizes, many laws fit equally well; measure 1 more size"
    )


def test_a_series_of_neither_regime_is_refused() -> None:
    told = refusal(runs_of([1, 1, 1, 1, 1]), "")
    assert (
        told == "neither the global batch nor the batch per rank is constant, but all laws assume that one is"
    )


def test_a_superlinear_speedup_refuses_all_laws_but_the_power_law_with_their_bounds() -> None:
    found = fit(runs_of([1.0, 0.45, 0.2, 0.09, 0.04], noise=0.01), "strong")
    assert {fitted.law.name: fitted.refused for fitted in found.laws} == {
        "power": "",
        "amdahl": "s is at its bound of 0",
        "usl": "σ is at its bound of 0; κ is at its bound of 0",
    }


def test_a_series_without_a_law_within_its_bounds_is_refused() -> None:
    assert refusal(runs_of([1.0, 0.2, 0.05, 0.01, 0.002], noise=0.01), "strong") == (
        "no law fits within its bounds: Power law (p is at its bound of 2), Amdahl (s is at its bound of 0) and "
        "USL (and ring all-reduce) (σ is at its bound of 0; κ is at its bound of 0)"
    )


def test_a_law_with_too_many_parameters_is_refused_with_the_count() -> None:
    shapes = [(1, 2), (1, 4), (2, 4), (4, 4), (8, 4)]
    found = fit(layout(shapes, [1, 0.6, 0.4, 0.3, 0.25]), "strong")
    reasons = {fitted.law.name: fitted.refused for fitted in found.laws}
    assert reasons["usl"] == "5 sizes leave 1 residual degree of freedom for 4 parameters"


def test_without_degrees_of_freedom_for_aicc_the_left_out_size_decides() -> None:
    found = fit(runs_of([1, 0.55, 0.32, 0.22, 0.2], n=1), "strong")
    assert not found.by_aicc
    errors = {f.law.name: abs(f.leave_last_error) for f in found.laws if not f.refused}
    assert found.chosen.law.name == min(errors, key=lambda name: errors[name])
    assert "5 runs are too few for AICc" in choice_facts(found)["chosen"]


def test_sizes_beyond_twice_the_largest_are_predicted_on_request_only() -> None:
    found = fit(runs_of([1, 0.53, 0.3, 0.18, 0.12], noise=0.02), "strong")
    near = found.predict([8, 16, 24, 32])
    assert not any(one.beyond for one in near)
    assert raised(BenchError, found.predict, [32, 64]) == (
        "64 ranks are more than twice the largest measured size (16); measure up to 32 ranks, or extrapolate with --beyond"
    )
    (far,) = found.predict([64], beyond=True)
    assert far.beyond
    assert far.high / far.low > near[-1].high / near[-1].low


def test_a_higher_level_has_a_wider_interval() -> None:
    found = fit(runs_of([1, 0.53, 0.3, 0.18, 0.12], noise=0.02), "strong")
    narrow, wide = (found.predict([32], level)[0] for level in (0.5, 0.99))
    assert wide.low < narrow.low < narrow.step_time_sec < narrow.high < wide.high


def layout(shapes: Sequence[tuple[int, int]], times: Sequence[float]) -> list[LawRun]:
    runs = runs_of(times, sizes=[n * k for n, k in shapes], noise=0.005)
    places = [(n, str(k)) for n, k in shapes for _ in range(3)]
    return [LawRun(*run[:2], *place) for run, place in zip(runs, places, strict=True)]


def test_leaving_the_node_is_a_term_of_the_law() -> None:
    shapes = [(1, 1), (1, 2), (1, 4), (2, 4), (4, 4), (8, 4)]
    times = [0.1 + 1 / (n * k) + (0.05 if n > 1 else 0) for n, k in shapes]
    found = fit(layout(shapes, times), "strong")
    assert found.chosen.law.formula.endswith("+ d beyond one node")
    assert found.chosen.law.title.endswith(" + leaving the node")
    amdahl = next(f for f in found.laws if f.law.name == "amdahl")
    assert amdahl.theta[-1] == pytest.approx(0.05, rel=0.3)
    assert found.path == "each size in the layout with the fewest nodes"


def test_a_node_boundary_with_too_few_sizes_beyond_it_is_refused() -> None:
    shapes = [(1, 1), (1, 2), (1, 4), (2, 4), (4, 4)]
    assert refusal(layout(shapes, [1, 0.5, 0.3, 0.2, 0.1]), "strong") == (
        "there are sizes on one node, but only 2 over several nodes: the cost of communication between nodes "
        "cannot be separated from the cost of a larger size; measure at least 3 sizes over several nodes, "
        "or all sizes on one node"
    )


def test_a_single_rank_does_not_need_the_node_term() -> None:
    shapes = [(1, 1), (2, 1), (4, 1), (8, 1), (16, 1)]
    found = fit(layout(shapes, [1, 0.53, 0.3, 0.18, 0.12]), "strong")
    assert "node" not in found.chosen.law.formula
    assert found.path == "all sizes"


def test_of_several_layouts_those_with_fixed_ranks_per_node_are_fitted() -> None:
    shapes = [(n, k) for k in (1, 2) for n in (1, 2, 4, 8, 16)]
    times = [1 / (n * k) + 0.02 * (n > 1) for n, k in shapes]
    found = fit(layout(shapes, times), "strong")
    assert found.path == "gpus_per_node = 1"
    assert found.runs == 15


def test_the_probed_all_reduce_gives_the_communication_model_and_its_overlap() -> None:
    fabric = Fabric(2e-4, 1e-9, 100e6, 10e6, 10)

    def truth(n: float, overlap: float) -> float:
        compute, ranks = 0.02 + 1.0 / n, np.array([float(n)])
        last, every = fabric.last_bucket_s(ranks)[0], fabric.all_reduce_s(ranks)[0]
        return float(compute + max(last, every - overlap * compute))

    times = [truth(n, 0.3) for n in SIZES]
    found = fit(runs_of(times, n=4, noise=0.003), "strong", probes=fabric)
    assert found.chosen.law.name == "probed"
    assert parameters(found)["ω"] == pytest.approx(0.3, abs=0.05)
    (predicted,) = found.predict([32])
    assert predicted.step_time_sec == pytest.approx(truth(32, 0.3), rel=0.05)
    assert predicted.low < truth(32, 0.3) < predicted.high


def test_an_overlap_that_no_size_shows_refuses_the_communication_model() -> None:
    fabric = Fabric(1e-6, 1e-10, 100e6, 10e6, 10)
    ranks = np.array(SIZES, dtype=float)
    times = 0.1 + 1.0 / ranks + fabric.last_bucket_s(ranks)
    found = fit(runs_of(times.tolist(), n=4, noise=0.003), "strong", probes=fabric)
    (probed,) = (fitted for fitted in found.laws if fitted.law.name == "probed")
    assert probed.refused == "no measured size depends on ω"


@pytest.mark.parametrize("mode", ["strong", "weak"])
def test_every_law_starts_within_its_bounds_where_its_curve_is_positive(mode: str) -> None:
    sizes = np.array([1.0, 2, 4, 8, 16, 32, 64])
    for law in laws_of(mode, fabric=Fabric(1e-4, 1e-9, 1e6, 1e5), largest_within=4):
        for start in product(*(parameter.starts for parameter in law.parameters)):
            assert (law.curve(np.array(start), sizes) > 0).all(), law.name
            assert all(p.low < value < p.high for p, value in zip(law.parameters, start, strict=True))


def test_invalid_times_are_ignored() -> None:
    runs = runs_of([1, 0.53, 0.3, 0.18, 0.12], noise=0.02)
    spoilt = [*runs, LawRun(1, math.nan), LawRun(2, 0), LawRun(4, -1)]
    assert fit(spoilt, "strong").runs == len(runs)


def test_exact_times_have_a_finite_criterion_and_a_narrow_interval() -> None:
    found = fit(runs_of([0.05 + 0.95 / n for n in SIZES], n=2), "strong")
    assert found.chosen.law.name == "amdahl"
    assert math.isfinite(found.chosen.aicc)
    (predicted,) = found.predict([32])
    assert predicted.step_time_sec == pytest.approx(0.05 + 0.95 / 32, rel=1e-5)
