"""States of jobs: from the output of sacct and squeue, from slurmstepd's notices, and the reasons for which jobs wait."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.jobs.contract import Status
from bench.jobs.slurm.parsing import JobRow, parse_accounting, parse_queue
from bench.jobs.slurm.states import (
    classify,
    classify_queue,
    describe_wait,
    obstacle,
    read_state,
    rows_by_job,
    state_from_notices,
)
from bench.study.ledger import FailureClass, RunState

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
    assert classes == {str(member) for member in FailureClass} - {"requeued", "started-twice"}


def test_steps_without_their_job_are_no_outcome():
    rows = parse_accounting("7.0|RUNNING|0:0|||Unknown|Unknown||n1||||python\n")
    assert classify(rows) is None
    assert classify([]) is None
    assert job_statuses(rows) == {}


def test_the_row_of_a_job_that_was_just_requeued_means_queued():
    # Slurm 22.05.8, in the first half second after scontrol requeue: the new row is not there yet.
    rest = "2026-11-20T19:39:54|2026-11-20T19:39:55|00:00:01|n1|"
    rows = parse_accounting(
        f"11|REQUEUED|0:0|0:0|None|{rest}|root|0|allocation\n11.batch|REQUEUED|0:0|||{rest}|||batch\n"
    )
    outcome = job_statuses(rows)["11"]
    assert (outcome.state, outcome.failure_class) == (RunState.QUEUED, FailureClass.REQUEUED)
    assert outcome.reason == "was stopped and is queued again"


def test_a_job_whose_start_is_not_in_the_database_yet_runs():
    # Slurm 22.05.8, in the first second of a job: steps are there, the job's own record is not.
    times = "2026-11-20T20:12:22|Unknown|00:00:01"
    rows = parse_accounting(
        f"8|PENDING|0:0|0:0|None|{times}|n1||root|0|allocation\n8.0|RUNNING|0:0|||{times}|n1||||python3\n"
    )
    assert job_statuses(rows)["8"].state is RunState.RUNNING


def test_an_ended_job_is_settled_when_its_last_row_is_there():
    # Slurm 22.05.8, two seconds apart: DerivedExitCode stays 0:0, the step's own row has the cause.
    rest = "2026-11-20T20:12:22|2026-11-20T20:12:22|00:00:00|n[1-2]|"
    job, step = f"3|FAILED|15:0|0:0|None|{rest}|root|0", f"{rest}|||bash\n"
    first = f"{job}|allocation\n3.0|RUNNING|0:0|||{step}"
    last = f"{job}|run.1\n3.0|FAILED|7:0|||{step}"
    early, late = (job_statuses(parse_accounting(text))["3"] for text in (first, last))
    assert (early.state, early.settled, early.exit_code) == (RunState.FAILED, False, 15)
    assert (late.state, late.settled, late.exit_code) == (RunState.FAILED, True, 7)


def test_the_exit_code_of_a_job_at_its_time_limit_is_not_one_of_its_program():
    # Slurm 22.05.8 on a busy machine: 15:0 if the script ends first, otherwise 0:0.
    rest = "2026-11-20T20:12:22|2026-11-20T20:12:52|00:00:30|n1|"
    for code in ("15:0", "0:0"):
        rows = f"3|TIMEOUT|{code}|0:0|None|{rest}|root|0|run.1\n3.batch|CANCELLED|{code}|||{rest}|||batch\n"
        outcome = job_statuses(parse_accounting(rows))["3"]
        assert (outcome.failure_class, outcome.exit_code) == (FailureClass.TIME_LIMIT, None)


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
    assert found["13"].started is None
    assert found["15"].started is None
    assert found["17"].started is not None


def test_squeue_tells_of_an_output_that_could_not_be_opened():
    # 24.11.5 and 26.05.5; squeue of 20.11 and 22.05 shows NonZeroExitCode.
    (row,) = parse_queue("1|FAILED|RaisedSignal:53(Real-time signal 19)|2026-11-22T13:32:46|n1|root|0|a\n")
    outcome = classify_queue(row)
    assert outcome.failure_class is FailureClass.NEVER_STARTED
    assert outcome.reason == (
        "Slurm could not open the job's output; its folder must exist on the nodes and be writable "
        "(RaisedSignal:53(Real-time signal 19))"
    )


def job_statuses(rows: Sequence[JobRow]) -> dict[str, Status]:
    """Return the status of each job that has a row of its own."""
    found = {job: classify(own) for job, own in rows_by_job(rows).items()}
    return {job: status for job, status in found.items() if status is not None}


# https://slurm.schedmd.com/job_state_codes.html: base states and flags of releases 20.11 to 26.05.
BASE_STATES = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PENDING", "PREEMPTED", "RUNNING", "SUSPENDED", "TIMEOUT"),
)


def test_a_job_that_was_requeued_and_held_is_not_waited_for():
    assert read_state("REQUEUE_HOLD").state is RunState.FAILED
    assert read_state("SPECIAL_EXIT").state is RunState.FAILED


def test_states_are_read_as_the_commands_print_them():
    words = ["CANCELLED by 1000", "OUT_OF_MEMORY", " RUNNING "]
    assert [read_state(word).word for word in words] == ["CANCELLED", "OUT_OF_MEMORY", "RUNNING"]


@pytest.mark.parametrize("printed", ["HIBERNATING", "", "RE+"])
def test_an_unknown_state_says_so_with_slurms_word(printed):
    slurm_state = read_state(printed)
    assert slurm_state.state is RunState.UNKNOWN
    assert slurm_state.meaning == f"Slurm reports the unknown state {printed!r}"


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


@pytest.mark.parametrize("reason", FOREVER)
def test_a_reason_that_only_somebody_can_end_has_a_remedy(reason):
    assert obstacle(reason)
    start, meaning = describe_wait(reason).split(": ", 1)
    assert start == f"will not start ({reason})"
    assert all(part.strip() for part in meaning.split("; "))
    assert len(meaning.split("; ")) == 2, "a meaning and a remedy"


@pytest.mark.parametrize("reason", GROUP)
def test_a_limit_of_a_group_ends_by_itself(reason):
    assert not obstacle(reason)
    assert describe_wait(reason) == f"waiting for your group's limit ({reason})"


@pytest.mark.parametrize("reason", TEMPORARY)
def test_other_reasons_are_shown_as_they_are(reason):
    assert not obstacle(reason)
    assert describe_wait(reason) == (f"waits to start ({reason})" if reason else "waits to start")


def test_the_remedies_name_the_key_of_the_matrix():
    assert describe_wait("QOSMaxWallDurationPerJobLimit") == (
        "will not start (QOSMaxWallDurationPerJobLimit): its time limit exceeds that of the QOS; "
        "lower cluster.time_limit, or choose another cluster.qos"
    )
    assert describe_wait("PartitionNodeLimit").endswith(
        "; choose other axes.nodes or another cluster.partition (`scontrol show partition` shows the limits)"
    )
    assert describe_wait("AssocMaxGRESMinutesPerJob").endswith(
        "; lower cluster.time_limit, request fewer nodes, ranks or cores, or choose another cluster.account"
    )


#: Messages of slurmstepd, recorded on the test cluster (whose slurmds are named slurmstepd-n1). The first line names
#: the release and the state that sacct would show. 19.05 and earlier did not print the node.
NOTICES = FIXTURES[0].parents[1].joinpath("notices.txt").read_text().rstrip("\n").split("\n\n")


@pytest.mark.parametrize("notice", NOTICES, ids=lambda notice: notice.partition("\n")[0])
def test_the_notices_of_each_release_tell_the_state_that_sacct_would_show(notice):
    head, text = notice.split("\n", 1)
    log = f"ValueError: before\n{text}\nsrun: error: n1: task 0: Terminated\n"
    state = state_from_notices(log, job_id="7")
    assert (state.word if state else "nothing") == head.rpartition(" -> ")[2]


@given(st.text())
def test_any_text_can_be_read(text):
    state_from_notices(text, job_id="7")
