"""Parsing of sinfo: partitions, nodes and GPUs."""

from __future__ import annotations

import pytest

from bench.jobs.slurm.parsing import Gpus, UnreadableOutputError, parse_nodes
from tests.common import raised

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


def test_a_line_with_other_columns_is_an_error():
    message = raised(UnreadableOutputError, parse_nodes, "l40s*|up|infinite\n")
    assert message == "expected 8 columns, got 'l40s*|up|infinite'"
