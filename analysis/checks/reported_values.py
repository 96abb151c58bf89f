"""Findings about the values that a command without the recorder reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

from analysis.checks.nodes import Environments
from analysis.data.load import Study
from analysis.stats.columns import RunRow, distinct
from analysis.stats.measured import Frames
from analysis.text import clean
from bench.study.findings import AverageOfRun, LineForms
from bench.study.found import findings_of_env
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.units import listed, names, short_name


class WholeRunAverages(Finding, kind="average-of-run"):
    """Cells whose throughput is one average of the whole run.

    Attributes:
        reported: the findings of their runs, by cell.
        most: the largest number of averages that a command reported in a run, if it is above 1.
    """

    heading = "Averages with start-up"
    remedy = "Train longer, or let the command report values of single steps."
    reported: Mapping[str, Sequence[AverageOfRun]] = field(default_factory=dict)
    most: int | None = None

    def _message(self) -> str:
        several = f"The commands report it up to {self.most} times per run, and the lowest rate counts."
        text = (
            f"The throughput of {names(self.subject)} is one average of the whole run, including start-up, "
            "and evaluation if the command counts it. The efficiency and the time per step, which is the "
            "global batch of the plan divided by the throughput, are therefore those of whole runs."
        )
        return f"{text} {several}" if self.most else text


class RanksNotCounted(Finding, kind="ranks-not-counted"):
    """Cells whose command started an unknown number of ranks; of ``not_compared``, several were planned."""

    heading = "Ranks not counted"
    remedy = "Compare the world size that the program prints with the plan's, or use the recorder."
    runs: int
    not_compared: tuple[str, ...] = ()

    def _message(self) -> str:
        whose = "they" if self.not_compared == self.subject else f"the ranks of {names(self.not_compared)}"
        nor = f", nor whether {whose} train together" if self.not_compared else ""
        return (
            f"It is not known how many ranks the commands of {names(self.subject)} started{nor}: only the "
            "recorder measures this. If they start another number than planned, the rates are those of other "
            "trainings."
        )


class ValueCounts(Finding, kind="value-counts"):
    """Runs of a cell, or cells of a series, with different numbers of values or windows, by cell."""

    heading = "Number of values or windows differs"
    remedy = "Let only rank 0 report values, and train the same number of steps in all runs."
    values_per_run: Mapping[str, Sequence[int]]

    def _message(self) -> str:
        cells = [
            f"{short_name(cell)} {' or '.join(map(str, numbers))}"
            for cell, numbers in self.values_per_run.items()
        ]
        return (
            f"Values or windows per run: {listed(cells, limit=4)}. Either the runs trained different numbers "
            "of steps, or several ranks reported values."
        )


def averages(study: Study, runs: Iterable[RunRow], envs: Environments) -> Iterator[Finding]:
    """Yield the cells whose throughput is one average of the whole run."""
    measured = {run.cell_id for run in runs if run.measured}
    cells = [name for cell in study.planned if cell.is_average and (name := clean(cell.cell_id)) in measured]
    if not cells:
        return
    reported: dict[str, list[AverageOfRun]] = {}
    most = 1
    for cell, env in envs:
        for one in findings_of_env(env):
            if isinstance(one, AverageOfRun):
                reported.setdefault(cell, []).append(one)
                most = max(most, one.reported)
    yield WholeRunAverages(subject=distinct(cells), reported=reported, most=most if most > 1 else None)


def uncounted_ranks(study: Study, frames: Frames, envs: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield the cells whose command started an unknown number of ranks; ``envs`` are env.json by run."""
    commands = {clean(cell.cell_id) for cell in study.planned if cell.is_unrecorded}
    cells = [
        run.cell_id
        for run in frames.run_rows
        if run.measured and run.cell_id in commands and not envs.get(run.run_id, {}).get("joined")
    ]
    if cells:
        unknown = tuple(cell for cell in distinct(cells) if frames.together.get(cell, True) is None)
        yield RanksNotCounted(subject=distinct(cells), runs=len(cells), not_compared=unknown)


def _of_a_bar(findings: Iterable[Finding]) -> bool:
    """Return whether values come from a progress bar, which is drawn at times of its own."""
    return any("%|" in form.form for one in findings if isinstance(one, LineForms) for form in one.forms)


def value_counts(study: Study, frames: Frames) -> Iterator[Finding]:
    """Yield the cells of a series that reported different numbers of values, or whose runs differ in them.

    With the recorder, only the runs of a cell are compared: the windows of sizes can be planned differently.
    """
    reported = {clean(cell.cell_id) for cell in study.planned if cell.reads_values and not cell.is_average}
    reported -= {run.cell_id for run in frames.run_rows if _of_a_bar(study.facts.get(run.run_id, ()))}
    recorded = {
        clean(cell.cell_id) for cell in study.planned if not (cell.is_unrecorded or cell.follows_plan)
    }
    counts = {
        cell: sorted({int(run.epochs) for run in frames.measured_in(cell)})
        for cell in frames.runs_of_cells
        if cell in reported | recorded and frames.measured_in(cell)
    }
    groups: dict[str, dict[str, list[int]]] = {}
    for name, cell in zip(frames.members["series"], frames.members["cell_id"], strict=True):
        if cell in counts:
            groups.setdefault(name if cell in reported else f"cell {cell}", {})[cell] = counts[cell]
    odd = {
        cell: numbers
        for own in groups.values()
        if len({number for numbers in own.values() for number in numbers}) > 1
        for cell, numbers in own.items()
    }
    if odd:
        yield ValueCounts(subject=tuple(odd), values_per_run=odd)
