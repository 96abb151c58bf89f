"""The runs of a study with their measurements: the records that all analyses start from.

A run is disturbed by something outside its job; :mod:`bench.study.conditions` decides this when the run ends.
The time of a step is never a reason to leave out a run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from analysis.data.columns import CellRow, Member, RunRow, grouped
from analysis.data.environment import sampled_envs
from analysis.data.load import Study
from analysis.stats.attempts import recorded, wall_seconds
from analysis.stats.decompose import run_parts
from analysis.stats.estimate import outliers, run_rates, run_readings
from analysis.text import clean
from bench.study.findings import ForeignCpu, ForeignJob, GpuSlowdown, LinkErrors, StudyRun
from bench.study.ledger import FailureClass, RunState
from bench.study.together import together_of
from ddp_scaling_bench.finding import Finding, messages
from ddp_scaling_bench.run_folder import RunFolder
from ddp_scaling_bench.units import clauses, known, number

#: Runs that were left out because of a disturbance, by its kind; and all outcomes of runs in words.
_LEFT_OUT = {
    StudyRun.kind: "disturbed by another run",
    ForeignJob.kind: "disturbed by another job",
    ForeignCpu.kind: "disturbed by other programs",
    GpuSlowdown.kind: "disturbed by a slowdown of the GPU",
    LinkErrors.kind: "disturbed by errors of the link",
}
_OUTCOMES: dict[str, str] = {str(one): one.words for one in (*RunState, *FailureClass)} | _LEFT_OUT


class NoEpoch(Finding, kind="no-epoch"):
    """A completed run without a measured epoch."""

    message = "metrics.csv has no epoch with samples and a throughput"


class OtherSamples(Finding, kind="other-samples"):
    """A run that processes another batch than planned."""

    measured: float
    planned: float

    def _message(self) -> str:
        return f"{number(self.measured)} samples per step, but the plan's global batch is {self.planned:.0f}"


class WasDisturbed(Finding, kind="was-disturbed"):
    """A disturbed run that counts."""

    facts: tuple[Finding, ...]

    def _message(self) -> str:
        return f"disturbed by {messages(self.facts)}"


class LeftOut(WasDisturbed, kind="left-out"):
    """A disturbed run that does not count."""

    def _message(self) -> str:
        return f"left out: {super()._message()}"


class SlowRun(Finding, kind="slow-run"):
    """A run far slower than the cell's other runs."""

    hosts: str | None

    def _message(self) -> str:
        return "slow for no recorded reason" + (f", on {self.hosts}" if self.hosts else "")


@dataclass(frozen=True, kw_only=True)
class OutcomeCount:
    """The number of runs with one outcome."""

    outcome: str
    runs: int

    def __str__(self) -> str:
        return f"{self.runs:,} {outcome_text(self.outcome)}"


def left_out(runs: Sequence[RunRow]) -> dict[str, str]:
    """Return the disturbed runs that are left out, by id: the one reason for this, or ``disturbed``.

    A reason that disturbed all runs of a cell is a property of the study; no run is left out because of it.
    Runs that were disturbed for another reason are left out, unless this applies to all runs of their cell.
    ``runs`` are those that completed with a throughput.
    """
    found: dict[str, str] = {}
    common = common_reasons(runs)
    for cell, own in grouped(runs, lambda run: run.cell_id).items():
        out = {run.run_id: reasons for run in own if (reasons := _reasons_of_run(run) - common[cell])}
        if len(out) < len(own):
            found |= {run: min(own) if len(own) == 1 else "disturbed" for run, own in out.items()}
    return found


def common_reasons(runs: Iterable[RunRow]) -> dict[str, frozenset[str]]:
    """Return, by cell_id, the reasons that disturbed every run of the cell.

    ``runs`` are as for :func:`left_out`.
    """
    found: dict[str, frozenset[str]] = {}
    for run in runs:
        own = _reasons_of_run(run)
        found[run.cell_id] = found.get(run.cell_id, own) & own
    return found


def _reasons_of_run(run: RunRow) -> frozenset[str]:
    return frozenset(one.kind for one in run.disturbed or ())


#: Maximum number of runs whose ranks.csv an analysis reads.
MAX_RANKS_FILES = 500


@dataclass(frozen=True)
class Measured:
    """The cells of a study, their series, and all runs with their measurements.

    Attributes:
        cells: the planned cells.
        members: the cells of each series.
        runs: the latest attempts, with their measurements.
        labelled_by: the source of the modes of the series: ``plan``, ``table`` or ``option`` (--mode).
        together: whether the ranks of a cell train together, None if it was not measured; without cells of
            one rank, and those of which it does not matter or is not recorded.
    """

    cells: Sequence[CellRow]
    members: Sequence[Member]
    runs: Sequence[RunRow]
    labelled_by: str = "plan"
    together: Mapping[str, bool | None] = field(default_factory=dict)

    @cached_property
    def runs_of_cells(self) -> dict[str, list[RunRow]]:
        """The runs of each cell that has any."""
        return grouped(self.runs, lambda run: run.cell_id)

    def measured_in(self, cell_id: str) -> list[RunRow]:
        """Return the runs of a cell that count."""
        return [run for run in self.runs_of_cells.get(cell_id, ()) if run.measured]

    def are_separate(self, cell_id: str) -> bool:
        """Return whether the ranks of a cell do not train together."""
        return self.together.get(cell_id, True) is False

    def with_left_out(self) -> Measured:
        """Return the same with the left-out runs counted, although they were disturbed."""
        runs = [replace(run, measured=True, left_out=False) if run.left_out else run for run in self.runs]
        return replace(self, runs=runs)


def run_values(epochs: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Return the measurements of runs by run_id; ``epochs`` are rows of metrics.csv of any runs."""
    found: dict[str, dict[str, float]] = {}
    for values in (run_rates(epochs), run_parts(epochs), run_readings(epochs)):
        names = [*map(str, values.columns)]
        columns = [values[name].tolist() for name in names]
        for run_id, *own in zip(values.index.tolist(), *columns, strict=True):
            found.setdefault(run_id, {}).update(zip(names, own, strict=True))
    return found


def measure(
    study: Study,
    *,
    include_disturbed: bool = False,
    values: Mapping[str, Mapping[str, float]] | None = None,
) -> Measured:
    """Compute the measurements of a study's runs; ``values`` are the results of :func:`run_values`, if known.

    A run counts if it completed with a throughput. A disturbed run is left out (see :func:`left_out`), unless
    ``include_disturbed``. ``step_time_sec`` is the time per global batch: the plan's global batch divided by
    the throughput.
    """
    runs, envs = [copy(run) for run in study.runs], sampled_envs(study)
    by_id = {run.run_id: run for run in runs}
    for run_id, own in (run_values(study.epochs) if values is None else values).items():
        vars(by_id[run_id]).update(own)
    # A value that a command reports is one of many steps or of one: how many it trained is not known.
    read = {clean(cell.cell_id) for cell in study.planned if cell.reads_values}
    for run in runs:
        batch = study.cells[run.cell_id].global_batch
        run.rate = run.throughput_samples_per_sec
        run.measured = run.state == RunState.COMPLETED and known(run.rate)
        run.step_time_sec = batch / run.rate
        run.unit = _samples_per_step(run, None if run.cell_id in read else envs.get(run.run_id)) / batch
        run.wall_s = wall_seconds(run)
        if run.cell_id in read:
            run.least_s = run.window_s
            run.samples = run.steps = run.window_s = math.nan
    counted = [run for run in runs if run.measured]
    out = {} if include_disturbed else left_out(counted)
    for run in counted:
        run.left_out, run.left_out_for = run.run_id in out, out.get(run.run_id, "")
        run.measured = not run.left_out
    add_outliers(runs)
    medians = {
        cell: median(run.rate for run in own if run.measured)
        for cell, own in grouped(runs, lambda run: run.cell_id).items()
        if any(run.outlier for run in own)
    }
    for run in runs:
        run.facts = tuple(_facts(run, study.cells[run.cell_id].global_batch, medians))
    return Measured([*study.cells.values()], study.members, runs, together=_together(study, runs, envs))


def add_outliers(runs: Iterable[RunRow]) -> None:
    """Mark the runs that are far from the median of their cell's measured runs."""
    for own in grouped((run for run in runs if run.measured), lambda run: run.cell_id).values():
        for run, is_outlier in zip(own, outliers([run.rate for run in own]), strict=True):
            run.outlier = is_outlier


def _samples_per_step(run: RunRow, env: Mapping[str, Any] | None) -> float:
    """Return the samples of a step: the median that the recorder wrote, or else the mean; NaN if unknown."""
    mean, batch = run.samples / run.steps, (env or {}).get("global_batch")
    return batch if isinstance(batch, int | float) and known(batch) and known(mean) else mean


def _together(
    study: Study, runs: Sequence[RunRow], envs: Mapping[str, Mapping[str, Any]]
) -> dict[str, bool | None]:
    """Return :attr:`Measured.together`: False if that is the result of any run that completed."""
    cells = {clean(cell.cell_id): cell for cell in study.planned if cell.world_size > 1}
    found: dict[str, set[bool | None]] = {}
    for run in runs:
        cell, env = cells.get(run.cell_id), envs.get(run.run_id, {})
        if cell is None or cell.is_exchange_rare or not (run.measured or run.left_out):
            continue
        if cell.is_unrecorded or isinstance(env.get("exchange"), dict):
            folder = RunFolder(Path(run.folder or ""))
            found.setdefault(run.cell_id, set()).add(together_of(folder, cell, env, int(run.epochs)))
    return {cell: False if False in own else None if None in own else True for cell, own in found.items()}


def ranks_sample(runs: Iterable[RunRow]) -> list[RunRow]:
    """Select the runs whose ranks.csv is read: all that count; of a large study, first repeats of cells."""
    counted = [run for run in runs if run.measured]
    earlier: Counter[str] = Counter()
    order = []
    for place, run in enumerate(counted):
        order.append((earlier[run.cell_id], place))
        earlier[run.cell_id] += 1
    return [counted[place] for place in sorted(place for _, place in sorted(order)[:MAX_RANKS_FILES])]


def outcome_of(run: RunRow) -> str:
    """Return the class of a run's failure, what it was left out for, or else its state."""
    if run.left_out:
        return run.left_out_for
    has_class = run.state in (RunState.FAILED, RunState.CANCELLED) and run.failure_class in list(FailureClass)
    return str(run.failure_class if has_class else run.state)


def outcome_text(outcome: str) -> str:
    """Return the result of :func:`outcome_of` in words, to follow a number of runs."""
    return _OUTCOMES.get(outcome, outcome)


def count_outcomes(runs: Iterable[RunRow]) -> tuple[OutcomeCount, ...]:
    """Count runs by :func:`outcome_of`, the most frequent outcome first."""
    counts = Counter(map(outcome_of, runs)).most_common()
    return tuple(OutcomeCount(outcome=outcome, runs=n) for outcome, n in counts)


def outcomes_text(runs: Iterable[RunRow]) -> str:
    """Return the runs by outcome in words: ``3 hit the time limit; 1 failed; 2 not started``."""
    return clauses([*map(str, count_outcomes(runs))])


def _facts(run: RunRow, batch: float, medians: Mapping[str, float]) -> Iterator[Finding]:
    yield from recorded(run.reason)
    if run.state == RunState.COMPLETED and not (run.reason or run.measured or run.left_out):
        yield NoEpoch()
    if run.measured and run.other_batch:
        yield OtherSamples(measured=run.unit * batch, planned=batch)
    if run.disturbed:
        yield (LeftOut if run.left_out else WasDisturbed)(facts=run.disturbed)
    if run.outlier and run.disturbed == () and run.rate < medians[run.cell_id]:
        yield SlowRun(hosts=run.hosts)
