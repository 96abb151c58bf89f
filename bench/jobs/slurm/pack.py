"""Packs: Slurm jobs that execute many runs, one after another, each on some of the job's nodes.

`bench submit --pack` determines the allocations, the order of the runs and the nodes of each run. The pack's
script (``slurm_templates/pack.sbatch.j2``) reads them from the file ``members`` in the pack's folder.
It writes ``pack_end.json`` into the folder of each run that has ended.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from ddp_scaling_bench.errors import BenchError, unwritable
from ddp_scaling_bench.files import read_json, write_atomically
from ddp_scaling_bench.run_folder import RunFolder
from ddp_scaling_bench.units import slurm_time

from ...matrix.cell import Cell, Resources, common_resources, gpu_option
from ...study.conditions import parse_moment
from ...study.layout import PackFolder
from ...study.ledger import RunState
from ...study.plan_json import REPLAN, PlannedStudy
from ...study.reasons import CompletedBut, EndedWithPack
from ...study.run_json import Attempt
from ..contract import Job, Status
from ..logs import log_tail
from .states import failed_end, read_state

#: Part of the name of each pack's job, and of no other job of a study.
PACK_MARK = ".pack.a"
#: The resources that options of sbatch with the same names request.
PLACEMENT = ("partition", "qos", "account", "constraint")
_SAFE_WORD = re.compile(r"[A-Za-z0-9_.+/-]+")


def split(attempts: Sequence[Attempt], longest_s: Callable[[str | None], int | None]) -> list[list[Attempt]]:
    """Divide attempts into packs, in their order: all runs of a pack request the same resources.

    ``longest_s`` returns the longest time limit of a job in a partition, or None if there is none. The time
    limits of a pack's runs do not exceed it together.
    """
    by_resources: dict[Resources, list[Attempt]] = {}
    for attempt in attempts:
        alike = attempt.cell.resources._replace(time_limit_s=0)
        by_resources.setdefault(alike, []).append(attempt)
    packs: list[list[Attempt]] = []
    for resources, own in by_resources.items():
        most, total = longest_s(resources.partition), 0
        for index, attempt in enumerate(own):
            total += attempt.cell.resources.time_limit_s
            if not index or (most is not None and total > most):
                packs.append([])
                total = attempt.cell.resources.time_limit_s
            packs[-1].append(attempt)
    return packs


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
    """A pack (a job that executes many runs): its number, and its runs in order."""

    study: PlannedStudy
    number: int
    members: Sequence[Attempt]

    @property
    def folder(self) -> PackFolder:
        """Folder of the pack."""
        return self.study.folder.pack(self.number)

    @property
    def cells(self) -> list[Cell]:
        """The configurations of its runs."""
        return [attempt.cell for attempt in self.members]

    @property
    def nodes(self) -> int:
        """Number of nodes of the job: as many as the largest run needs."""
        return max(cell.nodes for cell in self.cells)

    @property
    def limit_s(self) -> int:
        """The time limit of the job: the sum of the runs' limits."""
        return sum(cell.resources.time_limit_s for cell in self.cells)

    @property
    def job(self) -> Job:
        """The pack's job; raise BenchError if `bench plan` did not write its script."""
        if any(attempt.cell.command_per == "job" for attempt in self.members):
            what = "--pack: a command with command_per: job can use all nodes of the pack, not only its own"
            raise BenchError(what, remedy="omit --pack, or use command_per: node")
        script = self.study.folder.pack_script
        if not script.is_file():
            raise BenchError(f"{script}: does not exist", remedy=REPLAN)
        name = f"{self.study.folder.name}{PACK_MARK}{self.number}.{self.study.key}"
        return Job(name=name, script=script, folder=self.folder, options=self._options())

    def _options(self) -> list[str]:
        """Return the options of sbatch: what the directives of the script cannot know."""
        tasks = max(max(cell.ranks_per_node) for cell in self.cells)
        options = [f"--nodes={self.nodes}", f"--ntasks-per-node={tasks}"]
        own, common = self.cells[0].resources, common_resources(self.study.cells.values())
        if any(cell.device == "cuda" for cell in self.cells):
            option = gpu_option(str(self.study.plan.get("gpu_request")), own.gpu_type)
            options.append(f"{option}{tasks}")
        options.append(f"--time={slurm_time(self.limit_s)}")
        placement = {name: getattr(own, name) for name in PLACEMENT}
        options += [f"--{name}={value}" for name, value in placement.items() if value and name not in common]
        return [*options, *["--exclusive"] * (own.exclusive and "exclusive" not in common)]

    @property
    def attempts(self) -> list[tuple[Attempt, dict[str, Any]]]:
        """The attempts with the job's name, each with its value of ``allocation`` in run.json."""
        name, size = self.job.name, {"nodes": self.nodes}
        return [
            (replace(attempt, job_name=name), {"kind": "pack", "pack": self.number, "place": place, **size})
            for place, attempt in enumerate(self.members, 1)
        ]

    def nodes_of(self, attempt: Attempt) -> list[int]:
        """Return the numbers (from 1) of the job's nodes on which a run is executed."""
        first, hosts = self._first_host(attempt), self.nodes
        return sorted((first + i) % hosts + 1 for i in range(attempt.cell.nodes))

    def write(self) -> None:
        """Create the pack's folder and copy the scripts into it, so that `bench plan` cannot change them."""
        try:
            self.folder.path.parent.mkdir(exist_ok=True)
            self.folder.path.mkdir(mode=0o755)  # only the owner may replace scripts
            for cell_id in {attempt.cell.cell_id for attempt in self.members}:
                text = self.study.script(cell_id).read_text(encoding="utf-8")
                write_atomically(self.folder.script(cell_id), text, private=True)
        except OSError as error:
            raise unwritable(self.folder.path, error) from None
        lines = (f"{self._line(place, attempt)}\n" for place, attempt in enumerate(self.members, 1))
        write_atomically(self.folder.members, "".join(lines))

    def _line(self, place: int, attempt: Attempt) -> str:
        """Return the line of a run: place, run, folder, script, number of nodes, first host, time limit."""
        root, cell = self.study.folder.path, attempt.cell
        paths = (attempt.folder.path, self.folder.script(cell.cell_id))
        relative = [str(path.relative_to(root)) for path in paths]
        numbers = (cell.nodes, self._first_host(attempt), cell.resources.time_limit_s)
        words = [str(place), attempt.run.run_id, *relative, *map(str, numbers)]
        assert all(map(_SAFE_WORD.fullmatch, words)), f"the script cannot split {words}"
        return " ".join(words)

    def _first_host(self, attempt: Attempt) -> int:
        seed, hosts = int(self.study.plan["seed"]), self.nodes
        return first_host(seed=seed, nodes=attempt.cell.nodes, repeat=attempt.run.repeat, hosts=hosts)


def run_status(job: Status, run_id: str, folder: RunFolder) -> Status | None:
    """Return the status of a started run of a pack as if it had a job of its own; None while it runs.

    ``job`` is the status of the pack's job. If the run ended before the job, its pack_end.json and its steps
    determine the status, and otherwise the end of the job.
    """
    end, note = read_json(folder.pack_end) or {}, read_json(folder.end) or {}
    code, by, own_code = end.get("exit_code"), end.get("by"), note.get("exit_code")
    ended, steps = end.get("ended"), job.steps.get(run_id)
    started = parse_moment(end.get("started")) or _last_start(folder)
    if by not in ("exit", "limit") and own_code == 0:  # it had succeeded before the job was ended
        code, by, ended = 0, "exit", note.get("time")
    if by in ("exit", "limit") and isinstance(code, int):
        shown = steps or Status(job_id=job.job_id, state=RunState.COMPLETED, settled=job.settled)
        slurm_state = read_state("COMPLETED" if code == 0 else "TIMEOUT" if by == "limit" else "FAILED")
        # A shell reports signal N as exit code 128 + N. A script killed by a signal cannot write end.json.
        number = code - 128 if code > 128 and own_code is None else None
        cause, reasons, exit_code = failed_end(slurm_state, shown, code=code, number=number)
        if code == 0:
            is_odd = shown.state is RunState.FAILED
            reasons = (CompletedBut(), *shown.reasons) if is_odd else ()
        return replace(
            job,
            state=slurm_state.state,
            failure_class=cause,
            reasons=reasons,
            exit_code=exit_code if code else 0,
            started=started,
            ended=parse_moment(ended),
            hosts=str(end.get("hosts") or job.hosts),
            settled=shown.settled,
            steps={},
            summary=shown.summary,
        )
    if not job.state.ended:
        return None
    reasons = (EndedWithPack(job=job.job_id), *job.reasons) if job.reasons else ()
    return replace(job, reasons=reasons, started=started, steps={}, summary=(steps or job).summary)


def _last_start(folder: RunFolder) -> datetime | None:
    """Return the time of the last start of a run, which its script records."""
    words = next(reversed(log_tail(folder.start)), "").split()
    return parse_moment(words[1]) if len(words) > 1 else None
