"""The client with a real Slurm: submissions, queries, cancellations, and all ways in which a job can end."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bench.jobs.outcome import JobStatus
from bench.jobs.slurm.client import (
    BatchJob,
    Slurm,
    SlurmRefusedError,
)
from bench.jobs.slurm.job_states import queue_statuses
from bench.study.ledger import FailureClass, RunState
from tests.cluster.bed import Cluster
from tests.cluster.containers import wait_for
from tests.common import raised
from tests.jobs.slurm.statuses import job_statuses


@pytest.fixture
def slurm(cluster: Cluster) -> Slurm:
    return Slurm()


class Submitter:
    """Submits small scripts and waits for their outcomes."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.slurm = slurm
        self.folder = folder

    def submit(self, name: str, body: str, *options: str, arguments: tuple[str, ...] = ()) -> str:
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

    def outcomes(self, job_ids: list[str]) -> dict[str, JobStatus]:
        """Wait until sacct has all rows of the ended jobs, and return the outcomes."""
        found: dict[str, JobStatus] = {}

        def all_ended() -> bool:
            found.update(job_statuses(self.slurm.accounting(job_ids)))
            return set(found) >= set(job_ids) and all(o.settled for o in found.values())

        wait_for(all_ended, what=f"the end of jobs {', '.join(job_ids)}")
        return found

    def wait_until_running(self, job_id: str) -> None:
        wait_for(
            lambda: [row.state for row in self.slurm.queue([job_id])] == ["RUNNING"],
            what=f"job {job_id} to run",
        )


@pytest.fixture
def submitter(slurm: Slurm, tmp_path: Path) -> Submitter:
    return Submitter(slurm, tmp_path)


#: Rank 1 fails while rank 0 waits for it, started as in the templates.
RANK_1 = "srun --kill-on-bad-exit=1 bash -c '[ $SLURM_PROCID = 0 ] && sleep 60; sleep 0.5; {}' & wait $!"
#: By name: script, options; expected state, failure class, exit code and reason.
ENDS = {
    "completed": ("srun true", ["-N2"], "completed", None, 0, ""),
    "bad-exit": ("exit 3", [], "failed", "bad-exit", 3, "FAILED: exit code 3"),
    "rank-exit": (RANK_1.format("exit 7"), ["-N2"], "failed", "bad-exit", 7, "FAILED: exit code 7"),
    "rank-killed": (
        *(RANK_1.format("kill -9 $$"), ["-N2"], "failed", "killed", 143),
        "FAILED: step 0 (bash) was ended by SIGTERM",
    ),
    "shell-killed": (*("kill -9 $$", [], "failed", "killed", 137), "FAILED: the script was ended by SIGKILL"),
    "hidden": (
        *("srun false; true", [], "completed", None, 0),
        "the job says COMPLETED, but step 0 (false) says FAILED",
    ),
    "no-output": (
        # Not below /: 24.11 and later create missing folders. Nobody can create one here.
        *("true", ["--output=/proc/nowhere/job.out"], "failed", "never-started", None),
        "FAILED (0:53): Slurm could not open the job's output; its folder must exist on the nodes and be writable",
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
#: Ends on releases before 21.08. Only the files of a run show that its output could not be opened; the job's
#: own state, not only the step's, is OUT_OF_MEMORY.
OLD_ENDS = {
    "no-output": (*ENDS["no-output"][:2], "failed", "bad-exit", 1, "FAILED: exit code 1"),
    "memory": (*MEMORY[:2], "failed", "out-of-memory", None, "OUT_OF_MEMORY: ran out of memory"),
}


def test_all_ways_to_end_are_distinguished(submitter, cluster):
    # Without a cgroup v1 memory controller, no job can run out of memory.
    ends = {**ENDS, **({"memory": MEMORY} if cluster.options.memory_limits else {})}
    if cluster.options.release.number < (21, 8):
        ends |= {name: end for name, end in OLD_ENDS.items() if name in ends}
    ids = {name: submitter.submit(name, end[0], *end[1]) for name, end in ends.items()}
    found = submitter.outcomes(list(ids.values()))
    assert {name: shown(found[job]) for name, job in ids.items()} == {
        name: end[2:] for name, end in ends.items()
    }

    # While Slurm remembers the jobs, squeue agrees.
    def queue_agrees() -> bool:
        shown_by_queue = queue_statuses(submitter.slurm.queue(list(ids.values())))
        states = {name: str(shown_by_queue[job].state) for name, job in ids.items()}
        return states == {name: end[2] for name, end in ends.items()}

    wait_for(queue_agrees, what="squeue to agree with sacct")
    assert {row.key.component for row in submitter.slurm.queue([ids["het"]])} == {0, 1}
    now = datetime.now(UTC)
    for outcome in found.values():
        assert abs(outcome.ended - now) < timedelta(minutes=5)  # UTC, independent of the local TZ


def shown(outcome: JobStatus) -> tuple[str, str | None, int | None, str]:
    failure_class = outcome.failure_class
    return (
        str(outcome.state),
        None if failure_class is None else str(failure_class),
        outcome.exit_code,
        outcome.reason,
    )


def test_a_lost_node_a_preemption_and_a_cancellation_are_distinguished(submitter, cluster):
    # The batch shell is on n3. A step would notice the loss of n4 itself, perhaps before Slurm does.
    lost = submitter.submit("lost", "sleep 60", "-N2", "-wn3,n4", "--no-requeue")
    again = submitter.submit("again", "sleep 60", "-wn4", "--requeue")
    pushed = submitter.submit("pushed", "sleep 60", "-wn1", "--exclusive", "--no-requeue")
    stopped = submitter.submit("stopped", "sleep 60", "-wn2")
    waiting = submitter.submit("waiting", "true", "-N2", "--partition=short")  # its MaxNodes is 1
    for job in (lost, again, pushed, stopped):
        submitter.wait_until_running(job)
    wait_for(
        lambda: queue_statuses(submitter.slurm.queue([waiting]))[waiting].stuck,
        what="a reason that does not end",
    )

    cluster.crash_node("n4")
    cluster.declare_down("n4")
    submitter.submit("urgent", "true", "-wn1", "--exclusive", "--partition=urgent")
    submitter.slurm.cancel([stopped, waiting])
    try:
        found = submitter.outcomes([lost, pushed, stopped, waiting])
        assert {job: outcome.failure_class for job, outcome in found.items()} == {
            lost: FailureClass.NODE_FAILURE,
            pushed: FailureClass.PREEMPTED,
            stopped: FailureClass.CANCELLED,
            waiting: FailureClass.CANCELLED,
        }
        uid = os.geteuid()
        assert found[lost].exit_code is None  # sacct of 24.11 and later shows 1:0, although no script ended
        assert found[stopped].reason == f"cancelled by user id {uid}"
        assert found[waiting].reason.startswith(f"cancelled by user id {uid} before it started")

        def requeued() -> bool:
            outcome = job_statuses(submitter.slurm.accounting([again]))[again]
            # sacct of 24.11 and later shows no reason for a job that waits.
            waits = re.fullmatch(r"waits to start( \(BeginTime\))?; requeued by Slurm 1 time", outcome.reason)
            return outcome.state is RunState.QUEUED and waits is not None

        wait_for(requeued, what="the row of the second attempt")
        submitter.slurm.cancel([stopped, "999999"])  # an ended and an unknown job: no error
    finally:
        cluster.boot_node("n4")


def test_output_paths_are_literal_and_the_script_gets_its_arguments(slurm, tmp_path):
    folder = tmp_path / "100%j a'; echo foo ü"
    folder.mkdir()
    submitter = Submitter(slurm, folder)
    body = 'printf "%s\\n" "$@" "$PWD" "${SLURM_MEM_PER_NODE-unset}"; echo oops >&2'
    job = submitter.submit("paths", body, f"--chdir={folder}", arguments=("one two", "$(three)"))
    submitter.outcomes([job])
    assert (folder / "paths.out").read_text() == f"one two\n$(three)\n{folder}\nunset\n"
    assert (folder / "paths.err").read_text() == "oops\n"


def test_test_only_returns_the_expected_start_and_submits_nothing(submitter, slurm):
    before = {row.key.job for row in slurm.queue()}
    script = submitter.folder / "x.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH -N2 --gres=gpu:l40s:4 -t 5\n")
    start = slurm.test_only(script)
    assert start is not None
    assert abs(start - datetime.now(UTC)) < timedelta(minutes=5)
    assert raised(SlurmRefusedError, slurm.test_only, script, options=["--gres=gpu:l40s:9"]) == (
        "sbatch --test-only: allocation failure: Requested node configuration is not available"
    )
    assert {row.key.job for row in slurm.queue()} == before
