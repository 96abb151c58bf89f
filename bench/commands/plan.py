"""`bench plan`: turn a matrix into a study with one script per cell."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_scaling_bench.errors import BenchError
from ddp_scaling_bench.units import join_names
from ddp_scaling_bench.variables import shown_settings

from ..archive import is_archive
from ..cost import Cost, Costs, hint, idle_gpus, named, parse_step_times, summary, total
from ..matrix.cell import Cell, labelled_commands, value_text
from ..study.layout import StudyFolder
from ..study.plan_json import PlannedStudy, open_study
from ..terminal import (
    SHOWN_ROWS,
    print_commands,
    print_json,
    print_table,
    say,
    short_names,
    show,
    study_title,
)
from .next_step import step_of_study
from .options import (
    AllOption,
    JsonOption,
    MatrixArgument,
    ResultsOption,
    SiteOption,
    StepTimeOption,
    results_folder,
)

if TYPE_CHECKING:  # slow to import, and not needed by other commands
    from ..plan import Plan

#: Number of cells with idle GPUs that are named.
SHOWN_IDLE = 8


def plan_command(
    matrix: MatrixArgument,
    results: ResultsOption = None,
    everything: AllOption = False,
    site: SiteOption = None,
    step_time: StepTimeOption = None,
    as_json: JsonOption = False,
) -> int:
    """Check a matrix, write one script per cell, and print the cost at most and as expected.

    The command needs no Slurm and submits nothing. Planning again is safe: a study can grow, but a cell that
    has results cannot change. Example: bench plan matrices/l40s.yaml
    """
    times = parse_step_times(step_time or ())
    plan, folder = plan_study(matrix, site=site, results=results)
    study = open_study(folder)
    costs = Costs(study, times).of([study.cells[run.cell_id]] for run in study.runs)
    if as_json:
        print_json(_as_content(plan, study, costs))
    else:
        _show(study, costs, everything=everything)
        say_warnings(plan)
        say(f"next: {step_of_study(folder, study.records())}")
    return 0


def chosen_matrix(matrix: str, root: Path) -> Path:
    """Return the path of a matrix or of a shipped example; raise BenchError for a study or an archive."""
    from ..shipped import find_matrix

    if is_archive(matrix):
        remedy = f"read it: bench report {matrix}; its matrix.yaml is the matrix"
        raise BenchError(f"{matrix} is the archive of a study, not a matrix", remedy=remedy)
    try:
        return find_matrix(matrix)
    except BenchError:
        if not any(StudyFolder(path).is_planned for path in (Path(matrix), root / matrix)):
            raise
        remedy = f"give its matrix, a YAML file, or start it: bench submit {matrix}"
        raise BenchError(f"{matrix} is a study, not a matrix", remedy=remedy) from None


def plan_study(matrix: str, *, site: str | None, results: Path | None) -> tuple[Plan, StudyFolder]:
    """Plan a matrix (a file, or a shipped example's name) and write the study."""
    from ..matrix.load import find_site
    from ..plan import make_plan, write_plan

    root = results_folder(results)
    path = chosen_matrix(matrix, root)
    if path != Path(matrix):
        say(f"matrix: {path}")
    plan = make_plan(path, site=find_site(site))
    other = _other_matrix(path, StudyFolder(root / plan.matrix.study))
    folder = write_plan(plan, root)
    if other:
        before = f"{path}: replaces the plan of {other}, which has the same name of a study"
        say(f"warning: {before}; if they are two studies, give one another `study:` name")
    return plan, folder


def _other_matrix(path: Path, folder: StudyFolder) -> str:
    """Return the path of another file, which still exists, from which a study was planned; else empty."""
    with suppress(BenchError, OSError):  # no plan, or a matrix that cannot be read
        other = open_study(folder).matrix_path
        return other if other and not Path(other).samefile(path) else ""
    return ""


def say_warnings(plan: Plan) -> None:
    """Print the site file in use and the plan's warnings on standard error."""
    if plan.document.site:
        say(str(plan.document.site))
    for warning in plan.warnings:
        say(f"warning: {warning}")


def _show(study: PlannedStudy, costs: Mapping[str, Cost], *, everything: bool) -> None:
    """Print the cells, the cost and the study's folder."""
    cells, cost = list(study.cells.values()), total(costs)
    per_node = "GPUs/node" if study.plan["device"] == "cuda" else "tasks/node"
    columns = ["cell", "nodes", per_node, "ranks", "per-GPU batch", "global batch", "series"]
    if any(cell.model_parallel > 1 for cell in cells):
        columns[3:5] = ["ranks", "replicas", "per-replica batch"]
    shown = cells if everything else cells[:SHOWN_ROWS]
    names = short_names(study)
    rows = [_row(cell, names[cell.cell_id], with_replicas="replicas" in columns) for cell in shown]
    hidden = len(cells) - len(rows)
    print_table(study_title(study), columns, rows, right=columns[1:-1], hidden=hidden)
    print_commands(cells)
    show(f"{summary(study)}; {cost}")
    for line in named(costs):
        show(line)
    if idle := [f"{names[cell_id]} ({number})" for cell_id, number in idle_gpus(study).items()]:
        show(
            "idle GPUs that each run of a cell reserves: "
            f"{join_names(idle, most=len(idle) if everything else SHOWN_IDLE)}"
        )
    if study.scheduler.queues and not cost.known:
        say(hint(study))
    show(f"written: {study.folder.path} (scripts/, plan.json)")


def _row(cell: Cell, name: str, *, with_replicas: bool) -> tuple[Any, ...]:
    series = ", ".join(f"{member.mode} {member.batch}" for member in cell.series)
    sizes = (cell.nodes, value_text(cell.tasks_per_node), cell.world_size, *[cell.replicas] * with_replicas)
    return (name, *sizes, cell.per_gpu_batch, cell.global_batch, series)


def _as_content(plan: Plan, study: PlannedStudy, costs: Mapping[str, Cost]) -> dict[str, Any]:
    """Return the output of `bench plan --json`."""
    cost, site = total(costs), plan.document.site
    cells = []
    for cell in plan.cells:
        content = {k: v for k, v in cell.as_json().items() if k not in ("workload", "env")}
        content["series"] = [member.series for member in cell.series]
        cells.append({**content, "script": str(study.folder.path / plan.script_name(cell))})
    return {
        "study": plan.matrix.study,
        "folder": str(study.folder.path),
        "runs": len(plan.runs),
        "gpu_hours": cost.gpu_hours,
        "gpu_hours_exact": cost.exact,
        "gpu_hours_without_exclusive": cost.requested_gpu_hours,
        "idle_gpus": idle_gpus(study),
        "node_hours": cost.node_hours,
        "expected_gpu_hours": cost.expected_gpu_hours if cost.known else None,
        "expected_node_hours": cost.expected_node_hours if cost.known else None,
        "partitions": {name: asdict(one) for name, one in costs.items()},
        "warnings": [one.told() for one in plan.warnings],
        "site": site and {"path": site.path, "inherited": shown_settings(site.values)},
        "commands": [command.as_json() for command in labelled_commands(plan.cells)],
        "cells": cells,
    }
