"""Parsing of Slurm's output, for all supported releases."""

from datetime import UTC, datetime

import pytest

from bench.jobs.slurm.parsing import (
    Gpus,
    UnreadableOutputError,
    expand_hosts,
    parse_expected_start,
    parse_limit_s,
    parse_nodes,
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


def test_the_cluster_line_of_option_m_is_skipped():
    text = "CLUSTER: bench\n1|RUNNING|None|Unknown|n2|root|0|x\n"
    assert [row.name for row in parse_queue(text)] == ["x"]


@pytest.mark.parametrize(
    ("parse", "line", "words"),
    [
        (parse_queue, "1|RUNNING", "expected 8 columns, got '1|RUNNING'"),
        (parse_queue, "x|RUNNING|||||0|x", "'x' is not a job id"),
        (parse_nodes, "l40s*|up|infinite", "expected 8 columns, got 'l40s*|up|infinite'"),
    ],
)
def test_an_unreadable_line_is_an_error(parse, line, words):
    assert raised(UnreadableOutputError, parse, f"{line}\n") == words


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


# The first three lines are from Slurm 22.05.8; the others follow sinfo(1) of 20.11 to 25.05.
SINFO = """\
l40s*|up|infinite|3|idle|8|gpu:l40s:4|1-infinite
l40s*|up|infinite|1|down*|8|gpu:l40s:4|1-infinite
short|up|5:00|1|mixed|8|gpu:l40s:4|1
big|down|2-00:00:00|120|allocated+|128+|gpu:a100:8(S:0-7),shard:32|1-16
saving|up|1-00:00:00|4|idle~|64|(null)|1-infinite
broken|up|1-00:00:00|2|drained|64|gpu:2|1-infinite
"""

# States in sinfo(1), "NODE STATE CODES", of 21.08 to 25.05, in which a node can run jobs now or later.
IN_SERVICE = ("IDLE", "mixed-", "allocated", "completing", "planned", "reserved", "maint", "idle$")
IN_SERVICE += tuple("powered_down powering_up powering_down idle% idle# blocked mixed@ mixed^".split())
OUT_OF_SERVICE = ("down", "down*", "idle*", "drained", "draining", "drained*", "fail", "failing", "error")
OUT_OF_SERVICE += ("inval", "future", "unknown", "perfctrs", "reboot", "rebooting")


@pytest.mark.parametrize("state", [*IN_SERVICE, *OUT_OF_SERVICE])
def test_the_state_of_a_node_decides_if_it_is_in_service(state):
    (group,) = parse_nodes(f"gpu|up|1:00|1|{state}|8|(null)|(null)\n")
    assert group.in_service == (state in IN_SERVICE)


def test_partitions_nodes_and_gpus_are_read():
    groups = parse_nodes(SINFO)
    assert [(g.partition, g.default, g.available, g.nodes, g.state) for g in groups] == [
        ("l40s", True, True, 3, "idle"),
        ("l40s", True, True, 1, "down*"),
        ("short", False, True, 1, "mixed"),
        ("big", False, False, 120, "allocated+"),
        ("saving", False, True, 4, "idle~"),
        ("broken", False, True, 2, "drained"),
    ]
    assert [g.time_limit_s for g in groups] == [None, None, 300, 172_800, 86_400, 86_400]
    assert [g.in_service for g in groups] == [True, False, True, True, True, False]
    assert [g.gpus for g in groups[3:]] == [(Gpus("a100", 8),), (), (Gpus(None, 2),)]
    assert groups[3].cpus == 128
    assert [g.max_nodes for g in groups] == [None, None, 1, 16, None, None]


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("(null)", ()),
        ("", ()),
        ("gpu:4", (Gpus(None, 4),)),
        ("gpu", (Gpus(None, 1),)),
        ("gpu:0", ()),
        ("gpu:l40s:4(S:0-1)", (Gpus("l40s", 4),)),
        ("gpu:a100:4(S:0,1),nvme:no_consume:1K", (Gpus("a100", 4),)),
        ("shard:32,gpu:h100:no_consume:2", (Gpus("h100", 2),)),
        ("gpu:a100_1g.5gb:7(IDX:0-6),gpu:a100:1", (Gpus("a100_1g.5gb", 7), Gpus("a100", 1))),
    ],
)
def test_gpus_are_read(text, gpus):
    (group,) = parse_nodes(f"gpu|up|1:00|1|idle|8|{text}|1-infinite\n")
    assert group.gpus == gpus
