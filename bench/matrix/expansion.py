"""From the matrix to its cells.

A cell that belongs to two series (strong 352 and weak 22 meet at 16 GPUs) comes out
once and is a member of both. Linear in the number of cells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.matrix.cell import Cell, Membership, canonical, name_of, word
from bench.matrix.checks import check_commands
from bench.matrix.document import Document, Place
from bench.matrix.points import PER_NODE, Enumeration, Point, Problems
from bench.matrix.schema import Matrix


@dataclass
class Expansion:
    """The cells of a matrix, and remarks on what the matrix says in vain."""

    cells: list[Cell]
    warnings: list[str] = field(default_factory=list)


def expand(matrix: Matrix, document: Document) -> Expansion:
    """Return the cells of a matrix in the order of its axes.

    Raises:
        InputError: values given twice, batches that do not divide, combinations that
            cannot run, nothing left, or far too much; all of them at once.
    """
    problems = Problems(document)
    check_commands(matrix, problems)
    _check_hosts(matrix, problems)
    enumeration = Enumeration(matrix, document, problems)
    points = enumeration.points()
    steps = _steps(points, matrix)
    runnable = [point for point in points if _is_runnable(point, matrix, document, problems, steps=steps)]
    problems.stop_if_any()
    cells = _cells(runnable, matrix, problems)
    problems.stop_if_any()
    return Expansion(cells, enumeration.warnings)


def _cells(points: Sequence[Point], matrix: Matrix, problems: Problems) -> list[Cell]:
    swept_names = _swept_names(points, matrix)
    settings = _Settings(matrix)
    cells: dict[str, Cell] = {}
    for point in points:
        swept = {name: point.values[name] for name in swept_names if name in point.values}
        cell = _cell(point, swept, settings)
        known = cells.setdefault(cell.cell_id, cell)
        if known.swept != swept:
            _note_namesakes(known.swept, swept, problems)
        parts = [point.mode, str(point.batch), cell.backend, cell.launcher]
        known.series.append(Membership(name_of(parts, swept), point.mode, point.batch))
    return list(cells.values())


def _note_namesakes(one: dict[str, Any], other: dict[str, Any], problems: Problems) -> None:
    """Note two cells of one name: long and odd values stand in it as a digest of 32 bits."""
    axis = next(name for name in other if one.get(name) != other[name])
    what = f"axes.{axis}: {word(one.get(axis))!r} and {word(other[axis])!r} would give two cells one name"
    problems.add(("axes", axis), what, "write one of them shorter, or with letters and digits alone")


def _swept_names(points: Sequence[Point], matrix: Matrix) -> list[str]:
    """Return the axes that tell cells apart beyond size, backend and launcher."""
    defaults: dict[str, Any] = matrix.workload.model_dump()
    defaults |= {f"env.{name}": value for name, value in matrix.cluster.env.items()}
    names = dict.fromkeys(name for point in points for name in point.values)
    swept = []
    for name in names:
        if name not in ("nodes", PER_NODE, "backend", "launcher"):
            found = {canonical(point.values.get(name, defaults.get(name))) for point in points}
            if len(found) > 1:
                swept.append(name)
    return swept


class _Settings:
    """Workload options and environment of a point; equal ones are one object."""

    def __init__(self, matrix: Matrix) -> None:
        self._options = matrix.workload
        self._workload = matrix.workload.resolved()
        self._env = dict(matrix.cluster.env)
        self._known: dict[tuple[Any, ...], tuple[dict[str, Any], dict[str, str]]] = {}

    def of(self, point: Point) -> tuple[dict[str, Any], dict[str, str]]:
        own: tuple[tuple[str, Any], ...] = tuple(
            (name, tuple(value) if isinstance(value, list) else value)
            for name, value in point.values.items()
            if name in self._workload or name == "command" or name.startswith("env.")
        )
        known = self._known.get(own)
        if known is None:
            workload, env = dict(self._workload), dict(self._env)
            for name, chosen in own:
                if name.startswith("env."):
                    env[name.removeprefix("env.")] = chosen
                elif name == "command":
                    workload |= self._options.of_command(list(chosen))
                else:
                    workload[name] = chosen
            known = self._known[own] = (workload, env)
        return known


def _cell(point: Point, swept: dict[str, Any], settings: _Settings) -> Cell:
    values, ranks = point.values, point.ranks
    workload, env = settings.of(point)
    accumulation = workload["grad_accum"]
    per_gpu = point.batch if point.mode == "weak" else point.batch // (ranks * accumulation)
    size = f"n{values['nodes']}x{word(values[PER_NODE])}"
    return Cell(
        cell_id=name_of([size, values["backend"], values["launcher"], f"b{per_gpu}"], swept),
        launcher=values["launcher"],
        backend=values["backend"],
        nodes=values["nodes"],
        tasks_per_node=values[PER_NODE],
        world_size=ranks,
        per_gpu_batch=per_gpu,
        global_batch=per_gpu * ranks * accumulation,
        workload=workload,
        env=env,
        swept=swept,
    )


# -- what cannot run --------------------------------------------------------------------


def _steps(points: Sequence[Point], matrix: Matrix) -> dict[int, int]:
    """Return, for each global batch, what it must be a multiple of to divide at all its sizes."""
    steps: dict[int, int] = {}
    for point in points:
        if point.mode == "strong":
            steps[point.batch] = math.lcm(
                steps.get(point.batch, 1), point.ranks * _accumulation(point, matrix)
            )
    return steps


def _accumulation(point: Point, matrix: Matrix) -> int:
    return int(point.values.get("grad_accum", matrix.workload.grad_accum))


def _is_runnable(
    point: Point, matrix: Matrix, document: Document, problems: Problems, *, steps: dict[int, int]
) -> bool:
    before = len(problems)
    if matrix.cluster.executor == "ssh":
        _check_ssh(point, matrix, problems)
        if len(problems) > before:
            return False
    _check_layout(point, matrix, problems)
    _check_backend(point, matrix, document, problems)
    if matrix.cluster.executor == "local":
        _check_local(point, matrix, problems)
    if point.mode == "strong" and len(problems) == before:
        _check_division(point, matrix, problems, every_size=steps[point.batch])
    return len(problems) == before


def _check_layout(point: Point, matrix: Matrix, problems: Problems) -> None:
    nodes, per_node = point.values["nodes"], point.values[PER_NODE]
    if not isinstance(per_node, list):
        return
    axis = matrix.size_axis
    if len(per_node) != nodes:
        what = f"{axis} {per_node} names {len(per_node)} nodes, but meets nodes {nodes}"
        problems.add(
            ("axes", axis), what, f"exclude {{nodes: {nodes}, {axis}: {per_node}}}, or change axes.nodes"
        )
    if point.values["launcher"] == "srun":
        what = f"{axis} {per_node} differs per node, which launcher srun cannot start"
        problems.add(("axes", axis), what, "use launcher [torchrun] for mixed nodes")


def _check_backend(point: Point, matrix: Matrix, document: Document, problems: Problems) -> None:
    if point.values["backend"] == "nccl" and matrix.workload.device == "cpu":
        backends = matrix.axes.given.get("backend") or []
        place: Place = ("axes", "backend", backends.index("nccl")) if "nccl" in backends else ("include",)
        problems.add(
            place, "backend nccl needs GPUs, but workload.device is cpu", "use gloo, or device: cuda"
        )


def _check_local(point: Point, matrix: Matrix, problems: Problems) -> None:
    nodes, launcher = point.values["nodes"], point.values["launcher"]
    if nodes != 1:
        what = f"nodes {nodes}: executor local has one node, this machine"
        problems.add(("axes", "nodes"), what, f"use nodes [1] and {matrix.size_axis}, or executor slurm")
    if launcher != "torchrun":
        what = f"launcher {launcher}: executor local starts ranks as torchrun does"
        problems.add(("axes", "launcher"), what, "use launcher [torchrun]")


def _check_hosts(matrix: Matrix, problems: Problems) -> None:
    if matrix.cluster.executor == "ssh" and not matrix.cluster.hosts:
        what = "executor ssh needs cluster.hosts"
        problems.add(("cluster", "executor"), what, "write cluster.hosts: [gpu1, gpu2], names that ssh takes")
        problems.stop_if_any()


def _check_ssh(point: Point, matrix: Matrix, problems: Problems) -> None:
    hosts, nodes = matrix.cluster.hosts or [], point.values["nodes"]
    if point.values["launcher"] != "torchrun":
        what = f"launcher {point.values['launcher']} needs Slurm: executor ssh starts torchrun on each host"
        problems.add(("axes", "launcher"), what, "use launcher [torchrun]")
    if nodes > len(hosts):
        names = "1 host" if len(hosts) == 1 else f"{len(hosts)} hosts"
        what = f"nodes {nodes}: cluster.hosts names {names}"
        problems.add(("axes", "nodes"), what, f"add hosts, or use nodes up to {len(hosts)}")
        return
    per_node, axis = point.values[PER_NODE], matrix.size_axis
    counts = per_node if isinstance(per_node, list) else [per_node] * nodes
    for host, count in zip(hosts, counts, strict=False):
        if host.processes is not None and count > host.processes:
            what = f"{axis} {per_node}: host {host.host} takes {host.processes} processes, not {count}"
            problems.add(("axes", axis), what, f"lower {axis}, or leave it out: each host starts its own")


def _check_division(point: Point, matrix: Matrix, problems: Problems, *, every_size: int) -> None:
    """Note a batch that does not divide, with the nearest that divide at every size of the matrix."""
    accumulation = _accumulation(point, matrix)
    ranks, batch = point.ranks, point.batch
    step = ranks * accumulation
    if batch % step == 0:
        return
    per_node = point.values[PER_NODE]
    size = f"nodes {point.values['nodes']} x {matrix.size_axis} {per_node}"
    what = f"global_batch {batch} is not divisible by {ranks} ranks ({size})"
    if accumulation > 1:
        what = f"global_batch {batch} is not divisible by {ranks} ranks ({size}) x grad_accum {accumulation}"
    if every_size <= 100 * batch:  # else no batch near this one serves all sizes
        step = every_size
    below = batch // step * step
    problems.add(point.place, what, f"try {below} or {below + step}" if below else f"try {step}")
