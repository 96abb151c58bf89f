"""Detect the network transport that carries the gradients: gloo's interface, or NCCL's log.

At level INFO, NCCL's log names the network in use. NCCL writes these lines to NCCL_DEBUG_FILE at start-up, so
NCCL writes nothing during a window. The parser knows the line formats of NCCL 2.4 to 2.30, of RCCL up to ROCm
6.3, and of the OFI plugin (init.cc, enqueue.cc, and in transport: net.cc, net_ib.cc, net_socket.cc, p2p.cc,
shm.cc). NCCL logs the algorithm of a collective only if the subsystem TUNING is enabled, once per collective;
before 2.23, it does not log which collective.
"""

from __future__ import annotations

import atexit
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
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ..study.layout import RunFolder
from .environment import nccl_version
from .findings import SocketFallback
from .ranks import RankFacts

#: The value of ``transport`` in env.json.
Transport = dict[str, str | None]


def _transport(backend: str, source: str | None, **known: str | None) -> Transport:
    unknown = dict.fromkeys(("interface", "network", "algorithm", "version", "gpudirect"))
    return {"backend": backend, **unknown, **known, "source": source}


# -- gloo ------------------------------------------------------------------------------------------


def _gloo_interface() -> str | None:
    """Return gloo's default interface: the one with the address of the host name, else the loopback."""
    try:
        infos = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        infos = []
    wanted = [str(info[4][0]).partition("%")[0] for info in infos]
    for address in [*wanted, "127.0.0.1"]:
        for name, entries in psutil.net_if_addrs().items():
            if any(entry.address.partition("%")[0] == address for entry in entries):
                return name
    # All of 127.0.0.0/8 is loopback; Debian assigns 127.0.1.1 to the host name.
    return "lo" if any(ipaddress.ip_address(address).is_loopback for address in wanted) else None


# -- NCCL ------------------------------------------------------------------------------------------

#: The suffix of NCCL_DEBUG_FILE if a job's script or the recorder has set this variable for the recorder.
_SCRIPT_LOG = "/nccl.%h.%p.log"
_RECORDER_LOG = "bench-nccl-%p.log"
_PRIVATE_PREFIX = "bench-nccl-"
#: Number of bytes read from the beginning of a log, which contains all relevant lines.
_MAX_BYTES = 32 * 2**20
#: Number of NCCL's warnings that a failing rank prints.
_WARNINGS_KEPT = 20

#: RCCL prints a colon since ROCm 6.3, and the commit of its sources after the version.
_VERSION = re.compile(r"\b(?:NCCL version (\S+)|RCCL version(?: :)? (\d[\w.+]*))")
_NETWORK = re.compile(r"NCCL INFO Using network (.+?)\s*$")
#: RCCL adds the communicator to the end of a line.
_VIA = re.compile(
    r"NCCL INFO (?:Channel|Ring) [\d/]+ : .*\bvia (?P<way>\S.*?)(?: comm 0x[0-9a-f]+ nRanks \d+)?\s*$"
)
_NET = re.compile(
    r"NET/(?P<name>.+?)/(?P<device>\d+)(?:\(\d+\))?(?P<direct>/GDRDMA(?:\(PCI\))?)?(?:/Shared)?$"
)
#: NVLink between the GPUs of several hosts; NCCL then uses this way within a host, too.
_NVLINK_BETWEEN_HOSTS = "P2P/MNNVL"
_DEVICES = re.compile(r"NCCL INFO NET/(?P<name>Socket|IB) ?: Using (?P<devices>\[0\].*?)\s*$")
#: Ports that NCCL 2.21 to 2.23 merges are in braces: ``[0]={[0] mlx5_2:1/RoCE, [1] mlx5_3:1/RoCE}``.
_DEVICE = re.compile(r"\[\d+\] ?([^\s:={}]+):")
_PROVIDER = re.compile(r"NCCL INFO NET/OFI Selected [Pp]rovider is ([^\s,]+)")
_CHANNELS = re.compile(r"NCCL INFO (\d+) coll channels")
_CHOSEN = re.compile(r"NCCL INFO AllReduce: (\d+) Bytes -> Algo (\w+) proto (\w+)")
#: NCCL 2.23 logs numbers: the order of NCCL_ALGO_* and NCCL_PROTO_* in src/include/nccl_common.h.
_ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
_PROTOCOLS = ("LL", "LL128", "SIMPLE")


@dataclass
class NcclLog:
    """The contents of the NCCL logs of one or more ranks; ``ways`` counts channels by kind of connection."""

    version: str | None = None
    chosen: set[str] = field(default_factory=set)
    devices: dict[str, list[str]] = field(default_factory=dict)
    ways: Counter[str] = field(default_factory=Counter)
    channels: int | None = None
    algorithms: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> dict[str, Any]:
        """Return the contents as values that JSON can represent."""
        return {**vars(self), "chosen": sorted(self.chosen)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> NcclLog:
        """Create a log from the result of :meth:`as_json`."""
        counted = {name: Counter(content[name]) for name in ("ways", "algorithms")}
        return cls(**{**content, **counted, "chosen": set(content["chosen"])})

    def merge(self, other: NcclLog) -> None:
        """Add another rank's log."""
        self.version = self.version or other.version
        self.chosen |= other.chosen
        for name, devices in other.devices.items():
            known = self.devices.setdefault(name, [])
            known += [device for device in devices if device not in known]
        self.ways += other.ways
        self.channels = max((c for c in (self.channels, other.channels) if c is not None), default=None)
        self.algorithms += other.algorithms


def read_nccl_log(lines: Iterable[str]) -> NcclLog:
    """Parse NCCL's lines and skip all other lines."""
    found = NcclLog()
    for line in lines:
        if "CCL" not in line:
            continue
        if match := _VERSION.search(line):
            found.version = match[1] or match[2]
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
            found.algorithms[f"{_named(match[2], _ALGORITHMS)}/{_named(match[3], _PROTOCOLS)}"] += 1
    return found


def _named(text: str, names: Sequence[str]) -> str:
    return names[int(text)] if text.isdecimal() and int(text) < len(names) else text


def nccl_transport(log: NcclLog, *, hosts: int, env: Mapping[str, str]) -> Transport:
    """Return the value of ``transport`` in env.json from the logs of all ranks; unknown values are null.

    On one host ``network`` is null, even if the log names a network, because no network is used. The network
    MNNVL is NVLink between hosts.
    """
    matches = [(match, count) for way, count in log.ways.items() if (match := _NET.match(way))]
    networks = {match["name"] for match, _ in matches}
    if hosts > 1 and any(way.startswith(_NVLINK_BETWEEN_HOSTS) for way in log.ways):
        networks.add("MNNVL")
    if not networks and hosts > 1:
        networks = log.chosen
    direct = {bool(match["direct"]) for match, _ in matches}
    within_host = sorted({_connection_kind(way) for way in log.ways if not way.startswith("NET/")})
    algorithm = env.get("NCCL_ALGO") or ", ".join(name for name, _ in log.algorithms.most_common())
    return _transport(
        "nccl",
        "NCCL's log",
        interface=", ".join(_interfaces(log, sorted(networks))) or None,
        network=", ".join(sorted(networks)) or None,
        algorithm=algorithm or None,
        version=log.version,
        gpudirect={(True,): "yes", (False,): "no", (False, True): "partly"}.get(tuple(sorted(direct))),
        within_host=", ".join(within_host) or None,
        channels=None if log.channels is None else str(log.channels),
    )


def _connection_kind(way: str) -> str:
    """Shorten a connection of NCCL's log, for example ``P2P/CUMEM/read`` to ``P2P/CUMEM``."""
    if way == "direct shared memory":  # before 2.14
        return "SHM"
    first, _, rest = way.partition("/")
    return first if first != "P2P" or not rest else f"{first}/{rest.partition('/')[0]}"


def _interfaces(log: NcclLog, networks: Sequence[str]) -> list[str]:
    """Return the devices of the networks in use, without other devices that NCCL detected."""
    found: list[str] = []
    for network in networks:
        if network == "MNNVL":
            continue
        key = "Socket" if network == "Socket" else "IB" if network.startswith("IB") else "OFI"
        found += [device for device in log.devices.get(key, []) if device not in found]
    return found


def fallback(
    transport: Mapping[str, str | None], infiniband: Mapping[str, Sequence[str]], env: Mapping[str, str]
) -> SocketFallback | None:
    """Return a finding if NCCL uses sockets between hosts that have InfiniBand.

    ``infiniband`` lists the devices with an active port for each host.
    """
    equipped = {host: devices for host, devices in infiniband.items() if devices}
    if len(infiniband) < 2 or not equipped or "Socket" not in (transport.get("network") or ""):
        return None
    return SocketFallback(
        interface=transport.get("interface") or "interface unknown",
        hosts=tuple(equipped),
        devices=tuple(next(iter(equipped.values()))),
        disabled=value if (value := env.get("NCCL_IB_DISABLE", "0")) not in ("", "0") else None,
    )


def combine_nccl_logs(
    logs: Iterable[NcclLog], facts: Sequence[RankFacts], env: Mapping[str, str]
) -> tuple[Transport, SocketFallback | None]:
    """Return the value of ``transport`` in env.json, and a finding if NCCL fell back to sockets."""
    merged = NcclLog()
    for log in logs:
        merged.merge(log)
    found = nccl_transport(merged, hosts=len({one.host for one in facts}), env=env)
    slower = fallback(found, {one.host: one.infiniband for one in facts}, env)
    if slower and slower.disabled is None:
        found["fallback"] = "sockets beside InfiniBand"
    return found, slower


@dataclass(frozen=True)
class NcclLogFile:
    """The file to which NCCL writes this rank's log.

    ``path`` is None if NCCL writes no log file with the user's settings. ``missing_because`` is the reason
    for a missing log. ``is_temporary`` is true if the file can be removed after it has been read.
    """

    path: Path | None
    missing_because: str = ""
    is_temporary: bool = False

    @classmethod
    def from_env(cls, env: Mapping[str, str], output: Path | None) -> NcclLogFile:
        """Return the log file that NCCL's variables name; ``output`` is standard output's file, if known."""
        level, template = env.get("NCCL_DEBUG", ""), env.get("NCCL_DEBUG_FILE", "")
        if level.upper() not in ("INFO", "TRACE"):
            return cls(None, f"NCCL_DEBUG is {level or 'not set'}, and NCCL names its network at INFO only")
        if not template:
            return cls(output, "NCCL writes its log to standard output: set NCCL_DEBUG_FILE as well")
        path = Path(_expand(template))
        if template.endswith(f"/{_RECORDER_LOG}"):
            remedy = "set NCCL_DEBUG=INFO and NCCL_DEBUG_FILE before the start"
            return cls(path, f"NCCL had started before the recorder was created: {remedy}", is_temporary=True)
        return cls(path, "NCCL has written no log to NCCL_DEBUG_FILE", template.endswith(_SCRIPT_LOG))

    def read(self) -> NcclLog:
        """Parse the log as written so far; the result is empty if the file cannot be read."""
        return read_nccl_log([] if self.path is None else _lines_of(self.path))

    def release(self, folder: RunFolder | None) -> None:
        """Move the file to ``folder`` if it is temporary, or remove it if ``folder`` is None."""
        if not self.is_temporary or self.path is None:
            return
        with suppress(OSError):
            if folder is None:
                self.path.unlink()
            else:
                shutil.move(self.path, folder.path / "nccl.log")
            if self.path.parent.name.startswith(_PRIVATE_PREFIX):
                self.path.parent.rmdir()


def diverted_warnings(env: Mapping[str, str]) -> list[str]:
    """Return NCCL's last warnings, each once, in the file to which NCCL_DEBUG_FILE diverts its log."""
    if not env.get("NCCL_DEBUG_FILE"):
        return []
    lines = _lines_of(Path(_expand(env["NCCL_DEBUG_FILE"])))
    warnings = [line.strip() for line in lines if "NCCL WARN" in line]
    return list(dict.fromkeys(warnings))[-_WARNINGS_KEPT:]


def _lines_of(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []


def _private_folder() -> Path:
    """Create a temporary folder that no other user can write to; it is removed at exit.

    With a predictable name in a shared folder, another user could plant a link that NCCL follows.
    """
    folder = tempfile.mkdtemp(prefix=_PRIVATE_PREFIX)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _expand(template: str) -> str:
    """Expand the placeholders in NCCL_DEBUG_FILE (host name, process id) as NCCL does."""
    values = {"%h": os.uname().nodename.partition(".")[0], "%p": str(os.getpid()), "%%": "%"}
    return re.sub("%[hp%]", lambda match: values[match[0]], template)


# -- both backends, in a user's program -------------------------------------------------------------


def configured_transport(backend: str, env: Mapping[str, str]) -> Transport:
    """Return the value of ``transport`` in env.json from the configuration, before any communication."""
    if backend == "gloo":
        interface = env.get("GLOO_SOCKET_IFNAME") or _gloo_interface()
        return _transport(backend, "configuration", interface=interface, network="tcp")
    sockets = "Socket" if env.get("NCCL_IB_DISABLE") == "1" else None
    return _transport(
        backend,
        "configuration",
        interface=env.get("NCCL_SOCKET_IFNAME"),
        network=env.get("NCCL_NET") or sockets,
        algorithm=env.get("NCCL_ALGO"),
        version=nccl_version(),
    )


def request_nccl_log(env: MutableMapping[str, str]) -> None:
    """Request NCCL's log without overriding the user's settings, unless NCCL has already started."""
    if not env.get("NCCL_DEBUG") and not env.get("NCCL_DEBUG_FILE"):
        with suppress(OSError):  # without a temporary folder, the log is not requested
            folder = str(_private_folder()).replace("%", "%%")
            env.update({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{folder}/{_RECORDER_LOG}"})


def users_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables, except those that were set only for the recorder."""
    is_ours = env.get("NCCL_DEBUG_FILE", "").endswith((_SCRIPT_LOG, f"/{_RECORDER_LOG}"))
    return {name: text for name, text in env.items() if not (is_ours and name.startswith("NCCL_DEBUG"))}


def backend_for(device: torch.device) -> str:
    """Return the backend of the default process group that serves ``device``."""
    by_device = dict(one.split(":", 1) for one in dist.get_backend_config().split(",") if ":" in one)
    return by_device.get(device.type) or dist.get_backend()


def read_traces(
    backend: str, *, env: Mapping[str, str], rank: int, folder: RunFolder | None
) -> dict[str, Any]:
    """Read this rank's log of NCCL, for :func:`combine_traces`.

    Call this function after the first communication. ``folder`` is the run's folder, in which rank 0 keeps
    its NCCL log, or None on other ranks.
    """
    if backend == "gloo":
        return {}
    if backend != "nccl":
        return {"why": f"the backend {backend} does not report its transport"}
    run_dir = env.get("BENCH_RUN_DIR")
    log = NcclLogFile.from_env(env, RunFolder(Path(run_dir)).out if run_dir and rank == 0 else None)
    if log.path is None or not log.path.is_file():
        return {"why": log.missing_because}
    content = log.read()
    log.release(folder)
    return {"log": content.as_json()}


def combine_traces(
    traces: Sequence[dict[str, Any]], facts: Sequence[RankFacts], *, backend: str, env: Mapping[str, str]
) -> tuple[Transport, SocketFallback | None]:
    """Combine the results of :func:`read_traces` of all ranks.

    Returns the value of ``transport`` in env.json, and a finding if NCCL fell back to sockets.
    """
    if backend == "gloo":
        return configured_transport(backend, env), None
    logs = [NcclLog.from_json(one["log"]) for one in traces if "log" in one]
    if not logs:
        return _transport(backend, None) | {"not_read_because": traces[0]["why"]}, None
    found, slower = combine_nccl_logs(logs, facts, env)
    if len({one.host for one in facts}) > 1 and found["network"] is None:
        found["not_read_because"] = "NCCL's log does not name its network: is NCCL_DEBUG_SUBSYS set?"
    return found, slower
