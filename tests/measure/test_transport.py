"""The transport in use: NCCL's log in the formats of its releases, unused InfiniBand.

The line formats are those of the logs in NVIDIA/nccl#226 (2.4), #707 (2.7), #952 and #1412 (2.1x), #1029
(HPC-X's plugin), #1538 (2.22) and aws/aws-ofi-nccl#715.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from bench.measure.findings import SocketFallback
from bench.measure.ranks import RankFacts, infiniband_devices
from bench.measure.transport import (
    NcclLog,
    combine_nccl_logs,
    combine_traces,
    fallback,
    nccl_transport,
    read_nccl_log,
    read_traces,
    request_nccl_log,
    users_variables,
)
from bench.study.files import write_json
from bench.study.layout import RunFolder
from bench.study.ledger import End, Record, RunState
from bench.study.verify import Check, verify_run
from tests.analysis.studies import make_cell

LOGS = Path(__file__).with_name("nccl_logs")
INFINIBAND, SOCKETS = ((LOGS / f"{name}.txt").read_text() for name in ("infiniband", "sockets"))
HOSTS = {"g1": ["mlx5_0", "mlx5_1"], "g2": ["mlx5_0"]}


def transport_of(*logs: str, hosts: int = 2, **env: str) -> dict[str, str | None]:
    merged = NcclLog()
    for log in logs:
        merged.merge(read_nccl_log(log.splitlines()))
    return nccl_transport(merged, hosts=hosts, env=env)


def test_a_log_over_infiniband_has_all_values():
    assert transport_of(INFINIBAND, NCCL_ALGO="Ring") == {
        "backend": "nccl",
        "interface": "mlx5_0, mlx5_1",
        "network": "IB",
        "algorithm": "Ring",
        "version": "2.21.5+cuda12.4",
        "gpudirect": "yes",
        "within_host": "P2P/CUMEM",
        "channels": "16",
        "source": "NCCL's log",
    }


def test_a_log_over_sockets_names_the_interfaces():
    found = transport_of(SOCKETS)
    assert (found["network"], found["interface"], found["gpudirect"]) == ("Socket", "eth0, eth1", "no")
    assert (found["within_host"], found["channels"], found["algorithm"]) == ("SHM", "2", None)


def test_on_one_host_no_network_is_in_use():
    alone = "\n".join(line for line in INFINIBAND.splitlines() if " via NET" not in line)
    found = transport_of(alone, hosts=1)
    assert (found["network"], found["interface"], found["within_host"]) == (None, None, "P2P/CUMEM")
    # On two, NCCL's choice stands until it has said which channels it opened.
    assert transport_of(alone)["network"] == "IB"


def test_logs_of_several_ranks_are_combined():
    found = transport_of(INFINIBAND, SOCKETS)
    assert found["network"] == "IB, Socket"
    assert found["gpudirect"] == "partly"
    assert found["interface"] == "mlx5_0, mlx5_1, eth0, eth1"
    assert transport_of("", "nothing of NCCL's\nChannel 00/0 : via NET/IB/0")["network"] is None


def test_a_fallback_to_sockets_is_found():
    found = SocketFallback(interface="eth0, eth1", hosts=("g1", "g2"), devices=("mlx5_0", "mlx5_1"))
    assert fallback(transport_of(SOCKETS), HOSTS, {}) == found
    because = fallback(transport_of(SOCKETS), HOSTS, {"NCCL_IB_DISABLE": "1"})
    assert because == replace(found, disabled="1")


@pytest.mark.parametrize(
    ("log", "infiniband"),
    [
        (INFINIBAND, HOSTS),  # it is in use
        (SOCKETS, {"g1": [], "g2": []}),  # there is none
        (SOCKETS, {"g1": ["mlx5_0"]}),  # nothing leaves the host
    ],
)
def test_no_warning_without_a_fallback(log, infiniband):
    assert fallback(transport_of(log), infiniband, {}) is None


def test_active_infiniband_devices_are_found(tmp_path):
    for device, port, state in (
        ("mlx5_0", "1", "4: ACTIVE\n"),
        ("mlx5_1", "1", "1: DOWN\n"),
        ("mlx5_2", "1", "2: INIT\n"),
        ("mlx5_2", "2", "4: ACTIVE\n"),
    ):
        (tmp_path / device / "ports" / port).mkdir(parents=True)
        (tmp_path / device / "ports" / port / "state").write_text(state)
    assert infiniband_devices(tmp_path) == ["mlx5_0", "mlx5_2"]
    assert infiniband_devices(tmp_path / "absent") == []


def transport_check(folder: Path, transport: dict[str, str | None], *, backend: str, nodes: int) -> Check:
    """Return the check of the transport of a completed run with one rank per node."""
    cell = make_cell(nodes, batch=4, mode="weak", backend=backend)
    write_json(folder / "env.json", {"world_size": nodes, "backend": backend, "transport": transport})
    record = Record(run_id="r1", attempt=1).ended(End(state=RunState.COMPLETED))
    checks = verify_run(RunFolder(folder), record, cell).checks
    (check,) = [check for check in checks if check.name == "transport"]
    return check


@pytest.mark.parametrize("fallback", [None, "sockets beside InfiniBand"])
def test_verify_does_not_pass_a_fallback(tmp_path, fallback):
    transport = transport_of(SOCKETS) | {"fallback": fallback}
    check = transport_check(tmp_path, transport, backend="nccl", nodes=2)
    assert check.passed == (fallback is None)
    assert check.found == "nccl over Socket eth0, eth1"
    if fallback:
        assert check.expected == "InfiniBand, which the hosts have; see the warning in env.json"


def facts(*hosts: str, infiniband: tuple[str, ...] = ("mlx5_0",)) -> list[RankFacts]:
    return [RankFacts(rank, 0, host, host, [0], 1, None, list(infiniband)) for rank, host in enumerate(hosts)]


def traces_of_nccl(env: dict[str, str], *, rank: int = 0, folder: Path | None = None) -> dict:
    of = None if folder is None else RunFolder(folder)
    return read_traces("nccl", env=env, rank=rank, folder=of)


def scripts_variables(folder: Path) -> dict[str, str]:
    """Return the variables that a job's script sets for a command with the recorder."""
    template = str(folder).replace("%", "%%") + "/nccl.%h.%p.log"
    return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": template, "BENCH_RUN_DIR": str(folder)}


def log_in(folder: Path, text: str) -> Path:
    path = folder / f"nccl.{os.uname().nodename.partition('.')[0]}.{os.getpid()}.log"
    path.write_text(text)
    return path


def test_gloos_transport_is_that_of_its_configuration():
    env = {"GLOO_SOCKET_IFNAME": "ib0"}
    traces = [read_traces("gloo", env=env, rank=rank, folder=None) for rank in range(2)]
    found, warning = combine_traces(traces, facts("n1", "n2"), backend="gloo", env=env)
    assert (found["interface"], found["network"], found["source"], warning) == (
        *("ib0", "tcp", "configuration"),
        None,
    )


def test_the_scripts_log_of_nccl_is_read_and_rank_0_keeps_its_own(tmp_path):
    folder = tmp_path / "50 %h"
    folder.mkdir()
    env = scripts_variables(folder)
    path = log_in(folder, INFINIBAND)
    found = traces_of_nccl(env, folder=folder)
    assert NcclLog.from_json(json.loads(json.dumps(found["log"]))) == read_nccl_log(INFINIBAND.splitlines())
    assert [one.name for one in folder.iterdir()] == ["nccl.log"]
    path.write_text(INFINIBAND)
    assert traces_of_nccl(env, rank=1) == found
    assert [one.name for one in folder.iterdir()] == ["nccl.log"]


def test_a_log_requested_by_the_user_is_read_and_stays(tmp_path):
    path = tmp_path / "mine.log"
    path.write_text(SOCKETS)
    found = traces_of_nccl({"NCCL_DEBUG": "info", "NCCL_DEBUG_FILE": str(path)}, folder=tmp_path)
    assert found["log"]["chosen"] == ["Socket"]
    assert path.exists()
    (tmp_path / "job.out").write_text(SOCKETS)
    printed = {"NCCL_DEBUG": "INFO", "BENCH_RUN_DIR": str(tmp_path)}
    assert traces_of_nccl(printed, folder=tmp_path)["log"]["chosen"] == ["Socket"]


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({}, "NCCL_DEBUG is not set, and NCCL names its network at INFO only"),
        ({"NCCL_DEBUG": "WARN"}, "NCCL_DEBUG is WARN, and NCCL names its network at INFO only"),
        ({"NCCL_DEBUG": "INFO"}, "NCCL writes its log to standard output: set NCCL_DEBUG_FILE as well"),
        (
            {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/nowhere/nccl.%h.%p.log"},
            "NCCL has written no log to NCCL_DEBUG_FILE",
        ),
    ],
)
def test_an_unavailable_nccl_log_leaves_empty_values_with_the_reason(env, why):
    traces = traces_of_nccl(env)
    assert traces == {"why": why}
    found, warning = combine_traces([traces, traces], facts("g1", "g2"), backend="nccl", env=env)
    assert found == {
        "backend": "nccl",
        "interface": None,
        "network": None,
        "algorithm": None,
        "version": None,
        "gpudirect": None,
        "source": None,
        "not_read_because": why,
    }
    assert warning is None


def test_a_recorder_created_before_nccl_starts_requests_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    env: dict[str, str] = {}
    request_nccl_log(env)
    (private,) = tmp_path.iterdir()
    assert private.stat().st_mode & 0o777 == 0o700, "no other user can plant a link that NCCL would follow"
    assert env == {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{private}/bench-nccl-%p.log"}
    assert traces_of_nccl(env) == {
        "why": "NCCL had started before the recorder was created: set NCCL_DEBUG=INFO and NCCL_DEBUG_FILE"
        " before the start"
    }
    path = private / f"bench-nccl-{os.getpid()}.log"
    path.write_text(SOCKETS)
    assert traces_of_nccl(env, rank=1)["log"]["chosen"] == ["Socket"]
    assert not private.exists()
    theirs = {"NCCL_DEBUG": "VERSION"}
    request_nccl_log(theirs)
    assert theirs == {"NCCL_DEBUG": "VERSION"}


def test_variables_set_for_the_recorder_are_not_reported_as_the_users(tmp_path):
    env = {**scripts_variables(tmp_path), "NCCL_ALGO": "Ring"}
    assert users_variables(env) == {"BENCH_RUN_DIR": str(tmp_path), "NCCL_ALGO": "Ring"}
    own = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/tmp/mine"}
    assert users_variables(own) == own


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
