"""Read and write plan.json: the cells (configurations) of a study, and its runs in starting order."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import BenchError, missing_file
from ..matrix.cell import Cell, Run
from .files import read_json, read_object, write_atomically
from .layout import RunFolder, StudyFolder
from .ledger import Ledger, RunRecord

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
        """Return the record of every run's latest attempt, in the planned order."""
        return self.ledger.records(run.run_id for run in self.runs)

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
        suffix = ".sbatch" if self.executor == "slurm" else ".sh"
        return self.folder.scripts / f"{cell_id}{suffix}"


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
    except (KeyError, TypeError) as error:
        raise invalid_plan(folder, error) from None
    if lost is not None:
        what = f"the cell {lost['cell_id']!r} of run {lost.get('run_id')!r} is not defined"
        raise invalid_plan(folder, what)
    return plan


def find_plan(folder: StudyFolder) -> dict[str, Any] | None:
    """Return the content of plan.json, or None if it is missing or broken."""
    return read_json(folder.plan_json)


def invalid_plan(folder: StudyFolder, problem: str | Exception) -> BenchError:
    """Return the error for a broken plan.json; ``problem`` is the reason why the file cannot be used."""
    if isinstance(problem, Exception):
        why = " ".join(f"{type(problem).__name__}: {problem}".split())
        problem = f"is not a plan that this version can read ({why})"
    return BenchError(f"{folder.plan_json}: {problem}", remedy=REPLAN)


def write_plan_json(folder: StudyFolder, content: dict[str, Any]) -> None:
    """Write plan.json atomically."""
    write_atomically(folder.plan_json, plan_text(content))


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
