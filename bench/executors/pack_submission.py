"""Submit many runs of a study as one Slurm job.

The intents of all runs are written in one piece before the one sbatch. They contain the pack's name,
so the job is found again after any interruption.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.errors import BenchError
from bench.executors.admission import longest_limit_s, partitions_of, refused_for_good
from bench.executors.base import QueueFullError, Watch
from bench.executors.pack import (
    Pack,
    allocation_of,
    job_name,
    next_number,
    pack_script,
    write_pack,
)
from bench.executors.slurm import SlurmExecutor, may_start
from bench.matrix.cell import Run
from bench.slurm.accounting import queue_statuses
from bench.slurm.client import BatchJob, SlurmRefusedError, SlurmUnavailableError, SubmissionUncertainError
from bench.slurm.parsing import QueueRow
from bench.study.ledger import RunRecord, RunState, now
from bench.study.run_json import Attempt, new_attempt, next_attempt, update_run, write_run
from bench.units import human_duration

#: Slurm's scheduler looks at a new job in this time, where it is not very busy.
JUDGED_S = 4.0
_FULL = "type `bench submit --pack` again when jobs have ended, or use --wait"
_REMEDY = "choose fewer runs with --only, lower cluster.time_limit, or submit without --pack"


class PackExecutor(SlurmExecutor):
    """Runs of one study in one allocation."""

    def submit(self, runs: Sequence[Run], *, watch: Watch, max_queued: int | None = None) -> list[Run]:
        """Submit one job for all of ``runs``; ``max_queued`` counts jobs, and this is one.

        Raises:
            BenchError: Slurm refused it, or cannot be asked; nothing was submitted.
        """
        seen = {run_id: record.attempt for run_id, record in self.study.records().items()}
        with self._lock(watch) as lock:
            records = self._refreshed(reconcile=True)
            todo = [run for run in runs if may_start(records[run.run_id], seen[run.run_id])]
            if not todo:
                return []
            self._point_out_overriding(todo, watch)
            asked = self._pack([next_attempt(self.study, run, records[run.run_id]) for run in todo])
            self._ask(asked, watch)
            self._point_out_limit(asked, watch)
            for run in todo:
                watch.started(run)  # it may stop us here, where nothing has begun
            pack = self._pack([new_attempt(self.study, run, records[run.run_id]) for run in todo])
            for run, record in zip(todo, self._submit_pack(pack, lock), strict=True):
                watch.ended(run, record)
            self._point_out_stuck(pack, watch)
        return []

    def judge(self, runs: Sequence[Run]) -> None:
        """Have Slurm judge the allocation that ``runs`` need.

        Raises:
            BenchError: its refusal, in Slurm's words.
        """
        records = self._records_once
        self._ask(self._pack([next_attempt(self.study, run, records[run.run_id]) for run in runs]), Watch())

    def describe(self, runs: Sequence[Run]) -> tuple[str, list[tuple[str, list[int]]]]:
        """Return, for a person, sbatch's command, and the runs in order with their nodes (from 1)."""
        records = self._records_once
        pack = self._pack([next_attempt(self.study, run, records[run.run_id]) for run in runs])
        hosts, order = pack.allocation.nodes, []
        for attempt in pack.attempts:
            first = pack.first_host(self.study, attempt)
            nodes = sorted((first + i) % hosts + 1 for i in range(attempt.cell.nodes))
            order.append((attempt.run.run_id, nodes))
        return self._shown(self._pack_job(pack)), order

    def _pack(self, attempts: Sequence[Attempt]) -> Pack:
        number = next_number(self.study)
        name = job_name(self.study, number)
        allocation = allocation_of(self.study, [attempt.run for attempt in attempts])
        named = [replace(attempt, job_name=name) for attempt in attempts]
        return Pack(number, name, self.study.folder.pack(number), allocation, named)

    def _pack_job(self, pack: Pack) -> BatchJob:
        return BatchJob(
            script=pack_script(self.study),
            arguments=[str(pack.folder.path.absolute())],
            job_name=pack.job_name,
            output=pack.folder.out.absolute(),
            error=pack.folder.err.absolute(),
            options=pack.allocation.options(self.study.plan.get("gpu_option")),
        )

    def _ask(self, pack: Pack, watch: Watch) -> None:
        """Have Slurm judge the allocation before anything is queued; nodes that are down may come back.

        Raises:
            BenchError: its refusal, in Slurm's words.
        """
        job = self._pack_job(pack)
        try:
            self.slurm.test_only(job.script, options=job.options)
        except SlurmRefusedError as refusal:
            why = refused_for_good(self.slurm, refusal, script=job.script, nodes=pack.allocation.nodes)
            if why:
                raise _refused(pack, why, queue_is_full=refusal.queue_is_full) from None
            watch.said(f"the pack may have to wait: Slurm says of its size now: {refusal.output}")

    def _point_out_limit(self, pack: Pack, watch: Watch) -> None:
        """Say where the partition's time limit is shorter: many sites take such a job, and never start it."""
        asked_s = pack.allocation.limit_s
        partitions = partitions_of(self.slurm, pack_script(self.study))
        limit_s = longest_limit_s(partitions)
        if limit_s is not None and limit_s < asked_s:
            allowed = f"partition {' or '.join(partitions)} allows {human_duration(limit_s)}"
            what = f"{allowed}, and this pack asks for {human_duration(asked_s)}: Slurm may never start it"
            watch.said(f"{what}; cancel it, then {_REMEDY}")

    def _point_out_stuck(self, pack: Pack, watch: Watch) -> None:
        """Say where Slurm took the job, yet keeps it waiting for ever: so do limits of partitions."""
        deadline = time.monotonic() + JUDGED_S
        rows: list[QueueRow] = []
        while time.monotonic() < deadline and not any(_is_judged(row) for row in rows):
            time.sleep(0.25)
            try:
                rows = self.slurm.queue(names=[pack.job_name])
            except SlurmUnavailableError:
                return
        for job_id, known in queue_statuses(rows).items():
            if known.stuck:
                stuck = f"job {job_id} does not start by itself: {known.reason}"
                watch.said(f"{stuck}; cancel it, then {_REMEDY}")

    def _submit_pack(self, pack: Pack, lock: int) -> list[RunRecord]:
        write_pack(self.study, pack)
        contents = [self._content(pack, place) for place in range(1, len(pack.attempts) + 1)]
        for attempt, content in zip(pack.attempts, contents, strict=True):
            write_run(attempt.folder, content)
        self.study.ledger.append_all([_intent(content) for content in contents])
        records = [
            RunRecord(attempt.run.run_id, attempt.number, RunState.QUEUED, job_name=pack.job_name)
            for attempt in pack.attempts
        ]
        try:
            job_id = self.slurm.submit(self._pack_job(pack), pass_fds=(lock,))
        except SubmissionUncertainError as lost:
            job_id = self._find_by_name(pack.attempts[0].run, pack.job_name, lost)
        except (SlurmRefusedError, SlurmUnavailableError) as error:
            for record in records:
                self._withdraw(record, error.output, refused=True)
            if isinstance(error, SlurmRefusedError):
                raise _refused(pack, error.output, queue_is_full=error.queue_is_full) from None
            raise
        self._note_jobs(records, job_id)
        return records

    def _note_jobs(self, records: Sequence[RunRecord], job_id: str) -> None:
        common = {"event": "submitted", "job_id": job_id}
        events = [{**common, "run_id": record.run_id, "attempt": record.attempt} for record in records]
        self.study.ledger.append_all(events)
        for record in records:
            update_run(self.study.folder.attempt(record.run_id, record.attempt), {"job_id": job_id})
            record.job_id = job_id

    def _content(self, pack: Pack, place: int) -> dict[str, Any]:
        attempt = pack.attempts[place - 1]
        return attempt.describe(self.study, submitted_at=now(), allocation=pack.describe(place))


def _is_judged(row: QueueRow) -> bool:
    """Whether Slurm's scheduler has looked at a job."""
    return row.state != "PENDING" or bool(row.reason)


def _intent(content: dict[str, Any]) -> dict[str, Any]:
    kept = {key: content[key] for key in ("run_id", "attempt", "job_name", "allocation")}
    return {"event": "intent", **kept, "refused": False}


def _refused(pack: Pack, words: str, *, queue_is_full: bool) -> BenchError:
    runs, nodes = len(pack.attempts), pack.allocation.nodes
    asked = f"{runs} run{'s' * (runs > 1)} on {nodes} node{'s' * (nodes > 1)}"
    limit = human_duration(pack.allocation.limit_s)
    what = f"Slurm would not take a pack of {asked} for {limit}: {words}"
    if queue_is_full:
        return QueueFullError(what, remedy=_FULL, left=[attempt.run for attempt in pack.attempts])
    remedy = f"nothing was submitted; mend the matrix's cluster section, or if it is too much, {_REMEDY}"
    return BenchError(what, remedy=remedy)
