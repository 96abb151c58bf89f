"""The client against a real Slurm: submitting, asking, cancelling, and every way a job can end."""

from __future__ import annotations

import os
import subprocess
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest

from bench.slurm.accounting import JobOutcome, outcomes, queue_outcomes
from bench.slurm.client import (
    BatchJob,
    Slurm,
    SlurmRefusedError,
    SlurmUnavailableError,
    SubmissionUncertainError,
)
from bench.slurm.parsing import Gres, Submission
from bench.slurm.states import FailureClass
from bench.study.ledger import RunState
from tests.cluster.bed import Cluster
from tests.cluster.containers import wait_for


@pytest.fixture
def slurm(cluster: Cluster) -> Slurm:
    return Slurm()


class Desk:
    """Submits small scripts, and waits for what becomes of them."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.slurm = slurm
        self.folder = folder

    def submit(self, name: str, body: str, *options: str, arguments: tuple[str, ...] = ()) -> Submission:
        script = self.folder / f"{name}.sbatch"
        script.write_text(f"#!/bin/bash\n{body}\n")
        job = BatchJob(
            script=script,
            arguments=arguments,
            job_name=name,
            output=self.folder / f"{name}.out",
            error=self.folder / f"{name}.err",
            options=options,
        )
        return self.slurm.submit(job)

    def ended(self, job_ids: list[str]) -> dict[str, JobOutcome]:
        """Return the outcomes as soon as sacct has all of them."""
        found: dict[str, JobOutcome] = {}

        def all_ended() -> bool:
            found.update(outcomes(self.slurm.accounting(job_ids)))
            return set(found) >= set(job_ids) and all(o.settled for o in found.values())

        wait_for(all_ended, what=f"the end of jobs {', '.join(job_ids)}", timeout_s=60, every_s=0.2)
        return found

    def running(self, job_id: str) -> None:
        wait_for(
            lambda: [row.state for row in self.slurm.queue([job_id])] == ["RUNNING"],
            what=f"job {job_id} to run",
            timeout_s=30,
        )


@pytest.fixture
def desk(slurm: Slurm, tmp_path: Path) -> Desk:
    return Desk(slurm, tmp_path)


#: A rank that comes to a bad end while the other one waits for it; as the templates start ranks.
RANK_1 = "srun --kill-on-bad-exit=1 bash -c '[ $SLURM_PROCID = 0 ] && sleep 60; sleep 0.5; {}' & wait $!"
#: By name: script, options; state, failure class, exit code, reason.
ENDS = {
    "completed": ("srun true", ["-N2"], "completed", None, 0, ""),
    "bad-exit": ("exit 3", [], "failed", "bad-exit", 3, "FAILED: exit code 3"),
    "rank-exit": (RANK_1.format("exit 7"), ["-N2"], "failed", "bad-exit", 7, "FAILED: exit code 7"),
    "rank-killed": (
        *(RANK_1.format("kill -9 $$"), ["-N2"], "failed", "killed", 143),
        "FAILED: step 0 (bash) was ended by SIGTERM",
    ),
    "shell-killed": (
        *("kill -9 $$", [], "failed", "killed", 137),
        "FAILED: the script was ended by SIGKILL",
    ),
    "hidden": (
        *("srun false; true", [], "completed", None, 0),
        "the job says COMPLETED, but step 0 (false) says FAILED",
    ),
    "no-output": (
        *("true", ["--output=/nonexistent/job.out"], "failed", "never-started", None),
        "FAILED (0:53): Slurm could not open the job's output: is its folder on the nodes, and writable?",
    ),
    "het": (
        *("#SBATCH -N1\n#SBATCH hetjob\n#SBATCH -N1\nsrun --het-group=0,1 true", [], "completed", None, 0),
        "",
    ),
}
MEMORY = (
    *("srun python3 -c 'bytearray(300_000_000)'", ["--mem=60M"], "failed", "out-of-memory", 1),
    "OUT_OF_MEMORY in step 0 (python3); the job says FAILED",
)


def test_every_way_to_end_is_told_from_the_others(desk, cluster):
    # Where there is no cgroup v1 memory controller, no job can run out of memory.
    ends = {**ENDS, **({"memory": MEMORY} if cluster.options.memory_limits else {})}
    ids = {name: desk.submit(name, end[0], *end[1]).job_id for name, end in ends.items()}
    found = desk.ended(list(ids.values()))
    assert {name: shown(found[job]) for name, job in ids.items()} == {
        name: end[2:] for name, end in ends.items()
    }

    # One squeue says the same of all of them, while Slurm remembers them.
    def queue_agrees() -> bool:
        shown_by_queue = queue_outcomes(desk.slurm.queue(list(ids.values())))
        states = {name: str(shown_by_queue[job].state) for name, job in ids.items()}
        return states == {name: end[2] for name, end in ends.items()}

    wait_for(queue_agrees, what="squeue to say the same as sacct", timeout_s=20)
    assert {row.key.component for row in desk.slurm.queue([ids["het"]])} == {0, 1}
    now = datetime.now(UTC)
    for outcome in found.values():
        assert outcome.submitted is not None
        assert abs(outcome.submitted - now) < timedelta(minutes=5)  # UTC, whatever TZ is here


def shown(outcome: JobOutcome) -> tuple[str, str | None, int | None, str]:
    failure_class = outcome.failure_class
    return (
        str(outcome.state),
        None if failure_class is None else str(failure_class),
        outcome.exit_code,
        outcome.reason,
    )


def test_a_lost_node_a_preempted_and_a_cancelled_job_are_told_apart(desk, cluster):
    # Its batch shell is on n3: a step would notice the end of n4 too, perhaps sooner than Slurm.
    lost = desk.submit("lost", "sleep 60", "-N2", "-wn3,n4", "--no-requeue").job_id
    again = desk.submit("again", "sleep 60", "-wn4", "--requeue").job_id
    pushed = desk.submit("pushed", "sleep 60", "-wn1", "--exclusive", "--no-requeue").job_id
    stopped = desk.submit("stopped", "sleep 60", "-wn2").job_id
    waiting = desk.submit("waiting", "true", "-N9").job_id
    for job in (lost, again, pushed, stopped):
        desk.running(job)
    assert queue_outcomes(desk.slurm.queue([waiting]))[waiting].stuck

    cluster.crash_node("n4")
    cluster.declare_down("n4")
    desk.submit("urgent", "true", "-wn1", "--exclusive", "--partition=urgent")
    desk.slurm.cancel([stopped, waiting])
    try:
        found = desk.ended([lost, pushed, stopped, waiting])
        assert {job: outcome.failure_class for job, outcome in found.items()} == {
            lost: FailureClass.NODE_FAILURE,
            pushed: FailureClass.PREEMPTED,
            stopped: FailureClass.CANCELLED,
            waiting: FailureClass.CANCELLED,
        }
        uid = os.geteuid()
        assert found[stopped].reason == f"cancelled by user id {uid}"
        assert found[waiting].reason.startswith(f"cancelled by user id {uid} before it started")
        queued_again = (RunState.QUEUED, "waits to start (BeginTime); queued again by Slurm 1 time")

        def requeued() -> tuple[RunState, str]:
            outcome = outcomes(desk.slurm.accounting([again]))[again]
            return outcome.state, outcome.reason

        wait_for(lambda: requeued() == queued_again, what="the row of the second attempt", timeout_s=30)
        desk.slurm.cancel([stopped, "999999"])  # ended, and never there: no error
    finally:
        cluster.boot_node("n4")


def test_output_goes_literally_where_it_should_and_the_script_gets_its_arguments(slurm, tmp_path):
    folder = tmp_path / "100%j a'; echo foo ü"
    folder.mkdir()
    desk = Desk(slurm, folder)
    body = 'printf "%s\\n" "$@" "$PWD" "${SLURM_MEM_PER_NODE-unset}"; echo oops >&2'
    submission = desk.submit("paths", body, f"--chdir={folder}", arguments=("one two", "$(three)"))
    desk.ended([submission.job_id])
    assert (folder / "paths.out").read_text() == f"one two\n$(three)\n{folder}\nunset\n"
    assert (folder / "paths.err").read_text() == "oops\n"


def test_a_refusal_is_told_in_slurms_words(desk):
    def refusal(*options: str) -> SlurmRefusedError:
        with pytest.raises(SlurmRefusedError) as caught:
            desk.submit("refused", "true", *options)
        return caught.value

    assert str(refusal("--account=nope")) == (
        "sbatch: Batch job submission failed: Invalid account or account/partition combination specified"
    )
    assert str(refusal("--partition=nope")) == (
        "sbatch: invalid partition specified: nope\n"
        "Batch job submission failed: Invalid partition name specified"
    )
    assert str(refusal("--gres=gpu:a100:1")) == (
        "sbatch: Batch job submission failed: Requested node configuration is not available"
    )
    assert not refusal("--gres=gpu:a100:1").queue_is_full


def test_a_full_queue_is_a_refusal_that_says_so(desk, cluster):
    with cluster.limited(MaxSubmitJobs=1):
        desk.submit("first", "sleep 60")
        with pytest.raises(SlurmRefusedError) as caught:
            desk.submit("second", "true")
    assert caught.value.queue_is_full
    assert str(caught.value) == (
        "sbatch: AssocMaxSubmitJobLimit\n"
        "Batch job submission failed: Job violates accounting/QOS policy "
        "(job submit limit, user's size and/or time limits)"
    )


def test_test_only_tells_the_start_and_submits_nothing(desk, slurm):
    before = {row.key.job for row in slurm.queue()}
    script = desk.folder / "x.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH -N2 --gres=gpu:l40s:4 -t 5\n")
    estimate = slurm.test_only(script)
    assert estimate is not None
    assert estimate.starts is not None
    assert abs(estimate.starts - datetime.now(UTC)) < timedelta(minutes=5)
    assert (estimate.processors, estimate.hosts, estimate.partition) == (2, "n[1-2]", "l40s")
    with pytest.raises(SlurmRefusedError) as caught:
        slurm.test_only(script, options=["--partition=short"])
    assert str(caught.value) == (
        "sbatch --test-only: allocation failure: Requested node configuration is not available"
    )
    assert {row.key.job for row in slurm.queue()} == before


def test_the_cluster_is_described(slurm, cluster):
    groups = slurm.nodes()
    assert {(g.partition, g.default, g.time_limit_s) for g in groups} == {
        ("l40s", True, None),
        ("urgent", False, None),
        ("short", False, 300),
    }
    l40s = [g for g in groups if g.partition == "l40s"]
    assert sum(g.nodes for g in l40s) == 4
    assert {g.gpus for g in l40s} == {(Gres("gpu", "l40s", 4),)}
    cluster.drain("n2")
    try:
        assert [g.in_service for g in slurm.nodes() if g.hosts == "n2"] == [False, False, False]
    finally:
        cluster.resume("n2")


def test_a_job_whose_sbatch_was_killed_in_the_middle_is_found_by_its_name(slurm, cluster, tmp_path):
    """What the ledger's reconciliation rests on: Slurm takes the job although nobody got its id."""
    script = tmp_path / "x.sbatch"
    script.write_text("#!/bin/bash\nsleep 60\n")
    with cluster.frozen_slurmctld():
        command = ["sbatch", "--parsable", "--job-name=study.run.1", f"--chdir={tmp_path}", str(script)]
        sbatch = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        time.sleep(0.5)
        assert sbatch.poll() is None
        sbatch.kill()
        sbatch.wait()

        impatient = Slurm(submit_timeout_s=0.5)
        with pytest.raises(SubmissionUncertainError):
            names = {"job_name": "study.run.2", "output": tmp_path / "o", "error": tmp_path / "e"}
            impatient.submit(BatchJob(script=script, **names))
    names = ["study.run.1", "study.run.2", "study.run.3"]
    wait_for(
        lambda: sorted(row.name for row in slurm.queue(names=names)) == names[:2],
        what="the jobs that were accepted",
        timeout_s=10,
    )


def test_jobs_are_found_by_name_in_accounting_too(desk, slurm):
    since = datetime.now(UTC) - timedelta(minutes=1)
    job = desk.submit("unique-name", "true").job_id
    desk.ended([job])
    wait_for(
        lambda: (
            [r.key.job for r in slurm.accounting_by_name(["unique-name"], since=since) if not r.key.step]
            == [job]
        ),
        what="the job in sacct by its name",
        timeout_s=20,
        every_s=0.3,
    )
    assert slurm.accounting_by_name(["unique"], since=since) == []


def test_a_stopped_accounting_daemon_is_unavailable_and_squeue_still_answers(desk, slurm, cluster):
    job = desk.submit("unseen", "true").job_id
    desk.ended([job])
    cluster.stop_slurmdbd()
    try:
        with pytest.raises(SlurmUnavailableError) as caught:
            slurm.accounting([job])
        assert caught.value.command == "sacct"
        assert "Problem talking to the database: Connection refused" in caught.value.words
        assert queue_outcomes(slurm.queue([job]))[job].state is RunState.COMPLETED
    finally:
        cluster.start_slurmdbd()
    assert outcomes(slurm.accounting([job]))[job].state is RunState.COMPLETED


def test_a_stopped_controller_is_unavailable_and_nothing_was_submitted(desk, slurm, cluster):
    submit = partial(desk.submit, "never-there", "true")
    with cluster.configured(MessageTimeout="2"):  # how long the commands look for the controller
        cluster.stop_slurmctld()
        try:
            for question in (slurm.queue, submit, partial(slurm.cancel, ["1"])):
                with pytest.raises(SlurmUnavailableError) as caught:
                    question()
                assert type(caught.value) is SlurmUnavailableError
                assert "Unable to contact slurm controller (connect failure)" in caught.value.words
        finally:
            cluster.start_slurmctld()
    assert slurm.queue(names=["never-there"]) == []
