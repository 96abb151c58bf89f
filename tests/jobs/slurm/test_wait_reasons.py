"""The reasons for which Slurm jobs wait. The names are those of job_state_reason.c, releases 20.11 to 26.05."""

from __future__ import annotations

import pytest

from bench.jobs.slurm.job_states import describe_wait, will_not_start

RESOURCES = ("BB", "Billing", "Energy", "GRES", "License", "Unknown")

#: Names of limits of one job or node, and of minimums, which no end of another job changes.
FOREVER = [
    *("JobHeldUser", "JobHeldAdmin", "JobHoldMaxRequeue", "DependencyNeverSatisfied", "BadConstraints"),
    *("PartitionNodeLimit", "PartitionTimeLimit", "PartitionConfig", "MaxMemPerLimit"),
    *("InvalidAccount", "AccountNotAllowed", "InvalidQOS", "QOSNotAllowed"),
    *("ReservationDeleted", "ReservationInvalid", "BurstBufferOperation"),
    # squeue prints a job's state_desc with underscores for spaces.
    *("launch failed requeued held", "launch_failed_requeued_held"),
    "user_env_retrieval_failed_requeued_held",
    *("AssocMaxCpuPerJobLimit", "AssocMaxCpuMinutesPerJobLimit", "AssocMaxNodePerJobLimit"),
    *("AssocMaxWallDurationPerJobLimit", "AssocMaxCpuPerNode", "AssocMaxMemPerJob", "AssocMaxMemPerNode"),
    *("AssocMaxMemMinutesPerJob", "AssocMaxNodeMinutesPerJob"),
    *(f"AssocMax{one}PerJob" for one in RESOURCES),
    *(f"AssocMax{one}MinutesPerJob" for one in RESOURCES),
    *(f"AssocMax{one}PerNode" for one in RESOURCES if one != "License"),
    *("QOSMaxCpuPerJobLimit", "QOSMaxCpuMinutesPerJobLimit", "QOSMaxNodePerJobLimit"),
    *("QOSMaxWallDurationPerJobLimit", "QOSMaxCpuPerNode", "QOSMaxMemoryPerJob", "QOSMaxMemoryPerNode"),
    *("QOSMaxMemoryMinutesPerJob", "QOSMaxNodeMinutesPerJob"),
    *(f"QOSMax{one}PerJob" for one in RESOURCES),
    *(f"QOSMax{one}MinutesPerJob" for one in RESOURCES),
    *(f"QOSMax{one}PerNode" for one in RESOURCES if one != "License"),
    *("QOSMinCpuNotSatisfied", "QOSMinMemory", "QOSMinNode"),
    *(f"QOSMin{one}" for one in RESOURCES),
]
#: Names of limits that all jobs of an account or QOS share.
GROUP = [
    *("AssocGrpCpuLimit", "AssocGrpCPUMinutesLimit", "AssocGrpCPURunMinutesLimit", "AssocGrpJobsLimit"),
    *("AssocGrpMemLimit", "AssocGrpMemMinutes", "AssocGrpMemRunMinutes", "AssocGrpNodeLimit"),
    *("AssocGrpNodeMinutes", "AssocGrpNodeRunMinutes", "AssocGrpSubmitJobsLimit", "AssocGrpWallLimit"),
    *("QOSGrpCpuLimit", "QOSGrpCPUMinutesLimit", "QOSGrpCPURunMinutesLimit", "QOSGrpJobsLimit"),
    *("QOSGrpMemLimit", "QOSGrpMemoryMinutes", "QOSGrpMemoryRunMinutes", "QOSGrpNodeLimit"),
    *("QOSGrpNodeMinutes", "QOSGrpNodeRunMinutes", "QOSGrpSubmitJobsLimit", "QOSGrpWallLimit"),
    *(f"{kind}Grp{one}{what}" for kind in ("Assoc", "QOS") for one in RESOURCES for what in ("", "Minutes")),
    *(f"{kind}Grp{one}RunMinutes" for kind in ("Assoc", "QOS") for one in RESOURCES),
    *(f"Max{one}PerAccount" for one in (*RESOURCES, "Cpu", "Node", "Memory", "Jobs", "SubmitJobs")),
]
#: Names that end when other jobs end, when a time is reached, or when nodes are repaired.
TEMPORARY = [
    *("", "None", "Resources", "Priority", "BeginTime", "Dependency", "Licenses", "Reservation", "Prolog"),
    *("ReqNodeNotAvail", "ReqNodeNotAvail, UnavailableNodes:n3", "NodeDown", "PartitionDown", "FrontEndDown"),
    *("PartitionInactive", "Cleaning", "SchedDefer", "JobArrayTaskLimit", "FedJobLock", "Constraints"),
    *("BurstBufferResources", "BurstBufferStageIn", "PowerNotAvail", "PowerReserved", "AccountingPolicy"),
    *("AssociationJobLimit", "AssociationResourceLimit", "AssociationTimeLimit", "AssocMaxJobsLimit"),
    *("AssocMaxSubmitJobLimit", "QOSJobLimit", "QOSResourceLimit", "QOSTimeLimit", "QOSUsageThreshold"),
    *("QOSMaxCpuPerUserLimit", "QOSMaxJobsPerUserLimit", "QOSMaxNodePerUserLimit", "QOSMaxMemoryPerUser"),
    *("QOSMaxSubmitJobPerUserLimit", *(f"QOSMax{one}PerUser" for one in RESOURCES)),
    # Reasons of jobs that have ended or are about to be.
    *("DeadLine", "TimeLimit", "OutOfMemory", "NonZeroExitCode", "RaisedSignal", "SystemFailure"),
]


@pytest.mark.parametrize("reason", FOREVER)
def test_a_reason_that_only_somebody_can_end_has_a_remedy(reason):
    assert will_not_start(reason)
    start, meaning = describe_wait(reason).split(": ", 1)
    assert start == f"will not start ({reason})"
    assert all(part.strip() for part in meaning.split("; "))
    assert len(meaning.split("; ")) == 2, "a meaning and a remedy"


@pytest.mark.parametrize("reason", GROUP)
def test_a_limit_of_a_group_ends_by_itself(reason):
    assert not will_not_start(reason)
    assert describe_wait(reason) == f"waiting for your group's limit ({reason})"


@pytest.mark.parametrize("reason", TEMPORARY)
def test_other_reasons_are_shown_as_they_are(reason):
    assert not will_not_start(reason)
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
