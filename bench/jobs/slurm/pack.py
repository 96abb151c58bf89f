"""Packs: Slurm jobs that execute many runs, one after another, each on some of the job's nodes.

`bench submit --pack` determines the allocation, the order of the runs and the nodes of each run. It
writes them to a file for the job's script (``slurm_templates/pack.sbatch.j2``). The script records in
``marks.jsonl`` when each run starts and ends.

The status of a run is determined as follows. If the run ended before the job, the run's status is determined
by ``marks.jsonl`` and the run's Slurm steps. If the run was active when the job ended, the run gets the job's
status. If the run had not started, it becomes ``planned`` again, and the next submission includes it.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...errors import BenchError, unwritable
from ...matrix.cell import Run
from ...study.files import regular_file, write_atomically, write_json
from ...study.layout import PackFolder, StudyFolder
from ...study.ledger import FailureClass, RunRecord, RunState, now
from ...study.plan_json import REPLAN, PlannedStudy
from ...study.run_json import Attempt
from ...units import count, slurm_time
from ..outcome import EndNote, JobStatus
from .job_states import classify
from .parsing import AccountingRow, JobKey

_SAFE_WORD = re.compile(r"[A-Za-z0-9_.+/-]+")
#: Values of ``Mark.by`` for a run that ended before the job of its pack.
_OWN_ENDS = ("exit", "limit")


@dataclass(frozen=True)
class Allocation:
    """Resources of a job that executes many runs (pack): the maximum that any of the runs needs.

    ``limit_s`` is the sum of the runs' time limits. ``gpus_per_node`` is 0 if no run uses GPUs. ``node_gpus``
    is the number of GPUs of a node if the job has whole nodes and this number is known.
    """

    nodes: int
    tasks_per_node: int
    gpus_per_node: int
    limit_s: int
    node_gpus: int | None = None

    @property
    def reserved_per_node(self) -> int:
        """The number of GPUs per node that the job occupies: all of them if it has whole nodes."""
        return max(self.gpus_per_node, self.node_gpus or 0)

    @property
    def gpu_hours(self) -> float:
        """Maximum cost in GPU-hours."""
        return self.nodes * self.reserved_per_node * self.limit_s / 3600

    @property
    def node_hours(self) -> float:
        """Maximum cost in node-hours."""
        return self.nodes * self.limit_s / 3600

    def options(self, gpu_option: str | None) -> list[str]:
        """Return the options for sbatch; ``gpu_option`` is a prefix such as ``--gpus-per-node=``."""
        gpus = [f"{gpu_option}{self.gpus_per_node}"] if gpu_option and self.gpus_per_node else []
        sizes = [f"--nodes={self.nodes}", f"--ntasks-per-node={self.tasks_per_node}"]
        return [*sizes, *gpus, f"--time={slurm_time(self.limit_s)}"]


def allocation_of(study: PlannedStudy, runs: Sequence[Run]) -> Allocation:
    """Return the allocation that is large enough to execute ``runs`` (at least one) one after another."""
    cells = [study.cells[run.cell_id] for run in runs]
    tasks = max(max(cell.ranks_per_node) for cell in cells)
    return Allocation(
        nodes=max(cell.nodes for cell in cells),
        tasks_per_node=tasks,
        gpus_per_node=tasks if any(cell.device == "cuda" for cell in cells) else 0,
        limit_s=int(study.plan["time_limit_s"]) * len(runs),
        node_gpus=study.reserved_node_gpus,
    )


def first_host(*, seed: int, nodes: int, repeat: int, hosts: int) -> int:
    """Choose the first host of a run on ``nodes`` nodes; return its index among the job's hosts.

    A run uses consecutive hosts, wrapping around. The first host advances by ``nodes`` per repeat,
    so that the repeats of a size use all hosts equally often. Cells of the same size use the same
    hosts in the same repeat, which makes them comparable.
    """
    start = random.Random(f"{seed}/{nodes}").randrange(hosts)
    return (start + (repeat - 1) * nodes) % hosts


@dataclass(frozen=True)
class Pack:
    """A pack (a job that executes many runs) to be submitted: its attempts in order, and its allocation."""

    number: int
    job_name: str
    folder: PackFolder
    allocation: Allocation
    attempts: list[Attempt]

    def describe(self, place: int) -> dict[str, Any]:
        """Return the value of ``allocation`` in run.json for the run at position ``place`` (from 1)."""
        return {"kind": "pack", "pack": self.number, "place": place, "nodes": self.allocation.nodes}

    def first_host(self, study: PlannedStudy, attempt: Attempt) -> int:
        """Return the index, among the job's hosts, of the first host that ``attempt`` uses."""
        seed, hosts = int(study.plan["seed"]), self.allocation.nodes
        return first_host(seed=seed, nodes=attempt.cell.nodes, repeat=attempt.run.repeat, hosts=hosts)

    def lines(self, study: PlannedStudy) -> list[str]:
        """Return a line per run: place, run, folder, script, number of nodes, first host, time limit."""
        limit_s = int(study.plan["time_limit_s"])
        lines = []
        for place, attempt in enumerate(self.attempts, 1):
            root, cell = study.folder.path, attempt.cell
            first = self.first_host(study, attempt)
            paths = (attempt.folder.path, self.folder.script(cell.cell_id))
            relative = [str(path.relative_to(root)) for path in paths]
            words = [str(place), attempt.run.run_id, *relative, str(cell.nodes), str(first), str(limit_s)]
            assert all(map(_SAFE_WORD.fullmatch, words)), f"the script cannot split {words}"
            lines.append(" ".join(words))
        return lines


def next_number(study: PlannedStudy) -> int:
    """Return the number of the study's next pack (job of many runs). Numbers are not reused."""
    try:
        taken = [path.name.removeprefix("pack-") for path in study.folder.packs.iterdir()]
    except OSError:
        taken = []
    return 1 + max((int(number) for number in taken if number.isdigit()), default=0)


def write_pack(study: PlannedStudy, pack: Pack) -> None:
    """Create a pack's folder and copy the scripts into it, so that `bench plan` cannot change them."""
    try:
        pack.folder.path.mkdir(mode=0o755, parents=True)  # only the owner may replace scripts
        for cell_id in {attempt.cell.cell_id for attempt in pack.attempts}:
            text = study.script(cell_id).read_text(encoding="utf-8")
            write_atomically(pack.folder.script(cell_id), text, private=True)
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


def planned_script(path: Path) -> Path:
    """Return the path of a study's script; raise BenchError if `bench plan` did not write it."""
    if not path.is_file():
        raise BenchError(f"{path}: does not exist", remedy=REPLAN)
    return path


@dataclass(frozen=True)
class Mark:
    """Start and end of one run of a pack; ``exit_code``, ``by`` and ``ended`` are set when the run has ended.

    ``by`` says why the run ended: ``exit`` (on its own), ``limit`` (at its time limit) or ``stop`` (with
    the whole job).
    """

    hosts: str
    started: datetime | None
    exit_code: int | None = None
    by: str = ""
    ended: datetime | None = None


@dataclass
class Marks:
    """Content of marks.jsonl, a pack's record of its runs; ``over`` is True when the pack is finished."""

    runs: dict[str, Mark] = field(default_factory=dict)
    last_place: int = 0
    over: bool = False

    @classmethod
    def read(cls, folder: PackFolder) -> Marks:
        """Read the marks.jsonl of a pack, skipping incomplete lines."""
        marks = cls()
        try:
            with open(folder.marks, encoding="utf-8", errors="replace", opener=regular_file) as file:
                lines = file.read().splitlines()
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
            start = self.runs[run_id]
            self.runs[run_id] = Mark(start.hosts, start.started, int(mark["exit_code"]), mark["by"], moment)
        elif kind in ("done", "stop"):
            self.over = True


@dataclass(frozen=True)
class Packs:
    """The packs of one study: jobs that execute many runs. Each pack's marks.jsonl is read once."""

    folder: StudyFolder
    _marks: dict[int, Marks] = field(default_factory=dict)

    def marks(self, record: RunRecord) -> Marks:
        """Return the marks of all runs in the pack of ``record``."""
        number = _pack_number(record)
        assert number is not None, f"{record.run_id} has a job of its own"
        if number not in self._marks:
            self._marks[number] = Marks.read(self.folder.pack(number))
        return self._marks[number]

    def mark(self, record: RunRecord) -> Mark | None:
        """Return the mark of a run (start and end), or None if the run has not started."""
        return self.marks(record).runs.get(record.run_id)

    def has_ended(self, record: RunRecord) -> bool:
        """Return True if a run has ended, even if its pack (job of many runs) still runs."""
        if not is_packed(record):
            return False
        mark = self.mark(record)
        return mark is not None and mark.by in _OWN_ENDS

    def active_status(self, record: RunRecord, job: JobStatus) -> JobStatus:
        """Return the status of a run while its job is queued or running."""
        if not is_packed(record) or job.state is not RunState.RUNNING:
            return job
        if self.mark(record) is not None:
            return replace(job, reason="")
        before = max(1, int(record.details["allocation"]["place"]) - max(1, self.marks(record).last_place))
        reason = f"waits for {count(before, 'run')} before it in its pack (job {record.job_id})"
        if not self.marks(record).runs:
            reason = f"waits for its pack (job {record.job_id}) to start its first run"
        return JobStatus(RunState.QUEUED, reason=reason)

    def final_status(
        self, record: RunRecord, rows: Sequence[AccountingRow], queued: JobStatus | None
    ) -> JobStatus | None:
        """Return the status of a run that has ended or whose job has ended, or None if it is unknown.

        The state is ``planned`` if the run certainly never started. ``rows`` are the run's own rows in
        sacct. ``queued`` is the status of the job in squeue.
        """
        job = next((job for job in (classify(rows), queued) if job is not None and job.state.ended), None)
        over = job is not None
        never_started = self.mark(record) is None and self._end_note(record).exit_code is None
        if never_started and record.state is not RunState.CANCELLED:
            certain = over or self.marks(record).over
            return JobStatus(RunState.PLANNED, reason=not_started(record, job)) if certain else None
        status = self.status(record, job, rows)
        if status is None:
            return None
        if record.state is RunState.CANCELLED and (status.state is RunState.CANCELLED or never_started):
            # The reason that `bench cancel` recorded is more specific than Slurm's reason.
            ours = JobStatus(record.state, FailureClass.CANCELLED, record.reason)
            status = replace(ours, started=status.started, ended=status.ended, settled=status.settled)
        has_job_row = not any(row.key.step is None and row.name != record.job_name for row in rows)
        return replace(status, settled=status.settled and has_job_row and (over or bool(_steps(rows))))

    def status(
        self, record: RunRecord, job: JobStatus | None, rows: Sequence[AccountingRow]
    ) -> JobStatus | None:
        """Return the status of a run that has started, from its own rows in sacct, or None if unknown."""
        mark, end = self.mark(record), self._end_note(record)
        if mark is not None and mark.by in _OWN_ENDS:
            return classify([_as_job(record, mark, end, rows), *_steps(rows)])
        if end.exit_code == 0:  # the run had succeeded before the job was ended
            success = Mark("", mark.started if mark else None, 0, "exit", end.time)
            return classify([_as_job(record, success, end, rows), *_steps(rows)])
        if job is None:
            return None
        reason = f"ended with its pack (job {record.job_id}): {job.reason}" if job.reason else ""
        return replace(job, reason=reason, started=mark.started if mark else None)

    def _end_note(self, record: RunRecord) -> EndNote:
        return EndNote.read(self.folder.attempt(record.run_id, record.attempt))


def _pack_number(record: RunRecord) -> int | None:
    allocation = record.details.get("allocation")
    number = allocation.get("pack") if isinstance(allocation, dict) else None
    return number if isinstance(number, int) else None


def is_packed(record: RunRecord) -> bool:
    """Return True if an attempt belongs to a pack, a job that executes many runs."""
    return _pack_number(record) is not None


def not_started(record: RunRecord, job: JobStatus | None) -> str:
    """Return the reason why a run was not started before the job of its pack ended."""
    why = f" ({job.reason})" if job is not None and job.reason else ""
    return f"not started: its pack (job {record.job_id}) ended before its turn{why}"


def own_rows(record: RunRecord, rows: Sequence[AccountingRow]) -> list[AccountingRow]:
    """Return the rows of sacct for one run of a pack: the job's row and the rows of the run's steps."""
    return [row for row in rows if row.key.step is None or row.name == record.run_id]


def _steps(rows: Sequence[AccountingRow]) -> list[AccountingRow]:
    return [row for row in rows if row.key.step is not None]


def _as_job(record: RunRecord, mark: Mark, end: EndNote, rows: Sequence[AccountingRow]) -> AccountingRow:
    """Return the row that sacct would show if the run were a single job."""
    code = mark.exit_code or 0
    state = "COMPLETED" if code == 0 else "TIMEOUT" if mark.by == "limit" else "FAILED"
    # A shell reports signal N as exit code 128 + N. A script killed by a signal cannot write end.json.
    number = code - 128 if code > 128 and end.exit_code is None else 0
    return AccountingRow(
        key=JobKey(str(record.job_id)),
        state=state,
        exit_code=0 if number or state == "TIMEOUT" else code,
        signal=number,
        derived_exit_code=None,
        reason="",
        submitted=next((row.submitted for row in rows if row.key.step is None), None),
        started=mark.started,
        ended=mark.ended,
        elapsed="",
        nodes=None,
        hosts=mark.hosts or "?",
        max_rss="",
        name=record.run_id,
    )


def refuse_part_of_a_pack(records: Iterable[RunRecord], chosen: Sequence[RunRecord]) -> None:
    """Raise BenchError if cancelling the ``chosen`` runs would also end other runs of the same job."""
    jobs, run_ids = {record.job_id for record in chosen}, {record.run_id for record in chosen}
    for record in records:
        if record.state.active and record.job_id in jobs and record.run_id not in run_ids:
            what = f"job {record.job_id} is a pack; cancelling it also ends {record.run_id} and maybe others"
            raise BenchError(what, remedy="cancel without --only, or wait until the runs have ended")
