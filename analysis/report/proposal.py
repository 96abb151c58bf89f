"""Compute the values of proposal.md.j2 and proposal.tex.j2: the scaling section of a compute time proposal.

Reviewers expect these facts: the method; the measurements with speedup, efficiency, interval and number of
runs; the requested job size and why; time and cost of a training with a reserve for failures; and what limits
the numbers. They do not have the study, so no text names a file of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

from analysis.data.columns import ScalingRow, by_series, first_of_cells, three_digits
from analysis.data.environment import describe
from analysis.data.names import job_size, nodes_known
from analysis.decide import Choice, Judged, VerdictKind, decide, efficiency_text, probability_text
from analysis.report.decision import main_loss
from analysis.report.figures.drawing import Drawing
from analysis.report.figures.scaling import efficiency_figure
from analysis.report.profile import Profile
from analysis.report.results import Results
from analysis.report.tables import TextTable, text_table
from analysis.report.what_was_run import Executed, what_was_run
from analysis.report.words import mode_title
from analysis.stats.attempts import cell_success, reserve
from analysis.stats.estimate import MIN_RUNS
from analysis.stats.rates import rate_unit
from analysis.stats.scaling import GUIDE
from analysis.text import heading, message, one_line
from ddp_scaling_bench.errors import BenchError
from ddp_scaling_bench.finding import Finding, messages
from ddp_scaling_bench.units import (
    MISSING,
    MOST_NAMES,
    capital,
    count,
    fraction,
    human_bytes,
    human_duration,
    known,
    listed,
    names,
    number,
    percent,
    seconds,
    short_percent,
    whole,
)

#: The samples of a training if none are stated.
_EXAMPLE = 1_000_000
#: A training that takes so many times the measured time of a run is called an extrapolation.
_LONG = 2
#: Maximum number of cells without a result that are listed.
_MOST_MISSING = 6
#: Values of a finding that are left out: times of disturbances, lists of runs, and messages of a job.
_DETAILS = {"start", "end", "runs", "reason"}
_POP = (
    "The guide for the efficiency is {guide}, which the POP Centre of Excellence (Performance Optimisation "
    "and Productivity, co-design.pop-coe.eu/metrics) regards as acceptable for its own efficiency metrics."
)
_OF_CENTRE = "The guide for the efficiency is {guide}, the least that {title} asks for (rules of {date})."
_OF_WALL_TIME = (
    "The rules mean the efficiency of the wall time (in the table of runs, if it is known); sizes are chosen "
    "by that of the time per step."
)
_NOT_COMPARED = (
    "No two sizes can be compared with each other, so there is no speedup and no efficiency, and no time is "
    "requested."
)
_REQUEST = "The request. Samples, time and hours are those of one training on the measured machine."
#: Cells in the text of a finding that are not in the tables.
_OTHERS = "others not in the table"
#: What the verdict on a size that is not recommended means for its efficiency.
_VERDICTS = {
    VerdictKind.EFFICIENT: "but it is not faster than each smaller size",
    VerdictKind.AT_THE_GUIDE: "which is {guide} within 5 %",
    VerdictKind.INEFFICIENT: "which is below {guide}",
}
_CANNOT_TELL = "and the runs cannot tell whether this is at least {guide}"
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


@dataclass(frozen=True)
class Request:
    """What a proposal asks for: time for ``trainings`` of ``epochs`` epochs with ``samples`` each.

    ``series`` is the one whose recommended size is requested, see :func:`choose_series`. Without ``samples``,
    the training is an example. ``profile`` is what a centre asks for, and ``target_size`` the largest job in
    production, in the form of :func:`analysis.stats.scaling.with_baseline`.
    """

    series: str = ""
    samples: int | None = None
    epochs: int = 1
    trainings: int = 1
    profile: Profile | None = None
    target_size: str = ""

    @property
    def guide(self) -> float:
        """The least efficiency of a recommended size."""
        return self.profile.threshold if self.profile else GUIDE

    @property
    def total(self) -> int:
        """The samples of one training."""
        return (self.samples or _EXAMPLE) * self.epochs


def choose_series(
    results: Results, choices: Mapping[str, Choice], wanted: str = "", *, same_input: bool = False
) -> tuple[str, str]:
    """Return the series that a proposal is based on, and why; empty if no series has several sizes.

    ``choices`` are the verdicts on all series. ``wanted`` is the name of a series, or parts of it that no
    other series has (``weak, precision bf16``). With ``same_input``, series of strong scaling come first.

    Raises:
        BenchError: there is no such series.
    """
    scaled = _scaled(results, choices)
    if wanted:
        parts = {part.strip().casefold() for part in wanted.split(",")}
        alike = [name for name in scaled if name == wanted or parts <= _words(results, name)]
        if len(alike) == 1 or wanted in alike:
            return (wanted if wanted in alike else alike[0]), "it was chosen by the applicant"
        what = "is not unique" if alike else "is no series with several sizes"
        raise BenchError(
            f"--series {wanted!r} {what}",
            remedy=f"give one of {names(alike or scaled, limit=3)}"
            if scaled
            else "omit it: no series has several",
        )
    strong = {name: rows for name, rows in scaled.items() if rows[0].mode == "strong"}
    of_all = ""
    if same_input and strong:
        of_all = " (of strong scaling, which has the same input at all sizes)" * (len(strong) < len(scaled))
        scaled = strong
    best = {name: row for name in scaled if (row := choices[name].best)}
    if best:
        alone = f"it is the only one with a recommended size{of_all}"
        several = f"it has the highest throughput of those with a recommended size{of_all}"
        name = max(best, key=lambda one: best[one].throughput_samples_per_sec)
        return name, several if len(best) > 1 else alone
    merits = {name: _merit(results, rows) for name, rows in scaled.items()}
    name = max(merits, key=lambda name: merits[name], default="")
    is_first = all(merits[name][0] > own[0] for other, own in merits.items() if other != name)
    most = "has the most valid sizes" if is_first else "has as many valid sizes as any"
    return name, f"none has a recommended size, and this one {most}{of_all}"


def _scaled(results: Results, choices: Mapping[str, Choice]) -> dict[str, list[ScalingRow]]:
    """Return the rows with an efficiency of each series that has several such sizes, or a recommended one."""
    rows = by_series(row for row in results.rows if known(row.efficiency))
    return {
        name: sorted(own, key=lambda row: (row.gpus, row.nodes))
        for name, own in rows.items()
        if len({row.gpus for row in own}) > 1 or choices[name].best
    }


def _words(results: Results, series: str) -> set[str]:
    """Return the parts of the name of a series, as the page shows them."""
    parts = results.parts.get(series, {})
    return {part.casefold() for part in (*parts.values(), mode_title(parts.get("mode", "")), series)}


def _merit(results: Results, rows: Sequence[ScalingRow]) -> tuple[int, ...]:
    """Rank a series by its valid sizes, its sizes and its runs; of equal ones, strong scaling is first."""
    valid = {row.gpus for row in rows if not results.error_of(row)}
    return len(valid), len({row.gpus for row in rows}), sum(row.n for row in rows), rows[0].mode == "strong"


@dataclass(frozen=True)
class _Limit:
    """A finding that limits the values of some cells, in words."""

    cells: set[str]
    text: str
    is_error: bool = False


@dataclass(frozen=True)
class Proposal:
    """A study with what its proposal describes and requests.

    Attributes:
        series: the rows of the series that the request is based on and, if there is one, of the series of the
            other scaling mode with the same settings; none if no series can be described.
        reason: why it is this series; empty if there is no other.
        choices: the verdicts on the sizes of each series by the guide of the request.
    """

    results: Results
    asked: Request
    series: Sequence[Sequence[ScalingRow]]
    reason: str
    choices: Mapping[str, Choice]

    @staticmethod
    def of(results: Results, request: Request) -> Proposal:
        """Choose the series of a proposal; raises BenchError if the requested one does not exist."""
        rows, guide = by_series(results.rows), request.guide
        options: dict[str, Any] = {"invalid": results.invalid, "guide": guide, "spread": results.spread}
        choices = {one: decide(own, **options) for one, own in rows.items()}
        same_input = bool(request.profile and "same_input" in request.profile.contents)
        name, reason = choose_series(results, choices, request.series, same_input=same_input)
        scaled = _scaled(results, choices)
        chosen = [scaled[name]] if name else []
        settings = {one: {**results.parts.get(one, {}), "mode": "", "batch": ""} for one in scaled}
        alike = [own for one, own in scaled.items() if settings[one] == settings[name]]
        others = [own for own in alike if own[0].mode != chosen[0][0].mode]
        chosen += sorted(others, key=lambda rows: _merit(results, rows))[-1:]
        several = len(rows) > 1 and bool(name)
        return Proposal(results, request, chosen, reason * several, choices)

    @property
    def name(self) -> str:
        """The series that the request is based on; empty if there is none."""
        return self.series[0][0].series if self.series else ""

    def figure(self) -> Drawing | None:
        """Draw the efficiencies of the series that the request is based on."""
        guide = self.asked.guide
        return efficiency_figure(self.results, self.series[0], guide=guide) if self.series else None

    def context(self, figure: Drawing | None = None) -> dict[str, Any]:
        """Return the values of proposal.md.j2 and proposal.tex.j2; texts are not escaped."""
        ids = {run.run_id for run in self.executed.runs}
        envs = {name: env for name, env in self.results.environment.envs.items() if name in ids}
        method = [*what_was_run(self.executed, describe(envs)), self._guide_text()]
        requested = self.row if self.row and known(_rates(self.row)[0]) and not self.error else None
        request = list(self.request(requested)) if requested else []
        limits = [*(limit.text for limit in self.findings), *self.limits(requested)]
        caption = f"{figure.subject}, {figure.mode} scaling. {figure.caption}".strip() if figure else ""
        return {
            "title": f"Scaling of {self.results.study.name}",
            "is_example": bool(request) and not self.asked.samples,
            "method": " ".join(method),
            "sections": [*self.sections()],
            "figure": figure,
            "figure_caption": caption,
            "request": TextTable(["Quantity", "Value", "Formula"], [("", request)]) if request else None,
            "request_caption": _REQUEST,
            "limits": [(_letter(place), text) for place, text in enumerate(limits)],
        }

    def _guide_text(self) -> str:
        """Return a sentence about the guide."""
        if not self.series:
            return _NOT_COMPARED
        profile, guide = self.asked.profile, self.asked.guide
        if profile is None or guide == GUIDE:
            return _POP.format(guide=guide)
        wall = f" {_OF_WALL_TIME}" if "wall_efficiency" in profile.contents else ""
        return _OF_CENTRE.format(guide=guide, title=profile.title, date=profile.date) + wall

    @cached_property
    def shown(self) -> list[ScalingRow]:
        """The rows of the tables, and their baselines."""
        if self.series:
            return [row for rows in self.series for row in (*rows, rows[-1].base or rows[-1])]
        measured = first_of_cells(row for row in self.results.rows if row.n)
        return [replace(row, speedup=math.nan, efficiency=math.nan) for row in measured]

    @cached_property
    def executed(self) -> Executed:
        """The runs that the proposal describes: those of the rows, or else all."""
        cells = {row.cell_id for row in self.shown}
        runs = [run for run in self.results.frames.runs if run.cell_id in cells and run.measured]
        return Executed(self.results.study, runs or self.results.frames.runs)

    @cached_property
    def row(self) -> ScalingRow | None:
        """The requested size: the recommended one, or else the baseline."""
        if not self.series:
            return None
        return self.choices[self.name].best or self.series[0][-1].base

    def other_size(self) -> str:
        """Return the requested size, and whether the page recommends another one."""
        if self.row is None:
            return "no size is requested"
        best, own = self.results.choices[self.name].best, self.choices[self.name].best
        none = "no size beyond the baseline"
        page = none if best is None else "the same" if best is own else self.size(best)
        chosen = self.size(self.row) if own else f"{self.size(self.row)}, the baseline"
        return f"requested by {self.asked.guide}: {chosen}; the page recommends by {GUIDE}: {page}"

    @property
    def error(self) -> Finding | None:
        """The error of the requested size; None if its values are valid."""
        return self.results.invalid.get(self.row.cell_id) if self.row else None

    def size(self, row: ScalingRow) -> str:
        """Return a size as ``8 GPUs on 2 nodes``."""
        return job_size(row, self.results.device)

    def efficiency(self, one: ScalingRow | Judged) -> str:
        """Return an efficiency with its interval."""
        return efficiency_text(one, guide=self.asked.guide)

    # -- measurements -----------------------------------------------------------------

    def sections(self) -> Iterator[dict[str, Any]]:
        """Yield title, text, table and caption of each described series, or of the measured sizes."""
        for rows in self.series:
            yield self._section(mode_title(rows[0].mode), " ".join(self.conclusions(rows)), rows)
        if self.shown and not self.series:
            yield self._section("Measurements", "", self.shown)

    def _section(self, title: str, text: str, rows: Sequence[ScalingRow]) -> dict[str, Any]:
        limits = [self._letters(row) for row in rows]
        titles, device = self.results.titles, self.results.device
        table = text_table(rows, titles, device=device, limits=limits, guide=self.asked.guide)
        return {"title": title, "text": text, "table": table, "caption": " ".join(table.notes)}

    def _letters(self, row: ScalingRow) -> str:
        """Return the limits of a row; an efficiency is as valid as its baseline."""
        base = row.base.cell_id if row.base else ""
        limits = enumerate(self.findings)
        affected = (
            at for at, one in limits if row.cell_id in one.cells or (one.is_error and base in one.cells)
        )
        return ", ".join(map(_letter, affected))

    def conclusions(self, rows: Sequence[ScalingRow]) -> Iterator[str]:
        """Yield what the runs of a series say about its sizes; of the first series, also the request."""
        choice, is_request = self.choices[rows[0].series], rows is self.series[0]
        base, best = rows[-1].base or rows[-1], choice.best
        if is_request and self.reason:
            yield f"The request is based on this series ({self.results.titles[self.name]}): {self.reason}."
        if best is not None:
            judged = choice.verdicts[best.place].judged
            of = judged.reference if judged and judged.reference is not best.base else None
            what = f"The {'requested' if is_request else 'recommended'} job size is {self.size(best)}"
            relative = f" relative to {self.size(of)}" if of else ""
            yield f"{what}, with an efficiency of {self.efficiency(judged or best)}{relative}."
            yield (
                f"It is the largest measured size whose whole interval is at least {self.asked.guide} and "
                f"that is faster than each smaller size.{self._loss(best)}"
            )
        elif is_request and self.error:
            yield f"No size is requested: the values of the baseline are not valid ({heading(self.error)})."
        else:
            request = f" The request is for the baseline, {self.size(base)}." * is_request
            guide = self.asked.guide
            yield f"No size beyond the baseline is shown to have an efficiency of at least {guide}.{request}"
        larger = [row for row in rows if row.gpus > (best or base).gpus]
        if larger:
            # Without a recommended size, the one that comes closest to the guide is of interest.
            row = larger[0] if best else max(larger, key=lambda row: row.efficiency)
            yield self._about(row, best or base, "next larger" if best else "most efficient larger")
        elif best:
            yield "There is no result of a larger size."

    def _about(self, row: ScalingRow, chosen: ScalingRow, which: str) -> str:
        """Return what a larger size than the chosen one brings."""
        if error := self.results.error_of(row):
            return (
                f"Nothing is concluded about {self.size(row)}: its values are not valid ({heading(error)})."
            )
        gain = row.throughput_samples_per_sec / chosen.throughput_samples_per_sec
        times = (
            f"{three_digits(gain)} times the throughput of {self.size(chosen)} and " if known(gain) else ""
        )
        own = self.choices[row.series].verdicts[row.place]
        verdict = _VERDICTS.get(own.kind, _CANNOT_TELL).format(guide=self.asked.guide)
        if own.judged and known(own.judged.spread):
            spread = short_percent(math.expm1(own.judged.spread))
            verdict += (
                f"; with a stated spread of {spread} between runs, it is with {probability_text(own.p)}"
            )
        return (
            f"The {which} size, {self.size(row)}, has {times}an efficiency of {self.efficiency(row)}, "
            f"{verdict}."
            f"{self._loss(row)}"
        )

    def _loss(self, row: ScalingRow) -> str:
        """Return a sentence about the largest loss of a size; empty if its step was not divided."""
        division = self.results.divisions.get(row.place)
        if division is None:
            return ""
        title, share = main_loss(division)
        of_step = f", {percent(share)} of the step" if known(share) else ""
        return f" Its largest loss compared with the baseline: {title}{of_step}."

    # -- the request ------------------------------------------------------------------

    def request(self, row: ScalingRow) -> Iterator[tuple[str, str, str]]:
        """Yield the rows of the request for a size: a quantity, its value, and its formula."""
        asked, stated = self.asked, "applicant" if self.asked.samples else "an example"
        times_s = [asked.total / rate for rate in _rates(row)]
        yield "Job size", self.size(row), "measured"
        if known(row.global_batch):
            yield "Global batch", f"{whole(row.global_batch)} samples per step", "measured"
        read = rate_unit([row])
        rates = [read.of(rate, row) for rate in _rates(row)]
        yield "Throughput", f"{_with_range(rates, number)} {read.name}", "measured"
        epochs = f"{asked.samples:,} x {asked.epochs} epochs = " if asked.epochs > 1 else ""
        yield "Samples", f"{epochs}{asked.total:,}", stated
        yield "Time", _with_range(times_s, human_duration), "samples / throughput"
        units = [("node-hours", "node", row.nodes)] if nodes_known(row) else []
        units += [("GPU-hours", "GPU", row.gpus)] if self.results.device == "GPU" else []
        units = units or [("rank-hours", "rank", row.gpus)]
        for name, unit, times in units:
            hours = [times * one / 3600 for one in times_s]
            yield capital(name), _with_range(hours, three_digits), f"{count(int(times), unit)} x time"
        yield "Trainings", f"{asked.trainings:,}", stated
        share, formula = 0.0, "trainings x hours"
        if not self.executed.study.table:
            done, tried = cell_success(self.executed.study)[row.cell_id]
            share = reserve(done / tried)
            completed = f"{percent(share)}: {done} of {count(tried, 'attempt')} completed"
            yield "Reserve", completed, f"1/({done}/{tried}) - 1"
            formula += " x (1 + reserve)"
        for name, _, times in units:
            total = [asked.trainings * (1 + share) * times * time_s / 3600 for time_s in times_s]
            yield f"Total {name}", _with_range(total, three_digits), formula

    def total_hours(self, row: ScalingRow) -> dict[str, float]:
        """Return the hours of all trainings of a size with the reserve, by ``gpu``, ``rank`` and ``node``."""
        tried = None if self.executed.study.table else cell_success(self.executed.study)[row.cell_id]
        attempts = 1 + reserve(tried.completed / tried.attempted) if tried else 1.0
        hours = attempts * self.asked.trainings * self.asked.total / row.throughput_samples_per_sec / 3600
        nodes = {"node": hours * row.nodes} if nodes_known(row) else {}
        return {self.results.device.lower(): hours * row.gpus, **nodes}

    # -- limits -----------------------------------------------------------------------

    @cached_property
    def findings(self) -> list[_Limit]:
        """The errors and warnings about cells of the tables, and the sizes with few runs."""
        shown = {row.cell_id: row for row in self.shown}
        sizes = {cell: name if cell in shown else _OTHERS for cell, name in self._names.items()}
        found = []
        for fact in self.results.assessment.findings:
            if cells := {cell for cell in shown if not fact.subject or cell in fact.subject}:
                subject = list(dict.fromkeys(sizes[cell] for cell in fact.subject if cell in shown))
                others = [_OTHERS for cell in fact.subject if cell not in shown]
                # A sentence names four cells: others are counted beside four, and otherwise named as one.
                subject += others if len(subject) >= MOST_NAMES else others[:1]
                named = replace(_renamed(fact, sizes), subject=tuple(subject))
                is_error = fact.severity == "error"
                text = f"{'Not valid: ' * is_error}{heading(fact)}. {message(named)}"
                found.append(_Limit(cells, text, is_error))
        if few := {cell for cell, row in shown.items() if 0 < row.n < MIN_RUNS}:
            text = f"Fewer than {MIN_RUNS} runs: without an interval, differences may be chance."
            found.append(_Limit(few, text))
        return found

    @cached_property
    def _names(self) -> dict[str, str]:
        """The size of each cell, with its batch and series if others that are described have an equal one."""
        rows, labels = first_of_cells(self.results.rows), self.results.labels[0]
        others = [row for row in self.results.rows if row.series not in self._not_described]
        described, names = first_of_cells(others), {row.cell_id: self.size(row) for row in rows}
        batches = {row.cell_id: f" with batch {whole(row.global_batch)}" for row in rows}
        for more in (batches, {row.cell_id: f" ({labels[row.series]})" for row in rows}):
            equal = Counter(names[row.cell_id] for row in described)
            names = {cell: name + more[cell] * (equal[name] > 1) for cell, name in names.items()}
        return names

    def limits(self, requested: ScalingRow | None) -> Iterator[str]:
        """Yield what else limits the numbers and the request, as far as it is known."""
        executed = self.executed
        if self.row and not known(_rates(self.row)[0]):
            yield (
                "The throughput, and with it the time and cost of a training, is not known: the table does "
                "not contain the batch of a step."
            )
        all_runs = [
            f"{text} at {self.size(one)}"
            for one in (one for rows in self.series for one in rows)
            if (text := fraction(one.efficiency_all)) not in (MISSING, fraction(one.efficiency))
        ]
        if all_runs:
            yield f"With the runs that were left out as disturbed, the efficiency is {listed(all_runs)}."
        if {one.nodes for one in self.shown if nodes_known(one)} == {1}:
            yield "All sizes are on one node: scaling over nodes was not measured."
        if requested and not executed.reads_values:
            yield from self._extrapolation(requested)
        if not executed.study.table:
            if requested:
                yield f"The time per training does not include {_LEFT_OUT[executed.kind]}."
                yield from self._reserve_and_memory(requested)
            if executed.kind != "built_in" and any(one.n for one in self.shown):
                yield f"Not examined: {_UNKNOWN['recorder' if executed.kind == 'recorder' else 'values']}."
        yield from self._without_result()
        if more := len(self._not_described):
            series = count(more, "other series", "other series")
            yield f"Not described: {series}, with other settings, another batch or no efficiency."

    @cached_property
    def _not_described(self) -> set[str]:
        """The series that are not described and have cells that are in no table."""
        shown, own = {row.cell_id for row in self.shown}, {rows[0].series for rows in self.series}
        others = {row.series for row in self.results.rows if row.cell_id not in shown}
        return others - own if own else set()

    def _extrapolation(self, row: ScalingRow) -> Iterator[str]:
        """Yield how long a run of the requested size was measured, if a training takes much longer."""
        runs = self.results.frames.runs_of_cells[row.cell_id]
        windows = [run.window_s for run in runs if known(run.window_s)]
        window_s = median(windows) if windows else math.nan
        times = self.asked.total / row.throughput_samples_per_sec / window_s
        if times >= _LONG:
            yield (
                f"A run of the requested size was timed for {seconds(window_s)} (median); a training, "
                f"{three_digits(times)} times as long, is assumed to run at the same speed."
            )

    def _reserve_and_memory(self, row: ScalingRow) -> Iterator[str]:
        success = cell_success(self.executed.study)[row.cell_id]
        yield (
            f"With {count(success.attempted, 'attempt')}, the success rate may be as low as "
            f"{percent(success.low)} (lower end of its 95 % interval: E. B. Wilson, JASA 22, 1927); the "
            f"reserve would then be {percent(reserve(success.low))}. Each failure is taken to be independent "
            "and to cost a whole job."
        )
        runs = [run.run_id for run in self.executed.runs if run.cell_id == row.cell_id]
        epochs = self.executed.study.epochs
        used = epochs.loc[epochs["run_id"].isin(runs), "peak_mem_bytes"].astype(float).max()
        if known(used):
            envs = [self.results.environment.envs.get(run_id, {}) for run_id in runs]
            sizes = [size for env in envs if isinstance(size := env.get("device_memory_bytes"), int)]
            # Only the memory of a GPU is known to be that of one rank.
            of = f", of the {human_bytes(min(sizes))} of its GPU" if len(sizes) == len(envs) else ""
            yield f"A rank of the requested size used up to {human_bytes(used)} of memory{of}."

    def _without_result(self) -> Iterator[str]:
        """Yield the sizes that are not in the tables, with the reasons."""
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
            yield f"{self._names[row.cell_id]} {what}: {reason}."
        if (more := len(lacking) - _MOST_MISSING) > 0:
            yield f"{count(more, 'more configuration')} of the plan have no result or no efficiency, either."


def _renamed(value: Any, sizes: Mapping[str, str]) -> Any:
    """Return a finding, or a value of it, with other names of its cells, without details and other cells."""
    if is_dataclass(value) and not isinstance(value, type):
        values = {one.name: (one.default, getattr(value, one.name)) for one in fields(value)}
        details = {name for name in values.keys() & _DETAILS if not isinstance(values[name][1], int)}
        renamed = {name: _renamed(own, sizes) for name, (_, own) in values.items()}
        return replace(value, **renamed | {name: values[name][0] for name in details})
    if isinstance(value, Mapping):
        own = {sizes.get(key, key): _renamed(one, sizes) for key, one in value.items()}
        return {key: one for key, one in own.items() if key != _OTHERS}
    if isinstance(value, list | tuple):
        return type(value)(_renamed(own, sizes) for own in value)
    return sizes.get(value, value) if isinstance(value, str) else value


def _letter(place: int) -> str:
    """Return the name of a limit: a, b, ..., z, a1, ..."""
    return f"{chr(ord('a') + place % 26)}{place // 26 or ''}"


def _rates(row: ScalingRow) -> list[float]:
    """Return the throughput, and the upper and the lower end of its interval."""
    return [row.throughput_samples_per_sec, row.throughput_high, row.throughput_low]


def _with_range(values: Sequence[float], form: Callable[[float], str]) -> str:
    """Return a value and the ends of its interval, if it has one: ``3 (2 to 4)``."""
    value, *ends = values
    return f"{form(value)} ({' to '.join(map(form, sorted(ends)))})" if all(map(known, ends)) else form(value)
