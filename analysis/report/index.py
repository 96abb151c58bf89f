"""List the studies of a results folder for results/index.html, the newest first.

Each report leaves what the list shows of its study in report/index.json. Of a study without a report, or with
runs that ended after it, the plan and the ledger are read.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from pydantic import BaseModel, Field, FiniteFloat, ValidationError, field_validator

from analysis.checks.scaling_table import VerdictKind
from analysis.data.names import widest_series, with_layout
from analysis.report.results import Results
from analysis.stats.columns import grouped
from analysis.stats.scaling import GUIDE
from analysis.text import one_line
from bench.errors import BenchError
from bench.study.files import read_json
from bench.study.layout import StudyFolder, latest_first
from bench.study.ledger import RunState
from bench.study.plan_json import open_study
from bench.units import count, fraction, known
from bench.words import term

INDEX_FILE = "index.json"
#: Maximum number of recommended sizes, and of points of a curve.
_MOST = 24
#: Maximum number of runs and of ranks in a file.
_LARGEST = 10**9
#: Width and height of a curve, its margin, and the efficiency at its upper end.
_WIDTH, _HEIGHT, _MARGIN, _TOP = 120, 36, 4, 1.15


class Entry(BaseModel, frozen=True):
    """What the list shows of a study: the content of report/index.json.

    ``sizes`` are pairs of series and the size recommended for them. ``curve`` contains pairs of ranks and
    efficiency of the series with the most valid sizes, whose title is ``series``; a series with a recommended
    size is preferred. ``options`` are those of ``bench report`` that change the results.
    """

    states: dict[RunState, Annotated[int, Field(ge=0, le=_LARGEST)]] = {}
    sizes: tuple[tuple[str, str], ...] = Field((), max_length=_MOST)
    series: str = ""
    curve: tuple[tuple[Annotated[int, Field(gt=0, le=_LARGEST)], FiniteFloat], ...] = Field(
        (), max_length=_MOST
    )
    options: str = ""

    @field_validator("curve")
    @classmethod
    def _ranks_increase(cls, curve: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        if any(second[0] <= first[0] for first, second in pairwise(curve)):
            raise ValueError("the ranks do not increase")
        return curve


def entry_of(results: Results, *, options: str = "") -> Entry:
    """Return what the list shows of a study."""
    best = [row for row in results.rows if results.verdicts[row.place].kind == VerdictKind.USE]
    valid = [row for row in results.rows if known(row.efficiency) and not results.error_of(row)]
    decided = [row for row in valid if row.series in {one.series for one in best}]
    curve: dict[int, float] = {}
    for series in widest_series(decided or valid, limit=1)[:1]:
        curve = {row.gpus: row.efficiency for row in reversed(valid) if row.series == series}
    sizes = grouped(best, with_layout)
    return Entry(
        states=dict(Counter(map(RunState, results.study.runs["state"]))),
        sizes=tuple(
            ("; ".join(results.titles[row.series] for row in own), size) for size, own in sizes.items()
        )[:_MOST],
        series=results.titles[series] if curve else "",
        curve=tuple(sorted(curve.items()))[:_MOST],
        options=options,
    )


def index_context(root: Path) -> dict[str, Any]:
    """Return the values of index.html.j2 for the results folder ``root``."""
    guide = _HEIGHT - _MARGIN - (_HEIGHT - 2 * _MARGIN) * GUIDE / _TOP
    rows = [_listed(folder) for folder in latest_first(root)]
    return {"folder": one_line(root.name), "studies": rows, "guide_y": round(guide, 1)}


def _listed(folder: StudyFolder) -> dict[str, Any]:
    """Return the row of a study; texts are not escaped."""
    entry, problem, date, is_reported = Entry(), "", "", False
    try:
        date = f"{datetime.fromtimestamp(folder.planned_s, UTC):%Y-%m-%d}"
        is_reported = (folder.report / "index.html").is_file()
        entry, problem = _entry(folder)
    except BenchError as error:
        problem = f"damaged: {error.message}"
    except OSError as error:
        problem = f"not readable: {error.strerror}"
    return {
        "name": one_line(folder.name, limit=200),
        "link": f"{quote(os.fsencode(folder.name), safe='')}/report/index.html" if is_reported else "",
        "date": date,
        "state": _state(entry.states),
        "problem": one_line(problem, limit=200),
        "sizes": [(one_line(series), one_line(size)) for series, size in entry.sizes],
        "options": one_line(entry.options, limit=120),
        "series": one_line(entry.series),
        "title": _title(entry),
        "points": _points(entry),
    }


def _entry(folder: StudyFolder) -> tuple[Entry, str]:
    """Return what the list shows of a study, and what is wrong with it.

    Raises BenchError if the plan is damaged and is needed.
    """
    file = folder.report / INDEX_FILE
    entry, problem = Entry(), ""
    try:
        if file.exists():
            entry = Entry.model_validate(read_json(file))
            if file.stat().st_mtime >= folder.changed_s:
                return entry, ""
            problem = "The report is older than the last run."
    except ValidationError:
        problem = f"report/{INDEX_FILE} is damaged."
    states = Counter(record.state for record in open_study(folder).records().values())
    return entry.model_copy(update={"states": dict(states)}), problem


def _state(states: Mapping[RunState, int]) -> str:
    """Return ``12 of 15 runs completed; 2 failed; 1 not started``."""
    total, completed = sum(states.values()), states.get(RunState.COMPLETED, 0)
    others = [f"{n:,} {term('outcome', state)}" for state, n in states.items() if state != RunState.COMPLETED]
    return "; ".join([f"{completed:,} of {count(total, 'run')} completed", *others]) if total else ""


def _title(entry: Entry) -> str:
    values = [f"{fraction(value, decimals=2)} at {count(ranks, 'rank')}" for ranks, value in entry.curve]
    return one_line(f"Efficiency, {entry.series}: {', '.join(values)}") if values else ""


def _points(entry: Entry) -> list[tuple[float, float]]:
    """Return the points of the curve: the ranks on a logarithmic axis, the efficiency upwards from 0."""
    if len(entry.curve) < 2:
        return []
    first, span = entry.curve[0][0], math.log(entry.curve[-1][0] / entry.curve[0][0])
    return [
        (
            round(_MARGIN + (_WIDTH - 2 * _MARGIN) * math.log(ranks / first) / span, 1),
            round(_HEIGHT - _MARGIN - (_HEIGHT - 2 * _MARGIN) * min(max(value, 0), _TOP) / _TOP, 1),
        )
        for ranks, value in entry.curve
    ]
