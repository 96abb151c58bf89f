"""The engine: submit each run exactly once, find its job again, and record how it ended, for every scheduler.

What happens when a command is killed (kill -9) during a submission? For each run, :meth:`Engine.submit`
does, under the study's lock:

1. It creates the attempt's folder, which must not exist: a number is never used twice.
2. It appends an intent to the ledger: the unique name of the job, still without an id.
3. It calls the scheduler's submit program, which inherits the lock: while that program can still submit the
   job, no other command gets the lock.
4. It appends the id that the scheduler answered.

Killed before 2: the next command finds the folder, and takes it as an intent. Killed between 2 and 4: the
next command that gets the lock asks the scheduler for a job of this name. If there is one, its id is
appended. If the scheduler does not know the name, or cannot tell, the next command tries to create the file
``start`` in the folder, which is also the first act of the job's script. If that succeeds, the attempt is
withdrawn: even if its job still arrives, its script finds the file and stops. If the file exists, the job
has started, and the run stays ``unknown`` until its folder or the scheduler says how it ended. Nothing else
needs to be remembered, and nothing is started because something was *not* seen.

A command that gets the lock records what it finds out. Any other shows the same without writing.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import import_module

from ddp_scaling_bench.errors import BenchError, UnavailableError, UnwritableError
from ddp_scaling_bench.files import write_atomically
from ddp_scaling_bench.finding import messages
from ddp_scaling_bench.units import count

from ..matrix.cell import Cell, Run
from ..study.conditions import parse_moment
from ..study.ledger import End, FailureClass, LockedError, Record, RunState, now, study_lock
from ..study.plan_json import PlannedStudy, place_of
from ..study.reasons import CancelledByUser
from ..study.run_json import Attempt, next_attempt
from .commands import SubmittedCommands
from .contract import Job, Pack, RefusedError, Scheduler, Status, UncertainError
from .end import as_iso, earlier_end, end_of, has_begun, starts_of
from .logs import joined
from .neighbours import Neighbourhood

#: A submit program that outlived its `bench submit` waits at most this long for a busy controller.
LOCK_WAIT_S = 200.0
#: After the answer to a submission was lost, its job is searched for this long.
UNCERTAIN_WAIT_S = 60.0
#: Time after the end of a job in which its accounting must be complete.
GRACE_S = 30.0
#: The limit in place of GRACE_S if the end time comes from the clock of a node, which can be wrong.
NODE_CLOCK_GRACE_S = 120.0
#: Time after the end of a job in which missing accounting is asked for again.
MISSING_FOR_S = 24 * 3600.0
#: A scheduler gives a cancelled job this long to end.
CANCEL_S = 90.0
#: A scheduler considers a new job within this time, unless it is very busy.
CONSIDERED_S = 4.0
#: Time in which :meth:`Engine.settled` waits for the accounting of ended jobs.
ACCOUNTING_WAIT_S = 4.0
#: From this number of ended runs on, several threads read their folders: a shared file system answers slowly.
MANY_RUNS, THREADS = 64, 8

INCOMPLETE = "has ended; its accounting is not complete yet"


class QueueFullError(BenchError):
    """The limit on the number of jobs is reached. ``left`` contains the runs that were not submitted."""

    def __init__(self, message: str, *, remedy: str, left: Sequence[Run]) -> None:
        super().__init__(message, remedy=remedy)
        self.left = list(left)


@dataclass
class Callbacks:
    """Functions that a submission calls.

    ``on_start`` is called before a run is started. If it raises an exception, the submission ends.
    """

    on_start: Callable[[Run], None] = lambda run: None
    on_end: Callable[[Run, Record], None] = lambda run, record: None
    on_message: Callable[[str], None] = lambda message: None


def scheduler_for(study: PlannedStudy) -> Scheduler:
    """Return the scheduler of the study's matrix."""
    module = import_module(f".{study.scheduler.module or study.executor}", __package__)
    scheduler: Scheduler = module.SCHEDULER(study)
    return scheduler


def may_start(record: Record, seen: Record) -> bool:
    """Return False if a run is active, completed undisturbed, or was started since ``seen`` was read."""
    if record.state.active or (record.state is RunState.COMPLETED and not record.is_disturbed):
        return False
    return record.attempt == seen.attempt or record.state is RunState.PLANNED


class Engine:
    """Submit, watch and cancel the runs of one study."""

    def __init__(self, study: PlannedStudy, scheduler: Scheduler | None = None) -> None:
        if archive := study.folder.archive:
            name, path = study.folder.name, shlex.quote(str(archive))
            unpack = f"unpack it (tar -xzf {path} -C DIR), then: bench submit DIR/{shlex.quote(name)} --adopt"
            remedy = f"give the study: {name}" if (archive.parent / name).exists() else unpack
            raise BenchError(f"{archive}: runs of an archive cannot be started or cancelled", remedy=remedy)
        self.study = study
        self.scheduler = scheduler or scheduler_for(study)

    # -- how the runs are ---------------------------------------------------------------

    def poll(self) -> dict[str, Record]:
        """Return the present record of each run, in the planned order, after one question to the scheduler.

        Ends are recorded if the lock is free and the study is writable.

        Raises:
            UnavailableError: the scheduler does not answer.
        """
        records = self.study.records()
        if all(record.settled for record in records.values()):
            return records
        if self.is_copy():
            return {run_id: _of_original(record) for run_id, record in records.items()}
        try:
            with study_lock(self.study.folder.lock):
                return self._refresh(writing=True)
        except LockedError:
            return self._refresh(writing=False)
        except UnwritableError as error:
            return {
                run_id: _unsaved(record, error) if record.end and not records[run_id].end else record
                for run_id, record in self._refresh(writing=False).items()
            }

    def settled(self) -> dict[str, Record]:
        """Return the present records; wait some seconds for the accounting of jobs that have ended."""
        deadline = time.monotonic() + ACCOUNTING_WAIT_S
        while True:
            records = self.poll()
            if not any(record.ending for record in records.values()) or time.monotonic() > deadline:
                return records
            time.sleep(0.4)

    def _refresh(self, *, writing: bool) -> dict[str, Record]:
        """Ask the scheduler about all runs that are not settled; return the records of all runs."""
        records = self.study.records()
        asked = {r.run_id: r for r in records.values() if r.state.active or _lacks_accounting(r)}
        if not asked:
            return records
        statuses = self.scheduler.poll({r.job_name: r.job_id for r in asked.values()})
        found = dict(zip(asked, self._all(asked.values(), statuses, writing=writing), strict=True))
        ended = {run_id: record for run_id, record in found.items() if record.end is not asked[run_id].end}
        found |= Neighbourhood(self.study, self.scheduler, {**records, **found}, statuses).assess(ended)
        if writing:
            self._write(asked, found, statuses)
        return {run_id: found.get(run_id, record) for run_id, record in records.items()}

    def _all(self, asked: Iterable[Record], statuses: Mapping[str, Status], *, writing: bool) -> list[Record]:
        def following(record: Record) -> Record:
            return self._next(record, statuses.get(record.job_name), mates, writing=writing)

        todo = list(asked)
        mates = [record for record in todo if record.pack is not None and record.state.active]
        if len(todo) < MANY_RUNS:
            return list(map(following, todo))
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(following, todo))

    def _next(
        self, record: Record, status: Status | None, mates: Sequence[Record], *, writing: bool
    ) -> Record:
        """Return the record that follows from the status of its job (None: there is no such job)."""
        if status is not None and status.job_id:  # the name is certain, the id in the ledger may be wrong
            record = replace(record, job_id=status.job_id)
        folder, cell = self.study.run_folder(record), self.study.cell_of(record.run_id)
        packed = record.pack is not None
        is_alive = status is not None and status.state in (RunState.QUEUED, RunState.RUNNING)
        is_over = status is not None and (status.state.ended or (status.settled and not is_alive))
        if record.state.ended and not (is_alive or is_over):
            return record  # accounting is still away, or a job that was cancelled has been forgotten
        if status is not None and is_alive and not (packed and folder.pack_end.is_file()):
            return self._alive(record, status, mates)
        end = end_of(folder, cell, status, packed=packed)
        if record.end is not None and not end.state.ended:
            return record.ended(replace(record.end, settled=True))  # cancelled before its turn
        if end.state is RunState.PLANNED:
            return self._withdraw(record, messages(end.reasons), writing=writing)
        if end.state is RunState.UNKNOWN:
            return self._unknown(record, status, writing=writing)
        final = _is_final(end, status)
        if record.state.ended and not final:
            return record
        if record.by_bench and end.failure_class is FailureClass.PREEMPTED and _age_s(record.time) < GRACE_S:
            return record  # accounting lacks the row of the requeued job, which was cancelled
        if not (final or end.accounting or (packed and end.state is RunState.COMPLETED)):
            return replace(record, state=RunState.RUNNING, remark=INCOMPLETE, ending=True)
        if record.by_bench and (
            end.state is RunState.CANCELLED or end.failure_class is FailureClass.KILLED
        ):  # the reason is more specific than that of the scheduler, or of a process that was killed
            end = replace(
                end,
                state=RunState.CANCELLED,
                reasons=record.end.reasons if record.end else (),
                failure_class=FailureClass.CANCELLED,
                cause=None,
                log_line=None,
            )
        return record.ended(replace(end, settled=final))

    def _alive(self, record: Record, status: Status, mates: Sequence[Record]) -> Record:
        """Return the record of a run whose job waits or runs."""
        if record.state.ended and _age_s(record.time) < CANCEL_S:
            return replace(record, ending=True)  # it was cancelled
        waits = status.state is RunState.QUEUED
        reason = joined(
            f"job {status.job_id} of {status.owner}" if status.owner else "",
            f"its cancellation was lost: job {status.job_id} is there" if record.by_bench else "",
            earlier_end(self.study.run_folder(record), status) if waits else "",
            status.reason,
        )
        record = replace(
            record, state=status.state, remark=reason, stuck=status.stuck, end=None, by_bench=False
        )
        if record.pack is None or waits or has_begun(self.study.run_folder(record)):
            return record
        before = [m for m in mates if (m.pack, m.job_name) == (record.pack, record.job_name)]
        earlier = sum((m.place or 0) < (record.place or 0) for m in before)
        reason = f"waits for {count(earlier, 'run')} before it in its pack (job {status.job_id})"
        return replace(record, state=RunState.QUEUED, remark=reason)

    def _withdraw(self, record: Record, reason: str, *, writing: bool) -> Record:
        """Return the record of an attempt that never started, if it also cannot start any more."""
        if not writing:
            return record
        try:  # as the script's first act: whoever creates the file comes first
            folder = self.study.run_folder(record)
            with open(folder.start, "x", encoding="utf-8") as file:
                file.write(f"bench {now()} {os.uname().nodename} 0\n")
        except FileExistsError:
            starts = starts_of(folder)
            if not starts or starts[0].job != "bench":
                reason = "the job has started, but the scheduler does not know it"
                return replace(record, state=RunState.UNKNOWN, remark=f"{reason}; {_MARK}")
        except FileNotFoundError:
            pass  # without a folder, the script cannot start
        except OSError as error:
            folder.start.unlink(missing_ok=True)  # empty: the disk is full
            return replace(record, state=RunState.UNKNOWN, remark=f"{folder.path}: {error.strerror}")
        return replace(record, state=RunState.PLANNED, remark=reason, end=None)

    def _unknown(self, record: Record, status: Status | None, *, writing: bool) -> Record:
        """Return the record of a run of which neither the scheduler nor the folder says how it is."""
        if not record.job_id and not has_begun(self.study.run_folder(record)):
            reason = "the submission was interrupted before the scheduler accepted the job"
            return self._withdraw(record, reason, writing=writing)
        name = record.job_id or record.job_name
        what = status.reason if status and status.reason else f"the scheduler does not know job {name}"
        reason = f"{what}; the run wrote no end.json. {_MARK}"
        return replace(record, state=RunState.UNKNOWN, remark=reason)

    def _write(
        self, asked: Mapping[str, Record], found: Mapping[str, Record], statuses: Mapping[str, Status]
    ) -> None:
        """Append the records that have changed to the ledger, and write the summaries of ended jobs."""
        changed = [
            record
            for run_id, record in found.items()
            if (record.job_id != asked[run_id].job_id and record.state.active)
            or (not record.state.active and not record.ending and record != asked[run_id])
        ]
        self.study.ledger.append([_as_line(record) for record in changed])
        for record in changed:
            status = statuses.get(record.job_name)
            if record.end is None or status is None:
                continue
            own = status.steps.get(record.run_id, status) if record.pack is not None else status
            if own.summary and (folder := self.study.run_folder(record)).path.is_dir():
                with suppress(UnwritableError):
                    write_atomically(folder.sacct_summary, own.summary)

    # -- submission ---------------------------------------------------------------------

    def submit(
        self,
        runs: Sequence[Run],
        *,
        seen: Mapping[str, Record],
        callbacks: Callbacks,
        max_queued: int | None = None,
        pack: bool = False,
        adopt: bool = False,
    ) -> list[Run]:
        """Start ``runs`` in order while there is room; return the runs for which there was none.

        ``seen`` are the records by which ``runs`` were chosen. A run that another process has started since
        then is left out (:func:`may_start`). With ``pack``, few jobs execute all runs.

        Raises:
            QueueFullError: the scheduler's limit on the number of jobs is reached.
            UnavailableError: the scheduler does not answer.
            BenchError: a run was refused. Earlier runs stay submitted.
        """
        with self._locked(callbacks) as lock:
            self.check_place(adopt=adopt)
            records = self._refresh(writing=True)
            todo = [run for run in runs if may_start(records[run.run_id], seen[run.run_id])]
            lost = self._lost(todo, records)
            # A run that was cancelled is started again when its job has ended.
            ending = [run for run in todo if run.run_id in lost and records[run.run_id].by_bench]
            todo = [run for run in todo if run.run_id not in lost]
            records |= {run_id: one for run_id, one in lost.items() if not records[run_id].by_bench}
            for remark in self.scheduler.check(todo) if todo else ():
                callbacks.on_message(remark)
            self.scheduler.held = (lock,)
            try:
                if pack:
                    self._submit_packs(todo, records, callbacks)
                    return ending
                room = self._room(records, max_queued)
                return [*ending, *self._submit_each(todo, records, callbacks, room)]
            finally:
                self.scheduler.held = ()

    def _room(self, records: Mapping[str, Record], max_queued: int | None) -> int | None:
        limits = [limit for limit in (max_queued, self.scheduler.slots) if limit is not None]
        active = sum(record.state.active or record.ending for record in records.values())
        return max(0, min(limits) - active) if limits else None

    def _lost(self, todo: Sequence[Run], records: Mapping[str, Record]) -> dict[str, Record]:
        """Find runs that have a job of which the ledger does not know, and record this job.

        The ledger can be older than the jobs, and a scheduler that was restored can run a job again.
        """
        names: dict[str, list[tuple[Run, int]]] = {}
        for run in todo:
            record, attempt = records[run.run_id], next_attempt(self.study, run, records[run.run_id])
            names.setdefault(attempt.job_name, []).append((run, attempt.number))
            if record.state is not RunState.PLANNED:
                names.setdefault(record.job_name, []).append((run, record.attempt))
        living = self.scheduler.living(list(names)) if names else {}
        lost = {
            run.run_id: replace(self.study.intent(run.run_id, number), job_name=name, job_id=living[name])
            for name, runs in names.items()
            for run, number in runs
            if name in living
        }
        self.study.ledger.append([one for run_id, one in lost.items() if not records[run_id].by_bench])
        return lost

    def _submit_each(
        self, runs: list[Run], records: Mapping[str, Record], callbacks: Callbacks, room: int | None
    ) -> list[Run]:
        commands, chain = SubmittedCommands(self.study), self._chain(records)
        todo = self._largest_first(runs, records, callbacks) if room is None or room else runs
        for done, run in enumerate(todo[:room]):
            callbacks.on_start(run)
            attempt = next_attempt(self.study, run, records[run.run_id])
            allocation = {"kind": "job", "nodes": attempt.cell.nodes}
            attempt.claim(self.study, allocation=allocation, **commands.describe(attempt.cell))
            job = self.job(attempt, after=chain or ())
            try:
                (record,) = self._submit(job, [_intent(attempt)], [attempt])
            except RefusedError as refusal:
                raise _refused(refusal, todo, done) from None
            if chain is not None:
                chain.append(record.job_id)
            callbacks.on_end(run, record)
        return [] if room is None else todo[room:]

    def _submit_packs(self, runs: Sequence[Run], records: Mapping[str, Record], callbacks: Callbacks) -> None:
        attempts = [next_attempt(self.study, run, records[run.run_id]) for run in runs]
        packs = self.scheduler.packs(attempts) if runs else ()
        doubts: dict[str, None] = {}
        for pack in packs:  # before any of them is submitted
            try:
                doubts[self.scheduler.trial(pack.job, nodes=pack.nodes)] = None
            except RefusedError as refusal:
                raise _refused_pack(refusal, packs, pack, submitted=False) from None
        for doubt in filter(None, doubts):
            callbacks.on_message(f"the pack may have to wait, because {doubt}")
        chain = self._chain(records)
        for pack in packs:
            try:
                submitted = self._submit_pack(pack, chain or (), callbacks)
            except RefusedError as refusal:
                raise _refused_pack(refusal, packs, pack, submitted=True) from None
            if chain is not None:
                chain.append(submitted[0].job_id)
            for (attempt, _), record in zip(pack.attempts, submitted, strict=True):
                callbacks.on_end(attempt.run, record)

    def _submit_pack(self, pack: Pack, after: Sequence[str], callbacks: Callbacks) -> list[Record]:
        for attempt, _ in pack.attempts:
            callbacks.on_start(attempt.run)  # can raise an error; this pack has not been submitted yet
        commands = SubmittedCommands(self.study)
        for attempt, allocation in pack.attempts:
            attempt.claim(self.study, allocation=allocation, **commands.describe(attempt.cell))
        pack.write()
        intents = [
            replace(_intent(attempt), pack=own["pack"], place=own["place"]) for attempt, own in pack.attempts
        ]
        job = replace(pack.job, after=tuple(after))
        return self._submit(job, intents, [attempt for attempt, _ in pack.attempts])

    def _submit(self, job: Job, intents: Sequence[Record], attempts: Sequence[Attempt]) -> list[Record]:
        """Submit one job for attempts whose folders exist; return their records with the job's id."""
        self.study.ledger.append(intents)
        try:
            job_id = self.scheduler.submit(job)
        except UncertainError as lost:
            job_id = self._search(job.name)
            if not job_id:
                what = f"no answer to the submission of {intents[0].run_id} ({lost.message})"
                what = f"{what}, and its job is not listed yet"
                remedy = (
                    "run `bench submit` again in a minute; it looks for the job before it submits the run"
                )
                raise UnavailableError(what, remedy=remedy) from None
        except (RefusedError, UnavailableError) as error:
            reason = f"not submitted: {error.message}"
            refused = [replace(one, state=RunState.PLANNED, remark=reason, refused=True) for one in intents]
            self.study.ledger.append(refused)
            for attempt in attempts:
                attempt.release()
            raise
        submitted = [replace(intent, job_id=job_id) for intent in intents]
        self.study.ledger.append(submitted)
        return submitted

    def _search(self, name: str) -> str:
        deadline = time.monotonic() + UNCERTAIN_WAIT_S
        while time.monotonic() < deadline:
            with suppress(UnavailableError):
                found = self.scheduler.poll({name: ""}).get(name)
                if found is not None and found.job_id:
                    return found.job_id
            time.sleep(1)
        return ""

    def _largest_first(
        self, runs: list[Run], records: Mapping[str, Record], callbacks: Callbacks
    ) -> list[Run]:
        """Raise BenchError if the scheduler would never start the largest run; return the runs in order.

        The trial is skipped if a run of this size has been accepted before. If the scheduler would not start
        the run now, it comes first.
        """
        if not runs:
            return runs

        def size(cell: Cell) -> tuple[int, int]:
            return cell.nodes, cell.world_size

        largest = max(runs, key=lambda run: size(self.study.cells[run.cell_id]))
        cell = self.study.cells[largest.cell_id]
        accepted = (r for r in records.values() if r.job_id)
        if any(size(self.study.cell_of(record.run_id)) >= size(cell) for record in accepted):
            return runs
        job = self.job(next_attempt(self.study, largest, records[largest.run_id]))
        try:
            doubt = self.scheduler.trial(job, nodes=cell.nodes)
        except RefusedError as refusal:
            what = f"the largest cell, {largest.cell_id}, is not accepted: {refusal.message}"
            correct = refusal.remedy or "correct the matrix's cluster section and plan it again"
            remedy = f"nothing was submitted; {correct}, or leave out that size (--only)"
            raise BenchError(what, remedy=remedy) from None
        if not doubt:
            return runs
        callbacks.on_message(f"{largest.run_id} is submitted first, because {doubt}")
        return [largest, *(run for run in runs if run is not largest)]

    def _chain(self, records: Mapping[str, Record]) -> list[str] | None:
        """Return the ids of the study's jobs that have not ended, if its runs are executed one after another.

        A job waits for all of them. A dependency on the preceding job alone is not enough: if that job is
        cancelled while it waits, its successor would start although an earlier job still runs.
        """
        if self.study.max_running is None:
            return None
        alive = (r for r in records.values() if r.state in (RunState.QUEUED, RunState.RUNNING))
        return list(dict.fromkeys(record.job_id for record in alive if record.job_id))

    def job(self, attempt: Attempt, *, after: Sequence[str] = ()) -> Job:
        """Return the job that executes an attempt."""
        script = self.study.script(attempt.cell.cell_id).absolute()
        return Job(name=attempt.job_name, script=script, folder=attempt.folder, after=tuple(after))

    def stuck(self, runs: Sequence[Run]) -> list[Record]:
        """Return those of ``runs`` that the scheduler will not start unless somebody acts.

        A scheduler accepts some jobs that it never starts, and says so only when it has considered them, for
        which this method waits at most :data:`CONSIDERED_S` seconds.
        """
        records = self.study.records()
        asked = [record for run in runs if (record := records[run.run_id]).state.active and record.job_id]
        deadline = time.monotonic() + CONSIDERED_S
        while asked:
            try:
                found = self.scheduler.poll({record.job_name: record.job_id for record in asked})
            except UnavailableError:
                return []
            if all(status.considered for status in found.values()) or time.monotonic() > deadline:
                stuck = [(record, found.get(record.job_name)) for record in asked]
                return [
                    replace(r, remark=s.reason, stuck=True) for r, s in stuck if s is not None and s.stuck
                ]
            time.sleep(0.25)
        return []

    # -- cancellation -------------------------------------------------------------------

    def cancel(self, runs: Sequence[Run], *, adopt: bool = False, with_submit: bool = False) -> int:
        """Cancel the jobs of the active ones of ``runs``; return the number of runs.

        ``with_submit`` is true if the user stopped the `bench submit` that waits for them.

        Raises:
            BenchError: a job executes other runs, too, or belongs to another user.
        """
        wanted = {run.run_id for run in runs}
        with study_lock(self.study.folder.lock, wait_s=LOCK_WAIT_S):
            self.check_place(adopt=adopt)
            try:
                records = self._refresh(writing=True)
            except UnwritableError:  # jobs are cancelled even if the disk is full
                records = self._refresh(writing=False)
            chosen = [r for r in records.values() if r.run_id in wanted and r.state.active and not r.ending]
            _refuse_part_of_a_pack(records.values(), chosen)
            if not chosen:
                return 0
            statuses = self.scheduler.poll({r.job_name: r.job_id for r in chosen})
            alive = {
                name: s for name, s in statuses.items() if s.state in (RunState.QUEUED, RunState.RUNNING)
            }
            others = {name: status for name, status in statuses.items() if status.owner}
            # Jobs that have just ended are left as they are.
            own = [r for r in chosen if r.job_name in alive or r.state is RunState.UNKNOWN]
            own = [record for record in own if record.job_name not in others]
            self.scheduler.cancel(sorted({s.job_id for name, s in alive.items() if name not in others}))
            for record in own:
                if record.job_name not in alive and not has_begun(self.study.run_folder(record)):
                    self._withdraw(record, "", writing=True)  # its job cannot start any more
            self.study.ledger.append([_cancelled(r, alive.get(r.job_name), with_submit) for r in own])
        if others:
            listed = ", ".join(f"job {status.job_id} of {status.owner}" for status in others.values())
            what = f"{count(len(own), 'run')} cancelled; not cancelled: {listed}"
            raise BenchError(what, remedy="a job can be cancelled only by its user, on its host")
        return len(own)

    # -- lock and place -----------------------------------------------------------------

    @contextmanager
    def _locked(self, callbacks: Callbacks) -> Iterator[int]:
        """Hold the study's lock. If another command holds it, say so and wait."""
        path = self.study.folder.lock
        with ExitStack() as held:
            try:
                lock = held.enter_context(study_lock(path, wait_s=0.5))
            except LockedError as busy:
                callbacks.on_message(f"{busy.message}; waiting until it ends")
                lock = held.enter_context(study_lock(path, wait_s=LOCK_WAIT_S))
            yield lock

    def is_copy(self) -> bool:
        """Return True if this folder is a copy: neither its path nor its inode is that of the plan."""
        planned, here = self.study.place, place_of(self.study.folder)
        return bool(planned) and all(planned.get(name) != value for name, value in here.items())

    def adopt(self) -> None:
        """Let this folder, a copy of a study, be the study."""
        with study_lock(self.study.folder.lock, wait_s=LOCK_WAIT_S):
            self.check_place(adopt=True)

    def check_place(self, *, adopt: bool) -> None:
        """Raise BenchError if the study's folder is a copy, unless the user adopts it."""
        if not self.is_copy():
            return
        if not adopt:
            what = f"{self.study.folder.path} is a copy of a study in another folder, which has the same jobs"
            remedy = "plan it under a new name, or give --adopt if the other folder is no longer used"
            raise BenchError(what, remedy=remedy)
        self.study.adopt()


_MARK = "`bench cancel` marks the run as cancelled"


def _intent(attempt: Attempt) -> Record:
    return Record(
        run_id=attempt.run.run_id, attempt=attempt.number, state=RunState.QUEUED, job_name=attempt.job_name
    )


def _as_line(record: Record) -> Record:
    """Return what the ledger stores of a record: that a job runs, and why it waits, is not stored."""
    if record.state.active:
        return replace(record, state=RunState.QUEUED, remark="", stuck=False)
    return record


def _of_original(record: Record) -> Record:
    """Return the record of a run in a copy of its study. Jobs are those of the original."""
    if not record.state.active:
        return record
    reason = "this folder is a copy; the original study knows how the run is"
    return replace(record, state=RunState.UNKNOWN, remark=reason)


def _unsaved(record: Record, error: UnwritableError) -> Record:
    return replace(record, remark=joined(record.remark, f"not saved: {error.message}"))


def _lacks_accounting(record: Record) -> bool:
    """Return True if an attempt ended recently, and its scheduler is to be asked again."""
    return record.end is not None and not record.end.settled and _age_s(record.time) < MISSING_FOR_S


def _is_final(end: End, status: Status | None) -> bool:
    """Return True if nothing more will become known about an end, or its job ended long ago."""
    if end.settled or status is None:
        return True
    limit = GRACE_S if status.ended is not None else NODE_CLOCK_GRACE_S
    return end.ended_at is not None and _age_s(end.ended_at) > limit


def _age_s(moment: str) -> float:
    at = parse_moment(moment)
    return 0.0 if at is None else (datetime.now(UTC) - at).total_seconds()


def _cancelled(record: Record, status: Status | None, with_submit: bool) -> Record:
    """Return the record of an attempt that is being cancelled. How its job ended is asked later."""
    was = record.reason if record.state is RunState.UNKNOWN else ""
    end = End(
        state=RunState.CANCELLED,
        reasons=(CancelledByUser(with_submit=with_submit, was=was),),
        failure_class=FailureClass.CANCELLED,
        started_at=as_iso(status.started) if status and record.pack is None else None,
        ended_at=now(),
        settled=status is None,
    )
    return replace(record.ended(end), by_bench=True)


def _refused(refusal: RefusedError, todo: Sequence[Run], done: int) -> BenchError:
    kept = f"{done} of {len(todo)} runs are submitted"
    what = f"{todo[done].run_id} was refused: {refusal.message} ({kept})"
    if refusal.queue_is_full:
        remedy = "run `bench submit` again when some jobs have ended, or use --max-queued or --wait"
        return QueueFullError(what, remedy=remedy, left=todo[done:])
    remedy = "correct the cause, then run `bench submit` again: it continues with this run"
    return BenchError(what, remedy=remedy)


def _refused_pack(refusal: RefusedError, packs: Sequence[Pack], pack: Pack, *, submitted: bool) -> BenchError:
    """Return the error for a refused pack; ``submitted`` is true if those before it are submitted."""
    done = packs.index(pack) if submitted else 0
    runs = [attempt.run for one in packs[done:] for attempt, _ in one.attempts]
    names = f" ({pack.attempts[0][0].run.run_id})" if len(pack.attempts) == 1 else ""
    what = f"a pack of {count(len(pack.attempts), 'run')}{names} was refused: {refusal.message}"
    if len(packs) > 1:
        what = f"{what} ({done} of {len(packs)} packs are submitted)"
    if refusal.queue_is_full:
        remedy = "run `bench submit --pack` again when some jobs have ended, or use --wait"
        return QueueFullError(what, remedy=remedy, left=runs)
    first = "run `bench submit --pack` again: it submits the others" if done else "nothing was submitted"
    fewer = "choose fewer runs with --only, lower cluster.time_limit, or submit without --pack"
    return BenchError(what, remedy=f"{first}; correct the matrix's cluster section, or {fewer}")


def _refuse_part_of_a_pack(records: Iterable[Record], chosen: Sequence[Record]) -> None:
    """Raise BenchError if cancelling the ``chosen`` runs would also end other runs of the same job."""
    jobs, run_ids = {record.job_name for record in chosen}, {record.run_id for record in chosen}
    for record in records:
        others = record.state.active and not record.ending and record.run_id not in run_ids
        if others and record.job_name in jobs:
            what = f"job {record.job_id} is a pack; cancelling it also ends {record.run_id} and maybe others"
            raise BenchError(what, remedy="cancel without --only, or wait until the runs have ended")
