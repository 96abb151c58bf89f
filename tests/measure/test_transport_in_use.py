"""The transport in use: NCCL's log in the formats of its releases, unused InfiniBand.

The line formats are those of the logs in NVIDIA/nccl#226 (2.4), #707 (2.7), #952 and #1412 (2.1x), #1029
(HPC-X's plugin), #1538 (2.22) and aws/aws-ofi-nccl#715.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from bench.measure.ranks import infiniband_devices
from bench.measure.transport import NcclLog, NcclLogFile, fallback, nccl_transport, read_nccl_log
from bench.study.files import write_json
from bench.study.layout import RunFolder
from bench.study.ledger import End, Record, RunState
from bench.study.verify import Check, verify_run
from bench.words import sentence
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


def test_a_fallback_to_sockets_is_a_fact():
    found = fallback(transport_of(SOCKETS), HOSTS, {})
    assert found is not None
    hosts, devices = ["g1", "g2"], ["mlx5_0", "mlx5_1"]
    values = {"interface": "eth0, eth1", "hosts": hosts, "devices": devices, "disabled": None}
    assert (found.kind, found.values) == ("socket-fallback", values)
    assert "check NET/IB in nccl.log" in sentence(found)
    because = fallback(transport_of(SOCKETS), HOSTS, {"NCCL_IB_DISABLE": "1"})
    assert because is not None
    assert sentence(because).endswith("expect a fraction of the bandwidth; NCCL_IB_DISABLE=1 is set")


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


def test_nccls_log_is_requested_in_the_runs_folder(tmp_path):
    folder = RunFolder(tmp_path / "50 %h")
    folder.path.mkdir()
    env: dict[str, str] = {}
    log = NcclLogFile.arrange(env, folder, rank=0)
    assert env == {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{tmp_path}/50 %%h/nccl.log"}
    assert log.read() == NcclLog(), "nothing written yet"
    (folder.path / "nccl.log").write_text(INFINIBAND)
    assert log.read().chosen == {"IB"}
    log.remove()
    assert (folder.path / "nccl.log").exists(), "rank 0's log stays, for people"


def test_the_logs_of_other_ranks_are_removed_after_reading(tmp_path):
    env: dict[str, str] = {}
    log = NcclLogFile.arrange(env, RunFolder(tmp_path), rank=3)
    path = Path(env["NCCL_DEBUG_FILE"])
    folder = path.parent
    assert folder.parent == Path(tempfile.gettempdir())
    assert folder.stat().st_mode & 0o777 == 0o700, "no other user can plant a link that NCCL would follow"
    path.write_text(SOCKETS)
    assert log.read().chosen == {"Socket"}
    log.remove()
    assert not folder.exists()


def test_without_a_temporary_folder_nccls_log_is_not_requested(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    env: dict[str, str] = {}
    log = NcclLogFile.arrange(env, RunFolder(tmp_path), rank=3)
    assert (env, log.path) == ({}, None)
    assert log.missing_because == "no temporary folder for NCCL's log: No such file or directory"


def test_the_users_settings_of_nccls_log_stay(tmp_path):
    quiet = {"NCCL_DEBUG": "WARN"}
    assert NcclLogFile.arrange(quiet, RunFolder(tmp_path), rank=0).path is None
    assert quiet == {"NCCL_DEBUG": "WARN"}
    printed = {"NCCL_DEBUG": "INFO"}
    assert NcclLogFile.arrange(printed, RunFolder(tmp_path), rank=0).path == tmp_path / "job.out"
    assert NcclLogFile.arrange(printed, RunFolder(tmp_path), rank=1).path is None
    own = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{tmp_path}/nccl.%h.%p.100%%"}
    name = f"nccl.{os.uname().nodename.partition('.')[0]}.{os.getpid()}.100%"
    assert NcclLogFile.arrange(own, RunFolder(tmp_path), rank=1).path == tmp_path / name


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
