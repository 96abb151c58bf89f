"""NCCL's log parses to the contents from which it was generated, and excerpts of public logs parse right.

The first lines of a file in ``nccl_excerpts/`` name its source, the number of hosts, and expected values of
``transport`` in env.json, or the ``devices`` in the log.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.measure.ranks import RankFacts
from bench.measure.transport import combine_nccl_logs, nccl_transport, read_nccl_log
from tests.measure.nccl_logs import logs

KINDS = ("sockets", "infiniband", "merged", "plugin", "nvlink", "rccl", "one_host")
USES_DEVICES = ("sockets", "infiniband", "merged", "plugin", "rccl")
EXCERPTS = sorted(Path(__file__).parent.glob("nccl_excerpts/*.txt"))
FACTS = [RankFacts(rank, 0, f"n{rank}", f"n{rank}", [0], 1, None, ["mlx5_0"]) for rank in range(2)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_generated_log_parses_to_its_contents(kind):
    @settings(max_examples=500, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data):
        contents = data.draw(logs(kind))
        found = read_nccl_log(contents.text.splitlines())
        assert found.version == contents.version
        assert found.devices == {contents.key: contents.devices}
        assert (found.ways, found.channels) == (contents.ways, contents.channels)
        assert found.algorithms == contents.algorithms
        hosts = 1 if kind == "one_host" else 2
        transport, warning = combine_nccl_logs([found], FACTS[:hosts], {})
        network = {"nvlink": "MNNVL", "one_host": None}.get(kind, contents.network)
        assert transport["network"] == network
        assert transport["interface"] == (", ".join(contents.devices) if kind in USES_DEVICES else None)
        assert (warning is not None) == (network == "Socket")
        assert ("fallback" in transport) == (network == "Socket")
        direct = {"/GDRDMA" in way for way in contents.ways if way.startswith("NET/")}
        words = {frozenset([True]): "yes", frozenset([False]): "no", frozenset([True, False]): "partly"}
        assert transport["gpudirect"] == words.get(frozenset(direct))
        assert "comm" not in (transport["within_host"] or "")

    check()


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
