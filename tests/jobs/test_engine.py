"""The engine with a scheduler in memory: each run becomes one job, and every end reaches the ledger."""

import errno
import fcntl
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bench.jobs import engine as engine_module
from bench.jobs.contract import Job, RefusedError, Scheduler, Status, UncertainError
from bench.jobs.engine import Callbacks, Engine, QueueFullError
from bench.jobs.slurm.pack import Pack, split
from bench.study.layout import StudyFolder
from bench.study.ledger import FailureClass, Ledger, Record, RunState, now
from bench.study.plan_json import PlannedStudy, open_study
from bench.study.reasons import Said
from bench.study.run_json import Attempt
from ddp_scaling_bench.errors import BenchError, UnavailableError, unwritable
from ddp_scaling_bench.run_folder import RunFolder
from tests.common import change_json
from tests.matrices import command, matrix, planned_study, slurm


class Killed(BaseException):
    """`bench` is killed here."""


class FullError(RefusedError):
    queue_is_full = True


@dataclass
class Entry:
    """A job of the queue, and what its script does."""

    job: Job
    status: Status
    is_purged: bool = False

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.job.folder.path)

    def start(self, *, restart: int = 0) -> bool:
        """Begin the script; return False if another start owns the folder."""
        line = f"{self.status.job_id} {now()} n1 {restart}\n"
        try:
            with self.folder.start.open("x") as file:
                file.write(line)
        except FileExistsError:
            if self.folder.start.read_text().split()[0] != self.status.job_id:
                self.become(RunState.FAILED, exit_code=1)
                return False
            with self.folder.start.open("a") as file:
                file.write(line)
        self.folder.out.touch()
        self.become(RunState.RUNNING, started=datetime.now(UTC), hosts="n1", restarts=restart)
        return True

    def end(self, exit_code: int = 0, **values: Any) -> None:
        """End the script; the scheduler knows of it at once."""
        self.folder.end.write_text(json.dumps({"exit_code": exit_code, "signal": None, "time": now()}))
        state = RunState.FAILED if exit_code else RunState.COMPLETED
        failure_class = FailureClass.BAD_EXIT if exit_code else None
        self.become(state, exit_code=exit_code, failure_class=failure_class, **values)

    def become(self, state: RunState, **values: Any) -> None:
        ended = datetime.now(UTC) if state.ended else None
        self.status = replace(self.status, **{"state": state, "ended": ended, **values})


class Queue(Scheduler):
    """A queue in memory, whose answers the test decides."""

    poll_s = 0.01

    def __init__(self, study: PlannedStudy) -> None:
        super().__init__(study)
        self.entries: list[Entry] = []
        #: Answers to the next submissions: an error, and whether the job exists nevertheless.
        self.lost: list[tuple[BaseException | None, bool]] = []
        self.cancelled: list[str] = []
        self.is_away = False

    def submit(self, job: Job) -> str:
        error, is_accepted = self.lost.pop(0) if self.lost else (None, True)
        job_id = str(len(self.entries) + 1)
        if is_accepted:
            self.entries.append(Entry(job, Status(job_id=job_id, state=RunState.QUEUED)))
        if error is not None:
            raise error
        return job_id

    def poll(self, jobs: Mapping[str, str]) -> dict[str, Status]:
        if self.is_away:
            raise UnavailableError("the queue is away")
        found = {}
        for name, job_id in jobs.items():
            own = [one for one in self.entries if one.job.name == name]
            present = [one for one in own if not one.is_purged]
            living = [one for one in present if one.status.state.active]
            if living or present:
                found[name] = (living or present)[-1].status
            elif own:
                reason = f"the queue has forgotten job {job_id}"
                found[name] = Status(job_id=job_id, state=RunState.UNKNOWN, remark=reason, settled=False)
        return found

    def cancel(self, ids: Sequence[str]) -> None:
        self.cancelled += ids
        for one in self.entries:
            if one.status.job_id in ids and one.status.state.active:
                why = {"failure_class": FailureClass.CANCELLED, "reasons": (Said(text="was cancelled"),)}
                one.become(RunState.CANCELLED, **why)

    def words(self, job: Job) -> str:
        return f"enqueue {job.script} {job.folder.path}"


@dataclass
class Lab:
    """A study of three runs and its queue."""

    study: PlannedStudy
    queue: Queue

    @property
    def engine(self) -> Engine:
        """What the next command has: a new engine, with the study as it is on the disk."""
        return Engine(open_study(self.study.folder), self.queue)

    @property
    def ids(self) -> list[str]:
        return [run.run_id for run in self.study.runs]

    def submit(self, **options: Any) -> list[str]:
        """Do what `bench submit` does; return the runs that were not started yet."""
        engine = self.engine
        seen = engine.poll()
        startable = (RunState.PLANNED, RunState.CANCELLED)
        runs = [run for run in self.study.runs if seen[run.run_id].state in startable]
        return [run.run_id for run in engine.submit(runs, seen=seen, callbacks=Callbacks(), **options)]

    def submit_and_die(self, *, accepted: bool = False) -> None:
        """Submit, and be killed while the scheduler answers to the first job."""
        self.queue.lost.append((Killed(), accepted))
        with pytest.raises(Killed):
            self.submit()

    def begin(self, *numbers: int) -> None:
        """Begin the scripts of these jobs, counted from 0."""
        for number in numbers:
            self.queue.entries[number].start()

    def end(self, number: int, exit_code: int = 0, **values: Any) -> None:
        """Begin and end the script of a job."""
        self.begin(number)
        self.queue.entries[number].end(exit_code, **values)

    def cancel(self, *run_ids: str) -> int:
        return self.engine.cancel([run for run in self.study.runs if run.run_id in (run_ids or self.ids)])

    def records(self) -> list[Record]:
        """Return what `bench status` shows, in the planned order."""
        return list(self.engine.poll().values())

    def states(self) -> list[str]:
        return [str(record.state) for record in self.records()]

    def attempts(self) -> list[int]:
        return [record.attempt for record in self.records()]

    def jobs(self) -> list[tuple[str, str]]:
        return [(str(record.state), record.job_id) for record in self.records()]

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of the ledger."""
        ledger = self.study.folder.ledger
        return [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []

    def folder(self, number: int, attempt: int = 1) -> RunFolder:
        return self.study.folder.attempt(self.ids[number], attempt)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock, as another `bench submit` does."""
        with self.study.folder.lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def plan(folder: Path, **sections: Any) -> PlannedStudy:
    usual = {"axes": {"tasks_per_node": [1]}, "workload": command("true"), "repeats": 3}
    return planned_study(folder, matrix("own", **usual | sections))


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setattr(engine_module, "UNCERTAIN_WAIT_S", 0.2)
    monkeypatch.setattr(engine_module, "NODE_CLOCK_GRACE_S", -1)
    study = plan(tmp_path)
    return Lab(study, Queue(study))


def test_each_run_becomes_one_job_and_a_second_submission_starts_nothing(lab):
    assert lab.submit() == []
    assert [one.job.name for one in lab.queue.entries] == [lab.study.job_name(run, 1) for run in lab.ids]
    assert [(line["run_id"], line.get("job_id", "")) for line in lab.lines()] == [
        (run, job_id) for number, run in enumerate(lab.ids, 1) for job_id in ("", str(number))
    ]
    before = lab.lines()
    assert lab.submit() == []
    assert (len(lab.queue.entries), lab.lines()) == (3, before)


def test_killed_before_the_scheduler_accepted_the_run_is_withdrawn_through_the_gate(lab):
    lab.submit_and_die()
    assert [line["state"] for line in lab.lines()] == ["queued"]
    first = lab.records()[0]
    assert (first.state, first.attempt, first.refused) == (RunState.PLANNED, 1, False)
    assert lab.folder(0).start.read_text().split()[0] == "bench"
    job = Job(name=first.job_name, script=Path("x"), folder=lab.folder(0))
    assert not Entry(job, Status(job_id="9", state=RunState.QUEUED)).start()  # it comes late
    lab.submit()
    assert lab.attempts() == [2, 1, 1]


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_job_whose_id_was_not_written_is_found_by_its_name(lab, monkeypatch, is_killed):
    append = Ledger.append

    def full(ledger: Ledger, records: Sequence[Record]) -> None:
        if any(record.job_id for record in records):
            raise unwritable(ledger.path, OSError(errno.ENOSPC, "No space left on device"))
        append(ledger, records)

    if is_killed:
        lab.submit_and_die(accepted=True)
    else:
        with monkeypatch.context() as patch, pytest.raises(BenchError, match="No space left on device"):
            patch.setattr(Ledger, "append", full)
            lab.submit()
    assert lab.jobs() == [("queued", "1"), ("planned", ""), ("planned", "")]
    lab.submit()
    assert len(lab.queue.entries) == 3


def test_a_job_that_started_before_its_id_was_known_is_never_withdrawn(lab):
    lab.submit_and_die(accepted=True)
    (entry,) = lab.queue.entries
    entry.start()
    lab.queue.entries.clear()  # the queue answers that it knows no such job
    assert lab.states()[0] == "unknown"
    lab.submit()
    assert lab.ids[0] not in " ".join(one.job.name for one in lab.queue.entries)
    entry.end()
    assert lab.states()[0] == "completed"


def test_a_refused_run_stops_the_submission_and_its_number_is_free_again(lab):
    lab.queue.lost.append((RefusedError("no such partition"), False))
    with pytest.raises(BenchError, match="no such partition"):
        lab.submit()
    record = lab.records()[0]
    assert (record.state, record.reason) == (RunState.PLANNED, "not submitted: no such partition")
    assert not lab.folder(0).path.exists()
    lab.submit()
    assert lab.attempts() == [1, 1, 1]


def test_a_full_queue_returns_the_runs_that_are_left(lab):
    assert lab.submit(max_queued=1) == lab.ids[1:]
    lab.queue.lost.append((FullError("the queue is full"), False))
    with pytest.raises(QueueFullError, match="the queue is full") as full:
        lab.submit()
    assert [run.run_id for run in full.value.left] == lab.ids[1:]
    assert lab.states() == ["queued", "planned", "planned"]


@pytest.mark.parametrize(("error", "attempt"), [(UncertainError, 2), (UnavailableError, 1)])
def test_a_lost_answer_without_a_job_and_a_scheduler_that_is_away_stop_the_submission(lab, error, attempt):
    lab.queue.lost.append((error("no answer"), False))
    with pytest.raises(UnavailableError, match="no answer"):
        lab.submit()
    assert lab.queue.entries == []
    assert lab.states() == ["planned"] * 3
    lab.queue.lost.append((UncertainError("no answer"), True))  # this job exists, and is found by its name
    assert lab.submit() == []
    assert lab.jobs() == [("queued", n) for n in "123"]
    assert lab.attempts() == [attempt, 1, 1]


def test_the_rest_starts_when_a_slot_is_free(lab):
    lab.queue.slots = 1
    for number in range(3):
        assert lab.submit() == lab.ids[number + 1 :]
        assert lab.submit() == lab.ids[number + 1 :]
        lab.begin(-1)
        lab.queue.entries[-1].end()
    assert lab.states() == ["completed"] * 3


def test_jobs_wait_for_the_jobs_before_them_that_have_not_ended(tmp_path, monkeypatch):
    study = plan(tmp_path, max_running=1)
    lab = Lab(study, Queue(study))
    lab.submit(max_queued=2)
    lab.end(0)
    lab.submit()
    assert [list(one.job.after) for one in lab.queue.entries] == [[], ["1"], ["2"]]


def test_after_the_tail_of_the_ledger_is_lost_jobs_are_found_by_name(lab):
    lab.submit()
    lab.study.folder.ledger.write_text("")
    assert lab.jobs() == [("queued", n) for n in "123"]
    lab.study.folder.ledger.unlink()
    lab.submit()
    assert len(lab.queue.entries) == 3


def test_an_attempt_without_a_line_is_read_from_its_folder_once_its_job_is_forgotten(lab):
    lab.submit()
    lab.begin(1)
    lab.end(0)
    lab.study.folder.ledger.unlink()
    for entry in lab.queue.entries:
        entry.is_purged = True
    # The third job cannot start any more, because its folder is taken.
    assert lab.states() == ["completed", "unknown", "planned"]
    assert not lab.queue.entries[2].start()
    lab.submit()
    assert lab.attempts() == [1, 1, 2]


def test_a_wrong_id_in_the_ledger_neither_loses_a_job_nor_ends_another(lab):
    lab.submit()
    job = Job(name="other", script=Path("x"), folder=lab.folder(0))
    other = Entry(job, Status(job_id="91", state=RunState.RUNNING))
    ledger = lab.study.folder.ledger
    ledger.write_text(ledger.read_text().replace('"job_id": "1"', '"job_id": "91"'))
    lab.queue.entries.append(other)
    assert lab.jobs() == [("queued", n) for n in "123"]
    assert lab.cancel() == 3
    assert lab.queue.cancelled == ["1", "2", "3"]


def test_without_ledger_and_folders_a_living_job_keeps_its_run_from_starting(lab):
    lab.submit(max_queued=1)
    lab.study.folder.ledger.unlink()
    shutil.rmtree(lab.study.folder.runs)
    lab.submit()
    names = [one.job.name for one in lab.queue.entries]
    assert len(names) == len(set(names)) == 3
    assert lab.records()[0].job_id == "1"


def test_a_forgotten_job_is_unknown_until_the_scheduler_or_the_folder_says_more(lab):
    lab.submit()
    for entry in lab.queue.entries:
        entry.start()
        entry.is_purged = True
    lab.queue.entries[0].end()
    before = lab.lines()
    shown = lab.records()
    assert [str(record.state) for record in shown] == ["completed", "unknown", "unknown"]
    assert "forgotten" in shown[1].reason
    assert [line["run_id"] for line in lab.lines()[len(before) :]] == [lab.ids[0]]
    lab.submit()
    assert len(lab.queue.entries) == 3
    lab.queue.entries[1].is_purged = False
    lab.queue.entries[1].end(3)
    assert lab.states() == ["completed", "failed", "unknown"]
    # A process that is gone without an end has failed.
    lab.queue.entries[2].is_purged = False
    lab.queue.entries[2].become(RunState.UNKNOWN, settled=True)
    record = lab.records()[2]
    assert (record.state, record.failure_class) == (RunState.FAILED, FailureClass.KILLED)


def test_a_scheduler_that_is_away_is_an_error_and_writes_nothing(lab):
    lab.submit()
    before = lab.lines()
    lab.queue.is_away = True
    with pytest.raises(UnavailableError, match="the queue is away"):
        lab.records()
    with pytest.raises(UnavailableError, match="the queue is away"):
        lab.cancel()
    assert lab.lines() == before


def test_an_end_is_one_line_of_the_ledger_and_changes_nothing_in_the_folder(lab):
    lab.submit()
    lab.end(0)
    lab.folder(1).err.write_text("Traceback (most recent call last):\nRuntimeError: CUDA out of memory\n")
    lab.end(1, 1)
    before = {path: path.read_bytes() for path in lab.study.folder.runs.rglob("*") if path.is_file()}
    shown = lab.records()
    assert [str(record.state) for record in shown] == ["completed", "failed", "queued"]
    assert (shown[1].failure_class, shown[1].exit_code) == (FailureClass.OUT_OF_MEMORY, 1)
    assert (shown[1].cause, shown[1].end.hosts) == ("oom-gpu", "n1")
    assert {path: path.read_bytes() for path in before} == before
    lines = lab.lines()
    assert [line["state"] for line in lines[-2:]] == ["completed", "failed"]
    assert [record.end for record in lab.records()] == [record.end for record in shown]
    assert lab.lines() == lines


def test_an_end_without_complete_accounting_is_not_written_yet(lab):
    lab.submit()
    lab.end(0, settled=False, summary="JobID State\n1 FAILED\n")
    before = lab.lines()
    shown = lab.records()[0]
    assert (shown.state, shown.ending) == (RunState.RUNNING, True)
    assert lab.lines() == before
    lab.queue.entries[0].become(RunState.COMPLETED, settled=True)
    assert lab.records()[0].state is RunState.COMPLETED
    assert lab.folder(0).sacct_summary.read_text() == "JobID State\n1 FAILED\n"


def test_two_starts_in_one_folder_are_not_valid_and_both_are_named(lab):
    lab.submit()
    for number, restart in ((0, 0), (1, 1)):
        lab.begin(number)
        lab.queue.entries[number].start(restart=restart)
        lab.queue.entries[number].end()
    twice, requeued = lab.records()[:2]
    assert (twice.state, twice.failure_class) == (RunState.FAILED, FailureClass.STARTED_TWICE)
    for line in lab.folder(0).start.read_text().splitlines():
        assert line.split()[1] in twice.reason
    assert requeued.state is RunState.COMPLETED


def test_cancelled_runs_stay_cancelled_and_completed_ones_completed(lab):
    lab.submit()
    lab.end(0)
    lab.begin(1)
    assert lab.cancel() == 2
    assert lab.queue.cancelled == ["2", "3"]
    for _ in range(2):
        shown = [(str(one.state), one.reason) for one in lab.records()]
        by = ("cancelled", "cancelled by bench cancel")
        assert shown == [("completed", ""), by, by]
    assert lab.cancel() == 0
    assert lab.submit() == []
    assert lab.attempts() == [1, 2, 2]


def test_a_lost_cancellation_is_noticed_after_a_while(lab, monkeypatch):
    lab.submit()
    monkeypatch.setattr(Queue, "cancel", lambda queue, ids: None)
    assert lab.cancel(lab.ids[0]) == 1
    assert lab.states()[0] == "cancelled"
    monkeypatch.setattr(engine_module, "CANCEL_S", -1)
    assert lab.jobs()[0] == ("queued", "1")
    assert "cancellation was lost" in lab.records()[0].reason
    lab.submit()
    assert len(lab.queue.entries) == 3


def test_a_cancelled_run_is_started_again_once_its_job_has_ended(lab, monkeypatch):
    lab.submit()
    cancel = Queue.cancel
    monkeypatch.setattr(Queue, "cancel", lambda queue, ids: None)  # the job takes its time
    assert lab.cancel(lab.ids[0]) == 1
    assert lab.submit() == lab.ids[:1]
    assert len(lab.queue.entries) == 3
    cancel(lab.queue, ["1"])
    assert lab.submit() == []
    assert lab.attempts() == [2, 1, 1]


def test_jobs_of_other_users_are_shown_and_named_but_not_cancelled(lab):
    lab.submit()
    lab.begin(0)
    theirs = lab.queue.entries[0]
    theirs.status = replace(theirs.status, owner="user alice")
    assert lab.states() == ["running", "queued", "queued"]
    with pytest.raises(BenchError, match="alice"):
        lab.cancel(lab.ids[0])
    assert lab.queue.cancelled == []
    assert lab.states()[0] == "running"
    lab.submit()
    assert len(lab.queue.entries) == 3


def packed(lab: Lab) -> Entry:
    """Write what the submission of a pack leaves."""
    folder, name = lab.study.folder.pack(1), f"own.pack.a1.{lab.study.plan['key']}"
    folder.path.mkdir(parents=True)
    common = {"attempt": 1, "state": RunState.QUEUED, "job_name": name, "job_id": "1", "pack": 1}
    for place, run in enumerate(lab.ids, 1):
        lab.study.folder.attempt(run, 1).path.mkdir(parents=True)
        lab.study.ledger.append([Record(run_id=run, place=place, **common)])
    entry = Entry(Job(name=name, script=Path("x"), folder=folder), Status(job_id="1", state=RunState.QUEUED))
    lab.queue.entries.append(entry)
    return entry


def end_of_pack(folder: RunFolder, exit_code: int, by: str = "exit") -> None:
    times = {"started": "2026-01-01T00:00:00Z", "ended": "2026-01-01T00:00:09Z", "hosts": "n1"}
    folder.pack_end.write_text(json.dumps({"exit_code": exit_code, "by": by, **times}))


def test_runs_of_a_pack_end_one_by_one_and_those_that_did_not_start_are_planned_again(lab):
    entry = packed(lab)
    assert lab.states() == ["queued"] * 3
    entry.become(RunState.RUNNING, started=datetime.now(UTC))
    for number in (0, 1):
        lab.folder(number).start.write_text(f"1 {now()} n1 0\n")
    end_of_pack(lab.folder(0), 0)
    assert lab.states() == ["completed", "running", "queued"]
    end_of_pack(lab.folder(1), 143, by="limit")
    reason = "TIMEOUT: reached its time limit"
    entry.become(RunState.FAILED, failure_class=FailureClass.TIME_LIMIT, reasons=(Said(text=reason),))
    _, limited, last = lab.records()
    assert (limited.state, limited.failure_class, limited.reason) == ("failed", "time-limit", reason)
    why = f"not started: its pack (job 1) ended before its turn; {reason}"
    assert (last.state, last.reason) == ("planned", why)
    assert lab.folder(2).start.read_text().split()[0] == "bench"


class PackQueue(Queue):
    """A queue that makes packs as Slurm's does, for jobs of at most four minutes."""

    def packs(self, attempts: Sequence[Attempt]) -> Sequence[Pack]:
        number = 1 + sum(1 for _ in self.study.folder.packs.glob("pack-*"))
        own = split(attempts, lambda partition: 240 if partition == "short" else None)
        return [Pack(self.study, number + i, members) for i, members in enumerate(own)]


@pytest.fixture
def packs(tmp_path: Path, lab: Lab) -> Lab:
    """A study of five runs of two minutes; those on one node (three) are for a partition of four minutes."""
    cluster = slurm(partition={1: "short", 2: "long"}, exclusive={1: False, 2: True})
    axes, repeats = {"nodes": [1, 2], "tasks_per_node": [1]}, {1: 3, 2: 2}
    text = matrix("own", cluster=cluster, axes=axes, workload=command("true"), repeats=repeats, max_running=1)
    study = planned_study(tmp_path, text, results=tmp_path / "packs")
    return Lab(study, PackQueue(study))


@pytest.mark.parametrize("fault", ["refused", "full", "killed", "killed but accepted"])
def test_nothing_is_submitted_twice_if_the_second_pack_fails(packs, fault):
    error = {"refused": RefusedError("no"), "full": FullError("no more jobs")}.get(fault, Killed())
    packs.queue.lost = [(None, True), (error, "accepted" in fault)]
    with pytest.raises(Killed if isinstance(error, Killed) else BenchError) as caught:
        packs.submit(pack=True)
    if fault == "refused":
        remedy = "run `bench submit --pack` again: it submits"
        assert f"(1 of 3 packs are submitted); {remedy}" in str(caught.value)
    if fault == "full":
        assert len(caught.value.left) == 5 - len(packs.study.folder.pack(1).members.read_text().splitlines())
    packs.submit(pack=True)
    jobs = Counter(r.job_id for r in packs.study.records().values())
    assert (packs.states(), sorted(jobs.values())) == (["queued"] * 5, [1, 2, 2])
    names = [one.job.name for one in packs.queue.entries]
    assert len(names) == len(set(names)) == 3


def test_every_pack_is_tried_before_the_first_is_submitted(packs, monkeypatch):
    tried: list[str] = []

    def trial(job: Job, *, nodes: int) -> str:
        tried.append(job.name)
        if len(tried) == 3:
            raise RefusedError("never")
        return ""

    monkeypatch.setattr(packs.queue, "trial", trial)
    with pytest.raises(BenchError, match=r"never \(0 of 3 packs are submitted\); nothing was submitted"):
        packs.submit(pack=True)
    assert (len(tried), packs.queue.entries, packs.lines()) == (3, [], [])


def test_without_the_lock_the_same_is_shown_and_nothing_is_written(lab):
    lab.submit(max_queued=1)
    lab.submit_and_die()
    lab.end(0)
    before = lab.lines()
    with lab.locked():
        # The other command may be just about to submit the second run.
        assert lab.states() == ["completed", "queued", "planned"]
        assert lab.lines() == before
        assert not lab.folder(1).start.exists()
    assert lab.states() == ["completed", "planned", "planned"]
    assert len(lab.lines()) == len(before) + 2


def test_a_study_that_cannot_be_written_is_shown_as_it_is(lab):
    lab.submit()
    lab.end(0)
    lab.study.folder.lock.unlink()
    lab.study.folder.lock.mkdir()  # as on a read-only file system, for root too
    before = lab.lines()
    assert lab.states() == ["completed", "queued", "queued"]
    assert lab.lines() == before
    with pytest.raises(BenchError, match=r"submit\.lock"):
        lab.cancel()


def elsewhere(lab: Lab, folder: Path) -> Lab:
    study = open_study(StudyFolder(folder))
    other = Lab(study, Queue(study))
    other.queue.entries = lab.queue.entries
    return other


def test_a_copied_study_asks_for_adoption_and_then_starts_jobs_of_its_own(lab, tmp_path):
    lab.submit(max_queued=1)
    lab.begin(0)
    copied = elsewhere(lab, shutil.copytree(lab.study.folder.path, tmp_path / "copy/own"))
    before = copied.lines()
    assert copied.states() == ["unknown", "planned", "planned"]
    for call in (copied.submit, copied.cancel):
        with pytest.raises(BenchError, match="--adopt"):
            call()
    assert copied.lines() == before
    copied.submit(adopt=True)
    assert len(lab.queue.entries) == 3  # the run that runs is not started again
    lab.submit()
    names = [one.job.name for one in lab.queue.entries]
    assert len(names) == len(set(names)) == 5
    assert copied.submit() == []
    assert len(lab.queue.entries) == 5


def test_moved_linked_and_restored_studies_do_not_ask(lab, tmp_path):
    lab.submit(max_queued=1)
    shutil.copytree(lab.study.folder.path, tmp_path / "backup")
    moved = tmp_path / "moved"
    lab.study.folder.path.parent.rename(moved)
    (tmp_path / "link").symlink_to(moved)
    assert elsewhere(lab, moved / "own").submit(max_queued=2) == lab.ids[2:]
    assert elsewhere(lab, tmp_path / "link/own").submit() == []
    shutil.copytree(tmp_path / "backup", lab.study.folder.path)
    assert lab.submit() == []
    assert len(lab.queue.entries) == 3
    # Nor does a plan without a place.
    change_json(lab.study.folder.plan_json, place=None)
    assert lab.submit() == []
