"""Compute the limits with which `bench history` detects changes, and measure false alarms and power.

    python benchmarks/campaign_history.py [--write] [--series 1000000] [--seed 1]

The limits of t are the t quantiles of one probability p for each number of studies. p is chosen so that few
unchanged series ever exceed them in 60 looks: 3 % of single series, and of folders of 40 series 6 %. With
--write, the limits are written to analysis/history/thresholds.csv. False alarms and power are then measured
with other seeds by the detection itself. The results do not depend on the machine; docs/history.md has them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy import stats

# The benchmark runs in any folder.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from analysis.history.change import FOLDER, LEAST, LOOKS, TABLE, WINDOW, find_changes, limits

Floats = npt.NDArray[np.float64]
#: The shares of unchanged single series, and of unchanged folders, that may raise a false alarm in all looks.
ONE, OF_FOLDER = 0.03, 0.06
#: The studies of a series that has all looks.
STUDIES = LEAST + LOOKS - 1
#: Noise between runs and between studies.
NOISES = ((0.02, 0.0), (0.02, 0.01))
RUNS = 3


def smallest_p(series: Floats) -> Floats:
    """Return the smallest two-sided p of all looks and splits of each row, an unchanged series."""
    smallest = np.ones(len(series))
    for end in range(LEAST, series.shape[1] + 1):
        window = series[:, max(0, end - WINDOW) : end]
        studies = window.shape[1]
        distances = window - window.mean(axis=1, keepdims=True)
        first = np.arange(1, studies)
        between = np.cumsum(distances, axis=1)[:, :-1] ** 2 * studies / (first * (studies - first))
        most = between[:, 1:-1].max(axis=1)
        is_confirmed = most > np.maximum(between[:, 0], between[:, -1])
        t = np.sqrt((studies - 2) * most / ((distances**2).sum(axis=1) - most)) * is_confirmed
        np.minimum(smallest, 2 * stats.t.sf(t, studies - 2), out=smallest)
    return smallest


def table(series: int, *, seed: int) -> str:
    """Return thresholds.csv, from simulated unchanged series: their limits do not depend on the noise."""
    rng, portion = np.random.default_rng(seed), 2000
    found = [smallest_p(rng.standard_normal((portion, STUDIES))) for _ in range(series // portion)]
    shares = (ONE, 1 - (1 - OF_FOLDER) ** (1 / FOLDER))
    probabilities = [float(np.quantile(np.concatenate(found), share)) for share in shares]
    print(f"p of a limit: {probabilities[0]:.3g} for one series, {probabilities[1]:.3g} in a folder")
    lines = ["studies,one,folder,quantile"]
    for studies in range(4, WINDOW + 1):
        tails = [stats.t.isf(p / 2, studies - 2) if studies >= LEAST else np.inf for p in probabilities]
        lines.append(
            ",".join([str(studies), *(f"{t:.4f}" for t in (*tails, stats.t.ppf(0.975, studies - 2)))])
        )
    return "\n".join(lines) + "\n"


def simulated(
    rng: np.random.Generator, noise: tuple[float, float], *, studies: int, step: float = 0.0, at: int = 0
) -> list[float]:
    """Return a series of studies with three runs each, slower by ``step`` from study ``at`` (from 1) on."""
    of_runs, of_studies = noise
    logs = rng.normal(0.0, of_runs, (studies, RUNS)).mean(axis=1) + rng.normal(0.0, of_studies, studies)
    logs[at - 1 :] += np.log1p(-step) * (at > 0)
    return [float(value) for value in logs]


def false_alarms(number: int, *, seed: int) -> None:
    """Print the shares of unchanged series and folders that report a change."""
    rng = np.random.default_rng(seed)
    print("\nunchanged                                   reporting a change")
    for noise in NOISES:
        every = [simulated(rng, noise, studies=STUDIES + LOOKS) for _ in range(number)]
        for name, values in (
            ("one series, looks 1 to 60", slice(STUDIES)),
            ("one series, 120 looks", slice(None)),
        ):
            share = np.mean([bool(find_changes(own[values], searched=1)) for own in every])
            print(f"{name:28} {_noise(noise):14} {share:.2%}")
        alarms = [bool(find_changes(own[:STUDIES], searched=FOLDER)) for own in every]
        folders = np.array(alarms[: number // FOLDER * FOLDER]).reshape(-1, FOLDER).any(axis=1)
        print(f"{f'folder of {FOLDER}, looks 1 to 60':28} {_noise(noise):14} {folders.mean():.2%}")


def detected(
    step: float, noise: tuple[float, float], *, series: int, seeds: int, first: int, within: int
) -> tuple[float, float]:
    """Return the share of steps at study 20 to 49 reported in time, and of those at their place.

    ``within`` is the number of slower studies by which a step is reported in time.
    """
    in_time = exact = 0
    for seed in range(first, first + seeds):
        at = 20 + seed % 30
        logs = simulated(np.random.default_rng(seed), noise, studies=at - 1 + within, step=step, at=at)
        changes = find_changes(logs, searched=series)
        true = [first_after for first_after, reported_with in changes if reported_with >= at - 1]
        in_time += bool(true) and len(changes) == 1
        exact += at - 1 in true
    return in_time / seeds, exact / seeds


def power(seeds: int, *, first: int) -> None:
    """Print how many steps are reported within three and six studies, counting the first slower study."""
    print("\nstep  noise          series  within 3 studies (exact place)  within 6 studies")
    for step in (0.02, 0.03, 0.05, 0.1):
        for noise in NOISES:
            for series in (1, FOLDER):
                shares = [
                    detected(step, noise, series=series, seeds=seeds, first=first, within=studies)
                    for studies in (3, 6)
                ]
                (soon, exact), (later, _) = shares
                print(
                    f"{step:4.0%}  {_noise(noise):14} {series:5}  {soon:14.1%} ({exact:.1%})  {later:22.1%}"
                )


def _noise(noise: tuple[float, float]) -> str:
    return f"{noise[0]:.0%} and {noise[1]:.0%}"


def main() -> None:
    """Compute the limits and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--series", type=int, default=1_000_000, help="simulated series for the limits")
    parser.add_argument("--unchanged", type=int, default=20_000, help="simulated series for false alarms")
    parser.add_argument("--seeds", type=int, default=2000, help="simulated series for each power")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="write thresholds.csv")
    asked = parser.parse_args()
    text = table(asked.series, seed=asked.seed)
    if asked.write:
        TABLE.write_text(text, encoding="utf-8")
        limits.cache_clear()
    elif text != TABLE.read_text(encoding="utf-8"):
        print("thresholds.csv has other limits, from another number of series or another seed")
    false_alarms(asked.unchanged, seed=asked.seed + 1000)
    power(asked.seeds, first=asked.seed + 100_000)


if __name__ == "__main__":
    main()
