"""Print the network interface on the route to another host.

``python -m ddp_scaling_bench.train.network_interface HOST`` gives a job's script the value of
GLOO_SOCKET_IFNAME. By default gloo uses the address of the host name, which on many machines is the
loopback address.
"""

from __future__ import annotations

import socket
import sys

from ..measure.node import interface_with


def main() -> int:
    """Print the interface that sends packets to the host, or an empty line for the loopback.

    Returns:
        The exit code: 1 if the host is unknown or unreachable.
    """
    host = sys.argv[1]
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing, only selects the route
            own = probe.getsockname()[0]
        name = interface_with(own.partition("%")[0]) or ""
    except OSError as error:
        text = f"{host} cannot be found from {socket.gethostname()}: {error.strerror}"
        print(f"bench: error: {text}; name the interface in cluster.env.GLOO_SOCKET_IFNAME", file=sys.stderr)
        return 1
    print("" if name.startswith("lo") else name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
