"""Put the strategies of a study side by side: cells that are equal in all other settings.

The ratio to ``ddp`` (if no cell has it, to the first strategy of the plan) is that of `bench compare --by
strategy`. Each strategy has its own baseline for its efficiency.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from analysis.checks.scaling_table import Invalid, efficiency_text, invalid_reason
from analysis.compare.comparison import ComparedCell, Comparison, compare_within
from analysis.data.differences import settings_of
from analysis.data.load import Study
from analysis.data.names import layout
from analysis.stats.columns import ScalingRow, first_of_cells
from analysis.text import clean, plain
from bench.errors import BenchError
from bench.matrix.strategies import DEFAULT
from bench.units import MISSING, fraction, fractions, human_bytes, known, number, whole

HEADINGS = (
    *("Strategy", "Ranks", "Batch", "Samples/s", "Ratio", "Efficiency", "Exposed (ms)", "in forward"),
    *("in backward", "at the end", "Memory", "Wire bytes", "predicted"),
)
NUMERIC = HEADINGS[1:]
#: The values in JSON, by their names in :class:`ScalingRow`.
_VALUES = (
    *("throughput_samples_per_sec", "throughput_low", "throughput_high"),
    *("efficiency", "efficiency_low", "efficiency_high", "exposed", "comm_forward", "comm_backward"),
    *("comm_end", "peak_mem_bytes", "wire_bytes", "wire_predicted"),
)


@dataclass(frozen=True)
class StrategyRow:
    """A cell with its strategy, and how it compares with the base; None for the base itself.

    ``not_valid`` is the kind of the error of the cell or of its baseline; empty if there is none.
    """

    strategy: str
    row: ScalingRow
    compared: ComparedCell | None
    not_valid: str

    def texts(self, name: str) -> tuple[str, ...]:
        """Return the texts of the table, with the columns :data:`HEADINGS`, the first one being ``name``."""
        row, compared = self.row, self.compared
        ratio = [compared.ratio, compared.low, compared.high] if compared else []
        times = (row.exposed, row.comm_forward, row.comm_backward, row.comm_end)
        sizes = (row.peak_mem_bytes, row.wire_bytes, row.wire_predicted)
        return (
            f"{name}, not valid" if self.not_valid else name,
            f"{row.gpus} ({layout(row)})",
            whole(row.global_batch),
            number(row.throughput_samples_per_sec),
            f"{fraction(ratio[0])} {fractions(*ratio[1:])}".strip() if ratio else MISSING,
            efficiency_text(row),
            *(number(1000 * time) for time in times),
            *(human_bytes(size) if known(size) else MISSING for size in sizes),
        )

    def as_json(self) -> dict[str, Any]:
        """Return the values for programs; unknown ones are None."""
        compared = self.compared
        ratio = [compared.ratio, compared.low, compared.high] if compared else [None] * 3
        return {
            "strategy": self.strategy,
            **{name: plain(getattr(self.row, name)) for name in ("cell_id", "nodes", "gpus", "global_batch")},
            **{
                name: plain(one)
                for name, one in zip(("ratio", "ratio_low", "ratio_high"), ratio, strict=True)
            },
            **{name: plain(getattr(self.row, name)) for name in _VALUES},
            "not_valid": self.not_valid,
        }


def strategy_rows(
    study: Study, rows: Sequence[ScalingRow], invalid: Invalid, comparison: Comparison | None = None
) -> list[StrategyRow]:
    """Return a row for each cell, those of equal size beside each other; none for a single strategy.

    ``invalid`` are the cells that are not valid; ``comparison`` is that of the strategies, if it is known.
    """
    cells = [] if study.table else study.plan["cells"]
    strategies = {clean(cell["cell_id"]): settings_of(cell).get("strategy", "") for cell in cells}
    names = list(dict.fromkeys(filter(None, strategies.values())))
    if len(names) < 2:
        return []
    compared = {cell.cell_b: cell for cell in _compared(study, names, comparison)}
    order = {name: place for place, name in enumerate(sorted(names, key=lambda name: name != DEFAULT))}
    found = [
        StrategyRow(
            strategies[row.cell_id], row, compared.get(row.cell_id), invalid_reason(row, row.base, invalid)
        )
        for row in first_of_cells(rows)
        if strategies[row.cell_id]
    ]
    return sorted(found, key=lambda one: (_work(one.row), order[one.strategy]))


def _work(row: ScalingRow) -> tuple[Any, ...]:
    return row.variant, row.gpus, row.nodes, row.global_batch


def _compared(study: Study, names: Sequence[str], comparison: Comparison | None) -> Sequence[ComparedCell]:
    if comparison is not None:
        return comparison.cells
    try:
        return compare_within(study, key="strategy", base=DEFAULT if DEFAULT in names else names[0]).cells
    except BenchError:  # no run has completed, or no two cells are equal otherwise
        return []
