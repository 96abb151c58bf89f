"""Plan a study: the cells of a matrix, its runs in seeded order, scripts and warnings.

Only :func:`write_plan` has side effects. Planning needs no network, Slurm or torch, and the
same matrix gives the same plan and byte-identical scripts on every machine.
"""

from __future__ import annotations

import json
import os
import random
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_scaling_bench.errors import BenchError, unwritable
from ddp_scaling_bench.files import owner_readable, owner_writable, write_atomically
from ddp_scaling_bench.units import join_names, short_name
from ddp_scaling_bench.variables import is_shown
from ddp_scaling_bench.version import __version__

from .jobs.slurm.parsing import expand_hosts
from .matrix.cell import Cell, Resources, Run, shown_command, value_text
from .matrix.checks import plan_warnings
from .matrix.document import Document
from .matrix.expansion import expand
from .matrix.load import load_matrix
from .matrix.schema import Container, Matrix
from .matrix.warnings import LongNodelist, PlanWarning
from .package import package_name, write_package
from .render import Renderer
from .study.layout import StudyFolder
from .study.ledger import RunState
from .study.plan_json import find_plan, open_study, physical_values, place_of, write_plan_json


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


def make_plan(path: Path, *, site: Path | None = None) -> Plan:
    """Plan the study of a matrix file, with the defaults of a site file if one is given.

    Raises:
        BenchError: a file cannot be read.
        InputError: the matrix has problems; the message lists all of them.
    """
    matrix, document = load_matrix(path, site=site)
    cells = expand(matrix, document)
    runs = ordered_runs(cells, seed=matrix.seed)
    warnings = [*document.warnings, *plan_warnings(matrix, document, cells)]
    hosts, nodes = len(expand_hosts(matrix.cluster.nodelist or "")), min(cell.nodes for cell in cells)
    if hosts > nodes:
        line = document.line(("cluster", "nodelist"))
        warnings.append(LongNodelist(hosts=hosts, nodes=nodes, path=document.path, line=line))
    return Plan(matrix, document, cells, runs, warnings)


def ordered_runs(cells: Sequence[Cell], *, seed: int) -> list[Run]:
    """Return every repeat of every cell in seeded random order, round by round.

    Each round contains every cell once (randomised complete blocks). A cell's repeats are spread
    over the whole study, so that a slow hour affects all cells alike.
    """
    order = random.Random(seed)
    runs: list[Run] = []
    for repeat in range(1, max((cell.repeats for cell in cells), default=0) + 1):
        ids = [cell.cell_id for cell in cells if cell.repeats >= repeat]
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
    return Renderer(plan.matrix).render_pack(plan.cells)


def write_plan(plan: Plan, root: Path) -> StudyFolder:
    """Write the matrix, scripts and plan.json of a study below ``root``; return the study's folder.

    If ``cluster.env`` sets a variable that is not shown, only the owner can read the files.

    Planning again is safe: a study can grow (more sizes, more repeats), but a cell that has results, or
    that may be running, cannot change.

    Raises:
        BenchError: the folder contains results of another matrix, or cannot be written.
    """
    folder = StudyFolder(root / plan.matrix.study)
    old = find_plan(folder)
    # The key distinguishes the study's jobs from jobs of a study with the same name elsewhere.
    matrix = os.path.relpath(plan.document.path, folder.path)
    content = {
        **plan_content(plan),
        "matrix_file": matrix,
        "key": (old or {}).get("key") or secrets.token_hex(3),
    }
    _check_existing_results(folder, old, plan)
    inherited = plan.document.site if plan.document.site and plan.document.site.values else None
    private = not all(map(is_shown, plan.matrix.cluster.env))
    try:
        folder.scripts.mkdir(mode=0o755, parents=True, exist_ok=True)  # only the owner may replace scripts
        write_package(folder.package)
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
        times = folder.plan_json.stat() if _differ_in_targets_only(old, content) else None
        write_plan_json(folder, content, private=private)
        if times:  # the runs are the same, so this is no new plan
            os.utime(folder.plan_json, ns=(times.st_atime_ns, times.st_mtime_ns))
    except OSError as error:
        raise unwritable(Path(error.filename or folder.path), error) from None
    return folder


def _differ_in_targets_only(old: dict[str, Any] | None, new: dict[str, Any]) -> bool:
    """Return whether two plans differ in their targets, and in no value that affects runs."""
    if old is None or (old.get("targets") or []) == new["targets"]:
        return False
    texts = [json.dumps({**plan, "targets": [], "matrix": ""}, sort_keys=True) for plan in (old, new)]
    return texts[0] == texts[1]


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
    return {
        "schema": 1,
        "study": plan.matrix.study,
        "matrix": plan.document.text,
        "bench_version": __version__,
        "package": package_name(),
        "executor": plan.matrix.cluster.executor,
        "hosts": [host.model_dump() for host in plan.matrix.cluster.hosts or []],
        "device": plan.matrix.workload.device,
        "seed": plan.matrix.seed,
        "stop_after_measurement": plan.matrix.cluster.stop_after_measurement,
        "cpus_per_task": plan.matrix.cluster.cpus_per_task,
        "nodelist": plan.matrix.cluster.nodelist,
        "node_gpus": plan.matrix.cluster.node_gpus,
        "max_running": plan.matrix.max_running,
        "setup": plan.matrix.cluster.setup,
        "env_from": plan.matrix.cluster.env_from,
        "container": plan.matrix.cluster.container is not None,
        "image": _image(plan.matrix.cluster.container),
        "gpu_request": plan.matrix.cluster.gpu_request,
        "expected": dict(plan.matrix.expected),
        # For sizes that are not planned, such as those of `bench advise`.
        "by_size": {
            name: value
            for name in Resources._fields
            if isinstance(value := getattr(plan.matrix.cluster, name, None), dict)
        },
        # The settings that come from the site file; the whole file is stored as site.yaml.
        "inherited": plan.document.site.values if plan.document.site else {},
        "warnings": [one.as_json() for one in plan.warnings],
        "series": _series(plan.cells),
        "targets": [target.given for target in plan.matrix.targets],
        "cells": [{**cell.as_json(), "script": plan.script_name(cell)} for cell in plan.cells],
        "runs": [
            {"run_id": r.run_id, "cell_id": r.cell_id, "repeat": r.repeat, "order": r.order}
            for r in plan.runs
        ],
    }


def _image(container: Container | list[str] | None) -> str:
    """Return the image of a container, or the words that start it; empty without one."""
    return container.image if isinstance(container, Container) else shown_command(container or [])


def _series(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    series: dict[str, dict[str, Any]] = {}
    for cell in cells:
        for member in cell.series:
            if member.series in series:
                continue
            unit = "replica" if cell.model_parallel > 1 else "rank"
            batch = (
                f"global batch {member.batch}" if member.mode == "strong" else f"{member.batch} per {unit}"
            )
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
        remedy = f"restore plan.json, {remedy}"
        raise BenchError(f"{folder.path}: contains runs but no readable plan.json", remedy=remedy)
    new = {cell.cell_id: physical_values(cell.as_json()) for cell in plan.cells}
    tried = {path.name for path in folder.runs.iterdir()}
    cells = {run["cell_id"] for run in old["runs"] if run["run_id"] in tried}
    known_runs = {run.run_id for run in plan.runs}
    given = {*plan.matrix.workload.model_fields_set, *plan.matrix.axes.given}
    with_results: set[str] | None = None  # the ledger is read if a cell has changed
    for cell in old["cells"]:
        if cell["cell_id"] in cells:
            where = f"{plan.document.path}: study {name}"
            if (planned := new.get(cell["cell_id"])) is None:
                what = f"{where} has runs of cell {cell['cell_id']}, which this matrix omits"
                raise BenchError(what, remedy=remedy)
            if changes := _changes(physical_values(cell), planned):
                if with_results is None:
                    with_results = _cells_with_results(folder)
                if cell["cell_id"] not in with_results:
                    continue
                # Changes of this matrix come before those of defaults.
                changes.sort(key=lambda text: re.split("[. ]", text)[0] not in given)
                what = f"{where} has results of cell {cell['cell_id']}, which this matrix changes"
                raise BenchError(f"{what} ({join_names(changes, most=1)})", remedy=remedy)
    lost = sorted(
        run["run_id"] for run in old["runs"] if run["run_id"] in tried and run["run_id"] not in known_runs
    )
    if lost:
        raise BenchError(f"study {name} has results of run {lost[0]}, which this matrix omits", remedy=remedy)


def _cells_with_results(folder: StudyFolder) -> set[str]:
    """Return the cells with a run that is not known to have ended without a result."""
    study = open_study(folder)
    states = study.records()
    without = (RunState.PLANNED, RunState.FAILED, RunState.CANCELLED)
    return {run.cell_id for run in study.runs if states[run.run_id].state not in without}


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], within: str = "") -> list[str]:
    """Return each value that differs, such as ``epochs from 2 to 3``."""
    found: list[str] = []
    for name in {**before, **now}:
        old, new = before.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += _changes(old, new, f"{within}{name}.")
        elif old != new:
            texts = [short_name(value_text(value)) for value in (old, new)]
            found.append(f"{within}{name} from {' to '.join(texts)}")
    return found


def _remove_stale_scripts(folder: StudyFolder, old: dict[str, Any] | None, plan: Plan) -> None:
    present = {plan.script_name(cell) for cell in plan.cells}
    for cell in (old or {}).get("cells", []):
        script = cell.get("script", "")
        if script not in present and script.startswith("scripts/") and ".." not in script:
            (folder.path / script).unlink(missing_ok=True)
