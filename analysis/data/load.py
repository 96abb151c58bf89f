"""A study's folder as frames: everything that was planned, and what became of it.

Loading goes through the plan, not through the results: a run that never started is a
row with the state ``planned``, a missing or broken file is a reason in words. No run is
ever dropped, and nothing that lies in a run's folder can stop the loading.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.data.csv_files import Loaded, read_csvs
from analysis.data.runs import read_runs
from analysis.text import clean, one_line
from bench.study.files import read_json
from bench.study.layout import METRICS_COLUMNS, RANKS_COLUMNS, STEPS_COLUMNS, RunFolder, StudyFolder
from bench.study.ledger import RunState
from bench.study.plan_json import read_plan, unreadable_plan, wrong_plan


@dataclass
class Study:
    """One study as frames.

    Attributes:
        folder: where it lies.
        plan: plan.json as it is.
        cells: one row per cell: ``cell_id, launcher, backend, nodes, gpus_per_node`` (text,
            ``4+2`` where nodes differ), ``gpus`` (ranks), ``global_batch, per_gpu_batch, device,
            swept`` (dict).
        members: one row per cell and series: ``cell_id, series, mode, batch`` (the plan's label).
        runs: one row per planned run, :data:`analysis.data.runs.RUNS_COLUMNS`;
            times are UTC.
        epochs: all rows of all metrics.csv, with ``run_id`` and ``cell_id`` (categorical).
        remarks: what was odd about the folder as a whole.
        attempts: the folder of each run's latest attempt, in the order of ``runs``.
    """

    folder: StudyFolder
    plan: dict[str, Any]
    cells: pd.DataFrame
    members: pd.DataFrame
    runs: pd.DataFrame
    epochs: pd.DataFrame
    remarks: list[str] = field(default_factory=list)
    attempts: list[str | None] = field(default_factory=list, repr=False)

    @property
    def name(self) -> str:
        """The study's name, by its plan."""
        return one_line(self.plan.get("study") or self.folder.name)

    @cached_property
    def ranks(self) -> pd.DataFrame:
        """All rows of all ranks.csv; for a large study ask :meth:`ranks_of` for some runs."""
        return self.ranks_of(self.runs["run_id"])

    @cached_property
    def steps(self) -> pd.DataFrame:
        """All rows of all steps.csv; for a large study ask :meth:`steps_of` for some runs."""
        return self.steps_of(self.runs["run_id"])

    @cached_property
    def envs(self) -> dict[str, dict[str, Any]]:
        """Every env.json by run_id; for a large study ask :meth:`envs_of` for some runs."""
        return self.envs_of(self.runs["run_id"])

    def ranks_of(self, run_ids: Iterable[str]) -> pd.DataFrame:
        """Return the rows of ranks.csv of some runs, with ``run_id`` and ``cell_id``."""
        return self._table_of(run_ids, "ranks_csv", RANKS_COLUMNS, text=("host", "device"))

    def steps_of(self, run_ids: Iterable[str]) -> pd.DataFrame:
        """Return the rows of steps.csv of some runs, with ``run_id`` and ``cell_id``."""
        return self._table_of(run_ids, "steps_csv", STEPS_COLUMNS)

    def envs_of(self, run_ids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return env.json of those of the runs that left a whole one."""
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

    def _table_of(
        self, run_ids: Iterable[str], name: str, columns: Sequence[str], *, text: Sequence[str] = ()
    ) -> pd.DataFrame:
        file = getattr(RunFolder(Path()), name).name
        places = [place for place in self._places(run_ids) if self.attempts[place]]
        paths = [f"{self.attempts[place]}/{file}" for place in places]
        loaded = read_csvs(paths, columns=columns, text=text)
        return _with_ids(loaded, self.runs, places)


def load_study(path: Path) -> Study:
    """Return the study in the folder ``path``.

    Raises:
        BenchError: there is no plan.json, or it is not one that this version can read.
    """
    folder = StudyFolder(Path(path))
    plan = read_plan(folder)
    try:
        cells, members = _cells(plan), _members(plan)
        planned = [
            (str(run["run_id"]), clean(run["cell_id"]), int(run["repeat"]), int(run["order"]))
            for run in plan["runs"]
        ]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise unreadable_plan(folder, error) from None
    known_cells = set(cells["cell_id"])
    for run_id, cell_id, *_ in planned:
        if cell_id not in known_cells:
            what = f"the cell {one_line(cell_id)} of run {one_line(run_id)} is not defined"
            raise wrong_plan(folder, what)
    runs, attempts, remarks = read_runs(folder, planned)
    unasked = {clean(c["cell_id"]) for c in plan["cells"] if (c.get("metrics") or {}).get("source") == "none"}
    epochs, problems = _epochs(runs, attempts, unasked=unasked)
    _add_reasons(runs, problems)
    return Study(folder, plan, cells, members, runs, epochs, remarks, attempts)


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


def _epochs(
    runs: pd.DataFrame, attempts: Sequence[str | None], *, unasked: Collection[str] = ()
) -> tuple[pd.DataFrame, dict[int, str]]:
    """Return all rows of all metrics.csv, and by the run's place what is wrong with its file.

    Of the cells ``unasked`` the matrix wants no metrics.
    """
    file = RunFolder(Path()).metrics_csv.name
    places = [place for place, attempt in enumerate(attempts) if attempt]
    loaded = read_csvs([f"{attempts[place]}/{file}" for place in places], columns=METRICS_COLUMNS)
    states = runs["state"].to_numpy()
    problems = {}
    for index, problem in loaded.problems.items():
        place = places[index]
        absent, completed = problem.endswith("is missing"), states[place] == RunState.COMPLETED
        if absent and completed and runs["cell_id"].iloc[place] in unasked:
            problems[place] = "the matrix asks for no metrics (metrics: none)"
        # A run that waits or died early has no metrics: that is its state, not a broken file.
        elif completed or not absent:
            problems[place] = problem
    return _with_ids(loaded, runs, places), problems


def _with_ids(loaded: Loaded, runs: pd.DataFrame, places: Sequence[int]) -> pd.DataFrame:
    """Return the rows with run_id and cell_id in place of the file's index."""
    frame = loaded.rows
    rows = np.asarray(places, dtype=np.int64)[frame.pop("file").to_numpy()]
    for at, name in enumerate(("run_id", "cell_id")):
        ids = pd.Categorical(runs[name])
        values = pd.Categorical.from_codes(ids.codes[rows], dtype=ids.dtype)
        frame.insert(at, name, pd.Series(values, index=frame.index))
    return frame


def _add_reasons(runs: pd.DataFrame, problems: dict[int, str]) -> None:
    """Append what is wrong with a run's files to the reason in its row."""
    if not problems:
        return
    reasons = runs["reason"].to_list()
    for place, problem in problems.items():
        reasons[place] = f"{reasons[place]}; {problem}" if reasons[place] else problem
    runs["reason"] = pd.Series(reasons, dtype="str", index=runs.index)
