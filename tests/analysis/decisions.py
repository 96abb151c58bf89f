"""Simulated studies of known scaling, and how often their recommended sizes are right.

The mixture: each study has six sizes (1 to 32 ranks), 3 to 8 repeats, a curve of :data:`CURVES`, and a noise of
1 to 5 % between runs. One study in five has heavy tails (Student's t with three degrees of freedom), and one in
five has disturbed runs: each run with a probability of 10 %, 5 to 30 % slower, and left out.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from analysis.checks.scaling_table import scaling_table
from analysis.data.columns import by_series
from analysis.decide import SUPERLINEAR, decide, judge
from analysis.stats.scaling import GUIDE
from tests.analysis.studies import frames_of_points

SIZES = (1, 2, 4, 8, 16, 32)
PER_NODE = 4


def _amdahl(rng: np.random.Generator) -> list[float]:
    serial = rng.uniform(0.002, 0.05)
    return [1 / (1 + serial * (n - 1)) for n in SIZES]


def _ring(rng: np.random.Generator) -> list[float]:
    within, between = rng.uniform(0.0, 0.08), rng.uniform(0.05, 0.5)
    return [1 / (1 + (within if n <= PER_NODE else between) * (n - 1) / n * (n > 1)) for n in SIZES]


def _dip(rng: np.random.Generator) -> list[float]:
    curve = [1 - rng.uniform(0.0, 0.03) * place for place in range(len(SIZES))]
    curve[int(rng.integers(1, 4))] = rng.uniform(0.5, 0.75)
    return curve


def _slow_baseline(rng: np.random.Generator) -> list[float]:
    slow = rng.uniform(0.5, 0.9)
    return [1.0, *(one / slow for one in _amdahl(rng)[1:])]


def _superlinear(rng: np.random.Generator) -> list[float]:
    gain, serial = rng.uniform(1.1, 1.4), rng.uniform(0.0, 0.02)
    return [(gain if n >= 4 else 1.0) / (1 + serial * (n - 1)) for n in SIZES]


def _saturated(rng: np.random.Generator) -> list[float]:
    most = rng.uniform(3, 20)
    return [min(n, most) / n * rng.uniform(0.97, 1.0) ** place for place, n in enumerate(SIZES)]


#: True efficiencies of the sizes, relative to the first one, by the name of the curve.
CURVES = {
    "flat": lambda rng: [1.0] * len(SIZES),
    "amdahl": _amdahl,
    "ring with a node boundary": _ring,
    "dip": _dip,
    "slow baseline": _slow_baseline,
    "superlinear": _superlinear,
    "saturated": _saturated,
}


@dataclass(frozen=True)
class Truth:
    """A simulated study: its curve, noise, repeats, and whether it has heavy tails and disturbed runs."""

    curve: str
    efficiencies: list[float]
    noise: float
    repeats: int
    has_tails: bool
    is_disturbed: bool

    @property
    def judged(self) -> list[float]:
        """The true efficiencies, relative to the best smaller size if the baseline is slow."""
        own = self.efficiencies
        if max(own) <= SUPERLINEAR:
            return own
        return [1.0, *(own[place] / max(own[:place]) for place in range(1, len(own)))]

    def is_fastest(self, place: int) -> bool:
        """Return whether the size at ``place`` is truly faster than all smaller ones."""
        rates = [n * one for n, one in zip(SIZES, self.efficiencies, strict=True)]
        return all(rates[place] > rate for rate in rates[:place])

    @property
    def best(self) -> int | None:
        """The place of the size that a perfect measurement recommends."""
        good = [
            place for place in range(1, len(SIZES)) if self.judged[place] >= GUIDE and self.is_fastest(place)
        ]
        return good[-1] if good else None

    @property
    def is_clear(self) -> bool:
        """Whether every size is more than three standard errors from the guide."""
        error = self.noise * math.sqrt(2 / self.repeats)
        return all(abs(math.log(one / GUIDE)) > 3 * error for one in self.judged[1:])


def draw(rng: np.random.Generator) -> tuple[Truth, pd.DataFrame]:
    """Return a simulated study and the points of its runs that count."""
    curve = str(rng.choice([*CURVES]))
    truth = Truth(
        curve,
        CURVES[curve](rng),
        noise=rng.uniform(0.01, 0.05),
        repeats=int(rng.integers(3, 9)),
        has_tails=rng.random() < 0.2,
        is_disturbed=rng.random() < 0.2,
    )
    gpus, rates = [], []
    for n, efficiency in zip(SIZES, truth.efficiencies, strict=True):
        for _ in range(truth.repeats):
            noise = rng.standard_t(3) / math.sqrt(3) if truth.has_tails else rng.normal()
            if not (truth.is_disturbed and rng.random() < 0.1):
                gpus.append(n)
                rates.append(100 * n * efficiency * math.exp(truth.noise * noise))
    return truth, pd.DataFrame({"gpus": gpus, "throughput": rates})


@dataclass
class Outcomes:
    """Numbers of studies by their curve: all, with a recommendation, wrong, clear, and clear and right."""

    studies: Counter[str] = field(default_factory=Counter)
    recommended: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    clear: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)


def simulate(studies: int, *, seed: int) -> Outcomes:
    """Let ``decide`` recommend a size in each of some simulated studies, and compare it with the truth."""
    rng = np.random.default_rng(seed)
    drawn = {f"s{number:05d}": draw(rng) for number in range(studies)}
    points = pd.concat([own.assign(series=name) for name, (_, own) in drawn.items()])
    rows = scaling_table(frames_of_points(points.assign(global_batch=960, mode="strong")))
    found = Outcomes()
    for name, own in by_series(rows).items():
        truth, best = drawn[name.partition(",")[0]][0], decide(own).best
        found.studies[truth.curve] += 1
        place = None if best is None else SIZES.index(best.gpus)
        if place is not None:
            found.recommended[truth.curve] += 1
            found.wrong[truth.curve] += truth.judged[place] < GUIDE - 0.01 or not truth.is_fastest(place)
        if truth.is_clear and not truth.is_disturbed:
            found.clear[truth.curve] += 1
            found.right[truth.curve] += _is_right(place, truth.best)
    return found


def _is_right(place: int | None, best: int | None) -> bool:
    """Return whether a size is the best one, or one step smaller."""
    if best is None or place is None:
        return best == place or (best == 1 and place is None)
    return 0 <= best - place <= 1


def calibration(per_tenth: int, *, seed: int) -> list[tuple[int, float, float]]:
    """Return for each tenth of P its number of sizes, the mean P, and the share that is truly efficient.

    True efficiencies are drawn around the guide, equally likely on a logarithmic scale.
    """
    rng = np.random.default_rng(seed)
    tenths: list[list[tuple[float, bool]]] = [[] for _ in range(10)]
    while min(map(len, tenths)) < per_tenth:
        noise, repeats = rng.uniform(0.01, 0.05), int(rng.integers(3, 9))
        error = noise * math.sqrt(2 / repeats)
        efficiency = GUIDE * math.exp(rng.uniform(-6, 6) * error)
        base, size = (_row(n, rng.normal(0, noise, repeats)) for n in (1, 8))
        size.log_mean += math.log(efficiency * 8)
        size.rate *= efficiency * 8
        p = judge(size, base).p
        own = tenths[min(int(10 * p), 9)]
        if len(own) < per_tenth:
            own.append((p, efficiency >= GUIDE))
    return [
        (len(own), float(np.mean([p for p, _ in own])), float(np.mean([is_good for _, is_good in own])))
        for own in tenths
    ]


def _row(gpus: int, logs: Any) -> Any:
    rate = len(logs) / float(np.exp(-logs).sum())
    known = {"gpus": gpus, "n": len(logs), "mode": "strong", "rate": rate}
    return SimpleNamespace(**known, log_mean=float(logs.mean()), log_variance=float(logs.var(ddof=1)))
