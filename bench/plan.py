"""Plan a study: the cells of a matrix, its runs in seeded order, scripts, cost and warnings.

Only :func:`write_plan` has side effects. Planning needs no network, Slurm or torch, and the
same matrix gives the same plan and byte-identical scripts on every machine.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddp_scaling_bench.errors import BenchError, unwritable
from ddp_scaling_bench.files import owner_readable, owner_writable, write_atomically
from ddp_scaling_bench.units import count, human_duration, join_names
from ddp_scaling_bench.variables import is_shown
from ddp_scaling_bench.version import __version__

from .matrix.cell import Cell, Run, value_text
from .matrix.checks import idle_gpus, plan_warnings
from .matrix.document import Document
from .matrix.expansion import expand
from .matrix.load import load_matrix
from .matrix.schema import Matrix
from .matrix.warnings import PlanWarning
from .render import Renderer, gpu_option
from .study.layout import StudyFolder
from .study.plan_json import find_plan, place_of, write_plan_json


@dataclass(frozen=True)
class Cost:
    """The maximum cost of a plan, reached if every run uses its whole time limit.

    ``gpu_hours_max`` counts all GPUs that the runs reserve: with whole nodes, all GPUs of each node. If a
    node's number of GPUs is unknown, ``gpu_hours_exact`` is False and ``gpu_hours_max`` is a lower bound.
    ``gpu_hours_without_exclusive`` counts only GPUs that the jobs request. ``idle_gpus`` maps cells to the
    number of GPUs that each of their runs reserves but does not use.
    """

    cells: int
    runs: int
    nodes_max: int
    gpus_max: int
    wall_s_max: int
    gpu_hours_max: float
    gpu_hours_without_exclusive: float
    gpu_hours_exact: bool
    node_hours_max: float
    idle_gpus: dict[str, int]

    def __str__(self) -> str:
        runs = f"{count(self.cells, 'cell')} x {count(self.runs // self.cells, 'repeat')}"
        parts = [f"{runs} = {count(self.runs, 'run')}"]
        parts.append(f"up to {self.nodes_max} nodes" if self.nodes_max > 1 else "1 node")
        if self.gpus_max:
            parts.append(f"up to {count(self.gpus_max, 'GPU')}")
        limit, total = human_duration(self.wall_s_max // self.runs), human_duration(self.wall_s_max)
        return "; ".join([*parts, f"wall limit {limit} per run, {total} in total", self._hours()])

    def _hours(self) -> str:
        if not self.gpu_hours_exact:
            why = "set cluster.node_gpus for the number with exclusive nodes"
            return f"at least {self.gpu_hours_max:g} GPU-hours ({why})"
        if not self.gpu_hours_max:
            return f"at most {self.node_hours_max:g} node-hours, no GPU"
        hours = f"at most {self.gpu_hours_max:g} GPU-hours"
        if self.gpu_hours_without_exclusive != self.gpu_hours_max:
            hours += f" with exclusive nodes, {self.gpu_hours_without_exclusive:g} without"
        return hours


@dataclass(frozen=True)
class Plan:
    """A planned study. ``runs`` are in the order in which they are started."""

    matrix: Matrix
    document: Document
    cells: list[Cell]
    runs: list[Run]
    warnings: list[PlanWarning]

    def script_name(self, cell: Cell) -> str:
        """Return the path of a cell's script, relative to the study's folder."""
        return f"scripts/{cell.cell_id}{self.matrix.cluster.scheduler.suffix}"

    @property
    def exclusive(self) -> bool:
        """True if each run has whole nodes."""
        return "exclusive" in self.matrix.cluster.scheduler.keys and self.matrix.cluster.exclusive

    @property
    def cost(self) -> Cost:
        """The cost if every run uses its whole time limit."""
        limit_s, repeats = self.matrix.cluster.time_limit, self.matrix.repeats
        nodes = sum(cell.nodes for cell in self.cells)
        requested = [cell.reserved_gpus(node_gpus=None) for cell in self.cells]
        node_gpus = self.matrix.cluster.node_gpus if self.exclusive else None
        requests = "gpu_request" in self.matrix.cluster.scheduler.keys
        idle = {cell.cell_id: idle_gpus(cell, node_gpus=node_gpus) for cell in self.cells}
        hours = limit_s * repeats / 3600
        return Cost(
            cells=len(self.cells),
            runs=len(self.runs),
            nodes_max=max((cell.nodes for cell in self.cells), default=0),
            gpus_max=max(requested, default=0),
            wall_s_max=limit_s * len(self.runs),
            gpu_hours_max=round(sum(c.reserved_gpus(node_gpus=node_gpus) for c in self.cells) * hours, 3),
            gpu_hours_without_exclusive=round(sum(requested) * hours, 3),
            gpu_hours_exact=not (self.exclusive and any(requested) and node_gpus is None),
            node_hours_max=round(nodes * hours, 3),
            idle_gpus={cell_id: number for cell_id, number in idle.items() if number and requests},
        )


def make_plan(path: Path, *, site: Path | None = None) -> Plan:
    """Plan the study of a matrix file, with the defaults of a site file if one is given.

    Raises:
        BenchError: a file cannot be read.
        InputError: the matrix has problems; the message lists all of them.
    """
    matrix, document = load_matrix(path, site=site)
    cells = expand(matrix, document)
    runs = ordered_runs(cells, repeats=matrix.repeats, seed=matrix.seed)
    return Plan(matrix, document, cells, runs, _warnings(matrix, document, cells))


def _warnings(matrix: Matrix, document: Document, cells: Sequence[Cell]) -> list[PlanWarning]:
    return [*document.warnings, *plan_warnings(matrix, document, cells)]


def continue_study(plan: Plan, root: Path) -> Plan:
    """Return the plan; if the study exists below ``root``, take `exclusive` from its existing plan.

    Runs on shared nodes and runs on whole nodes cannot be compared, so a study has only one value. The
    existing value applies unless the matrix or its site file sets the key.

    Raises:
        BenchError: the matrix or its site file sets another value.
    """
    folder, cluster = StudyFolder(root / plan.matrix.study), plan.matrix.cluster
    old = find_plan(folder) if folder.has_runs else None
    if old is None or old.get("executor") != cluster.executor or "exclusive" not in cluster.scheduler.keys:
        return plan
    began = bool(old["exclusive"])
    if began == cluster.exclusive:
        return plan
    value = str(began).lower()
    if "exclusive" in cluster.model_fields_set:
        what = f"study {plan.matrix.study} has begun with exclusive: {value}, which this matrix would change"
        remedy = f"set cluster.exclusive: {value}, or give the matrix another `study:` name"
        raise BenchError(f"{plan.document.location(('cluster', 'exclusive'))}: {what}", remedy=remedy)
    matrix = plan.matrix.model_copy(update={"cluster": cluster.model_copy(update={"exclusive": began})})
    return replace(plan, matrix=matrix, warnings=_warnings(matrix, plan.document, plan.cells))


def ordered_runs(cells: Sequence[Cell], *, repeats: int, seed: int) -> list[Run]:
    """Return every repeat of every cell in seeded random order, round by round.

    Each round contains every cell once (randomised complete blocks). A cell's repeats are spread
    over the whole study, so that a slow hour affects all cells alike.
    """
    order = random.Random(seed)
    runs: list[Run] = []
    for repeat in range(1, repeats + 1):
        ids = [cell.cell_id for cell in cells]
        order.shuffle(ids)
        runs += [
            Run(f"{cell_id}-r{repeat}", cell_id, repeat, len(runs) + i) for i, cell_id in enumerate(ids, 1)
        ]
    return runs


def scripts(plan: Plan) -> Iterator[tuple[Cell, str]]:
    """Yield each cell with the text of its script."""
    renderer = Renderer(plan.matrix)
    for cell in plan.cells:
        yield cell, renderer.render(cell)


def pack_script(plan: Plan) -> str:
    """Return the script of `bench submit --pack`, which starts many runs in one allocation."""
    return Renderer(plan.matrix).render_pack(plan.cells, runs=len(plan.runs))


def write_plan(plan: Plan, root: Path) -> StudyFolder:
    """Write the matrix, scripts and plan.json of a study below ``root``; return the study's folder.

    If ``cluster.env`` sets a variable that is not shown, only the owner can read the files.

    Planning again is safe: a study can grow (more sizes, more repeats), but a cell that has results
    cannot change.

    Raises:
        BenchError: the folder contains results of another matrix, or cannot be written.
    """
    plan = continue_study(plan, root)
    folder = StudyFolder(root / plan.matrix.study)
    old = find_plan(folder)
    # The key distinguishes the study's jobs from jobs of a study with the same name elsewhere.
    content = {**plan_content(plan), "key": (old or {}).get("key") or secrets.token_hex(3)}
    _check_existing_results(folder, old, plan)
    inherited = plan.document.site if plan.document.site and plan.document.site.values else None
    private = not all(map(is_shown, plan.matrix.cluster.env))
    try:
        folder.scripts.mkdir(mode=0o755, parents=True, exist_ok=True)  # only the owner may replace scripts
        for cell, text in scripts(plan):
            _write_script(f"{folder.path}/{plan.script_name(cell)}", text, private=private)
        if plan.matrix.cluster.scheduler.packs:
            _write_script(str(folder.pack_script), pack_script(plan), private=private)
        _remove_stale_scripts(folder, old, plan)
        write_atomically(folder.matrix, plan.document.text, private=private)
        if inherited:
            write_atomically(folder.site, inherited.text, private=private)
        else:
            folder.site.unlink(missing_ok=True)
        content["place"] = (old or {}).get("place") or place_of(folder)
        write_plan_json(folder, content, private=private)
    except OSError as error:
        raise unwritable(Path(error.filename or folder.path), error) from None
    return folder


def _write_script(path: str, text: str, *, private: bool) -> None:
    """Write a script; if ``private``, only the owner can read it.

    Files are unbuffered and never overwritten in place, because journalling file systems flush an overwritten
    file immediately.
    """
    Path(path).unlink(missing_ok=True)
    with open(path, "xb", buffering=0, opener=owner_readable if private else owner_writable) as file:
        file.write(text.encode())


def plan_content(plan: Plan) -> dict[str, Any]:
    """Return the content of plan.json."""
    cost = plan.cost
    return {
        "schema": 1,
        "study": plan.matrix.study,
        "matrix": plan.document.text,
        "bench_version": __version__,
        "executor": plan.matrix.cluster.executor,
        "hosts": [host.model_dump() for host in plan.matrix.cluster.hosts or []],
        "device": plan.matrix.workload.device,
        "repeats": plan.matrix.repeats,
        "seed": plan.matrix.seed,
        "time_limit_s": plan.matrix.cluster.time_limit,
        "stop_after_measurement": plan.matrix.cluster.stop_after_measurement,
        "cpus_per_task": plan.matrix.cluster.cpus_per_task,
        "exclusive": plan.exclusive,
        "nodelist": plan.matrix.cluster.nodelist,
        "node_gpus": plan.matrix.cluster.node_gpus,
        "max_running": plan.matrix.max_running,
        "setup": plan.matrix.cluster.setup,
        "env_from": plan.matrix.cluster.env_from,
        "container": plan.matrix.cluster.container is not None,
        "gpu_option": gpu_option(plan.matrix.cluster) if plan.matrix.workload.device == "cuda" else None,
        # The settings that come from the site file; the whole file is stored as site.yaml.
        "inherited": plan.document.site.values if plan.document.site else {},
        "cost": {name: getattr(cost, name) for name in cost.__dataclass_fields__},
        "warnings": [one.as_json() for one in plan.warnings],
        "series": _series(plan.cells),
        "cells": [{**cell.as_json(), "script": plan.script_name(cell)} for cell in plan.cells],
        "runs": [
            {"run_id": r.run_id, "cell_id": r.cell_id, "repeat": r.repeat, "order": r.order}
            for r in plan.runs
        ],
    }


def _series(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    series: dict[str, dict[str, Any]] = {}
    for cell in cells:
        for member in cell.series:
            if member.series in series:
                continue
            batch = f"global batch {member.batch}" if member.mode == "strong" else f"{member.batch} per rank"
            swept = [f"{name.removeprefix('env.')} {value_text(value)}" for name, value in cell.swept.items()]
            label = ", ".join([f"{member.mode}, {batch}", cell.backend, cell.launcher, *swept])
            series[member.series] = {
                "series": member.series,
                "mode": member.mode,
                "batch": member.batch,
                "launcher": cell.launcher,
                "backend": cell.backend,
                "swept": cell.swept,
                "label": label,
            }
    return list(series.values())


def _check_existing_results(folder: StudyFolder, old: dict[str, Any] | None, plan: Plan) -> None:
    if not folder.has_runs:
        return
    name = plan.matrix.study
    remedy = f"give the matrix another `study:` name, or move {folder.path} away"
    if old is None:
        raise BenchError(f"{folder.path}: contains runs but no readable plan.json", remedy=remedy)
    new = {cell.cell_id: _physical(cell.as_json()) for cell in plan.cells}
    tried = {path.name for path in folder.runs.iterdir()}
    cells = {run["cell_id"] for run in old["runs"] if run["run_id"] in tried}
    known_runs = {run.run_id for run in plan.runs}
    for cell in old["cells"]:
        if cell["cell_id"] in cells:
            what = f"study {name} has results of cell {cell['cell_id']}, which this matrix"
            if (planned := new.get(cell["cell_id"])) is None:
                raise BenchError(f"{what} omits", remedy=remedy)
            if changes := _changes(_physical(cell), planned):
                raise BenchError(f"{what} changes ({join_names(changes, most=3)})", remedy=remedy)
    lost = sorted(
        run["run_id"] for run in old["runs"] if run["run_id"] in tried and run["run_id"] not in known_runs
    )
    if lost:
        raise BenchError(f"study {name} has results of run {lost[0]}, which this matrix omits", remedy=remedy)


def _physical(cell: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a cell in plan.json that affect its runs, by name."""
    others = ["series", "modes", "script", "swept", "workload", "env", "argv", "planned_epochs", "packages"]
    values = {key: value for key, value in cell.items() if key not in others} | {"command": cell.get("argv")}
    variables = {f"env.{key}": value for key, value in (cell.get("env") or {}).items()}
    return {**values, **(cell.get("workload") or {}), **variables}


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [
        f"{name} from {value_text(before.get(name))[:60]} to {value_text(now.get(name))[:60]}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]


def _remove_stale_scripts(folder: StudyFolder, old: dict[str, Any] | None, plan: Plan) -> None:
    present = {plan.script_name(cell) for cell in plan.cells}
    for cell in (old or {}).get("cells", []):
        script = cell.get("script", "")
        if script not in present and script.startswith("scripts/") and ".." not in script:
            (folder.path / script).unlink(missing_ok=True)
