"""The rows of tables as types: the annotation of a field describes its column.

A number that was not measured is NaN; a missing text is empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_type_hints

import pandas as pd

from analysis.data.names import layout
from analysis.text import one_line
from bench.study.findings import Disturbance
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


#: Measurements of the epochs of a run that the page shows on request.
READINGS = (
    *("mfu", "gpu_util", "energy_joules", "val_loss", "peak_mem_bytes", "wire_bytes", "wire_predicted"),
    *("comm_forward", "comm_backward", "comm_end"),
)


#: Runs process the planned batch if their ratios of counted to planned samples differ from 1 by at most this.
SAME_UNIT = 0.01


#: Views of a table: the CSV file for programs, the page, Markdown and LaTeX, and the proposal.
CSV, PAGE, TEXT, PROPOSAL = "csv", "page", "text", "proposal"
_TABLES, _ALL = (CSV, PAGE, TEXT), (CSV, PAGE, TEXT, PROPOSAL)


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
    """

    meaning: str
    unit: str = ""
    views: tuple[str, ...] = (CSV,)
    heading: str = ""
    form: Callable[[Any], str] = one_line
    level: str = "wide"
    ends: str = ""
    below: Callable[[ScalingRow], str] | None = None


def _internal(meaning: str, unit: str = "") -> Column:
    return Column(meaning, unit, views=())


def _part(name: str) -> Column:
    return _internal(f"{name}, mean per step", "s")


def _end(views: tuple[str, ...], unit: str = "") -> Column:
    return Column("end of the 95 % interval", unit, views)


def _reading(meaning: str, unit: str, heading: str, form: Callable[[Any], str]) -> Column:
    return Column(f"{meaning}, mean over runs", unit, (PAGE,), heading, form, "further")


def _factor(meaning: str, heading: str, views: tuple[str, ...] = _TABLES) -> Column:
    return Column(meaning, "", views, heading, fraction, "further")


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

    launcher: Annotated[str, Column("srun, torchrun or own")]
    backend: Annotated[str, Column("nccl or gloo")]
    nodes: Annotated[int, Column("number of nodes")]
    gpus_per_node: Annotated[str, Column("ranks per node; 4+2 if nodes differ; empty if not known")]
    gpus: Annotated[int, Column("number of ranks")]
    global_batch: Annotated[float, Column("samples per step, over all ranks")]
    per_gpu_batch: Annotated[float, Column("samples per rank and micro-batch")]
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
    """One planned cell. ``swept`` is None in a table measured elsewhere."""

    cell_id: Annotated[str, Column("cell")]
    device: Annotated[str, Column("cuda or cpu")]
    ddp: Annotated[bool, Column("False for one rank that runs without DDP")]
    swept: Annotated[dict[str, Any] | None, Column("swept options")]


@dataclass(kw_only=True, eq=False)
class Measurements:
    """Measurements of a run, or of a cell as means over its runs."""

    rate: Annotated[float, _internal("throughput, even if a table does not give its batch", "samples/s")]
    unit: Annotated[float, _internal("samples counted divided by samples planned")]
    data: Annotated[float, _part("data")]
    forward: Annotated[float, _part("forward")]
    backward: Annotated[float, _part("backward")]
    optimizer: Annotated[float, _part("optimizer")]
    other: Annotated[float, _part("other")]
    transfer: Annotated[float, _part("transfer")]
    wait: Annotated[float, _part("wait")]
    exposed: Annotated[
        float, Column("exposed communication, mean per step", "s", (), "Exposed (ms)", _milliseconds)
    ]
    useful_s: Annotated[float, _internal("useful time, mean over ranks, per step", "s")]
    mfu: Annotated[float, _reading("model FLOPs utilisation of all GPUs", "", "MFU", fraction)]
    gpu_util: Annotated[float, _reading("utilisation of the GPUs", "%", "GPU (%)", three_digits)]
    energy_joules: Annotated[float, _reading("energy of all GPUs per step", "J", "Energy (J)", number)]
    val_loss: Annotated[float, _reading("validation loss at the end", "", "Validation loss", number)]
    peak_mem_bytes: Annotated[
        float, _reading("largest memory of a GPU, or of a process on CPUs", "bytes", "Memory", _bytes)
    ]
    comm_forward: Annotated[
        float, _reading("exposed communication in forward", "s", "Exposed: forward (ms)", _milliseconds)
    ]
    comm_backward: Annotated[
        float, _reading("exposed communication in backward", "s", "Exposed: backward (ms)", _milliseconds)
    ]
    comm_end: Annotated[
        float, _reading("exposed communication after backward", "s", "Exposed: end (ms)", _milliseconds)
    ]
    wire_bytes: Annotated[
        float, _reading("bytes per step that all nodes sent", "bytes", "Bytes on the wire", _bytes)
    ]
    wire_predicted: Annotated[
        float, _reading("bytes per step that the strategy needs", "bytes", "Predicted bytes", _bytes)
    ]

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
    ]
    series: Annotated[str, Column("series, as the plan names it", "", (CSV, TEXT), "Series")]
    baseline: Annotated[str, Column("size of the baseline; empty without one")]
    mode: Annotated[str, Column("strong, weak or empty, by the batches", "", (CSV, TEXT), "Mode")]
    launcher: Annotated[str, Column("srun, torchrun or own")]
    backend: Annotated[str, Column("nccl or gloo")]
    nodes: Annotated[int, Column("number of nodes", "", (CSV, TEXT, PROPOSAL), "Nodes", whole)]
    gpus_per_node: Annotated[
        str, Column("ranks per node; 4+2 if nodes differ", "", (CSV, PROPOSAL), "Ranks per node")
    ]
    gpus: Annotated[
        int, Column("number of ranks: nodes × ranks per node", "", _ALL, "Ranks", whole, below=layout)
    ]
    global_batch: Annotated[
        float, Column("samples per step of all ranks", "", _ALL, "Batch", whole, below=_batch_per_rank)
    ]
    per_gpu_batch: Annotated[
        float, Column("samples per rank and micro-batch", "", (CSV, TEXT), "Per rank", whole)
    ]
    model_parallel: Annotated[float, _internal("ranks that share one replica of the model")] = 1
    tokens_per_sample: Annotated[float, _internal("tokens of a sample, if people read rates in tokens/s")] = (
        math.nan
    )
    n: Annotated[int, Column("completed runs that were not left out", "", _ALL, "n", whole, below=_of_runs)]
    throughput_samples_per_sec: Annotated[
        float,
        Column("harmonic mean over runs", "samples/s", _ALL, "Samples/s", number, ends="throughput"),
    ]
    throughput_low: Annotated[float, _end(_TABLES, "samples/s")]
    throughput_high: Annotated[float, _end(_TABLES, "samples/s")]
    step_time_sec: Annotated[float, Column("time per global batch", "s", _ALL, "Step (ms)", _milliseconds)]
    speedup: Annotated[
        float,
        Column("T(N₀)/T(N); weak scaling: E·N/N₀", "", _ALL, "Speedup", three_digits, ends="speedup"),
    ]
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
    ]
    efficiency_low: Annotated[float, _end(_ALL)]
    efficiency_high: Annotated[float, _end(_ALL)]
    load_balance: Annotated[float, _factor("load balance: mean / longest useful time of the ranks", "LB")]
    comm_efficiency: Annotated[
        float, _factor("communication efficiency: longest useful time of a rank / step time", "CommE")
    ]
    pop_parallel_efficiency: Annotated[
        float, _factor("parallel efficiency of POP: LB · CommE", "PE", (CSV, PAGE))
    ]
    computational_scalability: Annotated[
        float,
        _factor("computational scalability: useful time per sample at the baseline / at this size", "CompS"),
    ]
    global_efficiency: Annotated[float, _factor("global efficiency: PE · CompS", "GE", (CSV, PAGE))]
    node_hours: Annotated[
        float, Column("mean cost of a run", "node-hours", _TABLES, "Node-h", three_digits, "further")
    ]
    state: Annotated[str, Column("state of the cell's runs", "", _TABLES, "State", one_line, "always")]
    reason: Annotated[
        str,
        Column(
            "remarks: missing runs, replaced baseline, neither strong nor weak scaling; else empty",
            views=(CSV, PAGE),
            heading="Remark",
            form=partial(one_line, limit=240),
            level="always",
        ),
    ]
    incremental_from: Annotated[float, Column("next smaller measured size", "ranks")]
    incremental_efficiency: Annotated[
        float,
        Column(
            "efficiency per doubling from the next smaller size; 0.75: twice the ranks are 1.5 times as fast",
            views=(CSV, PAGE),
            heading="Per doubling",
            form=fraction,
            level="further",
            below=_from_size,
        ),
    ]
    incremental_low: Annotated[float, _end((CSV,))]
    incremental_high: Annotated[float, _end((CSV,))]
    karp_flatt: Annotated[float, Column("serial fraction, for strong scaling")]
    n_disturbed: Annotated[
        int | None, Column("runs disturbed from outside their job, including those that count")
    ]
    throughput_all: Annotated[
        float, Column("throughput over all runs, including those left out", "samples/s")
    ]
    efficiency_all: Annotated[
        float,
        Column(
            "parallel efficiency over all runs, including those left out",
            views=(CSV, PAGE),
            heading="E, all runs",
            form=fraction,
            level="further",
        ),
    ]
    verdict: Annotated[
        str,
        Column(
            "efficient, at-the-guide, probable, inefficient, cannot-tell, few-runs, not-valid, baseline, "
            "no-advice, no-result",
            views=(CSV, PAGE),
            heading="Verdict",
            form=lambda kind: str(kind).replace("-", " "),
        ),
    ]

    p_guide: Annotated[
        float,
        Column("probability that the efficiency is at least 0.8", "", (CSV, PAGE), "P", fraction, "further"),
    ]
    recommended: Annotated[bool, Column("whether this is the size to use")]

    runs: Annotated[int, _internal("planned runs")]
    label_mode: Annotated[str, _internal("mode as the plan or table labels the series")]
    speedup_low: Annotated[float, _end((PAGE,))]
    speedup_high: Annotated[float, _end((PAGE,))]
    log_mean: Annotated[float, _internal("mean of the logarithms of the runs' throughputs")]
    log_variance: Annotated[float, _internal("variance of these logarithms; NaN with one run")]
    n_undisturbed: Annotated[
        int, _internal("runs that count and were not disturbed, as far as this was recorded")
    ]
    ddp: Annotated[bool, _internal("False for one rank that runs without DDP")]
    variant: Annotated[
        str, _internal("swept options without the strategy; cells of one variant do the same work")
    ]
    not_compared: Annotated[
        bool,
        _internal("no efficiency: another batch than planned, or separate trainings, here or at the base"),
    ]
    series_place: Annotated[int, _internal("number of the series in the plan")]
    cell_place: Annotated[int, _internal("number of the cell in the plan")]
    place: Annotated[int, _internal("number of the row in the table")]
    efficiency_within_node: Annotated[
        float, _internal("efficiency of one node with as many ranks, if the baseline has one node")
    ]
    efficiency_over_nodes: Annotated[float, _internal("efficiency relative to one node with as many ranks")]
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
    """The latest attempt of one planned run, with its measurements."""

    run_id: Annotated[str, Column("run")]
    cell_id: Annotated[str, Column("cell of the run")]
    repeat: Annotated[int, Column("number of the repeat, from 1")]
    state: Annotated[str, Column("state of the run")]
    reason: Annotated[str, _internal("problems of the run and of its files")]
    facts: Annotated[tuple[Finding, ...], Column("remarks: these problems, and facts about the measurements")]
    failure_class: Annotated[str | None, Column("kind of a failure")]
    job_id: Annotated[str | None, Column("Slurm job, or process")]
    allocation: Annotated[str | None, Column("job: a job of its own; pack: a job shared with other runs")]
    hosts: Annotated[str | None, Column("nodes as Slurm lists them")]
    throughput_samples_per_sec: Annotated[float, Column("samples divided by their time", "samples/s")]
    step_time_sec: Annotated[float, Column("time per global batch", "s")]
    started_at: Annotated[pd.Timestamp, Column("start, in UTC; NaT if unknown")]
    epochs: Annotated[float, Column("epochs with a throughput")]
    steps: Annotated[float, Column("optimizer steps of their throughput windows")]
    outlier: Annotated[bool, Column("far from the median of the cell's runs")]
    disturbed: Annotated[tuple[Disturbance, ...] | None, Column("disturbances; None if not recorded")]
    measured: Annotated[bool, _internal("completed with a throughput and not left out")]
    left_out: Annotated[bool, _internal("does not count because it was disturbed")]
    left_out_for: Annotated[str, _internal("the one reason for this, or disturbed")]
    wall_s: Annotated[float, _internal("time from start to end", "s")]
    most_useful_s: Annotated[float, _internal("longest useful time of a rank, per step", "s")]
    step_s: Annotated[float, _internal("time of a step of the attribution window", "s")]
    parts_known: Annotated[bool, _internal("the useful time is in seconds, not in arbitrary units")]


@cache
def columns_of(record: Hashable) -> dict[str, Column]:
    """Return the columns of a record by their names, in order; fields that are no columns are left out."""
    hints = get_type_hints(record, include_extras=True)
    return {
        name: own for name, hint in hints.items() for own in get_args(hint)[1:] if isinstance(own, Column)
    }


@cache
def dtypes_of(record: Hashable) -> dict[str, str]:
    """Return the pandas dtype of each column of a record."""
    hints = get_type_hints(record)
    return {name: _DTYPES[hints[name]] for name in columns_of(record)}


_DTYPES = {str: "str", bool: "bool", int: "int64", float: "float64", int | None: "Int64"}
_MISSING = {str: "", bool: False, int: 0, float: math.nan, pd.Timestamp: pd.NaT}


@cache
def published(record: Hashable) -> tuple[str, ...]:
    """Return the names of a record's columns that are in the table's CSV file, in order."""
    return tuple(name for name, column in columns_of(record).items() if CSV in column.views)


@cache
def missing_values(record: Hashable) -> dict[str, Any]:
    """Return the value of each column of a record that has no value."""
    hints = get_type_hints(record)
    return {name: _MISSING.get(hints[name]) for name in columns_of(record)}


def records_of(record: Callable[..., T], frame: pd.DataFrame) -> list[T]:
    """Return the rows of a frame as records; a column that the frame lacks is missing in each record."""
    names = [name for name in columns_of(record) if name in frame]
    missing = missing_values(record)
    values = [frame[name].astype(object).mask(frame[name].isna(), missing[name]).tolist() for name in names]
    return [record(**missing | dict(zip(names, own, strict=True))) for own in zip(*values, strict=True)]


def run_rows(frame: pd.DataFrame) -> list[RunRow]:
    """Return the rows of a frame of runs as records."""
    return records_of(RunRow, frame)


def frame_of_records(record: Callable[..., T], rows: Sequence[T]) -> pd.DataFrame:
    """Return records as a frame; the inverse of :func:`records_of`."""
    values = {name: [getattr(row, name) for row in rows] for name in columns_of(record)}
    return pd.DataFrame(values).astype(dtypes_of(record))


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


#: The columns of report/scaling.csv, in order.
PUBLISHED = published(ScalingRow)
