"""The runs of a study with their measurements: the DataFrames that all analyses start from.

A run is disturbed by something outside its job; :mod:`bench.study.conditions` decides this when the run ends.
The time of a step is never a reason to leave out a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from analysis.data.environment import sampled_envs
from analysis.data.load import Study
from analysis.stats.attempts import recorded, wall_seconds
from analysis.stats.columns import CellRow, RunRow, grouped, records_of, run_rows
from analysis.stats.decompose import run_parts
from analysis.stats.estimate import outliers, run_rates, run_readings
from analysis.text import clean
from bench.study.findings import ForeignCpu, ForeignJob, GpuSlowdown, LinkErrors, StudyRun
from bench.study.ledger import FailureClass, RunState
from bench.study.together import together_of
from ddp_scaling_bench.finding import Finding, messages
from ddp_scaling_bench.known_strategies import STRATEGIES
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
_ALONE = {name for name, strategy in STRATEGIES.items() if strategy.one_rank}


@dataclass(frozen=True)
class Frames:
    """The DataFrames of a study: planned cells, their series, and all runs with their measurements.

    Attributes:
        cells: the planned cells.
        members: one row per cell and series: ``cell_id, series, mode``.
        runs: one row per planned run: ``run_id, cell_id, state, reason, failure_class``; ``measured``
            (True if the run counts: it completed with a throughput and was not left out),
            ``left_out, left_out_for`` (if and why it is left out, see :func:`left_out`), ``disturbed`` (as in
            :attr:`analysis.data.load.Study.runs`), ``throughput_samples_per_sec, step_time_sec, wall_s,
            outlier``, ``rate`` (the throughput, even if a table does not give its unit), ``unit`` (counted
            divided by planned samples, NaN if unknown), and the columns of
            :func:`analysis.stats.decompose.run_parts` and :func:`analysis.stats.estimate.run_readings`.
        labelled_by: the source of the modes of the series: ``plan``, ``table`` or ``option`` (--mode).
        together: whether the ranks of a cell train together, None if it was not measured; without cells of
            one rank, and those of which it does not matter or is not recorded.
    """

    cells: list[CellRow]
    members: pd.DataFrame
    runs: pd.DataFrame
    labelled_by: str = "plan"
    together: Mapping[str, bool | None] = field(default_factory=dict)

    @cached_property
    def run_rows(self) -> list[RunRow]:
        """The runs as records, in the order of ``runs``."""
        return run_rows(self.runs)

    @cached_property
    def runs_of_cells(self) -> dict[str, list[RunRow]]:
        """The runs of each cell that has any."""
        return grouped(self.run_rows, lambda run: run.cell_id)

    def measured_in(self, cell_id: str) -> list[RunRow]:
        """Return the runs of a cell that count."""
        return [run for run in self.runs_of_cells.get(cell_id, ()) if run.measured]

    def are_separate(self, cell_id: str) -> bool:
        """Return whether the ranks of a cell do not train together."""
        return self.together.get(cell_id, True) is False

    def with_left_out(self) -> Frames:
        """Return the frames with the left-out runs counted, although they were disturbed."""
        runs = self.runs.assign(measured=self.runs["measured"] | self.runs["left_out"], left_out=False)
        return replace(self, runs=runs)


def measure(study: Study, *, include_disturbed: bool = False) -> Frames:
    """Compute the frames of a study.

    A run counts if it completed with a throughput. A disturbed run is left out (see
    :func:`analysis.stats.measured.left_out`), unless ``include_disturbed``. ``step_time_sec`` is the time per
    global batch: the plan's global batch divided by the throughput.
    """
    runs = study.runs.set_index("run_id", drop=False)
    epochs, envs = study.epochs, sampled_envs(study)
    runs = runs.join([run_rates(epochs), run_parts(epochs), run_readings(epochs)])
    runs = runs.set_axis(range(len(runs)))
    rate = runs["throughput_samples_per_sec"]
    batch = study.cells.set_index("cell_id")["global_batch"].reindex(runs["cell_id"]).to_numpy(dtype=float)
    runs = runs.assign(
        measured=(runs["state"] == RunState.COMPLETED) & rate.notna(),
        step_time_sec=batch / rate,
        unit=np.fromiter(_units(study, runs, envs), float) / batch,
        wall_s=wall_seconds(runs),
        rate=rate,
    )
    # A value that a command reports is one of many steps or of one: how many it trained is not known.
    read = runs["cell_id"].isin([clean(cell.cell_id) for cell in study.planned if cell.reads_values])
    runs[["samples", "steps", "window_s"]] = runs[["samples", "steps", "window_s"]].mask(read)
    out = {} if include_disturbed else left_out(run_rows(runs[runs["measured"]]))
    is_out = runs["run_id"].isin(out)
    why = [out.get(run_id, "") for run_id in runs["run_id"]]
    runs = runs.assign(left_out=is_out, left_out_for=why, measured=runs["measured"] & ~is_out)
    runs["outlier"] = outliers(rate.where(runs["measured"]), by=runs["cell_id"])
    runs["facts"] = pd.Series(_facts_of(run_rows(runs), batch.tolist()), index=runs.index, dtype=object)
    cells = records_of(CellRow, study.cells.assign(ddp=_with_ddp(study)))
    return Frames(cells, study.members, runs, together=_together(study, run_rows(runs), envs))


def _together(
    study: Study, runs: Sequence[RunRow], envs: Mapping[str, Mapping[str, Any]]
) -> dict[str, bool | None]:
    """Return :attr:`Frames.together`: False if that is the result of any run that completed."""
    cells = {clean(cell.cell_id): cell for cell in study.planned if cell.world_size > 1}
    attempts = dict(zip(study.runs["run_id"], study.attempts, strict=True))
    found: dict[str, set[bool | None]] = {}
    for run in runs:
        cell, env = cells.get(run.cell_id), envs.get(run.run_id, {})
        if cell is None or cell.is_exchange_rare or not (run.measured or run.left_out):
            continue
        if cell.is_unrecorded or isinstance(env.get("exchange"), dict):
            folder = RunFolder(Path(attempts[run.run_id] or ""))
            found.setdefault(run.cell_id, set()).add(together_of(folder, cell, env, int(run.epochs)))
    return {cell: False if False in own else None if None in own else True for cell, own in found.items()}


def _units(study: Study, runs: pd.DataFrame, envs: Mapping[str, Mapping[str, Any]]) -> Iterator[float]:
    """Yield the samples of a step of each run: the median that the recorder wrote, or else the mean."""
    read = {clean(cell.cell_id) for cell in study.planned if cell.reads_values}
    means = runs["samples"] / runs["steps"]
    for run_id, cell, mean in zip(runs["run_id"], runs["cell_id"], means, strict=True):
        batch = None if cell in read else envs.get(run_id, {}).get("global_batch")
        yield batch if isinstance(batch, int | float) and known(batch) and known(mean) else mean


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


def _with_ddp(study: Study) -> list[bool]:
    """Return for each cell whether ranks exchange gradients, even if there is one rank only."""
    if study.table:
        return [True] * len(study.cells)
    return [cell.world_size > 1 or cell.workload.get("strategy") not in _ALONE for cell in study.planned]


def _facts_of(runs: Sequence[RunRow], batches: Sequence[float]) -> list[tuple[Finding, ...]]:
    """Return each run's ``reason``, followed by the facts about the run's metrics and conditions.

    ``batches`` are the planned global batches.
    """
    slow = {run.cell_id for run in runs if run.outlier}
    rates = grouped((run for run in runs if run.measured and run.cell_id in slow), lambda run: run.cell_id)
    medians = {cell: median(run.rate for run in own) for cell, own in rates.items()}
    return [tuple(_facts(run, batch, medians)) for run, batch in zip(runs, batches, strict=True)]


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
