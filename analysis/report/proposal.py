"""Compute the values of proposal.md.j2 and proposal.tex.j2: the scaling section of a compute time proposal.

Reviewers expect nodes, GPUs, batch, absolute time, throughput, speedup, efficiency, interval and number of
runs; a log-log plot with the ideal line and an efficiency plot with the guide at 0.8; main-loop and whole-job
time; node-hours; the recommended size and its reason; causes of the loss; settings as in production, with
input and output.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.checks.recommendation import Invalid, Recommendation, recommend, valid_causes, what_decides
from analysis.checks.validity import ValidityFinding, invalid_cells
from analysis.compare.matching import spelled
from analysis.data.environment import Environment
from analysis.data.load import Study
from analysis.data.names import Row, job_size, nodes_known, widest_series
from analysis.report.figures.drawing import Drawing
from analysis.report.summary import certainty, describe_losses, no_finding
from analysis.report.words import ascii_formula, mode_title
from analysis.stats.losses import Causes
from analysis.stats.measured import Frames
from analysis.stats.scaling import GUIDE
from analysis.text import (
    MISSING,
    capital,
    count,
    fraction,
    fractions,
    known,
    listed,
    number,
    one_line,
    seconds,
    whole,
)
from bench.matrix.command import without_secrets

_FORMULAS = {
    "strong": "The global batch is constant. Speedup S(N) = T(N0)/T(N), efficiency E(N) = S(N) N0/N",
    "weak": "The batch per rank is constant. Efficiency E(N) = T(N0)/T(N), scaled speedup S(N) = E(N) N/N0",
}
#: Options of the workload that determine the computation.
_SETTINGS = (
    *("model", "parameters", "seq_len", "image_size", "precision", "optimizer", "grad_accum"),
    *("bucket_cap_mb", "activation_checkpointing", "compile", "data", "num_workers", "checkpoint"),
)
_FACTS = ("Device", "PyTorch", "CUDA", "NCCL", "Network", "Interface", "Threads per rank")


@dataclass(frozen=True)
class _Series:
    """One series: its measured rows from small to large, its scaling mode and its baseline."""

    rows: pd.DataFrame
    mode: str
    base: pd.Series
    rate_unit: str

    @property
    def counted(self) -> str:
        """The unit of work in a throughput, usually ``samples``."""
        return self.rate_unit.removesuffix("/s")


def proposal_context(
    study: Study,
    frames: Frames,
    rows: pd.DataFrame,
    drawings: Sequence[Drawing],
    environment: Environment,
    validity: Sequence[ValidityFinding],
) -> dict[str, Any]:
    """Return the values of proposal.md.j2 and proposal.tex.j2; texts are not escaped."""
    series = [found for mode in ("strong", "weak") if (found := _series(rows, mode, frames.rate_unit))]
    invalid = invalid_cells(validity)
    causes = [_loss_item(one, invalid) for one in series]
    return {
        "title": f"Scaling of {study.name}",
        "introduction": _measured_on(frames, environment) if series else no_finding(rows),
        "validity": [(finding.heading, finding.message) for finding in validity],
        "recommendation": _recommendation(series[0], invalid) if series else "",
        "sections": [_section(one, frames, drawings, reads_values=_reads_values(study)) for one in series],
        "losses": causes,
        "losses_note": _LOSSES_NOTE if any("%" in text for text in causes) else "",
        "method": _method(study, frames, rows) if series else [],
        "settings": _settings(study, str(series[0].rows.iloc[-1]["cell_id"]), environment) if series else [],
        "missing": _missing(rows),
    }


def _series(rows: pd.DataFrame, mode: str, rate_unit: str) -> _Series | None:
    """Return the series of a scaling mode with the most measured sizes; in a tie, the plan's first."""
    measured = rows[(rows["mode"] == mode) & rows["efficiency"].notna()]
    widest = widest_series(measured, limit=1)
    if not widest:
        return None
    own = measured[measured["series"] == widest[0]].sort_values(["gpus", "nodes"], kind="stable")
    # The baseline may be a cell of another series, such as one rank without DDP.
    return _Series(own, mode, rows.iloc[int(own["base_place"].iloc[-1])], rate_unit)


def _measured_on(frames: Frames, environment: Environment) -> str:
    facts = dict(environment.facts)
    done = frames.runs[frames.runs["measured"]]
    where = f" on {facts['Device']}" if "Device" in facts else ""
    text = f"{count(len(done), 'run').capitalize()}{where}"
    first, last = done["started_at"].min(), done["ended_at"].max()
    if not (pd.isna(first) or pd.isna(last)):
        days = list(dict.fromkeys(f"{time:%Y-%m-%d}" for time in (first, last)))
        text += f", {'on' if len(days) == 1 else 'between'} {' and '.join(days)}"
    return f"{text}. A rank is one process, with one GPU on GPU nodes."


# -- recommended size -----------------------------------------------------------------


def _recommendation(series: _Series, invalid: Invalid) -> str:
    found = recommend(series.rows, series.base, invalid=invalid)
    best = found.best
    if best is None:
        return _nothing_recommended(found, series, invalid)
    texts = [
        f"{job_size(best)}: the largest measured size whose efficiency ({series.mode} scaling) is at least "
        f"{GUIDE}: {_efficiency(best)}.",
        *_against_baseline(best, series),
    ]
    larger = series.rows[series.rows["gpus"] > best["gpus"]]
    if len(larger):
        texts.append(_next_larger(best, larger.iloc[0], series))
    else:
        texts.append("This is the largest measured size; larger sizes may be efficient, too.")
    return " ".join([*texts, *_undecided(found, series, invalid)])


def _nothing_recommended(found: Recommendation, series: _Series, invalid: Invalid) -> str:
    base, closest = series.base["baseline"], found.closest
    if len(found.open):
        return " ".join(["No larger size can be recommended yet.", *_undecided(found, series, invalid)])
    text = f"No size beyond the baseline, {base}, reaches an efficiency of {GUIDE}"
    text = f"{text}: no larger size can be recommended."
    if closest is None:
        return text
    return f"{text} {capital(job_size(closest))} comes closest, with {_efficiency(closest)}."


def _undecided(found: Recommendation, series: _Series, invalid: Invalid) -> list[str]:
    """Return a sentence about the smallest size for which the runs cannot tell, if any."""
    if not len(found.open):
        return []
    row = found.open.iloc[0]
    return [
        f"The runs cannot tell whether {job_size(row)} reaches {GUIDE}, with {_efficiency(row)}: "
        f"{what_decides(row, series.base, invalid=invalid)}."
    ]


def _against_baseline(best: pd.Series, series: _Series) -> list[str]:
    """Return the step time and cost of the recommended size and of the baseline, if known."""
    base, texts = series.base, []
    if known(best["step_time_sec"]) and known(base["step_time_sec"]):
        times = seconds(best["step_time_sec"]), seconds(base["step_time_sec"])
        texts.append(f"A step takes {times[0]}, and {times[1]} at the baseline, {base['baseline']}.")
    costs = [_node_hours_per_million(row) for row in (best, base)]
    if all(known(cost) for cost in costs):
        there, before = (number(cost, digits=3) for cost in costs)
        texts.append(f"One million {series.counted} cost {there} node-hours, and {before} at the baseline.")
    return texts


def _next_larger(best: pd.Series, larger: pd.Series, series: _Series) -> str:
    gain = larger["throughput_samples_per_sec"] / best["throughput_samples_per_sec"]
    cost = _node_hours_per_million(larger) / _node_hours_per_million(best)
    text = f"The next larger size, {job_size(larger)}, has an efficiency of {_efficiency(larger)}"
    if not (known(gain) and known(cost)):
        return f"{text}."
    times = number(gain, digits=3), number(cost, digits=3)
    counted = series.counted.removesuffix("s")
    return f"{text}: {times[0]} times the throughput for {times[1]} times the node-hours per {counted}."


def _node_hours_per_million(row: Row) -> float:
    if not nodes_known(row):
        return math.nan
    return float(row["nodes"] * 1e6 / row["throughput_samples_per_sec"] / 3600)


def _efficiency(row: Row) -> str:
    bounds = fractions(row["efficiency_low"], row["efficiency_high"])
    return f"{fraction(row['efficiency'])} {bounds}".strip()


# -- measurements ---------------------------------------------------------------------


def _section(
    series: _Series, frames: Frames, drawings: Sequence[Drawing], *, reads_values: bool
) -> dict[str, Any]:
    """Return title, text, table and figures of one series."""
    base = series.base
    text = f"{_FORMULAS[series.mode]}, with T the time per step and N ranks. Baseline N0: {base['baseline']}"
    if known(base["step_time_sec"]):
        text += f", T(N0) = {seconds(base['step_time_sec'], digits=4)}"
    by_name = {drawing.name: drawing for drawing in drawings}
    names = [name for kind in ("speedup", "efficiency") if (name := f"{kind}-{series.mode}") in by_name]
    return {
        "title": mode_title(series.mode),
        "text": f"{text}.",
        **_table(series, frames, reads_values=reads_values),
        "figures": [
            {
                "name": name,
                "description": by_name[name].description,
                "caption": f"{by_name[name].title}. {ascii_formula(by_name[name].caption)}",
            }
            for name in names
        ],
    }


def _table(series: _Series, frames: Frames, *, reads_values: bool) -> dict[str, Any]:
    """Return the table's caption, headings and rows; a column without any value is left out."""
    groups = frames.runs[frames.runs["measured"]].groupby("cell_id", observed=True)
    loops, jobs = groups["window_s"].mean(), groups["wall_s"].mean()
    if reads_values:
        loops = loops * math.nan  # values that a command reports do not show how long its main loop took
    rows = [_table_row(row, series, loops, jobs) for row in series.rows.to_dict("records")]
    headings = [name for name in rows[0] if any(row[name] != MISSING for row in rows)]
    texts = [[row[name] for name in headings] for row in rows]
    caption = f"{mode_title(series.mode)}. n: runs"
    if "Main loop (s)" in headings:
        caption += "; main loop: the timed windows of one run; whole job: from start to end"
    caption += f"; {MISSING}: not measured." if any(MISSING in row for row in texts) else "."
    return {"caption": caption, "headings": headings, "rows": texts}


def _table_row(row: Row, series: _Series, loops: pd.Series, jobs: pd.Series) -> dict[str, str]:
    cell = row["cell_id"]
    return {
        "Nodes": str(row["nodes"]) if nodes_known(row) else MISSING,
        "Ranks per node": str(row["gpus_per_node"]) or MISSING,
        "Ranks": str(row["gpus"]),
        "Batch": whole(row["global_batch"]),
        "Time per step": seconds(row["step_time_sec"], digits=4),
        capital(series.rate_unit): number(row["throughput_samples_per_sec"]),
        "Speedup": number(row["speedup"], digits=3),
        "Efficiency [95 %]": _efficiency(row),
        "n": str(row["n"]),
        "Main loop (s)": number(loops.get(cell), digits=3),
        "Whole job (s)": number(jobs.get(cell), digits=3),
        "Node-h per run": number(row["node_hours"], digits=3),
        f"Node-h per 1M {series.counted}": number(_node_hours_per_million(row), digits=3),
    }


# -- causes of the loss ---------------------------------------------------------------

_LOSSES_NOTE = (
    "Percentages are shares of the logarithm of the efficiency: load balance, communication efficiency and "
    "computational scalability (POP Centre of Excellence), measured in a separate, instrumented window."
)


def _loss_item(series: _Series, invalid: Invalid) -> str:
    """Return a sentence about the causes of the loss at the largest size of a series."""
    last = series.rows.iloc[-1]
    name = f"{mode_title(series.mode)}, {job_size(last)}, efficiency {_efficiency(last)}"
    return f"{name}: {_causes(valid_causes(last, series.base, invalid=invalid))}."


def _causes(causes: Causes) -> str:
    if causes.hardly_any:
        return "hardly any loss"
    return listed(describe_losses(causes, verb="")) or f"not known: {causes.unknown}"


# -- method, settings, missing cells --------------------------------------------------


def _method(study: Study, frames: Frames, rows: pd.DataFrame) -> list[str]:
    """Return paragraphs about windows, runs, intervals, input and output."""
    cells = study.plan.get("cells") or []
    workload = (cells[0].get("workload") or {}) if cells else {}
    intervals = (
        f"{certainty(rows)} Intervals: 95 % confidence, Welch's t on the logarithms of the runs' "
        "throughputs, given for three or more runs."
    )
    if not workload:
        return [f"The values were measured elsewhere and taken from a table. {intervals}"]
    if workload.get("command"):
        return [f"{_source_of_command(workload, frames)} Statistics are over runs. {intervals}"]
    windows = ""
    if workload.get("steps_per_epoch") and workload.get("epochs"):
        windows = (
            f"Each run measures {count(int(workload['epochs']), 'window')} of "
            f"{count(int(workload['steps_per_epoch']), 'step')} after a warm-up, without instrumentation. "
        )
    text = f"{windows}Statistics are over runs, which are executed in a seeded random order. {intervals}"
    return [text, _input_output(workload)]


def _reads_values(study: Study) -> bool:
    """Return whether the values come from the output or a file of a user's command."""
    cells = study.plan.get("cells") or []
    metrics = ((cells[0].get("workload") or {}).get("metrics") or {}) if cells else {}
    return any(name in metrics for name in ("output", "csv", "jsonl"))


def _source_of_command(workload: Mapping[str, Any], frames: Frames) -> str:
    """Return sentences about the source of the values of a user's command, and what was not recorded."""
    done = frames.runs[frames.runs["measured"]]
    metrics = workload.get("metrics") or {}
    file = metrics.get("csv") or metrics.get("jsonl")
    if "output" not in metrics and not file:
        windows, steps = (_range(done[name]) for name in ("epochs", "steps"))
        return (
            f"The recorder (bench.record) in the command measured {windows} windows with {steps} steps in "
            "total per run. Input, output and the model were not recorded."
        )
    origin = f"its file {one_line(file, limit=120)}" if file else "its output"
    skip = int(metrics.get("skip") or 0)
    skipped = f", after {count(skip, 'value')} that {'was' if skip == 1 else 'were'} skipped" if skip else ""
    return (
        f"The command reported the values in {origin}: {_range(done['epochs'])} per run{skipped}. "
        "The batches are those of the matrix; whether the command used them was not recorded, and "
        "neither were input, output and the model."
    )


def _range(values: pd.Series) -> str:
    """Return ``3``, or ``3 to 5`` if the values differ."""
    low, high = values.min(), values.max()
    if pd.isna(low):
        return "an unknown number of"
    return whole(low) if low == high else f"{whole(low)} to {whole(high)}"


def _input_output(workload: Mapping[str, Any]) -> str:
    data = workload.get("data")
    if data in (None, "synthetic"):
        text = "Input: synthetic batches, drawn anew for each step; reading from storage is not included."
    else:
        workers = count(int(workload.get("num_workers") or 0), "loading process", "loading processes")
        text = f"Input: {one_line(data, limit=120)}, read by {workers} per rank."
    if workload.get("checkpoint"):
        return f"{text} Output: a checkpoint after each window, timed separately."
    return f"{text} Output: no checkpoints were written."


def _settings(study: Study, largest: str, environment: Environment) -> list[tuple[str, str]]:
    """Return the settings of the cell ``largest`` and facts of the environment; nothing for a table."""
    cells = study.plan.get("cells") or []
    cell = next((cell for cell in cells if cell["cell_id"] == largest), None)
    if cell is None:
        return []
    workload = cell.get("workload") or {}
    words = [str(word) for word in workload.get("command") or []]
    # A command receives only the options that it names; the others are those of the built-in training.
    passed = [name for name in (*_SETTINGS, "backend") if not words or f"{{{name}}}" in "".join(words)]
    values = {**workload, "backend": cell.get("backend")}
    found = [("command", one_line(shlex.join(without_secrets(words)), limit=300))] if words else []
    found += [(name, spelled(values[name])) for name in passed if values.get(name) is not None]
    found += [("launcher", spelled(cell.get("launcher")))]
    found += [(one_line(k, limit=60), one_line(v, limit=80)) for k, v in (cell.get("env") or {}).items()]
    found += [(label, one_line(value, limit=80)) for label, value in environment.facts if label in _FACTS]
    return found


def _missing(rows: pd.DataFrame) -> list[str]:
    """Return the planned cells without a measurement, with their reasons."""
    lacking = rows[rows["n"] == 0].drop_duplicates("cell_id")
    items = [
        f"{row['cell_id']} ({job_size(row)}): {one_line(row['reason'], limit=160) or row['state']}."
        for row in lacking.head(20).to_dict("records")
    ]
    if len(lacking) > len(items):
        items.append(f"and {count(len(lacking) - len(items), 'more cell')}.")
    return items
