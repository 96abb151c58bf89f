"""The state of a node, read from invented files of /proc and /sys."""

from pathlib import Path
from typing import Any

import pytest

from bench.cores import cores_of, cpu_groups, cpu_quota
from bench.measure.node import Node, throttled_s

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
        self.write(self.proc / "1/stat", "1 (systemd) S 0 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 5 9")
        self.write(self.proc / "30/stat", "30 (python) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 5 9")

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


def test_the_hardware_threads_of_a_core_count_once(tmp_path):
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        folder = tmp_path / f"cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    assert [cores_of(cpus, tmp_path) for cpus in (range(4), [0, 2], [0, 1], [8, 9])] == [2, 1, 2, 2]


def test_the_smallest_quota_from_the_own_group_upwards_counts(machine):
    machine.limit(2, "/slurm/job_7/step_0")
    assert cpu_quota(cpu_groups(machine.proc)) is None  # no folder yet
    machine.write(machine.cgroups / "slurm/job_7/cpu.max", "150000 100000\n")
    machine.write(machine.cgroups / "slurm/job_7/step_0/cpu.max", "max 100000\n")
    machine.write(machine.cgroups / "slurm/cpu.max", "800000 100000\n")
    machine.write(machine.cgroups / "elsewhere/cpu.max", "1000 100000\n")
    assert cpu_quota(cpu_groups(machine.proc)) == 1.5


def test_version_1_of_control_groups_has_the_same_quota_in_other_files(machine):
    machine.limit(1, "/node")
    machine.write(machine.cgroups / "node/cpu.cfs_quota_us", "20000\n")
    machine.write(machine.cgroups / "node/cpu.cfs_period_us", "100000\n")
    machine.write(machine.cgroups / "cpu.cfs_quota_us", "-1\n")
    machine.write(machine.cgroups / "cpu.cfs_period_us", "100000\n")
    assert cpu_quota(cpu_groups(machine.proc)) == 0.2


def test_a_group_that_the_containers_mount_does_not_show_is_replaced_by_the_mount(machine):
    machine.limit(1, "/docker/1234")
    machine.write(machine.cgroups / "cpu.cfs_quota_us", "50000\n")
    machine.write(machine.cgroups / "cpu.cfs_period_us", "100000\n")
    assert cpu_groups(machine.proc) == [machine.cgroups]
    assert cpu_quota(cpu_groups(machine.proc)) == 0.5


@pytest.mark.parametrize(
    ("version", "line"), [(2, "throttled_usec 2500000"), (1, "throttled_time 2500000000")]
)
def test_throttled_time_is_in_seconds(machine, version, line):
    machine.limit(version, "/node")
    machine.write(machine.cgroups / "node/cpu.stat", f"nr_periods 9\n{line}\n")
    assert throttled_s(cpu_groups(machine.proc)) == {str(machine.cgroups / "node"): 2.5}


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
    assert node.conditions(before, node.sample()) == {
        "node": "n1",
        "foreign_cpu_s": 0.0,
        "throttled_s": 3.0,
        "freq_mhz": None,
        "net": {
            "interface": "eth0",
            "rate_mbit_s": 25000,
            "rx_bytes": 2000,
            "tx_bytes": 1000,
            "crc_errors": 2,
            "infiniband": {"mlx5_0/1": {"symbol_error": 6, "tx_bytes": 40}},
            "sent": {
                "links": ["eth0", "mlx5_0/1"],
                "link_bytes": 1040,
                "loopback_bytes": 0,
                "unknown_because": None,
            },
        },
    }


def test_what_cannot_be_read_is_empty(machine):
    node = machine.node()
    found = node.conditions(node.sample(), node.sample())
    sent = found["net"].pop("sent")
    assert (sent["link_bytes"], sent["loopback_bytes"]) == (None, None)
    assert found.pop("net") == dict.fromkeys(
        ("interface", "rate_mbit_s", "rx_bytes", "tx_bytes", "crc_errors", "infiniband")
    )
    assert found == {"node": "n1", "foreign_cpu_s": 0.0, "throttled_s": None, "freq_mhz": None}


def test_files_in_sys_of_another_network_namespace_are_not_used(machine):
    machine.write(machine.sys / "class/net/eth0/speed", "25000\n")
    machine.write(machine.sys / "class/net/bridge0/speed", "10\n")
    machine.write(machine.proc / "net/dev", DEV.format(eth0="9 1 0 0 0 0 0 0 5 1 0 0 0 0 0 0"))
    node = machine.node(GLOO_SOCKET_IFNAME="eth0")
    net = node.conditions(node.sample(), node.sample())["net"]
    assert (net["interface"], net["rate_mbit_s"], net["rx_bytes"]) == ("eth0", None, 0)


def test_the_interface_that_a_variable_names_is_the_one_in_use(machine):
    machine.write(machine.proc / "net/dev", DEV.format(eth0="9 1 0 0 0 0 0 0 5 1 0 0 0 0 0 0"))
    node = machine.node(GLOO_SOCKET_IFNAME="ib0")
    before = node.sample()
    machine.write(machine.proc / "net/dev", DEV.format(eth0="99 1 0 0 0 0 0 0 5 1 0 0 0 0 0 0"))
    assert node.conditions(before, node.sample())["net"]["interface"] == "ib0"
    other = machine.node(NCCL_SOCKET_IFNAME="^docker")
    assert other.conditions(before, other.sample())["net"]["interface"] == "eth0"


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
    assert machine.sent(before, after) == {
        "links": ["eth0", "eth1", "ib0"],
        "link_bytes": 111_000_000,
        "loopback_bytes": 1,
        "unknown_because": None,
    }
    port = machine.sys / "class/infiniband/mlx5_0/ports/1"
    for name, text in {"state": "ACTIVE", "link_layer": "InfiniBand", "counters/port_xmit_data": "7"}.items():
        machine.write(port / name, text)
    assert machine.sent(before, after)["links"] == ["eth0", "eth1", "mlx5_0/1"]
    machine.write(port / "link_layer", "Ethernet")  # RoCE
    assert machine.sent(before, after)["links"] == ["eth0", "eth1", "ib0", "mlx5_0/1"]
    machine.write(port / "counters/port_xmit_data", f"{2**32 - 1}")
    assert machine.sent(before, after)["unknown_because"] == (
        "a counter was reset, is too short, or was not read in time"
    )


def test_a_container_has_only_virtual_interfaces_and_without_sys_one_is_certain(machine):
    assert machine.sent({"lo": 1, "eth0": 1, "sit0": 0}, {"lo": 1, "eth0": 9, "sit0": 0})["link_bytes"] == 8
    found = machine.sent({"lo": 1, "eth0": 1, "eth1": 1}, {"lo": 3, "eth0": 9, "eth1": 9})
    assert found == {
        "links": [],
        "link_bytes": None,
        "loopback_bytes": 2,
        "unknown_because": "/sys does not show which interfaces leave the node",
    }
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
