"""Read and write plan.json: the cells (configurations) of a study, and its runs in starting order."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import BenchError, missing_file
from ..matrix.cell import Cell, Run
from ..matrix.schedulers import SCHEDULERS, SchedulerSpec
from .files import read_json, read_object, write_atomically
from .layout import RunFolder, StudyFolder
from .ledger import Ledger, RunRecord, RunState

#: Matches the name of the folder of an attempt.
ATTEMPT = re.compile(r"attempt-([0-9]{1,6})", re.ASCII).fullmatch
REPLAN = "plan the study again: bench plan MATRIX"


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
            raise BenchError(f"executor {self.executor!r} is unknown", remedy=REPLAN)
        return SCHEDULERS[self.executor]

    @property
    def exclusive(self) -> bool:
        """True if each run has whole nodes, which it shares with no other job."""
        return bool(self.plan.get("exclusive"))

    @property
    def reserved_node_gpus(self) -> int | None:
        """The number of GPUs of a node, or None if runs do not have whole nodes or the number is unknown."""
        return self.plan.get("node_gpus") if self.exclusive else None

    @property
    def concurrent_runs(self) -> int | None:
        """Maximum number of runs that execute at once, or None if there is no limit."""
        return self.plan.get("concurrent_runs")

    def records(self) -> dict[str, RunRecord]:
        """Return the record of every run's latest attempt, in the planned order.

        If the ledger has lost all events of a run, the record is that of its run.json.
        """
        records = self.ledger.records(run.run_id for run in self.runs)
        lost = [one for one in records.values() if one.attempt == 0]
        begun = _names(self.folder.runs) if lost else set()
        for record in lost:
            if record.run_id in begun:
                self._recover(record)
        return records

    def _recover(self, record: RunRecord) -> None:
        """Fill a record without events from the run.json of its latest attempt."""
        folder = self.folder.runs / record.run_id
        numbers = [int(match[1]) for name in _names(folder) if (match := ATTEMPT(name))]
        content = read_json(self.folder.attempt(record.run_id, max(numbers)).run_json) if numbers else None
        if content is None or content.get("run_id") != record.run_id:
            return
        state = content.get("state")
        if state in list(RunState) and state != RunState.PLANNED:
            record.attempt = max(numbers)
            record.restore(content)
            lost = f"{self.folder.ledger.name} has no event of this run; the state is that of run.json"
            record.damages.append(lost)

    def run_folder(self, record: RunRecord) -> RunFolder:
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


def _names(folder: Path) -> set[str]:
    try:
        return {entry.name for entry in os.scandir(folder)}
    except OSError:
        return set()


def open_study(folder: StudyFolder) -> PlannedStudy:
    """Return the study planned in ``folder``; raise BenchError if plan.json is missing or broken."""
    plan = read_plan(folder)
    try:
        cells = {cell["cell_id"]: Cell.from_json(cell) for cell in plan["cells"]}
        runs = [Run(r["run_id"], r["cell_id"], r["repeat"], r["order"]) for r in plan["runs"]]
    except (KeyError, TypeError) as error:
        raise invalid_plan(folder, error) from None
    return PlannedStudy(folder, plan, cells, runs)


def read_plan(folder: StudyFolder) -> dict[str, Any]:
    """Return the content of plan.json; raise BenchError if it is missing or broken."""
    path = folder.plan_json
    if not path.is_file():
        remedy = "give the folder of a study, such as results/<study>, or plan one: bench plan MATRIX"
        raise missing_file(path, what="the study's plan", remedy=remedy)
    plan, problem = read_object(path)
    if plan is None:
        raise invalid_plan(folder, problem)
    try:
        known = {cell["cell_id"] for cell in plan["cells"]}
        lost = next((run for run in plan["runs"] if run["cell_id"] not in known), None)
    except (KeyError, TypeError, ValueError) as error:
        raise invalid_plan(folder, error) from None
    if lost is not None:
        what = f"the cell {lost['cell_id']!r} of run {lost.get('run_id')!r} is not defined"
        raise invalid_plan(folder, what)
    try:
        _check_types(plan)
    except (KeyError, TypeError, ValueError) as error:
        raise invalid_plan(folder, error) from None
    return plan


def _check_types(plan: dict[str, Any]) -> None:
    """Raise TypeError or ValueError if a value that bench uses has another type than bench writes."""
    _check(plan, "the plan", {"cells": list, "runs": list, "executor": str, "time_limit_s": int, **_OPTIONAL})
    for number, cell in enumerate(plan["cells"], start=1):
        check_cell(cell, f"cell {number}")
        _check(cell["workload"], f"cell {number}, workload", {"device": str})
    for number, run in enumerate(plan["runs"], start=1):
        _check(run, f"run {number}", {"run_id": str, "cell_id": str, "repeat": int, "order": int})
        if "/" in run["run_id"] or run["run_id"] in ("", ".", ".."):
            raise ValueError(f"run {number}: run_id {run['run_id']!r} is not the name of a folder")
        if run["run_id"] != f"{run['cell_id']}-r{run['repeat']}":
            raise ValueError(f"run {number}: run_id {run['run_id']!r} is not that of its cell and repeat")
    cost = plan.get("cost")
    for name in ("cells", "runs"):
        planned = cost.get(name) if isinstance(cost, dict) else None
        if planned is not None and planned != len(plan[name]):
            raise ValueError(f"{len(plan[name])} {name}, but cost.{name} is {planned}")
    for name, one in (("cell_id", "cells"), ("run_id", "runs")):
        if len({json.dumps(entry.get(name)) for entry in plan[one]}) != len(plan[one]):
            raise ValueError(f"two {one} have the same {name}")


def check_cell(cell: Any, where: str) -> None:
    """Raise an error if a cell in plan.json or run.json has values of other types, or contradicts itself.

    Raises:
        KeyError, TypeError, ValueError: with ``where`` in the message.
    """
    _check(cell, where, _CELL_TYPES)
    per_node, nodes, workload = cell["tasks_per_node"], cell["nodes"], cell["workload"]
    ranks = per_node if isinstance(per_node, list) else [per_node]
    counts = [*((name, cell[name]) for name in _COUNTS), *(("tasks_per_node", one) for one in ranks)]
    for name, value in counts:
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**53:
            raise ValueError(f"{where}: {name} {str(value)[:40]} is not a positive number")
    total = sum(ranks) if isinstance(per_node, list) else per_node * nodes
    if total != cell["world_size"] or (isinstance(per_node, list) and len(ranks) != nodes):
        what = f"world_size {cell['world_size']} is not nodes x tasks_per_node"
        raise ValueError(f"{where}: {what}")
    _check(workload.get("metrics") or {}, f"{where}, workload.metrics", {})
    if not workload.get("command"):
        for name in {"epochs", "steps_per_epoch"} & workload.keys():
            if not isinstance(workload[name], int) or isinstance(workload[name], bool) or workload[name] < 1:
                raise ValueError(f"{where}: {name} {str(workload[name])[:40]} is not a positive number")
    for member in cell["series"]:
        _check(member, f"{where}, series", {"series": str, "mode": str, "batch": int})


def _check(content: Any, where: str, types: Mapping[str, Any]) -> None:
    if not isinstance(content, dict):
        raise TypeError(f"{where} is {type(content).__name__} instead of an object")
    for name, kind in types.items():
        value = content[name] if name not in _OPTIONAL else content.get(name)
        known = isinstance(value, kind) and not (isinstance(value, bool) and kind is int)
        if not known and not (value is None and name in _OPTIONAL):
            expected = {list: "a list", dict: "an object", str: "a text", int: "a whole number"}[kind]
            raise TypeError(f"{where}: {name} {str(value)[:40]!r} is not {expected}")


_COUNTS = ("nodes", "world_size", "global_batch", "per_gpu_batch")
_CELL_TYPES = {
    **dict.fromkeys(("cell_id", "launcher", "backend"), str),
    **dict.fromkeys(_COUNTS, int),
    **dict.fromkeys(("workload", "env", "swept"), dict),
    "series": list,
}
#: Values of the plan that can be absent or null.
_OPTIONAL = {
    "setup": list,
    "env_from": list,
    "cpus_per_task": int,
    "node_gpus": int,
    "concurrent_runs": int,
    "key": str,
}


def find_plan(folder: StudyFolder) -> dict[str, Any] | None:
    """Return the content of plan.json, or None if it is missing or broken."""
    return read_json(folder.plan_json)


def invalid_plan(folder: StudyFolder, problem: str | Exception) -> BenchError:
    """Return the error for a broken plan.json; ``problem`` is the reason why the file cannot be used."""
    if isinstance(problem, Exception):
        why = " ".join(f"{type(problem).__name__}: {problem}".split())
        problem = f"is not a plan that this version can read ({why})"
    return BenchError(f"{folder.plan_json}: {problem}", remedy=REPLAN)


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
