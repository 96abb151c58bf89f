"""Compute the values of proposal.md.j2 and proposal.tex.j2: the scaling section of a compute time proposal.

Reviewers expect these facts: the method; the measurements with speedup, efficiency, interval and number of
runs; the requested job size and why; time and cost of a training with a reserve for failures; and what limits
the numbers. Each value has the number of its source.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from statistics import median
from typing import Annotated, Any

from analysis.causes.divide import NOT_EXPLAINED
from analysis.causes.table import rest_parts
from analysis.data.columns import (
    PROPOSAL,
    Column,
    ScalingRow,
    by_series,
    first_of_cells,
    part_title,
    three_digits,
)
from analysis.data.environment import Environment, describe
from analysis.data.names import job_size, nodes_known, widest_series
from analysis.decide import Choice, VerdictKind, decide
from analysis.report.decision import LEAST_LOSS, hours_per_million, main_loss
from analysis.report.figures.all_figures import efficiency_figure
from analysis.report.figures.drawing import Drawing
from analysis.report.results import Results
from analysis.report.tables import shown_columns, texts_of
from analysis.report.what_was_run import Executed, Sources, constant_batch, what_was_run
from analysis.report.words import mode_title
from analysis.stats.attempts import cell_success, reserve
from analysis.stats.estimate import MIN_RUNS
from analysis.stats.rates import rate_unit
from analysis.stats.scaling import GUIDE
from analysis.text import heading, message, one_line
from ddp_scaling_bench.finding import Finding, messages
from ddp_scaling_bench.units import (
    MISSING,
    capital,
    count,
    fraction,
    human_bytes,
    human_duration,
    known,
    listed,
    number,
    percent,
    seconds,
    whole,
)

#: The samples of a training if none are stated.
_EXAMPLE = 1_000_000
#: A training that takes so many times the measured time of a run is called an extrapolation.
_LONG = 2
#: Maximum number of losses that are named; losses below ``LEAST_LOSS`` are not.
_MOST_LOSSES = 3
#: Maximum number of cells without a result that are listed.
_MOST_MISSING = 6
#: Values of a finding that are left out: times of disturbances, lists of runs, and messages of a job.
_DETAILS = {"start", "end", "runs", "reason"}
#: Columns that the table's caption explains.
_EXPLAINED = ("global_batch", "cost")
_COST = "Node-h per million"
_REQUEST = "The request. Samples, time and hours are those of one training on the measured machine."
#: Cells in the text of a finding that are not in the table.
_OTHERS = "others not in the table"
#: By :attr:`Executed.kind`: what the time of a training does not include, and what is not known of a command.
_LEFT_OUT = {
    "average": "queue waits and work outside the reported rate",
    "values": "start-up, queue waits and work outside the reported rate",
    "recorder": "start-up, queue waits, and work between two loops over the batches",
    "built_in": "start-up, validation, checkpoints and queue waits",
}
_UNKNOWN = {
    "recorder": "what the command reads and writes; its kind of model; modules that its script imports",
    "values": (
        "whether the command used the batches of the plan; its input, output, model and memory; whether its "
        "warm-up was over and its ranks equally fast; modules that its script imports"
    ),
}
#: The cells that a finding names, the finding in words, and whether it is an error.
_Finding = tuple[set[str], str, bool]


@dataclass(frozen=True)
class Work:
    """What time is asked for: trainings of ``epochs`` epochs with ``samples`` each."""

    samples: int
    epochs: int = 1
    trainings: int = 1

    @property
    def total(self) -> int:
        """The samples of one training."""
        return self.samples * self.epochs


@dataclass(frozen=True)
class _Series:
    """One series: its measured rows from small to large, its scaling mode and its baseline.

    ``mode`` is empty for measured sizes that have no efficiency.
    """

    rows: Sequence[ScalingRow]
    mode: str
    base: ScalingRow


@dataclass(kw_only=True, eq=False)
class ProposalRow(ScalingRow):
    """A row of the table in the proposal."""

    mode: Annotated[str, Column("scaling mode", "", (PROPOSAL,), "Scaling")]
    cost: Annotated[float, Column("node-hours per million samples", "", (PROPOSAL,), _COST, three_digits)]
    limits: Annotated[str, Column("letters in the list of limits", "", (PROPOSAL,), "Limits")]


def proposal_figure(results: Results) -> Drawing | None:
    """Draw the efficiencies of the first series that the proposal describes; None if it describes none."""
    series = _described(results)
    return efficiency_figure(results, series[0].rows) if series else None


def proposal_context(
    results: Results, figure: Drawing | None = None, *, work: Work | None = None
) -> dict[str, Any]:
    """Return the values of proposal.md.j2 and proposal.tex.j2; texts are not escaped.

    ``figure`` is that of :func:`proposal_figure`. ``work`` is what time is asked for; by default, one
    training of a million samples.
    """
    frames, study, series = results.frames, results.study, _described(results)
    runs = [run for run in frames.runs if run.measured] or frames.runs
    if series:
        cells = {row.cell_id for one in series for row in (*one.rows, one.base)}
        runs = [run for run in runs if run.cell_id in cells]
    ids = {run.run_id for run in runs}
    environment = describe({name: env for name, env in results.environment.envs.items() if name in ids})
    sources = Sources(study.table.name if study.table else "")
    series = series or _without_efficiency(results.rows)
    return _Proposal(results, series, Executed(study, runs), environment, sources, work).context(figure)


@dataclass(frozen=True)
class _Proposal:
    """A study with the series, the runs and the work that its proposal describes."""

    results: Results
    series: Sequence[_Series]
    executed: Executed
    environment: Environment
    sources: Sources
    work: Work | None

    @property
    def scales(self) -> bool:
        """True if a series has an efficiency."""
        return bool(self.series and self.series[0].mode)

    @cached_property
    def found(self) -> Choice:
        """The verdicts on the sizes of the first series."""
        return decide(self.series[0].rows, invalid=self.results.invalid)

    @cached_property
    def open(self) -> list[ScalingRow]:
        """The sizes of the first series above the recommended one that may be as good."""
        best, verdicts, none = self.found.best, self.found.verdicts, VerdictKind.NO_ADVICE
        decided = {VerdictKind.INEFFICIENT, VerdictKind.BASELINE, VerdictKind.NO_RESULT, none}
        larger = [row for row in self.series[0].rows if best is None or row.gpus > best.gpus]
        return [row for row in larger if verdicts[row.place].kind not in decided]

    @property
    def row(self) -> ScalingRow:
        """The requested size: the recommended one, or else the baseline."""
        return self.series[0].base if self.found.best is None else self.found.best

    @property
    def error(self) -> Finding | None:
        """The error of the requested size; None if its values are valid."""
        return self.results.invalid.get(self.row.cell_id)

    @property
    def shown(self) -> list[ScalingRow]:
        """The rows of the table, and their baselines."""
        return [row for one in self.series for row in (*one.rows, one.base)]

    @property
    def cite(self) -> Callable[..., str]:
        """The numbers of some sources, see :meth:`Sources.cite`."""
        return self.sources.cite

    def context(self, figure: Drawing | None) -> dict[str, Any]:
        """Return the values of the templates, see :func:`proposal_context`."""
        method = [*what_was_run(self.executed, self.environment, self.sources), *self.definitions()]
        findings = self.findings()
        measured = self.table(findings) if self.series else None
        advice = [*self.advice(), *self.losses()] if self.scales else []
        rate = self.row.throughput_samples_per_sec if self.scales and not self.error else math.nan
        request = list(self.request()) if known(rate) else []
        limits = [text for _, text, _ in findings] + list(self.limits(request))
        caption = f"{figure.subject}, {figure.mode} scaling. {figure.caption}".strip() if figure else ""
        return {
            "title": f"Scaling of {self.results.study.name}",
            "is_example": self.work is None and bool(request),
            "method": " ".join(method),
            "advice": " ".join(advice),
            "measured": measured,
            "figure": figure,
            "figure_caption": caption,
            "request": request,
            "request_caption": _REQUEST,
            "limits": [(_letter(place), text) for place, text in enumerate(limits)],
            "sources": self.sources.texts,
        }

    # -- method and measurements ------------------------------------------------------

    def definitions(self) -> Iterator[str]:
        """Yield the definitions of efficiency and interval, as far as the table contains them."""
        if not self.scales:
            yield ("No two sizes can be compared with each other, so there is no speedup and no efficiency.")
            return
        if any(known(row.throughput_low) for row in self.shown):
            yield (
                "Ranges are 95 % confidence intervals over the runs (Student's t, for ratios Welch's t, on "
                f"logarithms) {self.cite('scaling')}."
            )
        base = " and ".join(dict.fromkeys(job_size(one.base) for one in self.series))
        yield f"T is the time per step on N ranks, and the baseline N0 is {base}."
        for one in self.series:
            batch = constant_batch(one.mode, self.executed)
            if one.mode == "strong":
                formulas = "speedup S(N) = T(N0)/T(N), efficiency E(N) = S(N) N0/N"
            else:
                formulas = "efficiency E(N) = T(N0)/T(N), scaled speedup S(N) = E(N) N/N0"
            yield f"{mode_title(one.mode)} keeps the {batch} constant: {formulas}."
        yield (
            f"The guide for the efficiency is {GUIDE}, which the POP Centre of Excellence regards as "
            f"acceptable for its own efficiency metrics {self.cite('guide')}."
        )

    def table(self, findings: Sequence[_Finding]) -> dict[str, Any]:
        """Return the table's caption, headings and rows; an empty column is left out."""
        rows = [self._table_row(row, one.mode, findings) for one in self.series for row in one.rows]
        unit = rate_unit(rows)
        columns = shown_columns(PROPOSAL, ProposalRow, unit=unit)
        lines = zip(*texts_of(unit.rows(rows), columns, PROPOSAL), strict=True)
        texts = {name: own for name, own in zip(columns, lines, strict=True) if set(own) - {MISSING, ""}}
        headings = {name: columns[name].heading for name in texts}
        if self.executed.reads_values and "global_batch" in headings:  # that of the command is not known
            headings["global_batch"] += " (planned)"
        if len(self.series) == 1:
            texts.pop("mode", None)
        meanings = {name: columns[name].meaning for name in _EXPLAINED if name in texts}
        explained = [f"{headings[name]}: {meaning}" for name, meaning in meanings.items()]
        explained += [f"{MISSING}: no value"] * any(MISSING in own for own in texts.values())
        explained += ["rows with the same ranks and batch show the same runs"] * (
            len({row.cell_id for row in rows}) < len(rows)
        )
        named = [f"{mode_title(one.mode)}" for one in self.series if one.mode] or ["Measurements"]
        source = self.sources.cite("scaling")
        return {
            "caption": f"{capital(' and '.join(named).lower())} {source}. {'; '.join(explained)}.",
            "headings": [headings[name] for name in texts],
            "rows": [list(row) for row in zip(*texts.values(), strict=True)],
        }

    def _table_row(self, row: ScalingRow, mode: str, findings: Sequence[_Finding]) -> ProposalRow:
        base = row.base.cell_id if row.base else ""  # an efficiency is as valid as its baseline
        affected = [
            _letter(place)
            for place, (cells, _, is_error) in enumerate(findings)
            if row.cell_id in cells or (is_error and base in cells)
        ]
        values = vars(row) if mode else vars(row) | {"speedup": math.nan, "efficiency": math.nan}
        cost = hours_per_million(row)
        return ProposalRow(**values | {"mode": mode}, cost=cost, limits=", ".join(affected))

    # -- the requested size -----------------------------------------------------------

    def advice(self) -> Iterator[str]:
        """Yield the requested size with its reason, and what is known about larger sizes."""
        found, series = self.found, self.series[0]
        closest = max(reversed(found.below), key=lambda row: row.efficiency, default=None)
        other = closest or next(iter(self.open), None)
        if (best := found.best) is not None:
            yield self._recommended(best, series.mode)
            other = next((row for row in series.rows if row.gpus > best.gpus), None)
            if other is None:
                yield "No larger size has an efficiency."
            elif other not in self.open[:1]:
                yield f"The next larger size, {job_size(other)}, has an efficiency of {_efficiency(other)}."
        elif not self.open:
            if closest:
                yield (
                    f"No measured size beyond the baseline reaches an efficiency of {GUIDE} ({series.mode} "
                    f"scaling); {job_size(closest)} is closest, with {_efficiency(closest)} "
                    f"{self.cite('scaling')}."
                )
            else:
                yield f"No size beyond the baseline has an efficiency {self.cite('scaling')}."
        if self.open:
            yield self._undecided(self.open[0])
        base = job_size(series.base)
        if best is None and self.error:
            yield (
                f"No size is requested: the values of the baseline, {base}, are not valid "
                f"({heading(self.error)})."
            )
        elif best is None:
            yield f"The request is therefore for the baseline, {base}."
        if other and not self.error:
            yield from self._gain(self.row, other)

    def _recommended(self, best: ScalingRow, mode: str) -> str:
        """Return sentences about the recommended size."""
        checks = {one.name: one.possible for one in self.results.assessment.checks}
        undisturbed = " without a recorded disturbance (such as another job on the nodes)"
        return (
            f"The requested job size is {job_size(best)}, with an efficiency of {_efficiency(best)} ({mode} "
            f"scaling) {self.cite('scaling')}. In {mode} scaling, it is the largest measured size whose "
            f"whole interval is at least {GUIDE} and that is faster than each smaller size, with at least "
            f"{MIN_RUNS} runs of it and of the baseline{undisturbed if checks.get('disturbances') else ''}."
        )

    def _gain(self, chosen: ScalingRow, larger: ScalingRow) -> Iterator[str]:
        """Yield what a larger size than the requested one gains and costs, if it is valid."""
        gain = larger.throughput_samples_per_sec / chosen.throughput_samples_per_sec
        cost = hours_per_million(larger) / hours_per_million(chosen)
        if known(gain) and known(cost) and not self.results.error_of(larger):
            yield (
                f"{job_size(larger)} has {three_digits(gain)} times the throughput and {three_digits(cost)} "
                "times the node-hours per sample of the requested size."
            )

    def _undecided(self, row: ScalingRow) -> str:
        """Return a sentence about a size that the runs neither recommend nor rule out."""
        size = job_size(row)
        if error := self.results.error_of(row):
            return f"Nothing is concluded about {size}: its values are not valid ({heading(error)})."
        return (
            f"The runs cannot tell whether {size} reaches an efficiency of {GUIDE} ({row.mode} scaling): it "
            f"has {_efficiency(row)} {self.cite('scaling')}."
        )

    def losses(self) -> Iterator[str]:
        """Yield the largest losses of the largest valid size of the first series, if they are known."""
        valid = [row for row in self.series[0].rows if not self.results.error_of(row) and not row.is_base]
        division = self.results.divisions.get(valid[-1].place) if valid else None
        if division is None or valid[-1].efficiency > 1 - LEAST_LOSS or not known(main_loss(division)[1]):
            return
        rest = next(one for one in division.rows if one.cause == NOT_EXPLAINED)
        shares = [(one.title, one.share) for one in division.rows if one is not rest]
        if not rest.share_low <= 0:
            shares += [(part_title(part.part), part.share) for part in rest_parts(division)]
        largest = sorted((one for one in shares if abs(one[1]) >= LEAST_LOSS), key=lambda one: -abs(one[1]))
        texts = [
            f"{name} {percent(share)}" if share > 0 else f"{name}, a gain of {percent(-share)}"
            for name, share in largest[:_MOST_LOSSES]
        ]
        yield (
            f"Of a step of {job_size(valid[-1])}, {percent(division.loss)} is lost compared with the rate of "
            f"the baseline. The largest losses, as shares of the step: {listed(texts)} {self.cite('causes')}."
        )

    # -- the request ------------------------------------------------------------------

    def request(self) -> Iterator[tuple[str, str, str]]:
        """Yield the rows of the request: a quantity, its value, and its source or formula."""
        row = self.row
        work, stated = (Work(_EXAMPLE), "an example") if self.work is None else (self.work, "applicant")
        source = self.sources.cite("scaling")
        times_s = [work.total / rate for rate in _rates(row)]
        yield "Job size", job_size(row), source
        read = rate_unit([row])
        rates = [read.of(rate, row) for rate in _rates(row)]
        yield "Throughput", _with_range(rates, number), f"{read.name} {source}"
        epochs = f"{work.samples:,} x {work.epochs} epochs = " if work.epochs > 1 else ""
        yield "Samples", f"{epochs}{work.total:,}", stated
        yield "Time", _with_range(times_s, human_duration), "samples / throughput"
        units = [("node-hours", "node", row.nodes)] if nodes_known(row) else []
        units += [("GPU-hours", "GPU", row.gpus)] if self._has_gpus else []
        units = units or [("rank-hours", "rank", row.gpus)]
        for name, unit, times in units:
            hours = [times * one / 3600 for one in times_s]
            yield capital(name), _with_range(hours, three_digits), f"{count(int(times), unit)} x time"
        yield "Trainings", f"{work.trainings:,}", stated
        share, formula = 0.0, "trainings x hours"
        if not self.executed.study.table:
            done, tried = cell_success(self.executed.study)[row.cell_id]
            share, source = reserve(done / tried), self.sources.cite("runs")
            completed = f"{percent(share)}: {done} of {count(tried, 'attempt')} completed"
            yield "Reserve", completed, f"1/({done}/{tried}) - 1 {source}"
            formula += " x (1 + reserve)"
        hours = [work.trainings * (1 + share) * time_s / 3600 for time_s in times_s]
        totals = [f"{_with_range([n * one for one in hours], three_digits)} {name}" for name, _, n in units]
        yield "Total", ", ".join(totals), formula

    @property
    def _has_gpus(self) -> bool:
        return self.executed.study.cells[self.row.cell_id].device == "cuda"

    # -- limits -----------------------------------------------------------------------

    def findings(self) -> list[_Finding]:
        """Return the errors and warnings about cells of the table, and the sizes with few runs."""
        shown = {row.cell_id: row for row in self.shown}
        names = {cell: name if cell in shown else _OTHERS for cell, name in self._names.items()}
        found = []
        for fact in self.results.assessment.findings:
            if cells := {cell for cell in shown if not fact.subject or cell in fact.subject}:
                subject = sorted(fact.subject, key=lambda cell: cell not in shown)
                subject = list(dict.fromkeys(names.get(cell, _OTHERS) for cell in subject))
                named = replace(_renamed(fact, names), subject=tuple(subject))
                is_error = fact.severity == "error"
                text = f"{heading(fact)}. {message(named)} {self.cite('page')}"
                found.append((cells, f"Not valid: {text}" if is_error else text, is_error))
        if few := {cell for cell, row in shown.items() if 0 < row.n < MIN_RUNS}:
            text = f"Fewer than {MIN_RUNS} runs: without an interval, differences may be chance."
            found.append((few, text, False))
        return found

    @cached_property
    def _names(self) -> dict[str, str]:
        """The size of each cell, with its batch if other cells that are described have the same size."""
        rows = first_of_cells(self.results.rows)
        described = [row for row in self.results.rows if row.series not in self._not_described]
        sizes = Counter(map(job_size, first_of_cells(described)))
        batches = [f" with batch {whole(row.global_batch)}" * (sizes[job_size(row)] > 1) for row in rows]
        return {row.cell_id: job_size(row) + batch for row, batch in zip(rows, batches, strict=True)}

    def limits(self, request: Sequence[tuple[str, str, str]]) -> Iterator[str]:
        """Yield what else limits the numbers and the ``request``, as far as it is known."""
        executed = self.executed
        if self.scales and not known(self.row.throughput_samples_per_sec):
            yield (
                "The throughput, and with it the time and cost of a training, is not known: the table does "
                "not contain the batch of a step."
            )
        if self.scales:
            yield from self._all_runs()
        if {row.nodes for row in self.shown if nodes_known(row)} == {1}:
            yield "All sizes are on one node: scaling over nodes was not measured."
        if request and not self.executed.reads_values:
            yield from self._extrapolation()
        if not executed.study.table:
            if request:
                yield f"The time per training does not include {_LEFT_OUT[executed.kind]}."
                yield from self._reserve_and_memory()
            if executed.kind != "built_in" and any(row.n for row in self.shown):
                yield f"Not examined: {_UNKNOWN['recorder' if executed.kind == 'recorder' else 'values']}."
        yield from self._without_result()
        if more := len(self._not_described):
            series = count(more, "other series", "other series")
            yield (
                f"Not described: {series} of the study, with other settings or another batch "
                f"{self.cite('scaling')}."
            )

    @cached_property
    def _not_described(self) -> set[str]:
        """The series with other settings than the described ones, or with the scaling mode of one of them."""
        own = {one.rows[0].series: one.mode for one in self.series if self.scales}
        alike, shown = _alike(self.results, [*own]), {row.cell_id for row in self.shown}
        alike -= {row.series for row in self.results.rows if row.mode in own.values()} - own.keys()
        return {row.series for row in self.results.rows if row.cell_id not in shown} - alike

    def _all_runs(self) -> Iterator[str]:
        """Yield the efficiencies with the runs left out."""
        texts = [
            f"{text} at {job_size(row)}"
            for row in (row for one in self.series for row in one.rows)
            if (text := fraction(row.efficiency_all)) not in (MISSING, fraction(row.efficiency))
        ]
        if texts:
            yield (
                f"With the runs that were left out as disturbed, the efficiency is {listed(texts)} "
                f"{self.cite('scaling')}."
            )

    def _extrapolation(self) -> Iterator[str]:
        """Yield how long a run of the requested size was measured, if a training takes much longer."""
        runs = self.results.frames.runs_of_cells[self.row.cell_id]
        windows = [run.window_s for run in runs if known(run.window_s)]
        window_s, work = median(windows) if windows else math.nan, self.work or Work(_EXAMPLE)
        times = work.total / self.row.throughput_samples_per_sec / window_s
        if times >= _LONG:
            yield (
                f"A run of the requested size was timed for {seconds(window_s)} (median) "
                f"{self.cite('runs')}; a training, {three_digits(times)} times as long, is assumed to run at "
                "the same speed."
            )

    def _reserve_and_memory(self) -> Iterator[str]:
        success = cell_success(self.executed.study)[self.row.cell_id]
        yield (
            f"With {count(success.attempted, 'attempt')}, the success rate may be as low as "
            f"{percent(success.low)} (lower end of its 95 % interval {self.cite('wilson')}); the reserve "
            f"would then be {percent(reserve(success.low))}. Each failure is taken to be independent and to "
            "cost a whole job."
        )
        runs = [run.run_id for run in self.executed.runs if run.cell_id == self.row.cell_id]
        epochs = self.executed.study.epochs
        used = epochs.loc[epochs["run_id"].isin(runs), "peak_mem_bytes"].astype(float).max()
        if known(used):
            envs = [self.environment.envs.get(run_id, {}) for run_id in runs]
            sizes = [size for env in envs if isinstance(size := env.get("device_memory_bytes"), int)]
            # Only the memory of a GPU is known to be that of one rank.
            of = f", of the {human_bytes(min(sizes))} of its GPU" if len(sizes) == len(envs) else ""
            names = ("memory", "env") if of else ("memory",)
            what = f"A rank of the requested size used up to {human_bytes(used)} of memory{of}"
            yield f"{what} {self.cite(*names)}."

    def _without_result(self) -> Iterator[str]:
        """Yield the sizes that are not in the table, with the reasons."""
        shown = {row.cell_id for row in self.shown}
        out = [row for row in self.results.rows if row.cell_id not in shown]
        out = [row for row in out if row.series not in self._not_described]
        lacking = first_of_cells(row for row in out if not (row.n and known(row.efficiency)))
        for row in lacking[:_MOST_MISSING]:
            reason = messages(_renamed(row.facts, {}))
            reason = one_line(reason, limit=200) or (row.state if not row.n else "no series")
            what = "has no result"
            if row.n:
                what = f"was measured in {count(int(row.n), 'run')}, but is not in the table"
            yield f"{self._names[row.cell_id]} {what}: {reason} {self.cite('scaling')}."
        if (more := len(lacking) - _MOST_MISSING) > 0:
            cells = count(more, "more configuration")
            yield f"{cells} of the plan have no result or no efficiency, either {self.cite('scaling')}."


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """Return a finding, or a value of it, with other names of its cells, without details and other cells."""
    if is_dataclass(value) and not isinstance(value, type):
        values = {one.name: (one.default, getattr(value, one.name)) for one in fields(value)}
        details = {name for name in values.keys() & _DETAILS if not isinstance(values[name][1], int)}
        renamed = {name: _renamed(own, names) for name, (_, own) in values.items()}
        return replace(value, **renamed | {name: values[name][0] for name in details})
    if isinstance(value, Mapping):
        own = {names.get(key, key): _renamed(one, names) for key, one in value.items()}
        return {key: one for key, one in own.items() if key != _OTHERS}
    if isinstance(value, list | tuple):
        return type(value)(_renamed(own, names) for own in value)
    return names.get(value, value) if isinstance(value, str) else value


def _letter(place: int) -> str:
    """Return the name of a limit: a, b, ..., z, a1, ..."""
    return f"{chr(ord('a') + place % 26)}{place // 26 or ''}"


def _described(results: Results) -> list[_Series]:
    """Return one series of strong and one of weak scaling with the same settings, as far as they exist."""
    rows = results.rows
    strong = _series(results, "strong", rows)
    alike = _alike(results, [strong.rows[0].series] if strong else [])
    weak = _series(results, "weak", [row for row in rows if row.series in alike])
    return [found for found in (strong, weak) if found]


def _alike(results: Results, names: Sequence[str]) -> set[str]:
    """Return the series that differ from one of ``names``, if any, in scaling mode and batch only."""
    parts = {row.series: results.parts.get(row.series, {}) for row in results.rows}
    settings = {name: {**own, "mode": "", "batch": ""} for name, own in parts.items()}
    return {name for name, own in settings.items() if not names or own in map(settings.get, names)}


def _series(results: Results, mode: str, rows: Sequence[ScalingRow]) -> _Series | None:
    """Return the series of a mode with the most valid, else measured, sizes; in a tie, the most runs."""
    measured = [row for row in rows if row.mode == mode and known(row.efficiency)]
    runs = {name: sum(row.n for row in own) for name, own in by_series(measured).items()}
    measured.sort(key=lambda row: -runs[row.series])
    valid = [row for row in measured if not results.error_of(row)]
    widest = widest_series(valid, limit=1) or widest_series(measured, limit=1)
    if not widest:
        return None
    own = sorted((row for row in measured if row.series == widest[0]), key=lambda row: (row.gpus, row.nodes))
    # The baseline may be a cell of another series, such as one rank without DDP.
    base = own[-1].base or own[-1]
    return _Series(own, mode, base)


def _without_efficiency(rows: Sequence[ScalingRow]) -> list[_Series]:
    """Return the measured sizes of a study without efficiencies as one series, if there are any."""
    measured = sorted(first_of_cells(row for row in rows if row.n), key=lambda row: row.gpus)
    return [_Series(measured, "", measured[0])] if measured else []


def _efficiency(row: ScalingRow) -> str:
    return _with_range([row.efficiency, row.efficiency_high, row.efficiency_low], fraction)


def _rates(row: ScalingRow) -> list[float]:
    """Return the throughput, and the upper and the lower end of its interval."""
    return [row.throughput_samples_per_sec, row.throughput_high, row.throughput_low]


def _with_range(values: Sequence[float], form: Callable[[float], str]) -> str:
    """Return a value and the ends of its interval, if it has one: ``3 (2 to 4)``."""
    value, *ends = values
    return f"{form(value)} ({' to '.join(map(form, sorted(ends)))})" if all(map(known, ends)) else form(value)
