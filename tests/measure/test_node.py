"""The state of a node, read from invented files of /proc and /sys, and with real processes."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddp_scaling_bench.cores import cores_of, cpu_groups, cpu_quota
from ddp_scaling_bench.measure.node import Node, NodeSample, Processes, interface_with

DEV = """Inter-|   Receive                            |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo: 900 1 0 0 0 0 0 0 900 1 0 0 0 0 0 0
  eth0:{eth0}
   ib0: 5 1 0 0 0 0 0 0 5 1 0 0 0 0 0 0
"""


class Machine:
    """Folders like /proc and /sys, and a mount of control groups."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.sys, self.cgroups = folder / "proc", folder / "sys", folder / "a cgroup mount"
        self.process(1, 0)
        self.process(30, 1)

    def process(
        self, pid: int, parent: int, ticks=0, children=0, name="a (b) c", flags=0, started=5, **files: str
    ) -> None:
        times = f"{ticks} 0 {children} 0 20 0 1 0 {started} 9"
        files["stat"] = f"{pid} ({name}) S {parent} 1 1 0 -1 {flags} 0 0 0 0 {times}"
        for file, text in files.items():
            self.write(self.proc / str(pid) / file, text)

    def processors(self, namespace: str, ticks: int) -> None:
        """Write the time of all processors, and the namespace of process ids."""
        link = self.proc / "self/ns/pid"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(namespace)
        self.write(self.proc / "stat", f"cpu  {ticks - 30} 10 20 5000 7 7 7 0 0 0\n")

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def limit(self, version: int, own: str) -> None:
        mounted = str(self.cgroups).replace(" ", "\\040")
        kind, options = ("cgroup2", "rw") if version == 2 else ("cgroup", "rw,cpu,cpuacct")
        self.write(self.proc / "self/mounts", f"proc /proc proc rw 0 0\nx {mounted} {kind} {options} 0 0\n")
        names = "0::" if version == 2 else "3:cpu,cpuacct:"
        self.write(self.proc / "self/cgroup", f"7:memory:/elsewhere\n{names}{own}\n")

    def interface(
        self, name: str, *, type_: int = 1, device: bool = True, lower: str = "", speed: int = 0
    ) -> None:
        folder = self.sys / "class/net" / name
        self.write(folder / "type", f"{type_}\n")
        self.write(folder / "speed", f"{speed}\n")
        for entry in ("device",) * device + (f"lower_{lower}",) * bool(lower):
            (folder / entry).mkdir()

    def count(self, **sent: int) -> None:
        """Write the bytes that interfaces have sent."""
        lines = [f"  {name}: 9 1 0 0 0 0 0 0 {size} 1 0 0 0 0 0 0" for name, size in sent.items()]
        self.write(self.proc / "net/dev", "\n".join(["Inter-|", " face |", *lines, ""]))

    def sent(self, before: dict[str, int], after: dict[str, int]) -> dict[str, Any]:
        """Return the entry of what the node sent between two counts."""
        node = self.node()
        self.count(**before)
        sample = node.sample()
        self.count(**after)
        found: dict[str, Any] = node.conditions(sample, node.sample())["net"]["sent"]
        return found

    def node(self, **env: str) -> Node:
        return Node({"SLURMD_NODENAME": "n1", **env}, proc=self.proc, sys=self.sys, pid=30)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def sent(
    links: list[str], link_bytes: int | None, loopback_bytes: int, why: str | None = None
) -> dict[str, Any]:
    known = {"links": links, "link_bytes": link_bytes, "loopback_bytes": loopback_bytes}
    return {**known, "unknown_because": why}


def test_the_hardware_threads_of_a_core_count_once(tmp_path):
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        folder = tmp_path / f"cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    assert [cores_of(cpus, tmp_path) for cpus in (range(4), [0, 2], [0, 1], [8, 9])] == [2, 1, 2, 2]


@pytest.mark.parametrize(
    ("version", "own", "files", "quota"),
    [
        (2, "/slurm/job_7/step_0", {}, None),
        (
            *(2, "/slurm/job_7/step_0"),
            {
                "slurm/job_7/cpu.max": "150000 100000",
                "slurm/job_7/step_0/cpu.max": "max 100000",
                "slurm/cpu.max": "800000 100000",
                "elsewhere/cpu.max": "1000 100000",
            },
            1.5,  # the smallest of the own group and those above
        ),
        (
            *(1, "/node"),
            {
                "node/cpu.cfs_quota_us": "20000",
                "node/cpu.cfs_period_us": "100000",
                "cpu.cfs_quota_us": "-1",
                "cpu.cfs_period_us": "100000",
            },
            0.2,
        ),
        # The container's mount does not show the own group.
        (1, "/docker/1234", {"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"}, 0.5),
    ],
)
def test_the_quota_is_the_smallest_of_all_control_groups(machine, version, own, files, quota):
    machine.limit(version, own)
    for name, text in files.items():
        machine.write(machine.cgroups / name, f"{text}\n")
    assert cpu_quota(cpu_groups(machine.proc)) == quota


@pytest.mark.parametrize(
    ("version", "line"), [(2, "throttled_usec 2500000"), (1, "throttled_time 2500000000")]
)
def test_throttled_time_is_in_seconds(machine, version, line):
    machine.limit(version, "/node")
    machine.write(machine.cgroups / "node/cpu.stat", f"nr_periods 9\n{line}\n")
    assert machine.node().sample().throttled_s == {str(machine.cgroups / "node"): 2.5}


def test_what_changes_between_two_samples_is_the_condition(machine):
    machine.limit(2, "/job")
    counters = machine.sys / "class/infiniband/mlx5_0/ports/1"
    machine.write(counters / "state", "4: ACTIVE\n")
    machine.write(machine.sys / "class/infiniband/mlx5_1/ports/1/state", "1: DOWN\n")
    for name in ("lo", "ib0"):
        (machine.sys / "class/net" / name).mkdir(parents=True)
    machine.interface("eth0", speed=25000)

    def state(n: int) -> None:
        machine.write(machine.cgroups / "job/cpu.stat", f"throttled_usec {n * 1_500_000}\n")
        numbers = f"{n * 1000} 1 0 0 0 0 0 0 {n * 500} 1 0 0 0 0 0 0"
        machine.write(machine.proc / "net/dev", DEV.format(eth0=numbers))
        machine.write(machine.sys / "class/net/eth0/statistics/rx_crc_errors", f"{n}\n")
        machine.write(counters / "counters/symbol_error", f"{n * 3}\n")
        machine.write(counters / "counters/port_xmit_data", f"{n * 5}\n")

    state(1)
    node = machine.node()
    before = node.sample()
    state(3)
    found = node.conditions(before, node.sample())
    net = found.pop("net")
    assert found == {"node": "n1", "foreign_cpu_s": 0.0, "throttled_s": 3.0, "freq_mhz": None}
    assert net.pop("sent") == sent(["eth0", "mlx5_0/1"], 1040, 0)
    assert net.pop("infiniband") == {"mlx5_0/1": {"symbol_error": 6, "tx_bytes": 40}}
    counted = {"rx_bytes": 2000, "tx_bytes": 1000, "crc_errors": 2}
    assert net == {"interface": "eth0", "rate_mbit_s": 25000, **counted}
    state(4)
    paused = node.counts()
    state(9)
    node.leave_out(before, paused, node.counts())
    state(10)
    net = node.conditions(before, node.sample())["net"]
    assert (net["rx_bytes"], net["sent"]["link_bytes"], net["crc_errors"]) == (4000, 4 * (500 + 20), 4)


def test_what_cannot_be_read_is_empty(machine):
    node = machine.node()
    found = node.conditions(node.sample(), node.sample())
    sent = found["net"].pop("sent")
    assert (sent["link_bytes"], sent["loopback_bytes"]) == (None, None)
    assert found.pop("net") == dict.fromkeys(
        ("interface", "rate_mbit_s", "rx_bytes", "tx_bytes", "crc_errors", "infiniband")
    )
    assert found == {"node": "n1", "foreign_cpu_s": 0.0, "throttled_s": None, "freq_mhz": None}


@pytest.mark.parametrize(
    ("env", "interface"),
    [({"GLOO_SOCKET_IFNAME": "ib0"}, "ib0"), ({"NCCL_SOCKET_IFNAME": "^docker"}, "eth0")],
)
def test_the_interface_that_a_variable_names_is_the_one_in_use(machine, env, interface):
    # Files in /sys of another network namespace are not used.
    machine.write(machine.sys / "class/net/eth0/speed", "25000\n")
    machine.write(machine.sys / "class/net/bridge0/speed", "10\n")
    machine.write(machine.proc / "net/dev", DEV.format(eth0="9 1 0 0 0 0 0 0 5 1 0 0 0 0 0 0"))
    node = machine.node(**env)
    before = node.sample()
    machine.write(machine.proc / "net/dev", DEV.format(eth0="99 1 0 0 0 0 0 0 5 1 0 0 0 0 0 0"))
    net = node.conditions(before, node.sample())["net"]
    moved = 90 if interface == "eth0" else 0
    assert (net["interface"], net["rate_mbit_s"], net["rx_bytes"]) == (interface, None, moved)


def test_each_byte_that_leaves_a_node_counts_once(machine):
    machine.interface("lo", type_=772, device=False)
    for name, lower in {"bond0": "eth0", "eth0.7": "bond0", "br0": "veth1"}.items():
        machine.interface(name, device=False, lower=lower)
    machine.interface("veth1", device=False)
    machine.interface("tun0", type_=65534, device=False)
    machine.interface("eth0")
    machine.interface("eth1")
    machine.interface("ib0", type_=32)
    names = ["lo", "bond0", "eth0.7", "br0", "veth1", "tun0", "eth0", "eth1", "ib0"]
    before, after = dict.fromkeys(names, 5), {name: 5 + 10**place for place, name in enumerate(names)}
    assert machine.sent(before, after) == sent(["eth0", "eth1", "ib0"], 111_000_000, 1)
    port = machine.sys / "class/infiniband/mlx5_0/ports/1"
    for name, text in {"state": "ACTIVE", "link_layer": "InfiniBand", "counters/port_xmit_data": "7"}.items():
        machine.write(port / name, text)
    assert machine.sent(before, after)["links"] == ["eth0", "eth1", "mlx5_0/1"]
    machine.write(port / "link_layer", "Ethernet")  # RoCE
    assert machine.sent(before, after)["links"] == ["eth0", "eth1", "ib0", "mlx5_0/1"]
    machine.write(port / "counters/port_xmit_data", f"{2**32 - 1}")
    assert machine.sent(before, after)["unknown_because"] == (
        "a counter was reset, is too short, or cannot be read"
    )


def test_a_container_has_only_virtual_interfaces_and_without_sys_one_is_certain(machine):
    assert machine.sent({"lo": 1, "eth0": 1, "sit0": 0}, {"lo": 1, "eth0": 9, "sit0": 0})["link_bytes"] == 8
    found = machine.sent({"lo": 1, "eth0": 1, "eth1": 1}, {"lo": 3, "eth0": 9, "eth1": 9})
    assert found == sent([], None, 2, "/sys does not show which interfaces leave the node")
    for name in ("lo", "eth0", "eth1"):
        machine.interface(name, device=False)
    assert machine.sent({"lo": 1, "eth0": 1, "eth1": 1}, {"lo": 3, "eth0": 9, "eth1": 9})["link_bytes"] == 16


def test_the_bytes_are_unknown_if_a_counter_fell_or_an_interface_appeared(machine):
    for name in ("lo", "eth0"):
        machine.interface(name)
    assert machine.sent({"lo": 1, "eth0": 2**32 - 1}, {"lo": 1, "eth0": 7})["link_bytes"] is None
    machine.interface("eth1")
    node = machine.node()
    machine.count(lo=1, eth0=5, eth1=5)
    sample = node.sample()
    (machine.sys / "class/net/eth1").rename(machine.sys / "gone")
    machine.count(lo=1, eth0=9)
    sent = node.conditions(sample, node.sample())["net"]["sent"]
    assert (sent["link_bytes"], sent["unknown_because"]) == (None, "an interface appeared or disappeared")


# -- processes outside of the job -----------------------------------------------------------------------


#: A process of the table below: its parent, ticks, ticks of its ended children, and name.
Row = tuple[Any, ...]
#: A launcher's tree and another program of the same shell, before and after a window.
TREE: tuple[dict[int, Row], dict[int, Row]] = (
    {10: (1, 0, 0, "bash"), 20: (10, 0), 30: (20, 0), 31: (20, 0), 40: (10, 100)},
    # A worker of the data loader, 32, starts in the window.
    {10: (1, 5, 0, "bash"), 20: (10, 7), 30: (20, 300), 31: (20, 300), 32: (31, 50), 40: (10, 125)},
)


def foreign_s(machine: Machine, before: NodeSample, after: NodeSample, **env: str) -> float | None:
    """Return the CPU time of processes outside of the job of process 30; samples are read from JSON."""
    both = [NodeSample.from_json(json.loads(json.dumps(asdict(one)))) for one in (before, after)]
    found: float | None = machine.node(**env).conditions(*both)["foreign_cpu_s"]
    return found


@pytest.mark.parametrize(
    ("before", "after", "env", "expected"),
    [
        # The shell waits for its job.
        (*TREE, {"LOCAL_RANK": "0"}, 0.25),
        # Without a launcher, the parent's other children are not the job's.
        (*TREE, {}, 0.25 + 3.0 + 0.5),
        # Slurm's step is the root of the job.
        (
            {5: (1, 0, 0, "slurmstepd"), 20: (5, 0, 0, "torchrun"), 21: (5, 0), 30: (20, 0)},
            {21: (5, 90)},
            {"LOCAL_RANK": "0"},
            0.0,
        ),
        # Two processes end, and their parent inherits 200 + 40 + 30 ticks and what they used since.
        (
            {60: (1, 1000, 5000), 61: (60, 200, 40), 62: (61, 30)},
            {60: (1, 1001, 5000 + 270 + 80), 61: None, 62: None, 63: (60, 7, 2)},
            {},
            0.01 + 0.80 + 0.09,
        ),
        # An id that is used again is another process.
        ({50: (1, 1000)}, {50: (1, 3, 0, "", 0, 8)}, {}, 0.03),
        # Kernel threads, and children that process 1 and Slurm's daemons inherit, are not counted.
        (
            {70: (1, 0, 0, "kworker/0:1", 0x00200000), 71: (1, 0, 0, "slurmd")},
            {1: (0, 0, 9000), 70: (1, 900, 0, "kworker/0:1", 0x00200000), 71: (1, 4, 8000, "slurmd")},
            {},
            0.04,
        ),
    ],
)
def test_the_cpu_time_of_processes_outside_of_the_job(machine, before, after, env, expected):
    samples = []
    for rows in (before, after):
        for pid, row in rows.items():
            if row is None:
                shutil.rmtree(machine.proc / str(pid))
            else:
                machine.process(pid, *row)
        samples.append(machine.node().sample())
    assert foreign_s(machine, *samples, **env) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cgroup": "0::/system.slice/slurmstepd.scope/job_77/step_0/user/task_0\n"}, 0.0),
        ({"cgroup": "4:memory:/slurm/uid_1/job_77\n1:name=systemd:/\n"}, 0.0),
        ({"cgroup": "0::/system.slice/slurmstepd.scope/job_770/step_0\n"}, 1.0),
        ({"environ": "PATH=/bin\0SLURM_JOB_ID=77\0HOME=/"}, 0.0),
        ({"environ": "PATH=/bin\0SLURM_JOB_ID=770\0"}, 1.0),
        ({"environ": "MY_SLURM_JOB_ID=77\0"}, 1.0),
        ({}, 1.0),
    ],
)
def test_other_processes_of_the_slurm_job_are_found_by_cgroup_or_environment(machine, files, expected):
    machine.process(50, 1, **files)
    before = machine.node().sample()
    machine.process(50, 1, 100)
    assert foreign_s(machine, before, machine.node().sample(), SLURM_JOB_ID="77") == expected


def test_hidden_processes_are_counted_only_if_the_node_owns_the_machine(machine):
    node = machine.node()
    shutil.rmtree(machine.proc / "1")  # the mount option hidepid hides the processes of other users
    machine.processors("pid:[4026531836]", 1000)
    before = node.sample()
    machine.process(30, 1, 100)
    machine.processors("pid:[4026531836]", 1000 + 100 + 60)
    assert foreign_s(machine, before, node.sample()) == 0.6
    machine.processors("pid:[4026532999]", 2000)
    assert foreign_s(machine, before, node.sample()) is None


#: A process burns this much CPU time and then waits for its input to close.
BURNT_S = 0.2
BURN = (
    "import sys, time\n"
    f"while time.process_time() < {BURNT_S}: pass\n"
    "print('burnt', flush=True)\n"
    "sys.stdin.read()\n"
)


@contextmanager
def busy() -> Iterator[int]:
    """Yield the id of a child process that has burnt CPU time and sleeps now."""
    child = subprocess.Popen([sys.executable, "-S", "-c", BURN], stdin=-1, stdout=-1)
    assert child.stdout is not None
    assert child.stdout.readline() == b"burnt\n"
    yield child.pid
    child.communicate()


def test_a_real_busy_process_is_foreign_to_its_sibling_and_belongs_to_its_parent():
    node = Node({})
    with busy() as sibling:
        before = node.sample().snapshot
        with busy() as child:
            after = node.sample().snapshot
    assert before.is_complete
    assert child not in before.processes
    # Without the other programs of this machine, and what the processes above this one reaped of them.
    above = [1, *(one.pid for one in psutil.Process().parents())]
    waiting = {pid: before.processes[pid] for pid in above}

    before, after = (
        shot._replace(
            processes=waiting
            | {pid: shot.processes[pid] for pid in (os.getpid(), sibling, child) if pid in shot.processes}
        )
        for shot in (before, after)
    )
    assert Processes({}, pid=sibling).foreign_cpu_s(before, after) >= BURNT_S - 0.02  # two of its ticks
    assert Processes({}).foreign_cpu_s(before, after) == 0.0


def test_the_interface_of_an_address_is_found():
    own = psutil.net_if_addrs().get("lo", [])  # other interfaces can come and go
    for one in own:
        assert interface_with(one.address) == ("lo" if one.family.name in ("AF_INET", "AF_INET6") else None)
    assert interface_with("127.0.0.1") == "lo"
    assert interface_with("192.0.2.77") is None
