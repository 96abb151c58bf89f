"""State of each planned run, from the run.json of its latest attempt."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis.text import clean, count, listed, one_line
from bench.study.layout import StudyFolder
from bench.study.ledger import RunState
from bench.study.run_json import read_run

#: Columns of the frame of runs, one row per planned run, about its latest attempt. ``allocation``
#: is ``job`` (the run had a job of its own) or ``pack`` (it shared one, ``job_id``, with others).
RUNS_COLUMNS = (
    "run_id",
    "cell_id",
    "repeat",
    "order",
    "attempt",
    "state",
    "reason",
    "failure_class",
    "exit_code",
    "job_id",
    "allocation",
    "submitted_at",
    "started_at",
    "ended_at",
)
_TEXTS = ("failure_class", "job_id", "allocation")
_TIMES = ("submitted_at", "started_at", "ended_at")
_STATES = frozenset(str(state) for state in RunState)
_ATTEMPT = re.compile(r"attempt-([0-9]{1,9})", re.ASCII).fullmatch


def read_runs(
    folder: StudyFolder, planned: list[tuple[str, str, int, int]]
) -> tuple[pd.DataFrame, list[str | None], list[str]]:
    """Return one row per planned run, the path of its latest attempt's folder, and remarks."""
    present = _names(str(folder.runs))
    records, attempts = [], []
    for run_id, cell_id, repeat, order in planned:
        number, path = _latest_attempt(f"{folder.runs}/{run_id}") if run_id in present else (None, None)
        record = _record(run_id, path, tried=run_id in present)
        records.append((clean(run_id), cell_id, repeat, order, number, *record))
        attempts.append(path)
    strangers = sorted(present - {run[0] for run in planned})
    remarks = []
    if strangers:
        names = listed([one_line(name, limit=80) for name in strangers], limit=4)
        remarks.append(f"{count(len(strangers), 'folder')} in runs/ not in the plan, left out: {names}")
    return _runs_frame(records), attempts, remarks


def _names(path: str) -> set[str]:
    try:
        return {entry.name for entry in os.scandir(path) if not entry.name.startswith(".")}
    except OSError:
        return set()


def _latest_attempt(path: str) -> tuple[int, str] | tuple[None, None]:
    try:
        entries = [(match, entry.path) for entry in os.scandir(path) if (match := _ATTEMPT(entry.name))]
    except OSError:
        return None, None
    if not entries:
        return None, None
    return max((int(match.group(1)), attempt) for match, attempt in entries)


def _record(run_id: str, path: str | None, *, tried: bool) -> tuple[Any, ...]:
    """Return state, reason and the rest of one run's row from its run.json."""
    if path is None and not tried:
        return _no_record(RunState.PLANNED)
    if path is None:
        return _no_record(RunState.UNKNOWN, "its folder holds no attempt")
    content, problem = read_run(path)
    if content is None:
        return _no_record(RunState.UNKNOWN, f"run.json {problem}")
    if content.get("run_id") != run_id:
        other = one_line(content.get("run_id"), limit=80)
        return _no_record(RunState.UNKNOWN, f"run.json is that of another run: {other!r}")
    state, reason = content.get("state"), _told(content)
    if not isinstance(state, str) or state not in _STATES:
        odd = f"run.json gives the state {one_line(state, limit=40)!r}, which is none of bench's"
        state, reason = str(RunState.UNKNOWN), f"{odd}; {reason}" if reason else odd
    failure_class, job_id = (
        one_line(v) if (v := content.get(k)) is not None else None for k in ("failure_class", "job_id")
    )
    how = content.get("allocation")
    kind = how.get("kind") if isinstance(how, Mapping) else None
    kind = kind if kind in ("job", "pack") else None
    exit_code = content.get("exit_code")
    exit_code = exit_code if isinstance(exit_code, int) and abs(exit_code) < 2**31 else None
    times = (t if isinstance(t := content.get(k), str) else None for k in _TIMES)
    return (state, reason, failure_class, exit_code, job_id, kind, *times)


def _told(content: Mapping[str, Any]) -> str:
    """Return why a run ended as it did, and the cause that its log shows, where one is known."""
    parts = [content.get("reason")]
    cause = content.get("cause")
    if isinstance(cause, Mapping):
        parts.append(f"cause: {cause.get('cause')} ({cause.get('remedy')})")
    return "; ".join(one_line(part, limit=1000) for part in parts if part)


def _no_record(state: RunState, reason: str = "") -> tuple[Any, ...]:
    return (str(state), reason, *(None for _ in RUNS_COLUMNS[7:]))


def _runs_frame(records: list[tuple[Any, ...]]) -> pd.DataFrame:
    frame = pd.DataFrame(records, columns=list(RUNS_COLUMNS))
    for name in ("run_id", "cell_id", "state", "reason", *_TEXTS):
        frame[name] = frame[name].astype("str")
    for name in ("repeat", "order"):
        frame[name] = frame[name].astype("int64")
    for name in ("attempt", "exit_code"):
        frame[name] = frame[name].astype("Int64")
    for name in _TIMES:
        frame[name] = pd.to_datetime(frame[name], utc=True, errors="coerce", format="ISO8601")
    return frame


_STATE_WORDS = {
    str(RunState.PLANNED): "not started",
    str(RunState.COMPLETED): "completed without a throughput",
    str(RunState.UNKNOWN): "of unknown state",
}


def row_state(state: object) -> str:
    """Return the state of a cell or a run without a value, in words."""
    return _STATE_WORDS.get(str(state), str(state))


def states(runs: pd.DataFrame) -> str:
    """Return ``4 failed (time-limit 3), 2 not started``, the most frequent state first."""
    words = []
    for state, group in sorted(runs.groupby("state", sort=False), key=lambda item: -len(item[1])):
        name = row_state(state)
        classes = group["failure_class"].dropna()
        detail = ", ".join(f"{c} {n}" for c, n in classes[classes != ""].value_counts().head(4).items())
        words.append(f"{len(group):,} {name}" + (f" ({detail})" if detail else ""))
    return ", ".join(words)
