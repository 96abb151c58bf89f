"""Synthetic finished studies, with files exactly as the harness writes them.

The times follow a simple model (compute per sample plus a communication term that grows with the
ranks), so a test can compute the expected results.
"""

import csv
import io
import json
import math
import os
import random
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.checks.fabric import ring_time
from analysis.data.columns import RunRow, ScalingRow, columns_of, table_of
from analysis.stats.measured import Measured
from analysis.tables_in.read import read_table
from analysis.tables_in.study import study_of_table
from bench.jobs.end import end_of
from bench.matrix.cell import BUILT_IN, Cell, Membership, Run
from bench.matrix.load import load_matrix
from bench.matrix.warnings import PlanWarning
from bench.plan import Plan, plan_content
from bench.study.layout import StudyFolder
from bench.study.ledger import End, FailureClass, Ledger, Record, RunState
from bench.study.plan_json import PlannedStudy, write_plan_json
from bench.study.reasons import Said
from bench.study.run_json import next_attempt
from ddp_scaling_bench.checksums import write_sums
from ddp_scaling_bench.records import MEAN_COLUMNS, METRICS_COLUMNS, RANKS_COLUMNS, STEPS_COLUMNS
from ddp_scaling_bench.run_folder import RunFolder
from ddp_scaling_bench.train.options import TrainOptions

CPU_MODEL = "Test CPU @ 2.0 GHz"
#: Values of the transport that gloo does not have.
UNKNOWN = ("network", "algorithm", "version", "gpudirect")
#: The sizes of a sweep's messages (bytes), and the fabric from which its times are computed.
SIZES = [4096 * 4**power for power in range(8)]
ALPHA, BETA = 25e-6, 1 / 5e9
#: Seconds of a step of a rank that is not late, by part.
WORK = {"data_load": 0.001, "forward": 0.003, "backward": 0.005, "optimizer": 0.001, "other": 0.0}
#: An id that no process has, and the times of each attempt that such a process executed.
NO_PROCESS = 2**22 - 1
STARTED, ENDED = "2026-01-02T03:00:00.000Z", "2026-01-02T03:06:00.000Z"
#: The state of a run, its reason and its failure class.
State = tuple[str, str, str | None]

MATRIX = """\
# A study made up for tests
study: {name}
axes:
  nodes: [1, 2, 4]
  backend: [gloo]
scaling:
  - {{mode: strong, global_batch: [64]}}
workload: {{device: cpu}}
repeats: {repeats}
"""


@dataclass
class Timing:
    """The seconds of one step's parts, by a simple model of a machine."""

    sample_s: float = 1e-3
    comm_s: float = 4e-3
    fixed_s: float = 1e-3
    imbalance: float = 0.02

    def parts(self, cell: Cell) -> dict[str, float]:
        """Return data, forward, backward, exposed, wait, optimizer and other of the mean rank."""
        work = cell.per_gpu_batch * self.sample_s
        ranks = cell.world_size
        exposed = self.comm_s * 2 * (ranks - 1) / ranks + self.comm_s * 0.2 * math.log2(ranks)
        wait = work * self.imbalance if ranks > 1 else 0.0
        return {
            "data": 0.03 * work,
            "forward": 0.32 * work,
            "backward": 0.6 * work,
            "exposed": exposed + wait,
            "wait": wait,
            "optimizer": self.fixed_s,
            "other": 0.05 * work,
        }


@dataclass
class StudyBuilder:
    """Write a study folder. ``state`` gives the ends of runs that have not completed."""

    path: Path
    cells: Sequence[Cell]
    repeats: int = 3
    epochs: int = 3
    noise: float = 0.01
    seed: int = 1
    steps: int = 50
    timing: Timing = field(default_factory=Timing)
    state: Callable[[Cell, int], State | None] = lambda cell, repeat: None
    warnings: Sequence[PlanWarning] = ()
    ranks_files: bool = True  # otherwise ranks.csv and steps.csv have no rows
    env: Callable[[Cell], dict[str, Any]] | None = None

    def write(self) -> Path:
        """Write plan.json, matrix.yaml, the ledger and every run's files; return the folder."""
        folder = StudyFolder(self.path)
        folder.runs.mkdir(parents=True)
        folder.matrix.write_text(MATRIX.format(name="planned", repeats=self.repeats), encoding="utf-8")
        matrix, document = load_matrix(folder.matrix)
        text = MATRIX.format(name=self.path.name, repeats=self.repeats)
        folder.matrix.write_text(text, encoding="utf-8")
        names = [(f"{cell.cell_id}-r{r}", cell, r) for r in range(1, self.repeats + 1) for cell in self.cells]
        runs = [Run(name, cell.cell_id, r, order) for order, (name, cell, r) in enumerate(names, 1)]
        cells = [replace(cell, repeats=self.repeats) for cell in self.cells]
        plan = Plan(matrix, document, cells, runs, list(self.warnings))
        write_plan_json(folder, plan_content(plan) | {"study": self.path.name, "matrix": text})
        noise = random.Random(self.seed)
        by_id = {cell.cell_id: cell for cell in self.cells}
        records = [self._write_run(folder, by_id[run.cell_id], run, noise) for run in runs]
        Ledger(folder.ledger).append([record for record in records if record])
        return self.path

    def _write_run(self, folder: StudyFolder, cell: Cell, run: Run, noise: random.Random) -> Record | None:
        """Write the files of a run; return its line in the ledger, or None if it was not started."""
        state, reason, failure = self.state(cell, run.repeat) or ("completed", "", None)
        if state == "planned":
            return None
        place = folder.attempt(run.run_id, 1)
        place.path.mkdir(parents=True)
        job = {"job_name": f"{self.path.name}.{run.run_id}.1", "job_id": str(1000 + run.order)}
        record = Record(run_id=run.run_id, attempt=1, state=RunState(state), remark=reason, **job)
        description = {
            "schema": 2,
            "study": self.path.name,
            **asdict(run),
            "attempt": 1,
            "executor": "slurm",
            "job_name": job["job_name"],
            "submitted_at": "2026-01-02T03:00:00.000Z",
        }
        place.cell.write_text(json.dumps(cell.as_json()))
        place.run_json.write_text(json.dumps(description, ensure_ascii=False, indent=1), encoding="utf-8")
        if state == "completed":
            factor = math.exp(noise.gauss(0.0, self.noise))
            rows = [
                self.epoch(cell, e, factor * math.exp(noise.gauss(0, self.noise / 3)))
                for e in range(self.epochs)
            ]
            place.metrics_csv.write_text(table(METRICS_COLUMNS, rows), encoding="utf-8")
            place.env.write_text(json.dumps((self.env or environment)(cell), indent=1), encoding="utf-8")
            ranks, steps = (self.rank_rows(cell), self.step_rows(cell)) if self.ranks_files else ((), ())
            place.ranks_csv.write_text(table(RANKS_COLUMNS, ranks), encoding="utf-8")
            place.steps_csv.write_text(table(STEPS_COLUMNS, steps), encoding="utf-8")
            write_sums(place)
        if not record.state.ended:
            return record
        return record.ended(
            End(
                state=record.state,
                reasons=(Said(text=reason),) if reason else (),
                failure_class=FailureClass(failure) if failure else None,
                exit_code={"completed": 0, "failed": 1}.get(state),
                started_at="2026-01-02T03:04:05.000Z",
                ended_at="2026-01-02T03:06:05.000Z",
            )
        )

    def epoch(self, cell: Cell, number: int, factor: float) -> dict[str, float]:
        """Return one row of metrics.csv; windows agree, so that identities hold to the last digit."""
        parts = {name: factor * value for name, value in self.timing.parts(cell).items()}
        useful = sum(parts[p] for p in ("data", "forward", "backward", "optimizer", "other"))
        most_useful = useful + parts["wait"]
        step = useful + parts["exposed"]
        return {
            "epoch": number,
            "steps": self.steps,
            "samples": self.steps * cell.global_batch,
            "train_loss": 1.0 / (number + 1),
            "epoch_time_sec": self.steps * step,
            "throughput_samples_per_sec": cell.global_batch / step,
            "step_time_sec_median": step,
            "step_time_sec_p95": 1.05 * step,
            "data_load_time_sec": parts["data"],
            "compute_time_sec": parts["forward"] + parts["backward"],
            "forward_time_sec": parts["forward"],
            "backward_time_sec": parts["backward"],
            "comm_exposed_time_sec": parts["exposed"],
            "comm_wait_time_sec": parts["wait"],
            "optimizer_time_sec": parts["optimizer"],
            "other_time_sec": parts["other"],
            "load_balance": useful / most_useful,
            "comm_efficiency": most_useful / step,
            "pop_parallel_efficiency": useful / step,
            "cpu_util_avg": 93.0,
            "peak_mem_bytes": 512 * 2**20,
        }

    def rank_rows(self, cell: Cell) -> Iterable[dict[str, Any]]:
        """Yield the rows of ranks.csv, all ranks alike."""
        parts = self.timing.parts(cell)
        for epoch in range(self.epochs):
            for rank in range(cell.world_size):
                yield {
                    "epoch": epoch,
                    "rank": rank,
                    "local_rank": rank % cell.ranks_per_node[0],
                    "host": f"n{rank // cell.ranks_per_node[0] + 1}",
                    "device": "cpu",
                    "steps": self.steps,
                    "samples": self.steps * cell.per_gpu_batch,
                    "forward_time_sec": parts["forward"],
                }

    def step_rows(self, cell: Cell) -> Iterable[dict[str, Any]]:
        """Yield a few rows of steps.csv."""
        step = sum(self.timing.parts(cell).values()) - self.timing.parts(cell)["wait"]
        for number in range(3):
            yield {"epoch": 0, "step": number, "step_time_sec": step, "slowest_rank": 0}


def table(columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> str:
    """Return rows as the CSV that the workload writes; absent keys are empty cells."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def environment(cell: Cell, *, cores: int = 8) -> dict[str, Any]:
    """Return an env.json by its contract, of CPU nodes with ``cores`` cores each."""
    hosts: list[dict[str, Any]] = []
    for number, ranks in enumerate(cell.ranks_per_node, 1):
        first = sum(cell.ranks_per_node[: number - 1])
        host = {"host": f"n{number}", "ranks": [*range(first, first + ranks)], "ranks_here": ranks}
        machine = {"cores": cores, "cpu_model": CPU_MODEL, "memory_bytes": 16 * 2**30}
        hosts.append(host | machine)
    return {
        "schema": 1,
        "bench_version": "0.1.0",
        "torch": "2.13.0+cpu",
        "python": "3.11.2",
        "cuda": None,
        "nccl": None,
        "device_name": CPU_MODEL,
        "device": "cpu",
        "backend": cell.backend,
        "world_size": cell.world_size,
        "launcher": cell.launcher,
        "joined": {"ranks": cell.world_size, "expected": cell.world_size, "seconds": 0.4},
        "hosts": hosts,
        "transport": {"backend": cell.backend, "interface": "eth0", **dict.fromkeys(UNKNOWN)},
        "threads_per_rank": 1,
        "workload": cell.workload,
        "per_gpu_batch": cell.per_gpu_batch,
        "global_batch": cell.global_batch,
        "parameters": 8_000_000,
        "gradient_bytes": 32_000_000,
        "env": {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
        "slurm": {"SLURM_JOB_ID": "1001", "SLURM_JOB_PARTITION": "debug"},
        "facts": [],
    }


def make_cell(
    ranks: int,
    *,
    batch: int,
    mode: str = "strong",
    per_node: int = 1,
    backend: str = "gloo",
    launcher: str = "srun",
    swept: dict[str, Any] | None = None,
    name: str = "",
) -> Cell:
    """Return a cell of one series; ``batch`` is global for strong, per rank for weak."""
    per_node = min(per_node, ranks)
    per_gpu = batch // ranks if mode == "strong" else batch
    words = [f"{k.removeprefix('env.')}.{v}" for k, v in (swept or {}).items()]
    series = "-".join([mode, str(batch), backend, launcher, *words])
    cell_id = name or "-".join([f"n{ranks // per_node}x{per_node}", backend, launcher, f"b{per_gpu}", *words])
    return Cell(
        cell_id=cell_id,
        launcher=launcher,
        backend=backend,
        nodes=ranks // per_node,
        tasks_per_node=per_node,
        world_size=ranks,
        per_gpu_batch=per_gpu,
        global_batch=per_gpu * ranks,
        argv=list(BUILT_IN),
        metrics={"source": "recorder"},
        planned_epochs=3,
        workload=asdict(TrainOptions(device="cpu", model="mlp")),
        env={},
        swept=swept or {},
        series=[Membership(series, mode, batch)],  # type: ignore[arg-type]
    )


def merged(cells: Iterable[Cell]) -> list[Cell]:
    """Return cells with the same id as one, a member of all their series."""
    found: dict[str, Cell] = {}
    for cell in cells:
        known = found.setdefault(cell.cell_id, cell)
        if known is not cell:
            known.series += cell.series
    return list(found.values())


def strong(batch: int = 64, sizes: Sequence[int] = (1, 2, 4, 8), **options: Any) -> list[Cell]:
    """Return a strong series."""
    return [make_cell(n, batch=batch, mode="strong", **options) for n in sizes]


def weak(batch: int = 16, sizes: Sequence[int] = (1, 2, 4, 8), **options: Any) -> list[Cell]:
    """Return a weak series."""
    return [make_cell(n, batch=batch, mode="weak", **options) for n in sizes]


def over_two_axes(
    nodes: tuple[int, ...] = (1, 2, 4), per_node: tuple[int, ...] = (1, 2, 4), **options: Any
) -> list[Cell]:
    """Return a weak and a strong series over nodes and ranks per node."""
    sizes = [(n, k) for k in per_node for n in nodes]
    most = nodes[-1] * per_node[-1]
    weak_cells = [make_cell(n * k, batch=16, mode="weak", per_node=k, **options) for n, k in sizes]
    strong_cells = [make_cell(n * k, batch=4 * most, per_node=k, **options) for n, k in sizes]
    return merged(weak_cells + strong_cells)


def finished(path: Path, cells: Sequence[Cell] | None = None, **options: Any) -> Path:
    """Write a study in which everything completed (unless ``options`` say otherwise)."""
    return StudyBuilder(path, cells if cells is not None else strong(), **options).write()


def leave_run(
    study: PlannedStudy,
    run: Run,
    *,
    exit_code: int | None = 0,
    by: str = "exit",
    err: str = "",
    is_recorded: bool = True,
) -> RunFolder:
    """Leave one more attempt of a planned run, as a process of this machine that has ended does.

    Without an exit code, the process was killed. ``is_recorded``: the ledger has the end.
    """
    attempt, host = next_attempt(study, run, study.records()[run.run_id]), os.uname().nodename
    attempt.claim(study)
    folder, cell = attempt.folder, attempt.cell
    folder.start.write_text(f"{NO_PROCESS} {STARTED} {host} 0\n")
    folder.err.write_text(err)
    job = {"job_name": attempt.job_name, "job_id": f"{host}:{NO_PROCESS}:5"}
    record = Record(run_id=run.run_id, attempt=attempt.number, state=RunState.QUEUED, **job)
    study.ledger.append([record])
    if exit_code == 0:
        lengths = {"epochs": cell.workload["epochs"], "steps": cell.workload["steps_per_epoch"]}
        builder = StudyBuilder(Path(), [], **lengths)
        rows = [builder.epoch(cell, epoch, 1.0) for epoch in range(builder.epochs)]
        folder.metrics_csv.write_text(table(METRICS_COLUMNS, rows))
        folder.ranks_csv.write_text(table(RANKS_COLUMNS, builder.rank_rows(cell)))
        folder.steps_csv.write_text(table(STEPS_COLUMNS, builder.step_rows(cell)))
        folder.probes.write_text(json.dumps({"schema": 1}))
        folder.env.write_text(json.dumps(environment(cell)))
        write_sums(folder)
    if exit_code is not None:
        folder.end.write_text(json.dumps({"exit_code": exit_code, "by": by, "time": ENDED}))
    if is_recorded:
        study.ledger.append([record.ended(end_of(folder, cell, None))])
    return folder


def print_rates(path: Path, *, per_node: bool = False) -> Path:
    """Replace each run's metrics.csv by lines ``rate N`` in job.out, once or once per node; return ``path``."""
    for metrics in path.glob("runs/*/*/metrics.csv"):
        rates = "".join(f"rate {rate!r}\n" for rate in pd.read_csv(metrics)["throughput_samples_per_sec"])
        nodes = json.loads(metrics.with_name("cell.json").read_text())["nodes"]
        metrics.with_name("job.out").write_text(rates * (nodes if per_node else 1))
        metrics.unlink()
    return path


def change_run(study: Path, run_id: str, *, attempt: int | None = None, **values: Any) -> None:
    """Append a line to a study's ledger that changes values of a run's latest, or another, attempt."""
    ledger = Ledger(StudyFolder(study).ledger)
    attempts = ledger.attempts().get(run_id, {})
    number = attempt or max(attempts, default=1)
    before = attempts.get(number) or attempts[max(attempts)]
    if "reason" in values:
        values |= {"remark": values["reason"], "reasons": (Said(text=values["reason"]),)}
    of_record, of_end = ({one.name for one in fields(kind)} & values.keys() for kind in (Record, End))
    record = replace(before, attempt=number, **{name: values[name] for name in of_record})
    record = replace(record, state=RunState(record.state))
    end = replace(before.end or End(state=record.state), **{name: values[name] for name in of_end})
    end = replace(end, state=record.state)
    ledger.append([record.ended(end) if record.state.ended else replace(record, end=None)])


def disturb(path: Path, run_id: str, reason: str, node: str = "n2", **values: Any) -> None:
    """Add a disturbance to the end of a run."""
    end = Ledger(StudyFolder(path).ledger).records([run_id])[run_id].end
    before = [one.as_json() for one in (end and end.disturbed) or ()]
    times = {"start": "2026-01-02T03:04:10Z", "end": "2026-01-02T03:04:20Z"}
    change_run(path, run_id, disturbed=[*before, recorded(reason, node, **times, **values)])


def seal(path: Path) -> Path:
    """Write SHA256SUMS again for the runs of a study whose files a test has changed; return ``path``."""
    for metrics in path.glob("runs/*/*/metrics.csv"):
        write_sums(RunFolder(metrics.parent))
    return path


def recorded(kind: str, *subject: str, **values: Any) -> dict[str, Any]:
    """Return a finding as env.json and the ledger contain it."""
    return {"kind": kind, "subject": [*subject], "values": values, "severity": "warning"}


def scale_rate(metrics: Path, factor: float | Sequence[float]) -> None:
    """Multiply the throughput in a run's metrics.csv; its times, and those of ranks.csv, agree with it."""
    frame = pd.read_csv(metrics)
    frame["throughput_samples_per_sec"] *= factor
    frame["epoch_time_sec"] /= factor
    frame.to_csv(metrics, index=False)
    ranks = metrics.with_name("ranks.csv")
    if ranks.is_file() and "window_time_sec" in (rows := pd.read_csv(ranks)):
        by_epoch = dict(zip(frame["epoch"], np.broadcast_to(factor, len(frame)), strict=True))
        rows["window_time_sec"] /= rows["epoch"].map(by_epoch)
        rows.to_csv(ranks, index=False)
    write_sums(RunFolder(metrics.parent))


def agree_with_ranks(attempt: Path) -> None:
    """Write the means and sums of a run's ranks.csv into its metrics.csv."""
    frame = pd.read_csv(attempt / "metrics.csv").set_index("epoch")
    groups = pd.read_csv(attempt / "ranks.csv").groupby("epoch")
    for name in MEAN_COLUMNS:
        frame[name] = groups[name].mean()
    for name, values in (
        ("samples", groups["samples"].sum(min_count=1)),
        ("epoch_time_sec", groups["window_time_sec"].max()),
    ):
        frame[name] = values.fillna(frame[name])
    frame["throughput_samples_per_sec"] = frame["samples"] / frame["epoch_time_sec"]
    frame.reset_index()[pd.read_csv(attempt / "metrics.csv").columns].to_csv(
        attempt / "metrics.csv", index=False
    )
    write_sums(RunFolder(attempt))


def write_sweep(folder: RunFolder, times: Mapping[int, float], *, ranks: int) -> None:
    """Write probes.json of a run: of three repeats, the median of the slowest rank is the time of a size."""
    sizes = [
        {"bytes": size, "buckets": 0, "times_s": [[time, time / 2], [9 * time, time], [time, time]]}
        for size, time in times.items()
    ]
    folder.probes.write_text(
        json.dumps(
            {"schema": 1, "world_size": ranks, "all_reduce": {"sizes": sizes}} if times else {"schema": 1}
        )
    )
    if folder.sums.exists():
        write_sums(folder)


def with_probes(path: Path, cells: Iterable[Cell]) -> None:
    """Write probes.json of three repeats of each cell."""
    for cell in cells:
        times = {size: ring_time(size, cell.world_size, ALPHA, BETA) for size in SIZES}
        for repeat in (1, 2, 3):
            folder = StudyFolder(path).attempt(f"{cell.cell_id}-r{repeat}", 1)
            write_sweep(folder, times, ranks=cell.world_size)


def write_ranks(
    path: Path,
    *,
    late: Callable[[str, int], float],
    host: Callable[[int], str],
    pattern: str = "*",
    part: str = "backward",
    work: Mapping[str, float] = WORK,
    transfer_s: float = 0.002,
) -> None:
    """Write ranks.csv of runs: the work of a rank, that of ``late`` in one part, and the others' waiting."""
    for file in path.glob(f"runs/{pattern}/attempt-1/ranks.csv"):
        ranks = int(pd.read_csv(file)["rank"].max()) + 1
        extra = [late(file.parts[-3], rank) for rank in range(ranks)]
        rows = []
        for rank, more in enumerate(extra):
            wait = max(extra) - more
            times = {f"{name}_time_sec": own + (more if name == part else 0) for name, own in work.items()}
            times |= {"comm_exposed_time_sec": transfer_s + wait, "comm_wait_time_sec": wait}
            step_s = sum(work.values()) + transfer_s + max(extra)
            rows.append(
                {"epoch": 0, "rank": rank, "host": host(rank), "steps": 50, "step_time_sec": step_s} | times
            )
        file.write_text(table(RANKS_COLUMNS, rows), encoding="utf-8")
        write_sums(RunFolder(file.parent))


def frames_of_points(points: pd.DataFrame) -> Measured:
    """Return the frames of measured points, which are the rows of a table that was measured elsewhere."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "points.csv"
        points.to_csv(path, index=False)
        return study_of_table(read_table(path), mode=None, folder=path.parent).frames


def frame(rows: Sequence[ScalingRow]) -> pd.DataFrame:
    """Return the scaling table as a frame, for computations with its columns."""
    return pd.DataFrame(table_of(rows, columns_of(ScalingRow)))


def runs_frame(runs: Iterable[RunRow]) -> pd.DataFrame:
    """Return runs as a frame, for computations with its columns."""
    return pd.DataFrame(map(vars, runs))
