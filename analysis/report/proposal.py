"""Compute the values of proposal.md.j2 and proposal.tex.j2: the scaling section of a compute time proposal.

Reviewers expect these facts: what was run; the time to solution of the stated work; memory per rank and its
headroom; the requested node-hours and GPU-hours with their formulas; the rate of success and a reserve for
failures; the measurements with speedup, efficiency, interval and
number of runs; causes of the loss; and warnings beside the numbers. Every number has its source.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from analysis.causes.cells import CellDivision
from analysis.causes.divide import WHOLE
from analysis.checks.scaling_table import (
    Invalid,
    Recommendation,
    invalid_reason,
    recommend,
    what_decides,
    without_result,
)
from analysis.checks.validity import invalid_cells, unstable_cells
from analysis.data.environment import Environment, describe
from analysis.data.names import job_size, nodes_known, widest_series
from analysis.report.figures.drawing import Drawing
from analysis.report.results import Results
from analysis.report.summary import left_out_sentence, no_finding
from analysis.report.tables import shown_columns, texts_of
from analysis.report.what_was_run import MISSING_SOURCE, Executed, Line, constant_batch, what_was_run
from analysis.report.why import loss_table
from analysis.report.words import WORDS, ascii_formula, mode_title
from analysis.stats.attempts import cell_success, recorded_attempts, reserve
from analysis.stats.columns import PROPOSAL, Column, ScalingRow, first_of_cells, three_digits
from analysis.stats.estimate import MIN_RUNS
from analysis.stats.measured import state_counts
from analysis.stats.scaling import GUIDE
from analysis.text import message, one_line
from bench.facts import Fact
from bench.study.conditions import objects
from bench.study.ledger import RunState
from bench.units import (
    MISSING,
    capital,
    count,
    fraction,
    fractions,
    human_bytes,
    human_duration,
    interval,
    known,
    number,
    percent,
    seconds,
)
from bench.words import heading, title

_FORMULAS = {
    "strong": "Speedup S(N) = T(N0)/T(N), efficiency E(N) = S(N) N0/N",
    "weak": "Efficiency E(N) = T(N0)/T(N), scaled speedup S(N) = E(N) N/N0",
}
#: The work for which time and node-hours are given if none is stated.
_UNIT_OF_WORK = 1_000_000


@dataclass(frozen=True)
class Work:
    """The work of one training: ``samples`` per epoch, and ``epochs``."""

    samples: int
    epochs: int = 1

    @property
    def total(self) -> int:
        """The samples of the whole training."""
        return self.samples * self.epochs


@dataclass(frozen=True)
class _Series:
    """One series: its measured rows from small to large, its scaling mode and its baseline.

    ``mode`` is empty for measured sizes that have no efficiency. ``lacking`` is the number of sizes without
    a result, as text.
    """

    rows: Sequence[ScalingRow]
    mode: str
    base: ScalingRow
    lacking: str = ""

    @property
    def title(self) -> str:
        """The title of the scaling mode."""
        return mode_title(self.mode) if self.mode else "Measurements"


@dataclass(kw_only=True, eq=False)
class ProposalRow(ScalingRow):
    """A row of a table in the proposal."""

    window_s: Annotated[
        float, Column("timed windows of one run", "s", (PROPOSAL,), "Timed windows (s)", three_digits)
    ]
    wall_s: Annotated[
        float, Column("one run from start to end", "s", (PROPOSAL,), "Whole job (s)", three_digits)
    ]
    per_million: Annotated[
        float,
        Column(
            "nodes x 1,000,000 / throughput / 3600",
            *("node-hours", (PROPOSAL,), "Node-h per 1M samples", three_digits),
        ),
    ]
    warnings: Annotated[
        str, Column("numbers in the list of errors and warnings", "", (PROPOSAL,), "Validity")
    ]


def proposal_context(
    results: Results, drawings: Sequence[Drawing], *, work: Work | None = None
) -> dict[str, Any]:
    """Return the values of proposal.md.j2 and proposal.tex.j2; texts are not escaped.

    ``work`` is the training for which time and node-hours are computed; by default, a million samples.
    """
    rows, frames, invalid = results.rows, results.frames, results.invalid
    series = [found for mode in ("strong", "weak") if (found := _series(rows, mode))]
    validity = results.assessment.findings
    shown = series or _without_efficiency(rows)
    runs = frames.runs[frames.runs["measured"]] if frames.runs["measured"].any() else frames.runs
    if series:
        cells = {row.cell_id for one in series for row in (*one.rows, one.base)}
        runs = runs[runs["cell_id"].isin(cells)]
    executed, ids = Executed(results.study, runs), set(runs["run_id"])
    environment = describe({name: env for name, env in results.environment.envs.items() if name in ids})
    return {
        "title": f"Scaling of {results.study.name}",
        "introduction": "" if series else no_finding(rows),
        "run": what_was_run(executed, rows, environment),
        "validity": [(title(fact), message(fact)) for fact in validity],
        "recommendation": f"{_recommendation(series[0], invalid)} Source: scaling.csv." if series else "",
        "request": _request(series[0], executed, environment, validity, work) if series else [],
        "sections": [_section(one, executed, validity, drawings if one is shown[0] else ()) for one in shown],
        "losses": [loss for one in shown for loss in _losses(one, results)],
        "losses_note": _losses_note(results.divisions),
        "missing": [*_missing(rows), *(_not_comparable(rows, shown) if series else [])],
    }


def _series(rows: Sequence[ScalingRow], mode: str) -> _Series | None:
    """Return the series of a scaling mode with the most measured sizes; in a tie, the plan's first."""
    measured = [row for row in rows if row.mode == mode and known(row.efficiency)]
    widest = widest_series(measured, limit=1)
    if not widest:
        return None
    own = sorted((row for row in measured if row.series == widest[0]), key=lambda row: (row.gpus, row.nodes))
    # The baseline may be a cell of another series, such as one rank without DDP.
    base = own[-1].base or own[-1]
    return _Series(own, mode, base, without_result(rows, base, series=widest[0]))


def _without_efficiency(rows: Sequence[ScalingRow]) -> list[_Series]:
    """Return the measured sizes of a study without efficiencies as one series, if there are any."""
    measured = sorted(first_of_cells(row for row in rows if row.n), key=lambda row: row.gpus)
    return [_Series(measured, "", measured[0])] if measured else []


# -- recommended size -----------------------------------------------------------------


def _recommendation(series: _Series, invalid: Invalid) -> str:
    found = recommend(series.rows, series.base, invalid=invalid)
    best = found.best
    if best is None:
        return _nothing_recommended(found, series, invalid)
    texts = [
        f"{job_size(best)}: the largest size with valid values whose efficiency ({series.mode} scaling) is "
        f"at least {GUIDE} in its whole 95 % interval, with at least {MIN_RUNS} runs of it and of "
        f"the baseline without a recorded disturbance: {_efficiency(best)}.",
        *_against_baseline(best, series),
    ]
    if larger := [row for row in series.rows if row.gpus > best.gpus]:
        texts.append(_next_larger(best, larger[0], series))
    else:
        texts.append("This is the largest measured size; larger sizes may be efficient, too.")
    return " ".join([*texts, *_undecided(found, series, invalid)])


def _nothing_recommended(found: Recommendation, series: _Series, invalid: Invalid) -> str:
    base, closest = series.base.baseline, found.closest
    if len(found.open):
        return " ".join(["No larger size can be recommended yet.", *_undecided(found, series, invalid)])
    if closest is None:
        text = f"No larger size can be recommended: none beyond the baseline, {base}, has an efficiency"
        return f"{text}{series.lacking}."
    return (
        f"No measured size beyond the baseline, {base}, reaches an efficiency of {GUIDE} in {series.mode} "
        f"scaling: no larger size can be recommended. {capital(job_size(closest))} comes closest, with "
        f"{_efficiency(closest)}{series.lacking}."
    )


def _undecided(found: Recommendation, series: _Series, invalid: Invalid) -> list[str]:
    """Return a sentence about the smallest size that the runs neither recommend nor rule out, if any."""
    if not len(found.open):
        return []
    row = found.open[0]
    if reason := invalid_reason(row, series.base, invalid):
        error = f"see the error {heading(reason)}"
        return [f"Nothing is concluded about {job_size(row)}, with {_efficiency(row)}: {error}."]
    return [
        f"The runs cannot tell whether {job_size(row)} reaches {GUIDE}, with {_efficiency(row)}: "
        f"{what_decides(row, series.base)}."
    ]


def _against_baseline(best: ScalingRow, series: _Series) -> list[str]:
    """Return the step time and cost of the recommended size and of the baseline, if known."""
    base, texts = series.base, []
    if known(best.step_time_sec) and known(base.step_time_sec):
        times = seconds(best.step_time_sec), seconds(base.step_time_sec)
        texts.append(f"A step takes {times[0]}, and {times[1]} at the baseline, {base.baseline}.")
    costs = [_node_hours_per_million(row) for row in (best, base)]
    if all(known(cost) for cost in costs):
        there, before = map(_node_hours_text, (best, base))
        texts.append(f"One million samples cost {there} node-hours, and {before} at the baseline.")
    return texts


def _next_larger(best: ScalingRow, larger: ScalingRow, series: _Series) -> str:
    gain = larger.throughput_samples_per_sec / best.throughput_samples_per_sec
    cost = _node_hours_per_million(larger) / _node_hours_per_million(best)
    text = f"The next larger size, {job_size(larger)}, has an efficiency of {_efficiency(larger)}"
    if not (known(gain) and known(cost)):
        return f"{text}."
    times = number(gain, digits=3), number(cost, digits=3)
    return f"{text}: {times[0]} times the throughput for {times[1]} times the node-hours per sample."


def _node_hours_per_million(row: ScalingRow) -> float:
    if not nodes_known(row):
        return math.nan
    return float(row.nodes * 1e6 / row.throughput_samples_per_sec / 3600)


def _node_hours_text(row: ScalingRow, samples: float = 1e6) -> str:
    return _hours_text(row, samples, times=row.nodes)


def _hours_text(row: ScalingRow, samples: float, *, times: float) -> str:
    """Return a multiple of the hours for some samples, with the interval of the throughput."""
    work = times * samples / 3600
    ends = interval(work / row.throughput_high, work / row.throughput_low, digits=3)
    return f"{number(work / row.throughput_samples_per_sec, digits=3)} {ends}".strip()


def _efficiency(row: ScalingRow) -> str:
    bounds = fractions(row.efficiency_low, row.efficiency_high)
    return f"{fraction(row.efficiency)} {bounds}".strip()


# -- resources asked for --------------------------------------------------------------


def _request(
    series: _Series,
    executed: Executed,
    environment: Environment,
    validity: Sequence[Fact],
    work: Work | None,
) -> list[Line]:
    """Return the job size, its time, cost, failures, memory and warnings; each with its source or formula."""
    best = recommend(series.rows, series.base, invalid=invalid_cells(validity)).best
    row = series.base if best is None else best
    why = "the baseline: no larger size is recommended" if best is None else "recommended"
    size = f"{job_size(row)}, {series.mode} scaling ({why})" if series.mode else f"{job_size(row)} ({why})"
    rate = row.throughput_samples_per_sec
    rates = interval(row.throughput_low, row.throughput_high)
    total = _UNIT_OF_WORK if work is None else work.total
    lines = [Line("Job size", size, "scaling.csv (efficiency, efficiency_low)")]
    source = "see Validity, below" if validity else "bench report --json (validity)"
    differing = _differing_runs(row, series.base, unstable_cells(executed.runs))
    source += "; runs.csv" if differing else ""
    warnings = Line("Validity", "; ".join([_warnings(row, validity), *differing]), source)
    if not known(rate):
        reason = "not known: the table does not contain the batch of a step"
        return [*lines, Line("Throughput, time to solution, node-hours", reason, MISSING_SOURCE), warnings]
    lines += [
        Line("Throughput", f"{number(rate)} samples/s {rates}".strip(), f"scaling.csv, n = {row.n}"),
        Line("Work", *_work_text(work)),
        Line("Time to solution", *_duration(row, total)),
    ]
    hours = f"{number(total / rate / 3600, digits=3)} h"
    if nodes_known(row):
        formula = f"nodes x time to solution = {row.nodes} x {hours}"
        lines.append(Line("Node-hours", _node_hours_text(row, total), formula))
    if _has_gpus(row, executed):
        formula = f"GPUs x time to solution = {row.gpus} x {hours}; one GPU per rank"
        lines.append(Line("GPU-hours", _hours_text(row, total, times=row.gpus), formula))
    if not executed.study.table:
        lines += _failures(row, executed, total)
        lines.append(Line("Not included", _left_out(executed), "the meaning of the throughput"))
        lines += _memory(row, executed, environment)
    return [*lines, warnings]


def _has_gpus(row: ScalingRow, executed: Executed) -> bool:
    cells = executed.study.cells
    return bool((cells.loc[cells["cell_id"] == row.cell_id, "device"] == "cuda").all())


def _failures(row: ScalingRow, executed: Executed, total: int) -> Iterator[Line]:
    """Yield the rate of success of a size, and the reserve for failures that follows from it."""
    cells = cell_success(executed.study)
    done, tried = cells[row.cell_id]
    low = cells[row.cell_id].low
    text = f"{done} of {count(tried, 'attempt')} of this size completed: {percent(done / tried)}, at least "
    text += percent(low)
    if failed := _failed(row, executed):
        text += f"; {failed}"
    of_all = [sum(numbers) for numbers in zip(*cells.values(), strict=True)]
    if tried < of_all[1]:
        text += f"; {of_all[0]:,} of {of_all[1]:,} of all sizes"
    source = "runs.csv (state), cancelled attempts left out; bound: lower end of Wilson's 95 % interval"
    yield Line("Success rate", text, source)
    share, most = reserve(done / tried), reserve(low)
    node_hours = row.nodes * total / row.throughput_samples_per_sec / 3600
    costs = [number(node_hours * part, digits=3) for part in (share, most)]
    text = f"{costs[0]} node-hours ({percent(share)}), at most {costs[1]} ({percent(most)})"
    formula = f"1/p - 1 with p = {done}/{tried}, at most with p = {fraction(low)}: independent attempts, "
    formula += "each failed one as expensive as a whole job (geometric distribution)"
    yield Line("Reserve for failures", text, formula)


def _failed(row: ScalingRow, executed: Executed) -> str:
    """Return the number of failed attempts of a size with their classes; empty if there are none."""
    attempts = [run for run in recorded_attempts(executed.study) if run.cell_id == row.cell_id]
    return state_counts(run for run in attempts if run.state == RunState.FAILED)


def _duration(row: ScalingRow, total: int) -> tuple[str, str]:
    """Return the time for ``total`` samples with its interval, and the formula."""
    text, source = human_duration(total / row.throughput_samples_per_sec), "work / throughput"
    source += f" = {total:,} / {number(row.throughput_samples_per_sec)}"
    if known(row.throughput_low):
        ends = (human_duration(total / rate) for rate in (row.throughput_high, row.throughput_low))
        return f"{text} [{', '.join(ends)}]", f"{source}; interval: that of the throughput"
    return text, source


def _work_text(work: Work | None) -> tuple[str, str]:
    """Return the work as text, and its source."""
    if work is None:
        return f"{_UNIT_OF_WORK:,} samples", "an example: state the work with --samples and --epochs"
    if work.epochs == 1:
        return f"{work.total:,} samples", "stated with --samples"
    text = f"{work.samples:,} samples x {work.epochs} epochs = {work.total:,} samples"
    return text, "stated with --samples and --epochs"


def _left_out(executed: Executed) -> str:
    """Return the parts of a job whose time is not in the throughput, as far as they are known."""
    if executed.has_averages:
        return "queue waits, and work that the average of the command does not cover"
    if executed.reads_values:
        return "start-up, queue waits, and work that the values of the command do not cover"
    if executed.has_command:
        return (
            "start-up, queue waits, and the time between two loops over the recorder's batches and in pauses "
            "of all ranks"
        )
    return "start-up, validation, checkpoints and queue waits"


def _memory(row: ScalingRow, executed: Executed, environment: Environment) -> Iterator[Line]:
    """Yield the memory of the rank that uses most, and the share of its GPU's or host's memory left."""
    runs = executed.runs[executed.runs["cell_id"] == row.cell_id]
    epochs = executed.study.epochs
    used = epochs.loc[epochs["run_id"].isin(runs["run_id"]), "peak_mem_bytes"].astype(float).max()
    if not known(used):
        yield Line("Memory per rank", "not recorded", MISSING_SOURCE)
        return
    source = f"metrics.csv (peak_mem_bytes, since the start), largest of {count(len(runs), 'run')}"
    yield Line("Memory per rank", human_bytes(used), source)
    envs = [env for run_id, env in environment.envs.items() if run_id in set(runs["run_id"])]
    total, what = _memory_of_rank(envs)
    if total is None:
        yield Line("Headroom", "not known: the memory of the device was not recorded", MISSING_SOURCE)
    else:
        left = f"{percent(1 - used / total)} of {human_bytes(total)}, {what}"
        yield Line("Headroom", left, f"1 - peak memory per rank / {what} (env.json)")


def _memory_of_rank(envs: Iterable[Mapping[str, Any]]) -> tuple[float | None, str]:
    """Return the smallest memory that a rank can use: its GPU's or, on a CPU, its share of the host's."""
    found: list[tuple[Any, str]] = []
    for env in envs:
        if env.get("device") == "cuda":
            found.append((env.get("device_memory_bytes"), "the memory of its GPU"))
        else:
            for host in objects(env.get("hosts")):
                memory, ranks = host.get("memory_bytes"), host.get("ranks_here")
                share = (
                    memory / ranks if isinstance(memory, int) and isinstance(ranks, int) and ranks else None
                )
                found.append((share, "its share of the host's memory"))
    sizes = [(size, what) for size, what in found if isinstance(size, int | float)]
    return min(sizes) if sizes and len(sizes) == len(found) else (None, "")


def _warnings(row: ScalingRow, validity: Sequence[Fact]) -> str:
    """Return the titles of the findings that affect a size, and whether its interval is missing."""
    found = [title(fact) for fact in validity if fact.affects(row.cell_id)]
    if known(row.throughput_samples_per_sec) and not known(row.throughput_low):
        found.append("no interval")
    nothing = "no error and no warning" + " for this size" * bool(validity)
    return ", ".join(dict.fromkeys(found)) or nothing


def _differing_runs(row: ScalingRow, base: ScalingRow, spread: Mapping[str, float]) -> list[str]:
    """Return the standard deviation between the runs of a size and of the baseline, if it is large."""
    cells = {row.cell_id: "this size"} | {base.cell_id: "the baseline"}
    return [
        f"runs of {what} differ by {percent(spread[cell])} (standard deviation)"
        for cell, what in cells.items()
        if cell in spread
    ]


# -- measurements ---------------------------------------------------------------------


def _section(
    series: _Series, executed: Executed, validity: Sequence[Fact], drawings: Sequence[Drawing]
) -> dict[str, Any]:
    """Return title, text, table and figures of one series."""
    if not series.mode:
        return {"title": series.title, "text": "", **_table(series, executed, validity), "figures": []}
    base = series.base
    text = f"The {constant_batch(series.mode, executed)} is constant. {_FORMULAS[series.mode]}, with T the "
    text += f"time per step and N ranks. Baseline N0: {base.baseline}"
    if known(base.step_time_sec):
        text += f", T(N0) = {seconds(base.step_time_sec, digits=4)}"
    by_name = {drawing.name: drawing for drawing in drawings}
    names = [name for kind in ("speedup", "efficiency") if (name := f"{kind}-{series.mode}") in by_name]
    return {
        "title": series.title,
        "text": f"{text}.{left_out_sentence(series.rows)}",
        **_table(series, executed, validity),
        "figures": [
            {
                "name": name,
                "description": by_name[name].description,
                "caption": f"{by_name[name].title}. {ascii_formula(by_name[name].caption)}",
            }
            for name in names
        ],
    }


def _table(series: _Series, executed: Executed, validity: Sequence[Fact]) -> dict[str, Any]:
    """Return the table's caption with its sources, headings and rows; an empty column is left out."""
    rows = _table_rows(series, executed, validity)
    columns = shown_columns(PROPOSAL, ProposalRow)
    lines = zip(*texts_of(rows, columns, PROPOSAL), strict=True)
    texts = {name: own for name, own in zip(columns, lines, strict=True) if set(own) - {MISSING, ""}}
    headings = {name: columns[name].heading for name in texts}
    if executed.reads_values and "global_batch" in headings:  # the batch of the command is not known
        headings["global_batch"] += " in the matrix"
    explained = [f"{headings[name]}: {columns[name].meaning}" for name in _EXPLAINED if name in headings]
    caption = "; ".join([f"{series.title}. n: runs; brackets, if any: 95 % intervals", *explained])
    caption += f"; {MISSING}: no value." if any(MISSING in own for own in texts.values()) else "."
    if executed.has_command:
        caption += (
            " Whole job and node-hours cover the whole command, with the number of steps that the script "
            "itself chose (not examined)."
        )
    if not executed.study.table:
        times = "timed windows and whole job" if "window_s" in headings else "whole job"
        caption += f" Sources: scaling.csv; means of runs.csv for {times}."
    return {
        "caption": caption,
        "headings": list(headings.values()),
        "rows": [list(row) for row in zip(*texts.values(), strict=True)],
    }


_EXPLAINED = ("window_s", "wall_s", "per_million", "warnings")


def _table_rows(series: _Series, executed: Executed, validity: Sequence[Fact]) -> list[ProposalRow]:
    groups = executed.runs.groupby("cell_id", observed=True)
    loops, jobs = groups["window_s"].mean(), groups["wall_s"].mean()
    # Values that a command reports do not show how long they took.
    loops = loops * math.nan if executed.reads_values else loops
    without = {} if series.mode else {"speedup": math.nan, "efficiency": math.nan}
    return [
        ProposalRow(
            **vars(row) | without,
            window_s=loops.get(row.cell_id, math.nan),
            wall_s=jobs.get(row.cell_id, math.nan),
            per_million=_node_hours_per_million(row),
            warnings=", ".join(str(n) for n, one in enumerate(validity, 1) if one.affects(row.cell_id)),
        )
        for row in series.rows
    ]


# -- causes of the loss ---------------------------------------------------------------


def _losses_note(divisions: Mapping[int, CellDivision]) -> str:
    """Return what the percentages are, and where the parts of a step were measured, if they were."""
    if not divisions:
        return ""
    notes, has_parts = WORDS["notes"], any(WHOLE not in division.ideal for division in divisions.values())
    return f"{notes['losses']} {notes['loss_parts']}" if has_parts else str(notes["losses"])


def _losses(series: _Series, results: Results) -> Iterator[dict[str, Any]]:
    """Yield the loss at the largest size and, if it is not valid, at the largest valid size."""
    sizes, invalid = [series.rows[-1]], results.invalid
    larger = [row for row in series.rows if row.gpus > series.base.gpus]
    valid = [row for row in larger if not invalid_reason(row, series.base, invalid)]
    if invalid_reason(sizes[0], series.base, invalid):
        sizes += valid[-1:]
    for row in sizes:
        size = job_size(row)
        if series.mode:
            size = f"{series.title}, {size}, efficiency {_efficiency(row)}"
        rows = [(title, evidence, share) for title, share, evidence, _ in loss_table(row, results)]
        if rows:
            yield {"size": size, "rows": rows}


# -- cells without a measurement -----------------------------------------------------


def _missing(rows: Sequence[ScalingRow]) -> list[str]:
    """Return the planned cells without a measurement, with their reasons."""
    lacking = first_of_cells(row for row in rows if not row.n)
    items = [
        f"{row.cell_id} ({job_size(row)}): {one_line(row.reason, limit=400) or row.state}."
        for row in lacking[:20]
    ]
    if len(lacking) > len(items):
        items.append(f"and {count(len(lacking) - len(items), 'more cell')}.")
    return items


def _not_comparable(rows: Sequence[ScalingRow], shown: Sequence[_Series]) -> list[str]:
    """Return the measured cells that are in no table because they have no efficiency, with the reasons."""
    cells = {row.cell_id for one in shown for row in (*one.rows, one.base)}
    lacking = (row for row in rows if row.n and not known(row.efficiency) and row.cell_id not in cells)
    own = first_of_cells(lacking)
    items = [
        f"{row.cell_id} ({job_size(row)}): measured in {count(int(row.n), 'run')}; "
        f"{one_line(row.reason, limit=400) or 'no efficiency'}."
        for row in own[:20]
    ]
    more = len(own) - len(items)
    return [*items, f"and {count(more, 'more measured cell')}."] if more else items
