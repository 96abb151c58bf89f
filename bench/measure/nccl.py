"""The way that gradients really travel over NCCL, from what it writes about itself.

NCCL tells in its log, at level INFO, which network it took. It writes the log into a file of the
run's folder (NCCL_DEBUG_FILE) at start-up only, so that nothing is written within a window. The
forms of the lines are those of NCCL's sources (transport/net.cc, graph/topo.cc, net.cc, init.cc,
enqueue.cc) from 2.4 to 2.30. Which algorithm a collective takes is written for every single one
of them, where the subsystem TUNING is asked for; else NCCL does not tell it.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.study.layout import RunFolder

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
