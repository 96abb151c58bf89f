"""What the page says: plain values for the template, which only lays them out."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.environment import Environment
from analysis.figures import Drawing
from analysis.labels import series_parts, short_labels
from analysis.listing import COLUMNS, MAX_ROWS, STATIC_ROWS, place_of, runs_context, states, table_rows
from analysis.load import Study
from analysis.measured import Frames
from analysis.scaling import GUIDE
from analysis.summary import certainty, find
from analysis.wording import MISSING, clean, count, listed, one_line

MAX_MATRIX_CHARACTERS = 100_000


@dataclass(frozen=True)
class Section:
    """The figures of one regime, with its formulas and baselines."""

    title: str
    formula: str
    baselines: str
    figures: list[Drawing]


def page_context(
    study: Study, frames: Frames, rows: pd.DataFrame, drawings: Sequence[Drawing], environment: Environment
) -> dict[str, Any]:
    """Return the values that the template lays out; all texts are unescaped."""
    parts = series_parts(study.plan)
    labels, shared = short_labels(parts, dict.fromkeys(rows["series"]))
    findings = find(
        rows, labels={series: _with_mode(parts, series, label) for series, label in labels.items()}
    )
    table = table_rows(rows.head(MAX_ROWS), labels=labels)
    return {
        "name": study.name,
        "lead": _lead(study, frames, environment),
        "shared": shared,
        "alerts": _alerts(frames, environment),
        "findings": findings,
        "certainty": certainty(rows),
        "sections": _sections(rows, drawings),
        "columns": COLUMNS,
        "rows": table[:STATIC_ROWS],
        "total_rows": len(table),
        "rows_left_out": max(0, len(rows) - MAX_ROWS),
        "data": json_for_script(
            {"rows": table, "guide": GUIDE, "efficiency": place_of("Efficiency"), "state": place_of("State")}
        ),
        "efficiency_column": place_of("Efficiency"),
        "state_column": place_of("State"),
        "guide": GUIDE,
        "runs": runs_context(frames.runs),
        "remarks": study.remarks,
        "warnings": [one_line(text, limit=500) for text in study.plan.get("warnings") or []],
        "environment": environment,
        "matrix": _matrix(study),
        "reproduce": _reproduce(study),
        "plan_facts": plan_facts(study),
        "missing": MISSING,
    }


def json_for_script(content: Any) -> str:
    """Return JSON that may stand inside a script element: no markup can begin or end in it."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _with_mode(parts: dict[str, dict[str, str]], series: str, label: str) -> str:
    mode = parts.get(series, {}).get("mode", "")
    return f"{mode.capitalize()} scaling, {label}" if mode else label


# -- top of the page ------------------------------------------------------------------


def _lead(study: Study, frames: Frames, environment: Environment) -> str:
    """Return in a sentence or two what was measured, on what, and when."""
    runs = frames.runs
    done = int(runs["measured"].sum())
    facts = dict(environment.facts)
    cells = count(len(study.cells), "cell").capitalize()
    text = f"{cells}, {done:,} of {count(len(runs), 'run')} completed"
    device = facts.get("Device")
    models = sorted(
        {one_line((c.get("workload") or {}).get("model"), limit=40) for c in study.plan["cells"]} - {""}
    )
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


def _alerts(frames: Frames, environment: Environment) -> list[tuple[str, str]]:
    """Return what a reader must know before looking at a number: heading and words."""
    alerts = []
    if environment.crowding is not None:
        sizes = environment.crowding.sizes
        concerned = f". Sizes concerned: {listed([str(s) for s in sizes], limit=8)} ranks" if sizes else ""
        alerts.append(("Ranks outnumber cores", f"{environment.crowding}{concerned}."))
    runs = frames.runs
    missing = int((~runs["measured"]).sum())
    if missing == len(runs):
        alerts.append(
            (
                "Nothing to compare",
                f"None of the {count(len(runs), 'planned run')} has completed: there are no numbers yet.",
            )
        )
    elif missing:
        alerts.append(
            (
                "Incomplete",
                f"{missing:,} of {count(len(runs), 'run')} do not count: {states(runs[~runs['measured']])}.",
            )
        )
    if environment.differing:
        alerts.append(
            (
                "Runs differ",
                f"Not all runs had the same {listed(environment.differing)}: see the environment below.",
            )
        )
    return alerts


def _sections(rows: pd.DataFrame, drawings: Iterable[Drawing]) -> list[Section]:
    drawings = list(drawings)
    texts = {
        "strong": ("Strong scaling", "The global batch is constant: S = T(N₀)/T(N), E = S·N₀/N."),
        "weak": ("Weak scaling", "The batch per rank is constant: E = T(N₀)/T(N), scaled speedup = E·N/N₀."),
        "": (
            "Neither strong nor weak",
            "Neither batch is constant over these series: they have no efficiency.",
        ),
    }
    sections = []
    for regime, (title, formula) in texts.items():
        own = [drawing for drawing in drawings if drawing.regime == regime]
        if own:
            based = rows[(rows["mode"] == regime) & (rows["baseline"] != "")]
            names = listed(list(dict.fromkeys(based["baseline"])), limit=4)
            sections.append(Section(title, formula, names, own))
    return sections


# -- foot of the page -----------------------------------------------------------------


def _matrix(study: Study) -> str:
    try:
        text = study.folder.matrix.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    text = clean(text)
    if len(text) > MAX_MATRIX_CHARACTERS:
        return f"{text[:MAX_MATRIX_CHARACTERS]}\n… the rest is in matrix.yaml"
    return text


def _reproduce(study: Study) -> list[tuple[str, str]]:
    """Return commands with what each does."""
    folder = shlex.quote(f"results/{study.name}")
    return [
        ("bench plan matrix.yaml", "plans the same cells, scripts and order again from the matrix above"),
        (f"bench submit {folder}", "submits what has not been done"),
        (f"bench report {folder}", "writes this page and its tables and figures"),
    ]


def plan_facts(study: Study) -> list[tuple[str, str]]:
    """Return what fixes the study beside its matrix: version, seed, repeats, executor."""
    names = (("bench", "bench_version"), ("seed", "seed"), ("repeats", "repeats"), ("executor", "executor"))
    return [
        (label, one_line(study.plan.get(key), limit=80))
        for label, key in names
        if study.plan.get(key) is not None
    ]
