"""Verdicts on sizes: tables with the right answers, a second computation of P, and simulated studies."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis.checks.scaling_table import scaling_table
from analysis.data.columns import ScalingRow
from analysis.decide import Choice, decide, efficiency_text, probability_text, what_decides
from analysis.stats.scaling import GUIDE
from tests.analysis.decisions import calibration, simulate
from tests.analysis.studies import frames_of_points

TABLES = Path(__file__).parent / "tables"


def rows_of(points: pd.DataFrame) -> list[ScalingRow]:
    return scaling_table(frames_of_points(points))


def strong(rates: dict[int, list[float]]) -> pd.DataFrame:
    points = [(gpus, rate, 960) for gpus, own in rates.items() for rate in own]
    return pd.DataFrame(points, columns=["gpus", "throughput", "global_batch"])


def around(rate: float, spread: float = 0.005) -> list[float]:
    return [rate, rate * (1 + spread), rate * (1 - spread)]


def judged(rows: list[ScalingRow]) -> tuple[Choice, dict[int, str]]:
    """Return the choice, and the verdict on each size."""
    choice = decide(rows)
    return choice, {row.gpus: str(choice.verdicts[row.place].kind) for row in rows}


#: The recommended size, the verdicts on the sizes above the baseline, and the kinds of the findings.
ANSWERS = {
    "e11_bimodal": (None, ["cannot-tell"], []),
    "e12_nonmono": (16, ["efficient", "inefficient", "inefficient", "efficient"], []),
    "e13_slow_baseline": (4, ["efficient", "efficient", "inefficient"], ["slow-baseline"]),
    "e15_at_guide": (None, ["at-the-guide", "inefficient"], []),
    "e17_slower_but_used": (2, ["efficient", "inefficient"], ["slow-baseline", "slower-than-smaller"]),
    "e2_zero_variance": (4, ["efficient", "efficient", "at-the-guide"], []),
    "e2b_exact_guide": (8, ["efficient", "efficient", "efficient"], []),
    "e7_superlinear": (4, ["efficient", "efficient"], ["slow-baseline"]),
    "p2_heat_openmp_strong": (None, ["few-runs"] * 10, ["slower-than-smaller"]),
    "p5_minions_weak": (None, ["few-runs"] * 8, []),
    "p8_bitonic_weak": (None, ["few-runs"], []),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_each_table_has_the_right_answer(name: str) -> None:
    best, verdicts, findings = ANSWERS[name]
    choice, found = judged(rows_of(pd.read_csv(TABLES / f"{name}.csv")))
    assert [*found.values()] == ["baseline", *verdicts]
    assert (choice.best and choice.best.gpus) == best
    assert [one.kind for one in choice.findings] == findings


def second_p(rates: list[float], base: list[float], growth: float) -> float:
    """Return P(E >= guide) as the p-value of Welch's test of scipy."""
    shifted = np.log(base) + math.log(GUIDE * growth)
    return float(stats.ttest_ind(np.log(rates), shifted, equal_var=False, alternative="greater").pvalue)


def test_p_is_that_of_welchs_test() -> None:
    rng = np.random.default_rng(5)
    for _ in range(50):
        runs = rng.integers(3, 9, size=2)
        base = (100 * np.exp(rng.normal(0, 0.03, runs[0]))).tolist()
        rates = (100 * 4 * rng.uniform(0.7, 0.9) * np.exp(rng.normal(0, 0.03, runs[1]))).tolist()
        rows = rows_of(strong({1: base, 4: rates}))
        assert decide(rows).verdicts[1].p == pytest.approx(1 - second_p(rates, base, 4), abs=1e-9)


@pytest.mark.parametrize(
    ("efficiency", "spread", "verdict"),
    [
        (0.9, 0.005, "efficient"),
        (0.8001, 0.004, "at-the-guide"),
        (0.815, 0.009, "at-the-guide"),
        (0.86, 0.035, "probable"),
        (0.81, 0.05, "cannot-tell"),
        (0.74, 0.05, "cannot-tell"),
        (0.7, 0.005, "inefficient"),
    ],
)
def test_the_verdicts_have_an_order(efficiency: float, spread: float, verdict: str) -> None:
    rates = {1: around(100, spread), 8: around(800 * efficiency, spread)}
    choice, found = judged(rows_of(strong(rates)))
    assert found[8] == verdict
    assert (choice.best is not None) == (verdict == "efficient")


def test_an_efficient_size_that_is_not_shown_to_be_faster_is_not_recommended() -> None:
    noisy = [300.0, 398.0, 390.0, 396.0, 402.0, 399.0, 401.0, 397.0]
    rates = {4: around(400), 5: noisy}
    rows = rows_of(strong(rates))
    for row in rows:
        row.n_undisturbed = row.n
    assert judged(rows)[0].best is None


def test_a_size_with_few_undisturbed_runs_cannot_be_judged() -> None:
    for efficiency in (0.5, 0.95):
        rows = rows_of(strong({1: around(100), 2: around(200 * efficiency)}))
        rows[1].n_undisturbed = 2
        choice, found = judged(rows)
        assert (found[2], choice.best) == ("cannot-tell", None)
        assert (
            what_decides(choice.verdicts[1], rows[1]) == "an interval needs 1 more undisturbed run on 2 ranks"
        )


def test_the_number_of_runs_that_decide_is_a_range() -> None:
    rows = rows_of(strong({1: around(100, 0.02), 2: around(164, 0.02)}))
    verdict = decide(rows).verdicts[1]
    assert verdict.kind in ("probable", "cannot-tell")
    rows = rows_of(strong({1: around(100, 0.05), 2: around(144, 0.05)}))
    verdict = decide(rows).verdicts[1]
    fewest, most = verdict.more_runs or (0, 0)
    assert 1 <= fewest < most
    assert what_decides(verdict, rows[1]).startswith(f"about {fewest:.0f} to {most:.0f} more runs each")
    rows = rows_of(strong({1: around(100, 0.05), 2: around(161, 0.05)}))
    verdict = decide(rows).verdicts[1]
    assert "perhaps over 100" in what_decides(verdict, rows[1])
    verdict = replace(verdict, more_runs=(1, 1))
    assert what_decides(verdict, rows[1]) == "about 1 more run each on 2 ranks and on 1 rank"


def test_texts_of_efficiency_and_probability() -> None:
    def text_of(efficiency: float, low: float, high: float) -> str:
        return efficiency_text(
            SimpleNamespace(efficiency=efficiency, efficiency_low=low, efficiency_high=high)
        )

    assert text_of(0.94, 0.9, 0.98) == "0.94 [0.90, 0.98]"
    assert text_of(0.81, 0.799, 0.82) == "0.810 [0.799, 0.820]"
    assert text_of(0.5, math.nan, math.nan) == "0.50"
    texts = {0.999: "P > 0.99", 0.001: "P < 0.01", 0.934: "P = 0.93", math.nan: ""}
    assert {p: probability_text(p) for p in texts} == texts


def test_recommendations_of_simulated_studies_are_right() -> None:
    """``make campaign`` repeats this with 2,000 studies, and the calibration with 3,000 sizes per tenth."""
    found = simulate(120, seed=3)
    assert found.wrong.total() <= 0.03 * found.recommended.total()
    assert found.right.total() >= 0.9 * found.clear.total() > 0


def test_the_probability_is_calibrated() -> None:
    for number, p, share in calibration(100, seed=4):
        assert number == 100
        assert share == pytest.approx(p, abs=0.05 + 3 * math.sqrt(0.25 / number))


def test_a_stated_spread_gives_single_runs_a_probability_but_no_recommendation() -> None:
    rows = rows_of(strong({1: [100.0], 2: [190.0, 188.0], 4: [250.0]}))
    spread = math.log1p(0.03)
    choice = decide(rows, spread=spread)
    assert choice.best is None
    found = {row.gpus: choice.verdicts[row.place] for row in rows if row.gpus > 1}
    for gpus, (rates, n) in {2: ((190.0, 188.0), 2), 4: ((250.0,), 1)}.items():
        centre = np.log(rates).mean() - math.log(100 * gpus)
        error = spread * math.sqrt(1 / n + 1)
        own = found[gpus].judged
        assert str(found[gpus].kind) == "few-runs"
        assert own
        assert own.spread == spread
        assert own.p == pytest.approx(stats.norm.cdf((centre - math.log(GUIDE)) / error))
        ends = [math.exp(centre + sign * stats.norm.ppf(0.975) * error) for sign in (-1, 1)]
        # The efficiency is that of the harmonic mean, so the interval moves with it.
        moved = own.efficiency / math.exp(centre)
        assert [own.efficiency_low, own.efficiency_high] == pytest.approx(
            [end * moved for end in ends], rel=1e-3
        )
    assert all(math.isnan(decide(rows).verdicts[row.place].p) for row in rows)


def test_a_stated_spread_changes_nothing_where_the_noise_was_measured() -> None:
    rows = rows_of(strong({1: around(100), 2: around(180)}))
    assert decide(rows, spread=0.5) == decide(rows)
