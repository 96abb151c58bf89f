"""Counters of a node's network: interfaces, TCP and InfiniBand ports.

Source: the kernel's Documentation/ABI/testing/sysfs-class-net-statistics, sysfs-class-infiniband; proc(5).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Number of interfaces whose files in /sys are read: those that have moved most bytes.
_MOST_INTERFACES = 8
#: Names of the columns of /proc/net/dev that are kept; its other columns are details of them.
_DEV_COLUMNS = {
    0: "rx_bytes",
    2: "rx_errors",
    3: "rx_drops",
    8: "tx_bytes",
    10: "tx_errors",
    11: "tx_drops",
}
_LINK_FILES = {"crc_errors": "statistics/rx_crc_errors", "carrier_changes": "carrier_changes"}
_PORT_COUNTERS = {
    "symbol_error": "symbol_error",
    "link_error_recovery": "link_error_recovery",
    "link_downed": "link_downed",
    "port_rcv_errors": "port_rcv_errors",
    "port_xmit_discards": "port_xmit_discards",
    "rcv_words": "port_rcv_data",
    "xmit_words": "port_xmit_data",
}
#: Largest time for reading InfiniBand counters, each of which can be a request to the device.
_INFINIBAND_S = 0.004


class Network:
    """Reads the counters of one node; ``sys`` and ``proc`` are the mounts of sysfs and procfs."""

    def __init__(self, env: Mapping[str, str], *, proc: Path, sys: Path) -> None:
        self._proc = proc
        self._links = sys / "class/net"
        self._ports = [
            state.parent
            for state in sorted((sys / "class/infiniband").glob("*/ports/*/state"))
            if "ACTIVE" in _text(state)
        ]
        # gloo and NCCL accept lists and patterns; only a plain name identifies the interface.
        names = (env.get("GLOO_SOCKET_IFNAME"), env.get("NCCL_SOCKET_IFNAME"))
        self._named = [name for name in names if name]

    def sample(self) -> dict[str, Any]:
        """Return the counters as they are now."""
        interfaces = self._interfaces()
        return {"interfaces": interfaces, "tcp": self._tcp(), "infiniband": self._infiniband()}

    def change(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
        """Return the changes between two samples, for the interface in use.

        This is the interface that gloo's or NCCL's variable names, else the one that moved most bytes.
        """
        changes = {
            name: _change(before["interfaces"].get(name, {}), counters)
            for name, counters in after["interfaces"].items()
        }
        name = self._in_use(changes)
        ports = after["infiniband"]
        counters = dict.fromkeys((*_DEV_COLUMNS.values(), *_LINK_FILES)) | (changes[name] if name else {})
        return {
            "interface": name,
            "rate_mbit_s": self._rate(name, list(after["interfaces"])),
            **counters,
            **_change(before["tcp"], after["tcp"]),
            "infiniband": {
                port: {"rate": _text(self._port(port) / "rate") or None}
                | _in_bytes(_change(before["infiniband"].get(port, {}), counted))
                for port, counted in ports.items()
            }
            or None,
        }

    def _in_use(self, changes: Mapping[str, Mapping[str, Any]]) -> str | None:
        named = next((name for name in self._named if name in changes), None)
        if named is not None:
            return named

        def moved(name: str) -> tuple[bool, int]:
            one = changes[name]
            total = (one.get("rx_bytes") or 0) + (one.get("tx_bytes") or 0)
            return (name != "lo" and total > 0, total)

        return max(changes, key=moved, default=None)

    def _interfaces(self) -> dict[str, dict[str, int | None]]:
        found: dict[str, dict[str, int | None]] = {}
        for line in _text(self._proc / "net/dev").splitlines()[2:]:
            name, _, rest = line.partition(":")
            numbers = rest.split()
            if len(numbers) > max(_DEV_COLUMNS):
                found[name.strip()] = {key: int(numbers[i]) for i, key in _DEV_COLUMNS.items()}
        if self._is_own(list(found)):
            busiest = sorted(found, key=lambda name: -(found[name]["rx_bytes"] or 0))
            for name in [name for name in busiest if name != "lo"][:_MOST_INTERFACES]:
                link = self._links / name
                found[name] |= {key: _number(link / file) for key, file in _LINK_FILES.items()}
        return found

    def _is_own(self, names: list[str]) -> bool:
        """Return whether /sys shows this network namespace; it can be the mount of another one."""
        try:
            return {path.name for path in self._links.iterdir() if path.is_dir()} == set(names)
        except OSError:
            return False

    def _rate(self, name: str | None, names: list[str]) -> int | None:
        rate = _number(self._links / name / "speed") if name and self._is_own(names) else None
        return rate if rate is not None and rate > 0 else None

    def _tcp(self) -> dict[str, int | None]:
        counts: dict[str, int | None] = {"tcp_segments": None, "tcp_retransmissions": None}
        lines = [
            line.split() for line in _text(self._proc / "net/snmp").splitlines() if line.startswith("Tcp:")
        ]
        if len(lines) == 2:
            values = dict(zip(*lines, strict=False))
            for key, name in (("tcp_segments", "OutSegs"), ("tcp_retransmissions", "RetransSegs")):
                counts[key] = int(values[name]) if name in values else None
        return counts

    def _infiniband(self) -> dict[str, dict[str, int | None]]:
        deadline = time.monotonic() + _INFINIBAND_S
        found: dict[str, dict[str, int | None]] = {}
        for port in self._ports:
            counters = dict.fromkeys(_PORT_COUNTERS)
            for key, file in _PORT_COUNTERS.items():
                if time.monotonic() < deadline:
                    counters[key] = _number(port / "counters" / file)
            found[f"{port.parts[-3]}/{port.name}"] = counters
        return found

    def _port(self, name: str) -> Path:
        return next(port for port in self._ports if f"{port.parts[-3]}/{port.name}" == name)


def _change(before: Mapping[str, int | None], after: Mapping[str, int | None]) -> dict[str, int | None]:
    """Return the increase of each counter; None if a value is missing or the counter was reset."""
    found: dict[str, int | None] = {}
    for name, now in after.items():
        then = before.get(name)
        found[name] = None if now is None or then is None or now < then else now - then
    return found


def _in_bytes(counters: dict[str, int | None]) -> dict[str, int | None]:
    """Replace the data counters of an InfiniBand port, which count words of four bytes."""
    found = {name: value for name, value in counters.items() if not name.endswith("_words")}
    for name in ("rcv", "xmit"):
        words = counters.get(f"{name}_words")
        found[f"{name}_bytes"] = None if words is None else 4 * words
    return found


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.removeprefix("-").isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
