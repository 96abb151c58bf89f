"""A pack: many runs in one allocation, one after another, each on some of its nodes.

What is decided at submission stands here: the allocation, the order, and which nodes each run
gets. The job's own script (``slurm_templates/pack.sbatch.j2``) follows the list that
:func:`write_pack` leaves, and notes in ``marks.jsonl`` what it does.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.errors import BenchError, unwritable
from bench.matrix.cell import Run
from bench.study.files import write_atomically, write_json
from bench.study.layout import PackFolder
from bench.study.ledger import RunRecord, now
from bench.study.plan_json import PlannedStudy
from bench.study.run_json import Attempt
from bench.units import slurm_time

_WORD = re.compile(r"[A-Za-z0-9_.+/-]+")


@dataclass(frozen=True)
class Allocation:
    """What a pack asks Slurm for: of each resource what the largest of its runs needs.

    ``limit_s`` is the sum of the runs' limits, in seconds; ``gpus_per_node`` is 0 on a CPU device.
    """

    nodes: int
    tasks_per_node: int
    gpus_per_node: int
    limit_s: int

    @property
    def gpu_hours(self) -> float:
        """The most it can use up."""
        return self.nodes * self.gpus_per_node * self.limit_s / 3600

    @property
    def node_hours(self) -> float:
        """The most it can use up."""
        return self.nodes * self.limit_s / 3600

    def options(self, gpu_option: str | None) -> list[str]:
        """Return sbatch's options; ``gpu_option`` is the matrix's, up to the number."""
        gpus = [f"{gpu_option}{self.gpus_per_node}"] if gpu_option and self.gpus_per_node else []
        sizes = [f"--nodes={self.nodes}", f"--ntasks-per-node={self.tasks_per_node}"]
        return [*sizes, *gpus, f"--time={slurm_time(self.limit_s)}"]


def allocation_of(study: PlannedStudy, runs: Sequence[Run]) -> Allocation:
    """Return the allocation in which ``runs`` (at least one) run one after another."""
    cells = [study.cells[run.cell_id] for run in runs]
    most = max(max(cell.ranks_per_node) for cell in cells)
    return Allocation(
        nodes=max(cell.nodes for cell in cells),
        tasks_per_node=most,
        gpus_per_node=most if any(cell.device == "cuda" for cell in cells) else 0,
        limit_s=int(study.plan["time_limit_s"]) * len(runs),
    )


def first_host(*, seed: int, nodes: int, repeat: int, hosts: int) -> int:
    """Return the place, among a pack's ``hosts``, of the first host that a run on ``nodes`` uses.

    A run uses consecutive hosts, around the end. From repeat to repeat its first host moves on
    by ``nodes``: over the repeats a size uses all hosts, and none more than once more than another.
    Cells of one size use the same hosts in the same repeat, which makes them comparable there.
    """
    start = random.Random(f"{seed}/{nodes}").randrange(hosts)
    return (start + (repeat - 1) * nodes) % hosts


@dataclass(frozen=True)
class Pack:
    """Attempts about to be started in one allocation; ``attempts`` are in their order."""

    number: int
    job_name: str
    folder: PackFolder
    allocation: Allocation
    attempts: list[Attempt]

    def describe(self, place: int) -> dict[str, Any]:
        """Return what the run.json of its run at ``place`` (from 1) says of how it is run."""
        return {"kind": "pack", "pack": self.number, "place": place, "nodes": self.allocation.nodes}

    def first_host(self, study: PlannedStudy, attempt: Attempt) -> int:
        """Return the place of the first host of one of its runs."""
        seed, hosts = int(study.plan["seed"]), self.allocation.nodes
        return first_host(seed=seed, nodes=attempt.cell.nodes, repeat=attempt.run.repeat, hosts=hosts)

    def lines(self, study: PlannedStudy) -> list[str]:
        """Return the list for the job's script: place, run, folder, script, nodes, first host, limit."""
        limit_s = int(study.plan["time_limit_s"])
        lines = []
        for place, attempt in enumerate(self.attempts, 1):
            root, cell = study.folder.path, attempt.cell
            first = self.first_host(study, attempt)
            paths = (attempt.folder.path, self.folder.script(cell.cell_id))
            below = [str(path.relative_to(root)) for path in paths]
            words = [str(place), attempt.run.run_id, *below, str(cell.nodes), str(first), str(limit_s)]
            assert all(map(_WORD.fullmatch, words)), f"{words} would not be read back"
            lines.append(" ".join(words))
        return lines


def next_number(study: PlannedStudy) -> int:
    """Return the number of the next pack; one that was begun and came to nothing keeps its own."""
    try:
        taken = [path.name.removeprefix("pack-") for path in study.folder.packs.iterdir()]
    except OSError:
        taken = []
    return 1 + max((int(number) for number in taken if number.isdigit()), default=0)


def job_name(study: PlannedStudy, number: int) -> str:
    """Return the name of a pack's job, which no other job has."""
    return f"{study.folder.name}.pack.a{number}.{study.plan.get('key', '')}"


def write_pack(study: PlannedStudy, pack: Pack) -> None:
    """Write a pack's folder: what the job reads is not changed by planning the study again.

    Raises:
        UnwritableError: it cannot be written.
    """
    try:
        pack.folder.path.mkdir(parents=True)
        for cell_id in {attempt.cell.cell_id for attempt in pack.attempts}:
            shutil.copyfile(study.script(cell_id), pack.folder.script(cell_id))
    except OSError as error:
        raise unwritable(pack.folder.path, error) from None
    write_atomically(pack.folder.members, "".join(f"{line}\n" for line in pack.lines(study)))
    content = {
        "schema": 1,
        "job_name": pack.job_name,
        "submitted_at": now(),
        "allocation": vars(pack.allocation),
        "runs": [{"run_id": attempt.run.run_id, "attempt": attempt.number} for attempt in pack.attempts],
    }
    write_json(pack.folder.pack_json, content)


def pack_script(study: PlannedStudy) -> Path:
    """Return the script of packs.

    Raises:
        BenchError: the study was planned before there were packs.
    """
    if not study.folder.pack_script.is_file():
        what = f"{study.folder.pack_script}: does not exist"
        raise BenchError(what, remedy="plan the study again: bench plan MATRIX")
    return study.folder.pack_script


# -- what the job's script notes --------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """How one run of a pack stands: ``exit_code`` and ``by`` are set once it has ended.

    ``by`` is ``exit``, ``limit`` (its own time limit) or ``stop`` (the whole job was being ended).
    """

    hosts: str
    started: datetime | None
    exit_code: int | None = None
    by: str = ""
    ended: datetime | None = None


@dataclass
class Marks:
    """What the script of a pack has noted: by run; ``over`` when it will start no more runs."""

    runs: dict[str, Mark] = field(default_factory=dict)
    last_place: int = 0
    over: bool = False

    @classmethod
    def read(cls, folder: PackFolder) -> Marks:
        """Read them; none where the job has not begun, and a torn line is skipped."""
        marks = cls()
        try:
            lines = folder.marks.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return marks
        for line in lines:
            try:
                marks._add(json.loads(line))
            except (ValueError, KeyError, TypeError):
                continue
        return marks

    def _add(self, mark: Mapping[str, Any]) -> None:
        kind, run_id = mark["event"], str(mark["run_id"])
        moment = datetime.strptime(mark["time"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
        if kind == "start":
            self.runs[run_id] = Mark(str(mark["hosts"]), moment)
            self.last_place, self.over = int(mark["place"]), False
        elif kind == "end":
            begun = self.runs[run_id]
            self.runs[run_id] = Mark(begun.hosts, begun.started, int(mark["exit_code"]), mark["by"], moment)
        elif kind in ("done", "stop"):
            self.over = True


def number_of(record: RunRecord) -> int | None:
    """Return the number of the pack that an attempt belongs to; None where it has a job of its own."""
    allocation = record.details.get("allocation")
    number = allocation.get("pack") if isinstance(allocation, dict) else None
    return number if isinstance(number, int) else None
