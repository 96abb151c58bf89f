"""Parsing of Slurm's output, for all supported releases."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from bench.jobs.slurm.parsing import (
    UnreadableOutputError,
    expand_hosts,
    parse_accounting,
    parse_expected_start,
    parse_limit_s,
    parse_queue,
    parse_submission,
)
from tests.common import raised

NOW = datetime(2026, 11, 20, 17, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "job", "step"),
    [
        ("123", "123", None),
        ("123.batch", "123", "batch"),
        ("123.0", "123", "0"),
        ("123.extern", "123", "extern"),
        # Jobs of other users can be arrays, or have components.
        ("123_4.0", "123_4", "0"),
        ("123_[5-9%2]", "123_[5-9%2]", None),
        ("123+1.batch", "123", "batch"),
    ],
)
def test_ids_of_jobs_and_steps_are_read(text, job, step):
    (row,) = parse_queue(f"{text}|RUNNING|None|Unknown|n2|root|0|x\n")
    assert (row.job, row.step) == (job, step)


def test_rows_of_waiting_and_running_jobs_are_read():
    rows = parse_queue(
        "13|PENDING|PartitionNodeLimit|N/A||root|0|too-large\n"
        "17|RUNNING|None|2026-11-20T19:51:37|n2|somebody|1000|a|b\n"
    )
    waiting, running = rows
    assert (waiting.job, waiting.state, waiting.reason) == ("13", "PENDING", "PartitionNodeLimit")
    assert (waiting.started, waiting.hosts, waiting.user, waiting.uid) == (None, "", "root", "0")
    assert (running.reason, running.hosts, running.user, running.uid) == ("", "n2", "somebody", "1000")
    assert running.started == datetime(2026, 11, 20, 19, 51, 37, tzinfo=UTC)
    assert running.name == "a|b"


def test_the_cluster_line_of_option_m_is_skipped():
    text = "CLUSTER: bench\n1|RUNNING|None|Unknown|n2|root|0|x\n"
    assert [row.name for row in parse_queue(text)] == ["x"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("1|RUNNING", "expected 8 columns, got '1|RUNNING'"),
        ("x|RUNNING|||||0|x", "'x' is not a job id"),
    ],
)
def test_an_unreadable_line_is_an_error(line, words):
    assert raised(UnreadableOutputError, parse_queue, f"{line}\n") == words


def test_missing_values_of_an_accounting_row_are_none():
    # A step whose node was lost (Slurm 22.05.8): no exit code, no times yet.
    (row,) = parse_accounting("12.batch|CANCELLED||||Unknown|None||n3||||batch\n")
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
