"""Choose the scaling law of a series and predict larger sizes.

:func:`fit_laws` fits every law of :mod:`analysis.stats.laws.forms` that applies. It compares the laws by AICc
over the runs or, if AICc is not known for all laws, by their leave-last-out error: the error at the largest
size if this size is left out of the fit. For most short series the runs do not identify a law; then
:func:`fit_laws` returns the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.stats.laws.fit import Fitted, Points, Refusal, fit_law, path_of, points_of, runs_of, shortfall
from analysis.stats.laws.forms import Fabric, Law, laws_of, with_crossing
from analysis.stats.measured import Frames
from analysis.text import count, listed, one_line
from bench.errors import BenchError

#: Probability that a prediction interval contains a further run.
LEVEL = 0.90
#: Predictions beyond this multiple of the largest measured size must be requested.
REACH = 2.0
#: Laws whose AICc exceeds the lowest one by at most this are plausible: the interval spans theirs, too
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
class LawFit:
    """The laws of one series.

    Attributes:
        mode: ``strong`` or ``weak``.
        chosen: the law for predictions.
        laws: all fitted laws, the chosen one first; a law with a reason in ``refused`` is never chosen.
        left_out: laws that could not be fitted, with the reason.
        by_aicc: whether the laws were compared by AICc or by the leave-last-out error alone.
        path: description of the sizes that the laws are fitted to.
        runs: number of runs.
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
        """Return the time per step at the given sizes, with prediction intervals of a further run.

        The prediction is that of the chosen law. The interval spans the intervals of all plausible laws, even
        of laws refused for a parameter at its bound: a term that is invisible at the measured sizes may
        matter at larger ones.

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

    Args:
        runs: one row per run that counts: ``gpus``, ``step_time_sec`` (seconds per global batch);
            optionally ``nodes`` and ``gpus_per_node`` (text), to locate the node boundary.
        mode: ``strong`` or ``weak``; any other series has no law.
        probes: the measured all-reduce; if given, the communication model is fitted, too.
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
    show the cost of communication between nodes.

    Args:
        frames: the study's frames.
        rows: the scaling table; cells without DDP are ignored.
        fabrics: the measured all-reduce of each series, for the communication model.
        beyond: predict beyond twice the largest measured size.

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
            "larger sizes need more nodes, but the largest measured size has no two nodes with equal ranks"
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
        return Refusal("the batch per rank of the largest size cannot be halved")
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
