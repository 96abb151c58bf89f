"""States of jobs and of the runs of a pack, from the output of sacct and squeue, from slurmstepd's notices, and why jobs wait."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.jobs.contract import Status
from bench.jobs.slurm.pack import run_status
from bench.jobs.slurm.parsing import JobRow, parse_accounting, parse_queue
from bench.jobs.slurm.states import (
    classify,
    classify_queue,
    describe_wait,
    obstacle,
    read_state,
    rows_by_job,
    state_from_notices,
    step_statuses,
)
from bench.study.layout import StudyFolder
from bench.study.ledger import FailureClass, RunState
from ddp_scaling_bench.files import write_json
from ddp_scaling_bench.run_folder import RunFolder

FIXTURES = sorted((Path(__file__).parent / "fixtures/accounting").glob("*.txt"))
KEYS = tuple("state failure_class reason exit_code hosts started ended restarts stuck settled".split())


def read_fixture(path: Path) -> tuple[str, dict[str, str], str]:
    """Return the job's id, what it must come to, and the rows; the first line is a remark."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    header = [line[2:].strip() for line in lines if line.startswith("# ")]
    expected = dict(line.split(": ", 1) for line in header[1:])
    return expected.pop("job"), expected, "".join(line for line in lines if not line.startswith("# "))


def shown(outcome: Status) -> dict[str, str]:
    """Return what an outcome says, as a fixture writes it: what is unset is left out."""
    values = {key: getattr(outcome, key) for key in KEYS}
    if not values["restarts"]:
        del values["restarts"]
    return {
        key: value.isoformat() if isinstance(value, datetime) else str(value)
        for key, value in values.items()
        if value is not None and value is not False and value != ""
    }


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_a_recorded_job_comes_to_what_its_fixture_says(path):
    job, expected, rows = read_fixture(path)
    found = job_statuses(parse_accounting(rows))
    assert list(found) == [job]
    assert shown(found[job]) == expected


def test_the_fixtures_cover_every_final_failure_class():
    classes = {read_fixture(path)[1].get("failure_class") for path in FIXTURES} - {None}
    assert classes == {str(member) for member in FailureClass} - {"started-twice"}


def test_steps_without_their_job_are_no_outcome():
    rows = parse_accounting("7.0|RUNNING|0:0|||Unknown|Unknown||n1||||python\n")
    assert (classify(rows), classify([]), job_statuses(rows)) == (None, None, {})


QUEUE = """\
13|CANCELLED|PartitionNodeLimit|2026-11-20T19:51:42||root|0|a
14|PENDING|JobHeldUser|N/A||root|0|b
15|PENDING|BeginTime|2026-11-20T19:53:43||root|0|c
16|NODE_FAIL|NodeDown|2026-11-20T19:51:37|n[3-4]|root|0|d
17|RUNNING|None|2026-11-20T19:51:37|n2|root|0|e
18|COMPLETING|None|2026-11-20T19:51:37|n3|root|0|f
19|PENDING|PartitionConfig|N/A||root|0|g
20|PENDING|ReqNodeNotAvail, UnavailableNodes:n[3-4]|N/A||root|0|h
"""


def test_squeue_alone_tells_states_and_reasons():
    found = {row.job: classify_queue(row) for row in parse_queue(QUEUE)}
    assert [job for job, status in found.items() if not status.considered] == ["19"]
    del found["19"]
    assert {job: (str(o.state), o.reason, o.hosts, o.stuck) for job, o in found.items()} == {
        "13": ("cancelled", "was cancelled (PartitionNodeLimit)", "", False),
        "14": (
            "queued",
            "will not start (JobHeldUser): the job is held; release it with `scontrol release JOB`",
            "",
            True,
        ),
        "15": ("queued", "waits to start (BeginTime)", "", False),
        "16": ("failed", "lost a node (NodeDown)", "n[3-4]", False),
        "17": ("running", "", "n2", False),
        "18": ("running", "has ended; its nodes are being cleared", "n3", False),
        "20": ("queued", "waits to start (ReqNodeNotAvail, UnavailableNodes:n[3-4])", "", False),
    }
    assert [found[job].started is not None for job in ("13", "15", "17")] == [False, False, True]
    # 24.11.5 and 26.05.5, of an output that could not be opened; 20.11 and 22.05 show NonZeroExitCode.
    (row,) = parse_queue("1|FAILED|RaisedSignal:53(Real-time signal 19)|2026-11-22T13:32:46|n1|root|0|a\n")
    outcome = classify_queue(row)
    assert (outcome.failure_class, outcome.reason) == (
        FailureClass.NEVER_STARTED,
        "Slurm could not open the job's output; its folder must exist on the nodes and be writable "
        "(RaisedSignal:53(Real-time signal 19))",
    )


def job_statuses(rows: Sequence[JobRow]) -> dict[str, Status]:
    """Return the status of each job that has a row of its own."""
    found = {job: classify(own) for job, own in rows_by_job(rows).items()}
    return {job: status for job, status in found.items() if status is not None}


def test_a_job_that_was_requeued_and_held_is_not_waited_for_and_an_unknown_state_is_shown():
    for held in ("REQUEUE_HOLD", "SPECIAL_EXIT"):
        assert read_state(held).state is RunState.FAILED
    for printed in ("HIBERNATING", "", "RE+"):
        found = read_state(printed)
        assert found.state is RunState.UNKNOWN
        assert found.meaning == f"Slurm reports the unknown state {printed!r}"


#: Limits of one job or node, and minimums, which no end of another job changes.
FOREVER = """\
JobHeldUser DependencyNeverSatisfied PartitionNodeLimit PartitionTimeLimit InvalidAccount QOSNotAllowed
ReservationDeleted BurstBufferOperation MaxMemPerLimit AssocMaxCpuPerJobLimit AssocMaxGRESPerJob
AssocMaxEnergyMinutesPerJob AssocMaxMemPerNode QOSMaxWallDurationPerJobLimit QOSMaxMemoryPerNode
QOSMinCpuNotSatisfied QOSMinGRES launch_failed_requeued_held
""".split()
#: squeue prints a job's state_desc with underscores for spaces.
FOREVER.append("launch failed requeued held")
#: Limits that all jobs of an account or QOS share.
GROUP = [
    *("AssocGrpCpuLimit", "AssocGrpCPURunMinutesLimit", "AssocGrpMemMinutes", "AssocGrpGRES"),
    *("QOSGrpJobsLimit", "QOSGrpNodeRunMinutes", "QOSGrpLicenseMinutes", "MaxGRESPerAccount"),
]
#: Reasons that end when other jobs end, when a time is reached, or when nodes are repaired.
TEMPORARY = [
    *("", "None", "Resources", "Priority", "BeginTime", "ReqNodeNotAvail, UnavailableNodes:n3"),
    *("AssocMaxJobsLimit", "QOSMaxCpuPerUserLimit", "QOSMaxGRESPerUser", "NonZeroExitCode"),
]


def test_a_reason_that_only_somebody_can_end_has_a_remedy_and_others_are_shown_as_they_are():
    for reason in FOREVER:
        assert obstacle(reason), reason
        start, meaning = describe_wait(reason).split(": ", 1)
        assert start == f"will not start ({reason})"
        assert all(part.strip() for part in meaning.split("; "))
        assert len(meaning.split("; ")) == 2, "a meaning and a remedy"
    for reason in GROUP:
        assert describe_wait(reason) == f"waiting for your group's limit ({reason})"
    for reason in TEMPORARY:
        assert describe_wait(reason) == (f"waits to start ({reason})" if reason else "waits to start")
    assert not [reason for reason in (*GROUP, *TEMPORARY) if obstacle(reason)]
    # The remedies name the key of the matrix.
    assert describe_wait("PartitionNodeLimit").endswith(
        "; choose other axes.nodes or another cluster.partition (`scontrol show partition` shows the limits)"
    )
    assert describe_wait("AssocMaxGRESMinutesPerJob").endswith(
        "; lower cluster.time_limit, request fewer nodes, ranks or cores, or choose another cluster.account"
    )


#: Messages of slurmstepd, recorded on the test cluster (whose slurmds are named slurmstepd-n1). The first line names
#: the release and the state that sacct would show. 19.05 and earlier did not print the node.
NOTICES = FIXTURES[0].parents[1].joinpath("notices.txt").read_text().rstrip("\n").split("\n\n")


def test_the_notices_of_each_release_tell_the_state_that_sacct_would_show():
    for head, text in (notice.split("\n", 1) for notice in NOTICES):
        log = f"ValueError: before\n{text}\nsrun: error: n1: task 0: Terminated\n"
        state = state_from_notices(log, job_id="7")
        assert (state.word if state else "nothing") == head.rpartition(" -> ")[2], head


@given(st.text())
def test_any_text_can_be_read(text):
    state_from_notices(text, job_id="7")


BEGAN, ENDED = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"
JOB = Status(job_id="7", state=RunState.RUNNING, settled=False)

Folder = Callable[..., RunFolder]


@pytest.fixture
def folder(tmp_path) -> Folder:
    """Make the folder of a run; a run that has ended has an exit code and a reason for the end."""

    def make(
        run_id: str = "r1", code: int | None = None, by: str = "exit", end: int | None = None
    ) -> RunFolder:
        made = StudyFolder(tmp_path).attempt(run_id, 1)
        made.path.mkdir(parents=True, exist_ok=True)
        made.start.write_text(f"7 {BEGAN} n1 0\n")
        if code is not None:
            times = {"started": BEGAN, "ended": ENDED, "hosts": "n1,n2"}
            write_json(made.pack_end, {"exit_code": code, "by": by, **times})
        if end is not None:
            write_json(made.end, {"exit_code": end, "time": ENDED})
        return made

    return make


def row(shown: str, state: str, exits: str, name: str) -> str:
    user = "|" if "." in shown else "root|0"
    return (
        f"{shown}|{state}|{exits}|0:0||2026-01-01T00:00:00|2026-01-01T00:00:30|00:00:30|n1||{user}|{name}\n"
    )


def job(*steps: str, state: str = "RUNNING", exits: str = "0:0") -> Status:
    rows = parse_accounting(row("7", state, exits, "study.pack.a1.key") + "".join(steps))
    status = classify(rows)
    assert status is not None
    return replace(status, steps=step_statuses(rows))


def told(status: Status | None) -> tuple[Any, ...]:
    assert status is not None
    return str(status.state), status.failure_class, status.exit_code, status.reason


@pytest.mark.parametrize(
    ("exits", "state", "code", "by", "expected"),
    [
        ("7:0", "FAILED", 1, "exit", ("failed", "bad-exit", 7, "FAILED: exit code 7")),
        ("0:9", "FAILED", 1, "exit", ("failed", "killed", 137, "FAILED: step 0 (r1) was ended by SIGKILL")),
        (
            "0:15",
            "CANCELLED",
            143,
            "limit",
            ("failed", "time-limit", None, "TIMEOUT: reached its time limit"),
        ),
        (
            *("0:125", "OUT_OF_MEMORY", 143, "limit"),
            ("failed", "out-of-memory", None, "OUT_OF_MEMORY in step 0 (r1); the job says TIMEOUT"),
        ),
        ("0:0", "COMPLETED", 0, "exit", ("completed", None, 0, "")),
        (
            *("3:0", "FAILED", 0, "exit"),
            ("completed", None, 0, "the job says COMPLETED, but a step failed; exit code 3"),
        ),
    ],
)
def test_a_run_that_ended_before_its_pack_comes_to_what_a_job_would(folder, exits, state, code, by, expected):
    of = job(row("7.0", state, exits, "r1"), row("7.1", "FAILED", "1:0", "r2"))
    status = run_status(of, "r1", folder("r1", code, by, end=code))
    assert told(status) == expected
    assert (status.hosts, status.settled) == ("n1,n2", True)
    assert status.started is not None
    assert [line.split()[0] for line in status.summary.splitlines()] == ["JobID", "7", "7.0"]
    # The step of another run does not name the cause.
    assert told(run_status(of, "r2", folder("r2", 1))) == ("failed", "bad-exit", 1, "FAILED: exit code 1")


def test_end_json_distinguishes_a_signal_from_an_exit_code_above_128(folder):
    killed = run_status(JOB, "r1", folder("r1", 137))
    assert told(killed) == ("failed", "killed", 137, "FAILED: the script was ended by SIGKILL")
    assert told(run_status(JOB, "r2", folder("r2", 137, end=137)))[:3] == ("failed", "bad-exit", 137)


def test_an_active_run_shares_the_jobs_end_and_a_finished_one_does_not(folder):
    assert run_status(JOB, "r2", folder("r2")) is None
    cancelled = job(state="CANCELLED by 0")
    assert told(run_status(cancelled, "r1", folder("r1", 0)))[0] == "completed"
    shared = ("cancelled", "cancelled", None, "ended with its pack (job 7); cancelled by user id 0")
    for made in (folder("r2"), folder("r3", 143, "stop", end=143)):
        status = run_status(cancelled, made.path.parent.name, made)
        assert told(status) == shared
        assert status is not None
        assert status.started is not None
    # It had succeeded before the job was ended.
    assert told(run_status(cancelled, "r4", folder("r4", end=0)))[0] == "completed"
