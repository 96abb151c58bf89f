"""Combine the windows of all ranks, and write the tables of a run: metrics.csv, ranks.csv and steps.csv.

The recorder produces one :class:`Window` per rank and epoch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import fmean, median
from typing import Any

import torch

from ..files import write_atomically
from ..records import MEAN_COLUMNS, EpochRow, RankRow, StepRow, TableRow, csv_lines, header
from ..run_folder import RunFolder
from .conditions import Usage, window_conditions
from .env_file import write_conditions
from .step_parts import DDP_ALWAYS_SAMPLED, StepParts, mean_parts
from .wire import WireBytes

#: The columns of ranks.csv with the parts of a step, and the attributes of :class:`StepParts`.
_PART_COLUMNS = {one.name: one.metadata["part"] for one in fields(RankRow) if one.metadata["part"]}


@dataclass(frozen=True)
class RankPlace:
    """The columns of ranks.csv that identify a rank. ``device_id`` is unique per physical device."""

    rank: int
    local_rank: int
    host: str
    device: str
    device_id: str


#: The rows of one epoch, and its entry in conditions.json (None if no conditions were sampled).
Epoch = tuple[EpochRow, list[RankRow], list[StepRow], dict[str, Any] | None]


class Results:
    """Rewrite the tables and conditions.json after each epoch, so that a killed run leaves complete files."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        tables = {folder.ranks_csv: RankRow, folder.steps_csv: StepRow}
        self._texts = {path: header(record) for path, record in tables.items()}
        self._epochs: list[EpochRow] = []
        self._columns: dict[int | None, dict[str, float]] = {}  # by epoch: what only the program knows
        self._conditions: list[dict[str, Any]] = []

    def add(self, epoch: Epoch) -> None:
        """Add an epoch and rewrite the tables."""
        row, ranks, steps, conditions = epoch
        self._epochs.append(row)
        self._write_epochs()
        tables: tuple[Sequence[TableRow], ...] = (ranks, steps)
        for path, rows in zip(self._texts, tables, strict=True):
            self._texts[path] += csv_lines(rows)
            write_atomically(path, self._texts[path])
        if conditions is not None:
            self._conditions.append(conditions)
            write_conditions(self._folder, self._conditions)

    def set_columns(self, epoch: int | None, columns: Mapping[str, float]) -> None:
        """Set values in an epoch's row of metrics.csv, which can follow later, or (None) in every row."""
        self._columns.setdefault(epoch, {}).update(columns)
        if self._epochs:
            self._write_epochs()

    @property
    def last_row(self) -> EpochRow | None:
        """The last row of metrics.csv."""
        return self._rows()[-1] if self._epochs else None

    def _rows(self) -> list[EpochRow]:
        known, everywhere = self._columns, self._columns.get(None, {})
        return [replace(row, **everywhere | known.get(int(row.epoch), {})) for row in self._epochs]

    def _write_epochs(self) -> None:
        write_atomically(self._folder.metrics_csv, header(EpochRow) + csv_lines(self._rows()))


def progress_line(row: EpochRow, epochs: int | None) -> str:
    """Return the line that rank 0 prints after an epoch; ``epochs`` is the total number, or None."""
    seconds, rate = row.epoch_time_sec, row.throughput_samples_per_sec
    speed = "" if math.isnan(rate) else f", {rate:.1f} samples/s"
    total = "" if epochs is None else f"/{epochs}"
    return f"bench: epoch {row.epoch}{total}: {row.steps} steps in {seconds:.3f} s{speed}"


#: Later steps do not resemble the first: allocators grow in step 1, and DDP rebuilds its buckets in step 2.
_FIRST_STEPS = 2
#: Largest relative difference between the medians of both halves of the steps for a stable step time.
_STABLE_WITHIN = 0.10


def first_steps(device: torch.device) -> int:
    """Return the number of first steps that later steps do not resemble.

    On CUDA, the host runs ahead only after step 11: DDP's logger reads the times of its first ten steps.
    """
    return DDP_ALWAYS_SAMPLED + 1 if device.type == "cuda" else _FIRST_STEPS


def is_stable(step_s: Sequence[float], *, first: int = _FIRST_STEPS, prepares: bool = False) -> bool:
    """Return whether the median step times of both halves agree; the ``first`` steps are left out.

    If files are written within the final step (``prepares``), it is left out, too, unless too few remain.
    """
    few = len(step_s) < first + 3
    kept = step_s[first : None if few or not prepares else -1]
    half = len(kept) // 2
    if half < 1:
        return False
    earlier, later = median(kept[-2 * half : -half]), median(kept[-half:])
    return abs(later / earlier - 1) <= _STABLE_WITHIN


def fewest_warmup_steps(steps: int, device: torch.device) -> int:
    """Return ``steps``, and on CUDA more, so that equally many follow the :func:`first_steps`."""
    return steps + first_steps(device) - _FIRST_STEPS


@dataclass(frozen=True)
class Window:
    """One rank's throughput window (steps timed as a whole), then its attribution window (timed by part).

    ``step_s`` and ``samples`` have one entry per step of the throughput window. ``parts`` has one entry per
    step of the attribution window, which is None for a step that is left out. ``loss`` is the mean of the
    known losses. ``stable`` is true if the step time was stable after the warm-up. ``clock_jumps`` is the
    number of steps of the attribution window during which the wall clock was set. ``micro_batches``
    is the number of forward passes per step, or None if it is unknown. ``conditions`` is the result of
    :meth:`ddp_scaling_bench.measure.conditions.Conditions.stop`. ``paused_s`` is the time for which the clock
    stood within the throughput window. ``first_waits_s`` are the waits for the first batch of each loop that
    begins in this window; ``restarts_workers`` is true if the loader starts its workers anew for each loop.
    ``lead_s`` is the time by which the host gets further ahead of the device in a step of the second half.
    ``side_s`` is the time per step, within ``step_s``, for which only other streams worked. ``host_waits``
    is the number of waits for the device in a step of the loop, or None if it is unknown.
    """

    step_s: list[float]
    samples: list[float | None]
    parts: list[StepParts | None]
    loss: float | None
    peak_mem_bytes: int
    usage: Usage
    stable: bool = True
    clock_jumps: int = 0
    micro_batches: float | None = None
    conditions: dict[str, Any] | None = None
    paused_s: float = 0.0
    first_waits_s: list[float] = field(default_factory=list)
    restarts_workers: bool = False
    lead_s: float = math.nan
    side_s: float = 0.0
    host_waits: int | None = None

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Window:
        """Create a window from the result of :func:`dataclasses.asdict`."""
        parts = [None if part is None else StepParts(**part) for part in content["parts"]]
        return cls(**{**content, "parts": parts, "usage": Usage(**content["usage"])})


def merge_windows(
    epoch: int,
    windows: Sequence[Window],
    places: Sequence[RankPlace],
    *,
    model_parallel: int = 1,
    ideal_step_s: float | None = None,
    wire: WireBytes | None = None,
) -> Epoch:
    """Combine all ranks' windows of one epoch, keeping only steps that every rank took.

    ``model_parallel`` ranks share a replica of the model, and train on the same samples.
    ``ideal_step_s`` is the time of a step if all devices ran at their stated peak FLOP/s.
    """
    count = min(len(window.step_s) for window in windows)
    times = zip(*(window.step_s[:count] for window in windows), strict=True)
    steps = [StepRow(epoch, step, max(one), one.index(max(one))) for step, one in enumerate(times, start=1)]
    attributed = _attributed(windows)
    least = [min(parts.exposed_s for parts in ranks) for ranks in zip(*attributed, strict=True)]
    ranks = [
        _rank_row(epoch, place, window, count, parts, least)
        for place, window, parts in zip(places, windows, attributed, strict=True)
    ]
    seconds = max(rank.window_time_sec for rank in ranks)
    samples = samples_of_all([rank.samples for rank in ranks], model_parallel)
    quantiles = torch.tensor([step.step_time_sec for step in steps], dtype=torch.float64).quantile
    found = [window.conditions for window in windows]
    row = EpochRow(
        epoch=epoch,
        steps=count,
        samples=samples,
        train_loss=_loss(windows),
        epoch_time_sec=seconds,
        throughput_samples_per_sec=samples / seconds,
        step_time_sec_median=float(quantiles(0.5)),
        step_time_sec_p95=float(quantiles(0.95)),
        peak_mem_bytes=max(rank.peak_mem_bytes for rank in ranks),
        mfu=math.nan if ideal_step_s is None else ideal_step_s * count / seconds,
        **({} if wire is None else wire.columns(found, count, windows[0].micro_batches)),
        **_split_columns(ranks),
        **_usage_columns(windows, places),
    )
    return row, ranks, steps, window_conditions(epoch, found)


def samples_of_all(counts: Sequence[float], model_parallel: int) -> float:
    """Return the number of samples of all ranks; NaN if it is unknown.

    Of the ``model_parallel`` ranks of a replica, one, some or all count the same samples: all that share its
    tensors, or those of the first and the last stage of its pipeline; others count none. The result is also
    NaN if some number of samples does not occur equally often for each replica.
    """
    if model_parallel == 1:
        return sum(counts)
    counted = [count for count in counts if count > 0]
    times, rest = divmod(len(counted), len(counts) // model_parallel)
    if not times or rest or any(number % times for number in Counter(counted).values()):
        return math.nan
    return sum(counted) / times


def _attributed(windows: Sequence[Window]) -> list[list[StepParts]]:
    """Return the parts of each rank's attribution steps, without steps that any rank left out."""
    fewest = min(len(window.parts) for window in windows)
    counted = [step for step in range(fewest) if all(window.parts[step] is not None for window in windows)]
    return [[parts for step in counted if (parts := window.parts[step])] for window in windows]


def _rank_row(
    epoch: int, place: RankPlace, window: Window, steps: int, parts: list[StepParts], least: Sequence[float]
) -> RankRow:
    samples = [count for count in window.samples[:steps] if count is not None]
    # for each step before averaging: a different rank can wait least in each step
    waits = [own.exposed_s - low for own, low in zip(parts, least, strict=True)]
    mean = mean_parts(parts) if parts else None
    own: dict[str, Any] = {name: getattr(mean, part, math.nan) for name, part in _PART_COLUMNS.items()}
    own |= {name: getattr(place, name) for name in ("rank", "local_rank", "host", "device")}
    return RankRow(
        epoch=epoch,
        **own,
        steps=steps,
        samples=round(sum(samples)) if len(samples) == steps else math.nan,
        window_time_sec=sum(window.step_s[:steps]),
        comm_wait_time_sec=sum(waits) / len(waits) if waits else math.nan,
        launch_lead_time_sec=window.lead_s,
        peak_mem_bytes=window.peak_mem_bytes,
        paused_time_sec=window.paused_s,
    )


def _split_columns(ranks: Sequence[RankRow]) -> dict[str, float]:
    """Return the mean parts of a step in the attribution window, and the window's POP efficiencies.

    U is a rank's time of a step without exposed communication, and T the largest time of a step of any rank.
    Load balance is mean U / max U, communication efficiency is max U / T, and parallel efficiency is their
    product. Source: the POP Centre of Excellence's multiplicative model (https://pop-coe.eu/node/69), with
    exposed communication as the only time that is not useful.
    """
    means = {name: fmean(getattr(rank, name) for rank in ranks) for name in MEAN_COLUMNS}
    useful = [rank.step_time_sec - rank.comm_exposed_time_sec for rank in ranks]
    balance, longest = fmean(useful) / max(useful), max(rank.step_time_sec for rank in ranks)
    return {
        **means,
        "compute_time_sec": means["forward_time_sec"] + means["backward_time_sec"],
        "load_balance": balance,
        "comm_efficiency": max(useful) / longest,
        "pop_parallel_efficiency": balance * (max(useful) / longest),
    }


def _usage_columns(windows: Sequence[Window], places: Sequence[RankPlace]) -> dict[str, float]:
    """Return the usage; a value of a whole host or device is that of the first rank there."""
    pairs = list(zip(places, windows, strict=True))[::-1]
    hosts = {place.host: window.usage for place, window in pairs}
    devices = {(place.host, place.device_id): window.usage for place, window in pairs}
    joules = [usage.energy_joules for usage in devices.values()]
    known = [one for one in joules if one is not None]
    return {
        "gpu_util_avg": _mean_of_known([usage.gpu_percent for usage in devices.values()]),
        "cpu_util_avg": _mean_of_known([usage.cpu_percent for usage in hosts.values()]),
        "energy_joules": sum(known) if len(known) == len(joules) else math.nan,
    }


def _mean_of_known(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return fmean(known) if known else math.nan


def _loss(windows: Sequence[Window]) -> float | str:
    """Return the mean loss, NaN if unknown, or text if it is not finite."""
    known = [window.loss for window in windows if window.loss is not None]
    mean = sum(known) / len(known) if known else math.nan
    return math.nan if len(known) < len(windows) else mean if math.isfinite(mean) else str(mean)
