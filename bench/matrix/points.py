"""The points of a matrix: the product of its axes and batches, less exclude, plus include."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.errors import InputError, Problem
from bench.matrix.cell import Mode, canonical, word
from bench.matrix.document import Document, Place
from bench.matrix.schema import Matrix

MAX_CELLS = 100_000
MAX_RUNS = 1_000_000
MAX_PROBLEMS = 20

#: The size axis's neutral name: gpus_per_node or tasks_per_node, by the device.
PER_NODE = "per_node"
#: Stands for the ranks per node where cluster.hosts gives them.
_AS_HOSTS_TAKE = "as the hosts take"
_PLACED = ("nodes", "gpus_per_node", "tasks_per_node", "backend", "launcher")
_BATCH_KEYS = ("global_batch", "per_gpu_batch")
_Batch = tuple[Mode, int, Place]


@dataclass(frozen=True, slots=True)
class Point:
    """One element of the product: a value for each axis, and the batch by its mode."""

    values: dict[str, Any]
    mode: Mode
    batch: int
    place: Place

    @property
    def ranks(self) -> int:
        """The world size."""
        per_node = self.values[PER_NODE]
        return sum(per_node) if isinstance(per_node, list) else self.values["nodes"] * per_node

    @property
    def key(self) -> str:
        """Equal for equal points only."""
        return canonical([self.values, self.mode, self.batch])


class Problems:
    """Everything that is wrong with a matrix, collected to be told at once."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self._found = dict.fromkeys(document.problems)

    def add(self, place: Place, what: str, remedy: str = "") -> None:
        """Note a problem at a place of the file."""
        self._found[Problem(self.document.path, self.document.line(place) or 1, what, remedy)] = None

    def stop_if_any(self) -> None:
        """Raise InputError with all problems so far, at most 20 of them."""
        problems = list(self._found)
        if len(problems) > MAX_PROBLEMS:
            rest = len(problems) - MAX_PROBLEMS
            problems = [
                *problems[:MAX_PROBLEMS],
                Problem(self.document.path, None, f"and {rest} more of this kind"),
            ]
        if problems:
            raise InputError(problems)

    def __len__(self) -> int:
        return len(self._found)


def batch_key(mode: Mode) -> str:
    """Return the batch that a mode keeps."""
    return "global_batch" if mode == "strong" else "per_gpu_batch"


class Enumeration:
    """The points of one matrix; what is wrong goes to ``problems``, idle words to ``warnings``."""

    def __init__(self, matrix: Matrix, document: Document, problems: Problems) -> None:
        self.matrix = matrix
        self.document = document
        self.problems = problems
        self.warnings: list[str] = []
        self.axes = self._axes()
        self.batches = list(self._scaling_batches())

    def points(self) -> list[Point]:
        """Return every point once, in the order of the axes, included ones last.

        Raises:
            InputError: values given twice, or more points than anybody means.
        """
        self._refuse_duplicates()
        if self._is_absurd():
            self.problems.stop_if_any()
        points = self._without_excluded(list(self._product(self.axes, self.batches)))
        points += self._included(points)
        if not points and not self.problems:
            self.problems.add(
                ("exclude",), "the matrix has no cell left", "loosen exclude, or widen the axes"
            )
        return points

    def axis_key(self, name: str) -> str:
        """Return an axis's name in the file."""
        return self.matrix.size_axis if name == PER_NODE else name

    def _axes(self) -> dict[str, list[Any]]:
        matrix, given = self.matrix, self.matrix.axes.given
        device = matrix.workload.device
        wrong = "tasks_per_node" if matrix.size_axis == "gpus_per_node" else "gpus_per_node"
        if wrong in given:
            what = f"axes.{wrong} does not fit workload.device {device}"
            self.problems.add(("axes", wrong), what, f"use {matrix.size_axis}, or change workload.device")
        defaults: dict[str, list[Any]] = {
            "nodes": given.get("nodes") or [1],
            PER_NODE: given.get(matrix.size_axis) or [_AS_HOSTS_TAKE if self._counted_hosts else 1],
            "backend": given.get("backend") or ["nccl" if device == "cuda" else "gloo"],
            "launcher": given.get("launcher")
            or ["srun" if matrix.cluster.executor == "slurm" else "torchrun"],
        }
        return defaults | {name: values for name, values in given.items() if name not in _PLACED}

    def _scaling_batches(self) -> Iterator[_Batch]:
        for i, scaling in enumerate(self.matrix.scaling):
            for j, batch in enumerate(scaling.batches):
                yield scaling.mode, batch, ("scaling", i, batch_key(scaling.mode), j)

    def _refuse_duplicates(self) -> None:
        for name, values in self.axes.items():
            self._refuse_twice(("axes", self.axis_key(name)), values)
        seen: dict[tuple[str, int], Place] = {}
        for mode, batch, place in self.batches:
            first = seen.setdefault((mode, batch), place)
            if first != place:
                line = self.document.line(first)
                what = f"{mode} {batch_key(mode)} {batch} is given twice (first in line {line})"
                self.problems.add(place, what, "remove one")

    def _refuse_twice(self, place: Place, values: Sequence[Any]) -> None:
        seen: set[str] = set()
        for index, value in enumerate(values):
            if canonical(value) in seen:
                what = f"axes.{place[-1]} holds {word(value)} twice"
                self.problems.add((*place, index), what, "remove one of them")
            seen.add(canonical(value))

    def _is_absurd(self) -> bool:
        """Note, and return, whether there are too many cells even to look at them."""
        cells = math.prod(len(values) for values in self.axes.values()) * len(self.batches)
        runs = cells * self.matrix.repeats
        if cells <= MAX_CELLS and runs <= MAX_RUNS:
            return False
        long_axes = {
            self.axis_key(name): len(values) for name, values in self.axes.items() if len(values) > 1
        }
        sizes = " x ".join(
            f"{name} {count}" for name, count in {**long_axes, "batches": len(self.batches)}.items()
        )
        what = f"the axes span {cells} cells ({sizes}), {runs} runs"
        remedy = f"at most {MAX_CELLS} cells and {MAX_RUNS} runs are planned; split the study"
        self.problems.add(("axes",), what, remedy)
        return True

    @property
    def _counted_hosts(self) -> bool:
        """Whether the hosts say themselves how many ranks they start."""
        cluster = self.matrix.cluster
        return cluster.executor == "ssh" and any(host.processes for host in cluster.hosts or [])

    def _ranks_of_hosts(self, nodes: int) -> int | list[int]:
        """Return the ranks per node of the first ``nodes`` hosts."""
        counts = [host.processes or 1 for host in (self.matrix.cluster.hosts or [])[:nodes]]
        return counts[0] if len(set(counts)) == 1 else counts

    def _product(self, axes: dict[str, list[Any]], batches: Sequence[_Batch]) -> Iterator[Point]:
        for combination in itertools.product(*axes.values()):
            values = dict(zip(axes, combination, strict=True))
            if values[PER_NODE] is _AS_HOSTS_TAKE:
                values[PER_NODE] = self._ranks_of_hosts(values["nodes"])
            for mode, batch, place in batches:
                yield Point(values, mode, batch, place)

    def _selection(self, section: str, index: int, given: dict[str, Any]) -> dict[str, Any]:
        """Return an entry of exclude or include, its size axis under the neutral name."""
        entry = {}
        for key, value in given.items():
            neutral = PER_NODE if key in ("gpus_per_node", "tasks_per_node") else key
            if neutral == PER_NODE and key != self.matrix.size_axis:
                what = f"{section}[{index}].{key} does not fit workload.device {self.matrix.workload.device}"
                self.problems.add((section, index, key), what, f"use {self.matrix.size_axis}")
            entry[neutral] = value
        return entry

    def _without_excluded(self, points: list[Point]) -> list[Point]:
        entries = [self._selection("exclude", i, entry.given) for i, entry in enumerate(self.matrix.exclude)]
        matched = [False] * len(entries)
        kept = []
        for point in points:
            hits = [i for i, entry in enumerate(entries) if _agrees(entry, point)]
            for i in hits:
                matched[i] = True
            if not hits:
                kept.append(point)
        for i, hit in enumerate(matched):
            if not hit:
                line = self.document.line(("exclude", i))
                self.warnings.append(
                    f"{self.document.path}:{line}: exclude[{i}] matches no cell and does nothing"
                )
        return kept

    def _included(self, present: list[Point]) -> list[Point]:
        known = {point.key for point in present} if self.matrix.include else set()
        added: list[Point] = []
        for i, selection in enumerate(self.matrix.include):
            entry = self._selection("include", i, selection.given)
            for point in self._include_points(i, entry):
                if point.key in known:
                    self.problems.add(("include", i), f"include[{i}] is in the matrix already", "remove it")
                    break
                known.add(point.key)
                added.append(point)
            if len(added) > MAX_CELLS:
                self.problems.add(
                    ("include", i), f"include adds more than {MAX_CELLS} cells", "split the study"
                )
                break
        return added

    def _include_points(self, index: int, entry: dict[str, Any]) -> Iterator[Point]:
        """Yield an entry's points; an axis that it does not name takes all its values."""
        batches = self._include_batches(index, entry)
        axes = {name: [entry[name]] if name in entry else values for name, values in self.axes.items()}
        axes |= {
            name: [entry[name]] for name in entry if name not in axes and name not in ("mode", *_BATCH_KEYS)
        }
        yield from self._product(axes, batches)

    def _include_batches(self, index: int, entry: dict[str, Any]) -> list[_Batch]:
        place: Place = ("include", index)
        given = [key for key in _BATCH_KEYS if key in entry]
        mode = entry.get("mode")
        if len(given) > 1:
            what = f"include[{index}] names both batches"
            self.problems.add(place, what, "give global_batch (strong) or per_gpu_batch (weak)")
            return []
        if given:
            own: Mode = "strong" if given[0] == "global_batch" else "weak"
            if mode not in (None, own):
                what = f"include[{index}]: mode {mode} does not go with {given[0]}"
                self.problems.add((*place, given[0]), what, f"mode {own} does")
            return [(own, entry[given[0]], (*place, given[0]))]
        batches = [batch for batch in self.batches if mode in (None, batch[0])]
        if not batches:
            what = f"include[{index}]: scaling has no batch of mode {mode}"
            self.problems.add(place, what, "name global_batch or per_gpu_batch")
        return batches


def _agrees(entry: dict[str, Any], point: Point) -> bool:
    """Whether a point agrees with all that an exclude entry names."""
    for key, value in entry.items():
        if key == "mode":
            found: Any = point.mode
        elif key in _BATCH_KEYS:
            found = point.batch if key == batch_key(point.mode) else None
        else:
            found = point.values.get(key)
        if found != value:
            return False
    return True
