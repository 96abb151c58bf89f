"""Load a study's folder as DataFrames: all planned cells and runs, with the results so far.

Loading starts from the plan, and no run is ever dropped. A run that never started is a row with the state
``planned``. If a file in a run's folder is missing or broken, loading continues, and the column ``reason`` of
the run's row says so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.data.csv_files import Loaded, read_csvs, rows_of
from analysis.text import clean, one_line
from bench.facts import Fact
from bench.study.checksums import find_damage, is_recorded
from bench.study.conditions import read_disturbances
from bench.study.files import read_json
from bench.study.layout import RunFolder, StudyFolder
from bench.study.ledger import Ledger, RunRecord, RunState
from bench.study.plan_json import read_plan
from bench.study.records import EpochRow, RankRow, Record
from bench.study.run_json import read_run
from bench.units import count, listed


@dataclass(slots=True)
class RunRow:
    """A row of :attr:`Study.runs`: one planned run, and its latest attempt.

    Attributes:
        allocation: ``job`` (the run had its own job), or ``pack`` (it shared its job with other runs).
        disturbed: a tuple of facts; None if disturbances were not recorded.
        hosts: the nodes as Slurm lists them (``n[1-4]``); empty if unknown.
        evidence: the log lines that `bench doctor` found, each with its cause.
        cause: the first cause that `bench doctor` found in the logs of a failed run.
    """

    run_id: str
    cell_id: str
    repeat: int
    order: int
    attempt: int | None = None
    state: str = str(RunState.PLANNED)
    reason: str = ""
    failure_class: str | None = None
    exit_code: int | None = None
    job_id: str | None = None
    allocation: str | None = None
    started_at: str | None = None
    ended_at: str | None = None
    disturbed: tuple[Fact, ...] | None = None
    hosts: str | None = None
    evidence: tuple[str, ...] = ()
    cause: str | None = None

    def end_as_in(self, record: RunRecord, reason: str) -> None:
        """Take the end of the run from the ledger, with a further reason."""
        self.state, self.reason = str(record.state), "; ".join(filter(None, (record.reason, reason)))
        self.failure_class, self.exit_code, self.cause = record.failure_class, record.exit_code, record.cause


RUNS_COLUMNS = tuple(one.name for one in fields(RunRow))
_values_of = attrgetter(*RUNS_COLUMNS)
_TEXTS = ("failure_class", "job_id", "allocation", "cause")
_TIMES = ("started_at", "ended_at")
_STATES = frozenset(str(state) for state in RunState)
_ATTEMPT = re.compile(r"attempt-([0-9]{1,9})", re.ASCII).fullmatch


@dataclass(frozen=True, slots=True)
class RankOfRun(RankRow):
    """A row of ranks.csv with its run."""

    rank: int = 0
    run_id: str = ""
    cell_id: str = ""

    @property
    def useful_s(self) -> float:
        """Useful time (s per step): the step without exposed communication."""
        return self.step_time_sec - self.comm_exposed_time_sec


@dataclass(frozen=True)
class TableSource:
    """A table measured elsewhere: the name and text of its file, its number of rows, and ``--mode``."""

    name: str
    text: str
    rows: int
    mode: str | None


@dataclass
class Study:
    """One study as DataFrames.

    Attributes:
        cells: one row per cell: ``cell_id, launcher, backend, nodes, gpus_per_node`` (text,
            ``4+2`` if nodes differ), ``gpus`` (ranks), ``global_batch, per_gpu_batch, device,
            swept`` (dict).
        members: one row per cell and series: ``cell_id, series, mode, batch``; ``mode`` and ``batch`` are
            the plan's labels of the series.
        runs: one row per planned run: :class:`RunRow`; times are UTC.
        earlier: one row per attempt before the latest one of its run, with the columns of ``runs``, in the
            order of ``runs``.
        epochs: the rows of all runs' metrics.csv, with ``run_id`` and ``cell_id`` (categorical).
        remarks: problems of the folder as a whole.
        attempts: the folder of each run's latest attempt, in the order of ``runs``; None if the run has no
            attempt.
        measured: the same, but None also if the measured values of a completed run were changed or lost.
        table: the table that the study was read from; None if it was planned.
    """

    folder: StudyFolder
    plan: dict[str, Any]
    cells: pd.DataFrame
    members: pd.DataFrame
    runs: pd.DataFrame
    epochs: pd.DataFrame
    remarks: list[str] = field(default_factory=list)
    earlier: pd.DataFrame = field(default_factory=lambda: _runs_frame([]))
    attempts: list[str | None] = field(default_factory=list, repr=False)
    measured: list[str | None] = field(default_factory=list, repr=False)
    table: TableSource | None = None

    @property
    def name(self) -> str:
        """The study's name, as given in the plan."""
        return one_line(self.plan.get("study") or self.folder.name)

    def ranks_of(self, run_ids: Iterable[str]) -> list[RankOfRun]:
        """Return the rows of some runs' ranks.csv that name an epoch and a rank."""
        rows = self._table_of(run_ids, "ranks_csv", RankRow)
        rows = rows[np.isfinite(rows["epoch"]) & np.isfinite(rows["rank"])]
        return rows_of(rows.astype({"rank": "int64"}).assign(host=rows["host"].map(clean)), RankOfRun)

    def envs_of(self, run_ids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return the content of each run's env.json by run_id; runs without a readable file are absent."""
        found = {}
        for place in self._places(run_ids):
            attempt = self.attempts[place]
            content = read_json(RunFolder(Path(attempt)).env) if attempt else None
            if content is not None:
                found[str(self.runs["run_id"].iloc[place])] = content
        return found

    def _places(self, run_ids: Iterable[str]) -> list[int]:
        wanted = set(run_ids)
        return [place for place, run_id in enumerate(self.runs["run_id"]) if run_id in wanted]

    def _table_of(self, run_ids: Iterable[str], name: str, record: type[Record]) -> pd.DataFrame:
        file = getattr(RunFolder(Path()), name).name
        places = [place for place in self._places(run_ids) if self.measured[place]]
        paths = [f"{self.measured[place]}/{file}" for place in places]
        ids = list(zip(self.runs["run_id"], self.runs["cell_id"], strict=True))
        return _with_ids(read_csvs(paths, record), ids, places)


def load_study(path: Path, *, records: Mapping[str, RunRecord] | None = None) -> Study:
    """Return the study in the folder ``path``.

    ``records`` are the present records of runs. Of a read-only study, they can contain ends of runs that
    could not be saved in run.json.

    Raises:
        BenchError: there is no plan.json, or this version cannot read it.
    """
    folder = StudyFolder(Path(path))
    plan = read_plan(folder)
    cells, members = _cells(plan), _members(plan)
    planned = [(run["run_id"], clean(run["cell_id"]), run["repeat"], run["order"]) for run in plan["runs"]]
    of_plan = {clean(cell["cell_id"]): cell for cell in plan["cells"]}
    known = records or Ledger(folder.ledger).records(run_id for run_id, *_ in planned)
    rows, earlier, attempts, remarks = _read_runs(folder, planned, known)
    damaged = _damaged(rows, attempts, of_plan)
    measured = [None if place in damaged else path for place, path in enumerate(attempts)]
    without = {cell for cell, own in metrics_of_cells(plan).items() if own.get("source") == "none"}
    epochs, problems = _epochs(rows, measured, without_metrics=without)
    problems |= damaged
    for place, problem in problems.items():
        rows[place].reason = "; ".join(filter(None, (rows[place].reason, problem)))
    about = (remarks, _runs_frame(earlier), attempts, measured)
    return Study(folder, plan, cells, members, _runs_frame(rows), epochs, *about)


def metrics_of_cells(plan: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return ``workload.metrics`` of each cell by cell_id; empty for the built-in training."""
    return {
        clean(cell["cell_id"]): (cell.get("workload") or {}).get("metrics") or {}
        for cell in plan.get("cells") or []
    }


def is_average(metrics: Mapping[str, Any]) -> bool:
    """Return whether a command reports one average of the whole run."""
    return metrics.get("kind") == "average"


def reads_values(metrics: Mapping[str, Any]) -> bool:
    """Return whether values are read from the output or a file of a command, without the recorder."""
    return any(name in metrics for name in ("output", "csv"))


def _cells(plan: dict[str, Any]) -> pd.DataFrame:
    rows = [
        (
            clean(cell["cell_id"]),
            clean(cell["launcher"]),
            clean(cell["backend"]),
            int(cell["nodes"]),
            _per_node(cell["tasks_per_node"]),
            int(cell["world_size"]),
            int(cell["global_batch"]),
            int(cell["per_gpu_batch"]),
            clean((cell.get("workload") or {}).get("device")),
            cell.get("swept") or {},
        )
        for cell in plan["cells"]
    ]
    columns = ("cell_id", "launcher", "backend", "nodes", "gpus_per_node", "gpus")
    batches = ("global_batch", "per_gpu_batch", "device", "swept")
    frame = pd.DataFrame(rows, columns=[*columns, *batches])
    whole = ("nodes", "gpus", "global_batch", "per_gpu_batch")
    return frame.astype(dict.fromkeys(whole, "int64"))


def _members(plan: dict[str, Any]) -> pd.DataFrame:
    rows = [
        (clean(cell["cell_id"]), clean(member["series"]), clean(member["mode"]), int(member["batch"]))
        for cell in plan["cells"]
        for member in cell["series"]
    ]
    return pd.DataFrame(rows, columns=["cell_id", "series", "mode", "batch"]).astype({"batch": "int64"})


def _per_node(value: Any) -> str:
    return "+".join(str(int(v)) for v in value) if isinstance(value, list) else str(int(value))


def _read_runs(
    folder: StudyFolder,
    planned: list[tuple[str, str, int, int]],
    known: Mapping[str, RunRecord],
) -> tuple[list[RunRow], list[RunRow], list[str | None], list[str]]:
    """Return runs, earlier attempts, the folders of latest attempts, and remarks."""
    present = _visible_names(str(folder.runs))
    rows: list[RunRow] = []
    earlier: list[RunRow] = []
    attempts: list[str | None] = []
    for run_id, cell_id, repeat, order in planned:
        # Paths are joined as texts: with thousands of runs, pathlib takes a third of the loading time.
        found = _attempts(f"{folder.runs}/{run_id}") if run_id in present else []
        number, path = found[-1] if found else (None, None)
        now = known.get(run_id)
        row = RunRow(clean(run_id), cell_id, repeat, order, number)
        _read_run(row, run_id, path, tried=run_id in present)
        if now and now.state.ended:
            if now.attempt == number and row.state in _STATES and RunState(row.state).active:
                row.end_as_in(now, row.reason if row.state == RunState.UNKNOWN else "")
                row.started_at = row.started_at or now.details.get("started_at")
                row.ended_at = row.ended_at or now.details.get("ended_at")
            elif now.attempt > (number or 0):
                found.append((now.attempt, ""))
                path, row = None, RunRow(row.run_id, cell_id, repeat, order, now.attempt)
                row.end_as_in(now, f"the folder of attempt {now.attempt} is missing")
        rows.append(row)
        attempts.append(path)
        for number, path in found[:-1]:
            row = RunRow(clean(run_id), cell_id, repeat, order, number)
            _read_run(row, run_id, path)
            if row.state != RunState.PLANNED:  # otherwise, the attempt was withdrawn and never started
                earlier.append(row)
    unplanned = sorted(present - {run[0] for run in planned})
    remarks = []
    if unplanned:
        names = listed([one_line(name, limit=80) for name in unplanned], limit=4)
        remarks.append(f"Not in the plan and ignored: {count(len(unplanned), 'folder')} in runs/ ({names})")
    return rows, earlier, attempts, remarks


def _visible_names(path: str) -> set[str]:
    try:
        return {entry.name for entry in os.scandir(path) if not entry.name.startswith(".")}
    except OSError:
        return set()


def _attempts(path: str) -> list[tuple[int, str]]:
    """Return the numbers and folders of a run's attempts, the latest last."""
    try:
        entries = [(match, entry.path) for entry in os.scandir(path) if (match := _ATTEMPT(entry.name))]
    except OSError:
        return []
    return sorted((int(match.group(1)), attempt) for match, attempt in entries)


def _read_run(row: RunRow, run_id: str, path: str | None, *, tried: bool = True) -> None:
    """Read run.json of an attempt into its row; ``tried`` is true if the run has a folder."""
    content, problem = (None, "") if path is None else read_run(path)
    if content is not None and content.get("run_id") == run_id:
        _fill(row, content)
        return
    if content is not None:
        problem = f"run.json is that of another run: {one_line(content.get('run_id'), limit=80)!r}"
    elif path is not None:
        problem = f"run.json {problem}"
    elif tried:
        problem = "the run's folder contains no attempt"
    if problem:
        row.state, row.reason = str(RunState.UNKNOWN), problem


def _fill(row: RunRow, content: Mapping[str, Any]) -> None:
    """Set the columns of a run's row from the content of run.json."""
    state, row.reason = content.get("state"), _reason_and_cause(content)
    cause, allocation, exit_code = (content.get(name) for name in ("cause", "allocation", "exit_code"))
    row.cause = one_line(cause.get("cause"), limit=80) if isinstance(cause, Mapping) else None
    if isinstance(state, str) and state in _STATES:
        row.state = state
    else:
        odd = f"run.json contains the state {one_line(state, limit=40)!r}, which bench does not know"
        row.state, row.reason = str(RunState.UNKNOWN), f"{odd}; {row.reason}" if row.reason else odd
    row.failure_class, row.job_id = (
        one_line(v) if v is not None else None for v in (content.get("failure_class"), content.get("job_id"))
    )
    allocation = allocation if isinstance(allocation, Mapping) else {}
    kind, hosts = allocation.get("kind"), allocation.get("hosts")
    row.allocation = kind if kind in ("job", "pack") else None
    row.hosts = one_line(hosts, limit=80) if isinstance(hosts, str) else ""
    row.exit_code = exit_code if isinstance(exit_code, int) and abs(exit_code) < 2**31 else None
    row.started_at, row.ended_at = (t if isinstance(t := content.get(k), str) else None for k in _TIMES)
    row.disturbed, row.evidence = read_disturbances(content), _evidence(content)


def _reason_and_cause(content: Mapping[str, Any]) -> str:
    parts = [content.get("reason")]
    cause = content.get("cause")
    if isinstance(cause, Mapping):
        parts.append(f"cause: {cause.get('cause')} ({cause.get('remedy')})")
    line = content.get("log_line")
    if isinstance(line, Mapping):
        parts.append(f"{line.get('path')}:{line.get('line')}: {line.get('text')}")
    text = "; ".join(one_line(part, limit=1000) for part in parts if part)
    return text.replace("; see the traceback above", "")  # it is above this line in the log only


def _evidence(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the lines with which `bench doctor` explains a failure or a slow run."""
    warnings = content.get("warnings")
    found = [content.get("cause"), *(warnings if isinstance(warnings, list) else [])]
    texts = []
    for cause in found:
        if isinstance(cause, Mapping) and cause.get("evidence"):
            place = ":".join(str(cause[name]) for name in ("path", "line") if cause.get(name))
            heading = f"{cause.get('cause')} ({place})" if place else str(cause.get("cause"))
            texts.append(one_line(f"{heading}: {cause['evidence']}", limit=300))
    return tuple(texts)


def _runs_frame(rows: list[RunRow]) -> pd.DataFrame:
    frame = pd.DataFrame(list(map(_values_of, rows)), columns=list(RUNS_COLUMNS))
    kinds = {"repeat": "int64", "order": "int64", "attempt": "Int64", "exit_code": "Int64"}
    frame = frame.astype(dict.fromkeys(("run_id", "cell_id", "state", "reason", *_TEXTS), "str") | kinds)
    for name in _TIMES:
        frame[name] = pd.to_datetime(frame[name], utc=True, errors="coerce", format="ISO8601")
    return frame


def _epochs(
    runs: Sequence[RunRow], attempts: Sequence[str | None], *, without_metrics: Collection[str]
) -> tuple[pd.DataFrame, dict[int, str]]:
    """Return the rows of all runs' metrics.csv, and the problems by the position of the run in ``runs``."""
    file = RunFolder(Path()).metrics_csv.name
    places = [place for place, attempt in enumerate(attempts) if attempt]
    paths = [f"{attempts[place]}/{file}" for place in places]
    loaded = read_csvs(paths, EpochRow)
    problems = {}
    for index, problem in loaded.problems.items():
        place = places[index]
        absent, completed = not Path(paths[index]).exists(), runs[place].state == RunState.COMPLETED
        if absent and completed and runs[place].cell_id in without_metrics:
            problems[place] = "the matrix asks for no metrics (metrics: none)"
        # If a run is queued or failed early, its state explains the missing file.
        elif completed or not absent:
            problems[place] = problem
    return _with_ids(loaded, [(run.run_id, run.cell_id) for run in runs], places), problems


def _damaged(
    runs: Sequence[RunRow], attempts: Sequence[str | None], cells: Mapping[str, Any]
) -> dict[int, str]:
    """Return the completed runs whose measured values are not as the job wrote them, by position, and why."""
    recorded = {cell_id: is_recorded(cell["workload"]) for cell_id, cell in cells.items()}
    return {
        place: damage
        for place, (run, attempt) in enumerate(zip(runs, attempts, strict=True))
        if attempt and run.state == RunState.COMPLETED and recorded[run.cell_id]
        if (damage := find_damage(attempt))
    }


def _with_ids(loaded: Loaded, ids: Sequence[tuple[str, str]], places: Sequence[int]) -> pd.DataFrame:
    """Return the loaded rows, with ``run_id`` and ``cell_id`` instead of the column ``file``."""
    frame = loaded.rows
    rows = np.asarray(places, dtype=np.int64)[frame.pop("file").to_numpy()]
    for at, name in enumerate(("run_id", "cell_id")):
        frame.insert(at, name, pd.Categorical([one[at] for one in ids])[rows])
    return frame
