"""Load a study's folder as DataFrames: all planned cells and runs, with the results so far.

Loading starts from the plan, and no run is ever dropped. The states of the runs, with reasons and causes, are
those of the ledger. A run that never started is a row with the state ``planned``. If a table in a run's
folder is missing or broken, loading continues, and the column ``reason`` of the run's row says so.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.data.csv_files import read_csvs, rows_of
from analysis.text import clean, one_line
from bench.matrix.cell import Cell, Run
from bench.study.findings import Disturbance
from bench.study.layout import StudyFolder
from bench.study.ledger import End, Record, RunState
from bench.study.plan_json import PlannedStudy, open_study, planned_cells
from bench.study.readings import Readings, readings_of
from ddp_scaling_bench.checksums import find_damage
from ddp_scaling_bench.files import read_json
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.records import EpochRow, RankRow, TableRow, columns_of
from ddp_scaling_bench.run_folder import RunFolder
from ddp_scaling_bench.units import count, listed


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
    disturbed: tuple[Disturbance, ...] | None = None
    hosts: str | None = None
    evidence: tuple[str, ...] = ()
    cause: str | None = None


RUNS_COLUMNS = tuple(one.name for one in fields(RunRow))
_values_of = attrgetter(*RUNS_COLUMNS)
_TEXTS = ("failure_class", "job_id", "allocation", "cause")
_TIMES = ("started_at", "ended_at")


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
    """A table measured elsewhere: name and text of its file, its number of rows, ``--mode`` and ``--map``."""

    name: str
    text: str
    rows: int
    mode: str | None
    names: Mapping[str, str] = field(default_factory=dict)


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
        epochs: the rows of all runs' metrics.csv, and those of commands without the recorder, with
            ``run_id`` and ``cell_id`` (categorical).
        remarks: problems of the folder as a whole.
        attempts: the folder of each run's latest attempt, in the order of ``runs``; None if the run has no
            attempt.
        measured: the same, but None also if the measured values of a completed run were changed or lost.
        table: the table that the study was read from; None if it was planned.
        records: the record of each run by run_id.
        facts: facts about the values of commands without the recorder, by run_id.
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
    records: Mapping[str, Record] = field(default_factory=dict, repr=False)
    facts: Mapping[str, Sequence[Finding]] = field(default_factory=dict, repr=False)
    _envs: dict[str, dict[str, Any] | None] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """The study's name, as given in the plan."""
        return one_line(self.plan.get("study") or self.folder.name)

    @cached_property
    def planned(self) -> list[Cell]:
        """The cells of the plan; none for a table that was measured elsewhere."""
        return planned_cells(self.plan)

    def ranks_of(self, run_ids: Iterable[str]) -> list[RankOfRun]:
        """Return the rows of some runs' ranks.csv that name an epoch and a rank."""
        rows = self._table_of(run_ids, "ranks_csv", RankRow)
        rows = rows[np.isfinite(rows["epoch"]) & np.isfinite(rows["rank"])]
        return rows_of(rows.astype({"rank": "int64"}).assign(host=rows["host"].map(clean)), RankOfRun)

    def envs_of(self, run_ids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return each run's env.json, with the run's ``facts``; runs without a readable file are absent."""
        found = {}
        for place in self._places(run_ids):
            attempt, run_id = self.attempts[place], str(self.runs["run_id"].iloc[place])
            if run_id not in self._envs:
                content = self._envs[run_id] = read_json(RunFolder(Path(attempt)).env) if attempt else None
                if content is not None and (more := self.facts.get(run_id)):
                    content["facts"] = [*(content.get("facts") or ()), *(fact.as_json() for fact in more)]
            if (content := self._envs[run_id]) is not None:
                found[run_id] = content
        return found

    def _places(self, run_ids: Iterable[str]) -> list[int]:
        wanted = set(run_ids)
        return [place for place, run_id in enumerate(self.runs["run_id"]) if run_id in wanted]

    def _table_of(self, run_ids: Iterable[str], name: str, record: type[TableRow]) -> pd.DataFrame:
        file = getattr(RunFolder(Path()), name).name
        places = [place for place in self._places(run_ids) if self.measured[place]]
        paths = [f"{self.measured[place]}/{file}" for place in places]
        ids = list(zip(self.runs["run_id"], self.runs["cell_id"], strict=True))
        return _with_ids(read_csvs(paths, record).rows, ids, places)


def load_study(path: Path, *, records: Mapping[str, Record] | None = None) -> Study:
    """Return the study in the folder ``path``.

    ``records`` are the present records of the runs, by default those of the ledger. They can contain states
    that are never written, such as ``running``, and ends that could not be saved.

    Raises:
        BenchError: there is no plan.json, or this version cannot read it.
    """
    planned = open_study(StudyFolder(Path(path)))
    records = records or planned.records()
    known = [records.get(run.run_id) or Record(run_id=run.run_id) for run in planned.runs]
    rows = [_run_row(planned, run, record) for run, record in zip(planned.runs, known, strict=True)]
    attempts = [_folder_of(planned, row, record) for row, record in zip(rows, known, strict=True)]
    damaged = _damaged(planned, rows, attempts)
    measured = [None if place in damaged else path for place, path in enumerate(attempts)]
    epochs, problems, facts = _epochs(planned, rows, measured)
    for place, problem in (problems | damaged).items():
        rows[place].reason = "; ".join(filter(None, (rows[place].reason, problem)))
    return Study(
        planned.folder,
        planned.plan,
        _cells(planned.plan),
        _members(planned.plan),
        _runs_frame(rows),
        epochs,
        remarks=_remarks(planned),
        earlier=_runs_frame(_earlier(planned, known)),
        attempts=attempts,
        measured=measured,
        records={row.run_id: record for row, record in zip(rows, known, strict=True)},
        facts=facts,
    )


def tokens_per_sample(metrics: Mapping[str, Any]) -> float:
    """Return the tokens of a sample if the matrix gives the throughput in tokens/s, else NaN."""
    counts_tokens = (metrics.get("units") or {}).get("throughput") == "tokens/s"
    return float(metrics.get("tokens_per_sample") or math.nan) if counts_tokens else math.nan


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
            int(cell.get("model_parallel") or 1),
            tokens_per_sample(cell.get("metrics") or {}),
        )
        for cell in plan["cells"]
    ]
    columns = ("cell_id", "launcher", "backend", "nodes", "gpus_per_node", "gpus")
    batches = ("global_batch", "per_gpu_batch", "device", "swept", "model_parallel", "tokens_per_sample")
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


def _run_row(planned: PlannedStudy, run: Run, record: Record) -> RunRow:
    """Return the row of an attempt of a run."""
    end = record.end or End(state=record.state)
    # Without a queue, `bench submit` starts the runs, and there is no allocation.
    has_job = planned.scheduler.queues and (end.hosts or not record.end) and record.job_id
    return RunRow(
        clean(run.run_id),
        clean(run.cell_id),
        run.repeat,
        run.order,
        record.attempt or None,
        str(record.state),
        _reason(record, end),
        end.failure_class,
        end.exit_code,
        one_line(record.job_id) or None,
        "pack" if record.pack is not None else "job" if has_job else None,
        end.started_at,
        end.ended_at,
        end.disturbed,
        one_line(end.hosts, limit=80),
        _evidence(end),
        one_line(record.cause, limit=80) if record.cause else None,
    )


def _folder_of(planned: PlannedStudy, row: RunRow, record: Record) -> str | None:
    """Return the folder of an attempt, if it exists."""
    if not record.attempt:
        return None
    folder = planned.run_folder(record).path
    if folder.is_dir():
        return str(folder)
    if record.state.ended:
        missing = f"the folder of attempt {record.attempt} is missing"
        row.reason = "; ".join(filter(None, (row.reason, missing)))
    return None


def _earlier(planned: PlannedStudy, known: Sequence[Record]) -> list[RunRow]:
    """Return the rows of the attempts before the latest one of each run; withdrawn attempts never started."""
    attempts = planned.ledger.attempts()
    return [
        _run_row(planned, run, record)
        for run, latest in zip(planned.runs, known, strict=True)
        for number, record in sorted(attempts.get(run.run_id, {}).items())
        if number < latest.attempt and record.state is not RunState.PLANNED
    ]


def _remarks(planned: PlannedStudy) -> list[str]:
    try:
        names = {entry.name for entry in os.scandir(planned.folder.runs) if not entry.name.startswith(".")}
    except OSError:
        return []
    unplanned = sorted(names - {run.run_id for run in planned.runs})
    shown = listed([one_line(name, limit=80) for name in unplanned], limit=4)
    text = f"Not in the plan and ignored: {count(len(unplanned), 'folder')} in runs/ ({shown})"
    return [text] if unplanned else []


def _reason(record: Record, end: End) -> str:
    parts = [record.reason]
    if end.cause:
        parts.append(f"cause: {end.cause.cause} ({end.cause.remedy})")
    if line := end.log_line:
        parts.append(f"{line.get('path')}:{line.get('line')}: {line.get('text')}")
    return "; ".join(one_line(part, limit=1000) for part in parts if part)


def _evidence(end: End) -> tuple[str, ...]:
    """Return the lines with which `bench doctor` explains a failure or a slow run."""
    texts = []
    for cause in filter(None, (end.cause, *(end.warnings or ()))):
        if cause.evidence:
            heading = f"{cause.cause} ({cause.place})" if cause.place else cause.cause
            texts.append(one_line(f"{heading}: {cause.evidence}", limit=300))
    return tuple(texts)


def _runs_frame(rows: list[RunRow]) -> pd.DataFrame:
    frame = pd.DataFrame(list(map(_values_of, rows)), columns=list(RUNS_COLUMNS))
    kinds = {"repeat": "int64", "order": "int64", "attempt": "Int64", "exit_code": "Int64"}
    frame = frame.astype(dict.fromkeys(("run_id", "cell_id", "state", "reason", *_TEXTS), "str") | kinds)
    for name in _TIMES:
        frame[name] = pd.to_datetime(frame[name], utc=True, errors="coerce", format="ISO8601")
    return frame


def _epochs(
    planned: PlannedStudy, runs: Sequence[RunRow], attempts: Sequence[str | None]
) -> tuple[pd.DataFrame, dict[int, str], dict[str, Sequence[Finding]]]:
    """Return the rows of all runs' metrics.csv or readings, problems by the run's position, and facts."""
    cells = [planned.cells[run.cell_id] for run in planned.runs]
    places = [place for place, path in enumerate(attempts) if path and not cells[place].reads_values]
    file = RunFolder(Path()).metrics_csv.name
    paths = [f"{attempts[place]}/{file}" for place in places]
    loaded = read_csvs(paths, EpochRow)
    loaded.rows["file"] = np.asarray(places, dtype=np.int64)[loaded.rows["file"].to_numpy()]
    problems = {}
    for index, problem in loaded.problems.items():
        place = places[index]
        absent, completed = not Path(paths[index]).exists(), runs[place].state == RunState.COMPLETED
        if absent and completed and not cells[place].measures:
            problems[place] = "the matrix asks for no metrics (metrics: none)"
        # If a run is queued or failed early, its state explains the missing file.
        elif completed or not absent:
            problems[place] = problem
    readings: dict[int, Readings] = {
        place: readings_of(RunFolder(Path(path)), cell)
        for place, (run, path, cell) in enumerate(zip(runs, attempts, cells, strict=True))
        if path and run.state == RunState.COMPLETED and cell.reads_values
    }
    problems |= {place: one.problem for place, one in readings.items() if one.problem}
    rows = [(place, *astuple(row)) for place, one in readings.items() for row in one.rows]
    frame = loaded.rows
    if rows:
        read = pd.DataFrame(rows, columns=["file", *columns_of(EpochRow)]).astype(frame.dtypes)
        frame = pd.concat([frame, read]).sort_values("file", kind="stable", ignore_index=True)
    facts: dict[str, Sequence[Finding]] = {
        runs[place].run_id: one.findings for place, one in readings.items()
    }
    ids = [(run.run_id, run.cell_id) for run in runs]
    return _with_ids(frame, ids, range(len(runs))), problems, facts


def _damaged(planned: PlannedStudy, rows: Sequence[RunRow], attempts: Sequence[str | None]) -> dict[int, str]:
    """Return the completed runs whose measured values are not as the job wrote them, by position, and why."""
    recorded = {cell_id: not cell.is_unrecorded for cell_id, cell in planned.cells.items()}
    return {
        place: damage
        for place, (run, row, attempt) in enumerate(zip(planned.runs, rows, attempts, strict=True))
        if attempt and row.state == RunState.COMPLETED and recorded[run.cell_id]
        if (damage := find_damage(attempt))
    }


def _with_ids(frame: pd.DataFrame, ids: Sequence[tuple[str, str]], places: Sequence[int]) -> pd.DataFrame:
    """Return rows with ``run_id`` and ``cell_id`` instead of the column ``file``."""
    rows = np.asarray(places, dtype=np.int64)[frame.pop("file").to_numpy()]
    for at, name in enumerate(("run_id", "cell_id")):
        frame.insert(at, name, pd.Categorical([one[at] for one in ids])[rows])
    return frame
