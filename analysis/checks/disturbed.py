"""Findings about runs that something outside their jobs disturbed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from analysis.stats.columns import RunRow, distinct, grouped
from analysis.stats.measured import common_reasons
from bench.study.findings import Disturbance, StudyRun, by_reason
from ddp_scaling_bench.finding import Finding, Severity, messages
from ddp_scaling_bench.units import count, listed, short_name


class CommonCondition(Finding, kind="common-condition"):
    """Disturbances that all runs of a cell have; both values are by cell."""

    heading = "All runs disturbed"
    remedy = "Remove the cause and repeat the runs, or report the results with it."
    severity: Severity = "error"
    disturbed: Mapping[str, tuple[Disturbance, ...]]
    conditions: Mapping[str, tuple[Disturbance, ...]]

    def _message(self) -> str:
        cells = [f"{short_name(cell)} ({messages(own)})" for cell, own in self.conditions.items()]
        return (
            f"All runs of these configurations were disturbed: {listed(cells, limit=4)}. "
            "No run is left out for this reason."
        )


@dataclass(frozen=True, kw_only=True)
class DisturbedRun:
    """A disturbed run."""

    run_id: str
    cell_id: str
    left_out: bool
    facts: tuple[Disturbance, ...]

    def __str__(self) -> str:
        return f"{short_name(self.run_id)}: {messages(self.facts)}"


class DisturbedRuns(Finding, kind="disturbed"):
    """Disturbed runs.

    Attributes:
        runs: those that are described.
        disturbed, finished, left_out: numbers of runs.
        common: the number of other disturbed runs, whose condition is common to all runs of their cell.
    """

    heading = "Disturbed runs"
    remedy = "Repeat the runs: `bench submit --retry-disturbed`."
    _what = "were disturbed"
    runs: tuple[DisturbedRun, ...] = ()
    disturbed: int
    finished: int
    left_out: int
    common: int | None = None

    def _message(self) -> str:
        common = "with a condition common to all runs of their cell"
        others = f"; and {self.common:,} {common}" if self.common else ""
        if not self.runs:
            number = f"{self.disturbed:,} of {count(self.finished, 'completed run')} {self._what}"
            return f"{number}, {self.left_out:,} of them left out{others}."
        runs = listed([*map(str, self.runs)], limit=3)
        number = f"{self.disturbed:,} of {count(self.finished, 'run')}"
        return f"{number}, {self.left_out:,} of them left out: {runs}{others}."


class OverlappingRuns(DisturbedRuns, kind="overlap"):
    """Runs of the study that used a node at the same time."""

    heading = "Runs overlap"
    remedy = (
        "Use exclusive: true, max_running: 1 or `bench submit --pack`, then `bench submit --retry-disturbed`."
    )
    _what = "overlapped with other runs"


def disturbed_runs(runs: Sequence[RunRow]) -> Iterator[Finding]:
    """Yield what disturbs all runs of a cell, the runs that overlap, and the other disturbed runs."""
    finished = [run for run in runs if run.measured or run.left_out]
    disturbed = [run for run in finished if run.disturbed]
    if not disturbed:
        return
    amounts = Counter(run.cell_id for run in finished)
    common = {
        cell: reasons - {StudyRun.kind}
        for cell, reasons in common_reasons(finished).items()
        if amounts[cell] > 1 and reasons - {StudyRun.kind}
    }
    if common:
        yield _common_condition(disturbed, common)
    if overlapping := _entries(disturbed, common, overlap=True):
        yield _described(OverlappingRuns, overlapping, finished, {})
    if others := _entries(disturbed, common, overlap=False):
        yield _described(DisturbedRuns, others, finished, common)


def _common_condition(disturbed: Iterable[RunRow], common: Mapping[str, frozenset[str]]) -> Finding:
    every, merged = {}, {}
    of_cells = grouped(disturbed, lambda run: run.cell_id)
    for cell, kinds in common.items():
        own = tuple(one for run in of_cells[cell] for one in run.disturbed or () if one.kind in kinds)
        every[cell], merged[cell] = own, tuple(by_reason(own))
    return CommonCondition(subject=tuple(common), disturbed=every, conditions=merged)


def _entries(
    disturbed: Iterable[RunRow], common: Mapping[str, frozenset[str]], *, overlap: bool
) -> list[DisturbedRun]:
    """Return the runs that overlap, or the runs with another disturbance that is not ``common`` to a cell."""
    found = []
    for run in disturbed:
        others = [one for one in run.disturbed or () if one.kind not in common.get(run.cell_id, ())]
        if own := tuple(one for one in others if isinstance(one, StudyRun) == overlap):
            found.append(
                DisturbedRun(run_id=run.run_id, cell_id=run.cell_id, left_out=run.left_out, facts=own)
            )
    return found


def _described(
    finding: type[DisturbedRuns],
    entries: Sequence[DisturbedRun],
    finished: Sequence[RunRow],
    common: Container[str],
) -> Finding:
    """Return the finding about disturbed runs; others of cells with a ``common`` condition are counted."""
    also = sum(run.cell_id in common for run in finished) - sum(run.cell_id in common for run in entries)
    return finding(
        subject=distinct(run.cell_id for run in entries),
        runs=tuple(entries),
        disturbed=len(entries) + also,
        finished=len(finished),
        left_out=sum(run.left_out for run in entries),
        common=also or None,
    )
