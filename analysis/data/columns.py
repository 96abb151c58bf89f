"""The rows of tables as types: the annotation of a field describes its column.

A number that was not measured is NaN; a missing text is empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache, partial
from operator import attrgetter
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_type_hints

from analysis.data.names import layout
from analysis.text import one_line
from bench.study.findings import Disturbance
from bench.study.ledger import RunState
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.units import MISSING, fraction, human_bytes, known, number, whole

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

#: Parts of a step: ``transfer`` is the exposed communication beyond waiting for the slowest rank.
PARTS = ("data", "forward", "backward", "optimizer", "other", "transfer", "wait")
#: Parts of a step, and of a loss, in words.
_PART_TITLES = {
    "data": "data loading",
    "optimizer": "the optimizer",
    "other": "time outside all timers",
    "transfer": "exposed communication",
    "wait": "waiting for other ranks",
    "longer": "longer computation per sample",
    "shorter": "shorter computation per sample",
}


def part_title(part: str) -> str:
    """Return a part of a step or of a loss in words."""
    return _PART_TITLES.get(part, part)


#: Runs process the planned batch if their ratios of counted to planned samples differ from 1 by at most this.
SAME_UNIT = 0.01


#: Views of a table: the CSV file for programs, the page, and the narrow tables for papers and proposals.
CSV, PAGE, TEXT = "csv", "page", "text"
_TABLES, _ALL = (CSV, PAGE), (CSV, PAGE, TEXT)


class Column(NamedTuple):
    """One column of a table.

    Attributes:
        meaning: its documentation, and the help text of its heading.
        unit: empty for a number without a unit.
        views: the views that contain the column.
        heading: its name for people. A column without one is no column of a table for people; there, its
            value is only shown as the end of an interval.
        form: returns a value as text.
        level: ``always`` shown on the page, only on a ``wide`` page, or ``further`` on request.
        ends: the columns ``NAME_low`` and ``NAME_high`` contain the interval.
        below: returns the second line of a row's cell on the page, for a column without an interval.
        source, over_epochs: the column of metrics.csv that a reading is, and how it is taken over the epochs
            of a run: ``mean`` (weighted by their steps), ``per step`` (the sum divided by the steps),
            ``last`` or ``largest``.
    """

    meaning: str
    unit: str = ""
    views: tuple[str, ...] = (CSV,)
    heading: str = ""
    form: Callable[[Any], str] = one_line
    level: str = "wide"
    ends: str = ""
    below: Callable[[ScalingRow], str] | None = None
    source: str = ""
    over_epochs: str = ""


def _internal(meaning: str, unit: str = "") -> Column:
    return Column(meaning, unit, views=())


def _part(name: str) -> Column:
    return _internal(f"{name}, mean per step", "s")


def _end(views: tuple[str, ...], unit: str = "") -> Column:
    return Column("end of the 95 % interval", unit, views)


def _reading(
    source: str,
    meaning: str,
    unit: str,
    heading: str,
    form: Callable[[Any], str],
    *,
    over_epochs: str = "mean",
) -> Column:
    meaning = f"{meaning}, mean over runs"
    return Column(meaning, unit, (PAGE,), heading, form, "further", source=source, over_epochs=over_epochs)


def _factor(meaning: str, heading: str) -> Column:
    return Column(meaning, "", _TABLES, heading, fraction, "further")


three_digits = partial(number, digits=3)


def _bytes(size: float) -> str:
    return human_bytes(size) if known(size) else MISSING


def _milliseconds(time_s: float) -> str:
    return number(1000 * time_s)


def _series_and_mode(row: ScalingRow) -> str:
    return ", ".join(dict.fromkeys(filter(None, (row.series, row.mode))))


def _batch_per_rank(row: ScalingRow) -> str:
    each = "replica" if row.model_parallel > 1 else "rank"
    return f"{whole(row.per_gpu_batch)} per {each}" if known(row.per_gpu_batch) else ""


def _of_runs(row: ScalingRow) -> str:
    return f"of {row.runs}" if row.n < row.runs else ""


def _from_size(row: ScalingRow) -> str:
    return f"from {whole(row.incremental_from)}" if known(row.incremental_from) else ""


@dataclass(kw_only=True)
class CellSize:
    """Size, batch and transport of a cell; a table measured elsewhere may not give the nodes and batches."""

    launcher: Annotated[str, Column("srun, torchrun or own")] = ""
    backend: Annotated[str, Column("nccl or gloo")] = ""
    nodes: Annotated[int, Column("number of nodes")] = 0
    gpus_per_node: Annotated[str, Column("ranks per node; 4+2 if nodes differ; empty if not known")] = ""
    gpus: Annotated[int, Column("number of ranks")] = 0
    global_batch: Annotated[float, Column("samples per step, over all ranks")] = math.nan
    per_gpu_batch: Annotated[float, Column("samples per rank and micro-batch")] = math.nan
    model_parallel: Annotated[float, _internal("ranks that share one replica of the model")] = 1
    tokens_per_sample: Annotated[float, _internal("tokens of a sample, if people read rates in tokens/s")] = (
        math.nan
    )

    @property
    def batch_per_replica(self) -> float:
        """Samples per step of one replica of the model."""
        return self.global_batch * self.model_parallel / self.gpus


@dataclass(kw_only=True)
class CellRow(CellSize):
    """One planned cell.

    Attributes:
        device: ``cuda`` or ``cpu``.
        ddp: False for one rank that runs without DDP.
        swept: the swept options; None in a table measured elsewhere.
    """

    cell_id: str
    device: str = ""
    ddp: bool = True
    swept: dict[str, Any] | None = None


class Member(NamedTuple):
    """A cell in a series, with the mode by which the plan or the table labels the series."""

    cell_id: str
    series: str
    mode: str


@dataclass(kw_only=True, eq=False)
class Measurements:
    """Measurements of a run, or of a cell as means over its runs."""

    rate: Annotated[float, _internal("throughput, even if a table does not give its batch", "samples/s")] = (
        math.nan
    )
    unit: Annotated[float, _internal("samples counted divided by samples planned")] = math.nan
    data: Annotated[float, _part("data")] = math.nan
    forward: Annotated[float, _part("forward")] = math.nan
    backward: Annotated[float, _part("backward")] = math.nan
    optimizer: Annotated[float, _part("optimizer")] = math.nan
    other: Annotated[float, _part("other")] = math.nan
    transfer: Annotated[float, _part("transfer")] = math.nan
    wait: Annotated[float, _part("wait")] = math.nan
    exposed: Annotated[
        float, Column("exposed communication, mean per step", "s", (), "Exposed (ms)", _milliseconds)
    ] = math.nan
    useful_s: Annotated[float, _internal("useful time, mean over ranks, per step", "s")] = math.nan
    mfu: Annotated[float, _reading("mfu", "model FLOPs utilisation of all GPUs", "", "MFU", fraction)] = (
        math.nan
    )
    gpu_util: Annotated[
        float, _reading("gpu_util_avg", "utilisation of the GPUs", "%", "GPU (%)", three_digits)
    ] = math.nan
    energy_joules: Annotated[
        float,
        _reading(
            "energy_joules", "energy of all GPUs per step", "J", "Energy (J)", number, over_epochs="per step"
        ),
    ] = math.nan
    val_loss: Annotated[
        float,
        _reading("val_loss", "validation loss at the end", "", "Validation loss", number, over_epochs="last"),
    ] = math.nan
    peak_mem_bytes: Annotated[
        float,
        _reading(
            "peak_mem_bytes",
            "largest memory of a GPU, or of a process on CPUs",
            "bytes",
            "Memory",
            _bytes,
            over_epochs="largest",
        ),
    ] = math.nan
    comm_forward: Annotated[
        float,
        _reading(
            "comm_forward_time_sec",
            "exposed communication in forward",
            "s",
            "Exposed: forward (ms)",
            _milliseconds,
        ),
    ] = math.nan
    comm_backward: Annotated[
        float,
        _reading(
            "comm_backward_time_sec",
            "exposed communication in backward",
            "s",
            "Exposed: backward (ms)",
            _milliseconds,
        ),
    ] = math.nan
    comm_end: Annotated[
        float,
        _reading(
            "comm_end_time_sec",
            "exposed communication after backward",
            "s",
            "Exposed: end (ms)",
            _milliseconds,
        ),
    ] = math.nan
    wire_bytes: Annotated[
        float,
        _reading(
            "wire_bytes_per_step", "bytes per step that all nodes sent", "bytes", "Bytes on the wire", _bytes
        ),
    ] = math.nan
    wire_predicted: Annotated[
        float,
        _reading(
            "wire_bytes_predicted_per_step",
            "bytes per step that the strategy needs",
            "bytes",
            "Predicted bytes",
            _bytes,
        ),
    ] = math.nan

    @property
    def other_batch(self) -> bool:
        """True if another batch than planned was processed."""
        return abs(self.unit - 1) > SAME_UNIT


@dataclass(kw_only=True, eq=False)
class ScalingRow(Measurements):
    """One cell in one series, as a row of the scaling table.

    ``base`` is the row of the baseline, ``facts`` are the reasons in ``reason``, and ``several`` is True if
    several sizes of the series have as many ranks.
    """

    cell_id: Annotated[
        str,
        Column("cell and its series", "", (CSV, PAGE), "Cell", level="always", below=_series_and_mode),
    ] = ""
    series: Annotated[str, Column("series, as the plan names it")] = ""
    baseline: Annotated[str, Column("size of the baseline; empty without one")] = ""
    mode: Annotated[str, Column("strong, weak or empty, by the batches")] = ""
    launcher: Annotated[str, Column("srun, torchrun or own")] = ""
    backend: Annotated[str, Column("nccl or gloo")] = ""
    nodes: Annotated[int, Column("number of nodes", "", (CSV, TEXT), "Nodes", whole)] = 0
    gpus_per_node: Annotated[str, Column("ranks per node; 4+2 if nodes differ")] = ""
    gpus: Annotated[
        int, Column("number of ranks: nodes × ranks per node", "", _ALL, "Ranks", whole, below=layout)
    ] = 0
    global_batch: Annotated[
        float, Column("samples per step of all ranks", "", _ALL, "Batch", whole, below=_batch_per_rank)
    ] = math.nan
    per_gpu_batch: Annotated[float, Column("samples per rank and micro-batch")] = math.nan
    model_parallel: Annotated[float, _internal("ranks that share one replica of the model")] = 1
    tokens_per_sample: Annotated[float, _internal("tokens of a sample, if people read rates in tokens/s")] = (
        math.nan
    )
    n: Annotated[
        int, Column("completed runs that were not left out", "", _ALL, "n", whole, below=_of_runs)
    ] = 0
    throughput_samples_per_sec: Annotated[
        float,
        Column("harmonic mean over runs", "samples/s", _ALL, "Samples/s", number, ends="throughput"),
    ] = math.nan
    throughput_low: Annotated[float, _end(_TABLES, "samples/s")] = math.nan
    throughput_high: Annotated[float, _end(_TABLES, "samples/s")] = math.nan
    step_time_sec: Annotated[
        float, Column("time per global batch", "s", _TABLES, "Step (ms)", _milliseconds)
    ] = math.nan
    speedup: Annotated[
        float,
        Column("T(N₀)/T(N); weak scaling: E·N/N₀", "", _ALL, "Speedup", three_digits, ends="speedup"),
    ] = math.nan
    efficiency: Annotated[
        float,
        Column(
            "parallel efficiency; strong scaling: S·N₀/N, weak scaling: T(N₀)/T(N)",
            views=_ALL,
            heading="Efficiency",
            form=fraction,
            level="always",
            ends="efficiency",
        ),
    ] = math.nan
    efficiency_low: Annotated[float, _end(_TABLES)] = math.nan
    efficiency_high: Annotated[float, _end(_TABLES)] = math.nan
    load_balance: Annotated[float, _factor("load balance: mean / longest useful time of the ranks", "LB")] = (
        math.nan
    )
    comm_efficiency: Annotated[
        float, _factor("communication efficiency: longest useful time of a rank / step time", "CommE")
    ] = math.nan
    pop_parallel_efficiency: Annotated[float, _factor("parallel efficiency of POP: LB · CommE", "PE")] = (
        math.nan
    )
    computational_scalability: Annotated[
        float,
        _factor("computational scalability: useful time per sample at the baseline / at this size", "CompS"),
    ] = math.nan
    global_efficiency: Annotated[float, _factor("global efficiency: PE · CompS", "GE")] = math.nan
    node_hours: Annotated[
        float, Column("mean cost of a run", "node-hours", _TABLES, "Node-h", three_digits, "further")
    ] = math.nan
    state: Annotated[str, Column("state of the cell's runs", "", _TABLES, "State", one_line, "always")] = ""
    reason: Annotated[
        str,
        Column(
            "remarks: missing runs, replaced baseline, neither strong nor weak scaling; else empty",
            views=_TABLES,
            heading="Remark",
            form=partial(one_line, limit=240),
            level="always",
        ),
    ] = ""
    incremental_from: Annotated[float, Column("next smaller measured size", "ranks")] = math.nan
    incremental_efficiency: Annotated[
        float,
        Column(
            "efficiency per doubling from the next smaller size; 0.75: twice the ranks are 1.5 times as fast",
            views=_TABLES,
            heading="Per doubling",
            form=fraction,
            level="further",
            below=_from_size,
        ),
    ] = math.nan
    incremental_low: Annotated[float, _end((CSV,))] = math.nan
    incremental_high: Annotated[float, _end((CSV,))] = math.nan
    karp_flatt: Annotated[float, Column("serial fraction, for strong scaling")] = math.nan
    n_disturbed: Annotated[
        int | None, Column("runs disturbed from outside their job, including those that count")
    ] = None
    throughput_all: Annotated[
        float, Column("throughput over all runs, including those left out", "samples/s")
    ] = math.nan
    efficiency_all: Annotated[
        float,
        Column(
            "parallel efficiency over all runs, including those left out",
            views=_TABLES,
            heading="E, all runs",
            form=fraction,
            level="further",
        ),
    ] = math.nan
    verdict: Annotated[
        str,
        Column(
            "efficient, at-the-guide, probable, inefficient, cannot-tell, few-runs, not-valid, baseline, "
            "no-advice, no-result",
            views=_TABLES,
            heading="Verdict",
            form=lambda kind: str(kind).replace("-", " "),
        ),
    ] = ""

    p_guide: Annotated[
        float,
        Column("probability that the efficiency is at least 0.8", "", _TABLES, "P", fraction, "further"),
    ] = math.nan
    recommended: Annotated[bool, Column("whether this is the size to use")] = False

    runs: Annotated[int, _internal("planned runs")] = 0
    label_mode: Annotated[str, _internal("mode as the plan or table labels the series")] = ""
    speedup_low: Annotated[float, _end((PAGE,))] = math.nan
    speedup_high: Annotated[float, _end((PAGE,))] = math.nan
    log_mean: Annotated[float, _internal("mean of the logarithms of the runs' throughputs")] = math.nan
    log_variance: Annotated[float, _internal("variance of these logarithms; NaN with one run")] = math.nan
    n_undisturbed: Annotated[
        int, _internal("runs that count and were not disturbed, as far as this was recorded")
    ] = 0
    ddp: Annotated[bool, _internal("False for one rank that runs without DDP")] = False
    variant: Annotated[
        str, _internal("swept options without the strategy; cells of one variant do the same work")
    ] = ""
    not_compared: Annotated[
        bool,
        _internal("no efficiency: another batch than planned, or separate trainings, here or at the base"),
    ] = False
    series_place: Annotated[int, _internal("number of the series in the plan")] = 0
    cell_place: Annotated[int, _internal("number of the cell in the plan")] = 0
    place: Annotated[int, _internal("number of the row in the table")] = 0
    efficiency_within_node: Annotated[
        float, _internal("efficiency of one node with as many ranks, if the baseline has one node")
    ] = math.nan
    efficiency_over_nodes: Annotated[
        float, _internal("efficiency relative to one node with as many ranks")
    ] = math.nan
    several: bool = False
    facts: tuple[Finding, ...] = ()
    base: ScalingRow | None = None

    @property
    def batch_per_replica(self) -> float:
        """Samples per step of one replica of the model."""
        return self.global_batch * self.model_parallel / self.gpus

    @property
    def is_base(self) -> bool:
        """True if the row is the baseline of its series."""
        return self.base is not None and self.base.place == self.place


@dataclass(kw_only=True, eq=False)
class RunRow(Measurements):
    """One attempt of a planned run: its state in the ledger, its folder, and its measurements.

    ``load_study`` makes it, and :func:`analysis.stats.measured.measure` completes the measurements of a
    latest attempt. Measurements that it does not have are NaN.

    Attributes:
        attempt: number of the attempt; None if the run was not started.
        reason: problems of the run and of its files.
        allocation: ``job`` (the run had its own job), or ``pack`` (it shared its job with other runs).
        started_at, ended_at: times in UTC; None if unknown.
        disturbed: a tuple of disturbances; None if disturbances were not recorded.
        hosts: the nodes as Slurm lists them (``n[1-4]``); empty if unknown.
        evidence: the log lines that `bench doctor` found, each with its cause.
        cause: the first cause that `bench doctor` found in the logs of a failed run.
        folder: the folder of the attempt; None if there is none.
        values_folder: the same, but None also if the measured values of a completed run were changed or lost.
        latest: False for an attempt that was followed by another one.
        facts: ``reason``, and facts about the measurements.
        measured: the run counts: it completed with a throughput and was not left out.
        left_out, left_out_for: it does not count because it was disturbed, and the one reason for this.
        outlier: it is far from the median of the cell's runs.
        throughput_samples_per_sec: samples divided by their time.
        step_time_sec: time per global batch (s).
        epochs, steps, samples, window_s: epochs with a throughput, and the steps, samples and seconds of
            their throughput windows.
        least_s: the least time of the steps that a command reports, each value being of one step (s).
        wall_s: time from start to end (s). ``node_hours`` are those of this time.
        most_useful_s, step_s: longest useful time of a rank, and time of a step, of the attribution window
            (s).
        parts_known: the useful time is in seconds, not in arbitrary units.
    """

    run_id: str
    cell_id: str
    repeat: int
    order: int
    attempt: int | None = None
    state: str = str(RunState.PLANNED)
    reason: str = ""
    failure_class: str | None = None
    exit_code: int | None = None
    job_id: str | None = None
    allocation: str | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    disturbed: tuple[Disturbance, ...] | None = None
    hosts: str | None = None
    evidence: tuple[str, ...] = ()
    cause: str | None = None
    folder: str | None = None
    values_folder: str | None = None
    latest: bool = True
    facts: tuple[Finding, ...] = ()
    measured: bool = False
    left_out: bool = False
    left_out_for: str = ""
    outlier: bool = False
    throughput_samples_per_sec: float = math.nan
    step_time_sec: float = math.nan
    epochs: float = math.nan
    steps: float = math.nan
    samples: float = math.nan
    window_s: float = math.nan
    least_s: float = math.nan
    wall_s: float = math.nan
    node_hours: float = math.nan
    most_useful_s: float = math.nan
    step_s: float = math.nan
    parts_known: bool = False


@cache
def columns_of(record: Hashable) -> dict[str, Column]:
    """Return the columns of a record by their names, in order; fields that are no columns are left out."""
    hints = get_type_hints(record, include_extras=True)
    return {
        name: own for name, hint in hints.items() for own in get_args(hint)[1:] if isinstance(own, Column)
    }


@cache
def published(record: Hashable) -> tuple[str, ...]:
    """Return the names of a record's columns that are in the table's CSV file, in order."""
    return tuple(name for name, column in columns_of(record).items() if CSV in column.views)


def table_of(rows: Sequence[Any], names: Iterable[str]) -> dict[str, list[Any]]:
    """Return some attributes of records as columns, to be written as CSV."""
    return {name: [*map(attrgetter(name), rows)] for name in names}


def distinct(names: Iterable[str]) -> tuple[str, ...]:
    """Return the different names in the order of their first use."""
    return tuple(dict.fromkeys(names))


def grouped(rows: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the rows of each key, in their order."""
    found: dict[K, list[T]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def by_series(rows: Iterable[ScalingRow]) -> dict[str, list[ScalingRow]]:
    """Return the rows of each series, in the order of the table."""
    return grouped(rows, lambda row: row.series)


def first_of_cells(rows: Iterable[ScalingRow]) -> list[ScalingRow]:
    """Return the first row of each cell."""
    found: dict[str, ScalingRow] = {}
    for row in rows:
        found.setdefault(row.cell_id, row)
    return list(found.values())


#: Measurements of the epochs of a run that the page shows on request.
READINGS = {name: column for name, column in columns_of(Measurements).items() if column.source}
#: The columns of report/scaling.csv, in order.
PUBLISHED = published(ScalingRow)
