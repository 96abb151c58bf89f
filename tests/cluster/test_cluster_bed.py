"""The test cluster: separate machines, real DDP between them, limited links, and complete removal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.cluster import network as networks
from tests.cluster.bed import Cluster, remove_abandoned
from tests.cluster.configuration import MEMORY_CGROUP
from tests.cluster.containers import ClusterError, Process
from tests.cluster.daemons import PROGRAMS
from tests.common import raised

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


def test_nodes_are_reached_by_ssh(cluster):
    config = cluster.start_sshd()
    said = cluster.run(["ssh", "-F", config, "n3", "hostname; echo $$ >&2"])
    assert said.stdout == "n3\n"


def bench_cluster(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.cluster", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=check)


def _mounts() -> list[str]:
    """Return the mounts of this machine except the small disks of tests that run at the same time."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [line for line in lines if not line.startswith("/dev/loop")]


def test_a_cluster_started_by_hand_ends_without_a_trace_beside_a_running_one(cluster):
    mounts = _mounts()
    release = cluster.options.release.name
    said = bench_cluster("--slurm", release, "up", "--nodes", "1", "--gpus", "2", "--no-accounting").stdout
    folder = re.search(r"state in (\S+)$", said, re.M)[1]
    second = Cluster.attach(Path(folder))
    try:
        assert folder != str(cluster.folder)
        assert f"n1 {second.address('n1')} idle" in bench_cluster("--folder", folder, "status").stdout
        bench_cluster("--folder", folder, "link", "--rate", "400mbit")
        shell = bench_cluster(
            "--folder", folder, "shell", "--node", "n1", "tc", "qdisc", "show", "dev", "eth0"
        )
        assert "tbf" in shell.stdout
        # A job that leaves a process behind in a separate session.
        marker = f"{41_000 + os.getpid() % 1000}.5"
        second.run(["srun", "bash", "-c", f"setsid sleep {marker} >/dev/null 2>&1 </dev/null & sleep 0.2"])
        assert running(marker)
    finally:
        bench_cluster("--folder", folder, "down")
    assert not running(marker)
    assert not Path(folder).exists()
    assert not Path(f"/sys/class/net/{second.network.bridge}").exists()
    assert not (MEMORY_CGROUP / second.network.bridge).exists()
    assert _mounts() == mounts
    assert cluster.node_states() == dict.fromkeys(cluster.nodes, "idle")
    again = bench_cluster("--folder", folder, "down", check=False)
    assert (again.returncode, again.stderr) == (
        1,
        f"{folder}: no cluster is there ([Errno 2] No such file or directory: '{folder}/state.json')\n",
    )


def running(argument: str) -> list[int]:
    """Return the processes of this machine, in all namespaces, with ``argument`` in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if argument.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


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


def test_a_start_that_fails_says_why_and_leaves_nothing(tmp_path):
    (tmp_path / "mine.txt").write_text("not a cluster's")
    assert (
        raised(ClusterError, Cluster.start, folder=tmp_path)
        == f"{tmp_path}: not empty; the cluster's state needs a folder of its own"
    )
    assert tmp_path not in networks.claimed().values()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_installer_brings_every_program_that_the_cluster_asks_for():
    line = re.search(r'^packages="(.*)"$', (HERE / "install.sh").read_text(), re.M)
    assert set(line[1].split()) == set(PROGRAMS)
