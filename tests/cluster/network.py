"""The network of the test cluster: a bridge, a veth pair per machine, and limits of the link speed."""

from dataclasses import dataclass
from pathlib import Path

from tests.cluster.containers import ClusterError, Container, run

#: The cluster's name, to Slurm and as a domain.
CLUSTER = "bench"
#: Maximum number of clusters on one machine, each in its own network 10.77.<slot>.0/24.
SLOTS = 16


@dataclass(frozen=True)
class Network:
    """The addresses of one cluster: the host is .1, ``ctl`` .10, the nodes .11 and up."""

    slot: int

    @property
    def bridge(self) -> str:
        """Name of the bridge; its existence marks the slot as taken."""
        return f"bench{self.slot}"

    def address(self, host: str) -> str:
        """Return the address of ``login`` (this machine), ``ctl``, ``n1``, ``n2``, ..."""
        last = {"login": 1, "ctl": 10}.get(host)
        return f"10.77.{self.slot}.{last or 10 + int(host.removeprefix('n'))}"

    def hosts_file(self, machines: list[str]) -> str:
        """Return the text of /etc/hosts for all machines."""
        lines = [f"{self.address(host)} {host}" for host in ["login", *machines]]
        # torch resolves the peers of its IPv6 sockets. They have separate names, because a second address
        # for n1 would change the address that n1 resolves to.
        mapped = [f"::ffff:{self.address(host)} {host}.{CLUSTER}" for host in machines]
        return "\n".join(["127.0.0.1 localhost", *lines, *mapped, ""])

    def attach(self, container: Container) -> None:
        """Create the interface eth0 of a machine and connect it to the bridge."""
        outside = f"{self.bridge}{container.name}"
        _ip(
            f"link add {outside} type veth peer name eth0 netns {container.init.pid}\n"
            f"link set {outside} master {self.bridge} up\n"
        )
        container.run(["ip", "address", "add", f"{self.address(container.name)}/24", "dev", "eth0"])
        container.run(["ip", "link", "set", "eth0", "up"])

    def remove(self) -> None:
        """Delete the veth pairs and then the bridge; pairs of dead machines disappear with a delay."""
        for port in Path(f"/sys/class/net/{self.bridge}/brif").glob("*"):
            run(["ip", "link", "delete", port.name], check=False)
        run(["ip", "link", "delete", self.bridge], check=False)


def claim(folder: Path | None) -> tuple[Network, Path]:
    """Claim the first free slot by creating its bridge, which is atomic; return it and the state folder.

    The bridge's alias contains the path of the state folder, by which clusters of killed processes are found.
    """
    for slot in range(SLOTS):
        network = Network(slot)
        made = run(["ip", "link", "add", network.bridge, "type", "bridge"], check=False)
        if made.returncode == 0:
            state = folder or Path(f"/tmp/bench-cluster-{slot}")
            _ip(
                f"link set dev {network.bridge} alias {state}\n"
                f"address add {network.address('login')}/24 dev {network.bridge}\n"
                f"link set {network.bridge} up\n"
            )
            return network, state
        if "File exists" not in made.stderr:
            raise ClusterError(f"no bridge can be made here: {made.stderr.strip()}")
    raise ClusterError(f"all {SLOTS} slots are taken; end one with: python -m tests.cluster down --all")


def claimed() -> dict[int, Path]:
    """Return the state folders of all taken slots on this machine."""
    found = {}
    for slot in range(SLOTS):
        alias = Path(f"/sys/class/net/{Network(slot).bridge}/ifalias")
        if alias.is_file() and (name := alias.read_text().strip()):
            found[slot] = Path(name)
    return found


def limit_link(container: Container, rate: str | None) -> None:
    """Limit the rate at which a machine sends (``400mbit``, in tc's notation); None removes the limit.

    Bursts of up to 256 kB are sent at full speed.
    """
    container.run(["tc", "qdisc", "delete", "dev", "eth0", "root"], check=False)
    if rate is not None:
        limit = ["rate", rate, "burst", "256kb", "latency", "100ms"]
        container.run(["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit])


def _ip(batch: str) -> None:
    """Run several ip(8) commands in one process."""
    run(["ip", "-batch", "-"], text=batch)
