"""The network interface that leads to another host: ``python -m bench.workload.network_interface HOST``.

gloo takes one interface by its name, and else resolves the own host name, which on many
machines stands for the loopback.
"""

from __future__ import annotations

import socket
import sys

import psutil


def interface_to(host: str) -> str:
    """Return the interface that packets to ``host`` leave by; empty where that is the loopback.

    Raises:
        OSError: the name is not known here, or no route leads there.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing: it only chooses the route
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == own for one in addresses):
            return "" if name.startswith("lo") else name
    return ""


def main() -> int:
    """Print the interface; 1 where the host cannot be found."""
    host = sys.argv[1]
    try:
        print(interface_to(host))
    except OSError as error:
        words = f"{host} cannot be found from {socket.gethostname()}: {error.strerror}"
        print(f"bench: error: {words}; name the interface in cluster.env.GLOO_SOCKET_IFNAME", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
