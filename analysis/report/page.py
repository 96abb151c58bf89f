"""Compute the values that the page's template (page.html.j2) shows."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from analysis.checks.assessment import Check
from analysis.checks.planned_runs import DisturbedRuns, IncompleteRuns
from analysis.compare.settings import HEADINGS as SETTING_HEADINGS
from analysis.compare.settings import sentences
from analysis.compare.strategies import HEADINGS as STRATEGY_HEADINGS
from analysis.data.columns import grouped
from analysis.data.environment import fact_title
from analysis.data.load import Study
from analysis.data.names import ranks, short_labels
from analysis.decide import VerdictKind
from analysis.report.decision import Decision, went_wrong
from analysis.report.figures.drawing import Drawing
from analysis.report.results import Results
from analysis.report.tables import (
    MAX_ROWS,
    STATIC_ROWS,
    cell_columns,
    cell_rows,
    page_columns,
    run_data,
    runs_context,
)
from analysis.report.what_was_run import Executed, constant_batch
from analysis.report.why import why_sections
from analysis.report.words import WORDS
from analysis.text import clean, heading, message, one_line
from bench.matrix.cell import Cell, shown_command
from bench.matrix.document import shown_text
from bench.study.found import read_findings
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.units import MISSING, count, known, listed
from ddp_scaling_bench.variables import shown_settings

MAX_MATRIX_CHARACTERS = 100_000
#: Maximum number of sentences about settings on the first screen.
_MOST_SETTINGS = 4
#: Verdicts with a probability, and with a loss.
_WITH_P = {
    *(VerdictKind.EFFICIENT, VerdictKind.AT_THE_GUIDE, VerdictKind.PROBABLE, VerdictKind.INEFFICIENT),
    VerdictKind.CANNOT_TELL,
}
#: The topics of the figures that have a place; the others are in a section of their own.
_PLACES = ("scaling", "why", "settings", "")
#: The versions in the first sentence.
_VERSIONS = ("torch", "cuda", "nccl")


class Table(NamedTuple):
    """A table of texts, whose title and note are in words.toml by its name.

    Attributes:
        numbers: the first column with numbers, and the first column after these.
        files: files with more of it.
        is_open: true for a table that is not folded although it is a detail.
    """

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: tuple[int, int] = (0, 0)
    files: Sequence[str] = ()
    is_open: bool = False


def page_tables(results: Results) -> dict[str, Any]:
    """Return the values of page.html.j2 that show neither losses nor figures; texts are not escaped."""
    return {
        "tables": [table for table in _tables(results) if table.rows],
        "runs": runs_context(results.attempts, study=results.study.folder.name),
        "details": [table for table in _details(results) if table.rows],
        **_cells(results),
    }


def page_context(
    results: Results, drawings: Sequence[Drawing], decided: Sequence[Decision]
) -> dict[str, Any]:
    """Return the other values of page.html.j2; ``decided`` is the table of each scaling mode."""
    study = results.study
    of_sizes = [one for choice in results.choices.values() for one in choice.findings]
    errors = [one for one in (*results.assessment.findings, *of_sizes) if one.severity == "error"]
    headings = ", ".join(dict.fromkeys(map(heading, errors)))
    figures = grouped(drawings, lambda one: one.topic if one.topic in _PLACES else "figures")
    curves = grouped(figures.get("scaling", ()), lambda one: one.mode)
    return {
        "words": WORDS,
        "name": study.name,
        "what": what_was_measured(results) if results.rows else "",
        "lead": _lead(results),
        "terms": _terms(decided, has_p_of_settings=any(known(one.p) for one in results.settings)),
        "has_rule": any(row.kind in _WITH_P for one in decided for _, own in one.groups for row in own),
        "errors": Table("errors", WORDS["columns"]["findings"], [*map(_finding_row, errors)]),
        "found": (count(len(errors), "error"), headings),
        "decisions": [(one, curves.get(one.mode, ()), _note(one.mode, results)) for one in decided],
        "why": why_sections(results, drawings),
        "figures": figures,
        "environment": results.environment,
        "facts": [*_plan_facts(study), *((fact_title(name), own) for name, own in results.environment.facts)],
        "matrix": _matrix(study),
        "table_source": study.table,
        "written": _files(results),
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


def _terms(every: Sequence[Decision], *, has_p_of_settings: bool) -> str:
    """Return the explanations of the words in the answers and verdicts."""
    rows = [row for one in every for _, own in one.groups for row in own]
    kinds = {row.kind for row in rows}
    words = ["efficiency"] * any(row.efficiency != MISSING for row in rows)
    words += ["p"] * bool(kinds & _WITH_P) + ["p-of-settings"] * has_p_of_settings
    words += ["lost"] * bool(kinds & _WITH_P) + ["cannot-tell"] * (VerdictKind.CANNOT_TELL in kinds)
    return " ".join(WORDS["terms_of_answers"][word] for word in words)


def _checks(checks: Sequence[Check]) -> str:
    passed = [f"{sum(check.passed for check in checks)} of {len(checks)} passed"] if checks else []
    if found := [WORDS["checks"][check.name] for check in checks if check.findings]:
        passed.append(f"{len(found)} found something ({listed(found, limit=3)})")
    if missing := [WORDS["checks"][check.name] for check in checks if check.missing]:
        passed.append(f"{len(missing)} not possible ({listed(missing, limit=4)})")
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
    partition = dict(results.environment.variables).get("SLURM_JOB_PARTITION")
    where = [facts.get("device_name", ""), f"partition {partition}" if partition else ""]
    versions = [f"{fact_title(name)} {facts[name]}" for name in _VERSIONS if facts.get(name)]
    backends, runs = sorted({row.backend for row in results.rows}), results.frames.runs
    counts = [run.measured and run.cell_id not in results.invalid for run in runs]
    times = sorted(time for run in runs for time in (run.started_at, run.ended_at) if time)
    days = " to ".join(dict.fromkeys(f"{time:%Y-%m-%d}" for time in (*times[:1], *times[-1:])))
    parts = (
        (_program(study), f" ({details})" if details else "", f" on {span}"),
        (" of " if facts.get("device_name") else ", ", ", ".join(filter(None, where))) if any(where) else (),
        (", with ", listed([*versions, *backends])),
        (f"; {sum(counts):,} of {count(len(runs), 'run')} {'is' if sum(counts) == 1 else 'are'} valid",),
        (f", {days}" if days else "",),
    )
    return "".join(text for part in parts for text in part) + "."


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


def _note(mode: str, results: Results) -> str:
    """Return the note below the curves of a mode: its constant batch, and the formula."""
    batch = constant_batch(mode or "other", Executed(results.study, results.frames.runs))
    formula = WORDS["modes"][mode or "other"]["formula"]
    return f"The {batch} is constant: {formula}." if batch else f"{formula}."


def _finding_row(finding: Finding, severity: str = "", where: str = "") -> tuple[str, ...]:
    """Return severity, heading, place, evidence and remedy of a finding."""
    place = where or listed(list(finding.subject), limit=3) or "all cells"
    return severity or finding.severity, heading(finding), one_line(place), message(finding), finding.remedy


def _tables(results: Results) -> Iterator[Table]:
    """Yield the tables of findings, targets, settings and strategies."""
    own = [fact for fact in results.assessment.findings if fact.severity != "error"]
    of_runs = [_finding_row(one, where=count(len(runs), "run")) for one, runs in results.environment.warnings]
    anomalies = [_finding_row(fact, "anomaly") for fact in results.assessment.anomalies]
    remarks = [("remark", "", "", one_line(text, limit=500), "") for text in results.study.remarks]
    found = [*map(_finding_row, own), *anomalies, *of_runs, *remarks]
    yield Table("findings", WORDS["columns"]["findings"], found)
    targets = [(one.target, one.cell_id, one.verdict, one.value, one.reason) for one in results.target_rows]
    yield Table("targets", WORDS["columns"]["targets"], targets, files=["targets.csv"])
    yield Table("settings", SETTING_HEADINGS, [row.texts() for row in results.settings])
    rows = results.strategies()
    # The label of a row names what the other rows differ in.
    parts = {one.row.series: results.parts[one.row.series] | {"swept strategy": one.strategy} for one in rows}
    labels, _ = short_labels(parts, parts)
    texts = [one.texts(labels[one.row.series]) for one in rows]
    yield Table("strategies", STRATEGY_HEADINGS, texts, numbers=(1, len(STRATEGY_HEADINGS)))


def _details(results: Results) -> Iterator[Table]:
    """Yield the tables of what differs, hosts, warnings of the plan, and checks."""
    columns, differs = WORDS["columns"], sorted(results.differences, key=lambda one: one.planned)
    rows = [(one.what, "yes" if one.planned else "no", one.text(0, counts=True)) for one in differs]
    is_open = not all(one.planned for one in differs)
    yield Table("differs", columns["differs"], rows, files=["what-differs.csv"], is_open=is_open)
    hosts = results.environment.hosts
    texts = [[own or MISSING for own in (host.name, host.cpu, host.cores, host.memory)] for host in hosts]
    machines = [[*own, str(host.runs)] for own, host in zip(texts, hosts, strict=True)]
    yield Table("hosts", columns["hosts"], machines, numbers=(2, 5))
    warnings = read_findings(results.study.plan.get("warnings"))
    yield Table("warnings", columns["warnings"], [(one_line(one, limit=500),) for one in warnings])
    yield Table("checks", columns["checks"], [*map(_check_row, results.assessment.checks)])


def _check_row(check: Check) -> tuple[str, str, str]:
    """Return the name of a check, its result, and the cells for which it was possible."""
    result = "not possible" if check.missing else count(check.findings, "finding")
    done = "passed" if check.passed else result
    return WORDS["checks"][check.name], done, f"{check.possible} of {check.cells}"


def _cells(results: Results) -> dict[str, Any]:
    """Return the table of all cells: the first rows for the HTML, and all rows for the page's script."""
    labels, shared = results.labels
    named = []
    for row in results.rows[:MAX_ROWS]:
        error = results.error_of(row)
        reason = "; ".join(filter(None, (f"error: {heading(error)}" if error else "", row.reason)))
        named.append(replace(row, series=labels[row.series], reason=reason))
    columns = page_columns(named)
    rows = cell_rows(named, columns)
    data = {"columns": [column.heading for column in columns.values()], "rows": rows}
    data |= {"folders": not results.study.table} | run_data(results.attempts, results.frames.cells)
    return {
        "columns": [one for one in cell_columns(columns) if one["level"] != "further"],
        "rows": rows[:STATIC_ROWS],
        "total_rows": len(rows),
        "rows_left_out": len(results.rows) - len(rows),
        "shared": shared,
        "data": json_for_script(data),
    }


def _files(results: Results) -> list[str]:
    """Return the files with more than the page."""
    optional = (("axes.csv", results.sizes), ("nodes.csv", results.ranks), ("sweep.csv", results.sweep))
    found = [name for name, content in optional if content] + ["fabric.csv"] * bool(results.fabric)
    return ["scaling.csv", "scaling.md", "scaling.tex", "runs.csv", *found, "figures/"]


# -- reproduce ------------------------------------------------------------------------


def _matrix(study: Study) -> str:
    """Return the text of the matrix without values that are not shown, or of a table from elsewhere."""
    text = study.table.text if study.table else shown_text(str(study.plan.get("matrix") or ""))
    name = "the table" if study.table else "matrix.yaml"
    text = clean(text)
    more = f"\n… the rest is in {name}" if len(text) > MAX_MATRIX_CHARACTERS else ""
    return text[:MAX_MATRIX_CHARACTERS] + more


def _plan_facts(study: Study) -> list[tuple[str, str]]:
    """Return version, seed, executor, digest and site defaults of the plan, or the command for a table."""
    if table := study.table:
        words = ["bench", "report", table.name, *(("--mode", table.mode) if table.mode else ())]
        words += [word for own in table.names.items() for word in ("--map", one_line("=".join(own)))]
        return [("command", shlex.join(words))]
    names = (("bench", "bench_version"), ("seed", "seed"), ("executor", "executor"))
    stated = [(label, study.plan.get(key)) for label, key in names]
    facts = [(label, one_line(own, limit=80)) for label, own in stated if own is not None]
    if isinstance(text := study.plan.get("matrix"), str):
        facts.append(("SHA-256 of matrix.yaml", hashlib.sha256(text.encode()).hexdigest()))
    inherited = study.plan.get("inherited")
    if isinstance(inherited, dict) and inherited:
        shown = shown_settings(inherited).items()
        taken = [f"{one_line(key, limit=80)} {one_line(value, limit=80)}".rstrip() for key, value in shown]
        facts.append(("from the site file", listed(taken, limit=20)))
    return facts
