"""Expand a matrix into cells: the product of axes and batches, minus exclude, plus include.

A cell that belongs to two series is planned once and is a member of both. For example, a global
batch of 352 and a per-GPU batch of 22 are the same cell on 16 GPUs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from ddp_scaling_bench.known_models import default_sizes
from ddp_scaling_bench.train.options import OPTIONS

from ..extras import EXTRAS
from .cell import (
    BUILT_IN,
    PER_NODE,
    Cell,
    Command,
    Membership,
    Mode,
    Point,
    Resources,
    canonical,
    name_of,
    value_text,
)
from .checks import check_commands, check_device, check_directives, check_hosts, runnable_points, variant_of
from .document import Document, Place
from .field_types import at_size
from .schema import BATCH_KEYS, Matrix
from .warnings import UnusedExclusion
from .workload import RECORDER, names_in, used_options

MAX_CELLS = 100_000
MAX_RUNS = 1_000_000

#: Marks ranks per node that are taken from the `processes` of each host in cluster.hosts.
_FROM_HOSTS = "from cluster.hosts"
_SIZE_AND_LAUNCH = ("nodes", "gpus_per_node", "tasks_per_node", "model_parallel", "backend", "launcher")
_Batch = tuple[Mode, int, Place]


def expand(matrix: Matrix, document: Document) -> list[Cell]:
    """Return the cells of a matrix in the order of its axes.

    Warnings are added to the document.

    Raises:
        InputError: all problems of the document: duplicate values, indivisible batches,
            combinations that cannot run, too many cells or none.
    """
    check_commands(matrix, document)
    check_directives(matrix, document)
    check_device(matrix, document)
    check_hosts(matrix, document)
    points = runnable_points(_Enumeration(matrix, document).points(), matrix, document)
    document.raise_problems()
    cells = _cells(points, matrix, document)
    document.raise_problems()
    return cells


class _Enumeration:
    """Enumerate the points of a matrix; add problems and warnings to the document."""

    def __init__(self, matrix: Matrix, document: Document) -> None:
        self.matrix = matrix
        self.document = document
        self.axes = self._axes()
        self.batches: list[_Batch] = [
            (scaling.mode, batch, ("scaling", i, scaling.batch_key, j))
            for i, scaling in enumerate(matrix.scaling)
            for j, batch in enumerate(scaling.batches)
        ]

    def points(self) -> list[Point]:
        """Return every point once, in the order of the axes, followed by the points of ``include``."""
        self._check_duplicates()
        self._check_batch_keys()
        self._check_size()
        points = self._without_excluded(list(self._product(self.axes, self.batches)))
        points += self._included(points)
        if not points and not self.document.problems:
            what = "the matrix has no cell left"
            self.document.add_problem(
                ("exclude",), what, "remove entries of exclude, or add values to the axes"
            )
        return points

    def _axes(self) -> dict[str, list[Any]]:
        matrix, given = self.matrix, self.matrix.axes.given
        device = matrix.workload.device
        wrong = "tasks_per_node" if matrix.size_axis == "gpus_per_node" else "gpus_per_node"
        if wrong in given:
            what = f"axes.{wrong} does not fit workload.device {device}"
            remedy = f"use {matrix.size_axis}, or change workload.device"
            self.document.add_problem(("axes", wrong), what, remedy)
        cluster = matrix.cluster
        hosts_decide = "hosts" in cluster.scheduler.keys and any(
            host.processes for host in cluster.hosts or []
        )
        defaults: dict[str, list[Any]] = {
            "nodes": given.get("nodes") or [1],
            PER_NODE: given.get(matrix.size_axis) or [_FROM_HOSTS if hosts_decide else 1],
            "model_parallel": given.get("model_parallel") or [1],
            "backend": given.get("backend") or ["nccl" if device == "cuda" else "gloo"],
            "launcher": given.get("launcher") or [cluster.scheduler.launchers[0]],
        }
        return defaults | {name: values for name, values in given.items() if name not in _SIZE_AND_LAUNCH}

    def _check_duplicates(self) -> None:
        self._check_command_names()
        for name, values in self.axes.items():
            key = self.matrix.size_axis if name == PER_NODE else name
            known: set[str] = set()
            for index, value in enumerate(values):
                if canonical(value) in known:
                    what = f"axes.{key} contains {value_text(value)} twice"
                    self.document.add_problem(("axes", key, index), what, "remove one of these values")
                known.add(canonical(value))
        seen: dict[tuple[str, int], Place] = {}
        for mode, batch, place in self.batches:
            first = seen.setdefault((mode, batch), place)
            if first != place:
                line = self.document.line(first)
                key = next(part for part in place if part in BATCH_KEYS)
                what = f"{mode} {key} {batch} is given twice (first in line {line})"
                self.document.add_problem(place, what, "remove one")

    def _check_batch_keys(self) -> None:
        """Record a problem for each batch per GPU of a matrix in which several ranks share a batch."""
        matrix = self.matrix
        given = [*self.axes["model_parallel"], *(entry.model_parallel or 1 for entry in matrix.include)]
        for section in ("scaling", "exclude", "include") if max(given) > 1 else ():
            for i, entry in enumerate(getattr(matrix, section)):
                if entry.per_gpu_batch is not None:
                    what = f"{section}[{i}].per_gpu_batch: ranks of a replica share a batch (model_parallel)"
                    remedy = "write per_replica_batch: samples per replica and micro-batch"
                    self.document.add_problem((section, i, "per_gpu_batch"), what, remedy)

    def _check_command_names(self) -> None:
        """Record a problem if one name is given to two commands, or two names to one command."""
        given: list[tuple[Place, Command]] = [
            (("axes", "command", i), command) for i, command in enumerate(self.axes.get("command", []))
        ]
        for i, entry in enumerate(self.matrix.include):
            if command := entry.given.get("command"):
                given.append((("include", i, "command"), command))
        seen: list[tuple[Place, Command]] = []
        for place, command in given:
            for first, other in seen:
                line = self.document.line(first)
                if command.name is not None and command.name == other.name and command.words != other.words:
                    what = f"the name {command.name!r} is given to two commands (first in line {line})"
                    self.document.add_problem(place, what, "choose another name")
                elif command.words == other.words and command.name not in (None, other.name):
                    what = f"{command} is the same command as {other} (line {line})"
                    self.document.add_problem(place, what, "remove one of them, or use one name")
            seen.append((place, command))

    def _check_size(self) -> None:
        """Raise InputError if there are too many cells to enumerate."""
        cells = math.prod(len(values) for values in self.axes.values()) * len(self.batches)
        repeats: Any = self.matrix.repeats
        runs = cells * (max(repeats.values()) if isinstance(repeats, dict) else repeats)
        if cells <= MAX_CELLS and runs <= MAX_RUNS:
            return
        lengths = [(name, len(values)) for name, values in self.axes.items() if len(values) > 1]
        names = {PER_NODE: self.matrix.size_axis}
        parts = [f"{names.get(name, name)} {length}" for name, length in lengths]
        sizes = " x ".join([*parts, f"batches {len(self.batches)}"])
        what = f"the axes span {cells} cells ({sizes}), {runs} runs"
        remedy = f"a study can have {MAX_CELLS} cells and {MAX_RUNS} runs at most; split it"
        self.document.add_problem(("axes",), what, remedy)
        self.document.raise_problems()

    def _ranks_of_hosts(self, nodes: int) -> int | list[int]:
        """Return the ranks per node of the first ``nodes`` hosts."""
        counts = [host.processes or 1 for host in (self.matrix.cluster.hosts or [])[:nodes]]
        return counts[0] if len(set(counts)) == 1 else counts

    def _product(self, axes: dict[str, list[Any]], batches: Sequence[_Batch]) -> Iterator[Point]:
        for combination in itertools.product(*axes.values()):
            values = dict(zip(axes, combination, strict=True))
            if values[PER_NODE] is _FROM_HOSTS:
                values[PER_NODE] = self._ranks_of_hosts(values["nodes"])
            for mode, batch, place in batches:
                yield Point(values, mode, batch, place)

    def _selection(self, section: str, index: int, given: dict[str, Any]) -> dict[str, Any]:
        """Return an exclude or include entry, with its size axis renamed to :data:`PER_NODE`."""
        entry = {}
        for key, value in given.items():
            axis = PER_NODE if key in ("gpus_per_node", "tasks_per_node") else key
            if axis == PER_NODE and key != self.matrix.size_axis:
                what = f"{section}[{index}].{key} does not fit workload.device {self.matrix.workload.device}"
                self.document.add_problem((section, index, key), what, f"use {self.matrix.size_axis}")
            if key.startswith("args.") and key not in self.axes:
                what = f"{section}[{index}].{key} is not an axis"
                remedy = f"add `{key}: [VALUE]` below `axes:`, or correct the name"
                self.document.add_problem((section, index, key), what, remedy)
            if key == "command":
                value = variant_of(value, self.axes.get("command", [])) or value
            entry[axis] = value
        return entry

    def _without_excluded(self, points: list[Point]) -> list[Point]:
        entries = [self._selection("exclude", i, entry.given) for i, entry in enumerate(self.matrix.exclude)]
        used: set[int] = set()
        kept = []
        for point in points:
            hits = [i for i, entry in enumerate(entries) if _matches(entry, point)]
            used.update(hits)
            if not hits:
                kept.append(point)
        self.document.warnings += [
            UnusedExclusion(index=i, path=self.document.path, line=self.document.line(("exclude", i)))
            for i in range(len(entries))
            if i not in used
        ]
        return kept

    def _included(self, present: list[Point]) -> list[Point]:
        known = {point.key for point in present} if self.matrix.include else set()
        added: list[Point] = []
        for i, selection in enumerate(self.matrix.include):
            entry = self._selection("include", i, selection.given)
            for point in self._points_of_include(i, entry):
                if point.key in known:
                    what = f"include[{i}] adds a cell that the matrix already contains"
                    self.document.add_problem(("include", i), what, "remove it")
                    break
                known.add(point.key)
                added.append(point)
            if len(added) > MAX_CELLS:
                what = f"include adds more than {MAX_CELLS} cells"
                self.document.add_problem(("include", i), what, "split the study")
                break
        return added

    def _points_of_include(self, index: int, entry: dict[str, Any]) -> Iterator[Point]:
        """Yield the points of an include entry; an axis that the entry omits takes all its values."""
        batches = self._batches_of_include(index, entry)
        axes = {name: [entry[name]] if name in entry else values for name, values in self.axes.items()}
        axes |= {
            name: [entry[name]] for name in entry if name not in axes and name not in ("mode", *BATCH_KEYS)
        }
        yield from self._product(axes, batches)

    def _batches_of_include(self, index: int, entry: dict[str, Any]) -> list[_Batch]:
        place: Place = ("include", index)
        given = [key for key in BATCH_KEYS if key in entry]
        mode = entry.get("mode")
        if len(given) > 1:
            what = f"include[{index}] has two batches"
            self.document.add_problem(
                place, what, "give one; global_batch is for strong, the others for weak"
            )
            return []
        if given:
            own = BATCH_KEYS[given[0]]
            if mode not in (None, own):
                what = f"include[{index}]: mode {mode} does not fit {given[0]}"
                self.document.add_problem((*place, given[0]), what, f"use mode {own}")
            return [(own, entry[given[0]], (*place, given[0]))]
        batches = [batch for batch in self.batches if mode in (None, batch[0])]
        if not batches:
            what = f"include[{index}]: scaling has no batch of mode {mode}"
            key = next(key for key, own in BATCH_KEYS.items() if mode in (None, own))
            self.document.add_problem(place, what, f"add {key} to the entry")
        return batches


def _matches(entry: dict[str, Any], point: Point) -> bool:
    """Return whether a point has all values of an exclude entry."""
    batch = {key: point.batch for key, mode in BATCH_KEYS.items() if mode == point.mode}
    values = {**point.values, **batch, "mode": point.mode}
    return all(values.get(key) == value for key, value in entry.items())


def _cells(points: Sequence[Point], matrix: Matrix, document: Document) -> list[Cell]:
    swept_names = _swept_names(points, matrix)
    settings = _SettingsOfPoints(matrix)
    cells: dict[str, Cell] = {}
    for point in points:
        swept = {name: _swept_value(point.values[name]) for name in swept_names if name in point.values}
        cell = _cell(point, swept, settings.of(point), matrix)
        known = cells.setdefault(cell.cell_id, cell)
        if known.swept != swept:
            _add_name_clash(known.swept, swept, document)
        parts = [point.mode, str(point.batch), cell.backend, cell.launcher]
        known.series.append(Membership(name_of(parts, swept), point.mode, point.batch))
    return list(cells.values())


def _swept_value(value: Any) -> Any:
    return value.swept if isinstance(value, Command) else value


def _add_name_clash(one: dict[str, Any], other: dict[str, Any], document: Document) -> None:
    """Record a problem: two cells have the same name, because the digests of their values collide."""
    axis = next(name for name in other if one.get(name) != other[name])
    values = f"{value_text(one.get(axis))!r} and {value_text(other[axis])!r}"
    what = f"axes.{axis}: {values} would give two cells the same name"
    document.add_problem(("axes", axis), what, "use shorter values, or letters and digits only")


def _swept_names(points: Sequence[Point], matrix: Matrix) -> list[str]:
    """Return the axes that vary between cells, except size, backend and launcher."""
    defaults: dict[str, Any] = dict(matrix.workload)
    defaults |= {f"env.{name}": value for name, value in matrix.cluster.env.items()}
    names = dict.fromkeys(name for point in points for name in point.values)
    swept = []
    for name in names:
        if name not in ("nodes", PER_NODE, "backend", "launcher"):
            found = {canonical(point.values.get(name, defaults.get(name))) for point in points}
            if len(found) > 1:
                swept.append(name)
    return swept


#: The first letters of the axes, besides workload options, on which the settings of a cell depend.
_OF_SETTINGS = ("env.", "args.", "model_parallel")


class _SettingsOfPoints:
    """Compute the command, options and environment of points; points with equal ones share one object."""

    def __init__(self, matrix: Matrix) -> None:
        self._options = matrix.workload
        self._values = {name: getattr(matrix.workload, name) for name in (*OPTIONS, "command")}
        self._env = dict(matrix.cluster.env)
        self._known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def of(self, point: Point) -> dict[str, Any]:
        chosen: tuple[tuple[str, Any], ...] = tuple(
            (name, value)
            for name, value in point.values.items()
            if name in self._values or name.startswith(_OF_SETTINGS)
        )
        known = self._known.get(chosen)
        if known is None:
            known = self._known[chosen] = self._settings(dict(chosen))
        return known

    def _settings(self, chosen: dict[str, Any]) -> dict[str, Any]:
        variables = {name for name in chosen if name.startswith("env.")}
        env = self._env | {name.removeprefix("env."): chosen[name] for name in variables}
        values = self._values | chosen
        command: Command = values["command"] or Command(BUILT_IN)
        is_built_in = command.words == BUILT_IN
        if is_built_in:
            values |= default_sizes(values)
        metrics = (RECORDER if is_built_in else self._options.metrics).as_json()
        if self._options.exchange and not is_built_in:
            metrics["exchange"] = self._options.exchange
        if metrics.get("units", {}).get("throughput") == "tokens/s":
            metrics.setdefault("tokens_per_sample", values["seq_len"])
        options = {name: values[name] for name in used_options(command.words)}
        written = {name: values[name] for name in names_in(command.words) if name in options}
        options |= {name: values[name] for name in names_in(command.words) if name.startswith("args.")}
        if values["parameters"] and "source" not in metrics:  # see bench.study.together
            options["parameters"] = values["parameters"]
        return {
            "argv": list(command.words),
            "name": command.name or "",
            "planned_epochs": values["epochs"] if is_built_in else None,
            "packages": list(EXTRAS["train"]) if is_built_in else [],
            "metrics": metrics,
            "workload": options,
            "texts": {name: one.text for name, one in written.items() if hasattr(one, "text")},
            "env": env,
        }


def _cell(point: Point, swept: dict[str, Any], settings: dict[str, Any], matrix: Matrix) -> Cell:
    values, ranks = point.values, point.ranks
    accumulation = settings["workload"]["grad_accum"]
    batches = point.replicas * accumulation
    per_gpu = point.batch if point.mode == "weak" else point.batch // batches
    size = f"n{values['nodes']}x{value_text(values[PER_NODE])}"
    cell = Cell(
        cell_id=name_of([size, values["backend"], values["launcher"], f"b{per_gpu}"], swept),
        launcher=values["launcher"],
        backend=values["backend"],
        nodes=values["nodes"],
        tasks_per_node=values[PER_NODE],
        world_size=ranks,
        per_gpu_batch=per_gpu,
        global_batch=per_gpu * batches,
        swept=swept,
        model_parallel=values["model_parallel"],
        command_per=matrix.workload.command_per if values["launcher"] == "own" else "",
        **settings,
    )
    cell.repeats = at_size(matrix.repeats, cell.size)
    cluster = matrix.cluster.at(cell.size)
    names = cluster.scheduler.keys.intersection(Resources._fields)
    cell.resources = Resources(cluster.time_limit, **{name: getattr(cluster, name) for name in names})
    return cell
