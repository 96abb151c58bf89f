"""Submit many runs of a study as one Slurm job.

Before sbatch is called, an ``intent`` event for each run is written to the ledger in one operation. The
events contain the job's name, so that the job can be found if the submission is interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...errors import BenchError
from ...matrix.cell import Run
from ...study.ledger import RunRecord, RunState, now
from ...study.run_json import Attempt, new_attempt, next_attempt, write_run
from ...units import count, human_duration
from ..scheduler import Callbacks, QueueFullError, may_start
from .client import BatchJob, SlurmRefusedError
from .pack import (
    Pack,
    allocation_of,
    job_name,
    next_number,
    pack_script,
    write_pack,
)
from .scheduler import SlurmExecutor, longest_limit_s, partitions_of, permanent_refusal

_FULL = "run `bench submit --pack` again when some jobs have ended, or use --wait"
_REMEDY = "choose fewer runs with --only, lower cluster.time_limit, or submit without --pack"


class PackExecutor(SlurmExecutor):
    """Execute many runs of a study in one Slurm job."""

    def submit(
        self,
        runs: Sequence[Run],
        *,
        seen: Mapping[str, RunRecord],
        callbacks: Callbacks,
        max_queued: int | None = None,
    ) -> list[Run]:
        """Submit one job for all of ``runs``; ``max_queued`` is ignored, because there is only one job."""
        with self._lock(callbacks) as lock:
            records = self._refreshed(reconcile=True)
            todo = [run for run in runs if may_start(records[run.run_id], seen[run.run_id])]
            todo = self._hold_too_large(todo, records, callbacks)
            if not todo:
                return []
            self._warn_of_overriding(todo, callbacks)
            trial = self._pack([next_attempt(self.study, run, records[run.run_id]) for run in todo])
            self._test(trial, callbacks)
            self._warn_of_limit(trial, callbacks)
            for run in todo:
                callbacks.on_start(run)  # can raise an error; nothing has been submitted yet
            pack = self._pack([new_attempt(self.study, run, records[run.run_id]) for run in todo])
            for run, record in zip(todo, self._submit_pack(pack, lock), strict=True):
                callbacks.on_end(run, record)
        return []

    def check_largest(self, runs: Sequence[Run]) -> None:
        """Raise BenchError if Slurm would not accept a pack of ``runs``."""
        records, (small, _) = self._records_once, self._split_by_fit_nodes(runs)
        pack = self._pack([next_attempt(self.study, run, records[run.run_id]) for run in small])
        self._test(pack, Callbacks())

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
        name = job_name(self.study, number)
        runs = [attempt.run for attempt in attempts]
        allocation = allocation_of(self.study, runs)
        named = [replace(attempt, job_name=name) for attempt in attempts]
        folder = self.study.folder.pack(number)
        return Pack(number, name, folder, allocation, named)

    def _pack_job(self, pack: Pack) -> BatchJob:
        return BatchJob(
            script=pack_script(self.study),
            arguments=[str(pack.folder.path.absolute())],
            job_name=pack.job_name,
            output=pack.folder.out.absolute(),
            error=pack.folder.err.absolute(),
            options=[
                *pack.allocation.options(self.study.plan.get("gpu_option")),
                *self._exclusion(pack_script(self.study)),
            ],
        )

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
        partitions = partitions_of(self.slurm, pack_script(self.study))
        limit_s = longest_limit_s(partitions)
        if limit_s is not None and limit_s < pack_s:
            allowed = f"partition {' or '.join(partitions)} allows {human_duration(limit_s)}"
            what = f"{allowed}, but this pack requests {human_duration(pack_s)}: Slurm may never start it"
            callbacks.on_message(f"{what}; cancel the job, then {_REMEDY}")

    def _submit_pack(self, pack: Pack, lock: int) -> list[RunRecord]:
        write_pack(self.study, pack)
        place = self._chains().next_place()  # a pack executes one run at a time
        contents = [
            attempt.describe(
                self.study,
                submitted_at=now(),
                allocation=pack.describe(place),
                **self._commands.describe(attempt.cell),
                **self._excluded,
            )
            for place, attempt in enumerate(pack.attempts, 1)
        ]
        for attempt, content in zip(pack.attempts, contents, strict=True):
            write_run(attempt.folder, content)
        self.study.ledger.append_all([{**_intent(content), **place.event} for content in contents])
        records = [
            RunRecord(attempt.run.run_id, attempt.number, RunState.QUEUED, job_name=pack.job_name)
            for attempt in pack.attempts
        ]
        try:
            job = self._pack_job(pack)
            self._submit_job(replace(job, options=[*job.options, *place.options]), records, lock)
        except SlurmRefusedError as error:
            raise _refused(pack, error.output, queue_is_full=error.queue_is_full) from None
        return records


def _intent(content: dict[str, Any]) -> dict[str, Any]:
    kept = {key: content[key] for key in ("run_id", "attempt", "job_name", "allocation")}
    return {"event": "intent", **kept, "refused": False}


def _refused(pack: Pack, words: str, *, queue_is_full: bool) -> BenchError:
    size = f"{count(len(pack.attempts), 'run')} on {count(pack.allocation.nodes, 'node')}"
    limit = human_duration(pack.allocation.limit_s)
    what = f"Slurm does not accept a pack of {size} for {limit}: {words}"
    if queue_is_full:
        return QueueFullError(what, remedy=_FULL, left=[attempt.run for attempt in pack.attempts])
    remedy = f"nothing was submitted; correct the matrix's cluster section, or {_REMEDY}"
    return BenchError(what, remedy=remedy)
