"""Compute the scaling table with the reason of each missing value, and judge each size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from analysis.data.columns import ScalingRow, by_series, grouped
from analysis.data.load import Study
from analysis.data.names import size_name
from analysis.stats.measured import Measured, OutcomeCount, count_outcomes, measure
from analysis.stats.scaling import batch_per_rank, scale, with_baseline
from analysis.text import one_line
from ddp_scaling_bench.finding import Finding, messages
from ddp_scaling_bench.units import count, listed, names, number

#: Cells whose values are not valid, each with its first error.
Invalid = Mapping[str, Finding]


class RunsMissing(Finding, kind="runs-missing"):
    """Runs of a cell that do not count; ``reason`` is that of the first one that was not left out."""

    runs: int
    counted: int | None
    outcomes: tuple[OutcomeCount, ...]
    reason: str = ""

    def _message(self) -> str:
        counted = f"{self.counted} of {count(self.runs, 'run')}" if self.counted else "no run"
        why = f" ({self.reason})" if self.reason else ""
        return f"{counted} counted: {listed([*map(str, self.outcomes)], limit=4)}{why}"


class OtherBaseline(Finding, kind="other-baseline"):
    """A series without the baseline that was asked for."""

    asked: str

    def _message(self) -> str:
        return f"the baseline asked for, {self.asked}, was not measured in this series"


class LargerBaseline(Finding, kind="larger-baseline"):
    """A baseline that is not the smallest planned size, because the smaller ``sizes`` have no run."""

    baseline: str
    sizes: tuple[str, ...]

    def _message(self) -> str:
        have = "has" if len(self.sizes) == 1 else "have"
        return f"the baseline is {self.baseline}: {names(self.sizes)} {have} no completed run"


class OneCell(Finding, kind="one-cell"):
    """A series of one cell, which has no efficiency."""

    message = "no efficiency: the series has one cell only"


class NoRegime(Finding, kind="no-regime"):
    """A series that is neither strong nor weak scaling; ``advice`` is ``mixed`` if it may be two series."""

    advice: str = ""

    def _message(self) -> str:
        text = "no efficiency: neither the global batch nor the batch per rank is constant over the series"
        advice = "distinguish them by a column mode or series"
        return f"{text}; if these rows are a strong and a weak series, {advice}" if self.advice else text


class OtherRegime(Finding, kind="other-regime"):
    """A series whose batches are those of another scaling mode than its label."""

    label: str
    mode: str
    labelled_by: str

    def _message(self) -> str:
        source = {"plan": "the plan", "table": "the table", "option": "--mode"}[self.labelled_by]
        constant = {"strong": "global batch", "weak": "batch per rank"}[self.mode]
        return (
            f"the series is called {self.label} by {source}, but its {constant} is constant: {self.mode} "
            "scaling"
        )


@dataclass(frozen=True, kw_only=True)
class SamplesPerStep:
    """Planned and measured samples per step; None if the runs differ."""

    planned: int
    measured: float | None

    def __str__(self) -> str:
        measured = "runs differ" if self.measured is None else f"measured {number(self.measured)}"
        return f"{measured}, planned {self.planned:,}"


def samples_per_step(row: ScalingRow) -> SamplesPerStep:
    """Return the samples per step of a cell, whose unit is infinite if its runs differ."""
    measured = row.unit * row.global_batch if math.isfinite(row.unit) else None
    return SamplesPerStep(planned=int(row.global_batch), measured=measured)


class BatchesDiffer(Finding, kind="batches-differ"):
    """A cell without an efficiency, because it (``samples``) or its baseline processes another batch."""

    samples: SamplesPerStep | None = None

    def _message(self) -> str:
        text = "no efficiency: the runs of this cell or of its baseline process another batch than planned"
        return text if self.samples is None else f"no time per step, and {text} (per step: {self.samples})"


class TrainApart(Finding, kind="train-apart"):
    """A cell without an efficiency, because its ranks or those of its baseline do not train together."""

    message = "no efficiency: the ranks of this cell or of its baseline do not train together"


class TogetherUnknown(Finding, kind="together-unknown"):
    """A cell with several ranks of which nothing tells whether they train together."""

    message = "not measured whether the ranks train together"


def scaling_table(source: Study | Measured, *, baseline: str | None = None) -> list[ScalingRow]:
    """Return the scaling table of :func:`analysis.stats.scaling.scale`, with the column ``reason`` filled in.

    ``baseline`` is as :func:`analysis.stats.scaling.with_baseline` parses it.

    Raises:
        BenchError: no series contains the size or cell ``baseline``.
    """
    frames = source if isinstance(source, Measured) else measure(source)
    rows = scale(frames, baseline=baseline)
    by_regime = _about_regimes(rows, frames)
    by_baseline = _about_baselines(rows, baseline)
    for row in rows:
        found = [*_about_row(row, frames), by_regime.get(row.series)]
        found += [by_baseline.get(row.series) if row.n else None, *_about_comparison(row, frames)]
        row.facts = tuple(fact for fact in found if fact)
        row.reason = messages(row.facts)
    return rows


def _about_comparison(row: ScalingRow, frames: Measured) -> Iterator[Finding]:
    """Yield why a measured cell is not compared with its baseline."""
    both = (row, row.base or row)
    if row.n and any(one.other_batch for one in both):
        yield BatchesDiffer(samples=samples_per_step(row) if row.other_batch else None)
    if row.n and any(frames.are_separate(one.cell_id) for one in both):
        yield TrainApart()


def _about_row(row: ScalingRow, frames: Measured) -> Iterator[Finding]:
    """Yield whether the ranks may not train together, and the runs that do not count."""
    if row.n and frames.together.get(row.cell_id, True) is None:
        yield TogetherUnknown()
    runs = frames.runs_of_cells.get(row.cell_id, ())
    if lacking := [run for run in runs if not run.measured]:
        reasons = (messages(run.facts) for run in lacking if run.facts and not run.left_out)
        yield RunsMissing(
            runs=len(runs),
            counted=len(runs) - len(lacking) or None,
            outcomes=count_outcomes(lacking),
            reason=one_line(next(reasons, ""), limit=160),
        )


def _about_baselines(rows: Sequence[ScalingRow], baseline: str | None) -> dict[str, Finding]:
    """Return the facts about baselines that are not the requested one or not the smallest planned size."""
    if baseline:
        wanted = with_baseline(rows, baseline)
        asked = OtherBaseline(asked=one_line(baseline, limit=80))
        return {row.series: asked for row in rows if row.base and row.base not in wanted}
    found: dict[str, Finding] = {}
    for series, own in by_series(rows).items():
        smaller = [row for row in own if row.base and row.gpus < row.base.gpus and not row.n and row.ddp]
        if smaller:
            sizes = tuple(map(size_name, smaller))
            found[series] = LargerBaseline(baseline=smaller[0].baseline, sizes=sizes)
    return found


def _about_regimes(rows: Sequence[ScalingRow], frames: Measured) -> dict[str, Finding]:
    """Return the facts about missing efficiencies, and regimes (strong, weak) that differ from the label."""
    found: dict[str, Finding] = {}
    for series, own in by_series(rows).items():
        mode, label = own[0].mode, own[0].label_mode
        if mode and not label:
            continue
        if len(own) == 1:
            if not own[0].is_base:
                found[series] = OneCell()
        elif not mode:
            is_mixed = frames.labelled_by != "plan" and _contains_a_series(own)
            found[series] = NoRegime(advice="mixed" if is_mixed else "")
        elif mode != label:
            found[series] = OtherRegime(label=label, mode=mode, labelled_by=frames.labelled_by)
    return found


def _contains_a_series(rows: Sequence[ScalingRow]) -> bool:
    """Return whether some of the rows have equal batches and different sizes, and so form a series."""
    batches = [*grouped(rows, lambda row: row.global_batch).values(), *grouped(rows, batch_per_rank).values()]
    return any(len({row.gpus for row in own}) > 1 for own in batches)


def error_of(row: ScalingRow, base: ScalingRow | None, invalid: Invalid) -> Finding | None:
    """Return the error of a size or of its baseline; None if their values are valid."""
    return invalid.get(row.cell_id) or (invalid.get(base.cell_id) if base else None)
