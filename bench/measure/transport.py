"""The way that gradients really travel over gloo: the connections that ranks have open to each other."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

from bench.measure.environment import RankFacts, nccl_version
from bench.study.layout import RunFolder

#: Own end and other end of a connection, each as ``address:port``.
Connection = list[str]


def open_interfaces(*, store_port: int) -> list[str]:
    """Return the interfaces of this process's open connections, but for those to the store.

    Empty where there is none, or where the system does not tell.
    """
    return sorted(open_connections(store_port=store_port))


def open_connections(*, store_port: int | None) -> dict[str, list[Connection]]:
    """Return this process's open TCP connections by interface, but for those to the store."""
    names = _interface_names()
    process = psutil.Process()
    # psutil 6 renamed it.
    listing = getattr(process, "net_connections", None) or process.connections
    try:
        connections = listing(kind="tcp")
    except (psutil.Error, OSError):
        return {}
    found: dict[str, list[Connection]] = {}
    for one in connections:
        if one.status != psutil.CONN_ESTABLISHED or store_port in (one.laddr.port, one.raddr.port):
            continue
        name = names.get(address_of(one.laddr.ip))
        if name is not None:
            found.setdefault(name, []).append([_end(one.laddr), _end(one.raddr)])
    return found


def _end(end: Any) -> str:
    return f"{address_of(end.ip)}:{end.port}"


def between_ranks(
    connections: Sequence[Mapping[str, Sequence[Connection]]], hosts: Sequence[str]
) -> dict[str, list[str]]:
    """Return, by host, the interfaces of those connections whose other end another rank has open.

    A program talks to more than its ranks: to a file server, say, or to a page of plots.

    Args:
        connections: every rank's, by interface.
        hosts: every rank's host.
    """
    ends: dict[tuple[str, ...], set[int]] = {}
    for rank, by_name in enumerate(connections):
        for own, other in (one for some in by_name.values() for one in some):
            ends.setdefault(_told_apart(own, other, hosts[rank]), set()).add(rank)
    found: dict[str, set[str]] = {host: set() for host in hosts}
    for rank, by_name in enumerate(connections):
        for name, some in by_name.items():
            mirrored = (ends.get(_told_apart(other, own, hosts[rank]), set()) for own, other in some)
            if any(ranks - {rank} for ranks in mirrored):
                found[hosts[rank]].add(name)
    return {host: sorted(names) for host, names in found.items()}


def _told_apart(own: str, other: str, host: str) -> tuple[str, ...]:
    """Return what a connection is known by: the addresses of the loopback mean another host on each."""
    address = address_of(own.rpartition(":")[0])
    return (own, other, host) if address is not None and address.is_loopback else (own, other)


def _interface_names() -> dict[ipaddress.IPv4Address | ipaddress.IPv6Address | None, str]:
    return {
        address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if (address := address_of(entry.address)) is not None
    }


def configured_transport(backend: str, env: Mapping[str, str]) -> dict[str, str | None]:
    """Return what the configuration says of the way gradients travel, before anything was sent.

    :func:`transport_in_use` replaces it after the first window.
    """
    found: dict[str, str | None] = dict.fromkeys(
        ("backend", "interface", "network", "algorithm", "version", "gpudirect")
    )
    found |= {"backend": backend, "source": "configuration"}
    if backend == "gloo":
        found["interface"] = env.get("GLOO_SOCKET_IFNAME") or _gloo_interface()
        found["network"] = "tcp"
        return found
    found["interface"] = env.get("NCCL_SOCKET_IFNAME")
    found["network"] = env.get("NCCL_NET") or ("Socket" if env.get("NCCL_IB_DISABLE") == "1" else None)
    found["algorithm"] = env.get("NCCL_ALGO")
    found["version"] = nccl_version()
    return found


def _gloo_interface() -> str | None:
    """Return the interface that gloo binds to by itself: that of the host name's address, else loopback."""
    try:
        infos = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        infos = []
    wanted = [ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in infos]
    for address in [*wanted, ipaddress.ip_address("127.0.0.1")]:
        for name, entries in psutil.net_if_addrs().items():
            for entry in entries:
                if address_of(entry.address) == address:
                    return name
    # All of 127.0.0.0/8 is loopback; Debian gives the host name 127.0.1.1.
    return "lo" if any(address.is_loopback for address in wanted) else None


def address_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that ``text`` spells, as IPv4 where it is one in IPv6's clothes."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address


def gloo_transport(interfaces: Mapping[str, Sequence[str]]) -> dict[str, str | None]:
    """Return the part ``transport`` of env.json, from the interfaces in use by host."""
    kinds = {name for names in interfaces.values() for name in names}
    same = len({tuple(sorted(names)) for names in interfaces.values()}) <= 1
    told = (
        ", ".join(sorted(kinds))
        if same
        else "; ".join(f"{host}: {', '.join(names) or 'none'}" for host, names in interfaces.items())
    )
    return {
        "backend": "gloo",
        "interface": told or None,
        "network": "tcp" if kinds else None,
        "algorithm": None,
        "version": None,
        "gpudirect": None,
        "source": "open connections",
    }


# The way that gradients really travel over NCCL, from what it writes about itself.
#
# NCCL tells in its log, at level INFO, which network it took. It writes the log into a file of the
# run's folder (NCCL_DEBUG_FILE) at start-up only, so that nothing is written within a window. The
# forms of the lines are those of NCCL's sources (transport/net.cc, graph/topo.cc, net.cc, init.cc,
# enqueue.cc) from 2.4 to 2.30. Which algorithm a collective takes is written for every single one
# of them, where the subsystem TUNING is asked for; else NCCL does not tell it.

#: More of a log is not read: the lines of interest come first.
_MOST_BYTES = 32 * 2**20

_VERSION = re.compile(r"NCCL version (\S+)")
_NETWORK = re.compile(r"NCCL INFO Using network (.+?)\s*$")
_VIA = re.compile(r"NCCL INFO (?:Channel|Ring) [\d/]+ : .*\bvia (?P<way>\S.*?)\s*$")
_NET = re.compile(
    r"NET/(?P<name>.+?)/(?P<device>\d+)(?:\(\d+\))?(?P<direct>/GDRDMA(?:\(PCI\))?)?(?:/Shared)?$"
)
_DEVICES = re.compile(r"NCCL INFO NET/(?P<name>Socket|IB) ?: Using (?P<devices>\[0\].*?)\s*$")
_DEVICE = re.compile(r"\[\d+\]([^\s:]+)")
_PROVIDER = re.compile(r"NCCL INFO NET/OFI Selected [Pp]rovider is ([^\s,]+)")
_CHANNELS = re.compile(r"NCCL INFO (\d+) coll channels")
_CHOSEN = re.compile(r"NCCL INFO AllReduce: (\d+) Bytes -> Algo (\w+) proto (\w+)")


@dataclass
class NcclLog:
    """What one or several ranks' logs say; ``ways`` counts channels by how they lead to the next rank."""

    version: str | None = None
    chosen: set[str] = field(default_factory=set)
    devices: dict[str, list[str]] = field(default_factory=dict)
    ways: Counter[str] = field(default_factory=Counter)
    channels: int | None = None
    algorithms: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> dict[str, Any]:
        """Return what travels through a store."""
        return {**vars(self), "chosen": sorted(self.chosen)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> NcclLog:
        """Return the log that :meth:`as_json` described."""
        counted = {name: Counter(content[name]) for name in ("ways", "algorithms")}
        return cls(**{**content, **counted, "chosen": set(content["chosen"])})

    def merge(self, other: NcclLog) -> None:
        """Add what another rank's log says."""
        self.version = self.version or other.version
        self.chosen |= other.chosen
        for name, devices in other.devices.items():
            known = self.devices.setdefault(name, [])
            known += [device for device in devices if device not in known]
        self.ways += other.ways
        self.channels = max((c for c in (self.channels, other.channels) if c is not None), default=None)
        self.algorithms += other.algorithms


def read_nccl_log(lines: Iterable[str]) -> NcclLog:
    """Return what NCCL's lines say; lines of anything else are passed over."""
    found = NcclLog()
    for line in lines:
        if "NCCL" not in line:
            continue
        if match := _VERSION.search(line):
            found.version = match[1]
        elif match := _NETWORK.search(line):
            found.chosen.add(match[1])
        elif match := _VIA.search(line):
            found.ways[match["way"]] += 1
        elif match := _DEVICES.search(line):
            names = _DEVICE.findall(match["devices"].partition(" ; OOB")[0].partition("; OOB")[0])
            found.devices.setdefault(match["name"], names)
        elif match := _PROVIDER.search(line):
            found.devices.setdefault("OFI", [match[1]])
        elif match := _CHANNELS.search(line):
            found.channels = int(match[1])
        elif match := _CHOSEN.search(line):
            found.algorithms[f"{match[2]}/{match[3]}"] += 1
    return found


def nccl_transport(log: NcclLog, *, hosts: int, env: Mapping[str, str]) -> dict[str, str | None]:
    """Return the part ``transport`` of env.json, from all ranks' logs.

    What no line says is null. On one host no network is in use, whichever NCCL would have taken.
    """
    matches = [(match, count) for way, count in log.ways.items() if (match := _NET.match(way))]
    networks = sorted({match["name"] for match, _ in matches})
    if not networks and hosts > 1:
        networks = sorted(log.chosen)
    direct = {bool(match["direct"]) for match, _ in matches}
    near = sorted({_kind(way) for way in log.ways if not way.startswith("NET/")})
    algorithm = env.get("NCCL_ALGO") or ", ".join(name for name, _ in log.algorithms.most_common())
    return {
        "backend": "nccl",
        "interface": ", ".join(_interfaces(log, networks)) or None,
        "network": ", ".join(networks) or None,
        "algorithm": algorithm or None,
        "version": log.version,
        "gpudirect": {(True,): "yes", (False,): "no", (False, True): "partly"}.get(tuple(sorted(direct))),
        "within_host": ", ".join(near) or None,
        "channels": None if log.channels is None else str(log.channels),
        "source": "NCCL's log",
    }


def _kind(way: str) -> str:
    """Return ``P2P/CUMEM`` for ``P2P/CUMEM/read``, ``SHM`` for ``SHM/direct/direct``."""
    first, _, rest = way.partition("/")
    return first if first != "P2P" or not rest else f"{first}/{rest.partition('/')[0]}"


def _interfaces(log: NcclLog, networks: Sequence[str]) -> list[str]:
    """Return the devices of the networks in use; those that NCCL only looked at are left out."""
    found: list[str] = []
    for network in networks:
        key = "Socket" if network == "Socket" else "IB" if network.startswith("IB") else "OFI"
        found += [device for device in log.devices.get(key, []) if device not in found]
    return found


def fallback_warning(
    transport: Mapping[str, str | None], infiniband: Mapping[str, Sequence[str]], env: Mapping[str, str]
) -> str | None:
    """Return a warning where NCCL goes between hosts by sockets, though they have InfiniBand.

    Args:
        transport: the part of env.json.
        infiniband: devices with an active port, by host.
        env: the environment variables of rank 0.
    """
    having = {host: devices for host, devices in infiniband.items() if devices}
    if len(infiniband) < 2 or not having or "Socket" not in (transport.get("network") or ""):
        return None
    first = next(iter(having))
    devices = ", ".join(having[first])
    interface = transport.get("interface")
    by = f"sockets ({interface})" if interface else "sockets"
    others = len(having) - 1
    more = f" and {others} more {'host' if others == 1 else 'hosts'}" if others else ""
    if is_disabled(env):
        why = f"NCCL_IB_DISABLE={env['NCCL_IB_DISABLE']} is set"
    else:
        why = "look for NET/IB in nccl.log, and at NCCL_IB_HCA, NCCL_NET, `ulimit -l` and the container"
    return (
        f"NCCL goes between hosts by {by}, though {first}{more} has InfiniBand devices"
        f" with an active port ({devices}): expect a fraction of the bandwidth; {why}"
    )


def is_disabled(env: Mapping[str, str]) -> bool:
    """Tell whether InfiniBand was switched off on purpose."""
    return env.get("NCCL_IB_DISABLE", "0") not in ("", "0")


class NcclLogFile:
    """Where NCCL writes its log for this rank; None where the user's own settings forbid to choose."""

    def __init__(self, path: Path | None, *, ours: bool) -> None:
        self.path = path
        self._ours = ours

    @classmethod
    def arrange(cls, env: MutableMapping[str, str], folder: RunFolder, *, rank: int) -> NcclLogFile:
        """Ask NCCL for its log, before it starts; what the user has set stays.

        Rank 0's log stays in the run's folder, for people; the others' lie in the node's
        temporary folder until they have been read.
        """
        if env.get("NCCL_DEBUG"):
            if env["NCCL_DEBUG"].upper() not in ("INFO", "TRACE"):
                return cls(None, ours=False)
            given = env.get("NCCL_DEBUG_FILE")
            if given is None:  # NCCL writes to standard output, where all ranks' lines meet
                return cls(folder.out if rank == 0 else None, ours=False)
            return cls(Path(expanded(given)), ours=False)
        if rank == 0:
            path = folder.path / "nccl.log"
        else:
            path = Path(tempfile.gettempdir()) / f"bench-nccl-{os.getpid()}-{rank}.log"
        env["NCCL_DEBUG"] = "INFO"
        env["NCCL_DEBUG_FILE"] = str(path).replace("%", "%%")
        return cls(path, ours=rank != 0)

    def read(self) -> NcclLog:
        """Return what the log says by now."""
        if self.path is None:
            return NcclLog()
        try:
            with self.path.open("rb") as file:
                text = file.read(_MOST_BYTES).decode(errors="replace")
        except OSError:
            return NcclLog()
        return read_nccl_log(text.splitlines())

    def remove(self) -> None:
        """Remove a log that only this process needed."""
        if self._ours and self.path is not None:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)


def expanded(template: str) -> str:
    """Return NCCL_DEBUG_FILE as NCCL expands it for this process."""
    words = {"%h": os.uname().nodename.partition(".")[0], "%p": str(os.getpid()), "%%": "%"}
    return re.sub("%[hp%]", lambda match: words[match[0]], template)


# The transport that a user's own script has in use: each rank's traces of it, and what they tell together.
#
# gloo: connections of which both ends are ranks. NCCL: the log that it was asked for before it
# started, by the job's script, by the user, or by a recorder that was made early enough. What left no
# trace is null, with the reason.

#: The end of NCCL_DEBUG_FILE where a job's script has set it for the recorder.
_SCRIPTS_LOG = "/nccl.%h.%p.log"
#: The same where a recorder has set it itself: nobody has told it a folder then.
_OWN_LOG = "bench-nccl-%p.log"
_INFORMATIVE = ("INFO", "TRACE")

Found = dict[str, Any]


def ask_nccl(env: MutableMapping[str, str]) -> None:
    """Ask NCCL for its log, in case it has not started yet; settings of the user's stay."""
    if not env.get("NCCL_DEBUG") and not env.get("NCCL_DEBUG_FILE"):
        folder = tempfile.gettempdir().replace("%", "%%")
        env.update({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{folder}/{_OWN_LOG}"})


def backend_for(device: torch.device) -> str:
    """Return the backend of the default process group that serves ``device``."""
    served = dict(one.split(":", 1) for one in dist.get_backend_config().split(",") if ":" in one)
    return served.get(device.type) or dist.get_backend()


def users_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what was set for the recorder only."""
    ours = env.get("NCCL_DEBUG_FILE", "").endswith((_SCRIPTS_LOG, f"/{_OWN_LOG}"))
    return {name: text for name, text in env.items() if not (ours and name.startswith("NCCL_DEBUG"))}


def own_traces(
    backend: str, *, store_port: int | None, env: Mapping[str, str], rank: int, folder: RunFolder | None
) -> Found:
    """Return what this rank can tell of the transport in use, once something was sent.

    Args:
        backend: who communicates.
        store_port: where the ranks' store listens.
        env: the environment variables.
        rank: this rank.
        folder: the run's, on rank 0, which keeps its log there.
    """
    if backend == "gloo":
        return {"connections": open_connections(store_port=store_port)}
    if backend != "nccl":
        return {"why": f"the backend {backend} does not tell"}
    log = _log_of(env, rank)
    if log.path is None or not log.path.is_file():
        return {"why": log.absent}
    told = NcclLogFile(log.path, ours=False).read()
    if log.ours:
        with suppress(OSError):
            log.path.unlink() if folder is None else shutil.move(log.path, folder.path / "nccl.log")
    return {"log": told.as_json()}


class _Log(NamedTuple):
    """Where NCCL's log is to be, what its absence means, and whether only the recorder asked for it."""

    path: Path | None
    absent: str
    ours: bool = False


def _log_of(env: Mapping[str, str], rank: int) -> _Log:
    level, template = env.get("NCCL_DEBUG", ""), env.get("NCCL_DEBUG_FILE", "")
    if level.upper() not in _INFORMATIVE:
        return _Log(None, f"NCCL_DEBUG is {level or 'not set'}, and NCCL names its network at INFO only")
    path = Path(expanded(template)) if template else None
    if template.endswith(f"/{_OWN_LOG}"):
        early = "set NCCL_DEBUG=INFO and NCCL_DEBUG_FILE before the start"
        return _Log(path, f"NCCL had started before the recorder was made: {early}", ours=True)
    if path is not None:
        return _Log(path, "NCCL has written no log to NCCL_DEBUG_FILE", ours=template.endswith(_SCRIPTS_LOG))
    if env.get("BENCH_RUN_DIR") and rank == 0:
        path = RunFolder(Path(env["BENCH_RUN_DIR"])).out
    return _Log(path, "NCCL writes its log to standard output: set NCCL_DEBUG_FILE, too")


def transport_in_use(
    traces: Sequence[Found], facts: Sequence[RankFacts], *, backend: str, env: Mapping[str, str]
) -> tuple[Found, str | None]:
    """Return the part ``transport`` of env.json from all ranks' traces, and a warning where it is slow."""
    hosts = [one.host for one in facts]
    if backend == "gloo":
        found: Found = gloo_transport(between_ranks([one["connections"] for one in traces], hosts))
        if len(facts) > 1 and found["interface"] is None:
            found["not_read_because"] = "no connection was open of which both ends are ranks"
        return found, None
    logs = [NcclLog.from_json(one["log"]) for one in traces if "log" in one]
    if not logs:
        return _unknown(backend, traces[0]["why"]), None
    found, warning = nccl_in_use(logs, facts, env)
    if len(set(hosts)) > 1 and found["network"] is None:
        found["not_read_because"] = "NCCL's log does not name its network: is NCCL_DEBUG_SUBSYS set?"
    return found, warning


def nccl_in_use(
    logs: Sequence[NcclLog], facts: Sequence[RankFacts], env: Mapping[str, str]
) -> tuple[dict[str, str | None], str | None]:
    """Combine the ranks' NCCL logs into ``transport`` of env.json, and return a warning about a fallback."""
    merged = NcclLog()
    for log in logs:
        merged.merge(log)
    found = nccl_transport(merged, hosts=len({one.host for one in facts}), env=env)
    warning = fallback_warning(found, {one.host: one.infiniband for one in facts}, env)
    if warning and not is_disabled(env):
        found["fallback"] = "sockets beside InfiniBand"
    return found, warning


def _unknown(backend: str, why: str) -> Found:
    keys = ("interface", "network", "algorithm", "version", "gpudirect", "source")
    return {"backend": backend, **dict.fromkeys(keys), "not_read_because": why}
