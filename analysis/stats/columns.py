"""Schema of the scaling table: its columns with type, unit and meaning.

One row is one cell in one series. A value that was not measured is NaN; a missing text is empty.
"""

from __future__ import annotations

from typing import NamedTuple


class Column(NamedTuple):
    """One column: name, pandas dtype, meaning and unit."""

    name: str
    dtype: str
    meaning: str
    unit: str = ""


#: Parts of a step: ``transfer`` is the exposed communication beyond waiting for the slowest rank.
PARTS = ("data", "forward", "backward", "optimizer", "other", "transfer", "wait")
#: Measurements of the epochs of a run that the page shows on request.
READINGS = ("mfu", "gpu_util", "energy_joules", "val_loss")
#: Size of a cell. ``gpus_per_node`` is empty if a table measured elsewhere does not give the nodes.
SIZE_COLUMNS = ("nodes", "gpus_per_node", "gpus", "global_batch", "per_gpu_batch")
#: Columns about the incremental efficiency, that of a size relative to the next smaller size.
INCREMENT_COLUMNS = ("incremental_from", "incremental_efficiency", "incremental_low", "incremental_high")

_PUBLISHED = (
    Column("cell_id", "str", "cell; a cell of two series has one row for each series"),
    Column("series", "str", "series, as the plan names it"),
    Column("baseline", "str", "size of the baseline; empty without one"),
    Column(
        "mode",
        "str",
        "strong if the global batch is constant in the series, weak if the batch per rank is; else empty",
    ),
    Column("launcher", "str", "srun or torchrun"),
    Column("backend", "str", "nccl or gloo"),
    Column("nodes", "int64", "number of nodes"),
    Column("gpus_per_node", "str", "ranks per node; 4+2 if nodes differ"),
    Column("gpus", "int64", "number of ranks"),
    Column("global_batch", "int64", "samples per step, over all ranks"),
    Column("per_gpu_batch", "int64", "samples per rank and micro-batch"),
    Column("n", "int64", "runs that count: they completed with a throughput and were not left out"),
    Column("throughput_samples_per_sec", "float64", "harmonic mean over runs", "samples/s"),
    Column("throughput_low", "float64", "lower end of the throughput's 95 % interval", "samples/s"),
    Column("throughput_high", "float64", "upper end of the throughput's 95 % interval", "samples/s"),
    Column("step_time_sec", "float64", "mean time per global batch", "s"),
    Column("speedup", "float64", "speedup; for weak scaling the scaled speedup"),
    Column("efficiency", "float64", "parallel efficiency"),
    Column("efficiency_low", "float64", "lower end of the efficiency's 95 % interval"),
    Column("efficiency_high", "float64", "upper end of the efficiency's 95 % interval"),
    Column("load_balance", "float64", "mean useful time of the ranks divided by the longest useful time"),
    Column("comm_efficiency", "float64", "longest useful time of a rank divided by the step time"),
    Column("pop_parallel_efficiency", "float64", "load balance times communication efficiency"),
    Column("computational_scalability", "float64", "useful time per sample at the baseline / at this size"),
    Column("global_efficiency", "float64", "parallel efficiency times computational scalability"),
    Column("node_hours", "float64", "mean cost of a run", "node-hours"),
    Column("state", "str", "state of the cell's runs"),
    Column(
        "reason",
        "str",
        "remarks: missing runs, replaced baseline, neither strong nor weak scaling; empty without remarks",
    ),
)
_PUBLISHED_LATER = (
    Column("incremental_from", "float64", "next smaller measured size", "ranks"),
    Column("incremental_efficiency", "float64", "efficiency per doubling from the next smaller size"),
    Column("incremental_low", "float64", "lower end of the incremental efficiency's 95 % interval"),
    Column("incremental_high", "float64", "upper end of the incremental efficiency's 95 % interval"),
    Column("karp_flatt", "float64", "serial fraction, for strong scaling"),
    Column("n_disturbed", "Int64", "runs disturbed from outside their job, including those that count"),
    Column("throughput_all", "float64", "throughput over all runs, including those left out", "samples/s"),
    Column("efficiency_all", "float64", "parallel efficiency over all runs, including those left out"),
)
_INTERNAL = (
    Column("runs", "int64", "planned runs"),
    Column("label_mode", "str", "mode as the plan or table labels the series"),
    Column("base_place", "Int64", "index label of the baseline's row"),
    Column("base_cell", "str", "cell_id of the baseline"),
    Column("base_gpus", "Int64", "ranks of the baseline"),
    Column("is_base", "bool", "the row is the baseline of its series"),
    Column("speedup_low", "float64", "lower end of the speedup's 95 % interval"),
    Column("speedup_high", "float64", "upper end of the speedup's 95 % interval"),
    Column("efficiency_error", "float64", "standard error of the logarithm of the efficiency"),
    Column("n_undisturbed", "int64", "runs that count and were not disturbed, as far as this was recorded"),
    Column("ddp", "bool", "False for one rank that runs without DDP"),
    Column("variant", "str", "swept options without ddp; cells of one variant do the same work"),
    Column("unit", "float64", "samples counted by the runs divided by samples planned"),
    Column("other_unit", "bool", "unit differs from the baseline's, so there is no efficiency"),
    Column("rate", "float64", "throughput, even if a table does not give its batch", "samples/s"),
    *(Column(part, "float64", f"{part}, mean per step", "s") for part in PARTS),
    Column("exposed", "float64", "exposed communication, mean per step", "s"),
    Column("useful_s", "float64", "useful time, mean over ranks, per step", "s"),
    Column("mfu", "float64", "model FLOPs utilisation, mean over runs"),
    Column("gpu_util", "float64", "utilisation of the GPUs, mean over runs", "%"),
    Column("energy_joules", "float64", "energy of all GPUs per step, mean over runs", "J"),
    Column("val_loss", "float64", "validation loss after the last epoch, mean over runs"),
    Column("series_place", "int64", "number of the series in the plan"),
    Column("cell_place", "int64", "number of the cell in the plan"),
)

#: Columns that report/scaling.csv always has, in this order.
COLUMNS = tuple(column.name for column in _PUBLISHED)
#: Columns of report/scaling.csv after :data:`COLUMNS`.
FURTHER_COLUMNS = tuple(column.name for column in _PUBLISHED_LATER)
#: All columns; those that are not published are for figures, pages and other analyses.
SCHEMA = (*_PUBLISHED, *_PUBLISHED_LATER, *_INTERNAL)
ALL_COLUMNS = tuple(column.name for column in SCHEMA)
