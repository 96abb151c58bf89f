"""`bench plan`: from a matrix to a study with one script per cell."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.commands.common import (
    JsonOption,
    MatrixArgument,
    ResultsOption,
    SiteOption,
    print_json,
    print_table,
    root_of,
    say,
)
from bench.study.layout import StudyFolder
from bench.units import human_duration

if TYPE_CHECKING:  # planning loads what the other commands need not wait for
    from bench.plan import Plan

SHOWN_CELLS = 40


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plan")(plan_command)


def plan_command(
    matrix: MatrixArgument,
    results: ResultsOption = None,
    everything: Annotated[
        bool, typer.Option("--all", help=f"List every cell, not only the first {SHOWN_CELLS}.")
    ] = False,
    site: SiteOption = None,
    as_json: JsonOption = False,
) -> int:
    """Check a matrix, write one script per cell, and say what it will cost.

    Needs no Slurm and submits nothing. Planning again is safe: a study may grow, but a
    cell that has results must stay what it was. Example: bench plan matrices/l40s.yaml
    """
    plan, folder = planned(matrix, site=site, results=results)
    if as_json:
        print_json(summary(plan, folder))
    else:
        show(plan, folder, everything=everything)
        say(f"next: bench submit {plan.matrix.study}")
    return 0


def planned(matrix: str, *, site: str | None, results: Path | None) -> tuple[Plan, StudyFolder]:
    """Return the plan of a matrix (a file, or a shipped one's name), written into its study's folder."""
    from bench.matrix.load import find_site
    from bench.plan import make_plan, write_plan
    from bench.shipped import find_matrix

    plan = make_plan(find_matrix(matrix), site=find_site(site))
    return plan, write_plan(plan, root_of(results))


def show(plan: Plan, folder: StudyFolder, *, everything: bool = False) -> None:
    """Print the cells, the cost line and where the study was written; warnings on stderr."""
    per_node = "GPUs/node" if plan.matrix.workload.device == "cuda" else "tasks/node"
    columns = ["cell", "nodes", per_node, "ranks", "per-GPU batch", "global batch", "series"]
    shown = plan.cells if everything else plan.cells[:SHOWN_CELLS]
    rows = [
        (
            cell.cell_id,
            cell.nodes,
            "+".join(map(str, cell.tasks_per_node))
            if isinstance(cell.tasks_per_node, list)
            else cell.tasks_per_node,
            cell.world_size,
            cell.per_gpu_batch,
            cell.global_batch,
            ", ".join(f"{member.mode} {member.batch}" for member in cell.series),
        )
        for cell in shown
    ]
    print_table(f"Study {plan.matrix.study}", columns, rows, right=columns[1:6])
    if len(shown) < len(plan.cells):
        print(f"... and {len(plan.cells) - len(shown)} more cells (--all lists them)")
    print(cost_line(plan))
    print(f"written: {folder.path} (scripts/, plan.json)")
    if plan.document.site:
        say(str(plan.document.site))
    for warning in plan.warnings:
        say(f"warning: {warning}")


def cost_line(plan: Plan) -> str:
    """Return what the plan asks for at most, in one line."""
    cost, limit_s = plan.cost, plan.matrix.cluster.time_limit
    parts = [
        f"{_count(cost.cells, 'cell')} x {_count(plan.matrix.repeats, 'repeat')}"
        f" = {_count(cost.runs, 'run')}",
        f"up to {cost.nodes_max} nodes" if cost.nodes_max > 1 else "1 node",
    ]
    if cost.gpus_max:
        parts.append(f"up to {_count(cost.gpus_max, 'GPU')}")
    parts.append(f"wall limit {human_duration(limit_s)} a run, {human_duration(cost.wall_s_max)} in all")
    hours = (
        f"{cost.gpu_hours_max:g} GPU-hours"
        if cost.gpus_max
        else f"{cost.node_hours_max:g} node-hours, no GPU"
    )
    parts.append(f"at most {hours}")
    return "; ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def summary(plan: Plan, folder: StudyFolder) -> dict[str, Any]:
    """Return what `bench plan --json` promises, and the rest of the cost beside it."""
    cost, site = plan.cost, plan.document.site
    cells = [
        {
            "cell_id": cell.cell_id,
            "modes": cell.modes,
            "series": [member.series for member in cell.series],
            "launcher": cell.launcher,
            "backend": cell.backend,
            "nodes": cell.nodes,
            "tasks_per_node": cell.tasks_per_node,
            "world_size": cell.world_size,
            "global_batch": cell.global_batch,
            "per_gpu_batch": cell.per_gpu_batch,
            "swept": cell.swept,
            "script": str(Path(folder.path) / plan.script_name(cell)),
        }
        for cell in plan.cells
    ]
    return {
        "study": plan.matrix.study,
        "folder": str(folder.path),
        "runs": cost.runs,
        "repeats": plan.matrix.repeats,
        "gpu_hours": cost.gpu_hours_max,
        "node_hours": cost.node_hours_max,
        "gpus": cost.gpus_max,
        "nodes": cost.nodes_max,
        "time_limit_s": plan.matrix.cluster.time_limit,
        "warnings": plan.warnings,
        "site": site and {"path": site.path, "inherited": site.values},
        "cells": cells,
    }
