"""Changes in simulated series: false alarms, power, and a second implementation."""

import math

import numpy as np
import pytest
from scipy import stats

from analysis.history.change import (
    LEAST,
    LOOKS,
    WINDOW,
    deviation_of_last,
    find_changes,
    largest_t,
    limits,
    ratio_of,
)

NOISES = [(0.02, 0.0), (0.02, 0.01)]


def simulated(seed: int, noise: tuple[float, float], *, studies: int = LEAST + LOOKS - 1) -> np.ndarray:
    """Return the logarithmic means of studies with three runs each, with noise between runs and studies."""
    rng = np.random.default_rng(seed)
    return rng.normal(0, noise[0], (studies, 3)).mean(axis=1) + rng.normal(0, noise[1], studies)


@pytest.mark.parametrize(("noise", "least"), [(NOISES[0], 0.85), (NOISES[1], 0.70)])
def test_a_step_of_five_percent_is_reported_within_three_studies(noise, least):
    reported = 0
    for seed in range(200):
        at = 20 + seed % 30  # counted from 1
        logs = simulated(seed, noise, studies=at + 2)
        logs[at - 1 :] += math.log(0.95)
        changes = find_changes([*logs], searched=1)
        reported += len(changes) == 1 and changes[0][1] >= at - 1
    assert reported / 200 >= least


@pytest.mark.parametrize("noise", NOISES)
def test_few_unchanged_series_report_a_change_in_sixty_looks(noise):
    """``benchmarks/campaign_history.py`` measures this, and folders of 40 series, with many more."""
    alarms = [bool(find_changes([*simulated(seed, noise)], searched=1)) for seed in range(10_000, 10_300)]
    assert np.mean(alarms) <= 0.05


def test_the_largest_t_is_that_of_all_splits():
    for seed in range(20):
        logs = simulated(seed, NOISES[1], studies=LEAST + seed)
        splits = {k: abs(stats.ttest_ind(logs[:k], logs[k:]).statistic) for k in range(2, len(logs) - 1)}
        t, split = largest_t([*logs])
        if t:
            assert split == max(splits, key=splits.__getitem__)
            assert t == pytest.approx(splits[split], rel=1e-9)


def test_one_low_study_is_not_confirmed_and_two_are_a_change():
    logs = [*simulated(3, (0.01, 0.0), studies=20), math.log(0.9)]
    assert find_changes(logs, searched=1) == []
    assert deviation_of_last(logs, searched=1) == pytest.approx(0.9, abs=0.01)
    assert find_changes([*logs, math.log(0.9)], searched=1) == [(20, 21)]


def test_equal_values_are_no_change_and_a_step_between_equal_values_is_one():
    assert find_changes([5.0] * 30, searched=1) == []
    assert find_changes([5.0] * 10 + [4.9] * 3, searched=1) == [(10, 11)]


def test_old_studies_beyond_the_window_do_not_count():
    logs = [0.0, 0.1] * 30 + [0.3, 0.4] * (WINDOW // 2 + 5)
    assert find_changes(logs, searched=1)[0][0] == 60
    assert len(find_changes(logs, searched=1)) == 1


def test_the_size_of_a_change_has_the_interval_of_student():
    before, after = [0.0, 0.02, 0.01, -0.01], [-0.1, -0.12, -0.11]
    test = stats.ttest_ind(after, before)
    interval = test.confidence_interval(0.95)
    found = ratio_of(before, after)
    assert found == pytest.approx([math.exp(x) for x in (-0.115, interval.low, interval.high)], rel=1e-4)


def test_the_limits_are_quantiles_of_one_probability():
    own = limits()
    for place in (0, 1):
        p = [2 * stats.t.sf(own[m][place], m - 2) for m in range(LEAST, WINDOW + 1)]
        assert p == pytest.approx([p[0]] * len(p), rel=1e-3)
    assert all(own[m].folder > own[m].one > own[m].quantile for m in range(LEAST, WINDOW + 1))
