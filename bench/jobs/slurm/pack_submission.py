"""Submit many runs of a study as one Slurm job.

Before sbatch is called, an ``intent`` event for each run is written to the ledger in one operation. The
events contain the job's name, so that the job can be found if the submission is interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...errors import BenchError
from ...matrix.cell import Run
from ...study.ledger import RunRecord
from ...study.run_json import Attempt, new_attempt, next_attempt
from ...units import count, human_duration
from ..scheduler import Callbacks, QueueFullError, Records
from .client import BatchJob, SlurmRefusedError
from .pack import (
    Pack,
    allocation_of,
    next_number,
    planned_script,
    write_pack,
)
from .scheduler import SlurmScheduler, longest_limit_s, partitions_of, permanent_refusal

_FULL = "run `bench submit --pack` again when some jobs have ended, or use --wait"
_REMEDY = "choose fewer runs with --only, lower cluster.time_limit, or submit without --pack"


class PackScheduler(SlurmScheduler):
    """Execute many runs of a study in one Slurm job."""

    def _submit_now(
        self, runs: list[Run], records: Records, lock: int, callbacks: Callbacks, room: int | None
    ) -> list[Run]:
        """Submit one job for all of ``runs``; ``room`` is ignored, because there is only one job."""
        if runs:
            trial = self._pack([next_attempt(self.study, run, records[run.run_id]) for run in runs])
            self._test(trial, callbacks)
            self._warn_of_limit(trial, callbacks)
        for run in runs:
            callbacks.on_start(run)  # can raise an error; nothing has been submitted yet
        if runs:
            pack = self._pack([new_attempt(self.study, run, records[run.run_id]) for run in runs])
            for run, record in zip(runs, self._submit_pack(pack, lock), strict=True):
                callbacks.on_end(run, record)
        return []

    def describe(self, runs: Sequence[Run]) -> tuple[str, list[tuple[str, list[int]]]]:
        """Return the sbatch command, and for each run in order its name and node numbers (from 1)."""
        records = self._records_once
        pack = self._pack([next_attempt(self.study, run, records[run.run_id]) for run in runs])
        hosts, order = pack.allocation.nodes, []
        for attempt in pack.attempts:
            first = pack.first_host(self.study, attempt)
            nodes = sorted((first + i) % hosts + 1 for i in range(attempt.cell.nodes))
            order.append((attempt.run.run_id, nodes))
        return self._shell_line(self._pack_job(pack)), order

    def _pack(self, attempts: Sequence[Attempt]) -> Pack:
        number = next_number(self.study)
        name = f"{self.study.folder.name}.pack.a{number}.{self.study.plan.get('key', '')}"
        allocation = allocation_of(self.study, [attempt.run for attempt in attempts])
        named = [replace(attempt, job_name=name) for attempt in attempts]
        return Pack(number, name, self.study.folder.pack(number), allocation, named)

    def _pack_job(self, pack: Pack) -> BatchJob:
        options = pack.allocation.options(self.study.plan.get("gpu_option"))
        script = planned_script(self.study.folder.pack_script)
        return self._batch_job(script, pack.folder, pack.job_name, options)

    def _test(self, pack: Pack, callbacks: Callbacks) -> None:
        """Raise BenchError if Slurm can never start the pack; warn if Slurm cannot start it now."""
        job = self._pack_job(pack)
        try:
            self.slurm.test_only(job.script, options=job.options)
        except SlurmRefusedError as refusal:
            why = permanent_refusal(self.slurm, refusal, script=job.script, nodes=pack.allocation.nodes)
            if why:
                raise _refused(pack, why, queue_is_full=refusal.queue_is_full) from None
            callbacks.on_message(
                f"the pack may have to wait, because sbatch --test-only says: {refusal.output}"
            )

    def _warn_of_limit(self, pack: Pack, callbacks: Callbacks) -> None:
        """Warn if the partition's time limit is too short: Slurm can accept such a job but never start it."""
        pack_s = pack.allocation.limit_s
        partitions = partitions_of(self.slurm, self.study.folder.pack_script)
        limit_s = longest_limit_s(partitions)
        if limit_s is not None and limit_s < pack_s:
            allowed = f"partition {' or '.join(partitions)} allows {human_duration(limit_s)}"
            what = f"{allowed}, but this pack requests {human_duration(pack_s)}: Slurm may never start it"
            callbacks.on_message(f"{what}; cancel the job, then {_REMEDY}")

    def _submit_pack(self, pack: Pack, lock: int) -> list[RunRecord]:
        write_pack(self.study, pack)
        work = [(attempt, pack.describe(place)) for place, attempt in enumerate(pack.attempts, 1)]
        try:
            return self._submit_attempts(work, self._pack_job(pack), self._unended_jobs(), lock)
        except SlurmRefusedError as error:
            raise _refused(pack, error.output, queue_is_full=error.queue_is_full) from None


def _refused(pack: Pack, words: str, *, queue_is_full: bool) -> BenchError:
    size = f"{count(len(pack.attempts), 'run')} on {count(pack.allocation.nodes, 'node')}"
    limit = human_duration(pack.allocation.limit_s)
    what = f"Slurm does not accept a pack of {size} for {limit}: {words}"
    if queue_is_full:
        return QueueFullError(what, remedy=_FULL, left=[attempt.run for attempt in pack.attempts])
    remedy = f"nothing was submitted; correct the matrix's cluster section, or {_REMEDY}"
    return BenchError(what, remedy=remedy)


SCHEDULER = PackScheduler
