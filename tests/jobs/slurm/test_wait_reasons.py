"""The reasons for which Slurm jobs wait. The names are those of job_state_reason.c, releases 20.11 to 26.05."""

from __future__ import annotations

import pytest

from bench.jobs.slurm.states import describe_wait, obstacle

#: Limits of one job or node, and minimums, which no end of another job changes.
FOREVER = [
    *(
        "JobHeldUser",
        "DependencyNeverSatisfied",
        "PartitionNodeLimit",
        "PartitionTimeLimit",
        "InvalidAccount",
    ),
    *("QOSNotAllowed", "ReservationDeleted", "BurstBufferOperation", "MaxMemPerLimit"),
    # squeue prints a job's state_desc with underscores for spaces.
    *("launch failed requeued held", "launch_failed_requeued_held"),
    *("AssocMaxCpuPerJobLimit", "AssocMaxGRESPerJob", "AssocMaxEnergyMinutesPerJob", "AssocMaxMemPerNode"),
    *("QOSMaxWallDurationPerJobLimit", "QOSMaxMemoryPerNode", "QOSMinCpuNotSatisfied", "QOSMinGRES"),
]
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
