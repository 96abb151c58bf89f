"""The cost of jobs: GPU-hours and node-hours at most and as expected, in total and by partition.

A job costs at most all GPUs and nodes that it reserves for its whole time limit. Its expected duration comes
from the first of these sources that is known: a step time that the user gives to the command, finished runs
of the same cell, and the step time of the matrix (``expected``). A job whose expected duration is unknown
counts with its time limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

from ddp_scaling_bench.errors import BenchError
from ddp_scaling_bench.units import count, human_duration

from .matrix.cell import Cell
from .matrix.field_types import at_size
from .study.conditions import parse_moment
from .study.ledger import Record, RunState
from .study.plan_json import PlannedStudy, sizes_of


@dataclass(frozen=True)
class Cost:
    """The cost of some jobs.

    ``gpu_hours`` counts all GPUs that the jobs reserve: with whole nodes, all GPUs of each node. If their
    number is unknown, ``exact`` is False and ``gpu_hours`` is a lower bound. ``requested_gpu_hours`` counts
    only GPUs that the jobs request. The expected hours include jobs of unknown duration with their time
    limit; ``known`` is the number of the other jobs.
    """

    jobs: int = 0
    gpu_hours: float = 0.0
    requested_gpu_hours: float = 0.0
    node_hours: float = 0.0
    exact: bool = True
    known: int = 0
    expected_gpu_hours: float = 0.0
    expected_node_hours: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        both = {name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__}
        return Cost(**both | {"exact": self.exact and other.exact})

    def __str__(self) -> str:
        unit, most, expected = "GPU-hours", self.gpu_hours, self.expected_gpu_hours
        if not (self.gpu_hours or self.requested_gpu_hours):
            unit, most, expected = "node-hours", self.node_hours, self.expected_node_hours
        text = f"{'at most' if self.exact else 'at least'} {hours(most)} {unit}"
        if not self.exact:
            text += " (set cluster.node_gpus for the number with exclusive nodes)"
        elif unit == "node-hours":
            text += ", no GPU"
        elif self.requested_gpu_hours != self.gpu_hours:
            text += f" with exclusive nodes, {hours(self.requested_gpu_hours)} without"
        if not self.known:
            return text
        unknown = self.jobs - self.known
        rest = f" ({count(unknown, 'job')} of unknown duration at the time limit)" if unknown else ""
        return f"{text}, expected about {hours(expected)}{rest}"


def hours(value: float) -> str:
    """Format hours: ``4,088`` or ``0.25``."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _samples(cell: Cell) -> int:
    """Return the number of samples of a replica in a step."""
    return cell.per_gpu_batch * int(cell.workload["grad_accum"])


@dataclass(frozen=True)
class Costs:
    """What jobs of a study cost. ``step_times`` are those given to the command, if any."""

    study: PlannedStudy
    step_times: Mapping[int, float] = field(default_factory=dict)
    _steps_of: dict[str, dict[int, tuple[Cell, float]]] = field(default_factory=dict)

    def of(self, jobs: Iterable[Sequence[Cell]]) -> dict[str, Cost]:
        """Return the cost by partition; each job executes its cells one after another on its largest nodes.

        The partition ``""`` is that of executors without partitions, and the default partition.
        """
        found: dict[str, Cost] = {}
        for cells in jobs:
            partition = cells[0].resources.partition or ""
            found[partition] = found.get(partition, Cost()) + self._of_job(cells)
        return found

    def _of_job(self, cells: Sequence[Cell]) -> Cost:
        nodes, node_gpus = max(cell.nodes for cell in cells), self.study.plan.get("node_gpus")
        requested = max(cell.requested_gpus for cell in cells)
        reserved = max(cell.reserved_gpus(node_gpus=node_gpus) for cell in cells)
        limit = sum(cell.resources.time_limit_s for cell in cells) / 3600
        durations = [self.expected_s(cell) for cell in cells]
        pairs = zip(durations, cells, strict=True)
        expected = sum(c.resources.time_limit_s if d is None else d for d, c in pairs) / 3600
        return Cost(
            jobs=1,
            gpu_hours=nodes * reserved * limit,
            requested_gpu_hours=nodes * requested * limit,
            node_hours=nodes * limit,
            exact=not (requested and node_gpus is None and any(cell.resources.exclusive for cell in cells)),
            known=None not in durations,
            expected_gpu_hours=nodes * reserved * expected,
            expected_node_hours=nodes * expected,
        )

    def expected_s(self, cell: Cell) -> float | None:
        """Return the expected duration of a run, at most its time limit, or None if it is unknown.

        A size without a step time has that of the nearest smaller size of its series that has one (else of
        the smallest), times the samples of a replica: strong scaling divides them, weak scaling does not.
        """
        found, steps = None if self.step_times else self._finished.get(cell.cell_id), self.steps(cell)
        known = self._known_steps(cell.series[0].series) if cell.series else {}
        if found is None and known and steps is not None:
            smaller = [size for size in known if size <= cell.size]
            other, step_s = known[max(smaller) if smaller else min(known)]
            found = self._start_up_s(cell.size) + steps * step_s * _samples(cell) / _samples(other)
        return None if found is None else min(found, cell.resources.time_limit_s)

    def _known_steps(self, series: str) -> dict[int, tuple[Cell, float]]:
        """Return the known step times of a series: by size a cell and its step time.

        A stated step time is that of the first size from its key on.
        """
        if series not in self._steps_of:
            own = sorted(self._series[series], key=lambda one: one.size)
            stated = self.step_times or self._stated("step_time")
            firsts = {key: next((one for one in own if one.size >= key), None) for key in sorted(stated)}
            found = {cell.size: (cell, stated[key]) for key, cell in firsts.items() if cell}
            for cell in () if self.step_times else own:
                seconds, steps = self._finished.get(cell.cell_id), self.steps(cell)
                if seconds is not None and steps:
                    found[cell.size] = cell, max(0.0, seconds - self._start_up_s(cell.size)) / steps
            self._steps_of[series] = found
        return self._steps_of[series]

    def _stated(self, name: str) -> dict[int, float]:
        """Return a value of the matrix below ``expected`` by size."""
        value = (self.study.plan.get("expected") or {}).get(name)
        return sizes_of(value if isinstance(value, dict) else {"1": value} if value else {})

    def _start_up_s(self, size: int) -> float:
        stated = self._stated("start_up")
        return float(at_size(stated, size)) if stated else 0.0

    def steps(self, cell: Cell) -> int | None:
        """Return the number of steps of a run, or None if only the command knows it."""
        stops = self.study.plan.get("stop_after_measurement") and not cell.is_unrecorded
        if not (cell.follows_plan or stops):
            return None
        steps, parts, epochs, warm_up = (
            int(cell.workload.get(name) or 0)
            for name in ("steps_per_epoch", "attribution_steps", "epochs", "warmup_steps")
        )
        return warm_up + epochs * (steps + parts)

    @cached_property
    def _series(self) -> dict[str, list[Cell]]:
        found: dict[str, list[Cell]] = {}
        for cell in self.study.cells.values():
            for member in cell.series:
                found.setdefault(member.series, []).append(cell)
        return found

    @cached_property
    def _finished(self) -> dict[str, float]:
        """The median duration of the completed runs of each cell that has some."""
        took: dict[str, list[float]] = {}
        for record in self.study.records().values() if self.study.folder.has_runs else ():
            if (seconds := _duration_s(record)) is not None:
                took.setdefault(self.study.cell_of(record.run_id).cell_id, []).append(seconds)
        return {cell_id: median(own) for cell_id, own in took.items()}


def _duration_s(record: Record) -> float | None:
    if record.state is not RunState.COMPLETED or record.end is None:
        return None
    start, end = (parse_moment(one) for one in (record.end.started_at, record.end.ended_at))
    return (end - start).total_seconds() if start and end else None


def parse_step_times(texts: Sequence[str]) -> dict[int, float]:
    """Parse ``0.35`` or ``4=2.0`` (a size and its step time in seconds).

    Raises:
        BenchError: a text is neither.
    """
    found = {}
    for text in texts:
        size, _, value = text.rpartition("=")
        try:
            key, seconds = int(size or 1), float(value)
        except ValueError:
            key = seconds = 0
        if not (key > 0 and 0 < seconds < float("inf")):
            remedy = "write seconds, such as 0.25, or SIZE=SECONDS (GPUs of the run; nodes on device cpu)"
            raise BenchError(f"--step-time {text!r} is not a step time", remedy=remedy)
        found[key] = seconds
    return found


def total(costs: Mapping[str, Cost]) -> Cost:
    """Return the sum over all partitions."""
    return sum(costs.values(), Cost())


def summary(study: PlannedStudy) -> str:
    """Describe the runs of a study: their number, their sizes and their time limits."""
    cells = list(study.cells.values())
    repeats = {cell.repeats for cell in cells}
    each = f" x {count(min(repeats), 'repeat')} =" if len(repeats) == 1 else ","
    limits = sorted({cell.resources.time_limit_s for cell in cells})
    limit = " to ".join(human_duration(one) for one in dict.fromkeys((limits[0], limits[-1])))
    nodes, gpus = max(c.nodes for c in cells), max(c.nodes * c.requested_gpus for c in cells)
    wall = human_duration(sum(study.cells[run.cell_id].resources.time_limit_s for run in study.runs))
    parts = [f"{count(len(cells), 'cell')}{each} {count(len(study.runs), 'run')}"]
    parts.append(f"up to {nodes} nodes" if nodes > 1 else "1 node")
    if gpus:
        parts.append(f"up to {count(gpus, 'GPU')}")
    return "; ".join([*parts, f"wall limit {limit} per run, {wall} in total"])


def idle_gpus(study: PlannedStudy) -> dict[str, int]:
    """Return the cells whose runs reserve GPUs that they do not use, with the number of these GPUs."""
    if "gpu_request" not in study.scheduler.keys:
        return {}
    node_gpus, found = study.plan.get("node_gpus"), {}
    for cell in study.cells.values():
        used = cell.world_size if cell.device == "cuda" else 0
        if idle := cell.nodes * cell.reserved_gpus(node_gpus=node_gpus) - used:
            found[cell.cell_id] = idle
    return found


def named(costs: Mapping[str, Cost]) -> list[str]:
    """Return a line for each partition if there are several."""
    if len(costs) < 2:
        return []
    ordered = sorted(costs.items(), key=lambda item: (item[1].node_hours, item[0]))
    return [f"partition {name or '(default)'}: {count(cost.jobs, 'job')}, {cost}" for name, cost in ordered]


def hint(study: PlannedStudy) -> str:
    """Return how to get an expected cost."""
    if all(Costs(study).steps(cell) is None for cell in study.cells.values()):
        return "expected cost: known when runs have finished, because only the command knows its steps"
    return "expected cost: give the step time of the smallest size with --step-time, or as expected.step_time"
