"""Compute the values that the page's template (page.html.j2) shows."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.causes.catalogue import CAUSES
from analysis.causes.cells import CellDivision
from analysis.checks.assessment import Assessment
from analysis.checks.validity import anomalies, counted, other_warnings
from analysis.data.environment import Environment
from analysis.data.load import Study
from analysis.data.names import ranks, series_parts, short_labels, widest_series
from analysis.report.figures.all_figures import Details
from analysis.report.figures.curves import EFFICIENCY
from analysis.report.figures.drawing import Drawing, Selection, Tips
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
from analysis.stats.attempts import all_attempts
from analysis.stats.law_fit import ALL_SIZES, LEVEL, LawFit, Refusal, fit_laws, runs_of
from analysis.stats.law_forms import Fabric
from analysis.stats.measured import Frames
from analysis.stats.scaling import GUIDE
from analysis.text import (
    MISSING,
    clean,
    clean_characters,
    count,
    fraction,
    fractions,
    interval,
    known,
    listed,
    number,
    one_line,
    percent,
    seconds,
)
from bench.matrix.cell import command_label
from bench.matrix.document import mask_yaml
from bench.secret_values import shown_command, without_secret_variables
from bench.study.files import regular_file

#: Maximum number of series in the section about scaling laws.
MAX_SERIES = 4
#: The serial fraction hardly changes if its intervals exclude a larger relative change.
_FLAT = 0.5
MAX_MATRIX_CHARACTERS = 100_000


def page_context(
    study: Study,
    frames: Frames,
    rows: pd.DataFrame,
    drawings: Sequence[Drawing],
    environment: Environment,
    details: Details,
    axes: Mapping[str, Selection],
    assessment: Assessment,
    divisions: Mapping[int, CellDivision],
    why: Sequence[WhySection],
) -> dict[str, Any]:
    """Return the values of page.html.j2; texts are not escaped."""
    labels, shared = short_labels(series_parts(study.plan), dict.fromkeys(rows["series"]))
    titles = series_titles(study, rows)
    validity, invalid = assessment.findings, assessment.invalid
    attempts = all_attempts(study, frames.runs)
    return {
        "words": WORDS,
        "name": study.name,
        "lead": _lead(study, frames, environment),
        "shared": shared,
        "missing": MISSING,
        "validity": validity,
        "counted": counted(validity),
        "checked": checked(assessment.checks),
        "all_passed": all(check.passed for check in assessment.checks),
        "why": why,
        "causes": [(info.title, info.meaning) for info in CAUSES.values()],
        **_summary(study, frames, rows, divisions, labels=titles, invalid=invalid),
        "groups": _groups(rows, drawings, axes, Executed(study, frames.runs)),
        "nodes": [] if details.ranks is None else node_rows(details.ranks),
        "nodes_left_out": 0 if details.ranks is None else len(details.ranks.by_host[MAX_NODES_LISTED:]),
        "laws": law_sections(rows, frames, labels=titles, fabrics=details.fabrics, invalid=list(invalid)),
        **_table(
            with_errors(rows, invalid),
            attempts,
            labels=labels,
            folders=not study.plan.get("table"),
            marks=_marks([*drawings, *(figure for section in why for figure in section.figures)]),
        ),
        "runs": runs_context(attempts),
        "remarks": study.remarks,
        "environment": environment,
        "run_warnings": other_warnings(environment),
        "warnings": [one_line(text, limit=500) for text in study.plan.get("warnings") or []],
        "plan_facts": plan_facts(study),
        "commands": _commands(study),
        "citation": citation(study, frames, environment),
        "matrix": _matrix(study),
        "table": study.plan.get("table"),
    }


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


def series_titles(study: Study, rows: pd.DataFrame) -> dict[str, str]:
    """Return a short label with the scaling mode for each series."""
    parts = series_parts(study.plan)
    labels, _ = short_labels(parts, dict.fromkeys(rows["series"]))
    return {series: _with_mode(parts, series, label) for series, label in labels.items()}


def _with_mode(parts: dict[str, dict[str, str]], series: str, label: str) -> str:
    mode = parts.get(series, {}).get("mode", "")
    # If a table does not name its series, a series is labelled by its mode.
    title = mode_title(mode)
    return label if not mode else title if label == mode else f"{title}, {label}"


def _lead(study: Study, frames: Frames, environment: Environment) -> str:
    """Return a sentence about the cells, runs, device and dates of the study."""
    runs = frames.runs
    if table := study.plan.get("table"):
        cells = count(len(study.cells), "cell")
        return f"{cells} from {count(table['rows'], 'row')} of {one_line(table['name'])}, measured elsewhere."
    facts = dict(environment.facts)
    text = f"{count(len(study.cells), 'cell')}; {int(runs['measured'].sum()):,} of "
    text += f"{count(len(runs), 'run')} counted"
    if command := _command(study):
        text += f"; command {command}"
    if models := models_of(study.plan["cells"]):
        text += f"; model {listed(models, limit=3)}"
    if device := facts.get("Device"):
        text += f", on {device}"
    # Without the recorder, it is not known whether the command uses the PyTorch that is installed.
    if (torch := facts.get("PyTorch")) and not Executed(study, runs).reads_values:
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


def _summary(
    study: Study,
    frames: Frames,
    rows: pd.DataFrame,
    divisions: Mapping[int, CellDivision],
    *,
    labels: dict[str, str],
    invalid: Mapping[str, str],
) -> dict[str, Any]:
    """Return the page's findings and anomalies."""
    return {
        "findings": find(rows, divisions, labels=labels, invalid=invalid),
        "no_finding": no_finding(rows),
        "certainty": certainty(rows) if (rows["n"] > 0).any() else "",
        "anomalies": anomalies(rows, frames, whole_nodes=bool(study.plan.get("exclusive"))),
    }


def _groups(
    rows: pd.DataFrame, drawings: Iterable[Drawing], axes: Mapping[str, Selection], executed: Executed
) -> list[dict[str, Any]]:
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
            group |= _scaling_words(rows[rows["mode"] == mode], mode, executed)
        tables = grid_tables(axes[mode]) if name.startswith("axes") else []
        groups.append({**group, "topic": topic, "figures": own, "axes": tables, "views": not name})
    # The summary stands beside the first group: an efficiency, if there is any.
    groups.sort(key=lambda group: group["topic"] != "scaling" or group["figures"][0].view != EFFICIENCY.axis)
    return groups


def _scaling_words(rows: pd.DataFrame, mode: str, executed: Executed) -> dict[str, str]:
    """Return the title and the note (constant batch, formula, baselines) of the curves of one mode."""
    name = mode or "other"
    words, batch = WORDS["modes"][name], constant_batch(name, executed)
    names = listed(list(dict.fromkeys(rows.loc[rows["baseline"] != "", "baseline"])), limit=4)
    constant = f"The {batch} is constant: " if batch else ""
    baselines = f" Baseline N₀: {names}." if names else ""
    return {"title": words["title"], "note": f"{constant}{words['formula']}.{baselines}"}


def with_errors(rows: pd.DataFrame, invalid: Mapping[str, str]) -> pd.DataFrame:
    """Return the rows with the error of a cell, or of its baseline, in front of the reason."""
    reasons = []
    for cell, base, reason in rows[["cell_id", "base_cell", "reason"]].itertuples(index=False):
        error = invalid.get(cell) or invalid.get(base, "")
        reasons.append("; ".join(filter(None, (f"error: {error}" if error else "", reason))))
    return rows.assign(reason=reasons)


def _marks(drawings: Iterable[Drawing]) -> Tips:
    return {name: tips for drawing in drawings for name, tips in drawing.marks.items()}


def _table(
    rows: pd.DataFrame, attempts: pd.DataFrame, *, labels: dict[str, str], folders: bool, marks: Tips
) -> dict[str, Any]:
    """Return the table of all cells: the first rows for the HTML, and all rows for the page's script."""
    table = cell_rows(rows.head(MAX_ROWS), labels=labels)
    columns = list(WORDS["cell_columns"])
    efficiency, state = columns.index("Efficiency"), columns.index("State")
    return {
        "columns": cell_columns(),
        "rows": table[:STATIC_ROWS],
        "total_rows": len(table),
        "rows_left_out": max(0, len(rows) - MAX_ROWS),
        "guide": GUIDE,
        "efficiency_column": efficiency,
        "state_column": state,
        "data": json_for_script(
            {
                "rows": table,
                "guide": GUIDE,
                "efficiency": efficiency,
                "state": state,
                "folders": folders,
                "marks": marks,
                **run_data(attempts),
            }
        ),
    }


# -- reproduce and cite ---------------------------------------------------------------


def _matrix(study: Study) -> str:
    """Return the text of matrix.yaml without secrets, or of the table that was measured elsewhere."""
    if table := study.plan.get("table"):
        return _shortened(clean(table["text"]), "the table")
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
    if table := study.plan.get("table"):
        mode = f" --mode {table['mode']}" if table.get("mode") else ""
        return [f"bench report {shlex.quote(one_line(table['name'], limit=200))}{mode}"]
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


def citation(study: Study, frames: Frames, environment: Environment) -> str:
    """Return a BibTeX entry with the known facts, without author and URL."""
    known = [name for name in ("started_at", "ended_at") if name in frames.runs]
    times = pd.concat(
        [pd.Series(dtype="datetime64[ns, UTC]"), *(frames.runs[name].dropna() for name in known)]
    )
    key = re.sub(r"[^a-z0-9]+", "-", study.name.lower()).strip("-") or "study"
    version = one_line(study.plan.get("bench_version"), limit=40)
    facts = dict(environment.facts)
    subject = "" if study.plan.get("table") else " of distributed data parallel training"
    notes = [f"{count(int(frames.runs['measured'].sum()), 'run')}"]
    notes += [f"{name} {facts[name]}" for name in ("Device", "PyTorch") if facts.get(name)]
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
    rows: pd.DataFrame,
    frames: Frames,
    *,
    labels: Mapping[str, str],
    fabrics: Mapping[str, Fabric] | None = None,
    invalid: Collection[str] = (),
) -> list[LawSection]:
    """Return a section for each of the series with the most measured sizes, in the plan's order.

    ``labels`` maps series to their names, and ``fabrics`` maps series to their measured all-reduce.
    Cells that are ``invalid``, or whose baseline is, are left out.
    """
    measured = rows[(rows["n"] > 0) & (rows["mode"] != "") & rows["ddp"]]
    odd = measured[["cell_id", "base_cell"]].isin(invalid).any(axis=1)
    left_out, measured = measured[odd], measured[~odd]
    sections = []
    for series in widest_series(measured, limit=MAX_SERIES):
        own = measured[measured["series"] == series]
        fit = fit_laws(
            runs_of(own, frames), mode=str(own["mode"].iloc[0]), probes=(fabrics or {}).get(series)
        )
        sizes = [ranks(row) for row in left_out[left_out["series"] == series].to_dict("records")]
        note = f"Left out, not valid: {listed(sizes, limit=8)}." if sizes else ""
        sections.append(_section(own, fit, heading=labels.get(series, series), note=note))
    return sections


def _section(own: pd.DataFrame, fit: LawFit | Refusal, *, heading: str, note: str) -> LawSection:
    trend = serial_fraction_trend(own)
    if isinstance(fit, Refusal):
        return LawSection(
            heading, tuple(filter(None, (note, trend, f"No law is fitted: {fit}."))), [], [], []
        )
    in_seconds = bool(own["step_time_sec"].notna().all())
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


def _why_no_prediction(own: pd.DataFrame) -> str:
    """Return a sentence if a law has no prediction because the law does not describe the baseline."""
    if own["is_base"].any():
        return ""
    return (
        f"No prediction: the baseline is {own['baseline'].iloc[0]}, but the law describes only sizes with "
        "DDP. Choose a size with DDP as the baseline (--baseline)."
    )


def _prediction_rows(own: pd.DataFrame, fit: LawFit, *, in_seconds: bool) -> list[tuple[str, ...]]:
    """Predict the time at twice the largest size, and the efficiency relative to the law's baseline time."""
    base = own[own["is_base"]]
    if not len(base):
        return []
    first = base.iloc[0]
    fitted = float(fit.chosen.curve(own["gpus"].to_numpy(dtype=float)[own["is_base"].to_numpy()])[0])
    rows: list[tuple[str, ...]] = []
    for row in fit.predict([2 * fit.largest], LEVEL).to_dict("records"):
        growth = row["gpus"] / first["gpus"] if fit.mode == "strong" else 1.0
        values = [fitted / row[name] / growth for name in ("step_time_sec", "high", "low")]
        time = seconds(row["step_time_sec"]) if in_seconds else MISSING
        if in_seconds:
            time += f" [{seconds(row['low'])}, {seconds(row['high'])}]"
        rows.append((f"{row['gpus']:,}", time, fraction(values[0]), fractions(*values[1:])))
    return rows


def serial_fraction_trend(own: pd.DataFrame) -> str:
    """Return a sentence about Karp-Flatt's serial fraction over the sizes of a strong series, or nothing.

    A trend is stated only if the intervals of the first and the last size support it.
    """
    known_rows = own[own["karp_flatt"].notna()].drop_duplicates("gpus")
    if len(known_rows) < 2:
        return ""
    ends = [_bounds(row) for _, row in known_rows.iterrows()]
    pairs = zip(known_rows["gpus"], known_rows["karp_flatt"], ends, strict=True)
    values = [f"{number(v, digits=2)} {interval(*e, digits=2)}".strip() + f" at {n}" for n, v, e in pairs]
    text = f"Serial fraction by Karp and Flatt: {listed(values, limit=8)} ranks"
    return f"{text}. {_trend(ends[0], ends[-1], values=known_rows['karp_flatt'])}"


def _trend(first: tuple[float, float], last: tuple[float, float], *, values: pd.Series) -> str:
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
    if largest_change <= _FLAT * abs(float(values.mean())):
        return "It hardly changes, which is consistent with a fixed serial part."
    return "These intervals do not show whether it changes with the size."


def _bounds(row: pd.Series) -> tuple[float, float]:
    """Return the lower and upper ends of the serial fraction's interval, from those of the speedup."""
    times = float(row["gpus"]) / float(row["base_gpus"])
    low, high = (
        (1 / float(row[name]) - 1 / times) / (1 - 1 / times) for name in ("speedup_high", "speedup_low")
    )
    return low, high
