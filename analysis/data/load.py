"""Load a study's folder: all planned cells and runs as records, and the rows of their tables.

Loading starts from the plan, and no run is ever dropped. The states of the runs, with reasons and causes, are
those of the ledger. A run that never started is a row with the state ``planned``. If a table in a run's
folder is missing or broken, loading continues, and the run's ``reason`` says so.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from datetime import UTC, datetime
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.data.columns import CellRow, Member, RunRow
from analysis.data.csv_files import read_csvs, rows_of
from analysis.data.settings import settings_of
from analysis.processes import share
from analysis.text import clean, one_line
from bench.matrix.cell import Cell, Run
from bench.study.layout import StudyFolder
from bench.study.ledger import End, Record, RunState
from bench.study.plan_json import PlannedStudy, open_study, planned_cells
from bench.study.readings import readings_of
from ddp_scaling_bench.checksums import find_damage
from ddp_scaling_bench.files import read_json
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.known_strategies import STRATEGIES
from ddp_scaling_bench.records import EpochRow, RankRow, TableRow, columns_of
from ddp_scaling_bench.run_folder import RunFolder
from ddp_scaling_bench.units import count, listed

#: Of more completed runs, a second process checks the files, in portions.
_MANY, _PORTIONS = 200, 32
_ALONE = {name for name, strategy in STRATEGIES.items() if strategy.one_rank}


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
    """A table measured elsewhere: name and text of its file, its number of rows, ``--mode`` and ``--map``.

    ``settings`` are the sizes, batches and values that distinguish series of each cell, by cell_id.
    """

    name: str
    text: str
    rows: int
    mode: str | None
    names: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass
class Study:
    """One study as records.

    Attributes:
        cells: the planned cells, by cell_id.
        members: one for each cell and series, with the plan's label of the mode.
        runs: the latest attempt of each planned run, in the plan's order.
        earlier: the attempts before the latest one of their run, in the order of ``runs``.
        epochs: the rows of all runs' metrics.csv, and those of commands without the recorder, with
            ``run_id`` and ``cell_id`` (categorical).
        remarks: problems of the folder as a whole.
        table: the table that the study was read from; None if it was planned.
        records: the record of each run by run_id.
        facts: facts about the values of commands without the recorder, by run_id.
    """

    folder: StudyFolder
    plan: dict[str, Any]
    cells: dict[str, CellRow]
    members: list[Member]
    runs: list[RunRow]
    epochs: pd.DataFrame
    remarks: list[str] = field(default_factory=list)
    earlier: list[RunRow] = field(default_factory=list)
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

    @cached_property
    def settings(self) -> Mapping[str, Mapping[str, str]]:
        """The settings of each cell by its id: those of the plan, or those in the columns of a table."""
        if self.table:
            return self.table.settings
        return {clean(cell.cell_id): settings_of(cell) for cell in self.planned}

    def ranks_of(self, run_ids: Iterable[str]) -> list[RankOfRun]:
        """Return the rows of some runs' ranks.csv that name an epoch and a rank."""
        rows = self._table_of(run_ids, "ranks_csv", RankRow)
        rows = rows[np.isfinite(rows["epoch"]) & np.isfinite(rows["rank"])]
        return rows_of(rows.astype({"rank": "int64"}).assign(host=rows["host"].map(clean)), RankOfRun)

    def envs_of(self, run_ids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return each run's env.json, with the run's ``facts``; runs without a readable file are absent."""
        found = {}
        for run in self._of(run_ids):
            if run.run_id not in self._envs:
                content = read_json(RunFolder(Path(run.folder)).env) if run.folder else None
                self._envs[run.run_id] = content
                if content is not None and (more := self.facts.get(run.run_id)):
                    content["facts"] = [*(content.get("facts") or ()), *(fact.as_json() for fact in more)]
            if (content := self._envs[run.run_id]) is not None:
                found[run.run_id] = content
        return found

    def _of(self, run_ids: Iterable[str]) -> list[RunRow]:
        wanted = set(run_ids)
        return [run for run in self.runs if run.run_id in wanted]

    def _table_of(self, run_ids: Iterable[str], name: str, record: type[TableRow]) -> pd.DataFrame:
        file = getattr(RunFolder(Path()), name).name
        runs = [run for run in self._of(run_ids) if run.values_folder]
        rows = read_csvs([f"{run.values_folder}/{file}" for run in runs], record).rows
        return _with_ids(rows, runs, rows.pop("file").to_numpy())


def load_study(path: Path, *, records: Mapping[str, Record] | None = None) -> Study:
    """Return the study in the folder ``path``.

    ``records`` are the present records of the runs, by default those of the ledger. They can contain states
    that are never written, such as ``running``, and ends that could not be saved.

    Raises:
        BenchError: there is no plan.json, or this version cannot read it.
    """
    planned = open_study(StudyFolder(Path(path)))
    attempts = planned.ledger.attempts()
    records = records or planned.records(attempts)
    known = [records.get(run.run_id) or Record(run_id=run.run_id) for run in planned.runs]
    runs = [_run_row(planned, run, record) for run, record in zip(planned.runs, known, strict=True)]
    for run, record in zip(runs, known, strict=True):
        _find_folder(planned, run, record)
    is_recorded = [not planned.cells[run.cell_id].is_unrecorded for run in planned.runs]
    recorded = [run for run, is_own in zip(runs, is_recorded, strict=True) if is_own]
    epochs, facts = _epochs(planned, runs, finish_checks=_start_checks(recorded))
    return Study(
        planned.folder,
        planned.plan,
        {cell.cell_id: cell for cell in _cells(planned)},
        _members(planned.plan),
        runs,
        epochs,
        remarks=_remarks(planned),
        earlier=_earlier(planned, known, attempts),
        records={run.run_id: record for run, record in zip(runs, known, strict=True)},
        facts=facts,
    )


def tokens_per_sample(metrics: Mapping[str, Any]) -> float:
    """Return the tokens of a sample if the matrix gives the throughput in tokens/s, else NaN."""
    counts_tokens = (metrics.get("units") or {}).get("throughput") == "tokens/s"
    return float(metrics.get("tokens_per_sample") or math.nan) if counts_tokens else math.nan


def _cells(planned: PlannedStudy) -> Iterator[CellRow]:
    ddp = {clean(cell.cell_id): _with_ddp(cell) for cell in planned.cells.values()}
    for cell in planned.plan["cells"]:
        cell_id = clean(cell["cell_id"])
        yield CellRow(
            cell_id=cell_id,
            launcher=clean(cell["launcher"]),
            backend=clean(cell["backend"]),
            nodes=int(cell["nodes"]),
            gpus_per_node=_per_node(cell["tasks_per_node"]),
            gpus=int(cell["world_size"]),
            global_batch=int(cell["global_batch"]),
            per_gpu_batch=int(cell["per_gpu_batch"]),
            model_parallel=int(cell.get("model_parallel") or 1),
            tokens_per_sample=tokens_per_sample(cell.get("metrics") or {}),
            device=clean((cell.get("workload") or {}).get("device")),
            ddp=ddp[cell_id],
            swept=cell.get("swept") or {},
        )


def _with_ddp(cell: Cell) -> bool:
    """Return whether the ranks of a cell exchange gradients, even if there is one rank only."""
    return cell.world_size > 1 or cell.workload.get("strategy") not in _ALONE


def _members(plan: dict[str, Any]) -> list[Member]:
    return [
        Member(clean(cell["cell_id"]), clean(member["series"]), clean(member["mode"]))
        for cell in plan["cells"]
        for member in cell["series"]
    ]


def _per_node(value: Any) -> str:
    return "+".join(str(int(v)) for v in value) if isinstance(value, list) else str(int(value))


def _run_row(planned: PlannedStudy, run: Run, record: Record) -> RunRow:
    """Return the row of an attempt of a run."""
    end = record.end or End(state=record.state)
    # Without a queue, `bench submit` starts the runs, and there is no allocation.
    has_job = planned.scheduler.queues and (end.hosts or not record.end) and record.job_id
    return RunRow(
        run_id=clean(run.run_id),
        cell_id=clean(run.cell_id),
        repeat=run.repeat,
        order=run.order,
        attempt=record.attempt or None,
        state=str(record.state),
        reason=one_line(record.why, limit=1000),
        failure_class=end.failure_class,
        exit_code=end.exit_code,
        job_id=one_line(record.job_id) or None,
        allocation="pack" if record.pack is not None else "job" if has_job else None,
        started_at=_time(end.started_at),
        ended_at=_time(end.ended_at),
        disturbed=end.disturbed,
        hosts=one_line(end.hosts, limit=80),
        evidence=_evidence(end),
        cause=one_line(record.cause, limit=80) if record.cause else None,
    )


def _time(text: str | None) -> datetime | None:
    """Return a time in UTC; None if it is not known."""
    try:
        time = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)


def _find_folder(planned: PlannedStudy, run: RunRow, record: Record) -> None:
    """Set the folders of an attempt, or say in its reason that they are missing."""
    if not record.attempt:
        return
    folder = planned.folder.attempt_path(record.run_id, record.attempt)
    if os.path.isdir(folder):  # noqa: PTH112 (for each run)
        run.folder = run.values_folder = folder
    elif record.state.ended and "the folder of attempt" not in run.reason:
        _add_reason(run, f"the folder of attempt {record.attempt} is missing")


def _start_checks(runs: Iterable[RunRow]) -> Callable[[], None]:
    """Check the files of completed runs, those of many in a second process.

    Call the returned function once. It leaves out the values of runs whose files were changed, and says so in
    their reasons.
    """
    completed = [run for run in runs if run.folder and run.state == RunState.COMPLETED]
    folders = [run.folder or "" for run in completed]
    size = len(folders) // _PORTIONS + 1
    portions = [partial(_damages, folders[start : start + size]) for start in range(0, len(folders), size)]
    check = share(portions) if len(folders) > _MANY else lambda: [portion() for portion in portions]

    def finish() -> None:
        for run, damage in zip(completed, chain.from_iterable(check()), strict=True):
            if damage:
                run.values_folder = None
                _add_reason(run, damage)

    return finish


def _damages(folders: Sequence[str]) -> list[str]:
    return [*map(find_damage, folders)]


def _add_reason(run: RunRow, text: str) -> None:
    run.reason = "; ".join(filter(None, (run.reason, text)))


def _earlier(
    planned: PlannedStudy, known: Sequence[Record], attempts: Mapping[str, Mapping[int, Record]]
) -> list[RunRow]:
    """Return the rows of the attempts before the latest one of each run; withdrawn attempts never started."""
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


def _evidence(end: End) -> tuple[str, ...]:
    """Return the lines with which `bench doctor` explains a failure or a slow run."""
    texts = []
    for cause in filter(None, (end.cause, *(end.warnings or ()))):
        if cause.evidence:
            heading = f"{cause.cause} ({cause.place})" if cause.place else cause.cause
            texts.append(one_line(f"{heading}: {cause.evidence}", limit=300))
    return tuple(texts)


def _epochs(
    planned: PlannedStudy, runs: Sequence[RunRow], *, finish_checks: Callable[[], None]
) -> tuple[pd.DataFrame, dict[str, Sequence[Finding]]]:
    """Return the rows of all runs' metrics.csv or readings, and the facts about them by run_id.

    The files are read while a second process checks them; ``finish_checks`` tells which of them count.
    """
    cells = [planned.cells[run.cell_id] for run in planned.runs]
    file = RunFolder(Path()).metrics_csv.name
    places = [
        place
        for place, (run, cell) in enumerate(zip(runs, cells, strict=True))
        if run.values_folder and not cell.reads_values
    ]
    paths = [f"{runs[place].values_folder}/{file}" for place in places]
    loaded = read_csvs(paths, EpochRow)
    loaded.rows["file"] = np.asarray(places, dtype=np.int64)[loaded.rows["file"].to_numpy()]
    finish_checks()
    damaged = [place for place in places if not runs[place].values_folder]
    if damaged:
        loaded.rows = loaded.rows[~loaded.rows["file"].isin(damaged)].reset_index(drop=True)
    for index, problem in loaded.problems.items():
        run = runs[places[index]]
        if not run.values_folder:
            continue
        absent, completed = not Path(paths[index]).exists(), run.state == RunState.COMPLETED
        if absent and completed and not cells[places[index]].measures:
            _add_reason(run, "the matrix asks for no metrics (metrics: none)")
        # If a run is queued or failed early, its state explains the missing file.
        elif completed or not absent:
            _add_reason(run, problem)
    facts: dict[str, Sequence[Finding]] = {}
    rows = []
    for place, (run, cell) in enumerate(zip(runs, cells, strict=True)):
        if run.values_folder and run.state == RunState.COMPLETED and cell.reads_values:
            readings = readings_of(RunFolder(Path(run.values_folder)), cell)
            facts[run.run_id] = readings.findings
            _add_reason(run, readings.problem)
            rows += [(place, *astuple(row)) for row in readings.rows]
    frame = loaded.rows
    if rows:
        read = pd.DataFrame(rows, columns=["file", *columns_of(EpochRow)]).astype(frame.dtypes)
        frame = pd.concat([frame, read]).sort_values("file", kind="stable", ignore_index=True)
    return _with_ids(frame, runs, frame.pop("file").to_numpy()), facts


def _with_ids(frame: pd.DataFrame, runs: Sequence[RunRow], places: npt.NDArray[np.int64]) -> pd.DataFrame:
    """Return rows with the ``run_id`` and ``cell_id`` of the runs at ``places``."""
    for at, name in enumerate(("run_id", "cell_id")):
        names = pd.Categorical([getattr(run, name) for run in runs])
        frame.insert(at, name, pd.Series(names[places], index=frame.index))
    return frame
