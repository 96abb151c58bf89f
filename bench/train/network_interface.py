"""Print the network interface on the route to another host.

``python -m bench.train.network_interface HOST`` gives a job's script the value of GLOO_SOCKET_IFNAME. By
default gloo uses the address of the host name, which on many machines is the loopback address.
"""

from __future__ import annotations

import socket
import sys

import psutil


def interface_to(host: str) -> str:
    """Return the interface that sends packets to ``host``, or an empty string for the loopback.

    Raises:
        OSError: the host name is unknown, or there is no route.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing, only selects the route
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == own for one in addresses):
            return "" if name.startswith("lo") else name
    return ""


def main() -> int:
    """Print the interface and return the exit code: 1 if the host is unknown or unreachable."""
    host = sys.argv[1]
    try:
        print(interface_to(host))
    except OSError as error:
        text = f"{host} cannot be found from {socket.gethostname()}: {error.strerror}"
        print(f"bench: error: {text}; name the interface in cluster.env.GLOO_SOCKET_IFNAME", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
