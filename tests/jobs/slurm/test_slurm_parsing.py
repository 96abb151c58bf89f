"""Parsing of Slurm's output, for all supported releases."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from bench.jobs.slurm.parsing import (
    JobKey,
    UnreadableOutputError,
    expand_hosts,
    parse_accounting,
    parse_expected_start,
    parse_job_id,
    parse_limit_s,
    parse_queue,
    parse_submission,
)
from tests.common import raised

NOW = datetime(2026, 11, 20, 17, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("123", JobKey("123")),
        ("123.batch", JobKey("123", step="batch")),
        ("123.0", JobKey("123", step="0")),
        ("123.extern", JobKey("123", step="extern")),
        ("123_4", JobKey("123", task="4")),
        ("123_4.0", JobKey("123", task="4", step="0")),
        ("123_[5-9%2]", JobKey("123", task="[5-9%2]")),
        ("123+0", JobKey("123", component=0)),
        ("123+1.batch", JobKey("123", component=1, step="batch")),
    ],
)
def test_job_ids_of_jobs_arrays_components_and_steps_are_read(text, key):
    assert parse_job_id(text) == key


def test_components_of_a_heterogeneous_job_are_one_job_and_tasks_of_an_array_are_several():
    assert [
        parse_job_id(text).job for text in ("18+0.0", "18+1", "25_0", "25_1.batch")
    ] == "18 18 25_0 25_1".split()


def test_squeue_rows_of_waiting_running_and_component_jobs_are_read():
    # Recorded from Slurm 22.05.8.
    rows = parse_queue(
        "13|PENDING|PartitionNodeLimit|2026-11-20T19:51:36|N/A|UNLIMITED|9||l40s|too-large\n"
        "17|RUNNING|None|2026-11-20T19:51:36|2026-11-20T19:51:37|1:00|1|n2|l40s|time-limit\n"
        "18+1|COMPLETED|None|2026-11-20T19:51:36|2026-11-20T19:51:37|UNLIMITED|1|n3|l40s|a|b\n"
    )
    waiting, running, component = rows
    assert (waiting.key.job, waiting.state, waiting.reason) == ("13", "PENDING", "PartitionNodeLimit")
    assert (waiting.starts, waiting.time_limit_s, waiting.nodes, waiting.hosts) == (None, None, 9, "")
    assert (running.reason, running.time_limit_s, running.hosts) == ("", 60, "n2")
    assert running.starts == datetime(2026, 11, 20, 19, 51, 37, tzinfo=UTC)
    assert (component.key, component.name) == (JobKey("18", component=1), "a|b")


def test_the_cluster_line_of_option_m_is_skipped():
    text = "CLUSTER: bench\n1|RUNNING|None|2026-11-20T19:51:36|Unknown|1:00|1|n2|l40s|x\n"
    assert [row.name for row in parse_queue(text)] == ["x"]


def test_a_line_with_too_few_columns_is_an_error():
    assert raised(UnreadableOutputError, parse_queue, "1|RUNNING\n") == "expected 10 columns, got '1|RUNNING'"


def test_missing_values_of_an_accounting_row_are_none():
    # A step whose node was lost (Slurm 22.05.8): no exit code, no times yet.
    (row,) = parse_accounting("12.batch|CANCELLED||||2026-11-20T19:39:58|Unknown|None||1|n3||batch\n")
    assert (row.exit_code, row.signal, row.derived_exit_code) == (None, None, None)
    assert (row.started, row.ended, row.reason) == (None, None, "")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1-02:00:00", 93_600),
        ("365-00:00:00", 31_536_000),
        ("2:30:00", 9_000),
        ("20:00", 1_200),
        ("30", 1_800),
        ("2-12", 216_000),
        ("UNLIMITED", None),
        ("infinite", None),
        ("NOT_SET", None),
        ("INVALID", None),
        ("", None),
    ],
)
def test_time_limits_are_seconds_and_no_limit_is_none(text, seconds):
    assert parse_limit_s(text) == seconds


@pytest.mark.parametrize(
    ("text", "job_id"),
    [
        ("4711\n", "4711"),
        ("4711;alpha\n", "4711"),
        ("Welcome to alpha!\n4711;alpha\n", "4711"),
        ("Submitted batch job 4711\n", "4711"),
        ("Submitted batch job 4711 on cluster beta\n", "4711"),
        ("", None),
        ("no id here\n", None),
    ],
)
def test_the_job_id_in_the_output_of_sbatch_is_found(text, job_id):
    assert parse_submission(text) == job_id


@pytest.mark.parametrize(
    "line",
    [
        # Recorded from 20.11, 22.05 and 24.11; the source of 23.02 and 23.11 (api/allocate.c) is the same.
        "sbatch: Job 7 to start at 2026-11-20T17:13:29 using 2 processors on nodes n[1-2] in partition l40s",
        "Job 7 to start at 2026-11-20T17:13:29 using 2 processors on n[1-2] in partition l40s",
        # Recorded from 26.05, without and with -M; the source of 25.05 and 25.11 is the same.
        "sbatch: Job 1 to start at 2026-11-20T17:13:29 a using 4 processors on nodes n[1-2] in partition l40s",
        "sbatch: Job 1 to start at 2026-11-20T17:13:29 on cluster bench a using 4 processors on nodes n[1-2] in "
        "partition l40s",
    ],
)
def test_the_expected_start_is_read(line):
    start = parse_expected_start(f"sbatch: info: a remark of the site\n{line}\n", now=NOW)
    assert start == datetime(2026, 11, 20, 17, 13, 29, tzinfo=UTC)


@pytest.mark.parametrize(
    ("line", "key", "state", "reason"),
    [
        # squeue(1): one row per array task (--array), and one row for all tasks that still wait.
        (
            "25_[3-9%2]|PENDING|JobArrayTaskLimit|2026-11-20T19:51:36|N/A|1:00|1||l40s|x",
            JobKey("25", task="[3-9%2]"),
            *("PENDING", "JobArrayTaskLimit"),
        ),
        # Flags instead of the base state: nodes boot (21.08 and later), the job is requeued and held,
        # or a sibling cluster revoked it.
        (
            "9|CONFIGURING|None|2026-11-20T19:51:36|2026-11-20T19:51:37|1:00|2|n[1-2]|l40s|x",
            JobKey("9"),
            *("CONFIGURING", ""),
        ),
        (
            "9|REQUEUE_HOLD|job_requeued_in_held_state|2026-11-20T19:51:36|N/A|1:00|1||l40s|x",
            JobKey("9"),
            *("REQUEUE_HOLD", "job_requeued_in_held_state"),
        ),
        (
            "67108873|REVOKED|None|2026-11-20T19:51:36|N/A|1:00|1||l40s|x",
            JobKey("67108873"),
            *("REVOKED", ""),
        ),
        # A reason of several words (20.11 to 25.05).
        (
            "9|PENDING|ReqNodeNotAvail, UnavailableNodes:n[3-4]|2026-11-20T19:51:36|N/A|1:00|1||l40s|x",
            JobKey("9"),
            *("PENDING", "ReqNodeNotAvail, UnavailableNodes:n[3-4]"),
        ),
    ],
)
def test_rows_of_the_queue_are_read_in_all_states(line, key, state, reason):
    (row,) = parse_queue(f"{line}\n")
    assert (row.key, row.state, row.reason) == (key, state, reason)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", ()),
        ("n1", ("n1",)),
        ("n[1-3]", ("n1", "n2", "n3")),
        ("n[01-02,10],login", ("n01", "n02", "n10", "login")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("n[1-", ()),
        ("n[a-b]", ()),
        ("$NODES", ()),
        ("n[1-999999999]", ()),
    ],
)
def test_host_lists_are_expanded(text: str, hosts: tuple[str, ...]) -> None:
    assert expand_hosts(text) == hosts
