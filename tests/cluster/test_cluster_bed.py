"""The test cluster: separate machines, complete removal, and releases of Slurm from the Debian mirror."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster import network as networks
from tests.cluster.bed import Cluster, remove_abandoned
from tests.cluster.containers import ClusterError, Process
from tests.cluster.roots import Apt, SuiteMissingError

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def test_a_node_has_its_own_name_address_processes_and_shared_memory(cluster):
    script = 'echo "$(hostname) $(ip -4 -brief address show eth0) $$ $(ls /dev/shm) $(getent hosts n1)"'
    for index, node in enumerate(cluster.nodes, start=1):
        name, _, _, address, pid, hosts, n1 = cluster.run_on_node(node, ["bash", "-c", script]).stdout.split()
        assert (name, address) == (node, f"{cluster.address(node)}/24")
        assert address.endswith(f".1{index}/24")
        assert int(pid) < 10_000
        assert (hosts, n1) == (cluster.address("n1"), "n1")


def test_what_a_killed_test_session_left_is_removed_by_the_next(running_cluster):
    program = (
        "from tests.cluster.bed import Cluster\n"
        "from tests.cluster.configuration import Options\n"
        "from tests.cluster.releases import find_release\n"
        f"release = find_release({running_cluster.options.release.name!r})\n"
        "options = Options(nodes=1, gpus=0, accounting=False, release=release)\n"
        "print(Cluster.start(options).folder, flush=True)\n"
        "input()\n"
    )
    session = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        folder = Path(session.stdout.readline().strip())
        left = Cluster.attach(folder)
        init = Process(*json.loads((folder / "state.json").read_text())["machines"]["n1"])
        remove_abandoned()
        assert init.alive  # the test session is still running
    finally:
        session.send_signal(signal.SIGKILL)
        session.wait()
        session.stdin.close()
        session.stdout.close()
    remove_abandoned()
    assert not init.alive
    assert not folder.exists()
    assert left.network.slot not in networks.claimed()
    assert running_cluster.node_states()  # the cluster of this session is still there


def test_a_suite_without_a_valid_signature_is_not_used(tmp_path):
    suite = tmp_path / "mirror/dists/trixie"
    suite.mkdir(parents=True)
    (suite / "Release").write_text(
        f"Suite: trixie\nDate: {time.strftime('%a, %d %b %Y %H:%M:%S UTC', time.gmtime())}\n"
    )
    with pytest.raises(ClusterError) as caught:
        Apt(tmp_path / "apt", "trixie", mirror=f"file:{tmp_path}/mirror").version()
    assert not isinstance(caught.value, SuiteMissingError)
    assert "is not signed" in str(caught.value)
