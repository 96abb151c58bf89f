"""Fit the scaling laws to the runs of a series, choose one, and predict larger sizes.

A law is fitted to a path: a selection of the runs with only one layout (nodes x ranks per node) for each
number of ranks. The fit is by least squares on the logarithm of the time per step.

:func:`fit_laws` fits every law of :mod:`analysis.stats.law_forms` that applies. It compares the laws by AICc
over the runs or, if AICc is not known for all laws, by their leave-last-out error: the error at the largest
size if this size is left out of the fit. For most short series the runs do not identify a law; then
:func:`fit_laws` returns the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from scipy import optimize, special

from analysis.stats.columns import ScalingRow, by_series, first_of_cells, grouped
from analysis.stats.estimate import Floats
from analysis.stats.law_forms import Fabric, Law, laws_of
from analysis.stats.measured import Frames
from analysis.text import one_line
from bench.errors import BenchError
from bench.units import count, listed

#: Minimum number of sizes for a law.
MIN_SIZES = 5
#: Minimum number of sizes over several nodes if other sizes are within one node.
_MIN_ACROSS = 3
#: Name of the path that contains all sizes.
ALL_SIZES = "all sizes"
#: Smaller relative residuals are replaced by this value, so that AICc is finite on data without noise.
_FLOOR = 1e-7
#: Significance level of the F test that compares a law's misfit with the noise of the runs.
_MISFIT_LEVEL = 0.05
#: Minimum residual degrees of freedom: sizes minus parameters. Repeats of a size do not determine a curve.
MIN_FREEDOM = 2
#: Largest half width of an interval on the logarithm.
_MAX_HALF_WIDTH = 20.0
#: Probability that a prediction interval contains a further run.
LEVEL = 0.90
#: Predictions beyond this multiple of the largest measured size must be requested.
REACH = 2.0
#: Laws whose AICc exceeds the lowest one by at most this are plausible: predictions span their intervals
#: (K. P. Burnham and D. R. Anderson, Model Selection and Multimodel Inference, 2002: up to 7).
PLAUSIBLE_AICC = 6.0
#: Without AICc, laws are plausible if their leave-last-out error is at most this multiple of the smallest.
_PLAUSIBLE_ERROR = 3.0
#: Smaller leave-last-out errors do not distinguish laws.
_ERROR_FLOOR = 0.03
#: If predictions beyond REACH are requested, they reach this multiple of the largest measured size.
FAR = 8
#: Maximum number of different reasons against a prediction that are listed.
_MAX_REASONS = 3


class LawRun(NamedTuple):
    """One run that a law is fitted to; ``nodes`` is 0 and ``gpus_per_node`` empty if they are not known."""

    gpus: int
    step_time_sec: float
    nodes: int = 0
    gpus_per_node: str = ""


class Prediction(NamedTuple):
    """The time per global batch (s) at one size, with the prediction interval of one further run.

    ``beyond`` marks sizes above twice the largest measured one.
    """

    gpus: int
    step_time_sec: float
    low: float
    high: float
    beyond: bool


class Forecast(NamedTuple):
    """A larger size with its predicted time per step (s) and the 90 % interval of one further run.

    ``like`` is the ``cell_id`` of the largest measured cell, whose settings apply.
    """

    like: str
    nodes: int
    gpus_per_node: str
    gpus: int
    global_batch: float
    per_gpu_batch: float
    step_time_s: float
    low_s: float
    high_s: float
    remark: str


@dataclass(frozen=True)
class Refusal:
    """Reason why no law is fitted, and a remedy."""

    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason


@dataclass(frozen=True)
class SizePath:
    """The runs that a law is fitted to.

    Attributes:
        runs: the runs; all runs of one size have the same layout.
        name: description of the sizes.
        largest_within: ranks of the largest size within one node. It is 0 if no other size spans several
            nodes: laws then need no term for leaving the node.
    """

    runs: Sequence[LawRun]
    name: str
    largest_within: int = 0


def runs_of(rows: Sequence[ScalingRow], frames: Frames) -> list[LawRun]:
    """Return the runs of one series that count."""
    work = {cell.cell_id: cell.global_batch for cell in frames.cells}
    nodes_known = all(row.gpus_per_node for row in rows)
    return [
        LawRun(
            row.gpus, work[row.cell_id] / run.rate, *((row.nodes, row.gpus_per_node) if nodes_known else ())
        )
        for row in first_of_cells(rows)
        for run in frames.measured_in(row.cell_id)
    ]


def path_of(runs: Sequence[LawRun]) -> SizePath | Refusal:
    """Return the path (a selection of the runs) that a law is fitted to, or the reason why there is none.

    The path contains all runs if each size has one layout and the sizes do not cross a node boundary.
    Otherwise it contains the sizes with the same ranks per node, if these are enough for a law, or else the
    layout on the fewest nodes for each size.
    """
    sizes = _sizes(runs)
    if len(sizes) < MIN_SIZES:
        return Refusal(
            f"{count(len(sizes), 'size')} measured, and a law needs {MIN_SIZES} or more: "
            "with fewer sizes, many laws fit equally well",
            f"measure {count(MIN_SIZES - len(sizes), 'more size')}",
        )
    if not all(run.nodes for run in runs):
        return SizePath(runs, ALL_SIZES)
    own, name = runs, ALL_SIZES
    if _most_within(runs) or len({(run.gpus, run.nodes) for run in runs}) > len(sizes):
        paths = grouped(runs, lambda run: run.gpus_per_node or f"{run.gpus // run.nodes}")
        per_node = max(sorted(paths), key=lambda one: len(_sizes(paths[one])))
        if len(_sizes(paths[per_node])) >= MIN_SIZES:
            own, name = paths[per_node], f"gpus_per_node = {per_node}"
        else:
            fewest = {run.gpus: run.nodes for run in sorted(runs, key=lambda run: -run.nodes)}
            own = [run for run in runs if run.nodes == fewest[run.gpus]]
            name = "each size in the layout with the fewest nodes"
    most_within = _most_within(own)
    across = len(_sizes([run for run in own if run.nodes > 1]))
    if most_within and across < _MIN_ACROSS:
        return Refusal(
            f"there are sizes on one node, but only {across} over several nodes: the cost of communication "
            "between nodes cannot be separated from the cost of a larger size",
            f"measure at least {_MIN_ACROSS} sizes over several nodes, or all sizes on one node",
        )
    return SizePath(own, name, most_within)


def _sizes(runs: Iterable[LawRun]) -> set[int]:
    return {run.gpus for run in runs}


def _most_within(runs: Sequence[LawRun]) -> int:
    """Return the largest size of 2 ranks or more within one node; 0 if no size spans several nodes."""
    within = [run.gpus for run in runs if run.nodes == 1 and run.gpus > 1]
    return max(within, default=0) if any(run.nodes > 1 for run in runs) else 0


@dataclass(frozen=True)
class Fitted:
    """One law with its fitted parameters.

    Attributes:
        theta: its parameters, in the order of ``law.parameters``.
        low, high: ends of the parameters' 95 % intervals.
        aicc: Akaike's criterion, corrected; infinite if there are too few runs.
        leave_last_error: relative error at the largest size, if it is predicted from the smaller sizes.
        noise: relative standard deviation of a run around the curve.
        freedom: residual degrees of freedom, over runs.
        refused: reason why the law must not be chosen; empty if it may be chosen.
        misfit: True if the law deviates from the sizes' means by more than the noise of the runs explains.
        covariance: covariance of the parameters. The residual variance is computed over the runs and over the
            sizes, and the larger value is used: if the law misses the sizes' means, the intervals are wider.
    """

    law: Law
    theta: Floats
    low: Floats
    high: Floats
    aicc: float
    leave_last_error: float
    noise: float
    freedom: int
    refused: str
    misfit: bool
    covariance: Floats

    def curve(self, ranks: Floats) -> Floats:
        """Return the seconds per step at the given sizes."""
        return np.asarray(self.law.curve(self.theta, ranks))

    def interval(self, ranks: Floats, *, level: float) -> tuple[Floats, Floats]:
        """Return the ends of the prediction interval of a further run's time per step at the given sizes.

        The interval combines the uncertainty of the parameters, the noise of one run and, if ``misfit`` is
        set, ``leave_last_error``.
        """
        steps = 1e-6 * np.maximum(np.abs(self.theta), 1e-3 * np.abs(self.theta).max())
        gradient = optimize.approx_fprime(self.theta, lambda theta: _log_curve(self.law, theta, ranks), steps)
        gradient = gradient.reshape(len(ranks), -1)
        variance = np.einsum("sp,pq,sq->s", gradient, self.covariance, gradient) + self.noise**2
        if self.misfit:
            variance = variance + math.log1p(self.leave_last_error) ** 2
        half = float(special.stdtrit(self.freedom, 0.5 + level / 2)) * np.sqrt(variance)
        half = np.minimum(half, _MAX_HALF_WIDTH)
        return self.curve(ranks) * np.exp(-half), self.curve(ranks) * np.exp(half)


def fit_law(law: Law, ranks: Floats, times: Floats) -> Fitted:
    """Fit the law to runs by least squares on the logarithms; there are more sizes than parameters."""
    logs = np.log(times)
    found = _solve(law, ranks, logs)
    theta, size = found.x, len(law.parameters)
    _, places, n = np.unique(ranks, return_inverse=True, return_counts=True)
    spare_sizes, spare_runs, freedom = len(n) - size, len(logs) - len(n), len(logs) - size
    scatter = float(((logs - (np.bincount(places, logs) / n)[places]) ** 2).sum())
    squares = max(2 * float(found.cost), len(logs) * _FLOOR**2)
    per_run, per_size = squares / freedom, max(squares - scatter, 0.0) / spare_sizes
    covariance = np.asarray(max(per_run, per_size) * np.linalg.pinv(found.jac.T @ found.jac))
    half = special.stdtrit(freedom, 0.975) * np.sqrt(np.diag(covariance))
    # F test: the law misses the mean of a size by more than the runs' scatter explains.
    noisy = spare_runs > 0 and scatter > 0
    p_value = special.fdtrc(spare_sizes, spare_runs, per_size * spare_runs / scatter) if noisy else 1.0
    rest = ranks < ranks.max()
    last = law.curve(_solve(law, ranks[rest], logs[rest], [theta]).x, ranks.max(keepdims=True))[0]
    return Fitted(
        law=law,
        theta=theta,
        low=theta - half,
        high=theta + half,
        aicc=_aicc(squares, runs=len(logs), parameters=size),
        leave_last_error=float(last / np.exp(logs[~rest].mean()) - 1),
        noise=math.sqrt(per_run),
        freedom=freedom,
        refused=_shortfall(len(n), size) or _undetermined(law, found),
        misfit=bool(p_value < _MISFIT_LEVEL),
        covariance=covariance,
    )


def _solve(law: Law, ranks: Floats, logs: Floats, starts: Sequence[Floats] = ()) -> optimize.OptimizeResult:
    """Return the best fit within the bounds, from ``starts`` or all starting values of the parameters.

    A curve with a kink (of the communication model) has several local minima.
    """
    smallest = float(np.exp(logs[ranks == ranks.min()].mean()))
    units = np.array([smallest if parameter.unit else 1.0 for parameter in law.parameters])
    bounds = [p.low for p in law.parameters], [p.high for p in law.parameters]
    found = [
        optimize.least_squares(
            lambda theta: _log_curve(law, theta, ranks) - logs,
            start,
            bounds=bounds,
            x_scale=units,
            # With looser tolerances, parameters may stop before their bounds.
            **dict.fromkeys(("xtol", "ftol", "gtol"), 1e-12),
        )
        for start in starts or [units * start for start in product(*(p.starts for p in law.parameters))]
    ]
    return min(found, key=lambda result: result.cost)


def _log_curve(law: Law, theta: Floats, ranks: Floats) -> Floats:
    return np.asarray(np.log(np.maximum(law.curve(theta, ranks), 1e-300)))


def _aicc(squares: float, *, runs: int, parameters: int) -> float:
    """Return AICc, counting the runs' variance as a parameter; infinite without degrees of freedom.

    (C. M. Hurvich and C.-L. Tsai, Biometrika 76, 1989.)
    """
    free = parameters + 1
    spare = runs - free - 1
    if spare <= 0:
        return math.inf
    return runs * math.log(squares / runs) + 2 * free + 2 * free * (free + 1) / spare


def _shortfall(sizes: int, parameters: int) -> str:
    """Return the reason why there are too few sizes to choose the law; empty if there are enough."""
    spare = sizes - parameters
    if spare >= MIN_FREEDOM:
        return ""
    return f"{sizes} sizes leave {count(spare, 'residual degree')} of freedom for {parameters} parameters"


def _undetermined(law: Law, found: optimize.OptimizeResult) -> str:
    """Describe the parameters at their bounds or without effect; the data do not show their terms."""
    reasons = []
    for parameter, side, effect in zip(law.parameters, found.active_mask, found.jac.T, strict=True):
        if side:
            bound = parameter.low if side < 0 else parameter.high
            reasons.append(f"{parameter.name} is at its bound of {bound:g}")
        elif not effect.any():
            reasons.append(f"no measured size depends on {parameter.name}")
    return "; ".join(reasons)


@dataclass(frozen=True)
class LawFit:
    """The laws of one series.

    Attributes:
        mode: ``strong`` or ``weak``.
        chosen: the law for predictions.
        laws: all laws, the chosen one first; a law with a reason in ``refused`` is never chosen.
        by_aicc: True if the laws were compared by AICc; False if only by the leave-last-out error.
        path: description of the sizes that the laws are fitted to.
        largest: the largest measured size in ranks.
    """

    mode: str
    chosen: Fitted
    laws: tuple[Fitted, ...]
    by_aicc: bool
    path: str
    runs: int
    largest: int

    @property
    def plausible(self) -> tuple[Fitted, ...]:
        """The chosen law, and the laws that the runs support nearly as much."""
        return tuple(law for law in self.laws if self._is_plausible(law))

    def predict(self, gpus: Sequence[int], level: float = LEVEL, *, beyond: bool = False) -> list[Prediction]:
        """Return the time per step at the given sizes, with the prediction interval of one further run.

        The chosen law predicts the time. The interval spans the intervals of all plausible laws, even of laws
        refused for a parameter at its bound: a term that is invisible at the measured sizes may matter at
        larger ones.

        Raises:
            BenchError: a size is above twice the largest measured one, and ``beyond`` is False.
        """
        sizes = np.asarray(list(gpus), dtype=float)
        far = sizes > REACH * self.largest
        if far.any() and not beyond:
            asked = int(sizes[far].max())
            raise BenchError(
                f"{asked} ranks are more than twice the largest measured size ({self.largest})",
                remedy=f"measure up to {math.ceil(asked / REACH)} ranks, or extrapolate with --beyond",
            )
        ends = np.array([fitted.interval(sizes, level=level) for fitted in self.plausible])
        columns = sizes, self.chosen.curve(sizes), ends[:, 0].min(axis=0), ends[:, 1].max(axis=0), far
        rows = zip(*(one.tolist() for one in columns), strict=True)
        return [Prediction(int(size), *values) for size, *values in rows]

    def _is_plausible(self, fitted: Fitted) -> bool:
        if fitted is self.chosen:
            return True
        if self.by_aicc:
            return fitted.aicc <= self.chosen.aicc + PLAUSIBLE_AICC
        allowed = _PLAUSIBLE_ERROR * (abs(self.chosen.leave_last_error) + _ERROR_FLOOR)
        return abs(fitted.leave_last_error) <= allowed

    def status(self, fitted: Fitted) -> str:
        """Return ``chosen``, ``plausible``, ``less supported`` or, with the reason, ``refused``."""
        if fitted is self.chosen:
            return "chosen"
        if fitted.refused:
            return f"refused: {fitted.refused}"
        return "plausible" if self._is_plausible(fitted) else "less supported"


def fit_laws(runs: Sequence[LawRun], *, mode: str, probes: Fabric | None = None) -> LawFit | Refusal:
    """Fit the scaling laws to one series, or return the reason why this is not possible.

    ``runs`` are those that count. Only the modes ``strong`` and ``weak`` have laws. With ``probes``, the
    measured all-reduce, the communication model is fitted, too.
    """
    if mode not in ("strong", "weak"):
        return Refusal(
            "neither the global batch nor the batch per rank is constant, but all laws assume that one is"
        )
    path = path_of([run for run in runs if 0 < run.step_time_sec < math.inf])
    if isinstance(path, Refusal):
        return path
    ranks, times = np.array([run[:2] for run in path.runs], dtype=float).T
    laws = laws_of(mode, fabric=probes, largest_within=path.largest_within)
    fitted = [fit_law(law, ranks, times) for law in laws]
    by_aicc = all(math.isfinite(law.aicc) for law in fitted)
    fitted.sort(key=lambda law: law.aicc if by_aicc else abs(law.leave_last_error))
    chosen = next((law for law in fitted if not law.refused), None)
    if chosen is None:
        refused = listed([f"{law.law.title} ({law.refused})" for law in fitted])
        return Refusal(f"no law fits within its bounds: {refused}")
    return LawFit(
        mode=mode,
        chosen=chosen,
        laws=(chosen, *(law for law in fitted if law is not chosen)),
        by_aicc=by_aicc,
        path=path.name,
        runs=len(times),
        largest=int(ranks.max()),
    )


def forecasts(
    frames: Frames, rows: Sequence[ScalingRow], *, fabrics: Mapping[str, Fabric], beyond: bool = False
) -> tuple[list[Forecast], list[str]]:
    """Predict larger sizes of each series by the series' scaling law.

    Predictions are for twice the largest measured size and, with ``beyond``, for 4 and 8 times this size, all
    with the same ranks per node. The largest size must span several nodes, because sizes on one node do not
    show the cost of communication between nodes. Cells without DDP are ignored. Series without a
    prediction are named by sentences.
    """
    found: list[Forecast] = []
    refusals: dict[str, list[str]] = {}
    for series, own in by_series([row for row in rows if row.n and row.ddp]).items():
        sizes = _forecast(frames, own, fabrics.get(series), beyond=beyond)
        if isinstance(sizes, Refusal):
            refusals.setdefault(str(sizes), []).append(one_line(series, limit=60))
        else:
            found += sizes
    return found, _refusal_texts(refusals)


def _refusal_texts(refusals: dict[str, list[str]]) -> list[str]:
    """Return a sentence for each reason; reasons that apply to the most series come first."""
    ranked = sorted(refusals.items(), key=lambda item: -len(item[1]))
    texts = []
    for reason, names in ranked[:_MAX_REASONS]:
        which = names[0] if len(names) == 1 else count(len(names), "series", "series")
        texts.append(f"no prediction for {which}: {reason}")
    rest = sum(len(names) for _, names in ranked[_MAX_REASONS:])
    if rest:
        more = count(rest, "more series", "more series")
        texts.append(f"no prediction for {more}, for similar reasons")
    return texts


def _forecast(
    frames: Frames, rows: Sequence[ScalingRow], fabric: Fabric | None, *, beyond: bool
) -> list[Forecast] | Refusal:
    largest = min(rows, key=lambda row: (-row.gpus, row.nodes))
    if largest.mode not in ("strong", "weak"):
        return Refusal("neither the global batch nor the batch per rank is constant")
    if largest.nodes < 2 or not largest.gpus_per_node.isdecimal():
        return Refusal(
            "larger sizes need more nodes, but the largest measured size is not on several equal nodes"
        )
    fit = fit_laws(runs_of(rows, frames), mode=largest.mode, probes=fabric)
    if isinstance(fit, Refusal):
        return fit
    if fit.largest < largest.gpus:
        return Refusal(f"the largest size has another layout than the sizes of the law ({fit.path})")
    return _predicted(fit, largest, beyond=beyond)


def _predicted(fit: LawFit, largest: ScalingRow, *, beyond: bool) -> list[Forecast] | Refusal:
    strong = largest.mode == "strong"
    reach = FAR if beyond else REACH
    factors = [2**power for power in range(1, 4) if 2**power <= reach]
    factors = [factor for factor in factors if not strong or largest.per_gpu_batch % factor == 0]
    if not factors:
        return Refusal("twice the ranks need half the batch per rank, but that of the largest size is odd")
    title = fit.chosen.law.title
    return [
        Forecast(
            like=largest.cell_id,
            nodes=factor * largest.nodes,
            gpus_per_node=largest.gpus_per_node,
            gpus=one.gpus,
            global_batch=largest.global_batch * (1 if strong else factor),
            per_gpu_batch=largest.per_gpu_batch / factor if strong else largest.per_gpu_batch,
            step_time_s=one.step_time_sec,
            low_s=one.low,
            high_s=one.high,
            remark=f"{title}; beyond twice the largest measured size" if one.beyond else title,
        )
        for factor, one in zip(
            factors, fit.predict([factor * largest.gpus for factor in factors], beyond=beyond), strict=True
        )
    ]
