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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import optimize, special

from analysis.stats.estimate import Floats
from analysis.stats.law_forms import Fabric, Law, laws_of, with_crossing
from analysis.stats.measured import Frames
from analysis.text import count, listed, one_line
from bench.errors import BenchError

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
_FORECAST_COLUMNS = (
    *("like", "nodes", "gpus_per_node", "gpus", "global_batch", "per_gpu_batch"),
    *("step_time_s", "low_s", "high_s", "throughput_samples_per_sec", "remark"),
)
#: The columns of :attr:`LawFit.table`; ``status`` is chosen, plausible, less supported or refused.
LAW_COLUMNS = ("law", "title", "formula", "delta_aicc", "leave_last_error", "status", "reason")
#: The columns of :meth:`LawFit.predict`.
PREDICTION_COLUMNS = ("gpus", "step_time_sec", "low", "high", "extrapolation", "beyond")


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

    runs: pd.DataFrame
    name: str
    largest_within: int = 0


def runs_of(rows: pd.DataFrame, frames: Frames) -> pd.DataFrame:
    """Return the runs of one series in the form that :func:`analysis.stats.law_fit.fit_laws` takes."""
    runs = frames.runs[frames.runs["measured"]]
    cells = rows[["cell_id", "gpus", "nodes", "gpus_per_node"]].drop_duplicates("cell_id")
    found = cells.merge(runs[["cell_id", "rate"]], on="cell_id")
    work = found["cell_id"].map(frames.cells.set_index("cell_id")["global_batch"])
    found["step_time_sec"] = work.astype(float) / found["rate"]
    unknown = (rows["gpus_per_node"] == "").any()
    return found.drop(columns=["nodes", "gpus_per_node"] if unknown else [])


def path_of(runs: pd.DataFrame) -> SizePath | Refusal:
    """Return the path (a selection of the runs) that a law is fitted to, or the reason why there is none.

    The path contains all runs if each size has one layout and the sizes do not cross a node boundary.
    Otherwise it contains the sizes with the same ranks per node, if these are enough for a law, or else the
    layout on the fewest nodes for each size.

    ``runs`` has one row per run with ``gpus`` and, optionally, ``nodes`` and ``gpus_per_node`` (text).
    """
    total = runs["gpus"].nunique()
    if total < MIN_SIZES:
        return Refusal(
            f"{count(total, 'size')} measured, and a law needs {MIN_SIZES} or more: "
            "with fewer sizes, many laws fit equally well",
            f"measure {count(MIN_SIZES - total, 'more size')}",
        )
    if "nodes" not in runs:
        return SizePath(runs, ALL_SIZES)
    own, name = runs, ALL_SIZES
    if _most_within(runs) or runs.groupby("gpus")["nodes"].nunique().gt(1).any():
        per_node = runs["gpus_per_node"] if "gpus_per_node" in runs else runs["gpus"] // runs["nodes"]
        per_node = per_node.astype("str")
        sizes = runs["gpus"].groupby(per_node).nunique()
        if sizes.max() >= MIN_SIZES:
            own, name = runs[per_node == sizes.idxmax()], f"gpus_per_node = {sizes.idxmax()}"
        else:
            own = runs[runs["nodes"] == runs.groupby("gpus")["nodes"].transform("min")]
            name = "each size in the layout with the fewest nodes"
    most_within = _most_within(own)
    across = own.loc[own["nodes"] > 1, "gpus"].nunique()
    if most_within and across < _MIN_ACROSS:
        return Refusal(
            f"there are sizes on one node, but only {across} over several nodes: the cost of communication "
            "between nodes cannot be separated from the cost of a larger size",
            f"measure at least {_MIN_ACROSS} sizes over several nodes, or all sizes on one node",
        )
    return SizePath(own, name, most_within)


def _most_within(runs: pd.DataFrame) -> int:
    """Return the largest size of 2 ranks or more within one node; 0 if no size spans several nodes."""
    within = runs[(runs["nodes"] == 1) & (runs["gpus"] > 1)]
    return int(within["gpus"].max()) if len(within) and (runs["nodes"] > 1).any() else 0


@dataclass(frozen=True)
class Points:
    """The runs of a series, grouped by size.

    ``ranks`` are the sizes (ascending), ``n`` is the number of runs of each size, and ``mean`` the mean of
    their log times. ``scatter`` is the sum of the squared deviations of the runs from the mean of their size,
    ``spare`` its degrees of freedom.
    """

    ranks: Floats
    n: Floats
    mean: Floats
    scatter: float
    spare: int

    @property
    def runs(self) -> int:
        """Number of runs."""
        return int(self.n.sum())


@dataclass(frozen=True)
class Fitted:
    """One law with its fitted parameters.

    Attributes:
        theta: its parameters, in the order of ``law.parameters``.
        low, high: ends of the parameters' 95 % intervals.
        aicc: Akaike's criterion, corrected; infinite if there are too few runs.
        leave_last_error: relative error at the largest size, if it is predicted from the smaller sizes; NaN
            if there are too few of them.
        noise: relative standard deviation of a run around the curve.
        freedom: residual degrees of freedom, over runs.
        refused: reason why the law must not be chosen; empty if it may be chosen.
        misfit: True if the law deviates from the sizes' means by more than the noise of the runs explains.
        covariance: covariance of the parameters, for runs of unit variance.
        scale: residual variance, which determines the width of the parameters' intervals. It is computed over
            the runs and over the sizes, and the larger value is used.
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
    scale: float

    def curve(self, ranks: Floats) -> Floats:
        """Return the seconds per step at the given sizes."""
        return np.asarray(self.law.curve(self.theta, ranks))

    def interval(self, ranks: Floats, *, level: float) -> tuple[Floats, Floats]:
        """Return the ends of the prediction interval of a further run's time per step at the given sizes.

        The interval combines the uncertainty of the parameters, the noise of one run and, if ``misfit`` is
        set, ``leave_last_error``. It is NaN for sizes at which the curve is not positive.
        """
        centre = self.curve(ranks)
        usable = centre > 0
        log_gradient = _gradient(self.law, self.theta, ranks)
        variance = self.scale * np.einsum("sp,pq,sq->s", log_gradient, self.covariance, log_gradient)
        variance = np.maximum(variance, 0.0) + self.noise**2
        if self.misfit and math.isfinite(self.leave_last_error):
            variance = variance + math.log1p(max(self.leave_last_error, -0.99)) ** 2
        half = float(special.stdtrit(self.freedom, 0.5 + level / 2)) * np.sqrt(variance)
        half = np.minimum(half, _MAX_HALF_WIDTH)
        low, high = centre * np.exp(-half), centre * np.exp(half)
        return np.where(usable, low, np.nan), np.where(usable, high, np.nan)


def points_of(runs: pd.DataFrame) -> Points:
    """Group the runs by size; ``runs`` have ``gpus`` and ``step_time_sec`` (positive)."""
    logs = np.log(runs["step_time_sec"].to_numpy(dtype=float))
    ranks, places = np.unique(runs["gpus"].to_numpy(dtype=float), return_inverse=True)
    n = np.bincount(places).astype(float)
    mean = np.bincount(places, weights=logs) / n
    scatter = float(((logs - mean[places]) ** 2).sum())
    return Points(ranks, n, mean, scatter, int(n.sum()) - len(ranks))


def fit_law(law: Law, points: Points) -> Fitted | None:
    """Fit the law to all points; return None if there are too few sizes or the fit fails.

    The fit minimises the deviations of the curve from the sizes' means; the runs' scatter does not matter.
    """
    sizes, size = len(points.ranks), len(law.parameters)
    theta = _solve(law, points) if sizes > size else None
    if theta is None:
        return None
    missed = float((points.n * (points.mean - _log_curve(law, theta, points.ranks)) ** 2).sum())
    squares = max(missed + points.scatter, points.runs * _FLOOR**2)
    freedom = points.runs - size
    per_run = squares / freedom
    # If the law deviates from the means of the sizes, the intervals of the parameters become wider.
    per_size = missed / (sizes - size)
    gradient = _gradient(law, theta, points.ranks) * np.sqrt(points.n)[:, None]
    covariance = np.asarray(np.linalg.pinv(gradient.T @ gradient), dtype=float)
    scale = max(per_run, per_size)
    half = float(special.stdtrit(freedom, 0.975)) * np.sqrt(scale * np.diag(covariance))
    return Fitted(
        law=law,
        theta=theta,
        low=theta - half,
        high=theta + half,
        aicc=_aicc(squares, runs=points.runs, parameters=size),
        leave_last_error=_leave_last_error(law, points),
        noise=math.sqrt(per_run),
        freedom=freedom,
        refused=shortfall(law, points) or _at_bound(law, theta),
        misfit=_misfit(per_size, sizes - size, points),
        covariance=covariance,
        scale=scale,
    )


def _solve(law: Law, points: Points) -> Floats | None:
    """Return the best parameters over all starting points, without bounds; None if no fit converges."""
    if len(points.ranks) < len(law.parameters):
        return None
    starts = np.atleast_2d(law.start(points.ranks, np.exp(points.mean)))
    found = [solved for start in starts if (solved := _descend(law, points, start)) is not None]
    return min(found, key=lambda solved: solved[1])[0] if found else None


def _descend(law: Law, points: Points, start: Floats) -> tuple[Floats, float] | None:
    """Return the parameters found by least squares from ``start``, and their sum of squares."""
    weights = np.sqrt(points.n)
    # Parameters differ by orders of magnitude, so each is divided by its starting value.
    unit = np.maximum(np.abs(start), 1e-6 * max(float(np.max(np.abs(start))), _FLOOR))

    def residuals(theta: Floats) -> Floats:
        return np.asarray(weights * (points.mean - _log_curve(law, theta * unit, points.ranks)))

    # MINPACK's Levenberg-Marquardt method has no bounds: fit_law refuses a law that exceeds its bounds.
    found, *_ = optimize.leastsq(residuals, start / unit, maxfev=400, full_output=True)
    squares = float((residuals(found) ** 2).sum())
    if not (np.isfinite(found).all() and math.isfinite(squares)):
        return None
    return np.asarray(found * unit, dtype=float), squares


def _log_curve(law: Law, theta: Floats, ranks: Floats) -> Floats:
    times = law.curve(theta, ranks)
    return np.asarray(np.log(np.maximum(times, 1e-12 * np.max(np.abs(times)) + 1e-300)))


def _gradient(law: Law, theta: Floats, ranks: Floats) -> npt.NDArray[np.float64]:
    """Return d log T / d theta, one row per size, by central differences."""
    columns = []
    for place, value in enumerate(theta):
        step = 1e-5 * max(abs(value), 1e-3 * float(np.max(np.abs(theta))))
        above, below = theta.copy(), theta.copy()
        above[place] += step
        below[place] -= step
        columns.append((_log_curve(law, above, ranks) - _log_curve(law, below, ranks)) / (2 * step))
    return np.stack(columns, axis=1)


def _aicc(squares: float, *, runs: int, parameters: int) -> float:
    """Return AICc, counting the runs' variance as a parameter; infinite without degrees of freedom.

    (C. M. Hurvich and C.-L. Tsai, Biometrika 76, 1989.)
    """
    free = parameters + 1
    spare = runs - free - 1
    if spare <= 0:
        return math.inf
    return runs * math.log(squares / runs) + 2 * free + 2 * free * (free + 1) / spare


def _leave_last_error(law: Law, points: Points) -> float:
    """Return predicted / measured - 1 at the largest size, for the law fitted to all other sizes."""
    smaller = Points(points.ranks[:-1], points.n[:-1], points.mean[:-1], points.scatter, points.spare)
    theta = _solve(law, smaller)
    if theta is None:
        return math.nan
    predicted = float(law.curve(theta, points.ranks[-1:])[0])
    return predicted / math.exp(points.mean[-1]) - 1


def _misfit(per_size: float, spare_sizes: int, points: Points) -> bool:
    """Return whether the law misses the mean of a size by more than the runs' scatter explains (F test)."""
    if points.spare < 1 or points.scatter <= 0:
        return False
    ratio = per_size / (points.scatter / points.spare)
    return bool(special.fdtrc(spare_sizes, points.spare, ratio) < _MISFIT_LEVEL)


def _at_bound(law: Law, theta: Floats) -> str:
    """Describe the parameters at or beyond their bounds; the data do not show the terms that contain them."""
    names = [
        f"{parameter.name} would be {value:.2g}, beyond its bound of {bound:g}"
        for parameter, value in zip(law.parameters, theta, strict=True)
        for bound in (parameter.low, parameter.high)
        if (value <= bound if bound == parameter.low else value >= bound)
    ]
    return "; ".join(names)


def shortfall(law: Law, points: Points) -> str:
    """Return the reason why there are too few sizes to choose the law; empty if there are enough."""
    sizes, size = len(points.ranks), len(law.parameters)
    spare = max(sizes - size, 0)
    if spare >= MIN_FREEDOM:
        return ""
    return f"{sizes} sizes leave {count(spare, 'residual degree')} of freedom for {size} parameters"


@dataclass(frozen=True)
class LawFit:
    """The laws of one series.

    Attributes:
        mode: ``strong`` or ``weak``.
        chosen: the law for predictions.
        laws: all fitted laws, the chosen one first; a law with a reason in ``refused`` is never chosen.
        left_out: laws that could not be fitted, with the reason.
        by_aicc: True if the laws were compared by AICc; False if only by the leave-last-out error.
        path: description of the sizes that the laws are fitted to.
        largest, smallest: sizes in ranks.
    """

    mode: str
    chosen: Fitted
    laws: tuple[Fitted, ...]
    left_out: tuple[tuple[Law, str], ...]
    by_aicc: bool
    path: str
    runs: int
    smallest: int
    largest: int

    @property
    def table(self) -> pd.DataFrame:
        """All laws as a frame with the columns :data:`LAW_COLUMNS`, the chosen law first."""
        rows: list[tuple[object, ...]] = []
        for fitted in self.laws:
            delta = fitted.aicc - self.chosen.aicc if math.isfinite(fitted.aicc) else math.nan
            law = fitted.law
            numbers = (delta, fitted.leave_last_error)
            rows.append((law.name, law.title, law.formula, *numbers, self._status(fitted), fitted.refused))
        for law, reason in self.left_out:
            rows.append((law.name, law.title, law.formula, math.nan, math.nan, "refused", reason))
        return pd.DataFrame(rows, columns=list(LAW_COLUMNS))

    @property
    def plausible(self) -> tuple[Fitted, ...]:
        """The chosen law, and the laws that the runs support nearly as much."""
        return tuple(fitted for fitted in self.laws if self._is_plausible(fitted))

    def predict(self, gpus: Sequence[int], level: float = LEVEL, *, beyond: bool = False) -> pd.DataFrame:
        """Return the time per step at the given sizes, with the prediction interval of one further run.

        The chosen law predicts the time. The interval spans the intervals of all plausible laws, even of laws
        refused for a parameter at its bound: a term that is invisible at the measured sizes may matter at
        larger ones.

        Returns:
            A frame with :data:`PREDICTION_COLUMNS`: ``step_time_sec`` (per global batch), with its interval
            from ``low`` to ``high``. ``extrapolation`` marks sizes outside the measured range, ``beyond``
            those above twice the largest measured one.

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
        bounds = [fitted.interval(sizes, level=level) for fitted in self.plausible]
        return pd.DataFrame(
            {
                "gpus": sizes.astype("int64"),
                "step_time_sec": self.chosen.curve(sizes),
                "low": np.fmin.reduce([low for low, _ in bounds]),
                "high": np.fmax.reduce([high for _, high in bounds]),
                "extrapolation": (sizes > self.largest) | (sizes < self.smallest),
                "beyond": far,
            }
        )

    def _is_plausible(self, fitted: Fitted) -> bool:
        if fitted is self.chosen:
            return True
        if self.by_aicc:
            return fitted.aicc <= self.chosen.aicc + PLAUSIBLE_AICC
        allowed = _PLAUSIBLE_ERROR * (abs(self.chosen.leave_last_error) + _ERROR_FLOOR)
        return abs(fitted.leave_last_error) <= allowed

    def _status(self, fitted: Fitted) -> str:
        if fitted is self.chosen:
            return "chosen"
        if fitted.refused:
            return "refused"
        return "plausible" if self._is_plausible(fitted) else "less supported"


def fit_laws(runs: pd.DataFrame, *, mode: str, probes: Fabric | None = None) -> LawFit | Refusal:
    """Fit the scaling laws to one series, or return the reason why this is not possible.

    ``runs`` has one row per run that counts: ``gpus``, ``step_time_sec`` (seconds per global batch) and,
    optionally, ``nodes`` and ``gpus_per_node`` (text) to locate the node boundary. Only the modes ``strong``
    and ``weak`` have laws. With ``probes``, the measured all-reduce, the communication model is fitted, too.
    """
    if mode not in ("strong", "weak"):
        return Refusal(
            "neither the global batch nor the batch per rank is constant, but all laws assume that one is"
        )
    usable = runs[(runs["step_time_sec"] > 0) & np.isfinite(runs["step_time_sec"])]
    path = path_of(usable)
    if isinstance(path, Refusal):
        return path
    laws = laws_of(mode, fabric=probes)
    if path.largest_within:
        laws = [with_crossing(law, largest_within=path.largest_within) for law in laws]
    return _choose(laws, points_of(path.runs), mode=mode, path=path.name)


def _choose(laws: Sequence[Law], points: Points, *, mode: str, path: str) -> LawFit | Refusal:
    left_out = []
    fitted = []
    for law in laws:
        found = fit_law(law, points)
        if found is None:
            left_out.append((law, shortfall(law, points) or "the fit did not converge"))
        else:
            fitted.append(found)
    by_aicc = all(math.isfinite(law.aicc) for law in fitted)
    eligible = [law for law in fitted if not law.refused and math.isfinite(_score(law, by_aicc))]
    if not eligible:
        refused = [f"{law.law.title} ({law.refused})" for law in fitted if law.refused]
        return Refusal(f"no law fits within its bounds: {listed(refused) or 'too few sizes'}")
    chosen = min(eligible, key=lambda law: _score(law, by_aicc))
    rest = sorted((law for law in fitted if law is not chosen), key=lambda law: _score(law, by_aicc))
    return LawFit(
        mode=mode,
        chosen=chosen,
        laws=(chosen, *rest),
        left_out=tuple(left_out),
        by_aicc=by_aicc,
        path=path,
        runs=points.runs,
        smallest=int(points.ranks[0]),
        largest=int(points.ranks[-1]),
    )


def _score(fitted: Fitted, by_aicc: bool) -> float:
    if by_aicc:
        return fitted.aicc
    return abs(fitted.leave_last_error) if math.isfinite(fitted.leave_last_error) else math.inf


def forecasts(
    frames: Frames, rows: pd.DataFrame, *, fabrics: Mapping[str, Fabric], beyond: bool = False
) -> tuple[pd.DataFrame, list[str]]:
    """Predict larger sizes of each series by the series' scaling law.

    Predictions are for twice the largest measured size and, with ``beyond``, for 4 and 8 times this size, all
    with the same ranks per node. The largest size must span several nodes, because sizes on one node do not
    show the cost of communication between nodes. Cells without DDP are ignored.

    Returns:
        A frame with one row per predicted size, and sentences about series without a prediction. ``like`` is
        the ``cell_id`` of the largest measured cell, whose settings apply. Times are seconds per step, with
        the 90 % interval of one further run.
    """
    parts: list[pd.DataFrame] = []
    refusals: dict[str, list[str]] = {}
    for series, own in rows[(rows["n"] > 0) & rows["ddp"]].groupby("series", sort=False):
        found = _forecast(frames, own, fabrics.get(str(series)), beyond=beyond)
        if isinstance(found, Refusal):
            refusals.setdefault(str(found), []).append(one_line(series, limit=60))
        else:
            parts.append(found)
    frame = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=list(_FORECAST_COLUMNS))
    return frame, _refusal_texts(refusals)


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
    frames: Frames, rows: pd.DataFrame, fabric: Fabric | None, *, beyond: bool
) -> pd.DataFrame | Refusal:
    largest = rows.sort_values(["gpus", "nodes"], ascending=[False, True], kind="stable").iloc[0]
    if rows["mode"].iloc[0] not in ("strong", "weak"):
        return Refusal("neither the global batch nor the batch per rank is constant")
    if largest["nodes"] < 2 or not str(largest["gpus_per_node"]).isdecimal():
        return Refusal(
            "larger sizes need more nodes, but the largest measured size is not on several equal nodes"
        )
    fit = fit_laws(runs_of(rows, frames), mode=str(largest["mode"]), probes=fabric)
    if isinstance(fit, Refusal):
        return fit
    if fit.largest < largest["gpus"]:
        return Refusal(f"the largest size has another layout than the sizes of the law ({fit.path})")
    return _predicted(fit, largest, beyond=beyond)


def _predicted(fit: LawFit, largest: pd.Series, *, beyond: bool) -> pd.DataFrame | Refusal:
    strong = largest["mode"] == "strong"
    batch = int(largest["global_batch"])
    reach = FAR if beyond else REACH
    factors = [2**power for power in range(1, 4) if 2**power <= reach]
    factors = [factor for factor in factors if not strong or largest["per_gpu_batch"] % factor == 0]
    if not factors:
        return Refusal("twice the ranks need half the batch per rank, but that of the largest size is odd")
    law = fit.predict([factor * int(largest["gpus"]) for factor in factors], beyond=beyond)
    growth = law["gpus"] / int(largest["gpus"])
    per_rank = largest["per_gpu_batch"]
    frame = pd.DataFrame({"gpus": law["gpus"], "nodes": (growth * int(largest["nodes"])).astype("int64")})
    frame["like"], frame["gpus_per_node"] = largest["cell_id"], largest["gpus_per_node"]
    frame["global_batch"] = batch if strong else (growth * batch).astype("int64")
    frame["per_gpu_batch"] = (per_rank / growth).astype("int64") if strong else per_rank
    frame["step_time_s"], frame["low_s"], frame["high_s"] = law["step_time_sec"], law["low"], law["high"]
    frame["throughput_samples_per_sec"] = frame["global_batch"] / frame["step_time_s"]
    frame["remark"] = [
        f"{fit.chosen.law.title}; beyond twice the largest measured size" if far else fit.chosen.law.title
        for far in law["beyond"]
    ]
    return frame[list(_FORECAST_COLUMNS)]
