"""Read and write plan.json: the cells (configurations) of a study, and its runs in starting order."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import (
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    with_config,
)
from typing_extensions import TypedDict

from ddp_scaling_bench.errors import BenchError, missing_file
from ddp_scaling_bench.files import read_bytes, read_json, read_object, write_atomically
from ddp_scaling_bench.run_folder import RunFolder

from ..matrix.cell import Cell, Run
from ..matrix.field_types import at_size
from ..matrix.schedulers import SCHEDULERS, SchedulerSpec
from ..matrix.workload import Metrics
from .layout import StudyFolder
from .ledger import End, FailureClass, Ledger, Record, RunState, latest
from .reasons import Said

#: Matches the name of the folder of an attempt.
ATTEMPT = re.compile(r"attempt-([0-9]{1,6})", re.ASCII).fullmatch
_KEY = re.compile(r"[0-9a-f]{1,16}").fullmatch
REPLAN = "plan the study again: bench plan MATRIX"

_Positive = Annotated[int, Field(ge=1, lt=2**53)]
_Count = Annotated[int, Field(ge=0, lt=2**53)]
_FolderName = Annotated[str, Field(pattern=r"^[^./][^/]*$")]
_content = with_config(ConfigDict(extra="allow", strict=True))


@_content
class _Workload(TypedDict):
    device: str
    epochs: _Positive
    steps_per_epoch: _Positive
    strategy: NotRequired[str]


@_content
class _Member(TypedDict):
    series: str
    mode: str
    batch: _Positive


@_content
class _Series(_Member):
    swept: NotRequired[dict[str, Any] | None]


@_content
class _Warning(TypedDict):
    kind: str


class _Metrics(Metrics):
    """The metrics of a cell, with ``workload.exchange``."""

    exchange: Literal["rare"] | None = None


def _checked(metrics: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Check metrics as a matrix does, and return them without defaults."""
    check(metrics)
    return metrics


@_content
class _Resources(TypedDict):
    time_limit_s: _Positive
    partition: str | None
    qos: str | None
    account: str | None
    constraint: str | None
    exclusive: bool
    gpu_type: str | None


@_content
class _Cell(TypedDict):
    cell_id: _FolderName
    launcher: str
    backend: str
    nodes: _Positive
    tasks_per_node: _Positive | list[_Positive]
    world_size: _Positive
    global_batch: _Positive
    per_gpu_batch: _Positive
    argv: Annotated[list[str], Field(min_length=1)]
    name: str
    planned_epochs: _Positive | None
    packages: list[str]
    metrics: Annotated[_Metrics, WrapValidator(_checked)]
    workload: _Workload
    env: dict[str, Any]
    swept: dict[str, Any]
    series: list[_Member]
    model_parallel: _Positive
    command_per: NotRequired[str]
    repeats: _Positive
    resources: _Resources


@_content
class _Run(TypedDict):
    run_id: _FolderName
    cell_id: str
    repeat: _Count
    order: _Count


@with_config(ConfigDict(extra="forbid", strict=True))
class _Host(TypedDict):
    host: str
    processes: NotRequired[_Positive | None]
    address: NotRequired[str | None]


@_content
class _Plan(TypedDict):
    """The values of plan.json that bench reads; others are kept as they are."""

    executor: str
    cells: list[_Cell]
    runs: list[_Run]
    series: NotRequired[list[_Series] | None]
    targets: NotRequired[list[dict[str, Any]] | None]  # analysis/targets.py checks them
    warnings: NotRequired[list[_Warning | str] | None]  # version 0.1.0 wrote texts
    setup: NotRequired[list[str] | None]
    cpus_per_task: NotRequired[_Positive | None]
    node_gpus: NotRequired[_Count | None]
    max_running: NotRequired[_Positive | None]
    stop_after_measurement: NotRequired[bool | None]
    env_from: NotRequired[list[str] | None]
    hosts: NotRequired[list[_Host] | None]
    key: NotRequired[str | None]
    package: NotRequired[_FolderName | None]
    place: NotRequired[dict[str, Any] | None]


_PLAN = TypeAdapter(_Plan)


@dataclass(frozen=True)
class PlannedStudy:
    """A planned study. ``cells`` maps ids to configurations; ``plan`` is the content of plan.json."""

    folder: StudyFolder
    plan: dict[str, Any]
    cells: dict[str, Cell]
    runs: list[Run]

    @property
    def ledger(self) -> Ledger:
        """Ledger of the study, which records the states of its runs."""
        return Ledger(self.folder.ledger)

    @property
    def executor(self) -> str:
        """Name of the matrix's executor."""
        return str(self.plan["executor"])

    @property
    def scheduler(self) -> SchedulerSpec:
        """The scheduler that the executor names; raise BenchError if it is unknown."""
        if self.executor not in SCHEDULERS:
            raise invalid_plan(self.folder, f"has an unknown executor, {self.executor!r}")
        return SCHEDULERS[self.executor]

    @property
    def max_running(self) -> int | None:
        """Maximum number of runs that execute at once, or None if there is no limit."""
        return self.plan.get("max_running")

    @property
    def matrix_path(self) -> str:
        """Path of the file of the matrix, or an empty text if it is not known."""
        name = self.plan.get("matrix_file")
        return os.path.relpath(self.folder.path / name) if isinstance(name, str) else ""

    def changed_matrix(self) -> str:
        """Return the path of the matrix if its file is no longer what was planned; else an empty text."""
        path = "" if self.folder.archive else self.matrix_path
        try:
            text = Path(path).read_text(encoding="utf-8") if path else None
        except (OSError, UnicodeDecodeError):
            return ""
        return "" if text in (None, self.plan.get("matrix")) else path

    def placement(self, size: int) -> dict[str, str]:
        """Return the resources for runs of a size that the matrix gives by size, if it requests any."""
        tables = (self.plan.get("by_size") or {}).items()
        chosen = {name: at_size(sizes_of(table), size) for name, table in tables}
        return {name: str(value) for name, value in chosen.items() if value}

    def records(self, known: Mapping[str, Mapping[int, Record]] | None = None) -> dict[str, Record]:
        """Return the record of every run's latest attempt, in the planned order.

        ``known`` are the attempts in the ledger, if it was read before. An attempt whose folder exists may
        have started. If the ledger does not know it, because its last lines were lost, the record is an
        intent: the scheduler is asked for a job of its name. A completed attempt without its folder has
        failed: there are no results, and the run can be started again.
        """
        known = self.ledger.attempts() if known is None else known
        begun, runs = _names(self.folder.runs), str(self.folder.runs)
        records = {}
        for run in self.runs:
            record = latest(known.get(run.run_id), run.run_id)
            if begun is not None and run.run_id in begun:
                record = self._with_folders(record, runs)
            elif begun is not None and record.state is RunState.COMPLETED:
                record = _without_results(record)
            records[run.run_id] = record
        return records

    def _with_folders(self, record: Record, runs: str) -> Record:
        """Return the record of the latest attempt that has a line in the ledger or a folder in ``runs``."""
        run, last = f"{runs}/{record.run_id}", record.attempt
        if not last:
            numbers = (match[1] for name in _names(Path(run)) or () if (match := ATTEMPT(name)))
            last = max(map(int, numbers), default=0)
        if record.refused and os.path.isdir(f"{run}/attempt-{last}"):  # noqa: PTH112
            return self.intent(record.run_id, last)  # killed while it was removed, or claimed again
        while os.path.isdir(f"{run}/attempt-{last + 1}"):  # noqa: PTH112 (for each run)
            last += 1
        return self.intent(record.run_id, last) if last > record.attempt else record

    def intent(self, run_id: str, attempt: int) -> Record:
        """Return the record of an attempt that may have been submitted, from its folder."""
        content = read_object(self.folder.attempt(run_id, attempt).run_json)[0] or {}
        name, allocation = content.get("job_name"), content.get("allocation")
        own = allocation if isinstance(allocation, dict) else {}
        pack, place = (v if isinstance(v := own.get(key), int) else None for key in ("pack", "place"))
        known = isinstance(name, str) and content.get("run_id") == run_id
        return Record(
            run_id=run_id,
            attempt=attempt,
            state=RunState.QUEUED,
            job_name=str(name) if known else self.job_name(run_id, attempt),
            pack=pack,
            place=place,
        )

    def job_name(self, run_id: str, attempt: int | str) -> str:
        """Return the unique name of an attempt's job."""
        return f"{self.folder.name}.{run_id}.a{attempt}.{self.key}"

    @property
    def key(self) -> str:
        """Part of the names of the study's jobs, which no other study has."""
        return str(self._identity.get("key") or "")

    @property
    def place(self) -> dict[str, Any]:
        """The value of :func:`place_of` when the study was planned or adopted."""
        place = self._identity.get("place")
        return dict(place) if isinstance(place, dict) else {}

    def adopt(self) -> None:
        """Let this folder be the study; its later jobs have other names than those of the original."""
        self.ledger.note("adopted", place=place_of(self.folder), key=secrets.token_hex(3))
        self.__dict__.pop("_identity", None)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        adopted = self.ledger.events("adopted")
        fitting = (isinstance(one.get("place"), dict) and _KEY(str(one.get("key"))) for one in adopted)
        return [self.plan, *(one for one, fits in zip(adopted, fitting, strict=True) if fits)][-1]

    def run_folder(self, record: Record) -> RunFolder:
        """Return the folder of the attempt that ``record`` describes."""
        return self.folder.attempt(record.run_id, record.attempt)

    def cell_of(self, run_id: str) -> Cell:
        """Return the configuration of a run."""
        return self.cells[self._cell_ids[run_id]]

    def cores_per_node(self, run_id: str) -> int:
        """Return the largest number of cores that a run requests on a node."""
        cell = self.cell_of(run_id)
        return max(cell.ranks_per_node) * int(self.plan.get("cpus_per_task") or 1)

    @cached_property
    def _cell_ids(self) -> dict[str, str]:
        return {run.run_id: run.cell_id for run in self.runs}

    def script(self, cell_id: str) -> Path:
        """Return the path of the script that executes the runs of a cell."""
        return self.folder.scripts / f"{cell_id}{self.scheduler.suffix}"


def sizes_of(table: Mapping[str, Any]) -> dict[int, Any]:
    """Return a table of values by size; plan.json has sizes as texts."""
    return {int(size): value for size, value in table.items()}


def place_of(folder: StudyFolder) -> dict[str, Any]:
    """Return what identifies the folder of a study: a hash of its real path, and its inode."""
    path = hashlib.sha256(str(folder.path.resolve()).encode(errors="surrogateescape")).hexdigest()[:16]
    return {"path_sha256": path, "inode": folder.path.stat().st_ino}


def _names(folder: Path) -> set[str] | None:
    """Return the names in a folder; None if it exists and cannot be read."""
    try:
        return {entry.name for entry in os.scandir(folder)}
    except FileNotFoundError:
        return set()
    except OSError:
        return None


def _without_results(record: Record) -> Record:
    """Return the record of a completed attempt whose run has no folder."""
    text = "the run's folder is missing: `bench submit --retry-failed` starts the run again"
    end = record.end or End(state=RunState.FAILED)
    reasons = (Said(text=text),)
    return record.ended(
        replace(end, state=RunState.FAILED, reasons=reasons, failure_class=FailureClass.BAD_EXIT)
    )


def open_study(folder: StudyFolder) -> PlannedStudy:
    """Return the study planned in ``folder``; raise BenchError if plan.json is missing or broken."""
    plan = read_plan(folder)
    cells = {cell.cell_id: cell for cell in planned_cells(plan)}
    runs = [Run(r["run_id"], r["cell_id"], r["repeat"], r["order"]) for r in plan["runs"]]
    return PlannedStudy(folder, plan, cells, runs)


def planned_cells(plan: Mapping[str, Any]) -> list[Cell]:
    """Return the cells of a plan; a table that was measured elsewhere has none."""
    return [Cell.from_json(cell) for cell in plan.get("cells") or ()]


def physical_values(cell: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a cell in plan.json that affect its runs, by name."""
    others = ["series", "modes", "script", "swept", "workload", "env", "argv", "planned_epochs", "packages"]
    others += ["repeats", "resources", "texts"]
    values = {key: value for key, value in cell.items() if key not in others} | {"command": cell.get("argv")}
    variables = {f"env.{key}": value for key, value in (cell.get("env") or {}).items()}
    resources = cell.get("resources") or {}
    whole = {name: resources.get(name) for name in ("exclusive", "gpu_type")}
    whole["command_per"] = cell.get("command_per") or ""
    texts = {f"{{{name}}}": text for name, text in (cell.get("texts") or {}).items()}
    return {**values, **whole, **(cell.get("workload") or {}), **variables, **texts}


def read_plan(folder: StudyFolder) -> dict[str, Any]:
    """Return the content of plan.json; raise BenchError if it is missing or broken."""
    path = folder.plan_json
    if not path.is_file():
        remedy = "give the folder of a study, such as results/<study>, or plan one: bench plan MATRIX"
        raise missing_file(path, what="the study's plan", remedy=remedy)
    try:
        content = read_bytes(path)
    except OSError as error:
        raise invalid_plan(folder, f"cannot be read: {error.strerror}") from None
    try:
        plan: dict[str, Any] = _PLAN.validate_json(content)  # type: ignore[assignment]
    except ValidationError as error:
        damage = "is damaged, or was cut short" if content else "is empty"
        is_json = error.errors()[0]["type"] != "json_invalid"
        problem = f"is not a plan that this version can read ({first_error(error)})" if is_json else damage
        raise invalid_plan(folder, problem) from None
    known = {cell["cell_id"] for cell in plan["cells"]}
    if lost := next((run for run in plan["runs"] if run["cell_id"] not in known), None):
        raise invalid_plan(
            folder, f"is damaged: the cell {lost['cell_id']!r} of run {lost['run_id']!r} is not defined"
        )
    return plan


def first_error(error: ValidationError) -> str:
    """Return the place and the message of the first error: ``cells.0.nodes: Field required``."""
    first = error.errors(include_url=False, include_input=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), message)))


def find_plan(folder: StudyFolder) -> dict[str, Any] | None:
    """Return the content of plan.json, or None if it is missing or broken."""
    return read_json(folder.plan_json)


def invalid_plan(folder: StudyFolder, problem: str) -> BenchError:
    """Return the error for a broken plan.json; ``problem`` is the reason why the file cannot be used."""
    remedy = (
        f"restore it; without a copy, move {folder.path} away with its runs, and plan the matrix again"
        if folder.has_runs
        else REPLAN
    )
    if folder.archive:
        remedy = "read it with the version of bench that wrote it, or archive the study again"
    return BenchError(f"{folder.shown(folder.plan_json)} {problem}", remedy=remedy)


def write_plan_json(folder: StudyFolder, content: dict[str, Any], *, private: bool = False) -> None:
    """Write plan.json atomically; if ``private``, only the owner can read it."""
    write_atomically(folder.plan_json, plan_text(content), private=private)


def plan_text(content: dict[str, Any]) -> str:
    """Format plan.json with one line per cell and per run, so that people and diff can read it."""
    dump = json.JSONEncoder(ensure_ascii=False).encode
    line_of = {"cells": _CellLines(dump).line, "series": dump, "runs": dump}
    parts = []
    for key, value in content.items():
        if key in line_of and value:
            items = ",\n  ".join(map(line_of[key], value))
            parts.append(f" {dump(key)}: [\n  {items}\n ]")
        else:
            parts.append(f" {dump(key)}: {dump(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


class _CellLines:
    """Encode cells as JSON; ``workload`` and ``env`` objects that cells share are encoded only once."""

    def __init__(self, dump: Callable[[Any], str]) -> None:
        self._dump = dump
        self._known: dict[int, str] = {}

    def line(self, cell: dict[str, Any]) -> str:
        own = self._dump({key: value for key, value in cell.items() if key not in ("workload", "env")})
        workload, env = self._shared(cell["workload"]), self._shared(cell["env"])
        return f'{own[:-1]}, "workload": {workload}, "env": {env}}}'

    def _shared(self, settings: dict[str, Any]) -> str:
        text = self._known.get(id(settings))  # the plan keeps the object alive, so its id is unique
        if text is None:
            text = self._known[id(settings)] = self._dump(settings)
        return text
