"""Generate NCCL's logs from their contents, with the formats of the sources.

Formats: NVIDIA/nccl v2.4.8 to v2.30.7 (src/transport/net.cc, p2p.cc, shm.cc, coll_net.cc, net_socket.cc,
net_ib.cc, src/init.cc, src/enqueue.cc, src/debug.cc), ROCm/rccl rocm-5.7.1 to 6.3 (the same files),
aws/aws-ofi-nccl v1.1.0 to v1.21.1 (src/nccl_ofi_net.c), Mellanox/nccl-rdma-sharp-plugins (the suffix SHARP).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from hypothesis import strategies as st

#: One draw of Hypothesis per log, because hundreds of logs of each kind should take seconds.
_RANDOM = st.randoms(use_true_random=True)

#: Releases with different formats; a release stands for those up to the next one.
NCCL = ((2, 4), (2, 7), (2, 12), (2, 16), (2, 21), (2, 23), (2, 24), (2, 28), (2, 30))
ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
PROTOCOLS = ("LL", "LL128", "SIMPLE")

PREFIXES = ("", "3: ", "[1,7]<stdout>:", "[rank3]: ", "(RayWorker pid=7602) ", "[2026-05-05 06:16:47] ")
INTERFACES = ("eth0", "ib0", "enp1s0f0np0", "ibp12s0", "bond0.526", "hsn-0", "lo", "eno1")
ADDRESSES = ("10.1.0.16", "192.168.11.1", "fe80::1%eth1", "2001:db8::3", "127.0.0.1")
HCAS = ("mlx5_0", "mlx5_1", "mlx5_10", "mlx5_bond_0", "rocep216s0f0", "bnxt_re1", "ionic_3")
PROVIDERS = ("efa", "tcp;ofi_rxm", "cxi", "psm3")
NOISE = (
    "NCCL INFO Bootstrap : Using [0]eth9:10.9.9.9<0>",
    "NCCL INFO NET/Plugin: Could not find: libnccl-net.so",
    "NCCL INFO NET/IB : No device found.",
    "NCCL INFO NET/IB : Using [RO]; OOB eth9:10.9.9.9<0>",
    "NCCL INFO Using non-device net plugin version 0",
    "NCCL INFO Channel 00/08 :    0   5   4   7   6   3   2   1",
    "NCCL INFO Ring 00 : 1 -> 0 -> 1",
    "NCCL INFO CollNet 00/1 : 0 [send] via COLLNET/SHARP/0/GDRDMA",
    "NCCL INFO Connected all rings, use ring PXN 0 GDR 1",
    "NCCL INFO NET/IB : Made virtual device [2] name=mlx5_0+mlx5_1 speed=200000 ndevs=2",
    "NCCL INFO NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_7'",
    "NCCL INFO AllGather: 4096 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}",
    "NCCL INFO 4096 Bytes -> Algo 1 proto 0 time 12.5",
    "NCCL INFO NCCL git version master 5067397c",
    "a line of the program: Using network Socket via NET/IB/0",
)


@dataclass
class Contents:
    """The contents of a log that the parser must find."""

    version: str
    network: str
    devices: list[str]
    ways: Counter[str] = field(default_factory=Counter)
    channels: int | None = None
    algorithms: Counter[str] = field(default_factory=Counter)
    key: str = "Socket"  # of the devices in the log
    lines: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The log."""
        return "".join(f"{line}\n" for line in self.lines)


class _Writer:
    def __init__(self, random: Random, *, release: tuple[int, int], rccl: bool) -> None:
        self.random, self.release, self.rccl = random, release, rccl
        self.prefix = random.choice(PREFIXES)
        self.lines: list[str] = []

    def maybe(self) -> bool:
        return self.random.random() < 0.5

    def add(self, text: str) -> None:
        self.lines.append(f"{self.prefix}n041:3012:3077 [0] NCCL INFO {text}")

    def noise(self) -> None:
        for text in self.random.sample(NOISE, self.random.randint(0, 3)):
            self.lines.append(f"{self.prefix}n041:3012:3077 [0] {text}")

    def version(self) -> str:
        number = f"{self.release[0]}.{self.release[1]}.{self.random.randint(0, 9)}"
        if not self.rccl:
            text = f"{number}+cuda12.4"
            if self.maybe():  # to the log, or to standard output
                self.add(f"NCCL version {text}")
            else:
                self.lines.append(f"NCCL version {text}")
            return text
        if self.release < (2, 21):
            self.add(f"RCCL version {number}+hip6.0 HEAD:2f6d59e")
            return f"{number}+hip6.0"
        self.lines.append(f"RCCL version : {number}-HEAD:3ae7a7e")
        return number

    def peers(self) -> str:
        own, other = self.random.choice([(0, 1), (1, 0), (7, 15), (155, 153)])
        if self.release < (2, 7):
            return f"{own} -> {other}"
        gpus = ("1a000", "c6000") if self.rccl or self.release < (2, 18) else ("0", "7")
        return f"{own}[{gpus[0]}] -> {other}[{gpus[1]}]"

    def channel(self, *, connection: bool = True) -> str:
        number = self.random.randint(0, 31)
        if self.release < (2, 7):
            return f"Ring {number:02d}"
        return (
            f"Channel {number:02d}/1" if connection and self.release >= (2, 12) else f"Channel {number:02d}"
        )

    def via(self, way: str, *, direction: str = "", connection: bool = True) -> str:
        suffix = " comm 0x95cdeb0 nRanks 08" if self.rccl else ""
        channel = self.channel(connection=connection)
        self.add(f"{channel} : {self.peers()}{direction} via {way}{suffix}")
        return way

    def net(self, network: str, devices: int) -> str:
        way = f"NET/{network}/{self.random.randint(0, max(0, devices - 1))}"
        direction = self.random.choice([" [send]", " [receive]"])
        if direction == " [send]" and self.release >= (2, 12) and self.maybe():
            way += f"({self.random.randint(0, 9)})"  # through another GPU (PXN)
        if network != "Socket" and self.maybe():
            way += "/GDRDMA"
            way += "(PCI)" if self.release >= (2, 27) and self.maybe() else ""
        if self.release >= (2, 9) and self.maybe():
            way += "/Shared"
        return self.via(way, direction=direction)

    def within(self) -> str:
        """Add a channel within a host."""
        shared_memory = "direct shared memory"
        if self.release >= (2, 30) and not self.rccl:
            shared_memory = "SHM/direct"
        elif self.release >= (2, 14):
            shared_memory = self.random.choice(["SHM/direct/direct", "SHM/CE/direct", "SHM/CE/CE"])
        read = self.random.choice(["", "/read"])
        ways = [shared_memory, f"P2P/direct pointer{read}", f"P2P/IPC{read}"]
        if self.release >= (2, 9):
            ways.append(f"P2P/indirect/3[1b000]{read}")
        if self.release >= (2, 18):
            ways += [f"P2P/CUMEM{read}", f"P2P/CUMEM{read}/CE"]
        way = self.random.choice(ways)
        return self.via(way, connection=way != shared_memory)

    def tuning(self) -> str | None:
        algorithm, protocol = self.random.choice(ALGORITHMS), self.random.choice(PROTOCOLS)
        size = self.random.choice([4, 26214400])
        if self.rccl or self.release < (2, 23):
            self.add(f"{size} Bytes -> Algo 1 proto 2 time 12.500000")
            return None
        if self.release < (2, 24):
            numbers = f"Algo {ALGORITHMS.index(algorithm)} proto {PROTOCOLS.index(protocol)}"
            self.add(f"AllReduce: {size} Bytes -> {numbers} time 12.500000")
        else:
            self.add(
                f"AllReduce: {size} Bytes -> Algo {algorithm} proto {protocol} channel{{Lo..Hi}}={{0..15}}"
            )
        return f"{algorithm}/{protocol}"

    def coll_channels(self) -> int | None:
        if self.release < (2, 7):
            return None
        count = self.random.randint(1, 64)
        nvls = "0 nvls channels, " if self.release >= (2, 18) else ""
        collnet = f"{count} collnet channels, " if self.release >= (2, 21) else ""
        self.add(f"{count} coll channels, {collnet}{nvls}{count} p2p channels, 2 p2p channels per peer")
        return count


def _socket_line(devices: Sequence[str], random: Random) -> str:
    named = "".join(f" [{at}]{name}:{random.choice(ADDRESSES)}<0>" for at, name in enumerate(devices))
    return f"NET/Socket : Using{named}"


def _ib_line(
    devices: Sequence[str], random: Random, release: tuple[int, int], *, merged: bool, sharp: str
) -> str:
    link = random.choice(["IB", "RoCE"])
    rail = random.choice(["", ":3", ":3:4", "::4"]) if release >= (2, 30) else ""
    ports = [f"{name}:{1 + at % 2}{rail}/{link}{sharp}" for at, name in enumerate(devices)]
    if merged and len(ports) > 1:
        half = (len(ports) + 1) // 2
        groups = [list(enumerate(ports))[:half], list(enumerate(ports))[half:]]
        named = ""
        for at, group in enumerate(groups):
            inner = ", ".join(f"[{number}] {port}" for number, port in group)
            named += f" [{at}]={{{inner}}}" if len(group) > 1 else f" [{group[0][0]}]{group[0][1]}"
    else:
        named = "".join(f" [{at}]{port}" for at, port in enumerate(ports))
    order = " [RO]" if release >= (2, 12) else " "
    return f"NET/IB : Using{named}{order}; OOB {random.choice(INTERFACES)}:{random.choice(ADDRESSES)}<0>"


@st.composite
def logs(draw, kind: str) -> Contents:
    """Generate a log of one ``kind``: sockets, infiniband, merged, plugin, nvlink, rccl or one_host."""
    random: Random = draw(_RANDOM)
    rccl = kind == "rccl"
    releases = {"merged": ((2, 21), (2, 23)), "nvlink": ((2, 21), (2, 24), (2, 28), (2, 30))}
    release = random.choice(((2, 18), (2, 21)) if rccl else releases.get(kind, NCCL))
    writer = _Writer(random, release=release, rccl=rccl)
    version = writer.version()
    writer.noise()
    found = _network(random, writer, kind, version)
    if release >= (2, 7):
        writer.add(f"Using network {found.network}")
    for _ in range(random.randint(1, 3)):
        if kind == "nvlink":
            found.ways[writer.via("P2P/MNNVL" + random.choice(["", "/read", "/CE"]))] += 1
        elif kind != "one_host":
            found.ways[writer.net(found.network, len(found.devices))] += 1
        if kind != "nvlink":
            found.ways[writer.within()] += 1
    found.channels = writer.coll_channels()
    for chosen in [writer.tuning() for _ in range(random.randint(0, 2))]:
        found.algorithms += Counter([chosen] if chosen else [])
    writer.noise()
    found.lines = writer.lines
    return found


def _network(random, writer: _Writer, kind: str, version: str) -> Contents:
    """Add the lines that name the network and its devices."""
    if kind == "plugin":
        name = "AWS Libfabric" if writer.release < (2, 24) else "Libfabric"
        provider = random.choice(PROVIDERS)
        found = f"Selected Provider is {provider} (found 4 nics)"
        if writer.release >= (2, 21):
            found = f"Selected provider is {provider}, fabric is efa-direct (found 4 nics)"
        elif writer.release < (2, 12):
            found = f"Selected Provider is {provider}"
        writer.add(f"NET/OFI {found}")
        return Contents(version, name, [provider], key="OFI")
    over_ib = kind in ("infiniband", "merged") or (kind in ("rccl", "one_host") and random.random() < 0.5)
    if not over_ib:
        devices = random.sample(INTERFACES, random.randint(1, 4))
        writer.add(_socket_line(devices, random))
        return Contents(version, "Socket", devices)
    sharp = random.choice(["", "/SHARP"]) if kind == "infiniband" else ""
    least = 2 if kind == "merged" else 1
    devices = random.sample(HCAS, random.randint(least, 4))
    writer.add(_ib_line(devices, random, writer.release, merged=kind == "merged", sharp=sharp))
    names = ["IBext", "IBext_v8"] if sharp else ["IB"]
    return Contents(version, random.choice(names), devices, key="IB")
