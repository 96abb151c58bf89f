"""Combine the windows of all ranks, and write the tables of a run: metrics.csv, ranks.csv and steps.csv.

The built-in workload and the recorder both produce one :class:`Window` per rank and epoch, and differ only in
how ranks exchange the windows.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..study.files import write_atomically, write_json
from ..study.layout import METRICS_COLUMNS, RANKS_COLUMNS, STEPS_COLUMNS, RunFolder
from .conditions import Usage, window_conditions
from .step_parts import DDP_ALWAYS_SAMPLED, StepParts, mean_parts

Row = dict[str, object]

#: The columns of the parts of a step.
_PART_COLUMNS = {
    "data_load_time_sec": "data_load_s",
    "forward_time_sec": "forward_s",
    "backward_time_sec": "backward_s",
    "comm_exposed_time_sec": "exposed_s",
    "optimizer_time_sec": "optimizer_s",
    "other_time_sec": "other_s",
}


@dataclass(frozen=True, slots=True)
class PopEfficiencies:
    """POP efficiencies of one window. The parallel efficiency is the product of the other two."""

    load_balance: float
    comm_efficiency: float
    parallel_efficiency: float


def pop_efficiencies(step_totals_s: Sequence[float], exposed_totals_s: Sequence[float]) -> PopEfficiencies:
    """Compute the POP efficiencies from each rank's total step time and exposed communication (s).

    U_r is the sum of (step - exposed) of rank r, and T is the largest total step time of any rank. (The sum
    of the longest time of each step would exceed the wall time.) Load balance is mean U / max U,
    communication efficiency is max U / T, and parallel efficiency is their product, mean U / T.

    Source: the POP Centre of Excellence's multiplicative model (https://pop-coe.eu/node/69), with DDP's
    exposed communication as the only time that is not useful.
    """
    useful = [step - exposed for step, exposed in zip(step_totals_s, exposed_totals_s, strict=True)]
    longest, most_useful = max(step_totals_s), max(useful)
    balance = sum(useful) / len(useful) / most_useful
    communication = most_useful / longest
    return PopEfficiencies(balance, communication, balance * communication)


@dataclass(frozen=True)
class Validation:
    """Sums over validation samples, which can be added over batches and ranks.

    ``labels`` is the number of predictions of a class, and ``values`` the number of predicted real values.
    """

    samples: float = 0.0
    loss: float = 0.0
    labels: float = 0.0
    correct: float = 0.0
    values: float = 0.0
    absolute_error: float = 0.0
    squared_error: float = 0.0


@dataclass(frozen=True)
class RankPlace:
    """The columns of ranks.csv that identify a rank. ``device_id`` is unique per physical device."""

    rank: int
    local_rank: int
    host: str
    device: str
    device_id: str


@dataclass(frozen=True)
class RankRecord:
    """The measurements of one rank in one epoch.

    ``parts`` contains the mean duration of each part of a step in the attribution window (the steps timed by
    part), or is None if there is no such window. ``samples`` and ``loss`` are None if they are unknown.
    """

    window_s: float
    loss: float | None
    peak_mem_bytes: float
    usage: Usage
    parts: StepParts | None
    wait_s: float | None
    samples: int | None


@dataclass(frozen=True)
class EpochRecord:
    """One epoch over all ranks.

    ``energy_counters`` is the number of energy counters, one per device.
    ``ideal_step_s`` is the time of a step if all devices ran at their stated peak FLOP/s. ``samples``
    is None if samples were not counted; the throughput is then empty. ``conditions`` is the epoch's
    entry in conditions.json, or None if no conditions were sampled.
    """

    epoch: int
    samples: int | None
    step_s: list[float]
    slowest_rank: list[int]
    attribution_steps: int
    ranks: list[RankRecord]
    energy_counters: int
    validation: Validation | None = None
    checkpoint_s: float | None = None
    ideal_step_s: float | None = None
    conditions: dict[str, Any] | None = None

    @property
    def window_s(self) -> float:
        """The duration of the throughput window on the slowest rank."""
        return max(rank.window_s for rank in self.ranks)


class Results:
    """Rewrite the tables and conditions.json after each epoch, so that a killed run leaves complete files."""

    def __init__(self, folder: RunFolder, places: Sequence[RankPlace]) -> None:
        self._folder = folder
        self._places = places
        self._texts = {
            folder.metrics_csv: _line(METRICS_COLUMNS),
            folder.ranks_csv: _line(RANKS_COLUMNS),
            folder.steps_csv: _line(STEPS_COLUMNS),
        }
        self._conditions: list[dict[str, Any]] = []

    def add(self, epoch: EpochRecord) -> None:
        """Add an epoch and rewrite the tables."""
        pairs = zip(epoch.step_s, epoch.slowest_rank, strict=True)
        steps: list[Row] = [
            {"epoch": epoch.epoch, "step": step, "step_time_sec": seconds, "slowest_rank": rank}
            for step, (seconds, rank) in enumerate(pairs, start=1)
        ]
        self._append(self._folder.steps_csv, STEPS_COLUMNS, steps)
        self._append(self._folder.ranks_csv, RANKS_COLUMNS, rank_rows(epoch, self._places))
        self._append(self._folder.metrics_csv, METRICS_COLUMNS, [metrics_row(epoch)])
        for path, text in self._texts.items():
            write_atomically(path, text)
        if epoch.conditions is not None:
            self._conditions.append(epoch.conditions)
            write_json(self._folder.conditions, {"schema": 1, "windows": self._conditions})

    def add_communication(self, seconds: float) -> None:
        """Set ``comm_time_sec``, which is measured once after the epochs, in every row of metrics.csv."""
        path = self._folder.metrics_csv
        rows = list(csv.DictReader(io.StringIO(self._texts[path])))
        self._texts[path] = _line(METRICS_COLUMNS)
        self._append(path, METRICS_COLUMNS, [{**row, "comm_time_sec": seconds} for row in rows])
        write_atomically(path, self._texts[path])

    def _append(self, path: Path, columns: Sequence[str], rows: Sequence[Row]) -> None:
        self._texts[path] += "".join(_line([_cell(row.get(name)) for name in columns]) for row in rows)


def progress_line(record: EpochRecord, epochs: int | None) -> str:
    """Return the line that rank 0 prints after an epoch; ``epochs`` is the total number, or None."""
    rate = "" if record.samples is None else f", {record.samples / record.window_s:.1f} samples/s"
    total = "" if epochs is None else f"/{epochs}"
    return f"bench: epoch {record.epoch}{total}: {len(record.step_s)} steps in {record.window_s:.3f} s{rate}"


def metrics_row(epoch: EpochRecord) -> Row:
    """Return the epoch's row of metrics.csv, with :data:`bench.study.layout.METRICS_COLUMNS`."""
    ranks, seconds = epoch.ranks, epoch.window_s
    row: Row = {
        "epoch": epoch.epoch,
        "steps": len(epoch.step_s),
        "samples": epoch.samples,
        "train_loss": _loss(ranks),
        "epoch_time_sec": seconds,
        "throughput_samples_per_sec": None if epoch.samples is None else epoch.samples / seconds,
        "step_time_sec_median": _quantile(epoch.step_s, 0.5),
        "step_time_sec_p95": _quantile(epoch.step_s, 0.95),
        "checkpoint_time_sec": epoch.checkpoint_s,
        "gpu_util_avg": _mean_of_known([rank.usage.gpu_percent for rank in ranks]),
        "cpu_util_avg": _mean_of_known([rank.usage.cpu_percent for rank in ranks]),
        "energy_joules": _energy(epoch),
        "peak_mem_bytes": int(max(rank.peak_mem_bytes for rank in ranks)),
        "mfu": None if epoch.ideal_step_s is None else epoch.ideal_step_s * len(epoch.step_s) / seconds,
    }
    return row | _split_columns(epoch) | _validation_columns(epoch.validation)


def _quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile; between two values it is interpolated."""
    return float(torch.tensor(values, dtype=torch.float64).quantile(share))


def rank_rows(epoch: EpochRecord, places: Sequence[RankPlace]) -> list[Row]:
    """Return the epoch's rows of ranks.csv, one per rank, with :data:`bench.study.layout.RANKS_COLUMNS`."""
    rows: list[Row] = []
    for place, rank in zip(places, epoch.ranks, strict=True):
        row: Row = {
            "epoch": epoch.epoch,
            "rank": place.rank,
            "local_rank": place.local_rank,
            "host": place.host,
            "device": place.device,
            "steps": len(epoch.step_s),
            "samples": rank.samples,
            "window_time_sec": rank.window_s,
            "peak_mem_bytes": int(rank.peak_mem_bytes),
        }
        if rank.parts is not None:
            row |= {column: getattr(rank.parts, part) for column, part in _PART_COLUMNS.items()}
            row |= {"step_time_sec": rank.parts.step_s, "comm_wait_time_sec": rank.wait_s}
        rows.append(row)
    return rows


def _split_columns(epoch: EpochRecord) -> Row:
    """Return the mean parts of a step in the attribution window, and the window's POP efficiencies."""
    parts = [rank.parts for rank in epoch.ranks if rank.parts is not None]
    waits = [rank.wait_s for rank in epoch.ranks if rank.wait_s is not None]
    if not parts:
        return {}
    row: Row = {column: _mean([getattr(p, part) for p in parts]) for column, part in _PART_COLUMNS.items()}
    steps = epoch.attribution_steps
    pop = pop_efficiencies([p.step_s * steps for p in parts], [p.exposed_s * steps for p in parts])
    return row | {
        "compute_time_sec": _mean([p.forward_s + p.backward_s for p in parts]),
        "comm_wait_time_sec": _mean(waits),
        "load_balance": pop.load_balance,
        "comm_efficiency": pop.comm_efficiency,
        "pop_parallel_efficiency": pop.parallel_efficiency,
    }


def _validation_columns(sums: Validation | None) -> Row:
    if sums is None or not sums.samples:
        return {}
    row: Row = {"val_loss": sums.loss / sums.samples}
    if sums.labels:
        row["val_accuracy"] = sums.correct / sums.labels
    if sums.values:
        row["val_mae"] = sums.absolute_error / sums.values
        row["val_rmse"] = math.sqrt(sums.squared_error / sums.values)
    return row


def _energy(epoch: EpochRecord) -> float | None:
    """Return the energy of all GPUs, or None if any counter was not read."""
    known = [rank.usage.energy_joules for rank in epoch.ranks if rank.usage.energy_joules is not None]
    return sum(known) if len(known) == epoch.energy_counters else None


def _loss(ranks: Sequence[RankRecord]) -> object:
    """Return the mean loss, None if unknown, or text for NaN, because a float NaN becomes an empty cell."""
    known = [rank.loss for rank in ranks if rank.loss is not None]
    if len(known) < len(ranks):
        return None
    mean = _mean(known)
    return mean if math.isfinite(mean) else str(mean)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _mean(known) if known else None


def _cell(value: object) -> object:
    """Format a value for a CSV file: empty if it is missing, twelve digits for a float."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return format(value, ".12g") if isinstance(value, float) else value


def _line(cells: Sequence[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


#: Later steps do not resemble the first: allocators grow in step 1, and DDP rebuilds its buckets in step 2.
_FIRST_STEPS = 2
#: Largest relative difference between the medians of both halves of the steps for a stable step time.
_STABLE_WITHIN = 0.10


def first_steps(device: torch.device) -> int:
    """Return the number of first steps that later steps do not resemble.

    On CUDA, the forward passes of steps 2 to 11 wait for the device, because DDP's logger reads the times of
    its first ten steps at any rate. The host runs ahead of the device only after them.
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
    number of steps of the attribution window during which the wall clock was set. ``window_s`` is the
    duration of the throughput window; None means the sum of its steps. ``conditions`` is the result of
    :meth:`bench.measure.conditions.Conditions.stop`.
    """

    step_s: list[float]
    samples: list[float | None]
    parts: list[StepParts | None]
    loss: float | None
    peak_mem_bytes: int
    usage: Usage
    stable: bool = True
    clock_jumps: int = 0
    window_s: float | None = None
    conditions: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the window as values for JSON, including NaN, which Python's ``json`` accepts."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Window:
        """Create a window from the result of :meth:`as_json`."""
        parts = [None if part is None else StepParts(**part) for part in content["parts"]]
        return cls(**{**content, "parts": parts, "usage": Usage(**content["usage"])})


def merge_windows(epoch: int, windows: Sequence[Window], places: Sequence[RankPlace]) -> EpochRecord:
    """Combine all ranks' windows of one epoch, keeping only steps that every rank took.

    Values of a whole host or device, such as energy, are taken from the first rank on that host or device.
    """
    steps = min(len(window.step_s) for window in windows)
    columns = list(zip(*(window.step_s[:steps] for window in windows), strict=True))
    attributed = _attributed(windows)
    least = [min(parts.exposed_s for parts in ranks) for ranks in zip(*attributed, strict=True)]
    first_on_host: dict[str, int] = {}
    first_on_device: dict[tuple[str, str], int] = {}
    for rank, place in enumerate(places):
        first_on_host.setdefault(place.host, rank)
        first_on_device.setdefault((place.host, place.device_id), rank)
    ranks = []
    for rank, (window, parts, place) in enumerate(zip(windows, attributed, places, strict=True)):
        usage = _usage(
            window.usage,
            is_first_on_host=first_on_host[place.host] == rank,
            is_first_on_device=first_on_device[place.host, place.device_id] == rank,
        )
        ranks.append(_rank_record(replace(window, usage=usage), steps, parts, least))
    samples = [rank.samples for rank in ranks if rank.samples is not None]
    return EpochRecord(
        epoch=epoch,
        samples=sum(samples) if len(samples) == len(ranks) else None,
        step_s=[max(column) for column in columns],
        slowest_rank=[column.index(max(column)) for column in columns],
        attribution_steps=len(least),
        ranks=ranks,
        energy_counters=len(first_on_device),
        conditions=window_conditions(epoch, [window.conditions for window in windows]),
    )


def count_dropped_steps(windows: Sequence[Window]) -> int:
    """Return how many steps of the attribution window are left out because a rank lacks their parts."""
    by_step = zip(*(window.parts for window in windows if window.parts), strict=False)
    return sum(any(parts is None for parts in step) for step in by_step)


def _attributed(windows: Sequence[Window]) -> list[list[StepParts]]:
    """Return the parts of each rank's attribution steps, without steps that any rank left out."""
    fewest = min(len(window.parts) for window in windows)
    counted = [step for step in range(fewest) if all(window.parts[step] is not None for window in windows)]
    return [[parts for step in counted if (parts := window.parts[step])] for window in windows]


def _rank_record(window: Window, steps: int, parts: list[StepParts], least: Sequence[float]) -> RankRecord:
    samples = [count for count in window.samples[:steps] if count is not None]
    # The wait is computed for each step before averaging, because a different rank can wait least in each
    # step.
    waits = [own.exposed_s - low for own, low in zip(parts, least, strict=True)]
    return RankRecord(
        window_s=sum(window.step_s[:steps]) if window.window_s is None else window.window_s,
        loss=window.loss,
        peak_mem_bytes=window.peak_mem_bytes,
        usage=window.usage,
        parts=mean_parts(parts) if parts else None,
        wait_s=sum(waits) / len(waits) if waits else None,
        samples=round(sum(samples)) if len(samples) == steps else None,
    )


def _usage(usage: Usage, *, is_first_on_host: bool, is_first_on_device: bool) -> Usage:
    """Return a rank's usage without the values that an earlier rank of its host or device reports."""
    return Usage(
        cpu_percent=usage.cpu_percent if is_first_on_host else None,
        gpu_percent=usage.gpu_percent if is_first_on_device else None,
        energy_joules=usage.energy_joules if is_first_on_device else None,
    )
