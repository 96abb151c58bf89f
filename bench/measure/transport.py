"""The way that gradients really travel over gloo: the connections that ranks have open to each other."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

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
