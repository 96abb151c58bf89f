"""List the configurations that can run a training, with their times, costs and success rates.

Options are planned cells (combinations of settings). The time per epoch is ceil(samples / global batch) x the
time per step, plus a checkpoint if the study wrote one. Start-up and validation are not included. Intervals
(90 %) are those of one further run, because a training is one job: Student's t on the logarithms of the runs
with sqrt(1 + 1/n).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Annotated

import numpy as np
from scipy import special

from analysis.checks.assessment import CheckedStudy
from analysis.data.columns import CellSize, Column, columns_of, first_of_cells, grouped
from analysis.data.load import Study
from analysis.stats.attempts import cell_success
from analysis.stats.estimate import (
    MIN_RUNS,
    LogMoments,
    log_moments,
    ratio_interval,
    runs_to_decide,
    unpaired,
)
from analysis.text import one_line
from bench.matrix.cell import SIZES
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.units import known

#: Study, number of nodes and ranks per node. Jobs with the same layout have the same queue wait.
Layout = tuple[str, int, str]


@dataclass(kw_only=True)
class Option(CellSize):
    """One configuration that can run the training: a planned cell.

    Options of one ``group`` have the same global batch. ``low_s`` and ``high_s`` are the ends of the 90 %
    interval of ``step_time_s``, and ``run_step_times`` those of the measured runs.
    """

    study: Annotated[str, Column("study")] = ""
    kind: Annotated[str, Column("measured or not measured")]
    cell_id: Annotated[str, Column("cell")]
    setting: Annotated[str, Column("settings that vary between the cells of the study")]
    device: Annotated[str, Column("cuda or cpu")]
    gpu: Annotated[str, Column("model of the GPUs")]
    n: Annotated[int, Column("measured runs")]
    throughput_samples_per_sec: Annotated[float, Column("throughput", "samples/s")]
    step_time_s: Annotated[float, Column("time per global batch", "s")]
    steps_per_epoch: Annotated[int, Column("steps per epoch")] = field(init=False)
    checkpoint_s: Annotated[float, Column("checkpoint of an epoch", "s")]
    epoch_s: Annotated[float, Column("epoch", "s")] = field(init=False)
    wait_s: Annotated[float, Column("queue wait", "s")] = math.nan
    wait_source: Annotated[str, Column("source of the queue wait")] = ""
    training_s: Annotated[float, Column("training", "s")] = field(init=False)
    training_low_s: Annotated[float, Column("lower end of its 90 % interval", "s")] = field(init=False)
    training_high_s: Annotated[float, Column("upper end of its 90 % interval", "s")] = field(init=False)
    total_s: Annotated[float, Column("queue wait and training", "s")] = math.nan
    gpu_hours: Annotated[float, Column("cost of the training", "GPU-hours")] = field(init=False)
    node_hours: Annotated[float, Column("cost of the training", "node-hours")] = field(init=False)
    completed: Annotated[int, Column("attempts that completed")] = 0
    attempted: Annotated[int, Column("attempts that ended")] = 0
    success_rate: Annotated[float, Column("share of the attempts that completed")] = field(init=False)
    success_low: Annotated[float, Column("lower end of its 95 % interval")] = math.nan
    group: Annotated[int, Column("number of the group, from 1")] = 0
    first: Annotated[bool, Column("ends first in its group")] = False
    cheapest: Annotated[bool, Column("needs the fewest hours in its group")] = False
    safest: Annotated[bool, Column("has the best lower bound of the success rate in its group")] = False
    distinguishable: Annotated[bool | None, Column("total time differs from that of the first")] = None
    runs_needed: Annotated[float, Column("runs of each of both that would decide")] = math.nan
    state: Annotated[str, Column("state of the cell's runs")] = ""
    not_valid: Annotated[str, Column("reason why the values are not valid; there is no mark then")] = ""
    remark: Annotated[str, Column("remarks")] = ""
    low_s: float
    high_s: float
    samples: int
    epochs: int
    run_step_times: Sequence[float] = ()
    error: Finding | None = None

    def __post_init__(self) -> None:
        self.steps_per_epoch = math.ceil(self.samples / self.global_batch)
        times = self.training_times([self.step_time_s, self.low_s, self.high_s])
        self.training_s, self.training_low_s, self.training_high_s = times
        self.epoch_s = self.training_s / self.epochs
        self.gpu_hours = self.training_s / 3600 * self.gpus if self.device == "cuda" else math.nan
        self.node_hours = self.training_s / 3600 * self.nodes
        self.success_rate = self.completed / self.attempted if self.attempted else math.nan

    def training_times(self, step_times: Iterable[float]) -> list[float]:
        """Return the seconds of the training for each time per global batch."""
        extra = self.checkpoint_s if known(self.checkpoint_s) else 0.0
        return [self.epochs * (self.steps_per_epoch * step_s + extra) for step_s in step_times]

    @property
    def layout(self) -> Layout:
        """Study, nodes and ranks per node."""
        return self.study, self.nodes, self.gpus_per_node

    @property
    def eligible(self) -> bool:
        """True if the option was measured and its values are valid."""
        return self.kind == "measured" and not self.not_valid


@dataclass(frozen=True)
class Wait:
    """The queue wait of a layout in seconds (None if unknown), the source of the wait, and a remark on it.

    ``refused`` is true if a job of this layout would never start: it has no total time.
    """

    seconds: float | None
    source: str
    remark: str = ""
    refused: bool = False


@dataclass(frozen=True)
class Advice:
    """The options in the order of their group and total time, and notes for the reader.

    The options are for a training of ``epochs`` epochs with ``samples`` samples each. ``validity`` contains
    the findings about each study.
    """

    samples: int
    epochs: int
    options: list[Option]
    notes: list[str]
    validity: Mapping[str, Sequence[Finding]]

    def groups(self) -> list[Advice]:
        """Return the advice for each group of options with the same global batch."""
        groups = grouped(self.options, lambda option: option.group)
        return [replace(self, options=own) for own in groups.values()]

    def chosen(self, mark: str) -> Option | None:
        """Return the first option marked ``first``, ``cheapest`` or ``safest``; None if there is none."""
        return next((option for option in self.options if getattr(option, mark)), None)


def options_of(studies: Mapping[str, Study], *, samples: int, epochs: int) -> Advice:
    """Return the options of all studies, without queue waits: :func:`rank` adds them.

    ``samples`` are training samples per epoch.
    """
    found = Advice(samples, epochs, [], [], validity := {})
    for name, study in studies.items():
        about = CheckedStudy.of(study)
        validity[name] = about.assessment.findings
        if any(cell.is_average for cell in study.planned):
            found.notes.append(
                f"{name}: rates are averages of whole runs, so times do include start-up, and validation if "
                "the command counts it, in proportion to the samples"
            )
        found.options.extend(_options(about, name, samples=samples, epochs=epochs))
    return found


def rank(advice: Advice, waits: Mapping[Layout, Wait]) -> Advice:
    """Return the options with their queue waits, in groups, and in the order of their total time.

    The options of a group have the same global batch: other batches converge differently, so their times
    cannot be compared. The group with the option that ends first is group 1. Three valid options of each
    group are marked: the one that ends first, the cheapest one and the safest one. If no wait is known, the
    total time is the training time.
    """
    options, notes = [replace(option) for option in advice.options], [*advice.notes]
    for option in options:
        wait = waits.get(option.layout, Wait(None, ""))
        option.wait_s = math.nan if wait.seconds is None else wait.seconds
        option.wait_source = wait.source
        option.remark = "; ".join(filter(None, (option.remark, wait.remark)))
    waits_known = [known(option.wait_s) for option in options]
    if not any(waits_known):
        notes.append("No queue wait is known, so totals are training times only")
    elif not all(waits_known):
        notes.append("Options with an unknown queue wait have no total and are listed last")
    for option in options:
        is_refused = option.layout in waits and waits[option.layout].refused
        wait_s = math.nan if is_refused else option.wait_s if any(waits_known) else 0.0
        option.total_s = option.training_s + wait_s
    for place, own in enumerate(_groups(options), start=1):
        for option in own:
            option.group = place
        _mark(own)
    values = attrgetter("total_s", "training_s", "node_hours")
    options.sort(key=lambda one: (one.group, *map(_unknown_last, values(one)), one.study, one.cell_id))
    return replace(advice, options=options, notes=notes)


def _unknown_last(value: float) -> tuple[bool, float]:
    return (False, value) if known(value) else (True, 0.0)


def fastest_training_s(options: Iterable[Option]) -> dict[Layout, float]:
    """Return the shortest training time of each layout; infinite if unknown."""
    layouts = grouped(options, lambda option: option.layout)
    return {
        layout: min((option.training_s for option in own if known(option.training_s)), default=math.inf)
        for layout, own in layouts.items()
    }


def _options(about: CheckedStudy, name: str, *, samples: int, epochs: int) -> Iterator[Option]:
    """Yield one option per planned cell, measured or not."""
    study, frames = about.study, about.frames
    gpu, settings = _gpu(study), _settings(study)
    epochs_of_runs = study.epochs[
        study.epochs["run_id"].isin({run.run_id for run in about.runs if run.measured})
    ]
    checkpoints = epochs_of_runs.groupby("cell_id", observed=True)["checkpoint_time_sec"].mean().to_dict()
    success, cells = cell_success(study), {cell.cell_id: cell for cell in frames.cells}
    for row in first_of_cells(about.rows):
        runs = [] if row.other_batch else frames.measured_in(row.cell_id)
        step_times = [run.step_time_sec for run in runs]
        low_s, high_s = _further_run(step_times)
        own, error = success[row.cell_id], about.invalid.get(row.cell_id)
        yield Option(
            **{column: getattr(row, column) for column in columns_of(CellSize)},
            study=name,
            error=error,
            not_valid=error.kind if error else "",
            cell_id=row.cell_id,
            kind="measured" if row.n else "not measured",
            setting=settings.get(row.cell_id, ""),
            device=cells[row.cell_id].device,
            gpu=gpu,
            n=row.n,
            throughput_samples_per_sec=row.throughput_samples_per_sec,
            step_time_s=row.step_time_sec,
            low_s=low_s,
            high_s=high_s,
            checkpoint_s=checkpoints.get(row.cell_id, math.nan),
            samples=samples,
            epochs=epochs,
            completed=own.completed,
            attempted=own.attempted,
            success_low=own.low,
            state=row.state,
            remark=row.reason if row.n < row.runs else "",
            run_step_times=step_times,
        )


def _settings(study: Study) -> dict[str, str]:
    """Return, by cell, a text with the settings (except for size and batch) that vary between cells."""
    cells = study.settings
    names = {name for cell in cells.values() for name in cell}.difference(SIZES)
    varying = sorted(name for name in names if len({cell.get(name) for cell in cells.values()}) > 1)
    return {
        cell_id: ", ".join(f"{name.removeprefix('env.')} {cell.get(name, 'not set')}" for name in varying)
        for cell_id, cell in cells.items()
    }


def _further_run(step_times: Sequence[float]) -> tuple[float, float]:
    """Return both ends of the 90 % interval of a further run's time per step; NaN below 3 runs."""
    if len(step_times) < MIN_RUNS:
        return math.nan, math.nan
    moments = log_moments([step_times])
    half = special.stdtrit(moments.n - 1, 0.95) * np.sqrt(moments.variance * (1 + 1 / moments.n))
    low, high = np.exp(moments.mean - half), np.exp(moments.mean + half)
    return float(low[0]), float(high[0])


def _gpu(study: Study) -> str:
    """Return the name of the study's GPUs from env.json without the vendor; empty if unknown."""
    started = [run.run_id for run in study.runs if run.folder]
    for run_id in started[:50]:
        env = study.envs_of([run_id]).get(run_id)
        if env and env.get("device") == "cuda" and env.get("device_name"):
            return one_line(env["device_name"], limit=60).removeprefix("NVIDIA ")
    return ""


def _groups(options: Sequence[Option]) -> list[list[Option]]:
    """Return the options of each global batch, ordered by the shortest total time of a batch."""
    batches = grouped(options, lambda option: option.global_batch)

    def order(batch: float) -> tuple[bool, float, float]:
        totals = [one.total_s for one in batches[batch] if one.eligible and known(one.total_s)]
        return (*_unknown_last(min(totals, default=math.nan)), batch)

    return [batches[batch] for batch in sorted(batches, key=order)]


def _mark(options: Sequence[Option]) -> None:
    """Mark the first, cheapest and safest option of a group, and compare the others with the first."""
    own = [option for option in options if option.eligible and known(option.total_s)]
    if not own:
        return
    cost = attrgetter("gpu_hours" if all(known(option.gpu_hours) for option in own) else "node_hours")
    first = min(own, key=lambda one: (one.total_s, cost(one)))
    first.first = True
    min(own, key=lambda one: (cost(one), one.total_s)).cheapest = True
    min(own, key=lambda one: (-one.success_low, one.total_s)).safest = True
    for option in own:
        if option is not first:
            _compare(option, first)


def _compare(option: Option, first: Option) -> None:
    """Set ``distinguishable`` and ``runs_needed``.

    An option is distinguishable if Welch's 95 % interval of the ratio of both total times excludes 1; a queue
    wait counts as a constant. ``distinguishable`` is None below three runs.
    """
    other, best = _total_moments(option), _total_moments(first)
    low, high = (float(bound[0]) for bound in ratio_interval(other, best))
    if not math.isfinite(low):
        option.runs_needed = MIN_RUNS
        return
    option.distinguishable = not low <= 1 <= high
    if not option.distinguishable:
        centre, error, _ = (float(value[0]) for value in unpaired(best, other))
        runs = (
            runs_to_decide(centre, error=error, top_n=other.n[0], bottom_n=best.n[0]) if centre else math.inf
        )
        option.runs_needed = max(runs, min(other.n[0], best.n[0]) + 1)


def _total_moments(option: Option) -> LogMoments:
    """Return the moments of an option's total time over its runs."""
    wait_s = option.total_s - option.training_s
    return log_moments([[time_s + wait_s for time_s in option.training_times(option.run_step_times)]])
