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
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..finding import Recorded
from ..run_folder import RunFolder
from .environment import nccl_version
from .findings import NoPeerAccess, SocketFallback
from .node import interface_with
from .ranks import RankFacts

#: The value of ``transport`` in env.json.
Transport = dict[str, str | None]
#: How often each value is in NCCL's log, by the name of the value.
_Log = dict[str, Counter[str]]

#: The suffix of NCCL_DEBUG_FILE if a job's script or the recorder has set this variable for the recorder.
_SCRIPT_LOG = "/nccl.%h.%p.log"
_RECORDER_LOG = "/bench-nccl-%p.log"
_PRIVATE_PREFIX = "bench-nccl-"
#: Number of bytes read from the beginning of a log, which contains all relevant lines.
_MAX_BYTES = 32 * 2**20
#: Number of NCCL's warnings that a failing rank prints.
_WARNINGS_KEPT = 20

#: Values of NCCL's log by name. RCCL prints a colon since ROCm 6.3, the commit of its sources after the
#: version, and the communicator at the end of a line.
_VALUES = {
    "version": re.compile(r"\b(?:NCCL version (\S+)|RCCL version(?: :)? (\d[\w.+]*))"),
    "network": re.compile(r"NCCL INFO Using network (.+?)\s*$"),
    "way": re.compile(
        r"NCCL INFO (?:Channel|Ring) [\d/]+ : .*\bvia (\S.*?)(?: comm 0x[0-9a-f]+ nRanks \d+)?\s*$"
    ),
    "OFI": re.compile(r"NCCL INFO NET/OFI Selected [Pp]rovider is ([^\s,]+)"),
    "channels": re.compile(r"NCCL INFO (\d+) coll channels"),
    # GPUs of which NCCL expects that they access each other's memory: also lines of its topology
    "peers": re.compile(
        r"NCCL (?:WARN|INFO) .*(P2P is disabled between (?:NVLINK )?connected GPUs|\+ NVL\[)"
    ),
    "algorithm": re.compile(r"NCCL INFO AllReduce: \d+ Bytes -> Algo (\w+ proto \w+)"),
}
_NET = re.compile(
    r"NET/(?P<name>.+?)/(?P<device>\d+)(?:\(\d+\))?(?P<direct>/GDRDMA(?:\(PCI\))?)?(?:/Shared)?$"
)
_DEVICES = re.compile(r"NCCL INFO NET/(?P<name>Socket|IB) ?: Using (?P<devices>\[0\].*?)(?: ?; OOB|\s*$)")
#: Ports that NCCL 2.21 to 2.23 merges are in braces: ``[0]={[0] mlx5_2:1/RoCE, [1] mlx5_3:1/RoCE}``.
_DEVICE = re.compile(r"\[\d+\] ?([^\s:={}]+):")
#: NCCL 2.23 logs numbers: the order of NCCL_ALGO_* and NCCL_PROTO_* in src/include/nccl_common.h.
_ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
#: Values of NCCL_P2P_LEVEL with which GPUs are peers, at least over NVLink.
_LEVELS = ("NVL", "PIX", "PXB", "PHB", "SYS", "1", "2", "3", "4", "5")
_PROTOCOLS = ("LL", "LL128", "SIMPLE")


def configured_transport(backend: str, env: Mapping[str, str]) -> Transport:
    """Return the value of ``transport`` in env.json from the configuration, before any communication."""
    if backend == "gloo":
        interface = env.get("GLOO_SOCKET_IFNAME") or _gloo_interface()
        return _transport(backend, "configuration", interface=interface, network="tcp")
    network = env.get("NCCL_NET") or ("Socket" if env.get("NCCL_IB_DISABLE") == "1" else None)
    known = {"network": network, "algorithm": env.get("NCCL_ALGO"), "version": nccl_version()}
    return _transport(backend, "configuration", interface=env.get("NCCL_SOCKET_IFNAME"), **known)


def backend_for(device: torch.device) -> str:
    """Return the backend of the default process group that serves ``device``."""
    by_device = dict(one.split(":", 1) for one in dist.get_backend_config().split(",") if ":" in one)
    return by_device.get(device.type) or dist.get_backend()


def request_nccl_log(env: MutableMapping[str, str]) -> None:
    """Request NCCL's log without overriding the user's settings, unless NCCL has already started.

    The log is in a folder that no other user can write to, who could plant a link that NCCL follows.
    """
    if not env.get("NCCL_DEBUG") and not env.get("NCCL_DEBUG_FILE"):
        with suppress(OSError):  # without a temporary folder, the log is not requested
            folder = tempfile.mkdtemp(prefix=_PRIVATE_PREFIX)
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            template = folder.replace("%", "%%") + _RECORDER_LOG
            env.update({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": template})


def users_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables, except those that were set only for the recorder."""
    return {name: text for name, text in env.items() if not (_is_ours(env) and name.startswith("NCCL_DEBUG"))}


def read_traces(backend: str, *, env: Mapping[str, str], rank: int) -> dict[str, Any]:
    """Read this rank's log of NCCL, for :func:`combine_traces`, after the first communication."""
    if backend != "nccl":
        return {} if backend == "gloo" else {"why": f"the backend {backend} does not report its transport"}
    path, why = _log_path(env), "NCCL has written no log to NCCL_DEBUG_FILE"
    level, run_dir = env.get("NCCL_DEBUG", ""), env.get("BENCH_RUN_DIR")
    if level.upper() not in ("INFO", "TRACE"):
        path, why = None, f"NCCL_DEBUG is {level or 'not set'}, and NCCL names its network at INFO only"
    elif path is None:
        path = RunFolder(Path(run_dir)).out if run_dir and rank == 0 else None
        why = "NCCL writes its log to standard output: set NCCL_DEBUG_FILE as well"
    elif env["NCCL_DEBUG_FILE"].endswith(_RECORDER_LOG):
        why = "NCCL had started before the recorder was created: "
        why += "set NCCL_DEBUG=INFO and NCCL_DEBUG_FILE before the start"
    return {"log": _parse(_lines_of(path))} if path and path.is_file() else {"why": why}


def release_nccl_log(env: Mapping[str, str], folder: RunFolder | None) -> None:
    """Move the log that was written for the recorder to ``folder`` (rank 0), or remove it (None).

    NCCL writes warnings to the log until the process ends, so call this function last.
    """
    path = _log_path(env)
    if path is None or not _is_ours(env):
        return
    with suppress(OSError):
        if folder is not None:
            shutil.move(path, folder.path / "nccl.log")
        else:
            path.unlink()
    with suppress(OSError):
        if path.parent.name.startswith(_PRIVATE_PREFIX):
            path.parent.rmdir()


def diverted_warnings(env: Mapping[str, str]) -> list[str]:
    """Return NCCL's last warnings, each once, in the file to which NCCL_DEBUG_FILE diverts its log."""
    path = _log_path(env)
    warnings = (line.strip() for line in _lines_of(path) if "NCCL WARN" in line) if path else ()
    return list(dict.fromkeys(warnings))[-_WARNINGS_KEPT:]


def combine_traces(
    traces: Sequence[dict[str, Any]], facts: Sequence[RankFacts], *, backend: str, env: Mapping[str, str]
) -> tuple[Transport, list[Recorded]]:
    """Return ``transport`` of env.json from all ranks' traces, and findings of NCCL's fall-backs."""
    if backend == "gloo":
        return configured_transport(backend, env), []
    logs = [trace["log"] for trace in traces if "log" in trace]
    if not logs:
        return _transport(backend, None) | {"not_read_because": traces[0]["why"]}, []
    merged = {name: sum((Counter(log.get(name)) for log in logs), Counter()) for name in {*chain(*logs)}}
    infiniband = {one.host: one.infiniband for one in facts}
    transport = _nccl_transport(merged, hosts=len(infiniband), env=env)
    sockets, shared = _fallback(transport, infiniband, env), _no_peer_access(transport, merged, env)
    if sockets and sockets.disabled is None:
        transport["fallback"] = "sockets beside InfiniBand"
    if len(infiniband) > 1 and transport["network"] is None:
        transport["not_read_because"] = "NCCL's log does not name its network: is NCCL_DEBUG_SUBSYS set?"
    return transport, [one for one in (sockets, shared) if one]


def _transport(backend: str, source: str | None, **known: str | None) -> Transport:
    unknown = dict.fromkeys(("interface", "network", "algorithm", "version", "gpudirect"))
    return {"backend": backend, **unknown, **known, "source": source}


def _gloo_interface() -> str | None:
    """Return gloo's default interface: the one with the address of the host name, else the loopback."""
    wanted: list[str] = []
    with suppress(OSError):
        infos = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        wanted = [str(info[4][0]).partition("%")[0] for info in infos]
    if name := next(filter(None, map(interface_with, [*wanted, "127.0.0.1"])), None):
        return name
    # All of 127.0.0.0/8 is loopback; Debian assigns 127.0.1.1 to the host name.
    return "lo" if any(ipaddress.ip_address(address).is_loopback for address in wanted) else None


# -- NCCL's log ------------------------------------------------------------------------------------


def _is_ours(env: Mapping[str, str]) -> bool:
    """Return whether NCCL's log was requested only for the recorder."""
    return env.get("NCCL_DEBUG_FILE", "").endswith((_SCRIPT_LOG, _RECORDER_LOG))


def _log_path(env: Mapping[str, str]) -> Path | None:
    """Expand the placeholders in NCCL_DEBUG_FILE (host name, process id) as NCCL does."""
    values = {"%h": os.uname().nodename.partition(".")[0], "%p": str(os.getpid()), "%%": "%"}
    template = env.get("NCCL_DEBUG_FILE")
    return Path(re.sub("%[hp%]", lambda match: values[match[0]], template)) if template else None


def _lines_of(path: Path) -> list[str]:
    with suppress(OSError), path.open("rb") as file:
        return file.read(_MAX_BYTES).decode(errors="replace").splitlines()
    return []


def _parse(lines: Iterable[str]) -> _Log:
    """Count the values in NCCL's lines and skip all other lines."""
    log: _Log = {}
    for line in lines:
        if "CCL" not in line:
            continue
        if match := _DEVICES.search(line):
            log.setdefault(match["name"], Counter(dict.fromkeys(_DEVICE.findall(match["devices"]), 1)))
            continue
        found = ((name, match) for name, one in _VALUES.items() if (match := one.search(line)))
        for name, match in islice(found, 1):
            log.setdefault(name, Counter())[match[match.lastindex or 0]] += 1
    return log


def _nccl_transport(log: _Log, *, hosts: int, env: Mapping[str, str]) -> Transport:
    """Return the value of ``transport`` in env.json from the logs of all ranks; unknown values are null.

    On one host no network is used, even if the log names one. MNNVL is NVLink between hosts, and within them.
    """
    ways = log.get("way", Counter())
    nets = [match for way in ways if (match := _NET.match(way))]
    networks = {match["name"] for match in nets}
    if hosts > 1 and any(way.startswith("P2P/MNNVL") for way in ways):
        networks.add("MNNVL")
    if not networks and hosts > 1:
        networks = set(log.get("network", ()))
    # IB_SHARP and the like use the devices of IB, and other names are plugins of OFI
    kinds = {one: "IB" if one.startswith("IB") else "OFI" for one in networks} | {"Socket": "Socket"}
    devices = (log.get(kinds[one], ()) for one in sorted(networks) if one != "MNNVL")
    chosen = [_algorithm(name) for name, _ in log.get("algorithm", Counter()).most_common()]
    direct = {bool(match["direct"]) for match in nets}

    def joined(names: Iterable[str]) -> str | None:
        return ", ".join(dict.fromkeys(names)) or None

    return _transport(
        "nccl",
        "NCCL's log",
        interface=joined(device for names in devices for device in names),
        network=joined(sorted(networks)),
        algorithm=env.get("NCCL_ALGO") or joined(chosen),
        version=next(iter(log.get("version", ())), None),
        gpudirect={(True,): "yes", (False,): "no", (False, True): "partly"}.get(tuple(sorted(direct))),
        within_host=joined(sorted(_connection_kind(way) for way in ways if not way.startswith("NET/"))),
        channels=max(log.get("channels", ()), key=int, default=None),
    )


def _connection_kind(way: str) -> str:
    """Shorten a connection of NCCL's log, for example ``P2P/CUMEM/read`` to ``P2P/CUMEM``."""
    if way == "direct shared memory":  # before 2.14
        return "SHM"
    words = way.split("/")
    return "/".join(words[: 2 if words[0] == "P2P" else 1])


def _algorithm(text: str) -> str:
    """Return the names of an algorithm and a protocol, which NCCL logs as names or as numbers."""
    known = [{str(place): name for place, name in enumerate(names)} for names in (_ALGORITHMS, _PROTOCOLS)]
    return "/".join(names.get(one, one) for one, names in zip(text.split(" proto "), known, strict=True))


def _fallback(
    transport: Transport, infiniband: Mapping[str, Sequence[str]], env: Mapping[str, str]
) -> SocketFallback | None:
    """Return a finding if NCCL uses sockets between hosts whose ``infiniband`` devices have active ports."""
    equipped = {host: devices for host, devices in infiniband.items() if devices}
    if len(infiniband) < 2 or not equipped or "Socket" not in (transport["network"] or ""):
        return None
    return SocketFallback(
        interface=transport["interface"] or "interface unknown",
        hosts=tuple(equipped),
        devices=tuple(next(iter(equipped.values()))),
        disabled=value if (value := env.get("NCCL_IB_DISABLE", "0")) not in ("", "0") else None,
    )


def _no_peer_access(transport: Transport, log: _Log, env: Mapping[str, str]) -> NoPeerAccess | None:
    """Return a finding if NCCL uses the host's memory between GPUs that can be peers, as far as it says so.

    Without NVLink, and on different sockets of a host, NCCL prefers the host's memory.
    """
    if "SHM" not in (transport["within_host"] or ""):
        return None
    values = {"NCCL_P2P_DISABLE": ("", "0"), "NCCL_P2P_LEVEL": ("", *_LEVELS)}
    set_to = (f"{name}={env[name]}" for name, usual in values.items() if env.get(name, "") not in usual)
    setting = next(set_to, "")
    return NoPeerAccess(setting=setting) if setting or log.get("peers") else None
