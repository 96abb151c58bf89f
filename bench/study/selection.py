"""Select the runs that still have to be executed, or that match `--only FILTER`."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from bench.errors import BenchError
from bench.matrix.cell import Cell, Run, value_text
from bench.study.ledger import RunRecord, RunState

# fmt: off
_CELL_KEYS = (
    "nodes", "tasks_per_node", "gpus_per_node", "world_size", "backend", "launcher", "global_batch",
    "per_gpu_batch", "mode", "repeat",
)
# fmt: on


def pending(
    runs: Sequence[Run],
    records: Mapping[str, RunRecord],
    *,
    retry_failed: bool = False,
    retry_disturbed: bool = False,
) -> list[Run]:
    """Return the runs in state planned or cancelled.

    With ``retry_failed`` and ``retry_disturbed``, also return the failed runs and those that completed but
    were disturbed.
    """
    wanted = {RunState.PLANNED, RunState.CANCELLED}
    if retry_failed:
        wanted.add(RunState.FAILED)
    chosen = (records[run.run_id] for run in runs)
    return [
        run
        for run, record in zip(runs, chosen, strict=True)
        if record.state in wanted or (retry_disturbed and record.is_disturbed)
    ]


def only(runs: Sequence[Run], cells: Mapping[str, Cell], filters: Sequence[str]) -> list[Run]:
    """Return the runs that match every filter.

    A filter is a pattern for the name of the run or cell (``n4x4-*``), or ``key=value``. The key is a
    property of the run's configuration or a workload option (``nodes=4``, ``mode=weak``, ``precision=bf16``).

    Raises:
        BenchError: a key is unknown, or no run matches.
    """
    kept = [run for run in runs if all(_matches(run, cells[run.cell_id], pattern) for pattern in filters)]
    if filters and runs and not kept:
        raise BenchError(
            f"--only {' --only '.join(filters)} matches no run",
            remedy=f"run names look like {runs[0].run_id}",
        )
    return kept


def _matches(run: Run, cell: Cell, pattern: str) -> bool:
    key, equals, value = pattern.partition("=")
    if not equals:
        return fnmatch.fnmatchcase(run.run_id, pattern) or fnmatch.fnmatchcase(run.cell_id, pattern)
    if key == "repeat":
        return str(run.repeat) == value
    if key == "mode":
        return value in cell.modes
    found = _property(cell, key)
    return value_text(found) == value


def _property(cell: Cell, key: str) -> Any:
    if key == "gpus_per_node":  # the name of tasks_per_node on GPUs
        return cell.tasks_per_node
    if key in _CELL_KEYS:
        return getattr(cell, key)
    if key in cell.workload:
        return cell.workload[key]
    if key.startswith("env."):
        return cell.env.get(key.removeprefix("env."), "")
    allowed = ", ".join([*_CELL_KEYS, *cell.workload, "env.NAME"])
    raise BenchError(
        f"--only: unknown key {key!r}", remedy=f"allowed: {allowed}, or a pattern such as 'n4x4-*'"
    )
