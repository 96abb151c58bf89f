"""The page's two listings: all cells, and the runs that are missing, failed or odd."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from analysis.data.names import layout, state_counts, state_name
from analysis.text import MISSING, capital, fraction, fractions, interval, known, number, one_line, whole
from bench.study.ledger import RunState

#: Rows of the table that stand in the page itself; the others come from its data block.
STATIC_ROWS = 100
MAX_ROWS = 10_000
MAX_RUNS_LISTED = 500

#: A cell of the page's table: a text, or a text with a second line.
TableCell = str | tuple[str, str]


@dataclass(frozen=True)
class Column:
    """A heading of the table; ``help`` says what the column means."""

    name: str
    help: str
    numeric: bool = True


COLUMNS = (
    Column("Cell", "The configuration that was run", numeric=False),
    Column("Series", "Cells that scale together", numeric=False),
    Column(
        "Mode",
        "By the batches: strong (global batch constant) or weak (batch per rank constant)",
        numeric=False,
    ),
    Column("Ranks", "World size; below it nodes × ranks per node"),
    Column("Batch", "Samples per step over all ranks; below it per rank"),
    Column("State", "Of the cell's runs", numeric=False),
    Column("n", "Runs that count; below it runs planned, where some are missing"),
    Column("Samples/s", "Throughput: all samples over all time; below it the 95 % interval"),
    Column("Step (ms)", "Time per step, that is per global batch"),
    Column("Speedup", "S = T(N₀)/T(N), for weak scaling E·N/N₀; below it the 95 % interval"),
    Column("Efficiency", "Strong: S·N₀/N. Weak: T(N₀)/T(N). Below it the 95 % interval"),
    Column(
        "Per doubling",
        "Incremental efficiency: of the step from the size below it, per doubling; 0.75 is 1.5 times as fast",
    ),
    Column("LB", "Load balance: mean useful time of the ranks over the greatest"),
    Column("CommE", "Communication efficiency: greatest useful time over the step's time"),
    Column("PE", "Parallel efficiency: LB · CommE"),
    Column("CompS", "Computational scalability: useful time per sample, baseline over this cell"),
    Column("GE", "Global efficiency: PE · CompS"),
    Column("Node-h", "Node-hours of one run"),
    Column("Remark", "Missing runs, the baseline, the regime", numeric=False),
)


def columns(rate_unit: str) -> tuple[Column, ...]:
    """Return :data:`COLUMNS` with the throughput's heading in another unit."""
    return tuple(replace(c, name=capital(rate_unit)) if c.name == "Samples/s" else c for c in COLUMNS)


def place_of(name: str) -> int:
    """Return the place of a column in the table."""
    return next(place for place, column in enumerate(COLUMNS) if column.name == name)


def table_rows(rows: pd.DataFrame, *, labels: dict[str, str]) -> list[list[TableCell]]:
    """Return the texts of the table, one list per row, in the order of :data:`COLUMNS`."""
    return [_table_row(row, labels) for row in rows.to_dict("records")]


def _table_row(row: dict[Any, Any], labels: dict[str, str]) -> list[TableCell]:
    return [
        row["cell_id"],
        labels[row["series"]],
        row["mode"] or MISSING,
        _two(whole(row["gpus"]), layout(row)),
        _two(whole(row["global_batch"]), _per_rank(row["per_gpu_batch"])),
        row["state"],
        _two(str(row["n"]), f"of {row['runs']}" if row["n"] < row["runs"] else ""),
        _two(
            number(row["throughput_samples_per_sec"]), interval(row["throughput_low"], row["throughput_high"])
        ),
        number(1000 * row["step_time_sec"]),
        _two(number(row["speedup"], digits=3), interval(row["speedup_low"], row["speedup_high"], digits=3)),
        _two(fraction(row["efficiency"]), fractions(row["efficiency_low"], row["efficiency_high"])),
        _two(fraction(row["incremental_efficiency"]), _from(row["incremental_from"])),
        fraction(row["load_balance"]),
        fraction(row["comm_efficiency"]),
        fraction(row["pop_parallel_efficiency"]),
        fraction(row["computational_scalability"]),
        fraction(row["global_efficiency"]),
        number(row["node_hours"], digits=3),
        one_line(row["reason"], limit=240),
    ]


def _from(size: float) -> str:
    return f"from {whole(size)}" if known(size) else ""


def _per_rank(batch: float) -> str:
    return f"{whole(batch)} per rank" if known(batch) else ""


def _two(text: str, below: str) -> TableCell:
    return (text, below) if below else text


def runs_context(runs: pd.DataFrame) -> dict[str, Any]:
    """Return the runs that do not count, or of which something is to be said."""
    told = runs[~runs["measured"] | (runs["reason"] != "") | runs["outlier"]]
    shown = told.head(MAX_RUNS_LISTED)
    names = ["run_id", "cell_id", "attempt", "state", "failure_class", "reason", "measured", "outlier"]
    return {
        "listed": [_run(record) for record in shown[names].to_dict("records")],
        "left_out": len(told) - len(shown),
        "missing": int((~runs["measured"]).sum()),
        "states": state_counts(runs[~runs["measured"]]),
        "total": len(runs),
        "outliers": int(runs["outlier"].sum()),
    }


def _run(record: dict[Any, Any]) -> dict[str, str]:
    reason = one_line(record["reason"], limit=400)
    if record["outlier"]:
        flagged = "far from the other runs of its cell: flagged, and still counted"
        reason = f"{reason}; {flagged}" if reason else flagged
    failure = record["failure_class"]
    return {
        "run": record["run_id"],
        "cell": record["cell_id"],
        "attempt": MISSING if pd.isna(record["attempt"]) else str(record["attempt"]),
        "state": record["state"],
        "failure": failure if isinstance(failure, str) and failure else MISSING,
        "reason": reason
        or (state_name(RunState.PLANNED) if record["state"] == RunState.PLANNED else MISSING),
        "counts": "yes" if record["measured"] else "no",
    }
