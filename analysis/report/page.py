"""Compute the values that the page's template (page.html.j2) shows."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

from analysis.causes.catalogue import CAUSES
from analysis.checks.scaling_table import Invalid, invalid_reason
from analysis.checks.validity import OWNED, anomalies
from analysis.data.load import Study
from analysis.data.names import ranks, widest_series
from analysis.report.figures.curves import EFFICIENCY
from analysis.report.figures.drawing import Drawing, Tips
from analysis.report.results import Results
from analysis.report.summary import certainty, checked, find, no_finding
from analysis.report.tables import (
    MAX_NODES_LISTED,
    MAX_ROWS,
    STATIC_ROWS,
    cell_columns,
    cell_rows,
    grid_tables,
    latex,
    node_rows,
    run_data,
    runs_context,
)
from analysis.report.what_was_run import Executed, constant_batch
from analysis.report.why import WhySection
from analysis.report.words import WORDS, mode_title
from analysis.stats.columns import ScalingRow
from analysis.stats.law_fit import ALL_SIZES, LEVEL, LawFit, Refusal, fit_laws, runs_of
from analysis.stats.law_forms import Fabric
from analysis.stats.measured import Frames
from analysis.stats.scaling import GUIDE
from analysis.text import clean, clean_characters, message, one_line
from bench.facts import Fact
from bench.matrix.cell import command_label
from bench.matrix.document import mask_yaml
from bench.secret_values import shown_command, without_secret_variables
from bench.study.files import regular_file
from bench.units import MISSING, count, fraction, fractions, interval, known, listed, number, percent, seconds
from bench.words import about, heading, sentence, term, title

#: Maximum number of series in the section about scaling laws.
MAX_SERIES = 4
#: The serial fraction hardly changes if its intervals exclude a larger relative change.
_FLAT = 0.5
MAX_MATRIX_CHARACTERS = 100_000


def page_context(results: Results, drawings: Sequence[Drawing], why: Sequence[WhySection]) -> dict[str, Any]:
    """Return the values of page.html.j2; texts are not escaped."""
    study, rows, assessment = results.study, results.rows, results.assessment
    validity, environment = assessment.findings, results.environment
    marks = _marks([*drawings, *(figure for section in why for figure in section.figures)])
    hosts_left_out = results.ranks.by_host[MAX_NODES_LISTED:] if results.ranks else ()
    return {
        "words": WORDS,
        "name": study.name,
        "lead": _lead(results),
        "shared": results.labels[1],
        "missing": MISSING,
        "validity": [(title(fact), message(fact)) for fact in validity],
        "counted": _counted(validity),
        "found": ", ".join(heading(fact.kind) for fact in validity),
        "checked": checked(assessment.checks),
        "all_passed": all(check.passed for check in assessment.checks),
        "why": why,
        "causes": [(about([cause], "title"), about([cause], "meaning")) for cause in CAUSES],
        "findings": find(rows, results.divisions, labels=results.titles, invalid=results.invalid),
        "no_finding": no_finding(rows),
        "certainty": certainty(rows) if any(row.n for row in rows) else "",
        "anomalies": [
            (heading(fact.kind), message(fact))
            for fact in anomalies(rows, results.frames, whole_nodes=bool(study.plan.get("exclusive")))
        ],
        "groups": _groups(results, drawings),
        "nodes": node_rows(results.ranks) if results.ranks else [],
        "nodes_left_out": len(hosts_left_out),
        "laws": law_sections(
            *(rows, results.frames), labels=results.titles, fabrics=results.fabrics, invalid=results.invalid
        ),
        **_table(results, marks),
        "runs": runs_context(results.attempts),
        "remarks": study.remarks,
        "environment": environment,
        "differs": results.differences,
        "run_warnings": [
            f"{one_line(sentence(fact))} ({count(runs, 'run')})"
            for fact, runs in environment.warnings
            if fact.kind not in OWNED
        ],
        "environment_facts": [(term("environment", name), value) for name, value in environment.facts],
        "warnings": [one_line(text, limit=500) for text in study.plan.get("warnings") or []],
        "plan_facts": plan_facts(study),
        "commands": _commands(study),
        "citation": citation(results),
        "matrix": _matrix(study),
        "table": study.table,
    }


def _counted(found: Sequence[Fact]) -> str:
    """Return the number of findings of each severity: ``1 error and 2 warnings``."""
    counts = Counter(fact.severity for fact in found)
    return listed([count(counts[name], name) for name in ("error", "warning") if counts[name]])


def json_for_script(content: Any) -> str:
    """Return JSON for a script element, with markup characters escaped."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def models_of(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the models of the cells; a user's command has a model only if it contains ``{model}``."""
    workloads = [cell.get("workload") or {} for cell in cells]
    known = [one for one in workloads if not one.get("command") or "{model}" in str(one["command"])]
    return sorted({one_line(one.get("model"), limit=40) for one in known} - {""})


# -- from the top to the tables -------------------------------------------------------


def _lead(results: Results) -> str:
    """Return a sentence about the cells, runs, device and dates of the study."""
    study, runs = results.study, results.frames.runs
    cells = count(len(study.cells), "cell")
    if table := study.table:
        return f"{cells} from {count(table.rows, 'row')} of {table.name}, measured elsewhere."
    facts = dict(results.environment.facts)
    text = f"{cells}; {int(runs['measured'].sum()):,} of {count(len(runs), 'run')} counted"
    if command := _command(study):
        text += f"; command {command}"
    if models := models_of(study.plan["cells"]):
        text += f"; model {listed(models, limit=3)}"
    if device := facts.get("device_name"):
        text += f", on {device}"
    # Without the recorder, it is not known whether the command uses the PyTorch that is installed.
    if (torch := facts.get("torch")) and not Executed(study, runs).reads_values:
        text += f", PyTorch {torch}"
    times = pd.concat([runs["started_at"], runs["ended_at"]]).dropna()
    if len(times):
        first, last = (f"{t:%Y-%m-%d %H:%M}" for t in (times.min(), times.max()))
        text += f"; run between {first} and {last} UTC" if first != last else f"; run at {first} UTC"
    return f"{text}."


def _command(study: Study) -> str:
    """Return the user's command without secrets; if there are several, their number; if none, ""."""
    workloads = [cell.get("workload") or {} for cell in study.plan["cells"]]
    commands = {tuple(map(str, one["command"])) for one in workloads if one.get("command")}
    if len(commands) == 1:
        return one_line(shown_command(list(commands.pop())), limit=160)
    names = [one_line(one["command_name"], limit=40) for one in workloads if one.get("command_name")]
    names = list(dict.fromkeys(names))
    named = f" ({listed(names, limit=6)})" if len(names) == len(commands) else ""
    return f"in {len(commands)} variants{named}" if commands else ""


def _labelled_commands(study: Study) -> dict[str, str]:
    """Return the commands that have a name or differ between cells, without secrets, by their labels."""
    found = {}
    for cell in study.plan.get("cells") or []:
        workload = cell.get("workload") or {}
        if workload.get("command") and (label := command_label(workload, cell.get("swept") or {})):
            found[label] = shown_command(list(map(str, workload["command"])))
    return found


def _groups(results: Results, drawings: Iterable[Drawing]) -> list[dict[str, Any]]:
    """Group the figures that are views of the same cells: the page shows one figure of a group.

    A group has ``title, note, figures`` and ``axes``, tables of nodes and ranks per node; ``views`` is True
    if its figures have tabs.
    """
    figures: dict[tuple[str, ...], list[Drawing]] = {}
    for drawing in drawings:
        key = (drawing.topic, drawing.mode, "" if drawing.view else drawing.name)
        figures.setdefault(key, []).append(drawing)
    modes = {mode for _, mode, _ in figures if mode}
    groups = []
    for (topic, mode, name), own in figures.items():
        prefix = f"{mode_title(mode)}: " if len(modes) > 1 and mode else ""
        title = own[0].heading if name else WORDS["headings"].get(topic, "")
        group = {"title": f"{prefix}{title}", "note": WORDS["group_notes"].get(topic, "")}
        if topic == "scaling" and not name:
            group |= _scaling_words(results, mode)
        tables = grid_tables(results.axes[mode]) if name.startswith("axes") else []
        groups.append({**group, "topic": topic, "figures": own, "axes": tables, "views": not name})
    # The summary stands beside the first group: an efficiency, if there is any.
    groups.sort(key=lambda group: group["topic"] != "scaling" or group["figures"][0].view != EFFICIENCY.axis)
    return groups


def _scaling_words(results: Results, mode: str) -> dict[str, str]:
    """Return the title and the note (constant batch, formula, baselines) of the curves of one mode."""
    name = mode or "other"
    words, batch = WORDS["modes"][name], constant_batch(name, Executed(results.study, results.frames.runs))
    baselines = dict.fromkeys(row.baseline for row in results.rows if row.mode == mode and row.baseline)
    constant = f"The {batch} is constant: " if batch else ""
    baseline = f" Baseline N₀: {listed(list(baselines), limit=4)}." if baselines else ""
    return {"title": words["title"], "note": f"{constant}{words['formula']}.{baseline}"}


def with_errors(rows: Sequence[ScalingRow], invalid: Mapping[str, str]) -> list[ScalingRow]:
    """Return the rows with the error of a cell, or of its baseline, in front of the reason."""
    return [
        replace(row, reason="; ".join(filter(None, (f"error: {heading(error)}", row.reason))))
        if (error := invalid_reason(row, row.base, invalid))
        else row
        for row in rows
    ]


def _marks(drawings: Iterable[Drawing]) -> Tips:
    return {name: tips for drawing in drawings for name, tips in drawing.marks.items()}


def _table(results: Results, marks: Tips) -> dict[str, Any]:
    """Return the table of all cells: the first rows for the HTML, and all rows for the page's script."""
    labels, _ = results.labels
    named = [replace(row, series=labels[row.series]) for row in with_errors(results.rows, results.invalid)]
    table = cell_rows(named[:MAX_ROWS])
    folders = not results.study.table
    data = {"rows": table, "guide": GUIDE, "folders": folders, "marks": marks, **run_data(results.attempts)}
    return {
        "columns": cell_columns(),
        "rows": table[:STATIC_ROWS],
        "total_rows": len(table),
        "rows_left_out": max(0, len(named) - MAX_ROWS),
        "guide": GUIDE,
        "data": json_for_script(data),
    }


# -- reproduce and cite ---------------------------------------------------------------


def _matrix(study: Study) -> str:
    """Return the text of matrix.yaml without secrets, or of the table that was measured elsewhere."""
    if study.table:
        return _shortened(clean(study.table.text), "the table")
    try:
        with open(study.folder.matrix, encoding="utf-8", errors="replace", opener=regular_file) as file:
            text = file.read()
    except OSError:
        return ""
    return _shortened(clean_characters(mask_yaml(text)), "matrix.yaml")


def _shortened(text: str, name: str) -> str:
    if len(text) <= MAX_MATRIX_CHARACTERS:
        return text
    return f"{text[:MAX_MATRIX_CHARACTERS]}\n… the rest is in {name}"


def _commands(study: Study) -> list[str]:
    """Return the commands that reproduce the study."""
    if table := study.table:
        mode = f" --mode {table.mode}" if table.mode else ""
        return [f"bench report {shlex.quote(table.name)}{mode}"]
    name = shlex.quote(one_line(study.name, limit=200))
    site = " --site site.yaml" if study.plan.get("inherited") else ""
    # A study without the key `study` has the name of the file from which it was planned.
    save = f"# save the matrix as {name}.yaml" + (" and the study's site.yaml beside it" if site else "")
    return [save, f"bench plan {name}.yaml{site}", f"bench submit {name}", f"bench report {name}"]


def plan_facts(study: Study) -> list[tuple[str, str]]:
    """Return version, seed, repeats, executor, digest and site defaults of the plan."""
    names = (("bench", "bench_version"), ("seed", "seed"), ("repeats", "repeats"), ("executor", "executor"))
    facts = [
        (label, one_line(study.plan.get(key), limit=80))
        for label, key in names
        if study.plan.get(key) is not None
    ]
    facts += [
        (f"command {one_line(label, limit=60)}", one_line(text, limit=400))
        for label, text in _labelled_commands(study).items()
    ]
    if digest := matrix_digest(study):
        facts.append(("SHA-256 of matrix.yaml", digest))
    inherited = study.plan.get("inherited")
    if isinstance(inherited, dict) and inherited:
        inherited = without_secret_variables(inherited)
        taken = [f"{one_line(key, limit=80)} {one_line(value, limit=80)}" for key, value in inherited.items()]
        facts.append(("from the site file", listed(taken, limit=20)))
    return facts


def matrix_digest(study: Study) -> str:
    """Return the SHA-256 of matrix.yaml; empty if it is missing."""
    try:
        return hashlib.sha256(study.folder.matrix.read_bytes()).hexdigest()
    except OSError:
        return ""


def citation(results: Results) -> str:
    """Return a BibTeX entry with the known facts, without author and URL."""
    study, runs = results.study, results.frames.runs
    known = [name for name in ("started_at", "ended_at") if name in runs]
    times = pd.concat([pd.Series(dtype="datetime64[ns, UTC]"), *(runs[name].dropna() for name in known)])
    key = re.sub(r"[^a-z0-9]+", "-", study.name.lower()).strip("-") or "study"
    version = one_line(study.plan.get("bench_version"), limit=40)
    facts = dict(results.environment.facts)
    subject = "" if results.study.table else " of distributed data parallel training"
    notes = [count(int(runs["measured"].sum()), "run")]
    names = [name for name in ("device_name", "torch") if facts.get(name)]
    notes += [f"{term('environment', name)} {facts[name]}" for name in names]
    if digest := matrix_digest(study):
        notes.append(f"matrix SHA-256 {digest[:16]}")
    fields = {
        "title": f"{study.name}: a scaling study{subject}",
        "year": f"{times.max():%Y}" if len(times) else "",
        "howpublished": f"Measured with ddp-scaling-bench {version}" if version else "",
        "note": ", ".join(notes),
    }
    lines = [f"  {name} = {{{latex(text)}}}," for name, text in fields.items() if text]
    return "\n".join([f"@misc{{{key},", *lines, "}"])


@dataclass(frozen=True)
class LawSection:
    """The page's section about the laws of one series: heading, sentences, and three tables of texts."""

    heading: str
    sentences: tuple[str, ...]
    parameters: list[tuple[str, ...]]
    laws: list[tuple[str, ...]]
    predictions: list[tuple[str, ...]]


def law_sections(
    rows: Sequence[ScalingRow],
    frames: Frames,
    *,
    labels: Mapping[str, str],
    fabrics: Mapping[str, Fabric] | None = None,
    invalid: Invalid,
) -> list[LawSection]:
    """Return a section for each of the series with the most measured sizes, in the plan's order.

    ``labels`` maps series to their names, and ``fabrics`` maps series to their measured all-reduce.
    Cells that are ``invalid``, or whose baseline is, are left out.
    """
    measured = [row for row in rows if row.n and row.mode and row.ddp]
    left_out = [row for row in measured if invalid_reason(row, row.base, invalid)]
    measured = [row for row in measured if row not in left_out]
    sections = []
    for series in widest_series(measured, limit=MAX_SERIES):
        own = [row for row in measured if row.series == series]
        fit = fit_laws(runs_of(own, frames), mode=own[0].mode, probes=(fabrics or {}).get(series))
        sizes = [ranks(row) for row in left_out if row.series == series]
        note = f"Left out, not valid: {listed(sizes, limit=8)}." if sizes else ""
        sections.append(_section(own, fit, heading=labels.get(series, series), note=note))
    return sections


def _section(own: Sequence[ScalingRow], fit: LawFit | Refusal, *, heading: str, note: str) -> LawSection:
    trend = serial_fraction_trend(own)
    if isinstance(fit, Refusal):
        return LawSection(
            heading, tuple(filter(None, (note, trend, f"No law is fitted: {fit}."))), [], [], []
        )
    in_seconds = all(known(row.step_time_sec) for row in own)
    path = "" if fit.path == ALL_SIZES else f" Sizes: {fit.path}."
    choice = f"{choice_text(fit)}{path} Noise of individual runs: {percent(fit.chosen.noise, decimals=1)}."
    return LawSection(
        heading,
        tuple(filter(None, (note, trend, choice, _why_no_prediction(own)))),
        _parameter_rows(fit, in_seconds=in_seconds),
        _law_rows(fit),
        _prediction_rows(own, fit, in_seconds=in_seconds),
    )


def choice_text(fit: LawFit) -> str:
    """Return sentences that give the reason for the chosen law."""
    title = fit.chosen.law.title
    others = [law.law.title for law in fit.plausible if law is not fit.chosen and not law.refused]
    error = percent(abs(fit.chosen.leave_last_error), decimals=1)
    runs = count(fit.runs, "run")
    if fit.by_aicc:
        text = f"{title} has the lowest AICc over {runs}. "
        text += f"Fitted to the other sizes, it predicts the largest size to within {error}"
    else:
        text = f"{title} predicts the largest size best when fitted without this size (error {error}); "
        text += f"{runs} are too few for AICc"
    if others:
        text += f". Laws with nearly the same support: {listed(others)}; the intervals include these laws"
    return f"{text}."


def _parameter_rows(fit: LawFit, *, in_seconds: bool) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    chosen = fit.chosen
    table = zip(chosen.law.parameters, chosen.theta, chosen.low, chosen.high, strict=True)
    for parameter, value, low, high in table:
        if not parameter.unit:
            text, bounds = number(value, digits=3), interval(low, high, digits=3)
        elif in_seconds:
            text, bounds = seconds(value), f"[{seconds(low)}, {seconds(high)}]"
        else:
            continue
        rows.append((parameter.name, text, bounds, parameter.meaning))
    return rows


def _law_rows(fit: LawFit) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for fitted in fit.laws:
        delta = number(fitted.aicc - fit.chosen.aicc, digits=3) if math.isfinite(fitted.aicc) else MISSING
        error = percent(fitted.leave_last_error, decimals=1)
        rows.append((fitted.law.title, fitted.law.formula, delta, error, fit.status(fitted)))
    return rows


def _why_no_prediction(own: Sequence[ScalingRow]) -> str:
    """Return a sentence if a law has no prediction because the law does not describe the baseline."""
    if any(row.is_base for row in own):
        return ""
    return (
        f"No prediction: the baseline is {own[0].baseline}, but the law describes only sizes with "
        "DDP. Choose a size with DDP as the baseline (--baseline)."
    )


def _prediction_rows(own: Sequence[ScalingRow], fit: LawFit, *, in_seconds: bool) -> list[tuple[str, ...]]:
    """Predict the time at twice the largest size, and the efficiency relative to the law's baseline time."""
    base = next((row for row in own if row.is_base), None)
    if base is None:
        return []
    fitted = float(fit.chosen.curve(np.array([float(base.gpus)]))[0])
    rows: list[tuple[str, ...]] = []
    for row in fit.predict([2 * fit.largest], LEVEL):
        growth = row.gpus / base.gpus if fit.mode == "strong" else 1.0
        values = [fitted / time / growth for time in (row.step_time_sec, row.high, row.low)]
        time = seconds(row.step_time_sec) if in_seconds else MISSING
        if in_seconds:
            time += f" [{seconds(row.low)}, {seconds(row.high)}]"
        rows.append((f"{row.gpus:,}", time, fraction(values[0]), fractions(*values[1:])))
    return rows


def serial_fraction_trend(own: Sequence[ScalingRow]) -> str:
    """Return a sentence about Karp-Flatt's serial fraction over the sizes of a strong series, or nothing.

    A trend is stated only if the intervals of the first and the last size support it.
    """
    known_rows = list({row.gpus: row for row in reversed(own) if known(row.karp_flatt)}.values())[::-1]
    if len(known_rows) < 2:
        return ""
    ends = [_bounds(row) for row in known_rows]
    values = [
        f"{number(row.karp_flatt, digits=2)} {interval(*bounds, digits=2)}".strip() + f" at {row.gpus}"
        for row, bounds in zip(known_rows, ends, strict=True)
    ]
    text = f"Serial fraction by Karp and Flatt: {listed(values, limit=8)} ranks"
    return f"{text}. {_trend(ends[0], ends[-1], mean=fmean(row.karp_flatt for row in known_rows))}"


def _trend(first: tuple[float, float], last: tuple[float, float], *, mean: float) -> str:
    """Describe the change of the serial fraction, if its intervals at the first and last size show it."""
    if not all(known(bound) for bound in (*first, *last)):
        return "A trend is not stated without intervals, which need 3 runs."
    if last[0] > first[1]:
        return (
            "It grows with the size: additional ranks cause the loss (communication, imbalance), not a fixed "
            "serial part."
        )
    if last[1] < first[0]:
        return "It falls with the size: the smallest sizes have a loss that larger ones do not have."
    if max(first[1], last[1]) <= 0:
        return "It is not above 0: the speedup is at least ideal."
    centres, halves = ([(high + sign * low) / 2 for low, high in (first, last)] for sign in (1, -1))
    largest_change = abs(centres[1] - centres[0]) + math.hypot(*halves)
    if largest_change <= _FLAT * abs(mean):
        return "It hardly changes, which is consistent with a fixed serial part."
    return "These intervals do not show whether it changes with the size."


def _bounds(row: ScalingRow) -> tuple[float, float]:
    """Return the lower and upper ends of the serial fraction's interval, from those of the speedup."""
    times = row.gpus / row.base.gpus if row.base else math.nan
    low, high = ((1 / end - 1 / times) / (1 - 1 / times) for end in (row.speedup_high, row.speedup_low))
    return low, high
