"""What the page says: plain values for the template, which only lays them out."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.checks.anomalies import alerts, anomalies
from analysis.checks.slow_ranks import RankMeans, late_nodes, slow_nodes
from analysis.data.environment import Environment
from analysis.data.load import Study
from analysis.data.names import series_parts, short_labels
from analysis.report.citation import citation, matrix_digest
from analysis.report.details import Details
from analysis.report.figures.drawing import Drawing
from analysis.report.figures.heatmaps import GRID_HEADINGS, Grid, grid_table
from analysis.report.figures.ranks import MAX_NODES_LISTED, NODE_HEADINGS, node_table
from analysis.report.laws_words import LAW_HEADINGS, PARAMETER_HEADINGS, PREDICTION_HEADINGS, law_views
from analysis.report.listing import MAX_ROWS, STATIC_ROWS, columns, place_of, runs_context, table_rows
from analysis.report.summary import certainty, find, nothing_to_tell
from analysis.stats.measured import Frames
from analysis.stats.scaling import GUIDE
from analysis.text import MISSING, clean, count, listed, one_line

MAX_MATRIX_CHARACTERS = 100_000


@dataclass(frozen=True)
class Section:
    """The figures of one regime, with its formulas and baselines."""

    title: str
    formula: str
    baselines: str
    figures: list[Drawing]
    axes: list[tuple[str, list[list[str]]]]


def page_context(
    study: Study,
    frames: Frames,
    rows: pd.DataFrame,
    drawings: Sequence[Drawing],
    environment: Environment,
    closer: Details,
    axes: Mapping[str, Grid],
) -> dict[str, Any]:
    """Return the values that the template lays out; all texts are unescaped."""
    parts = series_parts(study.plan)
    labels, shared = short_labels(parts, dict.fromkeys(rows["series"]))
    named = {series: _with_mode(parts, series, label) for series, label in labels.items()}
    return {
        "name": study.name,
        "lead": _lead(study, frames, environment),
        "shared": shared,
        "missing": MISSING,
        **_summary(study, frames, rows, environment, labels=named),
        "sections": _sections(rows, drawings, axes),
        "axes_headings": GRID_HEADINGS,
        "topics": _topics(drawings),
        **_nodes(closer.ranks),
        "laws": law_views(rows, frames, labels=named, fabrics=closer.fabrics),
        "law_headings": LAW_HEADINGS,
        "parameter_headings": PARAMETER_HEADINGS,
        "prediction_headings": PREDICTION_HEADINGS,
        **_table(rows, labels=labels, rate_unit=frames.rate_unit),
        "runs": runs_context(frames.runs),
        "remarks": study.remarks,
        **_foot(study, frames, environment),
    }


def _summary(
    study: Study, frames: Frames, rows: pd.DataFrame, environment: Environment, *, labels: dict[str, str]
) -> dict[str, Any]:
    """Return what stands before the figures; a node that is late and slow is told of once."""
    late, slow = late_nodes(study, frames), slow_nodes(study, frames)
    both = slow["host"].isin(list(late.sentences))
    return {
        "alerts": list(alerts(rows, frames, environment, late=late, slow=slow[both])),
        "findings": find(rows, labels=labels),
        "no_finding": nothing_to_tell(rows),
        "certainty": certainty(rows) if (rows["n"] > 0).any() else "",
        "anomalies": anomalies(rows, frames, slow=slow[~both]),
    }


def _nodes(ranks: RankMeans | None) -> dict[str, Any]:
    hosts = 0 if ranks is None else len(ranks.by_host)
    return {
        "nodes": [] if ranks is None else node_table(ranks),
        "node_headings": NODE_HEADINGS,
        "nodes_left_out": max(0, hosts - MAX_NODES_LISTED),
    }


def _table(rows: pd.DataFrame, *, labels: dict[str, str], rate_unit: str) -> dict[str, Any]:
    """Return the table of all cells: the first rows for the page itself, all of them for its script."""
    table = table_rows(rows.head(MAX_ROWS), labels=labels)
    efficiency, state = place_of("Efficiency"), place_of("State")
    return {
        "columns": columns(rate_unit),
        "rows": table[:STATIC_ROWS],
        "total_rows": len(table),
        "rows_left_out": max(0, len(rows) - MAX_ROWS),
        "guide": GUIDE,
        "efficiency_column": efficiency,
        "state_column": state,
        "data": json_for_script({"rows": table, "guide": GUIDE, "efficiency": efficiency, "state": state}),
    }


def _foot(study: Study, frames: Frames, environment: Environment) -> dict[str, Any]:
    return {
        "environment": environment,
        "warnings": [one_line(text, limit=500) for text in study.plan.get("warnings") or []],
        "plan_facts": plan_facts(study),
        "reproduce": _reproduce(study),
        "citation": citation(study, frames, environment),
        "matrix": _matrix(study),
        "table": study.plan.get("table"),
    }


def json_for_script(content: Any) -> str:
    """Return JSON that may stand inside a script element: no markup can begin or end in it."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _with_mode(parts: dict[str, dict[str, str]], series: str, label: str) -> str:
    mode = parts.get(series, {}).get("mode", "")
    # A table without a name for its series calls them by their mode.
    named = f"{mode.capitalize()} scaling"
    return label if not mode else named if label == mode else f"{named}, {label}"


# -- top of the page ------------------------------------------------------------------


def models_of(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the models that cells train: a command's own is not known, unless it is told ``model``."""
    workloads = [cell.get("workload") or {} for cell in cells]
    told = [one for one in workloads if not one.get("command") or "{model}" in str(one["command"])]
    return sorted({one_line(one.get("model"), limit=40) for one in told} - {""})


def _lead(study: Study, frames: Frames, environment: Environment) -> str:
    """Return in a sentence or two what was measured, on what, and when."""
    runs = frames.runs
    done = int(runs["measured"].sum())
    if table := study.plan.get("table"):
        cells = count(len(study.cells), "cell")
        return f"{cells} from {count(table['rows'], 'row')} of {one_line(table['name'])}, measured elsewhere."
    facts = dict(environment.facts)
    cells = count(len(study.cells), "cell").capitalize()
    text = f"{cells}, {done:,} of {count(len(runs), 'run')} completed"
    device = facts.get("Device")
    models = models_of(study.plan["cells"])
    if models:
        text += f"; model {listed(models, limit=3)}"
    if device:
        text += f", on {device}"
    if torch := facts.get("PyTorch"):
        text += f", PyTorch {torch}"
    times = pd.concat([runs["started_at"], runs["ended_at"]]).dropna()
    if len(times):
        first, last = (f"{t:%Y-%m-%d %H:%M}" for t in (times.min(), times.max()))
        text += f"; run between {first} and {last} UTC" if first != last else f"; run at {first} UTC"
    return f"{text}."


def _sections(
    rows: pd.DataFrame, drawings: Iterable[Drawing], with_two_axes: Mapping[str, Grid]
) -> list[Section]:
    drawings = list(drawings)
    texts = {
        "strong": ("Strong scaling", "The global batch is constant: S = T(N₀)/T(N), E = S·N₀/N."),
        "weak": ("Weak scaling", "The batch per rank is constant: E = T(N₀)/T(N), scaled speedup = E·N/N₀."),
        "": (
            "Neither strong nor weak",
            "Neither batch is constant over these series: they have no efficiency.",
        ),
    }
    if rows.loc[rows["mode"] == "", "to_train"].all():
        texts[""] = (
            "Time to train",
            "S = T(N₀)/T(N) of whole trainings, convergence included: no efficiency.",
        )
    sections = []
    for regime, (title, formula) in texts.items():
        own = [drawing for drawing in drawings if drawing.topic == "scaling" and drawing.regime == regime]
        if own:
            based = rows[(rows["mode"] == regime) & (rows["baseline"] != "")]
            names = listed(list(dict.fromkeys(based["baseline"])), limit=4)
            axes = grid_table(with_two_axes[regime]) if regime in with_two_axes else []
            sections.append(Section(title, formula, names, own, axes))
    return sections


def _topics(drawings: Iterable[Drawing]) -> dict[str, list[tuple[str, Drawing]]]:
    """Return the figures of each other part of the page, with the regime where a topic has several."""
    topics: dict[str, list[tuple[str, Drawing]]] = {"time": [], "communication": [], "steps": [], "ranks": []}
    for drawing in drawings:
        if drawing.topic in topics:
            regime = f"{drawing.regime.capitalize()} scaling: " if drawing.regime else ""
            topics[drawing.topic].append((regime, drawing))
    return topics


# -- foot of the page -----------------------------------------------------------------


def _matrix(study: Study) -> str:
    """Return what was asked for: the matrix, or the table that was measured elsewhere."""
    if table := study.plan.get("table"):
        return _shortened(clean(table["text"]), "the table")
    try:
        text = study.folder.matrix.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return _shortened(clean(text), "matrix.yaml")


def _shortened(text: str, name: str) -> str:
    if len(text) <= MAX_MATRIX_CHARACTERS:
        return text
    return f"{text[:MAX_MATRIX_CHARACTERS]}\n… the rest is in {name}"


def _reproduce(study: Study) -> list[tuple[str, str]]:
    """Return commands with what each does."""
    if table := study.plan.get("table"):
        mode = f" --mode {table['mode']}" if table.get("mode") else ""
        command = f"bench report {shlex.quote(one_line(table['name'], limit=200))}{mode}"
        return [(command, "writes this page and its tables and figures from the table above")]
    folder = shlex.quote(f"results/{study.name}")
    site = " --site site.yaml" if study.plan.get("inherited") else ""
    return [
        (
            f"bench plan matrix.yaml{site}",
            "plans the same cells, scripts and order again from the matrix above",
        ),
        (f"bench submit {folder}", "submits what has not been done"),
        (f"bench report {folder}", "writes this page and its tables and figures"),
    ]


def plan_facts(study: Study) -> list[tuple[str, str]]:
    """Return what fixes the study beside its matrix: version, seed, repeats, executor."""
    names = (("bench", "bench_version"), ("seed", "seed"), ("repeats", "repeats"), ("executor", "executor"))
    facts = [
        (label, one_line(study.plan.get(key), limit=80))
        for label, key in names
        if study.plan.get(key) is not None
    ]
    if digest := matrix_digest(study):
        facts.append(("SHA-256 of matrix.yaml", digest))
    inherited = study.plan.get("inherited")
    if isinstance(inherited, dict) and inherited:
        taken = [f"{one_line(key, limit=80)} {one_line(value, limit=80)}" for key, value in inherited.items()]
        facts.append(("from the site file", listed(taken, limit=20)))
    return facts
