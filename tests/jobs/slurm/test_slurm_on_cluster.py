"""The scheduler with a real Slurm: submissions, polls, cancellations, and all ways in which a job can end."""

import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bench.jobs.contract import Job, Status
from bench.jobs.slurm.client import Slurm
from bench.jobs.slurm.scheduler import SlurmScheduler
from bench.study.ledger import FailureClass, RunState
from bench.study.plan_json import PlannedStudy
from ddp_scaling_bench.run_folder import RunFolder
from tests.cluster.bed import Cluster
from tests.cluster.containers import wait_for
from tests.matrices import matrix, planned_study, slurm


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> PlannedStudy:
    return planned_study(tmp_path_factory.mktemp("planned"), matrix(cluster=slurm(), axes={"nodes": [1]}))


class Submitter(SlurmScheduler):
    """Submits small scripts and waits for their ends."""

    def __init__(self, planned: PlannedStudy, folder: Path) -> None:
        super().__init__(planned, slurm=Slurm())
        self.folder = folder

    def start(self, name: str, body: str = "sleep 300", *options: str) -> str:
        """Submit a script under a name; it gets the folder NAME as its argument."""
        self.folder.joinpath(name).mkdir(exist_ok=True)
        script = self.folder / f"{name}.sbatch"
        script.write_text(f"#!/bin/bash\n{body}\n")
        folder = RunFolder(self.folder / name)
        return self.submit(Job(name=f"{name}.{id(self)}", script=script, folder=folder, options=options))

    def name(self, name: str) -> str:
        return f"{name}.{id(self)}"

    def status(self, name: str, job_id: str = "") -> Status | None:
        return self.poll({self.name(name): job_id}).get(self.name(name))

    def ends(self, *names: str) -> dict[str, Status]:
        """Wait until sacct has all rows of the ended jobs, and return their status."""
        jobs = {self.name(name): "" for name in names}

        def all_ended() -> bool:
            found = self.poll(jobs).values()
            return len(found) == len(jobs) and all(one.state.ended and one.settled for one in found)

        wait_for(all_ended, what=f"the end of jobs {', '.join(names)}")
        found = self.poll(jobs)
        return {name: found[self.name(name)] for name in names}

    def wait_for_state(self, name: str, state: RunState) -> None:
        def reached() -> bool:
            status = self.status(name)
            return status is not None and status.state is state

        wait_for(reached, what=f"job {name} to be {state}")


@pytest.fixture
def submitter(cluster: Cluster, planned: PlannedStudy, tmp_path: Path) -> Submitter:
    return Submitter(planned, tmp_path)


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
    for name, end in ends.items():
        submitter.start(name, end[0], *end[1])
    found = submitter.ends(*ends)
    assert {name: shown(status) for name, status in found.items()} == {
        name: end[2:] for name, end in ends.items()
    }
    now = datetime.now(UTC)
    for status in found.values():
        assert status.ended is not None
        assert abs(status.ended - now) < timedelta(minutes=5)  # UTC, independent of the local TZ


def shown(outcome: Status) -> tuple[str, str | None, int | None, str]:
    failure_class = outcome.failure_class
    return (
        str(outcome.state),
        None if failure_class is None else str(failure_class),
        outcome.exit_code,
        outcome.reason,
    )


def test_a_lost_node_a_preemption_and_a_cancellation_are_distinguished(submitter, cluster):
    # The batch shell is on n3. A step would notice the loss of n4 itself, perhaps before Slurm does.
    submitter.start("lost", "sleep 60", "-N2", "-wn3,n4", "--no-requeue")
    submitter.start("again", "sleep 60", "-wn4", "--requeue")
    submitter.start("pushed", "sleep 60", "-wn1", "--exclusive", "--no-requeue")
    stopped = submitter.start("stopped", "sleep 60", "-wn2")
    waiting = submitter.start("waiting", "true", "-N2", "--partition=short")  # its MaxNodes is 1
    for name in ("lost", "again", "pushed", "stopped"):
        submitter.wait_for_state(name, RunState.RUNNING)
    wait_for(lambda: submitter.status("waiting").stuck, what="a reason that does not end")

    cluster.crash_node("n4")
    cluster.declare_down("n4")
    submitter.start("urgent", "true", "-wn1", "--exclusive", "--partition=urgent")
    submitter.cancel([stopped, waiting])
    try:
        found = submitter.ends("lost", "pushed", "stopped", "waiting")
        assert {name: status.failure_class for name, status in found.items()} == {
            "lost": FailureClass.NODE_FAILURE,
            "pushed": FailureClass.PREEMPTED,
            "stopped": FailureClass.CANCELLED,
            "waiting": FailureClass.CANCELLED,
        }
        uid = os.geteuid()
        assert found["lost"].exit_code is None  # sacct of 24.11 and later shows 1:0, although no script ended
        assert found["stopped"].reason == f"cancelled by user id {uid}"
        assert found["waiting"].reason.startswith(f"cancelled by user id {uid} before it started")

        def requeued() -> bool:
            status = submitter.status("again")
            return re.fullmatch(r"waits to start( \(BeginTime\))?", status.reason) is not None

        wait_for(requeued, what="the requeued job")
        submitter.cancel([stopped, "999999"])  # an ended and an unknown job: no error
    finally:
        cluster.boot_node("n4")


def test_a_job_is_found_by_its_name_even_if_its_id_is_wrong_or_unknown(submitter, cluster):
    first, other = submitter.start("first", "true"), submitter.start("other")
    submitter.wait_for_state("other", RunState.RUNNING)
    submitter.ends("first")
    for wrong in ("", other, "999999"):
        assert submitter.status("first", wrong).job_id == first
        assert submitter.status("other", wrong).job_id == other
    assert submitter.living([submitter.name("first"), submitter.name("other"), "none"]) == {
        submitter.name("other"): other
    }
    # squeue forgets the job, and sacct finds it by its name.
    with cluster.configured(MinJobAge="2"):
        shown = ["squeue", "-h", "-t", "all", "-o", "%A"]
        wait_for(lambda: first not in cluster.run(shown).stdout.split(), what="squeue to forget a job")
        for wrong in ("", other, "999999"):
            status = submitter.status("first", wrong)
            assert (status.job_id, str(status.state), status.settled) == (first, "completed", True)
        assert submitter.status("never") is None
        cluster.stop_slurmdbd()
        try:
            for job_id in ("", first):
                status = submitter.status("first", job_id)
                assert (str(status.state), status.settled) == ("unknown", False)
                assert status.accounting
                assert status.accounting in status.reason
            assert str(submitter.status("other", "999999").state) == "running"
        finally:
            cluster.start_slurmdbd()
