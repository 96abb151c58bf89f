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
from math import isfinite, nan
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from analysis.data.columns import grouped
from analysis.data.load import Study
from analysis.stats.estimate import MIN_RUNS, Floats, log_moments, mean_interval
from ddp_scaling_bench.files import read_object
from ddp_scaling_bench.run_folder import RunFolder
from ddp_scaling_bench.units import count

#: Messages of this size or more are large: they fill TCP windows, pipelines and switch buffers.
LARGE_BYTES = 4_000_000
#: By collective with times in probes.json, the number k in busbw = bytes / time · k(N − 1)/N.
_ROUNDS_OF: Final = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
_FEWEST_SIZES = 3
#: With thousands of runs, pathlib would take longer than reading.
_PROBES = RunFolder(Path()).probes.name
_ROUNDS = 50


class SweepRow(NamedTuple):
    """A row of sweep.csv: the messages of one size of a collective in a run.

    ``ranks`` is the number of ranks that exchange a message. ``time_sec`` is the time of the slowest rank, as
    a median over the repeats. ``method`` is "queued" or "single", as in probes.json.
    """

    run_id: str
    cell_id: str
    ranks: int
    bytes: int
    buckets: int
    repeats: int
    time_sec: float
    algbw_bytes_per_sec: float
    busbw_bytes_per_sec: float
    method: str
    collective: str = "all_reduce"


class FabricRow(NamedTuple):
    """A row of fabric.csv: latency α and inverse bandwidth β of a cell with a sweep.

    α and β are geometric means over the ``n`` runs with a fit; their 95 % intervals are Student's t on the
    logarithms, from three runs. ``ring_bytes_per_sec`` is 1/β: the rate on a rank's link. ``left_out_error``
    is the largest relative error of a size predicted from the other sizes, median over runs;
    ``left_out_error_large`` is the same for messages of 4 MB or more. ``reason`` explains missing values.
    """

    cell_id: str
    ranks: int
    n: int
    alpha_sec: float
    alpha_low: float
    alpha_high: float
    beta_sec_per_byte: float
    beta_low: float
    beta_high: float
    ring_bytes_per_sec: float
    left_out_error: float
    left_out_error_large: float
    reason: str


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
    left_out: Mapping[int, float]

    def worst(self, *, from_bytes: int = 0) -> float | None:
        """Return the largest error of messages of at least ``from_bytes``; None without such messages."""
        errors = [abs(error) for size, error in self.left_out.items() if size >= from_bytes]
        return max(errors, default=None)


class NoFit(str):
    """Reason why latency and bandwidth cannot be fitted to the all-reduces of a run."""


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
    return RingFit(*found, left_out)


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


def sweep_rows(study: Study) -> list[SweepRow]:
    """Return the collectives timed in all runs; malformed entries are ignored."""
    rows: list[SweepRow] = []
    for run in study.runs:
        content = read_object(f"{run.values_folder}/{_PROBES}")[0] if run.values_folder else None
        if content is not None and content.get("schema") == 1:
            for collective in _ROUNDS_OF:
                rows += _sizes(content, (run.run_id, run.cell_id), collective)
    return rows


def _sizes(content: Mapping[str, Any], ids: tuple[str, str], collective: str) -> Iterable[SweepRow]:
    swept = content.get(collective)
    if not isinstance(swept, dict):
        return
    ranks, sizes = swept.get("ranks", content.get("world_size")), swept.get("sizes")
    if not isinstance(ranks, int) or ranks < 2 or not isinstance(sizes, list):
        return
    for entry in sizes:
        try:
            size, repeats = int(entry["bytes"]), [max(map(float, one)) for one in entry["times_s"]]
            time_s, buckets = float(np.median(repeats or [nan])), int(entry.get("buckets") or 0)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            continue
        if size > 0 and isfinite(time_s) and time_s > 0:
            rate = size / time_s
            rates = (rate, rate * _ROUNDS_OF[collective] * (ranks - 1) / ranks)
            how = "queued" if swept.get("method") == "queued" else "single"
            yield SweepRow(*ids, ranks, size, buckets, len(repeats), time_s, *rates, how, collective)


def fabric_table(sweep: Iterable[SweepRow]) -> list[FabricRow]:
    """Fit latency α and inverse bandwidth β of each cell to its all-reduces, which every strategy times."""
    cells = grouped([row for row in sweep if row.collective == "all_reduce"], lambda row: row.cell_id)
    return [_cell(cell_id, rows) for cell_id, rows in cells.items()]


def _cell(cell_id: str, rows: Sequence[SweepRow]) -> FabricRow:
    ranks = rows[0].ranks
    tried = [
        fit_ring([row.bytes for row in run], [row.time_sec for row in run], ranks=ranks)
        for run in grouped(rows, lambda row: row.run_id).values()
    ]
    fits = [fit for fit in tried if isinstance(fit, RingFit)]
    reasons = dict.fromkeys(str(fit) for fit in tried if isinstance(fit, NoFit))
    alpha = _with_interval([fit.alpha_s for fit in fits])
    beta = _with_interval([fit.beta_s_per_byte for fit in fits])
    if 0 < len(fits) < MIN_RUNS:
        reasons[f"{count(len(fits), 'run')}, but an interval needs {MIN_RUNS}"] = None
    error, of_large = (_median(fit.worst(from_bytes=least) for fit in fits) for least in (0, LARGE_BYTES))
    values = (ranks, len(fits), *alpha, *beta, 1 / beta[0], error, of_large)
    return FabricRow(cell_id, *values, "; ".join(reasons))


def _with_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of ``values`` and both ends of its 95 % interval; unknown values are NaN."""
    moments = log_moments([values])
    (low,), (high,) = mean_interval(moments)
    return float(np.exp(moments.mean[0])), float(low), float(high)


def _median(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else float("nan")
