"""The transport in use: NCCL's log in the formats of its releases, unused InfiniBand.

The line formats are those of the logs in NVIDIA/nccl#226 (2.4), #707 (2.7), #952 and #1412 (2.1x), #1029
(HPC-X's plugin), #1538 (2.22) and aws/aws-ofi-nccl#715.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.study.ledger import End, Record, RunState
from bench.study.verify import Check, verify_run
from ddp_scaling_bench.files import write_json
from ddp_scaling_bench.measure.findings import NoPeerAccess, SocketFallback
from ddp_scaling_bench.measure.ranks import RankFacts, infiniband_devices
from ddp_scaling_bench.measure.transport import (
    Transport,
    combine_traces,
    diverted_warnings,
    read_traces,
    release_nccl_log,
    request_nccl_log,
    users_variables,
)
from ddp_scaling_bench.run_folder import RunFolder
from tests.analysis.studies import make_cell

LOGS = Path(__file__).with_name("nccl_logs")
INFINIBAND, SOCKETS = ((LOGS / f"{name}.txt").read_text() for name in ("infiniband", "sockets"))
HOSTS = {"g1": ["mlx5_0", "mlx5_1"], "g2": ["mlx5_0"]}
VIA = "n1:7:7 [0] NCCL INFO Channel 00/0 : 4[0] -> 3[3] via"


@pytest.fixture
def trace_of(tmp_path):
    """Return a function that returns what a rank with a log sends."""

    def read(log: str) -> dict[str, Any]:
        path = tmp_path / "a log"
        path.write_text(log)
        env = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(path)}
        trace: dict[str, Any] = json.loads(json.dumps(read_traces("nccl", env=env, rank=0)))
        return trace

    return read


def combined(traces: list[Any], *, hosts: dict[str, list[str]] = HOSTS, **env: str) -> tuple[Transport, Any]:
    """Return the transport of ranks on ``hosts``, with their InfiniBand devices, and the finding."""
    facts = [
        RankFacts(rank, 0, host, host, [0], 1, None, own) for rank, (host, own) in enumerate(hosts.items())
    ]
    return combine_traces(traces, facts, backend="nccl", env=env)


INFINIBAND_VALUES = {
    "backend": "nccl",
    "interface": "mlx5_0, mlx5_1",
    "network": "IB",
    "algorithm": None,
    "version": "2.21.5+cuda12.4",
    "gpudirect": "yes",
    "within_host": "P2P/CUMEM",
    "channels": "16",
    "source": "NCCL's log",
}
ALONE = "\n".join(line for line in INFINIBAND.splitlines() if " via NET" not in line)
ONE_HOST: dict[str, list[str]] = {"g1": ["mlx5_0"]}
FALLBACK = SocketFallback(interface="eth0, eth1", hosts=("g1", "g2"), devices=("mlx5_0", "mlx5_1"))
SLOWER = "sockets beside InfiniBand"
FALLBACK_UNNAMED = replace(FALLBACK, interface="interface unknown")
WITHOUT: dict[str, list[str]] = {"g1": [], "g2": []}
MNNVL = f"""
n1:7:7 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
n1:7:7 [0] NCCL INFO Using network Socket
{VIA} P2P/MNNVL"""
SHARED = f"{VIA} SHM/direct/direct"
NVLINK = "\nn1:7:7 [0] NCCL INFO               + NVL[48.0] - GPU/2F000"
DISABLED = "\nn1:7:7 [0] graph/paths.cc:319 NCCL WARN P2P is disabled between connected GPUs 1 and 0. You can"
NO_P2P = {"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "SYS"}
UNNAMED = "NCCL's log does not name its network: is NCCL_DEBUG_SUBSYS set?"


@pytest.mark.parametrize(
    ("logs", "options", "expected", "finding"),
    [
        ([INFINIBAND], {}, INFINIBAND_VALUES, None),
        ([INFINIBAND], {"NCCL_ALGO": "Ring"}, {"algorithm": "Ring"}, None),
        (
            [SOCKETS],
            {},
            {"network": "Socket", "gpudirect": "no", "within_host": "SHM", "channels": "2"},
            FALLBACK,
        ),
        ([SOCKETS], {}, {"interface": "eth0, eth1", "algorithm": None, "fallback": SLOWER}, FALLBACK),
        ([SOCKETS], {"NCCL_IB_DISABLE": "1"}, {"fallback": None}, replace(FALLBACK, disabled="1")),
        ([SOCKETS], {"hosts": WITHOUT}, {"network": "Socket", "fallback": None}, None),
        # On one host no network is in use.
        ([SOCKETS], {"hosts": ONE_HOST}, {"fallback": None}, None),
        ([ALONE], {"hosts": ONE_HOST}, {"network": None, "interface": None, "not_read_because": None}, None),
        ([f"{VIA} P2P/MNNVL"], {"hosts": ONE_HOST}, {"network": None, "within_host": "P2P/MNNVL"}, None),
        # NCCL's choice stands until it has said which channels it opened.
        ([ALONE], {}, {"network": "IB"}, None),
        # Logs of several ranks are combined.
        (
            *([INFINIBAND, SOCKETS], {"hosts": WITHOUT}),
            {"network": "IB, Socket", "gpudirect": "partly", "interface": "mlx5_0, mlx5_1, eth0, eth1"},
            None,
        ),
        (
            ["", "no line of NCCL\nChannel 00/0 : via NET/IB/0"],
            {},
            {"network": None, "not_read_because": UNNAMED},
            None,
        ),
        # Between GPUs without NVLink, shared memory is NCCL's choice.
        ([SHARED], {"hosts": ONE_HOST}, {"within_host": "SHM"}, None),
        ([SHARED + NVLINK], {"hosts": ONE_HOST}, {"within_host": "SHM"}, NoPeerAccess()),
        ([SHARED + DISABLED], {"hosts": ONE_HOST}, {}, NoPeerAccess()),
        ([SHARED], {"hosts": ONE_HOST, **NO_P2P}, {}, NoPeerAccess(setting="NCCL_P2P_DISABLE=1")),
        ([f"{VIA} P2P/CUMEM{NVLINK}"], {"hosts": ONE_HOST}, {"within_host": "P2P/CUMEM"}, None),
        # NVLink between hosts is no fallback, but sockets beside it are.
        ([MNNVL], {}, {"network": "MNNVL", "interface": None, "within_host": "P2P/MNNVL"}, None),
        ([f"{VIA} P2P/MNNVL\n{VIA} NET/Socket/0"], {}, {"network": "MNNVL, Socket"}, FALLBACK_UNNAMED),
    ],
)
def test_the_transport_is_what_nccls_logs_say(trace_of, logs, options, expected, finding):
    transport, fallback = combined([*map(trace_of, logs)], **options)
    assert {name: transport.get(name) for name in expected} == expected
    assert fallback == ([finding] if finding else [])


EXCERPTS = sorted(Path(__file__).parent.glob("nccl_excerpts/*.txt"))


@pytest.mark.parametrize("path", EXCERPTS, ids=lambda path: path.stem)
def test_an_excerpt_of_a_log_is_understood(trace_of, path):
    source, hosts, expected, log = path.read_text(encoding="utf-8").split("\n", 3)
    assert source.startswith(("# source: https://github.com/", "# source: recorded "))
    wanted = json.loads(expected.removeprefix("# expected: "))
    names = [f"n{number}" for number in range(int(hosts.removeprefix("# hosts: ")))]
    trace = trace_of(log)
    transport, _ = combined([trace], hosts={name: [] for name in names})
    known = {**transport, "devices": {kind: [*trace["log"][kind]] for kind in wanted.get("devices", ())}}
    assert wanted
    assert {name: known[name] for name in wanted} == wanted


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
def test_verify_does_not_pass_a_fallback(trace_of, tmp_path, fallback):
    transport = combined([trace_of(SOCKETS)])[0] | {"fallback": fallback}
    check = transport_check(tmp_path, transport, backend="nccl", nodes=2)
    assert check.passed == (fallback is None)
    assert check.found == "nccl over Socket eth0, eth1"
    if fallback:
        assert check.expected == "InfiniBand, which the hosts have; see the warning in env.json"


FACTS = [RankFacts(rank, 0, host, host, [0], 1, None, ["mlx5_0"]) for rank, host in enumerate(("g1", "g2"))]


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
    traces = [read_traces("gloo", env=env, rank=rank) for rank in range(2)]
    found, warning = combine_traces(traces, FACTS, backend="gloo", env=env)
    assert (found["interface"], found["network"], found["source"], warning) == (
        *("ib0", "tcp", "configuration"),
        [],
    )


def networks(env: dict[str, str], *, rank: int = 0) -> list[str]:
    return [*read_traces("nccl", env=env, rank=rank)["log"]["network"]]


def test_the_scripts_log_of_nccl_is_read_and_rank_0_keeps_its_own(tmp_path):
    folder = tmp_path / "50 %h"
    folder.mkdir()
    env = scripts_variables(folder)
    for rank, names in enumerate((["nccl.log"], [])):
        path = log_in(folder, SOCKETS + "n1:7:9 [0] x.cc:1 NCCL WARN a\n" * 2)
        assert networks(env, rank=rank) == ["Socket"]
        assert path.exists(), "NCCL adds warnings to it"
        assert diverted_warnings(env) == ["n1:7:9 [0] x.cc:1 NCCL WARN a"]
        release_nccl_log(env, None if rank else RunFolder(folder))
        assert [one.name for one in folder.iterdir()] == names
        (folder / "nccl.log").unlink(missing_ok=True)


def test_a_log_requested_by_the_user_is_read_and_stays(tmp_path):
    path = tmp_path / "mine.log"
    path.write_text(SOCKETS)
    env = {"NCCL_DEBUG": "info", "NCCL_DEBUG_FILE": str(path)}
    assert networks(env) == ["Socket"]
    release_nccl_log(env, RunFolder(tmp_path))
    assert path.exists()
    (tmp_path / "job.out").write_text(SOCKETS)
    assert networks({"NCCL_DEBUG": "INFO", "BENCH_RUN_DIR": str(tmp_path)}) == ["Socket"]


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({}, "NCCL_DEBUG is not set, and NCCL names its network at INFO only"),
        ({"NCCL_DEBUG": "WARN"}, "NCCL_DEBUG is WARN, and NCCL names its network at INFO only"),
        ({"NCCL_DEBUG": "INFO"}, "NCCL writes its log to standard output: set NCCL_DEBUG_FILE as well"),
        (
            {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/nowhere/%h"},
            "NCCL has written no log to NCCL_DEBUG_FILE",
        ),
    ],
)
def test_an_unavailable_nccl_log_leaves_empty_values_with_the_reason(env, why):
    traces = read_traces("nccl", env=env, rank=0)
    assert traces == {"why": why}
    found, warning = combine_traces([traces, traces], FACTS, backend="nccl", env=env)
    unknown = dict.fromkeys(("interface", "network", "algorithm", "version", "gpudirect", "source"))
    assert (found, warning) == ({"backend": "nccl", "not_read_because": why, **unknown}, [])


def test_a_recorder_created_before_nccl_starts_requests_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    env: dict[str, str] = {}
    request_nccl_log(env)
    (private,) = tmp_path.iterdir()
    assert private.stat().st_mode & 0o777 == 0o700, "no other user can plant a link that NCCL would follow"
    assert env == {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{private}/bench-nccl-%p.log"}
    assert read_traces("nccl", env=env, rank=0) == {
        "why": "NCCL had started before the recorder was created: set NCCL_DEBUG=INFO and NCCL_DEBUG_FILE"
        " before the start"
    }
    path = private / f"bench-nccl-{os.getpid()}.log"
    path.write_text(SOCKETS)
    assert networks(env, rank=1) == ["Socket"]
    release_nccl_log(env, None)
    assert not private.exists()
    theirs = {"NCCL_DEBUG": "VERSION"}
    request_nccl_log(theirs)
    assert theirs == {"NCCL_DEBUG": "VERSION"}


def test_variables_set_for_the_recorder_are_not_reported_as_the_users(tmp_path):
    env = {**scripts_variables(tmp_path), "NCCL_ALGO": "Ring"}
    assert users_variables(env) == {"BENCH_RUN_DIR": str(tmp_path), "NCCL_ALGO": "Ring"}
    own = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/tmp/mine"}
    assert users_variables(own) == own
