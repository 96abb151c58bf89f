"""Compute the values that the page's template (page.html.j2) shows."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from statistics import fmean
from typing import Any

from analysis.causes.claims import CAUSES
from analysis.checks.assessment import Check
from analysis.checks.planned_runs import DisturbedRuns, IncompleteRuns
from analysis.checks.scaling_table import Invalid, error_of
from analysis.compare.settings import HEADINGS as SETTING_HEADINGS
from analysis.compare.settings import sentences
from analysis.compare.strategies import HEADINGS
from analysis.data.columns import ScalingRow, by_series
from analysis.data.differences import spelled
from analysis.data.environment import fact_title
from analysis.data.load import Study
from analysis.data.names import ranks, short_labels, widest_series
from analysis.report.decision import MAX_SERIES, decisions, went_wrong
from analysis.report.figures.drawing import Drawing
from analysis.report.results import Results
from analysis.report.tables import (
    MAX_NODES_LISTED,
    MAX_ROWS,
    STATIC_ROWS,
    cell_columns,
    cell_rows,
    grid_row,
    latex,
    node_row,
    page_columns,
    run_data,
    runs_context,
)
from analysis.report.what_was_run import Executed, constant_batch
from analysis.report.why import WhySection
from analysis.report.words import WORDS, mode_title
from analysis.text import clean, heading, message, one_line
from bench.matrix.cell import Cell, labelled_commands, shown_command
from bench.matrix.document import shown_text
from bench.study.found import read_findings
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.units import MISSING, count, interval, known, listed, number
from ddp_scaling_bench.variables import shown_settings

#: The serial fraction hardly changes if its intervals exclude a larger relative change.
_FLAT = 0.5
MAX_MATRIX_CHARACTERS = 100_000
#: Maximum number of sentences about settings on the first screen.
_MOST_SETTINGS = 4
#: The versions in the first sentence.
_VERSIONS = ("torch", "cuda", "nccl")


def page_context(results: Results, drawings: Sequence[Drawing], why: Sequence[WhySection]) -> dict[str, Any]:
    """Return the values of page.html.j2; texts are not escaped."""
    study, assessment, environment = results.study, results.assessment, results.environment
    hosts = results.ranks.by_host if results.ranks else []
    errors = [fact for fact in assessment.findings if fact.severity == "error"]
    groups = _groups(results, drawings)
    charts = {group["mode"]: group for group in groups if group["topic"] == "scaling" and group["views"]}
    tables = decisions(results)
    return {
        "words": WORDS,
        "name": study.name,
        "what": what_was_measured(results) if results.rows else "",
        "lead": _lead(results),
        "shared": results.labels[1],
        "missing": MISSING,
        "errors": [_finding_row(fact) for fact in errors],
        "counted": count(len(errors), "error"),
        "found": ", ".join(heading(error) for error in errors),
        "decisions": [(one, charts.get(one.mode)) for one in tables],
        "findings": _findings(results),
        "setting_columns": SETTING_HEADINGS,
        "settings": [row.texts() for row in results.settings],
        "strategy_columns": HEADINGS,
        "strategies": _strategies(results),
        "warnings": [(one_line(one, limit=500),) for one in read_findings(study.plan.get("warnings"))],
        "checks": [_check_row(check) for check in assessment.checks],
        "why": why,
        "causes": [(cause.title, cause.meaning) for cause in CAUSES.values()],
        "groups": [group for group in groups if group not in charts.values()],
        "nodes": list(map(node_row, hosts[:MAX_NODES_LISTED])),
        "nodes_left_out": len(hosts[MAX_NODES_LISTED:]),
        "swept": bool(results.sweep),
        "serial": serial_fractions(results),
        **_table(results),
        "runs": runs_context(results.attempts),
        "environment": environment,
        "differs": results.differences,
        "environment_facts": [
            *([(WORDS["headings"]["source"], environment.source)] if environment.read else []),
            *((fact_title(name), value) for name, value in environment.facts),
        ],
        "plan_facts": plan_facts(study),
        "commands": _commands(study),
        "citation": citation(results),
        "matrix": _matrix(study),
        "table": study.table,
    }


def json_for_script(content: Any) -> str:
    """Return JSON for a script element, with markup characters escaped."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def models_of(cells: Sequence[Cell]) -> list[str]:
    """Return the models of the cells, as far as the plan decides about them."""
    return sorted({one_line(cell.workload.get("model"), limit=40) for cell in cells} - {""})


def _strategies(results: Results) -> list[tuple[str, ...]]:
    """Return the rows of the table of strategies, whose heading names what the labels are."""
    rows = results.strategies()
    parts = {one.row.series: results.parts[one.row.series] | {"swept strategy": one.strategy} for one in rows}
    labels, _ = short_labels(parts, parts)
    return [one.texts(labels[one.row.series]) for one in rows]


# -- from the top to the tables -------------------------------------------------------


def _lead(results: Results) -> tuple[list[tuple[str, str]], bool]:
    """Return labels and values of the lines about settings, runs and checks, and whether a run went wrong."""
    findings = [fact for fact in results.assessment.findings if fact.severity == "warning"]
    tells = bool(results.frames.runs) and not results.study.table
    warned = [one for one in findings if not tells or not _is_told(one)]
    warned += [one for one, _ in results.environment.warnings if one.severity != "info"]
    warnings = dict.fromkeys(map(heading, warned))
    wrong, is_wrong = went_wrong(results, warned=bool(warnings))
    found = {
        "wrong": wrong if tells else "",
        "settings": "; ".join(sentences(results.settings)[:_MOST_SETTINGS]),
        "warnings": ", ".join(warnings),
        "checks": _checks(results.assessment.checks),
    }
    return [(WORDS["lead"][name], value) for name, value in found.items() if value], is_wrong


def _checks(checks: Sequence[Check]) -> str:
    passed = [f"{sum(check.passed for check in checks)} of {len(checks)} passed"] if checks else []
    if found := [WORDS["checks"][check.name] for check in checks if check.findings]:
        passed.append(f"findings about {listed(found, limit=3)}")
    if missing := sum(check.missing for check in checks):
        passed.append(f"{missing} not possible")
    return "; ".join(passed)


def _is_told(finding: Finding) -> bool:
    """Return whether the number of runs that count and do not count says what was found."""
    is_out = isinstance(finding, DisturbedRuns) and finding.disturbed == finding.left_out
    return is_out or isinstance(finding, IncompleteRuns)


def what_was_measured(results: Results) -> str:
    """Return a sentence about the program, the sizes, the device, the versions, the runs and their dates."""
    study, facts = results.study, dict(results.environment.facts)
    sizes = sorted({row.gpus for row in results.rows})
    span = f"{sizes[0]:,} to {count(sizes[-1], 'rank')}" if len(sizes) > 1 else ranks(results.rows[0])
    if study.table:
        return f"{study.table.name}, measured elsewhere: {count(study.table.rows, 'row')}, {span}."
    parameters = f"{facts['parameters']} parameters" if facts.get("parameters") else ""
    precisions = {one_line(cell.workload.get("precision"), limit=40) for cell in study.planned} - {"", "fp32"}
    details = ", ".join(filter(None, (parameters, *sorted(precisions))))
    where = [facts.get("device_name", ""), *_partitions(results)]
    versions = [f"{fact_title(name)} {facts[name]}" for name in _VERSIONS if facts.get(name)]
    backends = sorted({row.backend for row in results.rows})
    counted, runs = sum(run.measured for run in results.frames.runs), results.frames.runs
    parts = (
        (_program(study), f" ({details})" if details else "", f" on {span}"),
        (" of " if facts.get("device_name") else ", ", ", ".join(filter(None, where))) if any(where) else (),
        (", with ", listed([*versions, *backends])),
        (f"; {counted:,} of {count(len(runs), 'run')} counted", *(f", {one}" for one in _dates(results))),
    )
    return "".join(text for part in parts for text in part) + "."


def _partitions(results: Results) -> list[str]:
    partition = dict(results.environment.variables).get("SLURM_JOB_PARTITION")
    return [f"partition {partition}"] if partition else []


def _dates(results: Results) -> list[str]:
    times = _times(results)
    days = [f"{time:%Y-%m-%d}" for time in (min(times), max(times))] if times else []
    return [" to ".join(dict.fromkeys(days))] if days else []


def _times(results: Results) -> list[datetime]:
    runs = results.frames.runs
    return [time for run in runs for time in (run.started_at, run.ended_at) if time]


def _program(study: Study) -> str:
    """Return the models of the built-in training, the command, or the number and names of the commands."""
    if models := models_of(study.planned):
        return f"Built-in training of {listed(models, limit=3)}"
    commands = {tuple(cell.argv) for cell in study.planned}
    if len(commands) == 1:
        return f"`{one_line(shown_command(list(commands.pop())), limit=120)}`"
    names = list(dict.fromkeys(one_line(cell.name, limit=40) for cell in study.planned if cell.name))
    named = f": {listed(names, limit=6)}" if len(names) == len(commands) else ""
    return f"{len(commands)} commands{named}"


def _finding_row(finding: Finding, severity: str = "", where: str = "") -> tuple[str, ...]:
    """Return severity, heading, place, evidence and remedy of a finding."""
    place = where or listed(list(finding.subject), limit=3) or WORDS["severities"]["everywhere"]
    severity = WORDS["severities"][severity or finding.severity]
    return severity, heading(finding), one_line(place), message(finding), finding.remedy


def _findings(results: Results) -> list[tuple[str, ...]]:
    """Return the rows of warnings, anomalies, warnings of runs, and remarks."""
    study = results.study
    own = [fact for fact in results.assessment.findings if fact.severity != "error"]
    return [
        *map(_finding_row, own),
        *(_finding_row(fact, "anomaly") for fact in results.assessment.anomalies),
        *(_finding_row(one, where=count(len(runs), "run")) for one, runs in results.environment.warnings),
        *((WORDS["severities"]["remark"], "", "", one_line(text, limit=500), "") for text in study.remarks),
    ]


def _check_row(check: Check) -> tuple[str, str, str]:
    """Return the name of a check, its result, and the cells for which it was possible."""
    result = "not possible" if check.missing else count(check.findings, "finding")
    done = "passed" if check.passed else result
    return WORDS["checks"][check.name], done, f"{check.possible} of {check.cells}"


def _groups(results: Results, drawings: Iterable[Drawing]) -> list[dict[str, Any]]:
    """Group the figures that are views of the same cells: the page shows one figure of a group.

    A group has ``title, note, topic, mode, figures`` and ``axes``, tables of nodes and ranks per node;
    ``views`` is True if its figures have tabs.
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
        sizes = [size for size in results.sizes if topic == "scaling" and size.mode == mode]
        tables = [(results.titles[name], list(map(grid_row, own))) for name, own in by_series(sizes).items()]
        group |= {"topic": topic, "mode": mode, "figures": own, "axes": tables, "views": not name}
        groups.append(group)
    return groups


def _scaling_words(results: Results, mode: str) -> dict[str, str]:
    """Return the title and the note (constant batch, formula) of the curves of one mode."""
    name = mode or "other"
    batch = constant_batch(name, Executed(results.study, results.frames.runs))
    constant = f"The {batch} is constant: " if batch else ""
    return {"title": WORDS["headings"]["scaling"], "note": f"{constant}{WORDS['modes'][name]['formula']}."}


def with_errors(rows: Sequence[ScalingRow], invalid: Invalid) -> list[ScalingRow]:
    """Return the rows with the error of a cell, or of its baseline, in front of the reason."""
    return [
        replace(row, reason="; ".join(filter(None, (f"error: {heading(error)}", row.reason))))
        if (error := error_of(row, row.base, invalid))
        else row
        for row in rows
    ]


def _table(results: Results) -> dict[str, Any]:
    """Return the table of all cells: the first rows for the HTML, and all rows for the page's script."""
    labels, _ = results.labels
    named = [replace(row, series=labels[row.series]) for row in with_errors(results.rows, results.invalid)]
    columns = page_columns(named)
    table = cell_rows(named[:MAX_ROWS], columns)
    folders = not results.study.table
    headings = [column.heading for column in columns.values()]
    data = {"columns": headings, "rows": table, "folders": folders}
    data |= run_data(results.attempts, results.frames.cells)
    return {
        "columns": [one for one in cell_columns(columns) if one["level"] != "further"],
        "rows": table[:STATIC_ROWS],
        "total_rows": len(table),
        "rows_left_out": max(0, len(named) - MAX_ROWS),
        "data": json_for_script(data),
    }


# -- reproduce and cite ---------------------------------------------------------------


def _matrix(study: Study) -> str:
    """Return the text of the matrix without values that are not shown, or of a table from elsewhere."""
    if study.table:
        return _shortened(clean(study.table.text), "the table")
    return _shortened(clean(shown_text(str(study.plan.get("matrix") or ""))), "matrix.yaml")


def _shortened(text: str, name: str) -> str:
    if len(text) <= MAX_MATRIX_CHARACTERS:
        return text
    return f"{text[:MAX_MATRIX_CHARACTERS]}\n… the rest is in {name}"


def _commands(study: Study) -> list[str]:
    """Return the commands that reproduce the study."""
    if table := study.table:
        words = ["bench", "report", table.name, *(("--mode", table.mode) if table.mode else ())]
        for meaning, column in table.names.items():
            words += ["--map", one_line(f"{meaning}={column}")]
        return [shlex.join(words)]
    name = shlex.quote(one_line(study.name, limit=200))
    site = " --site site.yaml" if study.plan.get("inherited") else ""
    # A study without the key `study` has the name of the file from which it was planned.
    save = f"# save the matrix as {name}.yaml" + (" and the study's site.yaml beside it" if site else "")
    return [save, f"bench plan {name}.yaml{site}", f"bench submit {name}", f"bench report {name}"]


def plan_facts(study: Study) -> list[tuple[str, str]]:
    """Return version, seed, repeats, executor, sizes, digest and site defaults of the plan."""
    repeats = [*dict.fromkeys(cell.repeats for cell in study.planned)]
    values = {**study.plan, "repeats": listed([*map(str, repeats)]) or None}
    names = (("bench", "bench_version"), ("seed", "seed"), ("repeats", "repeats"), ("executor", "executor"))
    stated = [(label, values[key]) for label, key in names if values.get(key) is not None]
    facts = [(label, one_line(own, limit=80)) for label, own in stated]
    facts += [
        (f"command {one_line(own.label, limit=60)}", one_line(shown_command(own.words), limit=400))
        for own in labelled_commands(study.planned)
    ]
    # `tasks_per_node: cores` gives other sizes on another machine.
    sizes = dict.fromkeys(f"{cell.nodes} × {spelled(cell.tasks_per_node)}" for cell in study.planned)
    if sizes:
        facts.append(("nodes × ranks per node", listed([*sizes], limit=20)))
    if digest := matrix_digest(study):
        facts.append(("SHA-256 of matrix.yaml", digest))
    inherited = study.plan.get("inherited")
    if isinstance(inherited, dict) and inherited:
        shown = shown_settings(inherited).items()
        taken = [f"{one_line(key, limit=80)} {one_line(value, limit=80)}".rstrip() for key, value in shown]
        facts.append(("from the site file", listed(taken, limit=20)))
    return facts


def matrix_digest(study: Study) -> str:
    """Return the SHA-256 of matrix.yaml; empty if there is none."""
    text = study.plan.get("matrix")
    return hashlib.sha256(text.encode()).hexdigest() if isinstance(text, str) else ""


def citation(results: Results) -> str:
    """Return a BibTeX entry with the known facts, without author and URL."""
    study, times = results.study, _times(results)
    key = re.sub(r"[^a-z0-9]+", "-", study.name.lower()).strip("-") or "study"
    version = one_line(study.plan.get("bench_version"), limit=40)
    facts = dict(results.environment.facts)
    subject = "" if results.study.table else " of distributed data parallel training"
    notes = [count(sum(run.measured for run in results.frames.runs), "run")]
    names = [name for name in ("device_name", "torch") if facts.get(name)]
    notes += [f"{fact_title(name)} {facts[name]}" for name in names]
    if digest := matrix_digest(study):
        notes.append(f"matrix SHA-256 {digest[:16]}")
    fields = {
        "title": f"{study.name}: a scaling study{subject}",
        "year": f"{max(times):%Y}" if times else "",
        "howpublished": f"Measured with ddp-scaling-bench {version}" if version else "",
        "note": ", ".join(notes),
    }
    lines = [f"  {name} = {{{latex(text)}}}," for name, text in fields.items() if text]
    return "\n".join([f"@misc{{{key},", *lines, "}"])


def serial_fractions(results: Results) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return a title and labelled facts for each strong series whose serial fraction is known.

    Cells that are not valid, or whose baseline is not, are left out.
    """
    measured = [row for row in results.rows if row.n and row.mode == "strong" and row.ddp]
    left_out = [row for row in measured if results.error_of(row)]
    measured = [row for row in measured if row not in left_out]
    sections = []
    for series in widest_series(measured, limit=MAX_SERIES):
        if facts := serial_fraction([row for row in measured if row.series == series]):
            facts["left_out"] = listed([ranks(row) for row in left_out if row.series == series], limit=8)
            named = [(WORDS["serial_facts"][name], text) for name, text in facts.items() if text]
            sections.append((results.titles.get(series, series), named))
    return sections


def serial_fraction(own: Sequence[ScalingRow]) -> dict[str, str]:
    """Return Karp-Flatt's serial fraction over the sizes of a strong series and its trend, or nothing.

    A trend is stated only if the intervals of the first and the last size support it.
    """
    known_rows = list({row.gpus: row for row in reversed(own) if known(row.karp_flatt)}.values())[::-1]
    if len(known_rows) < 2:
        return {}
    ends = [_bounds(row) for row in known_rows]
    values = [
        f"{number(row.karp_flatt, digits=2)} {interval(*bounds, digits=2)}".strip() + f" at {row.gpus}"
        for row, bounds in zip(known_rows, ends, strict=True)
    ]
    trend = _trend(ends[0], ends[-1], mean=fmean(row.karp_flatt for row in known_rows))
    return {"serial": f"{listed(values, limit=8)} ranks", "trend": WORDS["trends"][trend]}


def _trend(first: tuple[float, float], last: tuple[float, float], *, mean: float) -> str:
    """Return the change of the serial fraction, if its intervals at the first and last size show it."""
    if not all(known(bound) for bound in (*first, *last)):
        return "no-intervals"
    if max(first[1], last[1]) <= 0:
        return "none"
    if last[0] > first[1]:
        return "grows"
    if last[1] < first[0]:
        return "falls"
    centres, halves = ([(high + sign * low) / 2 for low, high in (first, last)] for sign in (1, -1))
    largest_change = abs(centres[1] - centres[0]) + math.hypot(*halves)
    if largest_change <= _FLAT * abs(mean):
        return "constant"
    return "not-shown"


def _bounds(row: ScalingRow) -> tuple[float, float]:
    """Return the lower and upper ends of the serial fraction's interval, from those of the speedup."""
    times = row.gpus / row.base.gpus if row.base else math.nan
    low, high = ((1 / end - 1 / times) / (1 - 1 / times) for end in (row.speedup_high, row.speedup_low))
    return low, high
