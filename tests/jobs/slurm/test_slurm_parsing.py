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
#: Ids of jobs, with their step behind a blank. Jobs of other users can be arrays, or have components.
IDS = ["123", "123 batch", "123 0", "123 extern", "123_4 0", "123_[5-9%2]", "123+1 batch"]
LIMITS = "1-02:00:00=93600 365-00:00:00=31536000 2:30:00=9000 20:00=1200 30=1800 2-12=216000"


def test_ids_of_jobs_and_steps_are_read_below_the_cluster_line_of_option_m():
    for job, _, step in (one.partition(" ") for one in IDS):
        shown = f"{job}.{step}" if step else job
        (row,) = parse_queue(f"CLUSTER: bench\n{shown}|RUNNING|None|Unknown|n2|root|0|x\n")
        assert (row.job, row.step, row.name) == (job.partition("+")[0], step or None, "x")


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


def test_time_limits_are_seconds_and_no_limit_is_none():
    for text, _, seconds in (one.partition("=") for one in LIMITS.split()):
        assert parse_limit_s(text) == int(seconds), text
    assert {parse_limit_s(text) for text in ("UNLIMITED", "infinite", "NOT_SET", "INVALID", "")} == {None}


def test_the_job_id_in_the_output_of_sbatch_is_found():
    greeted = "Welcome to alpha!\n4711;alpha\n"
    submitted = "Submitted batch job 4711"
    for text in ("4711\n", "4711;alpha\n", greeted, f"{submitted}\n", f"{submitted} on cluster beta\n"):
        assert parse_submission(text) == "4711"
    assert parse_submission("") is parse_submission("no id here\n") is None


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


def test_host_lists_are_expanded():
    assert expand_hosts("n1") == ("n1",)
    assert expand_hosts("n[1-3]") == ("n1", "n2", "n3")
    assert expand_hosts("n[01-02,10],login") == ("n01", "n02", "n10", "login")
    assert expand_hosts("r[1-2]n[1-2]") == ("r1n1", "r1n2", "r2n1", "r2n2")
    for text in ("", "n[1-", "n[a-b]", "$NODES", "n[1-999999999]"):
        assert expand_hosts(text) == (), text


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


def test_the_state_of_a_node_decides_if_it_is_in_service():
    for state in (*IN_SERVICE, *OUT_OF_SERVICE):
        (group,) = parse_nodes(f"gpu|up|1:00|1|{state}|8|(null)|(null)\n")
        assert group.in_service == (state in IN_SERVICE), state


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
