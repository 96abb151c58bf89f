"""`bench plan`: turn a matrix into a study with one script per cell."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_scaling_bench.units import join_names
from ddp_scaling_bench.variables import shown_settings

from ..matrix.cell import Cell, labelled_commands, value_text
from ..study.layout import StudyFolder
from .console import SHOWN_ROWS, print_commands, print_json, print_table, say, show
from .options import AllOption, JsonOption, MatrixArgument, ResultsOption, SiteOption, results_folder

if TYPE_CHECKING:  # slow to import, and not needed by other commands
    from ..plan import Plan

#: Number of cells with idle GPUs that are named.
SHOWN_IDLE = 8


def plan_command(
    matrix: MatrixArgument,
    results: ResultsOption = None,
    everything: AllOption = False,
    site: SiteOption = None,
    as_json: JsonOption = False,
) -> int:
    """Check a matrix, write one script per cell, and print the maximum cost.

    The command needs no Slurm and submits nothing. Planning again is safe: a study can grow, but a cell that
    has results cannot change. Example: bench plan matrices/l40s.yaml
    """
    plan, folder = plan_study(matrix, site=site, results=results)
    if as_json:
        print_json(_as_content(plan, folder))
    else:
        _show(plan, folder, everything=everything)
        say_warnings(plan)
        say(f"next: bench submit {plan.matrix.study}")
    return 0


def plan_study(matrix: str, *, site: str | None, results: Path | None) -> tuple[Plan, StudyFolder]:
    """Plan a matrix (a file, or a shipped example's name) and write the study."""
    from ..matrix.load import find_site
    from ..plan import continue_study, make_plan, write_plan
    from ..shipped import find_matrix

    root = results_folder(results)
    path = find_matrix(matrix)
    if path != Path(matrix):
        say(f"matrix: {path}")
    plan = continue_study(make_plan(path, site=find_site(site)), root)
    return plan, write_plan(plan, root)


def say_warnings(plan: Plan) -> None:
    """Print the site file in use and the plan's warnings on standard error."""
    if plan.document.site:
        say(str(plan.document.site))
    for warning in plan.warnings:
        say(f"warning: {warning}")


def _show(plan: Plan, folder: StudyFolder, *, everything: bool) -> None:
    """Print the cells, the cost and the study's folder."""
    per_node = "GPUs/node" if plan.matrix.workload.device == "cuda" else "tasks/node"
    columns = ["cell", "nodes", per_node, "ranks", "per-GPU batch", "global batch", "series"]
    rows = list(map(_row, plan.cells if everything else plan.cells[:SHOWN_ROWS]))
    hidden = len(plan.cells) - len(rows)
    print_table(f"Study {plan.matrix.study}", columns, rows, right=columns[1:6], hidden=hidden)
    print_commands(plan.cells)
    show(plan.cost)
    if idle := [f"{cell_id} ({number})" for cell_id, number in plan.cost.idle_gpus.items()]:
        named = join_names(idle, most=len(idle) if everything else SHOWN_IDLE)
        show(f"idle GPUs that each run of a cell reserves: {named}")
    show(f"written: {folder.path} (scripts/, plan.json)")


def _row(cell: Cell) -> tuple[Any, ...]:
    series = ", ".join(f"{member.mode} {member.batch}" for member in cell.series)
    sizes = (cell.nodes, value_text(cell.tasks_per_node), cell.world_size)
    return (cell.cell_id, *sizes, cell.per_gpu_batch, cell.global_batch, series)


def _as_content(plan: Plan, folder: StudyFolder) -> dict[str, Any]:
    """Return the output of `bench plan --json`."""
    cost, site = plan.cost, plan.document.site
    cells = []
    for cell in plan.cells:
        content = {k: v for k, v in cell.as_json().items() if k not in ("workload", "env")}
        content["series"] = [member.series for member in cell.series]
        cells.append({**content, "script": str(folder.path / plan.script_name(cell))})
    return {
        "study": plan.matrix.study,
        "folder": str(folder.path),
        "runs": cost.runs,
        "repeats": plan.matrix.repeats,
        "gpu_hours": cost.gpu_hours_max,
        "gpu_hours_exact": cost.gpu_hours_exact,
        "gpu_hours_without_exclusive": cost.gpu_hours_without_exclusive,
        "idle_gpus": cost.idle_gpus,
        "node_hours": cost.node_hours_max,
        "gpus": cost.gpus_max,
        "nodes": cost.nodes_max,
        "time_limit_s": plan.matrix.cluster.time_limit,
        "exclusive": plan.exclusive,
        "warnings": [one.told() for one in plan.warnings],
        "site": site and {"path": site.path, "inherited": shown_settings(site.values)},
        "commands": [command.as_json() for command in labelled_commands(plan.cells)],
        "cells": cells,
    }
