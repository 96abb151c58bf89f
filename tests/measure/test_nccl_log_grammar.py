"""Excerpts of public logs of NCCL, of many releases and networks, are read right.

The first lines of a file in ``nccl_excerpts/`` name its source, the number of hosts, and expected values of
``transport`` in env.json, or the ``devices`` in the log.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.measure.ranks import RankFacts
from bench.measure.transport import combine_nccl_logs, nccl_transport, read_nccl_log

EXCERPTS = sorted(Path(__file__).parent.glob("nccl_excerpts/*.txt"))
FACTS = [RankFacts(rank, 0, f"n{rank}", f"n{rank}", [0], 1, None, ["mlx5_0"]) for rank in range(2)]


@pytest.mark.parametrize("path", EXCERPTS, ids=lambda path: path.stem)
def test_an_excerpt_of_a_log_is_understood(path):
    source, hosts, expected, log = path.read_text(encoding="utf-8").split("\n", 3)
    assert source.startswith(("# source: https://github.com/", "# source: recorded "))
    wanted = json.loads(expected.removeprefix("# expected: "))
    found = read_nccl_log(log.splitlines())
    transport = nccl_transport(found, hosts=int(hosts.removeprefix("# hosts: ")), env={})
    known = {**transport, "devices": found.devices}
    assert wanted
    assert {name: known[name] for name in wanted} == wanted


def test_nvlink_between_hosts_is_no_fallback_to_sockets():
    log = read_nccl_log(
        [
            "n1:7:7 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>",
            "n1:7:7 [0] NCCL INFO Using network Socket",
            "n1:7:7 [0] NCCL INFO Channel 00/0 : 4[0] -> 3[3] via P2P/MNNVL",
        ]
    )
    transport, warning = combine_nccl_logs([log], FACTS, {})
    assert (transport["network"], transport["interface"], transport["within_host"]) == (
        *("MNNVL", None),
        "P2P/MNNVL",
    )
    assert (warning, "fallback" in transport) == (None, False)
    alone, _ = combine_nccl_logs([log], FACTS[:1], {})
    assert alone["network"] is None


def test_nvlink_and_sockets_between_hosts_is_a_fallback():
    log = read_nccl_log(
        [
            f"n1:7:7 [0] NCCL INFO Channel 00/0 : 4[0] -> 3[3] via {way}"
            for way in ("P2P/MNNVL", "NET/Socket/0")
        ]
    )
    transport, warning = combine_nccl_logs([log], FACTS, {})
    assert transport["network"] == "MNNVL, Socket"
    assert warning is not None
