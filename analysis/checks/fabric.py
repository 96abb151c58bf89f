"""Estimate the latency and bandwidth between ranks (the fabric) from all-reduces timed by probes.

In each run, probes measure the times of all-reduces of several message sizes (the *sweep*). The model is a
ring all-reduce of S bytes over N ranks::

    t = 2(N − 1) · α + 2(N − 1)/N · S · β

α is the latency of one of the ring's 2(N − 1) steps (s), β the time per byte on a rank's link (s/byte).
Source: R. Thakur, R. Rabenseifner, W. Gropp, *Optimization of Collective Communication Operations
in MPICH*, IJHPCA 19(1), 2005; bandwidths as nccl-tests defines them (doc/PERFORMANCE.md).

Message sizes differ by orders of magnitude, so α and β are fitted to different sizes: β to large messages, α
to messages that spend less than half of their time on transferring bytes. Effects at medium sizes (a library
that changes its algorithm, a switch with a buffer) would distort a common fit. The unit is the run: each run
gives one α and one β, and intervals are over runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.data.load import Study
from analysis.stats.columns import ScalingRow, by_series
from analysis.stats.estimate import MIN_RUNS, Floats, log_moments, mean_interval
from analysis.stats.law_forms import Fabric
from bench.study.files import read_json
from bench.study.layout import RunFolder
from bench.units import count

#: Columns of :func:`sweep_rows`: one row per run and message size.
SWEEP_COLUMNS = (
    *("run_id", "cell_id", "ranks", "bytes", "buckets", "repeats", "time_sec"),
    *("algbw_bytes_per_sec", "busbw_bytes_per_sec", "method"),
)
#: Columns of :func:`fabric_table`: one row per cell with a sweep. ``n`` counts the runs with a fit,
#: ``reason`` explains missing values.
FABRIC_COLUMNS = (
    *("cell_id", "ranks", "n", "alpha_sec", "alpha_low", "alpha_high"),
    *("beta_sec_per_byte", "beta_low", "beta_high", "ring_bytes_per_sec"),
    *("left_out_error", "left_out_error_large", "reason"),
)
#: Messages of this size or more are large: they fill TCP windows, pipelines and switch buffers.
LARGE_BYTES = 4_000_000
_FEWEST_SIZES = 3
_ROUNDS = 50


@dataclass(frozen=True)
class RingFit:
    """Latency α and inverse bandwidth β, fitted to the sweep (all-reduces of several sizes) of one run.

    Attributes:
        alpha_s: seconds per step of the ring.
        beta_s_per_byte: seconds per byte on a rank's link.
        left_out: by message size, the relative error of the time as predicted from the other sizes; a size
            is absent if the other sizes have no fit.
    """

    alpha_s: float
    beta_s_per_byte: float
    ranks: int
    left_out: Mapping[int, float]

    def worst(self, *, from_bytes: int = 0) -> float | None:
        """Return the largest error of messages of at least ``from_bytes``; None without such messages."""
        errors = [abs(error) for size, error in self.left_out.items() if size >= from_bytes]
        return max(errors, default=None)


@dataclass(frozen=True)
class NoFit:
    """Reason why latency and bandwidth cannot be fitted to the all-reduces of a run."""

    reason: str


def ring_time(size: Any, ranks: Any, alpha_s: Any, beta_s_per_byte: Any) -> Any:
    """Return the time of a ring all-reduce of ``size`` bytes in seconds (scalars or arrays)."""
    steps = 2 * (ranks - 1)
    return steps * alpha_s + steps / ranks * size * beta_s_per_byte


def fit_ring(sizes: Sequence[float], times_s: Sequence[float], *, ranks: int) -> RingFit | NoFit:
    """Fit latency α and inverse bandwidth β to all-reduces of ``sizes`` bytes, or return why this fails."""
    if ranks < 2:
        return NoFit("a single rank does not communicate")
    given = np.asarray(sizes, dtype=float), np.asarray(times_s, dtype=float)
    usable = np.isfinite(given).all(axis=0) & (np.minimum(*given) > 0)
    size, places = np.unique(given[0][usable], return_inverse=True)
    time = np.array([np.median(given[1][usable][places == place]) for place in range(len(size))])
    found = _parameters(size, time, ranks)
    if isinstance(found, NoFit):
        return found
    left_out = {}
    for place in range(len(size)):
        without = _parameters(np.delete(size, place), np.delete(time, place), ranks)
        if not isinstance(without, NoFit):
            left_out[int(size[place])] = float(ring_time(size[place], ranks, *without) / time[place]) - 1
    return RingFit(*found, ranks, left_out)


def _parameters(size: Floats, time: Floats, ranks: int) -> tuple[float, float] | NoFit:
    """Return latency α, fitted to small messages, and time per byte β, fitted to large messages."""
    if len(size) < _FEWEST_SIZES:
        return NoFit(f"{len(size)} message sizes; a fit needs {_FEWEST_SIZES}")
    steps, wire = 2 * (ranks - 1), size * 2 * (ranks - 1) / ranks
    # The relative errors are weighted by the square of the size, so the largest messages determine β.
    weighted = (size / time) ** 2 * wire
    scale = float((weighted * wire).sum())
    alpha, beta = 0.0, 0.0
    for _ in range(_ROUNDS):
        beta = float((weighted * (time - steps * alpha)).sum()) / scale
        if not (isfinite(beta) and beta > 0):
            return NoFit("large messages take no longer than small ones")
        latent = wire * beta < time / 2
        if not latent.any():
            return NoFit("no message is small enough to show the latency")
        new = float(np.median((time - wire * beta)[latent])) / steps
        if abs(new - alpha) <= 1e-9 * abs(new):
            break
        alpha = new
    return alpha, beta


def sweep_rows(study: Study) -> pd.DataFrame:
    """Return the all-reduces timed in all runs, one row per run and message size (:data:`SWEEP_COLUMNS`).

    ``time_sec`` is the time of the slowest rank, as a median over the repeats. ``method`` is "queued" or
    "single", as in probes.json; earlier versions always timed single all-reduces. Malformed entries are
    ignored.
    """
    rows: list[dict[str, Any]] = []
    ids = zip(study.runs["run_id"], study.runs["cell_id"], study.attempts, strict=True)
    for run_id, cell_id, attempt in ids:
        content = read_json(RunFolder(Path(attempt)).probes) if attempt else None
        if content is not None and content.get("schema") == 1:
            rows += [{"run_id": str(run_id), "cell_id": str(cell_id), **row} for row in _sizes(content)]
    return pd.DataFrame(rows, columns=list(SWEEP_COLUMNS))


def _sizes(content: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    ranks, swept = content.get("world_size"), content.get("all_reduce")
    sizes, method = (swept.get("sizes"), swept.get("method")) if isinstance(swept, dict) else (None, None)
    if not isinstance(ranks, int) or ranks < 2 or not isinstance(sizes, list):
        return
    for entry in sizes:
        try:
            row = _size(entry, ranks) | {"method": "queued" if method == "queued" else "single"}
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            continue
        if row["bytes"] > 0 and isfinite(row["time_sec"]) and row["time_sec"] > 0:
            yield row


def _size(entry: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    size, repeats = int(entry["bytes"]), [max(map(float, one)) for one in entry["times_s"]]
    time_s = float(np.median(repeats)) if repeats else float("nan")
    rate = size / time_s if time_s else float("nan")
    return {
        "ranks": ranks,
        "bytes": size,
        "buckets": int(entry.get("buckets") or 0),
        "repeats": len(repeats),
        "time_sec": time_s,
        "algbw_bytes_per_sec": rate,
        "busbw_bytes_per_sec": rate * 2 * (ranks - 1) / ranks,
    }


def fabric_table(sweep: pd.DataFrame) -> pd.DataFrame:
    """Fit latency α and inverse bandwidth β of each cell; return one row per cell (:data:`FABRIC_COLUMNS`).

    α and β are geometric means over runs; their 95 % intervals are Student's t on the logarithms, from three
    runs. ``ring_bytes_per_sec`` is 1/β: the rate on a rank's link. ``left_out_error`` is the largest relative
    error of a size predicted from the other sizes, median over runs; ``left_out_error_large`` is the same for
    messages of 4 MB or more. ``sweep`` is from :func:`sweep_rows`.
    """
    rows = [_cell(str(cell_id), runs) for cell_id, runs in sweep.groupby("cell_id", sort=False)]
    return pd.DataFrame(rows, columns=list(FABRIC_COLUMNS))


def _cell(cell_id: str, rows: pd.DataFrame) -> dict[str, Any]:
    ranks = int(rows["ranks"].iloc[0])
    tried = [
        fit_ring(run["bytes"].to_list(), run["time_sec"].to_list(), ranks=ranks)
        for _, run in rows.groupby("run_id", sort=False)
    ]
    fits = [fit for fit in tried if isinstance(fit, RingFit)]
    reasons = dict.fromkeys(fit.reason for fit in tried if isinstance(fit, NoFit))
    alpha = _with_interval([fit.alpha_s for fit in fits])
    beta = _with_interval([fit.beta_s_per_byte for fit in fits])
    if 0 < len(fits) < MIN_RUNS:
        reasons[f"{count(len(fits), 'run')}, but an interval needs {MIN_RUNS}"] = None
    return {
        "cell_id": cell_id,
        "ranks": ranks,
        "n": len(fits),
        **dict(zip(("alpha_sec", "alpha_low", "alpha_high"), alpha, strict=True)),
        **dict(zip(("beta_sec_per_byte", "beta_low", "beta_high"), beta, strict=True)),
        "ring_bytes_per_sec": 1 / beta[0],
        "left_out_error": _median([fit.worst() for fit in fits]),
        "left_out_error_large": _median([fit.worst(from_bytes=LARGE_BYTES) for fit in fits]),
        "reason": "; ".join(reasons),
    }


def _with_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of ``values`` and both ends of its 95 % interval; unknown values are NaN."""
    moments = log_moments([values])
    (low,), (high,) = mean_interval(moments)
    return float(np.exp(moments.mean[0])), float(low), float(high)


def _median(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else float("nan")


def fabrics(study: Study, rows: Sequence[ScalingRow]) -> dict[str, Fabric]:
    """Read the study's probes and return the measured all-reduce of each series (see :func:`fabrics_of`)."""
    sweep = sweep_rows(study)
    return fabrics_of(sweep, fabric_table(sweep), rows)


def fabrics_of(sweep: pd.DataFrame, fits: pd.DataFrame, rows: Sequence[ScalingRow]) -> dict[str, Fabric]:
    """Return the all-reduce of each series, measured at its largest size with probes (for scaling laws).

    The ring of the largest size is most similar to the rings of even larger sizes. The probes do not identify
    the bucket that is ready last, so it is assumed to have the mean size of all buckets.
    """
    table = fits.set_index("cell_id")
    known = table[(table["alpha_sec"] >= 0) & (table["beta_sec_per_byte"] > 0)]
    buckets = sweep[sweep["buckets"] > 0].drop_duplicates(["cell_id", "bytes"])
    found = {}
    for series, own in by_series([row for row in rows if row.cell_id in known.index]).items():
        cell = max(reversed(own), key=lambda row: row.gpus).cell_id
        real = buckets[buckets["cell_id"] == cell]
        amount = int(real["buckets"].sum())
        payload = float((real["bytes"] * real["buckets"]).sum())
        if amount and isfinite(payload):
            alpha, beta = known.loc[cell, ["alpha_sec", "beta_sec_per_byte"]].to_numpy(dtype=float)
            found[series] = Fabric(float(alpha), float(beta), payload, payload / amount, amount)
    return found
