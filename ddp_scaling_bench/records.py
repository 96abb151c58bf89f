"""The tables of a run: each class is a CSV file, and each field a column, for all that writes or reads one.

To add a measured column, add a field here, and compute its value in :mod:`ddp_scaling_bench.measure.results`.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar


def _column(meaning: str, unit: str = "", window: str = "", *, part: str = "") -> Any:
    """Return a column, which is NaN (an empty cell) unless it is measured.

    Args:
        meaning: the meaning, for the documentation.
        unit: the unit, if the column has one.
        window: the throughput window (t), the attribution window (a), the probes (p), or after both windows.
        part: the attribute of :class:`ddp_scaling_bench.measure.step_parts.StepParts` whose mean the column
            contains.
    """
    marks = {"meaning": meaning, "unit": unit, "window": window, "part": part}
    return field(default=math.nan, metadata=marks)


def _part(meaning: str, part: str = "") -> Any:
    return _column(meaning, "s", "a", part=part)


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of a table."""


@dataclass(frozen=True, slots=True)
class StepRow(TableRow):
    """A row of steps.csv: one step of the throughput window."""

    epoch: float = _column("the row of metrics.csv that contains the step")
    step: float = _column("counted from 1")
    step_time_sec: float = _column("the longest time of any rank", "s", "t")
    slowest_rank: float = _column("the rank with this time", "", "t")


@dataclass(frozen=True, slots=True)
class RankRow(TableRow):
    """A row of ranks.csv: one rank in one epoch. The times of the parts of a step are means over steps."""

    epoch: float = _column("the row of metrics.csv that contains the rank")
    rank: float = _column("the global rank, from 0")
    local_rank: float = _column("the rank within its node, from 0")
    host: str = _column("the name of the node")
    device: str = _column("torch's name of the device, such as `cuda:0`")
    steps: float = _column("optimizer steps of the window", "", "t")
    samples: float = _column("samples of this rank", "", "t")
    window_time_sec: float = _column("the window's duration", "s", "t")
    step_time_sec: float = _column("a step", "s", "a", part="step_s")
    data_load_time_sec: float = _part("the time until the batches are on the device", "data_load_s")
    forward_time_sec: float = _part("the computation of the forward passes and of the loss", "forward_s")
    backward_time_sec: float = _part("the computation of the backward passes", "backward_s")
    comm_exposed_time_sec: float = _part("wait for communication that computation did not hide", "exposed_s")
    comm_forward_time_sec: float = _part("exposed communication in forward", "comm_forward_s")
    comm_backward_time_sec: float = _part(
        "exposed communication in backward, before its last computation", "comm_backward_s"
    )
    comm_end_time_sec: float = _part("exposed communication after backward", "comm_end_s")
    comm_wait_time_sec: float = _part("the part of the exposed time that waits for a rank that is behind")
    optimizer_time_sec: float = _part("unscale gradients, optimizer's step, clear gradients", "optimizer_s")
    other_time_sec: float = _part("the rest of the step", "other_s")
    host_time_sec: float = _part("the host's time to load data and launch a step", "host_s")
    launch_time_sec: float = _part("the same without loading data", "launch_s")
    launch_lead_time_sec: float = _column("by how much the host gets ahead of the GPU in a step", "s", "t")
    peak_mem_bytes: float = _column("peak since the start: allocated on the GPU, or resident", "bytes", "t")
    paused_time_sec: float = _column("time in the window for which the clock stood", "s", "t")


def _mean(name: str) -> Any:
    """Return the column of :class:`RankRow` with this name, as a mean over the ranks."""
    return field(default=math.nan, metadata=RankRow.__dataclass_fields__[name].metadata)


@dataclass(frozen=True, slots=True)
class EpochRow(TableRow):
    """A row of metrics.csv: one epoch of all ranks together.

    The times of the parts of a step are means over ranks and steps. ``train_loss`` can be "nan" or "inf".
    """

    epoch: float = _column("counted from 1")
    steps: float = _column("optimizer steps of the window", "", "t")
    samples: float = _column("steps × batch of a replica × replicas × micro-batches", "", "t")
    train_loss: float | str = _column("mean over steps and ranks", "", "t")
    val_loss: float = _column("mean over all ranks' validation samples", "", "after")
    val_accuracy: float = _column("share of correct classes (mlp, convnet, resnet50)", "", "after")
    val_mae: float = _column("mean absolute error (traffic)", "", "after")
    val_rmse: float = _column("root mean square error (traffic)", "", "after")
    epoch_time_sec: float = _column("the longest window of all ranks", "s", "t")
    throughput_samples_per_sec: float = _column("samples / epoch_time_sec", "1/s", "t")
    step_time_sec_median: float = _column("over the steps, each that of its slowest rank", "s", "t")
    step_time_sec_p95: float = _column("95th percentile, likewise", "s", "t")
    data_load_time_sec: float = _mean("data_load_time_sec")
    compute_time_sec: float = _part("forward + backward")
    forward_time_sec: float = _mean("forward_time_sec")
    backward_time_sec: float = _mean("backward_time_sec")
    comm_time_sec: float = _column("time per step during which at least one bucket is reduced", "s", "p")
    comm_exposed_time_sec: float = _mean("comm_exposed_time_sec")
    comm_forward_time_sec: float = _mean("comm_forward_time_sec")
    comm_backward_time_sec: float = _mean("comm_backward_time_sec")
    comm_end_time_sec: float = _mean("comm_end_time_sec")
    comm_wait_time_sec: float = _mean("comm_wait_time_sec")
    optimizer_time_sec: float = _mean("optimizer_time_sec")
    other_time_sec: float = _mean("other_time_sec")
    checkpoint_time_sec: float = _column("time that rank 0 needs to write the checkpoint", "s", "after")
    load_balance: float = _column("mean / longest useful time of the ranks", "", "a")
    comm_efficiency: float = _column("longest useful time / step time", "", "a")
    pop_parallel_efficiency: float = _column("the product of both", "", "a")
    gpu_util_avg: float = _column("from the driver's samples, mean over GPUs", "%", "t")
    cpu_util_avg: float = _column("of all cores, mean over hosts", "%", "t")
    peak_mem_bytes: float = _column("the largest value of all ranks", "bytes", "t")
    energy_joules: float = _column("energy of all GPUs, if every counter could be read", "J", "t")
    mfu: float = _column("counted FLOPs / (time × stated peak of all devices)", "", "t")
    wire_bytes_per_step: float = _column("bytes that all nodes sent to each other", "bytes", "t")
    wire_bytes_predicted_per_step: float = _column("the same, predicted for the strategy", "bytes", "t")


R = TypeVar("R", bound=TableRow)


def columns_of(record: type[TableRow]) -> tuple[str, ...]:
    """Return the names of a table's columns."""
    return tuple(one.name for one in fields(record))


def missing_columns(record: type[TableRow], header: Collection[str]) -> list[str]:
    """Return the columns that a table lacks."""
    return [name for name in columns_of(record) if name not in header]


def text_columns(record: type[TableRow]) -> tuple[str, ...]:
    """Return the columns that contain text."""
    return tuple(one.name for one in fields(record) if one.type == "str")


METRICS_COLUMNS, RANKS_COLUMNS, STEPS_COLUMNS = map(columns_of, (EpochRow, RankRow, StepRow))
#: The columns of metrics.csv that are the mean of a column of ranks.csv over the ranks.
MEAN_COLUMNS = tuple(
    one.name for one in fields(RankRow) if one.metadata["window"] == "a" and one.name in METRICS_COLUMNS
)


def header(record: type[TableRow]) -> str:
    """Return the first line of a table."""
    return ",".join(columns_of(record)) + "\n"


def csv_lines(rows: Iterable[TableRow]) -> str:
    """Return rows as lines of a CSV file: a missing value is an empty cell, a float has twelve digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([_cell(getattr(row, name)) for name in columns_of(type(row))] for row in rows)
    return text.getvalue()


def _cell(value: object) -> object:
    if not isinstance(value, float):
        return value
    return "" if math.isnan(value) else format(value, ".12g")


@dataclass(frozen=True)
class SlowCall:
    """All calls of one function from one line of the user's code.

    Attributes:
        path: the user's source file.
        line: number of the line in this file.
        function: the function that the line calls.
        calls: number of calls in the step.
        seconds: total time of these calls, minus the time of nested calls by the user's code.
        part: the part of the step whose timer covers the call, or None if no timer does.
    """

    path: str
    line: int
    function: str
    calls: int
    seconds: float
    part: str | None = None


@dataclass(frozen=True)
class SampledStep:
    """The sampled step of one rank: its duration, its collectives (None if unknown) and its slowest calls."""

    rank: int
    step_s: float
    collectives: int | None
    slow_calls: list[SlowCall]
