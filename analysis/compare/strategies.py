"""Put the strategies of a study side by side: cells that are equal in all other settings.

The ratio to ``ddp`` (if no cell has it, to the first strategy of the plan) is that of `bench compare --by
strategy`. Each strategy has its own baseline for its efficiency.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from analysis.checks.assessment import CheckedStudy
from analysis.compare.comparison import Comparison, Judgement, compare_within
from analysis.data.columns import ScalingRow, columns_of, first_of_cells
from analysis.data.names import layout
from analysis.decide import efficiency_text
from analysis.text import plain
from ddp_scaling_bench.errors import BenchError
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.known_strategies import DEFAULT
from ddp_scaling_bench.units import fraction, fractions, whole

_TIMES = ("exposed", "comm_forward", "comm_backward", "comm_end")
_BYTES = ("peak_mem_bytes", "wire_bytes", "wire_predicted")
_MEASURED = ("throughput_samples_per_sec", *_TIMES, *_BYTES)
_COLUMNS = columns_of(ScalingRow)
HEADINGS = (
    *("Strategy", "Ranks", "Batch", "Ratio", "Efficiency"),
    *(_COLUMNS[name].heading for name in _MEASURED),
)
NUMERIC = HEADINGS[1:]
#: The values in JSON, by their names in :class:`ScalingRow` and :class:`Judgement`.
_OF_ROW = (
    *("cell_id", "nodes", "gpus", "global_batch", "throughput_low", "throughput_high"),
    *("efficiency", "efficiency_low", "efficiency_high", _MEASURED[0], *_BYTES),
)
_OF_RATIO = {"ratio": "ratio", "low": "ratio_low", "high": "ratio_high"}


@dataclass(frozen=True)
class StrategyRow:
    """A cell with its strategy, and how it compares with the base; unknown for the base itself.

    ``error`` is that of the cell or of its baseline, if there is one.
    """

    strategy: str
    row: ScalingRow
    compared: Judgement
    error: Finding | None

    def texts(self, name: str) -> tuple[str, ...]:
        """Return the texts of the table, with the columns :data:`HEADINGS`, the first one being ``name``."""
        row, compared = self.row, self.compared
        return (
            f"{name}, not valid" if self.error else name,
            f"{row.gpus} ({layout(row)})",
            whole(row.global_batch),
            f"{fraction(compared.ratio)} {fractions(compared.low, compared.high)}".strip(),
            efficiency_text(row),
            *(_COLUMNS[name].form(getattr(row, name)) for name in _MEASURED),
        )

    def as_json(self) -> dict[str, Any]:
        """Return the values for programs; unknown ones are None."""
        return {
            "strategy": self.strategy,
            **{name: plain(getattr(self.row, name)) for name in _OF_ROW},
            **{f"{name}_sec": plain(getattr(self.row, name)) for name in _TIMES},
            **{name: plain(getattr(self.compared, own)) for own, name in _OF_RATIO.items()},
            "not_valid": self.error.kind if self.error else "",
        }


def strategy_rows(about: CheckedStudy, comparison: Comparison | None = None) -> list[StrategyRow]:
    """Return a row for each cell, those of equal size beside each other; none for a single strategy.

    ``comparison`` is that of the strategies, if it is known.
    """
    strategies = {cell: own.get("strategy", "") for cell, own in about.study.settings.items()}
    if about.study.table or len({*strategies.values()} - {""}) < 2:
        return []
    if comparison is None:
        with suppress(BenchError):  # no run has completed, or no two cells are equal otherwise
            comparison = compare_within(about, key="strategy")
    compared = {cell.cell_b: cell for cell in comparison.cells} if comparison else {}
    found = [
        StrategyRow(strategies[row.cell_id], row, compared.get(row.cell_id, Judgement()), about.error_of(row))
        for row in first_of_cells(about.rows)
        if strategies[row.cell_id]
    ]
    order = sorted({*strategies.values()}, key=[DEFAULT, *strategies.values()].index)
    work = attrgetter("variant", "gpus", "nodes", "global_batch")
    return sorted(found, key=lambda one: (*work(one.row), order.index(one.strategy)))
